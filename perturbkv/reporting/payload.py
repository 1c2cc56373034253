"""A page's payload from traces: a JSON object and blocks of arrays per trace, without folders of the machine.

Pages are mailed, so file names, models, data sets and failures are shown without their folders.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from perturbkv.analyses.json_values import json_value
from perturbkv.analyses.measurements import Measurements, measured_steps
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, median_level
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.errors import TraceError
from perturbkv.escaping import escape_line
from perturbkv.reporting import arrays
from perturbkv.reporting.arrays import Measured, put_arrays, put_samples, put_steps
from perturbkv.reporting.facts import answers, facts, lacking, title_of, warnings
from perturbkv.reporting.head_measures import ANALYSIS, each_of, held_measures
from perturbkv.reporting.page_blocks import Blocks, Head, Payload, limit
from perturbkv.reporting.prompt_texts import listed, put_texts, tokens_part
from perturbkv.reporting.sides import (
    Compared,
    Places,
    ablation,
    conclusions,
    numbered,
    sides_of,
    start_of,
    with_digests,
)
from perturbkv.trace import Trace


def trace_part(trace: Trace, blocks: Blocks, name: str, full: bool) -> dict[str, Any]:
    """Return a trace's JSON object, before `plain`; its arrays go into `blocks`.

    Raises TraceError as `Measurements`.
    """
    sides = sides_of(trace.run)
    lacks = lacking(trace, len(sides.pairs))
    quick = _attempt(lacks, "pairs", lambda: with_digests(trace))
    measures = held_measures(trace)
    each = tuple(each_of(trace, one) for one in measures)
    made = Measured(trace, quick, measures, each, sides, start_of(trace.run, sides))
    compared = put_arrays(made, blocks)
    answered = answers(trace)
    blocks.room -= _bytes(answered)
    start, head = made.start, _most_changed(made)
    tied = _tied(made, compared.get("propagated"))
    shown = [pair for pair in sides.pairs if {sides.side[place] for place in pair} == {start.baseline, start.treatment}]
    steps = put_steps(made, blocks, lacks)
    texts = put_texts(trace, blocks)
    put_samples(made, blocks, lacks, full)
    told = {
        "name": name,
        "title": title_of(trace),
        **_about(trace),
        "facts": facts(trace, sides),
        "warnings": warnings(trace, sides, start, tied),
        "sides": sides.names,
        "budgets": [str(budget) for budget in sides.budgets],
        "configs": arrays.configs_of(trace, sides),
        "start": {**vars(start), "head": head},
        "measures": _measures(made),
        "distances": list(DISTANCES),
        "kl_floor": arrays.kl_floor(trace),
        "pairs": sides.pairs if quick else [],
        "pairs_left_out": sides.left_out,
        "conclusions": conclusions(quick, sides, start.baseline) if quick else {},
        "ablation": _attempt(lacks, "ablation", lambda: ablation(quick, sides)) if quick else None,
        "answers": answered,
        "losses": listed(trace),
        "step_samples": _step_samples(trace),
        **steps,
        **tokens_part(trace, blocks, texts, shown, head),
    }
    return {**told, "lacks": lacks, "arrays": blocks.arrays}


def _attempt(lacks: dict[str, str], part: str, found: Callable[[], Any]) -> Any:
    """Return the result of `found`; where it raises TraceError, None, and the page shows the message."""
    try:
        return found()
    except TraceError as error:
        lacks[part] = escape_line(str(error))
        return None


def _about(trace: Trace) -> dict[str, Any]:
    """Return the trace's run, samples and layers."""
    tokens, steps = Measurements(trace, ANALYSIS)["prompt_tokens"].astype(int), measured_steps(trace)
    names = _names([name for name, whole in zip(trace.sample_ids, trace.ok, strict=True) if whole])
    layers, heads = trace.arrays["kept_count"].shape[2:]
    return {
        "model": escape_line(trace.run.model),
        "dataset": escape_line(trace.run.dataset),
        "random_weights": trace.run.random_weights,
        "digest": trace.digest,
        "samples": [
            {"id": name, "tokens": int(count), "steps": int(most)}
            for name, count, most in zip(names, tokens, steps, strict=True)
        ],
        "failed": [{"id": escape_line(name), "reason": escape_line(why)} for name, why in trace.failures.items()],
        "interval": "none" if len(names) < 2 else "range" if len(names) < MIN_SAMPLES else "interval",
        "median_level": median_level(len(names)) if len(names) >= MIN_SAMPLES else None,
        "steps": int(steps.max()),
        "layers": [trace.layer_name(place) for place in range(layers)],
        "heads": heads,
    }


def _bytes(part: object) -> int:
    """Return the bytes of a part of the page's JSON."""
    return len(json.dumps(json_value(part), ensure_ascii=False).encode(errors="replace"))


def _names(ids: Sequence[str]) -> tuple[str, ...]:
    """Return distinct display names of samples; none is empty, which means all samples."""
    return numbered([escape_line(name) if name.strip() else "(no id)" for name in ids])


def _measures(made: Measured) -> list[dict[str, Any]]:
    ties = made.verdicts
    return [one.to_dict(ties.index(one.key) if one.key in ties and made.quick else None) for one in made.measures]


def _step_samples(trace: Trace) -> list[int]:
    """Return how many samples have each step."""
    steps = measured_steps(trace)
    return [int((steps > step).sum()) for step in range(int(steps.max()))]


def _most_changed(made: Measured) -> Places:
    """Return layer and head whose mean propagated perturbation differs most between the two sides shown first."""
    places = [made.sides.config(side, made.start.budget) for side in (made.start.baseline, made.start.treatment)]
    found = Measurements(made.trace, ANALYSIS)["perturbation_propagated"].mean(axis=0)
    first, second = (found[place or 0] for place in places)
    layer, head = np.unravel_index(int(np.argmax(np.abs(second - first))), first.shape)
    return int(layer), int(head)


def _tied(made: Measured, compared: Compared | None) -> float | None:
    """Return the share of heads whose means are tied in the pair that is shown first; None where there is none."""
    sides, start = made.sides, made.start
    places = tuple(sides.config(side, start.budget) for side in (start.baseline, start.treatment))
    pair = next((pair for pair in sides.pairs if set(pair) == set(places)), None)
    if compared is None or compared.verdict is None or pair is None:
        return None
    return float((compared.verdict[sides.pairs.index(pair), 0] == 0).mean())


_USUAL = "trace.h5"
"""The default name of an analysis's trace: its folder identifies it."""
_BEGINS = r"(?:~|[A-Za-z]:|\.{1,2})?"
_FOLDERS = re.compile(
    rf"(?<=['\"]){_BEGINS}[\\/][^'\"<>]*[\\/](?=[^'\"<>])"  # between quotes folders may have blanks in their names
    rf"|(?:(?<=file://)|(?<![\w/\\:.<~-])){_BEGINS}(?:[\\/][\w.@+~-]+)+[\\/](?=[\w.@+~-])"
)
"""A path's folders within a sentence: everything before its last part."""


def name_of(trace: Trace) -> str:
    """Return the file's name, with its folder where the name is the default."""
    if not trace.source:
        return "in memory"
    path = Path(os.path.abspath(trace.source))  # noqa: PTH100 # links keep the names that they were given by
    return escape_line(f"{path.parent.name}/{path.name}" if path.name == _USUAL and path.parent.name else path.name)


def portable(trace: Trace) -> Trace:
    """Return the trace with its file, model, data set and failures named without folders."""
    return replace(
        trace,
        source=name_of(trace) if trace.source else "",
        run=replace(trace.run, model=_last(trace.run.model), dataset=_last(trace.run.dataset)),
        failures={name: _FOLDERS.sub("", reason) for name, reason in trace.failures.items()},
    )


def _last(name: str) -> str:
    """Return the last part of a path; hub ids and names of data sets are unchanged."""
    if not (name.startswith(("/", "~", "./", "../", ".\\", "..\\")) or PureWindowsPath(name).is_absolute()):
        return name
    windows = "\\" in name and "/" not in name or PureWindowsPath(name).drive != ""
    return (PureWindowsPath(name) if windows else PurePosixPath(name)).name or name


FORMAT = 1


def payload(traces: Sequence[Trace], *, full: bool = False) -> Payload:
    """Return everything that a page of these traces shows.

    Args:
        traces: at least one.
        full: store every head's tokens and four bytes of each number, however large the page gets.

    Raises TraceError for no trace, for one without a complete sample, and for one that holds NaN in a complete sample.
    """
    if not traces:
        msg = "report needs at least one trace, got none"
        raise TraceError(msg)
    names = numbered([name_of(trace) for trace in traces])
    held = [portable(Measurements(trace, ANALYSIS).trace) for trace in traces]
    parts: list[dict[str, Any]] = []
    blocks: dict[str, bytes] = {}
    for number, (trace, name) in enumerate(zip(held, names, strict=True)):
        own = Blocks(f"t{number}", np.inf if full else _byte_limit(held, trace))
        parts.append(json_value(trace_part(trace, own, name, full)))
        blocks |= own.blocks
    heads = tuple(_head(part) for part in parts)
    document = {"format": FORMAT, "made_with": _made_with(), "traces": parts}
    return Payload(" | ".join(dict.fromkeys(head.title for head in heads)), heads, document, blocks)


def _byte_limit(traces: Sequence[Trace], own: Trace) -> float:
    """Return the bytes that one trace's blocks may take: its share of all values."""
    every = sum(map(_values, traces))
    return limit(every) * _values(own) / every


def _values(trace: Trace) -> int:
    """Return samples × configurations × heads."""
    return int(trace.ok.sum()) * int(np.prod(trace.arrays["kept_count"].shape[1:]))


def _head(part: dict[str, Any]) -> Head:
    facts = tuple((label, value) for label, value in part["facts"])
    return Head(part["name"], part["title"], facts, tuple(part["warnings"]))


def _made_with() -> str:
    from perturbkv import __version__

    return f"perturbkv {__version__}"

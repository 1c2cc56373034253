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
from perturbkv.reporting.arrays import TraceMeasures, put_arrays, put_samples, put_steps
from perturbkv.reporting.facts import answers_part, missing_parts, page_warnings, run_facts, trace_title
from perturbkv.reporting.head_measures import ANALYSIS, available_measures, sample_values
from perturbkv.reporting.page_blocks import Blocks, Payload, TraceHeader, blocks_limit
from perturbkv.reporting.prompt_texts import HeadIndex, loss_count, put_texts, tokens_part
from perturbkv.reporting.sides import (
    PairComparison,
    ablation_settings,
    compare_with_baseline,
    conclusions,
    equal_bytes_part,
    first_choice,
    make_distinct,
    replace_by_digests,
    run_sides,
)
from perturbkv.reporting.text_parts import kinds_part, missed_part, perplexity_part
from perturbkv.trace import Trace


def trace_part(trace: Trace, blocks: Blocks, name: str, full: bool) -> dict[str, Any]:
    """Return a trace's JSON object; store its arrays in `blocks`, what matters most first, while there is room.

    Args:
        trace: the trace, without folders in its names.
        blocks: the trace's empty blocks.
        name: the trace's name, unique on the page.
        full: whether everything is stored, however large the page gets.

    Raises the TraceError of `Measurements`.
    """
    sides = run_sides(trace.run)
    lacks = missing_parts(trace, len(sides.pairs))
    digest_trace = _result_or_reason(lacks, "pairs", lambda: replace_by_digests(trace))
    measures = available_measures(trace)
    values = tuple(sample_values(trace, one) for one in measures)
    measured = TraceMeasures(trace, digest_trace, measures, values, sides, first_choice(trace.run, sides))
    comparisons = put_arrays(measured, blocks)
    answers = answers_part(trace)
    blocks.room -= len(json.dumps(json_value(answers), ensure_ascii=False).encode(errors="replace"))
    start, head = measured.start, _most_changed_head(measured)
    tied = _tied_share(measured, comparisons.get("propagated"))
    shown_first = {start.baseline, start.treatment}
    pairs = [pair for pair in sides.pairs if {sides.side[config] for config in pair} == shown_first]
    steps = put_steps(measured, blocks, lacks)
    texts = put_texts(trace, blocks)
    missed = missed_part(trace, blocks)
    put_samples(measured, blocks, lacks, full)
    ablation = None
    if digest_trace:
        ablation = _result_or_reason(lacks, "ablation", lambda: ablation_settings(digest_trace, sides))
    compared = compare_with_baseline(digest_trace, sides, start.baseline) if digest_trace else {}
    ties = [one.key for one in measures if one.source] if digest_trace else []
    part = {
        "name": name,
        "title": trace_title(trace),
        **_run_part(trace),
        "facts": run_facts(trace, sides),
        "warnings": page_warnings(trace, sides, start, tied),
        "sides": sides.names,
        "budgets": [str(budget) for budget in sides.budgets],
        "configs": arrays.config_rows(trace, sides),
        "start": {**vars(start), "head": head},
        "measures": [one.to_dict(ties.index(one.key) if one.key in ties else None) for one in measures],
        "distances": list(DISTANCES),
        "kl_floor": arrays.kl_floor(trace),
        "pairs": sides.pairs if digest_trace else [],
        "pairs_left_out": sides.left_out,
        "conclusions": conclusions(compared),
        "ablation": ablation,
        "answers": answers,
        "losses": loss_count(trace),
        "step_samples": [int((measured_steps(trace) > step).sum()) for step in range(int(measured_steps(trace).max()))],
        **steps,
        **tokens_part(trace, blocks, texts, pairs, head),
        **kinds_part(digest_trace or trace, compared),
        **perplexity_part(trace),
        **missed,
        **equal_bytes_part(digest_trace or trace),
    }
    return {**part, "lacks": lacks, "arrays": blocks.arrays}


def _result_or_reason(lacks: dict[str, str], part: str, function: Callable[[], Any]) -> Any:
    """Return the function's result, or None after a TraceError, whose message is put on one line in `lacks[part]`."""
    try:
        return function()
    except TraceError as error:
        lacks[part] = escape_line(str(error))
        return None


def _run_part(trace: Trace) -> dict[str, Any]:
    """Return the JSON fields of the run, its samples and layers."""
    tokens, steps = Measurements(trace, ANALYSIS)["prompt_tokens"].astype(int), measured_steps(trace)
    ids = [name for name, ok in zip(trace.sample_ids, trace.ok, strict=True) if ok]
    names = make_distinct([escape_line(name) if name.strip() else "(no id)" for name in ids])  # "" is all samples
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
        "layers": list(trace.layers),
        "decoder_layers": trace.decoder_layers,
        "heads": trace.arrays["kept_count"].shape[-1],
    }


def _most_changed_head(measured: TraceMeasures) -> HeadIndex:
    """Return the (layer, head) whose mean propagated perturbation differs most between the two sides shown first."""
    start = measured.start
    configs = [measured.sides.config(side, start.budget) for side in (start.baseline, start.treatment)]  # both exist
    means = Measurements(measured.trace, ANALYSIS)["perturbation_propagated"].mean(axis=0)
    first, second = (means[config or 0] for config in configs)
    layer, head = np.unravel_index(int(np.argmax(np.abs(second - first))), first.shape)
    return int(layer), int(head)


def _tied_share(measured: TraceMeasures, comparison: PairComparison | None) -> float | None:
    """Return the share of tied heads, by means, in the pair shown first; None without a pair or without verdicts.

    `comparison` is that of all pairs in the measure whose ties count.
    """
    sides, start = measured.sides, measured.start
    configs = {sides.config(side, start.budget) for side in (start.baseline, start.treatment)}
    pair = next((pair for pair in sides.pairs if set(pair) == configs), None)
    if comparison is None or comparison.verdict is None or pair is None:
        return None
    on_means = comparison.verdict[sides.pairs.index(pair), 0]  # (layer, head); those of single samples follow
    return float((on_means == 0).mean())


_DEFAULT_NAME = "trace.h5"
"""Default file name of a trace, which its folder identifies."""
_ROOT = r"(?:~|[A-Za-z]:|\.{1,2})?"
_FOLDERS = re.compile(
    rf"(?<=['\"]){_ROOT}[\\/][^'\"<>]*[\\/](?=[^'\"<>])"  # between quotes folders may have blanks in their names
    rf"|(?:(?<=file://)|(?<![\w/\\:.<~-])){_ROOT}(?:[\\/][\w.@+~-]+)+[\\/](?=[\w.@+~-])"
)
"""The folders of a path within a sentence: everything before its last part."""


def trace_name(trace: Trace) -> str:
    """Return the file name of a trace; a default file name is preceded by the folder."""
    if not trace.source:
        return "in memory"
    path = Path(os.path.abspath(trace.source))  # noqa: PTH100 # links keep their own names
    return escape_line(
        f"{path.parent.name}/{path.name}" if path.name == _DEFAULT_NAME and path.parent.name else path.name
    )


def without_folders(trace: Trace) -> Trace:
    """Return the trace with folders removed from the names of file, model and data set and from failure messages.

    A model of the hub keeps its owner: its revision is a commit, or it is a GGUF file, named behind a colon.
    """
    run = trace.run
    is_of_hub = _HUB_GGUF.fullmatch(run.model) or (_HUB_ID.fullmatch(run.model) and _COMMIT.fullmatch(run.revision))
    shown = {
        run.model: run.model if is_of_hub else _last_path_part(run.model),
        run.dataset: _last_path_part(run.dataset),
    }

    def without(reason: str) -> str:
        """Return a failure's reason with the run's own names, then any other path, without folders."""
        for name, last in shown.items():
            reason = reason.replace(name, last) if "/" in name else reason
        return _FOLDERS.sub("", reason)

    return replace(
        trace,
        source=trace_name(trace) if trace.source else "",
        run=replace(run, model=shown[run.model], dataset=shown[run.dataset]),
        failures={name: without(reason) for name, reason in trace.failures.items()},
    )


_HUB_ID, _COMMIT = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII), re.compile(r"[0-9a-f]{40}")
_HUB_GGUF = re.compile(r"[\w.-]+/[\w.-]+:.+\.gguf", re.ASCII)


def _last_path_part(name: str) -> str:
    """Return the last part of a path; a name without folders is unchanged."""
    windows = "\\" in name and "/" not in name or PureWindowsPath(name).drive != ""
    return (PureWindowsPath(name) if windows else PurePosixPath(name)).name or name


FORMAT = 1


def payload(traces: Sequence[Trace], *, full: bool = False) -> Payload:
    """Return the contents of a report page on the traces.

    Args:
        traces: at least one.
        full: store every head's tokens and four bytes of each number, however large the page gets.

    Raises TraceError for no trace, for one without a complete sample, and for NaN in a complete sample.
    """
    from perturbkv import __version__

    if not traces:
        raise TraceError("report needs at least one trace, got none")
    names = make_distinct([trace_name(trace) for trace in traces])
    prepared = [without_folders(Measurements(trace, ANALYSIS).trace) for trace in traces]
    parts: list[dict[str, Any]] = []
    blocks: dict[str, bytes] = {}
    values = sum(map(_value_count, prepared))
    limit = blocks_limit(values)
    for number, (trace, name) in enumerate(zip(prepared, names, strict=True)):
        trace_blocks = Blocks(f"t{number}", np.inf if full else limit * _value_count(trace) / values)
        parts.append(json_value(trace_part(trace, trace_blocks, name, full)))
        blocks |= trace_blocks.blocks
    headers = tuple(
        TraceHeader(part["name"], part["title"], tuple(map(tuple, part["facts"])), tuple(part["warnings"]))
        for part in parts
    )
    document = {"format": FORMAT, "made_with": f"perturbkv {__version__}", "traces": parts}
    title = " | ".join(dict.fromkeys(header.title for header in headers))
    return Payload(title, headers, document, blocks)


def _value_count(trace: Trace) -> int:
    """Return the number of a trace's values: samples × configurations × heads."""
    return int(trace.ok.sum()) * int(np.prod(trace.arrays["kept_count"].shape[1:]))

"""One trace's part of a page: its JSON object, and its arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.measurements import measured_steps, values
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import LEAST, median_level
from perturbkv.errors import TraceError
from perturbkv.reporting import configurations
from perturbkv.reporting.answers import answers
from perturbkv.reporting.arrays import Measured, put_arrays, put_samples, put_steps
from perturbkv.reporting.comparing import Compared, with_digests
from perturbkv.reporting.facts import facts, title_of, warnings
from perturbkv.reporting.head_measures import ANALYSIS, each_of, held_measures
from perturbkv.reporting.heads_kept import listed
from perturbkv.reporting.lacking import lacking
from perturbkv.reporting.page_blocks import Blocks
from perturbkv.reporting.sides import Places, numbered, sides_of, start_of
from perturbkv.reporting.tokens_part import put_texts, tokens_part
from perturbkv.reporting.told import ablation, conclusions
from perturbkv.trace import Trace
from perturbkv.visible import line


def trace_part(trace: Trace, blocks: Blocks, name: str, full: bool) -> dict[str, Any]:
    """The JSON object of a trace, not yet plain; its arrays go into `blocks`. Raises TraceError as `reading.values`."""
    sides = sides_of(trace.run)
    lacks = lacking(trace, len(sides.pairs))
    quick = _told(lacks, "pairs", lambda: with_digests(trace))
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
        "configs": configurations.configs_of(trace, sides),
        "start": {**vars(start), "head": head},
        "measures": _measures(made),
        "distances": list(DISTANCES),
        "kl_floor": configurations.kl_floor(trace),
        "pairs": sides.pairs if quick else [],
        "pairs_left_out": sides.left_out,
        "conclusions": conclusions(quick, sides, start.baseline) if quick else {},
        "ablation": _told(lacks, "ablation", lambda: ablation(quick, sides)) if quick else None,
        "answers": answered,
        "losses": listed(trace),
        "step_samples": _step_samples(trace),
        **steps,
        **tokens_part(trace, blocks, texts, shown, head),
    }
    return {**told, "lacks": lacks, "arrays": blocks.arrays}


def _told(lacks: dict[str, str], part: str, found: Callable[[], Any]) -> Any:
    """What is found; where it cannot be, None, and the page says why."""
    try:
        return found()
    except TraceError as error:
        lacks[part] = line(str(error))
        return None


def _about(trace: Trace) -> dict[str, Any]:
    """Which run, samples and layers."""
    tokens, steps = values(trace, "prompt_tokens", ANALYSIS).astype(int), measured_steps(trace)
    names = _names([name for name, whole in zip(trace.sample_ids, trace.ok, strict=True) if whole])
    layers, heads = trace.arrays["kept_count"].shape[2:]
    return {
        "model": line(trace.run.model),
        "dataset": line(trace.run.dataset),
        "random_weights": trace.run.random_weights,
        "digest": trace.digest,
        "samples": [
            {"id": name, "tokens": int(count), "steps": int(most)}
            for name, count, most in zip(names, tokens, steps, strict=True)
        ],
        "failed": [{"id": line(name), "reason": line(why)} for name, why in trace.failures.items()],
        "interval": "none" if len(names) < 2 else "range" if len(names) < LEAST else "interval",
        "median_level": median_level(len(names)) if len(names) >= LEAST else None,
        "steps": int(steps.max()),
        "layers": [trace.layer_name(place) for place in range(layers)],
        "heads": heads,
    }


def _bytes(part: object) -> int:
    """What a part of the page's JSON takes."""
    return len(json.dumps(plain(part), ensure_ascii=False).encode(errors="replace"))


def _names(ids: Sequence[str]) -> tuple[str, ...]:
    """Samples by names that tell them apart as they are shown; none is empty, which stands for all."""
    return numbered([line(name) if name.strip() else "(no id)" for name in ids])


def _measures(made: Measured) -> list[dict[str, Any]]:
    ties = made.verdicts
    return [one.to_dict(ties.index(one.key) if one.key in ties and made.quick else None) for one in made.measures]


def _step_samples(trace: Trace) -> list[int]:
    """How many samples have each step."""
    steps = measured_steps(trace)
    return [int((steps > step).sum()) for step in range(int(steps.max()))]


def _most_changed(made: Measured) -> Places:
    """Layer and head whose mean propagated perturbation differs most between the two sides that are shown first."""
    places = [made.sides.config(side, made.start.budget) for side in (made.start.baseline, made.start.treatment)]
    found = values(made.trace, "perturbation_propagated", ANALYSIS, 0).mean(axis=0)
    first, second = (found[place or 0] for place in places)
    layer, head = np.unravel_index(int(np.argmax(np.abs(second - first))), first.shape)
    return int(layer), int(head)


def _tied(made: Measured, compared: Compared | None) -> float | None:
    """The share of heads that are tied by their means in the pair that is shown first; None where there is none."""
    sides, start = made.sides, made.start
    places = tuple(sides.config(side, start.budget) for side in (start.baseline, start.treatment))
    pair = next((pair for pair in sides.pairs if set(pair) == set(places)), None)
    if compared is None or compared.verdict is None or pair is None:
        return None
    return float((compared.verdict[sides.pairs.index(pair), 0] == 0).mean())

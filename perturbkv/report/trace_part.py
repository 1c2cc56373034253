"""One trace's part of a page: its JSON object, and its arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.intervals import LEAST
from perturbkv.analyses.reading import Floats, measured_steps, values
from perturbkv.errors import TraceError
from perturbkv.report import configurations
from perturbkv.report.answers import answers
from perturbkv.report.blocks import Blocks
from perturbkv.report.comparing import Compared, Same, compare, drift_ratios, same_sets, with_digests
from perturbkv.report.facts import facts, title_of, warnings
from perturbkv.report.heads_kept import listed
from perturbkv.report.lacking import lacking
from perturbkv.report.measures import (
    ANALYSIS,
    FIRST,
    STEPPED,
    Measure,
    by_step,
    each_of,
    held_measures,
    mean_of,
)
from perturbkv.report.quantising import four_a_byte, log_scale
from perturbkv.report.sides import Places, Sides, Start, sides_of, start_of
from perturbkv.report.tokens_part import put_texts, tokens_part
from perturbkv.report.told import ablation, conclusions
from perturbkv.trace import Trace
from perturbkv.visible import line

_MOST_STEPS, _MOST_SAMPLES = 0.5, 0.85
"""Of the room that is left, what steps and single samples may take: the rest is for what heads keep."""
_LEAST_SAMPLES = 2
"""Measures whose single samples every page holds."""
_LEFT_OUT = "left out to keep the page small; --full keeps them"


@dataclass(frozen=True)
class Measured:
    """What is worked on: a trace whose kept sets are compared by digests, its measures, its sides.

    Attributes:
        trace: as it was given.
        quick: the same for comparisons; None where kept sets cannot be compared.
        measures: that it holds; `each` of them is (sample, config, layer, head).
        sides, start: its configurations, and what is shown first.
    """

    trace: Trace
    quick: Trace | None
    measures: tuple[Measure, ...]
    each: tuple[Floats, ...]
    sides: Sides
    start: Start

    @property
    def verdicts(self) -> list[str]:
        """Keys of the measures that have verdicts."""
        return [one.key for one in self.measures if one.source]


def trace_part(trace: Trace, blocks: Blocks, name: str, full: bool) -> dict[str, Any]:
    """The JSON object of a trace, not yet plain; its arrays go into `blocks`. Raises TraceError as `reading.values`."""
    sides = sides_of(trace.run)
    lacks = lacking(trace)
    quick = _told(lacks, "pairs", lambda: with_digests(trace))
    measures = held_measures(trace)
    each = tuple(each_of(trace, one) for one in measures)
    made = Measured(trace, quick, measures, each, sides, start_of(trace.run, sides))
    compared = _arrays(made, blocks)
    start, head = made.start, _most_changed(made)
    tied = _tied(made, compared.get("propagated"))
    shown = [pair for pair in sides.pairs if {sides.side[place] for place in pair} == {start.baseline, start.treatment}]
    steps = _steps(made, blocks, lacks)
    texts = put_texts(trace, blocks)
    _samples(made, blocks, lacks, full)
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
        "answers": answers(trace),
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
    names = [name for name, whole in zip(trace.sample_ids, trace.ok, strict=True) if whole]
    layers, heads = trace.arrays["kept_count"].shape[2:]
    return {
        "model": line(trace.run.model),
        "dataset": line(trace.run.dataset),
        "random_weights": trace.run.random_weights,
        "digest": trace.digest,
        "samples": [
            {"id": line(name), "tokens": int(count), "steps": int(most)}
            for name, count, most in zip(names, tokens, steps, strict=True)
        ],
        "failed": [{"id": line(name), "reason": line(why)} for name, why in trace.failures.items()],
        "interval": "none" if len(names) < 2 else "range" if len(names) < LEAST else "interval",
        "steps": int(steps.max()),
        "layers": [trace.layer_name(place) for place in range(layers)],
        "heads": heads,
    }


def _measures(made: Measured) -> list[dict[str, Any]]:
    ties = made.verdicts
    return [one.to_dict(ties.index(one.key) if one.key in ties and made.quick else None) for one in made.measures]


def _arrays(made: Measured, blocks: Blocks) -> dict[str, Compared]:
    """All arrays but those of steps and single samples, held in `blocks`; measure -> how its pairs compare."""
    means, totals, floors = [], [], []
    compared: dict[str, Compared] = {}
    same = same_sets(made.quick, made.sides.pairs) if made.quick and made.sides.pairs else None
    for one, each in zip(made.measures, made.each, strict=True):
        means.append(mean_of(each))
        totals.append(configurations.totals(made.trace, one, each))
        if same is not None and made.quick is not None:
            compared[one.key] = compare(made.quick, one, each, made.sides.pairs, same)
        if one.source:
            floors.append(_floor(made.trace, one))
    blocks.floats("mean", np.stack(means))
    blocks.floats("total", np.stack(totals))
    blocks.floats("floor", np.stack(floors))
    blocks.floats("norm", values(made.trace, "output_norm", ANALYSIS, 0).mean(axis=0))
    _pairs(blocks, compared)
    _drift(made, blocks, same)
    blocks.floats("kl", configurations.kl(made.trace))
    blocks.floats("top1", configurations.top1(made.trace))
    return compared


def _pairs(blocks: Blocks, compared: dict[str, Compared]) -> None:
    if not compared:
        return
    blocks.floats("pair_sum", np.stack([one.sums for one in compared.values()]))
    blocks.floats("pair_better", np.stack([one.better for one in compared.values() if one.better is not None]))
    found = np.stack([one.verdict for one in compared.values() if one.verdict is not None])
    blocks.packed("verdict", four_a_byte(found), found.shape)


def _drift(made: Measured, blocks: Blocks, same: Same | None) -> None:
    each = configurations.drifts(made.trace)
    blocks.floats("drift", configurations.drift_means(each))
    blocks.codes("drift_sample", each, [log_scale(one) for one in each])
    blocks.floats("drift_floor", configurations.drift_floors(made.trace))
    if same is not None and made.quick is not None:
        blocks.floats("drift_ratio", drift_ratios(made.quick, made.sides.pairs, same))


def _floor(trace: Trace, measure: Measure) -> Floats:
    """(layer, head) mean noise floor of a perturbation."""
    from perturbkv.analyses import heads

    return np.asarray(heads.with_floor(trace, measure.source, measure.distance, 0)[1].mean(axis=0))


def _steps(made: Measured, blocks: Blocks, lacks: dict[str, str]) -> dict[str, Any]:
    """The means of every step, where there is more than one."""
    if int(measured_steps(made.trace).max()) < 2:
        return {}
    stepped = [one for one in made.measures if one.key in STEPPED]
    found = [by_step(made.trace, one) for one in stepped]
    scales = [one.scale(part) for one, part in zip(stepped, found, strict=True)]
    if blocks.codes("step_mean", found, scales, _MOST_STEPS) > 1:
        lacks["steps"] = f"the heads of each decode step are {_LEFT_OUT}"
        return {}
    return {"stepped": [one.key for one in stepped]}


def _samples(made: Measured, blocks: Blocks, lacks: dict[str, str], full: bool) -> None:
    """The measures of every sample: all of them, or as many as leave room for what heads keep, the first ones first."""
    if full:
        blocks.floats("sample", np.stack([each.astype(np.float32) for each in made.each]))
        blocks.arrays["sample"]["measures"] = list(range(len(made.each)))
        return
    keys = [one.key for one in made.measures]
    order = sorted(
        range(len(keys)), key=lambda place: (FIRST.index(keys[place]) if keys[place] in FIRST else 99, place)
    )
    count, taken = len(order), np.inf
    while taken > 1:
        held = sorted(order[:count])
        some, scales = [made.each[place] for place in held], [made.measures[one].scale(made.each[one]) for one in held]
        taken = blocks.codes("sample", some, scales, _MOST_SAMPLES if count > _LEAST_SAMPLES else np.inf)
        count = count if taken <= 1 else max(_LEAST_SAMPLES, min(count - 1, int(count / taken)))
    blocks.arrays["sample"]["measures"] = held
    if count < len(order):
        names = ", ".join(made.measures[place].name for place in sorted(order[count:]))
        lacks["samples"] = f"single samples of {names} are {_LEFT_OUT}"


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

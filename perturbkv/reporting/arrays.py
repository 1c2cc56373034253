"""The arrays of one trace's part of a page, held as blocks: means, pairs, drift, single samples, decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.measurements import Floats, measured_steps, values
from perturbkv.reporting import configurations
from perturbkv.reporting.comparing import Compared, Same, compare, drift_ratios, same_sets
from perturbkv.reporting.head_measures import ANALYSIS, FIRST, STEPPED, Measure, by_step, mean_of
from perturbkv.reporting.page_blocks import Blocks
from perturbkv.reporting.quantising import four_a_byte, log_scale
from perturbkv.reporting.sides import Sides, Start
from perturbkv.trace import Trace

_MOST_STEPS, _MOST_SAMPLES = 0.5, 0.75
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


def put_arrays(made: Measured, blocks: Blocks) -> dict[str, Compared]:
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
    blocks.codes("drift_sample", list(each), [log_scale(one) for one in each])
    blocks.floats("drift_floor", configurations.drift_floors(made.trace))
    if same is not None and made.quick is not None:
        blocks.floats("drift_ratio", drift_ratios(made.quick, made.sides.pairs, same))


def _floor(trace: Trace, measure: Measure) -> Floats:
    """(layer, head) mean noise floor of a perturbation."""
    return np.asarray(head_comparison.with_floor(trace, measure.source, measure.distance, 0)[1].mean(axis=0))


def put_steps(made: Measured, blocks: Blocks, lacks: dict[str, str]) -> dict[str, Any]:
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


def put_samples(made: Measured, blocks: Blocks, lacks: dict[str, str], full: bool) -> None:
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

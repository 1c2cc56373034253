"""The arrays of one trace's part of a page: means, totals, pairs, drift, single samples and decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import sum_ratio
from perturbkv.analyses.layers import drift
from perturbkv.analyses.measurements import Floats, Measurements, measured_steps
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import POSITIVE, estimate_mean, share_kind
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.errors import TraceError
from perturbkv.escaping import escape_line
from perturbkv.reporting.head_measures import ANALYSIS, FIRST, SHARE, STEPPED, Measure, by_step, mean_of
from perturbkv.reporting.page_blocks import Blocks, four_a_byte, log_scale
from perturbkv.reporting.sides import (
    Compared,
    Same,
    Sides,
    Start,
    compare,
    drift_ratios,
    same_sets,
    with_band,
    with_ends,
)
from perturbkv.trace import Trace


def configs_of(trace: Trace, sides: Sides) -> list[dict[str, Any]]:
    """Return each configuration's label, side, budget, and its cache's share of entries and bytes, NaN if unknown."""
    held, size = Measurements(trace, ANALYSIS).cache_shares, _bytes(trace)
    return [
        {
            "label": escape_line(config.label()),
            "side": side,
            "budget": budget,
            "held": float(entries),
            "bytes": float(share),
        }
        for config, side, budget, entries, share in zip(
            trace.run.configs, sides.side, sides.budget, held, size, strict=True
        )
    ]


def configuration_totals(trace: Trace, measure: Measure, each: Floats) -> Floats:
    """Return (config, 3): Σ over heads and samples over Σ of the outputs' norms, with intervals.

    Where the measure has no norm it is the mean over heads.
    """
    if measure.norm is None:
        kind = share_kind(0) if measure.kind == SHARE else POSITIVE
        found = [estimate_mean(_mean_of_heads(each[:, place]), kind) for place in range(each.shape[1])]
        return np.array([with_ends(one.value, one.interval) for one in found])
    if measure.norm not in trace.arrays:
        return np.full((each.shape[1], 3), np.nan)
    norm = Measurements(trace, ANALYSIS)[measure.norm]
    with np.errstate(invalid="ignore"):  # of bounds without an end
        return np.array([with_ends(*sum_ratio(norm, each[:, place])) for place in range(each.shape[1])])


def kl(trace: Trace) -> Floats:
    """Return (config, 3): median over samples of KL(full ‖ evicted), nat, with its interval."""
    found = Measurements(trace, ANALYSIS)["logit_kl"]
    return with_band(np.median(found, axis=0), intervals.of_medians(found))


def kl_floor(trace: Trace) -> float:
    """Return the median over samples of KL with everything kept, nat."""
    return float(np.median(Measurements(trace, ANALYSIS)["logit_kl_noise_floor"]))


def top1(trace: Trace) -> Floats:
    """Return (config, 3): the share of samples with the same next token, with its exact interval."""
    found = Measurements(trace, ANALYSIS)["top1_agreement"] > 0
    return np.array([with_ends(float(one.mean()), intervals.of_share(one)) for one in found.T])


def drifts(trace: Trace) -> Floats:
    """Return the drift after each layer (distance, sample, config, layer)."""
    measured = Measurements(trace, ANALYSIS)
    return np.stack([drift.distances(measured, distance) for distance in DISTANCES])


def drift_means(each: Floats) -> Floats:
    """Return the mean of `drifts` with intervals (distance, config, layer, 3)."""
    return np.stack([
        np.stack([with_band(*drift.mean_drift(one[:, config])) for config in range(one.shape[1])]) for one in each
    ])  # fmt: skip


def drift_floors(trace: Trace) -> Floats:
    """Return the mean noise floor of drift (distance, layer); NaN where the trace has none of the distance."""
    measured = Measurements(trace, ANALYSIS)
    each = [drift.floors(measured, distance) for distance in DISTANCES]
    nothing = np.full(np.shape(trace.arrays["hidden_norm"])[-1], np.nan)
    return np.stack([nothing if floor is None else floor.mean(axis=0) for floor in each])


def evicted_nothing(trace: Trace) -> Sequence[str]:
    """Return the labels of configurations whose budget covered every sample's prompt."""
    moved = Measurements(trace, ANALYSIS)["evicted"].max(axis=0) > 0
    return [config.label() for config, any_went in zip(trace.run.configs, moved.tolist(), strict=True) if not any_went]


def _bytes(trace: Trace) -> Floats:
    """Return (config,) cache bytes over those of the full cache in 16 bits; NaN where the trace does not have them."""
    try:
        return Measurements(trace, ANALYSIS).byte_shares
    except TraceError:
        return np.full(len(trace.run.configs), np.nan)


def _mean_of_heads(each: Floats) -> Floats:
    """Return the mean (sample,) of (sample, layer, head) over the heads that are not NaN; NaN where all are."""
    held = ~np.isnan(each)
    counts = held.sum(axis=(1, 2))
    return np.asarray(np.where(held, each, 0).sum(axis=(1, 2)) / np.where(counts, counts, np.nan))


_MOST_STEPS, _MOST_SAMPLES = 0.5, 0.75
"""Shares of the remaining bytes that steps and single samples may take: the rest is for kept sets."""
_LEAST_SAMPLES = 2
"""Measures whose single samples every page has."""
_LEFT_OUT = "left out to keep the page small; --full keeps them"


@dataclass(frozen=True)
class Measured:
    """A trace with its measures and sides, as the arrays are computed from them.

    Attributes:
        trace: the trace as it was given.
        quick: the trace with digests instead of kept sets; None where kept sets cannot be compared.
        measures: the measures that it has.
        each: per measure (sample, config, layer, head).
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
        """The keys of the measures that have verdicts."""
        return [one.key for one in self.measures if one.source]


def put_arrays(made: Measured, blocks: Blocks) -> dict[str, Compared]:
    """Store all arrays but those of steps and single samples in `blocks`.

    Return measure -> the comparison of its pairs.
    """
    means, totals, floors = [], [], []
    compared: dict[str, Compared] = {}
    same = same_sets(made.quick, made.sides.pairs) if made.quick and made.sides.pairs else None
    for one, each in zip(made.measures, made.each, strict=True):
        means.append(mean_of(each))
        totals.append(configuration_totals(made.trace, one, each))
        if same is not None and made.quick is not None:
            compared[one.key] = compare(made.quick, one, each, made.sides.pairs, same)
        if one.source:
            floors.append(_floor(made.trace, one))
    blocks.floats("mean", np.stack(means))
    blocks.floats("total", np.stack(totals))
    blocks.floats("floor", np.stack(floors))
    blocks.floats("norm", Measurements(made.trace, ANALYSIS)["output_norm"].mean(axis=0))
    _pairs(blocks, compared)
    _drift(made, blocks, same)
    blocks.floats("kl", kl(made.trace))
    blocks.floats("top1", top1(made.trace))
    return compared


def _pairs(blocks: Blocks, compared: dict[str, Compared]) -> None:
    if not compared:
        return
    blocks.floats("pair_sum", np.stack([one.sums for one in compared.values()]))
    blocks.floats("pair_better", np.stack([one.better for one in compared.values() if one.better is not None]))
    found = np.stack([one.verdict for one in compared.values() if one.verdict is not None])
    blocks.packed("verdict", four_a_byte(found), found.shape)


def _drift(made: Measured, blocks: Blocks, same: Same | None) -> None:
    each = drifts(made.trace)
    blocks.floats("drift", drift_means(each))
    blocks.codes("drift_sample", list(each), [log_scale(one) for one in each])
    blocks.floats("drift_floor", drift_floors(made.trace))
    if same is not None and made.quick is not None:
        blocks.floats("drift_ratio", drift_ratios(made.quick, made.sides.pairs, same))


def _floor(trace: Trace, measure: Measure) -> Floats:
    """Return the mean noise floor (layer, head) of a perturbation."""
    measured = Measurements(trace, "report")
    return np.asarray(
        head_comparison.perturbation_and_floor(measured, measure.source, measure.distance)[1].mean(axis=0)
    )


def put_steps(made: Measured, blocks: Blocks, lacks: dict[str, str]) -> dict[str, Any]:
    """Store the means of every step, where there is more than one."""
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
    """Store the measures of every sample: all if `full`, else the first ones that leave bytes for kept sets."""
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

"""The arrays of a trace on a page: means, totals, pairs, drift, single samples and decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.heads.head_comparison import sum_ratio
from perturbkv.analyses.layers import drift
from perturbkv.analyses.measurements import Floats, Measurements, measured_steps
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import POSITIVE, SIGNED, estimate_mean, share_kind
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.escaping import escape_line
from perturbkv.reporting.head_measures import (
    ANALYSIS,
    EFFECT,
    FIRST,
    SHARE,
    STEPPED,
    Measure,
    mean_over_samples,
    means_by_step,
)
from perturbkv.reporting.page_blocks import Blocks, log_scale, pack_verdicts
from perturbkv.reporting.sides import (
    EqualSets,
    PairComparison,
    Sides,
    Start,
    compare_pairs,
    drift_ratios,
    equal_sets,
    with_band,
    with_interval,
)
from perturbkv.schema import AT_CHOSEN_STEPS
from perturbkv.trace import Trace


def config_rows(trace: Trace, sides: Sides) -> list[dict[str, Any]]:
    """Return the configurations as JSON objects: label, side, budget and cache shares (NaN if unknown)."""
    measured = Measurements(trace, ANALYSIS)
    return [
        {
            "label": escape_line(config.label()),
            "side": side,
            "budget": budget,
            "held": float(cache_share),
            "bytes": float(byte_share),
        }
        for config, side, budget, cache_share, byte_share in zip(
            trace.run.configs, sides.side, sides.budget, measured.cache_shares, measured.byte_shares, strict=True
        )
    ]


def config_totals(trace: Trace, measure: Measure, values: Floats) -> Floats:
    """Return (config, 3): Σ measure / Σ output norm over heads and samples, with its interval.

    A measure without a norm has the mean over heads instead; one whose norm the trace lacks has NaN. `values` are
    (sample, config, layer, head).
    """
    if measure.norm is None:
        kind = {SHARE: share_kind(0), EFFECT: SIGNED}.get(measure.kind, POSITIVE)
        means = [estimate_mean(_mean_over_heads(values[:, config]), kind) for config in range(values.shape[1])]
        return np.array([with_interval(one.value, one.interval) for one in means])
    if measure.norm not in trace.arrays:
        return np.full((values.shape[1], 3), np.nan)
    norm = Measurements(trace, ANALYSIS)[measure.norm]
    with np.errstate(invalid="ignore"):  # bounds may be infinite
        return np.array([with_interval(*sum_ratio(norm, values[:, config])) for config in range(values.shape[1])])


def kl_floor(trace: Trace) -> float:
    """Return the median over samples of KL with everything kept, in nats."""
    return float(np.median(Measurements(trace, ANALYSIS)["logit_kl_noise_floor"]))


def drift_values(trace: Trace) -> Floats:
    """Return the drift of the residual stream after every layer, (distance, sample, config, layer)."""
    measured = Measurements(trace, ANALYSIS)
    return np.stack([drift.drift_values(measured, distance) for distance in DISTANCES])


def drift_floors(trace: Trace) -> Floats:
    """Return the mean noise floor of drift (distance, layer); NaN for distances without floors in the trace."""
    measured = Measurements(trace, ANALYSIS)
    each = [drift.drift_floors(measured, distance) for distance in DISTANCES]
    nothing = np.full(trace.decoder_layers, np.nan)
    return np.stack([nothing if floor is None else floor.mean(axis=0) for floor in each])


def _mean_over_heads(values: Floats) -> Floats:
    """Return (sample,) the mean over layers and heads, ignoring NaN; NaN for samples with NaN only."""
    known = ~np.isnan(values)
    counts = known.sum(axis=(1, 2))
    return np.asarray(np.where(known, values, 0).sum(axis=(1, 2)) / np.where(counts, counts, np.nan))


_MOST_STEPS, _MOST_SAMPLES = 0.5, 0.75
"""Largest shares of the remaining bytes for steps and for single samples; the rest is for kept sets."""
_LEAST_SAMPLES = 2
"""Number of measures whose single samples every page has."""
_LEFT_OUT = "left out to keep the page small; --full keeps them"


@dataclass(frozen=True)
class TraceMeasures:
    """A trace with its measures and sides, from which the page's arrays are computed.

    Attributes:
        trace: the trace.
        digest_trace: the trace with digests in place of kept sets; None where kept sets cannot be compared.
        measures: the measures that it has.
        values: per measure its values (sample, config, layer, head).
        sides, start: its configurations, and the first choice of the page.
    """

    trace: Trace
    digest_trace: Trace | None
    measures: tuple[Measure, ...]
    values: tuple[Floats, ...]
    sides: Sides
    start: Start


def put_arrays(measured: TraceMeasures, blocks: Blocks) -> dict[str, PairComparison]:
    """Store all arrays except steps and single samples in `blocks`; return measure -> comparison of pairs."""
    means, totals, floors = [], [], []
    comparisons: dict[str, PairComparison] = {}
    digest_trace, pairs = measured.digest_trace, measured.sides.pairs
    equal = equal_sets(digest_trace, pairs) if digest_trace and pairs else None
    for one, values in zip(measured.measures, measured.values, strict=True):
        means.append(mean_over_samples(values))
        totals.append(config_totals(measured.trace, one, values))
        if equal is not None and digest_trace is not None:
            comparisons[one.key] = compare_pairs(digest_trace, one, values, pairs, equal)
        if one.source:
            floors.append(np.asarray(Measurements(measured.trace, ANALYSIS)[one.floor].mean(axis=0)))
    blocks.put_floats("mean", np.stack(means))
    blocks.put_floats("total", np.stack(totals))
    blocks.put_floats("floor", np.stack(floors))
    blocks.put_floats("norm", Measurements(measured.trace, ANALYSIS)["output_norm"].mean(axis=0))
    if comparisons:  # sums, shares of better heads and verdicts of all pairs
        compared = comparisons.values()
        blocks.put_floats("pair_sum", np.stack([one.sums for one in compared]))
        blocks.put_floats("pair_better", np.stack([one.better for one in compared if one.better is not None]))
        verdicts = np.stack([one.verdict for one in compared if one.verdict is not None])
        blocks.put_packed("verdict", pack_verdicts(verdicts), verdicts.shape)
    _put_drift(measured, blocks, equal)
    divergence = Measurements(measured.trace, ANALYSIS)["logit_kl"]
    blocks.put_floats("kl", with_band(np.median(divergence, axis=0), intervals.of_medians(divergence)))
    agrees = Measurements(measured.trace, ANALYSIS)["top1_agreement"]
    shares = [with_interval(float(one.mean()), intervals.of_shares(one)) for one in agrees.T]
    blocks.put_floats("top1", np.array(shares))
    return comparisons


def _put_drift(measured: TraceMeasures, blocks: Blocks, equal: EqualSets | None) -> None:
    """Store drift and its noise floors in `blocks`, and the pairs' drift ratios unless `equal` is None."""
    each = drift_values(measured.trace)
    means = [
        [with_band(values.mean(axis=0), intervals.of_means(values, POSITIVE)) for values in np.moveaxis(one, 1, 0)]
        for one in each
    ]
    blocks.put_floats("drift", np.array(means))
    blocks.put_codes("drift_sample", list(each), [log_scale(one) for one in each])
    blocks.put_floats("drift_floor", drift_floors(measured.trace))
    if equal is not None and measured.digest_trace is not None:
        blocks.put_floats("drift_ratio", drift_ratios(measured.digest_trace, measured.sides.pairs, equal))


def put_steps(measured: TraceMeasures, blocks: Blocks, lacks: dict[str, str]) -> dict[str, Any]:
    """Store the means of every decode step; return the JSON field `stepped`, the keys of their measures.

    Measures that are known at some steps alone are left out. Nothing is stored or returned for a single step, and where
    they do not fit: then `lacks` gets the reason.
    """
    if int(measured_steps(measured.trace).max()) < 2:
        return {}
    left_out = AT_CHOSEN_STEPS if measured.trace.run.isolated_every > 1 else ()
    stepped = [one for one in measured.measures if one.key in STEPPED and one.variable not in left_out]
    means = [means_by_step(measured.trace, one) for one in stepped]
    scales = [one.scale(part) for one, part in zip(stepped, means, strict=True)]
    if blocks.put_codes("step_mean", means, scales, _MOST_STEPS) > 1:
        lacks["steps"] = f"the heads of each decode step are {_LEFT_OUT}"
        return {}
    return {"stepped": [one.key for one in stepped]}


def put_samples(measured: TraceMeasures, blocks: Blocks, lacks: dict[str, str], full: bool) -> None:
    """Store the single samples of every measure; unless `full`, of as many measures as fit, those of `FIRST` first.

    `lacks` gets the reason where some are left out.
    """
    if full:
        blocks.put_floats("sample", np.stack([values.astype(np.float32) for values in measured.values]))
        blocks.arrays["sample"]["measures"] = list(range(len(measured.values)))
        return
    keys = [one.key for one in measured.measures]
    order = sorted(range(len(keys)), key=lambda index: FIRST.index(keys[index]) if keys[index] in FIRST else len(FIRST))
    count, taken = len(order), np.inf
    while taken > 1:  # with fewer measures at each try, until they fit
        chosen = sorted(order[:count])
        values = [measured.values[index] for index in chosen]
        scales = [measured.measures[index].scale(measured.values[index]) for index in chosen]
        taken = blocks.put_codes("sample", values, scales, _MOST_SAMPLES if count > _LEAST_SAMPLES else np.inf)
        count = count if taken <= 1 else max(_LEAST_SAMPLES, min(count - 1, int(count / taken)))
    blocks.arrays["sample"]["measures"] = chosen
    if count < len(order):
        names = ", ".join(measured.measures[index].name for index in sorted(order[count:]))
        lacks["samples"] = f"single samples of {names} are {_LEFT_OUT}"

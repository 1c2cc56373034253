"""Each configuration by itself: its sums, its drift, KL and the next token, what its cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.heads.head_kind import sum_ratio
from perturbkv.analyses.layers import drift
from perturbkv.analyses.measurements import Floats, byte_shares, held_shares, values
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.estimates import over_prompts
from perturbkv.analyses.stats.intervals import POSITIVE, share_of
from perturbkv.errors import TraceError
from perturbkv.reporting.comparing import with_band, with_ends
from perturbkv.reporting.head_measures import ANALYSIS, SHARE, Measure
from perturbkv.reporting.sides import Sides
from perturbkv.trace import Trace
from perturbkv.visible import line


def configs_of(trace: Trace, sides: Sides) -> list[dict[str, Any]]:
    """Label, side, budget, and what the cache holds over the full one, in entries and in bytes; NaN where unknown."""
    held, size = held_shares(trace, ANALYSIS), _bytes(trace)
    return [
        {"label": line(config.label()), "side": side, "budget": budget, "held": float(entries), "bytes": float(share)}
        for config, side, budget, entries, share in zip(
            trace.run.configs, sides.side, sides.budget, held, size, strict=True
        )
    ]


def totals(trace: Trace, measure: Measure, each: Floats) -> Floats:
    """(config, 3) Σ over heads and samples over Σ of the outputs' norms, else the mean over heads; with intervals."""
    if measure.norm is None:
        kind = share_of(0) if measure.kind == SHARE else POSITIVE
        found = [over_prompts(_mean_of_heads(each[:, place]), kind) for place in range(each.shape[1])]
        return np.array([with_ends(one.value, one.interval) for one in found])
    if measure.norm not in trace.arrays:
        return np.full((each.shape[1], 3), np.nan)
    norm = values(trace, measure.norm, ANALYSIS, 0)
    with np.errstate(invalid="ignore"):  # of bounds without an end
        return np.array([with_ends(*sum_ratio(norm, each[:, place])) for place in range(each.shape[1])])


def kl(trace: Trace) -> Floats:
    """(config, 3) median over samples of KL(full ‖ evicted), nat, with its interval."""
    found = values(trace, "logit_kl", ANALYSIS, 0)
    return with_band(np.median(found, axis=0), intervals.of_medians(found))


def kl_floor(trace: Trace) -> float:
    """Median over samples of KL with everything kept, nat."""
    return float(np.median(values(trace, "logit_kl_noise_floor", ANALYSIS, 0)))


def top1(trace: Trace) -> Floats:
    """(config, 3) the share of samples with the same next token, with its exact interval."""
    found = values(trace, "top1_agreement", ANALYSIS, 0) > 0
    return np.array([with_ends(float(one.mean()), intervals.of_samples(one)) for one in found.T])


def drifts(trace: Trace) -> Floats:
    """(distance, sample, config, layer) drift after each layer."""
    return np.stack([drift.distances(trace, distance, ANALYSIS, 0) for distance in DISTANCES])


def drift_means(each: Floats) -> Floats:
    """(distance, config, layer, 3) mean drift with intervals, of `drifts`."""
    return np.stack([
        np.stack([with_band(*drift.mean_drift(one[:, config])) for config in range(one.shape[1])]) for one in each
    ])  # fmt: skip


def drift_floors(trace: Trace) -> Floats:
    """(distance, layer) mean noise floor of drift; NaN where the trace has none of the distance."""
    found = [drift.floors(trace, distance, ANALYSIS, 0) for distance in DISTANCES]
    nothing = np.full(np.shape(trace.arrays["hidden_norm"])[-1], np.nan)
    return np.stack([nothing if one is None else one.mean(axis=0) for one in found])


def evicted_nothing(trace: Trace) -> Sequence[str]:
    """Labels of configurations whose budget covered every sample's prompt."""
    moved = values(trace, "evicted", ANALYSIS).max(axis=0) > 0
    return [config.label() for config, any_went in zip(trace.run.configs, moved.tolist(), strict=True) if not any_went]


def _bytes(trace: Trace) -> Floats:
    """(config,) bytes held over those of the full cache in 16 bits; NaN where the trace does not tell."""
    try:
        return byte_shares(trace, ANALYSIS)
    except TraceError:
        return np.full(len(trace.run.configs), np.nan)


def _mean_of_heads(each: Floats) -> Floats:
    """(sample,) mean of (sample, layer, head) over the heads that are defined; NaN where none is."""
    held = ~np.isnan(each)
    counts = held.sum(axis=(1, 2))
    return np.asarray(np.where(held, each, 0).sum(axis=(1, 2)) / np.where(counts, counts, np.nan))

"""Every two configurations of one budget against each other: verdicts of heads, sums, shares, drift."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import kept_sets
from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_kind import better_share, sum_ratio
from perturbkv.analyses.layers import drift as layers
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats.estimates import over_prompts
from perturbkv.analyses.stats.intervals import DIFFERENCE, Band, Scalar
from perturbkv.analyses.verdicts import verdicts
from perturbkv.reporting.head_measures import ANALYSIS, SHARE, Measure
from perturbkv.reporting.sides import Places
from perturbkv.schema import DIGEST, VARIABLES
from perturbkv.trace import Trace


@dataclass(frozen=True)
class Compared:
    """Pairs of configurations in one measure; both directions: b over a, then a over b.

    Attributes:
        verdict: (pair, 1 + sample, layer, head) 1 where b is better than a, −1 where it is worse, 0 tied; that of the
            means first. None of a measure without a noise floor.
        sums: (pair, 2, 3) Σ over Σ with its interval; of shares the difference of means.
        better: (pair, 2, 3) the share of heads that are better, with its interval. None as `verdict`.
    """

    verdict: NDArray[np.int8] | None
    sums: Floats
    better: Floats | None


def with_digests(trace: Trace) -> Trace:
    """The same trace, in which kept sets are compared by their digests alone: many pairs are, and at once.

    Raises TraceError where the trace has neither positions nor digests.
    """
    found = np.zeros(trace.arrays["kept_count"].shape, dtype=np.int64)
    found[trace.ok] = trace.kept_digests()
    small = [name for name in trace.arrays if name in VARIABLES and not _is_large(name)]
    return dataclasses.replace(trace, arrays={**{name: trace.arrays[name] for name in small}, DIGEST: found})


def _is_large(name: str) -> bool:
    """Positions, text and outputs themselves are read when they are asked for, and are not needed here."""
    return VARIABLES[name].raw or VARIABLES[name].in_rows or VARIABLES[name].dtype == "str"


@dataclass(frozen=True)
class Same:
    """Where two configurations' kept sets are equal: (pair, sample, layer, head), of drift (pair, sample, layer)."""

    isolated: NDArray[np.bool_]
    propagated: NDArray[np.bool_]
    drift: NDArray[np.bool_]


def same_sets(trace: Trace, pairs: Sequence[Places]) -> Same:
    """Of every pair. Raises TraceError where the trace does not tell."""
    found = [
        np.stack([of(trace, *pair) for pair in pairs])
        for of in (kept_sets.isolated, kept_sets.propagated, kept_sets.layers)
    ]
    return Same(*found)


def compare(trace: Trace, measure: Measure, each: Floats, pairs: Sequence[Places], same: Same) -> Compared:
    """Every pair in one measure, of which `each` is (sample, config, layer, head)."""
    if not measure.source:
        alone = [[_sums(measure, each[:, first], each[:, second]) for first, second in both(pair)] for pair in pairs]
        return Compared(None, np.array(alone), None)
    _, floor = head_comparison.with_floor(trace, measure.source, measure.distance, 0)
    equal: NDArray[np.bool_] = getattr(same, measure.source)
    found = [_pair(measure, each, floor, pair, one) for pair, one in zip(pairs, equal, strict=True)]
    verdict, sums, better = (np.stack(part) for part in zip(*found, strict=True))
    return Compared(verdict, sums, better)


def drift_ratios(trace: Trace, pairs: Sequence[Places], same: Same) -> Floats:
    """(distance, pair, 2, layer, 3) mean drift over mean drift, with intervals."""
    each = [layers.distances(trace, distance, ANALYSIS, 0) for distance in DISTANCES]
    return np.stack([[_drift(one, pair, equal) for pair, equal in zip(pairs, same.drift, strict=True)] for one in each])


def both(pair: Places) -> tuple[Places, Places]:
    """The pair, and the other way round."""
    return pair, pair[::-1]


def with_ends(value: float, interval: Scalar) -> list[float]:
    """The number, then its interval's ends; NaN where there is none."""
    return [value, *((np.nan, np.nan) if interval is None else (interval.low, interval.high))]


def with_band(value: Floats, band: Band) -> Floats:
    """(…, 3) the same of an array."""
    nothing = np.full_like(value, np.nan)
    return np.stack([value, *((nothing, nothing) if band is None else (band.low, band.high))], axis=-1)


def _pair(
    measure: Measure, each: Floats, floor: Floats, pair: Places, same: NDArray[np.bool_]
) -> tuple[NDArray[np.int8], Floats, Floats]:
    """(1 + sample, layer, head) verdicts, (2, 3) sums, (2, 3) shares of heads."""
    baseline, treatment = head_comparison.tied(each, pair, same)
    own = verdicts(baseline, treatment, floor, measure.distance)
    means = verdicts(baseline.mean(axis=0), treatment.mean(axis=0), floor.mean(axis=0), measure.distance)
    sums = [with_ends(*sum_ratio(*head_comparison.tied(each, sides, same))) for sides in both(pair)]
    better = [with_ends(*better_share(turned)) for turned in (own, -own)]
    return np.concatenate([means[None], own]), np.array(sums), np.array(better)


def _sums(measure: Measure, baseline: Floats, treatment: Floats) -> list[float]:
    """Σ treatment over Σ baseline where both are defined, NaN where one is endless; of shares the means' difference."""
    if measure.kind == SHARE:
        found = over_prompts((treatment - baseline).mean(axis=(1, 2)), DIFFERENCE)
        return with_ends(found.value, found.interval)
    if np.isinf(baseline).any() or np.isinf(treatment).any():
        return with_ends(np.nan, None)
    held = ~np.isnan(baseline) & ~np.isnan(treatment)
    return with_ends(*sum_ratio(np.where(held, baseline, 0), np.where(held, treatment, 0)))


def _drift(drift: Floats, pair: Places, same: NDArray[np.bool_]) -> Floats:
    """(2, layer, 3) of (sample, config, layer) drift."""
    return np.stack([with_band(*layers.drift_ratio(*head_comparison.tied(drift, sides, same))) for sides in both(pair)])

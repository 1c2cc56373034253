"""Configurations on a page: names, budgets, comparisons of each pair, conclusions, the ablation, equal bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.ablation import equal_bytes, ingredients
from perturbkv.analyses.ablation.equal_bytes import CachePoint, EqualBytes
from perturbkv.analyses.ablation.ingredients import Row
from perturbkv.analyses.heads import head_comparison, heads
from perturbkv.analyses.heads.head_comparison import HeadComparison, better_share, sum_ratio
from perturbkv.analyses.layers import drift
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.names import distinct_names, short_names
from perturbkv.analyses.result import Result
from perturbkv.analyses.sides import budget_order, pairs, sweeps
from perturbkv.analyses.stats.intervals import DIFFERENCE, SIGNED, Band, OptionalInterval, estimate_mean
from perturbkv.analyses.verdicts import DISTANCES, equal_isolated, equal_layers, equal_propagated, verdicts
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.escaping import escape_line
from perturbkv.reporting.head_measures import ANALYSIS, SHARE, Measure
from perturbkv.schema import DIGEST, VARIABLES
from perturbkv.trace import Trace

MOST_PAIRS = 400
"""Most pairs of configurations on a page."""
IndexPair = tuple[int, int]
"""Indices of two configurations along a trace's `config` axis."""


@dataclass(frozen=True)
class Sides:
    """A run's configurations as sides and budgets.

    Attributes:
        names: (side,) distinct names of configurations without their budget.
        budgets: ascending, fractions before tokens.
        side, budget: (config,) indices into these two.
        pairs: two configurations each of one budget, the lower side first.
        left_out: number of further pairs.
    """

    names: tuple[str, ...]
    budgets: tuple[Budget, ...]
    side: tuple[int, ...]
    budget: tuple[int, ...]
    pairs: tuple[IndexPair, ...]
    left_out: int

    def config(self, side: int, budget: int) -> int | None:
        """Return the index of the configuration with this side and budget; None if the run lacks it."""
        known = list(zip(self.side, self.budget, strict=True))
        return known.index((side, budget)) if (side, budget) in known else None


@dataclass(frozen=True)
class Start:
    """The indices of the sides and the budget that a page shows first."""

    baseline: int
    treatment: int
    budget: int


def run_sides(run: RunConfig) -> Sides:
    """Return a run's configurations as sides and budgets; sides are in the order of the configurations."""
    groups = sweeps(run, None)
    side_of = {config: side for side, group in enumerate(groups) for config in group}
    side = tuple(side_of[config] for config in range(len(run.configs)))
    budgets = tuple(dict.fromkeys(one.budget for one in sorted(run.configs, key=lambda one: budget_order(one)[1:])))
    budget = tuple(budgets.index(config.budget) for config in run.configs)
    firsts = [run.configs[group[0]] for group in groups]
    names = make_distinct([escape_line(name) for name in distinct_names(firsts, "budget")])
    usual = {side[config] for pair in _usual_pairs(run) for config in pair}

    def rank(pair: IndexPair) -> tuple[int, int]:
        """Return the order of pairs: those of two usual sides, then those with one."""
        sides = (side[pair[0]], side[pair[1]])
        return sum(one not in usual for one in sides), max(sides)

    every = [(first, second) for first, second in combinations(range(len(side)), 2) if budget[first] == budget[second]]
    shown = sorted(every, key=rank)[:MOST_PAIRS]
    pairs, left_out = tuple(sorted(shown)), len(every) - len(shown)
    return Sides(names, budgets, side, budget, pairs, left_out)


def first_choice(run: RunConfig, sides: Sides) -> Start:
    """Return the sides and budget that a page shows first: attention and two-stage if in the run, else the first pair.

    A single side is paired with itself.
    """
    candidates = _usual_pairs(run) or list(sides.pairs)
    if not candidates:
        return Start(sides.side[0], sides.side[0], sides.budget[0])
    first, second = candidates[0]
    return Start(sides.side[first], sides.side[second], sides.budget[first])


def _usual_pairs(run: RunConfig) -> list[IndexPair]:
    """Return the index pairs of attention and two-stage at equal budgets; empty where the run lacks one of them."""
    try:
        usual = pairs(run, "attention", "two-stage")
    except TraceError:
        return []
    return [(run.configs.index(one), run.configs.index(other)) for one, other in usual if one.budget == other.budget]


def make_distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return names made distinct: from its second occurrence on, a name gets a number, 'name (2)'."""
    distinct: list[str] = []
    for name in names:
        numbered = (f"{name} ({number})" for number in range(2, len(names) + 2))
        distinct.append(name if name not in distinct else next(one for one in numbered if one not in distinct))
    return tuple(distinct)


@dataclass(frozen=True)
class PairComparison:
    """A comparison of pairs of configurations (a, b) in one measure, in both directions: b over a, then a over b.

    Attributes:
        verdict: (pair, 1 + sample, layer, head) 1 where b is better than a, −1 where it is worse, 0 where both are
            tied; the verdict on the means first. None for a measure without a noise floor.
        sums: (pair, 2, 3) Σ over Σ with its interval; for shares the difference of means.
        better: (pair, 2, 3) the share of heads that are better, with its interval. None as `verdict`.
    """

    verdict: NDArray[np.int8] | None
    sums: Floats
    better: Floats | None


def replace_by_digests(trace: Trace) -> Trace:
    """Return the trace with digests in place of kept sets; digests are compared much faster.

    Raises TraceError where the trace has neither positions nor digests.
    """
    digests = np.zeros(trace.arrays["kept_count"].shape, dtype=np.int64)
    digests[trace.ok] = trace.kept_digests()
    small = [name for name in trace.arrays if name in VARIABLES and not VARIABLES[name].is_large]
    return dataclasses.replace(trace, arrays={**{name: trace.arrays[name] for name in small}, DIGEST: digests})


EqualSets = Mapping[str, NDArray[np.bool_]]
"""Isolated, propagated or drift -> (pair, sample, layer, head), of drift (pair, sample, layer), True where equal."""


def equal_sets(trace: Trace, pairs: Sequence[IndexPair]) -> EqualSets:
    """Return masks that are True where both configurations of a pair keep equal sets, per pair."""
    functions = {"isolated": equal_isolated, "propagated": equal_propagated, "drift": equal_layers}
    return {name: np.stack([equal(trace, *pair) for pair in pairs]) for name, equal in functions.items()}


def compare_pairs(
    trace: Trace, measure: Measure, values: Floats, pairs: Sequence[IndexPair], equal: EqualSets
) -> PairComparison:
    """Return the comparison of all configuration pairs in one measure; `values` are (sample, config, layer, head)."""
    if not measure.source:
        sums = [
            [_compare_sums(measure, values[:, first], values[:, second]) for first, second in both_directions(pair)]
            for pair in pairs
        ]
        return PairComparison(None, np.array(sums), None)
    floor = Measurements(trace, ANALYSIS)[measure.floor]
    paired = zip(pairs, equal[measure.source], strict=True)
    parts = [_compare_pair(measure, values, floor, pair, mask) for pair, mask in paired]
    return PairComparison(*(np.stack(part) for part in zip(*parts, strict=True)))


def drift_ratios(trace: Trace, pairs: Sequence[IndexPair], equal: EqualSets) -> Floats:
    """Return ratios of mean drift in both directions (distance, pair, 2, layer, 3), with intervals."""
    measured = Measurements(trace, ANALYSIS)
    each = [drift.drift_values(measured, distance) for distance in DISTANCES]
    return np.stack(
        [
            [_pair_drift_ratios(one, pair, mask) for pair, mask in zip(pairs, equal["drift"], strict=True)]
            for one in each
        ]
    )


def both_directions(pair: IndexPair) -> tuple[IndexPair, IndexPair]:
    """Return the pair and its reverse."""
    return pair, pair[::-1]


def with_interval(value: float, interval: OptionalInterval) -> list[float]:
    """Return [value, lower end, upper end]; the ends are NaN without an interval."""
    return [value, *((np.nan, np.nan) if interval is None else (interval.low, interval.high))]


def with_kind(value: float, interval: OptionalInterval) -> list[Any]:
    """Return [value, lower end, upper end, kind], kind being interval, range or none."""
    return [*with_interval(value, interval), interval.kind if interval else "none"]


def result_words(found: Result) -> dict[str, Any]:
    """Return the JSON fields of a result's words: title, conclusion and notes."""
    return {
        "title": escape_line(found.title()),
        "conclusion": escape_line(found.conclusion()),
        "notes": [escape_line(one) for one in found.caveats()],
    }


def with_band(value: Floats, band: Band) -> Floats:
    """Return (…, 3): the value and the lower and upper end of its band; NaN ends without a band."""
    nothing = np.full_like(value, np.nan)
    return np.stack([value, *((nothing, nothing) if band is None else (band.low, band.high))], axis=-1)


def _compare_pair(
    measure: Measure, values: Floats, floor: Floats, pair: IndexPair, equal: NDArray[np.bool_]
) -> tuple[NDArray[np.int8], Floats, Floats]:
    """Return a pair's verdicts (1 + sample, layer, head), ratios of sums (2, 3) and shares of better heads (2, 3)."""
    baseline, treatment = head_comparison.select_sides(values, pair, equal)
    known = ~np.isnan(baseline).any(axis=(1, 2))
    lower, higher = (baseline, treatment) if measure.is_smaller_better else (treatment, baseline)
    by_sample = np.zeros(baseline.shape, dtype=np.int8)
    by_sample[known] = verdicts(lower[known], higher[known], floor[known], measure.distance)
    lower_mean, higher_mean, floor_mean = (part[known].mean(axis=0) for part in (lower, higher, floor))
    if not known.any():
        unknown = np.full((2, 3), np.nan)
        return np.concatenate([by_sample[:1] * 0, by_sample]), unknown, unknown
    means = verdicts(lower_mean, higher_mean, floor_mean, measure.distance)
    sums = [
        _compare_sums(measure, *(part[known] for part in head_comparison.select_sides(values, sides, equal)))
        for sides in both_directions(pair)
    ]
    better = [with_interval(*better_share(one)) for one in (by_sample[known], -by_sample[known])]
    return np.concatenate([means[None], by_sample]), np.array(sums), np.array(better)


def _compare_sums(measure: Measure, baseline: Floats, treatment: Floats) -> list[float]:
    """Return Σ treatment / Σ baseline with its interval; NaN where a sum is infinite.

    Heads with a NaN are left out. Shares and effects have the difference of the means instead.
    """
    if measure.is_subtracted:
        kind = DIFFERENCE if measure.kind == SHARE else SIGNED
        difference = estimate_mean((treatment - baseline).mean(axis=(1, 2)), kind)
        return with_interval(difference.value, difference.interval)
    if np.isinf(baseline).any() or np.isinf(treatment).any():
        return with_interval(np.nan, None)
    known = ~np.isnan(baseline) & ~np.isnan(treatment)
    return with_interval(*sum_ratio(np.where(known, baseline, 0), np.where(known, treatment, 0)))


def _pair_drift_ratios(values: Floats, pair: IndexPair, equal: NDArray[np.bool_]) -> Floats:
    """Return a pair's drift ratios in both directions (2, layer, 3) from drift (sample, config, layer)."""
    return np.stack(
        [
            with_band(*drift.drift_ratio(*head_comparison.select_sides(values, sides, equal)))
            for sides in both_directions(pair)
        ]
    )


def compare_with_baseline(trace: Trace, sides: Sides, baseline: int) -> dict[str, HeadComparison]:
    """Return 'a-b' -> comparison of heads in L1, for configuration indices a and b of one budget.

    a is a configuration of the side `baseline`, b any other one of its budget.
    """
    configs = trace.run.configs
    return {
        f"{first}-{second}": head_comparison.summarise(trace, configs[first], configs[second])
        for first in range(len(configs))
        if sides.side[first] == baseline
        for second in range(len(configs))
        if second != first and sides.budget[first] == sides.budget[second]
    }


def conclusions(comparisons: Mapping[str, HeadComparison]) -> dict[str, str]:
    """Return pair -> the sentence that concludes its comparison."""
    return {
        key: escape_line(heads.HeadComparisons((pair,), pair.identity).conclusion())
        for key, pair in comparisons.items()
    }


def ablation_settings(trace: Trace, sides: Sides) -> list[dict[str, Any]]:
    """Return the page's JSON objects of the ablation's settings, each with its rows and what its ingredients bring.

    Raises TraceError where the trace has no ablation.
    """
    settings = ingredients.settings(trace)
    names = short_names([one.baseline for one in settings], "alpha", "product")
    return [
        {
            "budget": sides.budgets.index(one.baseline.budget),
            "title": escape_line(name or one.setting),
            "rows": [_row_part(row) for row in one.rows],
            "brings": [_row_part(row) for row in one.brings],
        }
        for one, name in zip(settings, names, strict=True)
    ]


def equal_bytes_part(trace: Trace) -> dict[str, Any]:
    """Return the JSON field `equal_bytes` on all caches by bytes and loss; empty where bytes compare nothing."""
    try:
        found = equal_bytes.equal_bytes(trace)
    except TraceError:
        return {}
    part = {
        **result_words(found),
        "points": [
            {
                "name": escape_line(found.identity.name_of(one.config)),
                "policy": escape_line(one.config.policy.name),
                "kind": one.kind,
                "loss": with_kind(one.relative, one.relative_interval),
                **{curve: _standing_part(found, one, curve) for curve in equal_bytes.CURVES},
            }
            for one in found.points
        ],
    }
    return {"equal_bytes": part}


def _standing_part(found: EqualBytes, point: CachePoint, curve: str) -> dict[str, Any]:
    """Return the JSON object of a configuration's standing on a curve; `on_line`: it is among the least losses."""
    standing = point.standing(curve)
    return {"share": standing.share, "verdict": standing.verdict, "on_line": point in found.least_losses(curve)}


def _row_part(row: Row) -> dict[str, Any]:
    """Return an ablation row's JSON object for the page, with the isolated and the propagated ratio of sums."""
    return {
        "name": escape_line(row.title),
        "isolated": with_interval(row.isolated.sum_ratio, row.isolated.sum_ratio_interval),
        "propagated": with_interval(row.propagated.sum_ratio, row.propagated.sum_ratio_interval),
    }

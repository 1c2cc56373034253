"""Pairs of configurations on a page: names, budgets, comparisons of each pair, conclusions and the ablation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import pairing
from perturbkv.analyses.ablation import ingredients
from perturbkv.analyses.ablation.ingredients import Row, Setting
from perturbkv.analyses.heads import head_comparison, heads
from perturbkv.analyses.heads.head_comparison import HeadComparison, better_share, sum_ratio
from perturbkv.analyses.layers import drift as layers
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.pairing import budget_order, pairs, sweeps
from perturbkv.analyses.stats.intervals import DIFFERENCE, Band, OptionalInterval, estimate_mean
from perturbkv.analyses.verdicts import DISTANCES, equal_isolated, equal_layers, equal_propagated, verdicts
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.escaping import escape_line
from perturbkv.reporting.head_measures import ANALYSIS, SHARE, Measure
from perturbkv.schema import DIGEST, VARIABLES
from perturbkv.trace import Trace

MOST_PAIRS = 400
"""More pairs take more bytes than a page has."""
Places = tuple[int, int]
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
    pairs: tuple[Places, ...]
    left_out: int

    def config(self, side: int, budget: int) -> int | None:
        """Return the configuration of a side and a budget; None where the run has none."""
        told = list(zip(self.side, self.budget, strict=True))
        return told.index((side, budget)) if (side, budget) in told else None


@dataclass(frozen=True)
class Start:
    """The indices of the sides and the budget that a page shows first."""

    baseline: int
    treatment: int
    budget: int


def sides_of(run: RunConfig) -> Sides:
    """Return the sides of a run, in the order of its configurations."""
    groups = sweeps(run, None)
    of_config = {place: side for side, group in enumerate(groups) for place in group}
    side = tuple(of_config[place] for place in range(len(run.configs)))
    budgets = tuple(dict.fromkeys(one.budget for one in sorted(run.configs, key=lambda one: budget_order(one)[1:])))
    budget = tuple(budgets.index(config.budget) for config in run.configs)
    names = numbered([escape_line(name) for name in pairing.curve_names([run.configs[group[0]] for group in groups])])
    found, left_out = _pairs(side, budget)
    return Sides(names, budgets, side, budget, found, left_out)


def start_of(run: RunConfig, sides: Sides) -> Start:
    """Return the first pair of attention and two-stage, else of the first two sides.

    A single side is paired with itself.
    """
    try:
        places = [(run.configs.index(first), run.configs.index(second)) for first, second in _known(run)]
    except TraceError:
        places = list(sides.pairs)
    if not places:
        return Start(sides.side[0], sides.side[0], sides.budget[0])
    first, second = places[0]
    return Start(sides.side[first], sides.side[second], sides.budget[first])


def numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Return distinct names: repeated ones get a number."""
    found: list[str] = []
    for name in names:
        others = (f"{name} ({number})" for number in range(2, len(names) + 2))
        found.append(name if name not in found else next(one for one in others if one not in found))
    return tuple(found)


def _known(run: RunConfig) -> list[tuple[object, object]]:
    """Return pairs of one budget. Raises TraceError where the run lacks one of the two selections."""
    found = [pair for pair in pairs(run, "attention", "two-stage") if pair[0].budget == pair[1].budget]
    if not found:
        msg = "expected attention and two-stage of one budget, got none"
        raise TraceError(msg)
    return list(found)


def _pairs(side: Sequence[int], budget: Sequence[int]) -> tuple[tuple[Places, ...], int]:
    """Return pairs of one budget, and how many were left out: of too many, those of the first sides stay."""
    places = range(len(side))
    found = [(first, second) for first, second in combinations(places, 2) if budget[first] == budget[second]]
    kept = found
    if len(found) > MOST_PAIRS:
        kept = sorted(found, key=lambda pair: max(side[pair[0]], side[pair[1]]))[:MOST_PAIRS]
    return tuple(sorted(kept)), len(found) - len(kept)


@dataclass(frozen=True)
class Compared:
    """A comparison of configuration pairs (a, b) in one measure; both directions: b over a, then a over b.

    Attributes:
        verdict: (pair, 1 + sample, layer, head) 1 where b is better than a, −1 where it is worse, 0 tied; the verdict
            on the means first. None for a measure without a noise floor.
        sums: (pair, 2, 3) Σ over Σ with its interval; for shares the difference of means.
        better: (pair, 2, 3) the share of heads that are better, with its interval. None as `verdict`.
    """

    verdict: NDArray[np.int8] | None
    sums: Floats
    better: Floats | None


def with_digests(trace: Trace) -> Trace:
    """Return the trace with digests instead of kept sets, so that many pairs are compared at once.

    Raises TraceError where the trace has neither positions nor digests.
    """
    found = np.zeros(trace.arrays["kept_count"].shape, dtype=np.int64)
    found[trace.ok] = trace.kept_digests()
    small = [name for name in trace.arrays if name in VARIABLES and not _is_large(name)]
    return dataclasses.replace(trace, arrays={**{name: trace.arrays[name] for name in small}, DIGEST: found})


def _is_large(name: str) -> bool:
    """Return whether a variable is positions, text or raw outputs, which are read on use and are not needed here."""
    return VARIABLES[name].raw or VARIABLES[name].in_rows or VARIABLES[name].dtype == "str"


@dataclass(frozen=True)
class Same:
    """Where two configurations' kept sets are equal: (pair, sample, layer, head), for drift (pair, sample, layer)."""

    isolated: NDArray[np.bool_]
    propagated: NDArray[np.bool_]
    drift: NDArray[np.bool_]


def same_sets(trace: Trace, pairs: Sequence[Places]) -> Same:
    """Return where each pair's kept sets are equal. Raises TraceError where the trace does not have them."""
    found = [np.stack([of(trace, *pair) for pair in pairs]) for of in (equal_isolated, equal_propagated, equal_layers)]
    return Same(*found)


def compare(trace: Trace, measure: Measure, each: Floats, pairs: Sequence[Places], same: Same) -> Compared:
    """Return the comparison of every pair in one measure, `each` being (sample, config, layer, head)."""
    if not measure.source:
        alone = [[_sums(measure, each[:, first], each[:, second]) for first, second in both(pair)] for pair in pairs]
        return Compared(None, np.array(alone), None)
    _, floor = head_comparison.perturbation_and_floor(Measurements(trace, ANALYSIS), measure.source, measure.distance)
    equal: NDArray[np.bool_] = getattr(same, measure.source)
    found = [_pair(measure, each, floor, pair, one) for pair, one in zip(pairs, equal, strict=True)]
    verdict, sums, better = (np.stack(part) for part in zip(*found, strict=True))
    return Compared(verdict, sums, better)


def drift_ratios(trace: Trace, pairs: Sequence[Places], same: Same) -> Floats:
    """Return mean drift over mean drift (distance, pair, 2, layer, 3), with intervals."""
    measured = Measurements(trace, ANALYSIS)
    each = [layers.distances(measured, distance) for distance in DISTANCES]
    return np.stack([[_drift(one, pair, equal) for pair, equal in zip(pairs, same.drift, strict=True)] for one in each])


def both(pair: Places) -> tuple[Places, Places]:
    """Return the pair and its reverse."""
    return pair, pair[::-1]


def with_ends(value: float, interval: OptionalInterval) -> list[float]:
    """Return the number, then its interval's ends; NaN where there is none."""
    return [value, *((np.nan, np.nan) if interval is None else (interval.low, interval.high))]


def with_band(value: Floats, band: Band) -> Floats:
    """Return (…, 3): an array, then the ends of its band; NaN where there is none."""
    nothing = np.full_like(value, np.nan)
    return np.stack([value, *((nothing, nothing) if band is None else (band.low, band.high))], axis=-1)


def _pair(
    measure: Measure, each: Floats, floor: Floats, pair: Places, same: NDArray[np.bool_]
) -> tuple[NDArray[np.int8], Floats, Floats]:
    """Return verdicts (1 + sample, layer, head), sums (2, 3) and shares of heads (2, 3)."""
    baseline, treatment = head_comparison.select_sides(each, pair, same)
    own = verdicts(baseline, treatment, floor, measure.distance)
    means = verdicts(baseline.mean(axis=0), treatment.mean(axis=0), floor.mean(axis=0), measure.distance)
    sums = [with_ends(*sum_ratio(*head_comparison.select_sides(each, sides, same))) for sides in both(pair)]
    better = [with_ends(*better_share(turned)) for turned in (own, -own)]
    return np.concatenate([means[None], own]), np.array(sums), np.array(better)


def _sums(measure: Measure, baseline: Floats, treatment: Floats) -> list[float]:
    """Return Σ treatment over Σ baseline where both are not NaN, or NaN where one is infinite, with its interval.

    For shares it is the difference of the means.
    """
    if measure.kind == SHARE:
        found = estimate_mean((treatment - baseline).mean(axis=(1, 2)), DIFFERENCE)
        return with_ends(found.value, found.interval)
    if np.isinf(baseline).any() or np.isinf(treatment).any():
        return with_ends(np.nan, None)
    held = ~np.isnan(baseline) & ~np.isnan(treatment)
    return with_ends(*sum_ratio(np.where(held, baseline, 0), np.where(held, treatment, 0)))


def _drift(drift: Floats, pair: Places, same: NDArray[np.bool_]) -> Floats:
    """Return drift ratios (2, layer, 3) from drift (sample, config, layer)."""
    return np.stack(
        [with_band(*layers.drift_ratio(*head_comparison.select_sides(drift, sides, same))) for sides in both(pair)]
    )


def conclusions(trace: Trace, sides: Sides, baseline: int) -> dict[str, str]:
    """Return 'a-b' -> the conclusion on heads in L1 at the first step, for a side and each other one.

    Every budget has its own pairs of configurations a and b.
    """
    return {f"{first}-{second}": _conclusion(trace, first, second) for first, second in _against(sides, baseline)}


def ablation(trace: Trace, sides: Sides) -> list[dict[str, Any]]:
    """Return every setting's rows over the baseline, and each ingredient's contribution.

    Raises TraceError where the trace has no such rows.
    """
    found = ingredients.settings(trace)
    told = pairing.short_names([one.baseline for one in found], "alpha", "product")
    return [_setting(one, words or one.setting, sides) for one, words in zip(found, told, strict=True)]


def _against(sides: Sides, baseline: int) -> Sequence[Places]:
    """Return the configurations of one side, each paired with the others of its budget."""
    places = range(len(sides.side))
    firsts = [place for place in places if sides.side[place] == baseline]
    return [
        (first, second)
        for first in firsts
        for second in places
        if second != first and sides.budget[first] == sides.budget[second]
    ]


def _conclusion(trace: Trace, first: int, second: int) -> str:
    configs = trace.run.configs
    pair = head_comparison.summarise(trace, configs[first], configs[second])
    return escape_line(heads.HeadComparisons((pair,), pair.identity).conclusion())


def _setting(one: Setting, title: str, sides: Sides) -> dict[str, Any]:
    return {
        "budget": sides.budgets.index(one.baseline.budget),
        "title": escape_line(title),
        "rows": [_row(row) for row in one.rows],
        "brings": [_row(row) for row in one.brings],
    }


def _row(row: Row) -> dict[str, Any]:
    return {"name": escape_line(row.title), **{kind: _ratio(row, kind) for kind in ("isolated", "propagated")}}


def _ratio(compared: HeadComparison, kind: str) -> list[float]:
    found = getattr(compared, kind)
    return with_ends(found.sum_ratio, found.sum_ratio_interval)

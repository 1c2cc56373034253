"""Which configurations a page sets side by side: their short names, their budgets, the pairs, where to begin.

Every two configurations of one budget against each other: verdicts of heads, sums, shares, drift.

Sentences and tables of a page: what pairs of configurations let a reader conclude, and the ablation.
"""

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
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import order, pairs, sweeps
from perturbkv.analyses.stats.intervals import DIFFERENCE, Band, Scalar, over_prompts
from perturbkv.analyses.verdicts import DISTANCES, equal_isolated, equal_layers, equal_propagated, verdicts
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.escaping import line
from perturbkv.reporting.head_measures import ANALYSIS, SHARE, Measure
from perturbkv.schema import DIGEST, VARIABLES
from perturbkv.trace import Trace

MOST_PAIRS = 400
"""More take more room than a page has."""
Places = tuple[int, int]
"""Of two configurations along a trace's `config` axis."""


@dataclass(frozen=True)
class Sides:
    """A run's configurations as sides and budgets.

    Attributes:
        names: (side,) configurations without their budget: what tells them apart, each once.
        budgets: ascending, fractions before tokens.
        side, budget: (config,) places in these two.
        pairs: two configurations each of one budget, that of the first side first.
        left_out: how many further ones there are.
    """

    names: tuple[str, ...]
    budgets: tuple[Budget, ...]
    side: tuple[int, ...]
    budget: tuple[int, ...]
    pairs: tuple[Places, ...]
    left_out: int

    def config(self, side: int, budget: int) -> int | None:
        """The configuration of a side and a budget; None where the run has none."""
        told = list(zip(self.side, self.budget, strict=True))
        return told.index((side, budget)) if (side, budget) in told else None


@dataclass(frozen=True)
class Start:
    """What a page shows first: places among sides and budgets."""

    baseline: int
    treatment: int
    budget: int


def sides_of(run: RunConfig) -> Sides:
    """The sides of a run, in the order of its configurations."""
    groups = sweeps(run, None)
    of_config = {place: side for side, group in enumerate(groups) for place in group}
    side = tuple(of_config[place] for place in range(len(run.configs)))
    budgets = tuple(dict.fromkeys(one.budget for one in sorted(run.configs, key=lambda one: order(one)[1:])))
    budget = tuple(budgets.index(config.budget) for config in run.configs)
    names = numbered([line(name) for name in pairing.curve_names([run.configs[group[0]] for group in groups])])
    found, left_out = _pairs(side, budget)
    return Sides(names, budgets, side, budget, found, left_out)


def start_of(run: RunConfig, sides: Sides) -> Start:
    """The first of attention against two-stage, else of the first two sides; of a single side that side twice."""
    try:
        places = [(run.configs.index(first), run.configs.index(second)) for first, second in _known(run)]
    except TraceError:
        places = list(sides.pairs)
    if not places:
        return Start(sides.side[0], sides.side[0], sides.budget[0])
    first, second = places[0]
    return Start(sides.side[first], sides.side[second], sides.budget[first])


def numbered(names: Sequence[str]) -> tuple[str, ...]:
    """The names, those that were there before with a number behind them: every name once."""
    found: list[str] = []
    for name in names:
        others = (f"{name} ({number})" for number in range(2, len(names) + 2))
        found.append(name if name not in found else next(one for one in others if one not in found))
    return tuple(found)


def _known(run: RunConfig) -> list[tuple[object, object]]:
    """Pairs of one budget. Raises TraceError where the run has none of the two selections."""
    found = [pair for pair in pairs(run, "attention", "two-stage") if pair[0].budget == pair[1].budget]
    if not found:
        msg = "expected attention and two-stage of one budget, got none"
        raise TraceError(msg)
    return list(found)


def _pairs(side: Sequence[int], budget: Sequence[int]) -> tuple[tuple[Places, ...], int]:
    """Pairs of one budget, and how many were left out: where there are too many, those of the first sides stay."""
    places = range(len(side))
    found = [(first, second) for first, second in combinations(places, 2) if budget[first] == budget[second]]
    kept = found
    if len(found) > MOST_PAIRS:
        kept = sorted(found, key=lambda pair: max(side[pair[0]], side[pair[1]]))[:MOST_PAIRS]
    return tuple(sorted(kept)), len(found) - len(kept)


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
    found = [np.stack([of(trace, *pair) for pair in pairs]) for of in (equal_isolated, equal_propagated, equal_layers)]
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


def conclusions(trace: Trace, sides: Sides, baseline: int) -> dict[str, str]:
    """Of a side with every other one, at every budget: 'a-b' -> what compares heads in L1 at the first step."""
    return {f"{first}-{second}": _conclusion(trace, first, second) for first, second in _against(sides, baseline)}


def ablation(trace: Trace, sides: Sides) -> list[dict[str, Any]]:
    """Every setting's rows over the baseline, and what each ingredient brings.

    Raises TraceError where the trace holds no such rows.
    """
    found = ingredients.settings(trace)
    told = pairing.short_names([one.baseline for one in found], "alpha", "product")
    return [_setting(one, words or one.setting, sides) for one, words in zip(found, told, strict=True)]


def _against(sides: Sides, baseline: int) -> Sequence[Places]:
    """Configurations of one side, each with those of its budget."""
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
    return line(heads.conclusion([head_comparison.summarise(trace, configs[first], configs[second])]))


def _setting(one: Setting, title: str, sides: Sides) -> dict[str, Any]:
    return {
        "budget": sides.budgets.index(one.baseline.budget),
        "title": line(title),
        "rows": [_row(row) for row in one.rows],
        "brings": [_row(row) for row in one.brings],
    }


def _row(row: Row) -> dict[str, Any]:
    return {"name": line(row.title), **{kind: _ratio(row.compared, kind) for kind in ("isolated", "propagated")}}


def _ratio(compared: HeadComparison, kind: str) -> list[float]:
    found = getattr(compared, kind)
    return with_ends(found.sum_ratio, found.sum_ratio_interval)

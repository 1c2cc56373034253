"""Outcomes of measured mixtures of kept sets: Shapley values, greedy curves, and mixtures by name.

A player is a layer or a head; switching it replaces the baseline's kept sets there by the treatment's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from perturbkv.analyses import text
from perturbkv.analyses.columns import Record, column, derived, interval, record
from perturbkv.analyses.heads.head_comparison import HeadKind, compare_kind
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import coalition, intervals
from perturbkv.analyses.stats.coalition import GreedyPath, Orders
from perturbkv.analyses.stats.intervals import LEVEL, RATIO, Band, Interval, OptionalInterval, difference_kind
from perturbkv.analyses.text import interval_at
from perturbkv.configs.patching import Coalition, Game, Mixture
from perturbkv.errors import ConfigError, FailedRunError
from perturbkv.storage.patching_file import PatchingRow, PatchingStore

_COUNTS = ("count",)


class MixtureOutcomes:
    """The outcomes of measured mixtures in the complete samples at one decode step.

    Args:
        store: the measurements.
        game: the game whose mixtures were measured.
        step: the decode step.

    Raises FailedRunError where no sample is complete, ConfigError where none has the step.
    """

    def __init__(self, store: PatchingStore, game: Game, step: int = 0) -> None:
        complete = [
            name for name, rows in store.rows.items() if game.baseline_everywhere in rows and name not in store.failures
        ]
        if not complete:
            raise FailedRunError(str(store.lines.path or "the measurements"), store.failures)
        self.store = store
        self.game = game
        self.step = step
        self.samples: list[str] = [
            name for name in complete if step < len(store.rows[name][game.baseline_everywhere].values["drift"])
        ]
        self.ended: int = len(complete) - len(self.samples)
        if not self.samples:
            raise ConfigError(
                f"expected a step that some sample has, got {step}; --steps {step + 1} asks for it, as far as texts go"
            )

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> MixtureOutcomes:
        """Return the outcomes restricted to the samples at `indices`."""
        selected = copy.copy(self)
        selected.samples = [self.samples[index] for index in indices]
        return selected

    def rows(self, mixture: Mixture) -> list[PatchingRow]:
        """Return the measurements of a mixture, one per sample."""
        return [self.store.rows[name][mixture] for name in self.samples]

    def outcome(self, mixture: Mixture, name: str) -> Floats:
        """Return a mixture's outcome, (sample,): a name in `PER_STEP`, or `score`."""
        rows = self.rows(mixture)
        return np.array([row.score if name == "score" else row.values[name][self.step] for row in rows])

    def coalition(self, coalition: Coalition, name: str) -> Floats:
        """Return (sample,) values of an outcome where the players of a coalition are switched."""
        return self.outcome(self.game.mixture(coalition), name)

    def cache_share(self, mixture: Mixture) -> float:
        """Return the entries of a mixture's cache over those of the full cache, mean over samples."""
        return float(np.mean([row.held for row in self.rows(mixture)]))

    def heads(self, mixture: Mixture) -> Floats:
        """Return a mixture's propagated L1, (sample, layer, head), over samples in which it was stored by head."""
        return np.array([row.heads[self.step] for row in self.rows(mixture) if row.heads is not None])


def change(differences: Floats, baseline: Floats, outcome: str) -> tuple[Floats, Band]:
    """Return the change of an outcome, from (…, sample) differences to the (sample,) baseline, with intervals.

    For drift and KL, Σ differences over Σ baseline as a share: −0.1 is a tenth less. It is a ratio of sums less 1,
    exactly 0 where nothing differs, with the interval of a ratio; NaN where Σ baseline is 0. For scores, the mean
    difference.
    """
    samples, scored = len(baseline), outcome == "score"
    flat = differences.reshape(-1, samples)

    def statistic(weights: Floats) -> Floats:
        if scored:
            return np.asarray(weights @ flat.T)
        divisor = weights @ baseline
        return np.asarray(1 + (weights @ flat.T) / np.where(divisor == 0, np.nan, divisor)[:, None])

    value = statistic(np.full((1, samples), 1 / samples))[0].reshape(differences.shape[:-1])
    ends = intervals.of_statistics(statistic, samples, difference_kind(1) if scored else RATIO)
    shift = 0.0 if scored else 1.0
    if ends is None:
        return value - shift, None
    low, high = (np.asarray(end).reshape(value.shape) - shift for end in (ends.low, ends.high))
    return value - shift, intervals.Interval(low, high, ends.kind)


def sign_of_better(outcome: str) -> int:
    """Return 1 for an outcome that is better when larger (the score), −1 for drift and KL."""
    return 1 if outcome == "score" else -1


def coalition_outcomes(
    measured: MixtureOutcomes, coalitions: Sequence[Coalition], outcome: str
) -> dict[Coalition, Floats]:
    """Return coalition -> (sample,) values of an outcome."""
    return {coalition: measured.coalition(coalition, outcome) for coalition in coalitions}


def _format_percent(share: float, interval: OptionalInterval = None) -> str:
    """Return a share in percent with its interval, without the percent sign: '−9.1 [−14, −4.0]'."""
    ends = None if interval is None else Interval(100 * interval.low, 100 * interval.high, interval.kind)
    return text.decimal(100 * share, ends, digits=1)


@record
class PlayerValue(Record, section="player"):
    """The Shapley value of one layer or head, with its change when it is switched first and last.

    Attributes:
        exact: whether all subsets of players were measured.
    """

    player: str = column("layer, or layer-head")
    value: float = column(
        "change of the outcome that the treatment's kept sets make there, averaged over the orders in which players "
        "may be switched: a share of the baseline's Σ over samples; of scores a difference",
        heading="#value",
        text=_format_percent,
    )
    value_interval: OptionalInterval = column("over samples, these orders given", key="interval")
    alone: float = column("the same change where no other player is switched", heading="#alone", text=_format_percent)
    alone_interval: OptionalInterval = interval()
    last: float = column("the same change where all others are switched already", heading="#last", text=_format_percent)
    last_interval: OptionalInterval = interval()
    sampling: float = column(
        "half of a 95 % interval of drawing orders, these samples given; 0 of all subsets; it does not see players "
        "that interact in pairs"
    )
    exact: bool

    @derived(heading="#± of\norders", json=False, text=_format_percent)
    def order_error(self) -> float | None:
        """Half of a 95 % interval over drawn orders, for these samples; none where all subsets were measured."""
        return None if self.exact else self.sampling


@dataclass(frozen=True)
class Shift:
    """The change of the outcome that each player makes when it is switched before, or after, all others.

    Attributes:
        value: (player,) change, in the unit of `change`.
        interval: over samples.
        per_sample: (player, sample) change in the outcome's own unit.
    """

    value: Floats
    interval: Band
    per_sample: Floats

    @classmethod
    def from_differences(cls, per_sample: Floats, baseline: Floats, outcome: str) -> Self:
        """Return the shift from (player, sample) differences and the baseline's (sample,) outcomes."""
        return cls(*change(per_sample, baseline, outcome), per_sample)


@record
class Shapley(Record, section="Shapley values"):
    """The change of the outcome that switching each player makes, averaged over the orders of switching.

    Attributes:
        names: names of the players.
        value: (player,) change of the outcome, in the unit of `change`.
        interval: over samples.
        sampling: (player,) half a 95 % interval over drawn orders, for these samples; 0 of all subsets.
        per_sample: (player, sample) change in the outcome's own unit.
        alone: the change where no other player is switched.
        last: the change where all other players are. Both equal `value` where players do not interact.
    """

    names: tuple[str, ...]
    value: Floats
    interval: Band
    sampling: Floats
    total: float = column("change of the outcome with all players switched: the sum of all values", key="everybody")
    total_interval: OptionalInterval = column("over samples", key="everybody_interval")
    permutations: int = column("orders drawn, reverses included; 0: all subsets were measured")
    coalitions: int = column("coalitions that were measured for the values")
    per_sample: Floats
    alone: Shift
    last: Shift

    @derived()
    def players(self) -> tuple[PlayerValue, ...]:
        """Values of each layer or head."""
        return tuple(
            PlayerValue(
                player=name,
                value=float(self.value[index]),
                value_interval=interval_at(self.interval, index),
                alone=float(self.alone.value[index]),
                alone_interval=interval_at(self.alone.interval, index),
                last=float(self.last.value[index]),
                last_interval=interval_at(self.last.interval, index),
                sampling=float(self.sampling[index]),
                exact=not self.permutations,
            )
            for index, name in enumerate(self.names)
        )

    @derived(key="sum")
    def value_sum(self) -> float:
        """Sum of all values."""
        return float(self.value.sum())


@record
class GreedyStep(Record):
    """A row of the greedy curves: the players added, and the outcome's change with all players switched so far."""

    first: str = column("the player that the first half of the samples adds", heading="first half\nadds")
    second: str = column("the player that the second half adds", heading="second half\nadds")
    chosen: float = column(
        "change on the samples that chose the players", heading="#chosen\n(flatters)", text=_format_percent
    )
    chosen_interval: OptionalInterval = interval()
    judged: float = column("change on the samples that did not", heading="#judged", text=_format_percent)
    judged_interval: OptionalInterval = interval()


@record
class Greedy(Record, section="greedy path"):
    """The change of the outcome with players switched greedily: the next is the best one on half of the samples.

    Attributes:
        names: names of the players.
        paths: indices of the players that each half of the samples chose, in order.
        chosen_interval, judged_interval: over samples.
    """

    names: tuple[str, ...]
    paths: tuple[tuple[int, ...], tuple[int, ...]]
    chosen: Floats = column("change with 0, 1, 2, … players switched, on the samples that chose them", dims=_COUNTS)
    chosen_interval: Band
    judged: Floats = column("the same on the samples that did not choose them", dims=_COUNTS)
    judged_interval: Band

    @derived(key="paths")
    def player_paths(self) -> list[list[str]]:
        """Players that each half of the samples chose, in their order."""
        return [[self.names[index] for index in path] for path in self.paths]

    @derived()
    def chosen_intervals(self) -> list[OptionalInterval]:
        """Intervals of `chosen`, over samples."""
        return [interval_at(self.chosen_interval, count) for count in range(len(self.chosen))]

    @derived()
    def judged_intervals(self) -> list[OptionalInterval]:
        """Intervals of `judged`, over samples."""
        return [interval_at(self.judged_interval, count) for count in range(len(self.judged))]

    def steps(self) -> list[GreedyStep]:
        """Return a row per number of players switched, from 0, which has no interval."""
        first, second = (["", *path] for path in self.player_paths)
        return [
            GreedyStep(
                first=first[count],
                second=second[count],
                chosen=float(self.chosen[count]),
                chosen_interval=self.chosen_intervals[count] if count else None,
                judged=float(self.judged[count]),
                judged_interval=self.judged_intervals[count] if count else None,
            )
            for count in range(len(self.chosen))
        ]


def shapley(measured: MixtureOutcomes, outcome: str, orders: Orders | None) -> Shapley:
    """Return the players' Shapley values from drawn orders, or from all subsets where `orders` is None."""
    players = len(measured.game.players)
    coalitions = coalition.required_coalitions(players, orders)
    values = coalition_outcomes(measured, coalitions, outcome)
    baseline = values[frozenset[int]()]  # no player switched
    if orders is None:
        per_sample, sampling = coalition.exact_values(values, players), np.zeros(players)
    else:
        contributions = coalition.marginal_contributions(values, orders)
        per_sample = contributions.mean(axis=0)
        sampling = sampling_error(contributions, float(len(baseline) if outcome == "score" else baseline.sum()))
    value, value_interval = change(per_sample, baseline, outcome)
    total, total_interval = change((values[measured.game.all_players] - baseline)[None], baseline, outcome)
    alone, last = (
        Shift.from_differences(contributions_of(values, players), baseline, outcome)
        for contributions_of in (coalition.first_contributions, coalition.last_contributions)
    )
    return Shapley(
        names=tuple(map(str, measured.game.players)),
        value=value,
        interval=value_interval,
        sampling=sampling,
        total=float(total[0]),
        total_interval=interval_at(total_interval, 0),
        permutations=0 if orders is None else len(orders),
        coalitions=len(coalitions),
        per_sample=per_sample,
        alone=alone,
        last=last,
    )


def greedy(measured: MixtureOutcomes, outcome: str, paths: Sequence[GreedyPath]) -> Greedy:
    """Return the greedy curves of two paths, each chosen on one half of the samples and judged on the other half."""
    baseline = measured.coalition(frozenset(), outcome)

    def value(switched: Coalition, indices: NDArray[np.int64]) -> Floats:
        return measured.select(indices).coalition(switched, outcome)

    chosen, judged = coalition.greedy_curves(paths, value, len(baseline))
    on_choosing, on_judging = (change(curve - baseline, baseline, outcome) for curve in (chosen, judged))
    players = (tuple(paths[0].chosen), tuple(paths[1].chosen))
    return Greedy(tuple(map(str, measured.game.players)), players, *on_choosing, *on_judging)


def sampling_error(contributions: Floats, unit: float) -> Floats:
    """Return half the 95 % interval of mean contributions over drawn orders, (player,).

    By Student's t of the means of pairs of orders. `contributions` are (order, player, sample); their sums over samples
    are divided by `unit`, and NaN results where that is 0.
    """
    sums = contributions.sum(axis=-1)
    pairs = sums.reshape(-1, 2, *sums.shape[1:]).mean(axis=1) / (unit if unit else np.nan)
    error = pairs.std(axis=0, ddof=1) / np.sqrt(len(pairs))
    return np.asarray(stats.t.ppf((1 + LEVEL) / 2, len(pairs) - 1) * error)


@record
class NamedMixture(Record, section="mixture"):
    """A mixture with a name, compared with the baseline's kept sets everywhere.

    Attributes:
        mixture: the side, baseline or treatment, whose kept set each layer or head has.
    """

    name: str = column("as it was given")
    mixture: Mixture
    cache_share: float = column(
        "entries of its cache over those of the full one, mean over samples",
        key="held_over_full",
        heading="#cache\nshare",
    )
    heads: HeadKind = column("over the baseline everywhere", key="propagated")
    drift_ratio: float = column(
        "Σ over samples of the last layer's drift over the baseline's", heading="#last layer's\ndrift"
    )
    drift_ratio_interval: OptionalInterval = interval()
    kl_median: float = column(
        "KL(full ‖ evicted) of the next token, median over samples", unit="nat", heading="#KL", text=text.three_digits
    )
    kl_median_interval: OptionalInterval = interval()
    top1: float = column("share of samples whose next token is the full run's", unit="share")
    score: float = column("of the answers, mean; null where no answers were generated", unit="share", heading="#score")
    score_change: float = column("score over the baseline's, a difference")
    score_change_interval: OptionalInterval = interval()

    @derived(key="mixture")
    def letters(self) -> str:
        """A letter per measured layer, `b` or `t` by whose kept sets it has; where heads differ `(0110)`, 1 as `t`."""
        return str(self.mixture)


def named_mixture(measured: MixtureOutcomes, name: str, mixture: Mixture) -> NamedMixture:
    """Compare a mixture with the baseline's kept sets everywhere; equal sets are ties (METHOD: the protocol, 4)."""
    first = measured.heads(measured.game.baseline_everywhere)
    treated = np.array(mixture.layers)
    equal = np.array([~treated | measured.store.same[sample] for sample in measured.samples])
    equal = np.repeat(equal, first.shape[-1] // equal.shape[-1], axis=-1)
    layers = np.logical_and.accumulate(equal.all(axis=2), axis=1)
    before = np.concatenate([np.ones((len(equal), 1), dtype=bool), layers[:, :-1]], axis=1)
    second = np.where(np.asarray(equal & before[:, :, None]), first, measured.heads(mixture))
    floors, norms = (
        np.array([measured.store.largest_over_batches(sample, kind)[measured.step] for sample in measured.samples])
        for kind in ("head_floors", "head_norms")
    )
    drift, drift_interval = _mixture_change(measured, mixture, "drift")
    score_change, score_interval = _mixture_change(measured, mixture, "score")
    kl, kl_interval = median_kl(measured, mixture)
    return NamedMixture(
        name=name,
        mixture=mixture,
        cache_share=measured.cache_share(mixture),
        heads=compare_kind(first, second, floors, norms, np.zeros(first.shape[1:], dtype=bool)),
        drift_ratio=drift + 1,
        drift_ratio_interval=None
        if drift_interval is None
        else Interval(drift_interval.low + 1, drift_interval.high + 1, drift_interval.kind),
        kl_median=kl,
        kl_median_interval=kl_interval,
        top1=float(measured.outcome(mixture, "top1").mean()),
        score=float(measured.outcome(mixture, "score").mean()),
        score_change=score_change,
        score_change_interval=score_interval,
    )


def median_kl(measured: MixtureOutcomes, mixture: Mixture) -> tuple[float, OptionalInterval]:
    """Return the median over samples of a mixture's KL, with its interval."""
    kl = measured.outcome(mixture, "kl")
    return float(np.median(kl)), intervals.of_median(kl)


def _mixture_change(measured: MixtureOutcomes, mixture: Mixture, outcome: str) -> tuple[float, OptionalInterval]:
    """Return the `change` of an outcome from the baseline's kept sets to a mixture; NaN where not measured."""
    baseline = measured.outcome(measured.game.baseline_everywhere, outcome)
    if np.isnan(baseline).any():
        return float("nan"), None
    value, ends = change((measured.outcome(mixture, outcome) - baseline)[None], baseline, outcome)
    return float(value[0]), interval_at(ends, 0)

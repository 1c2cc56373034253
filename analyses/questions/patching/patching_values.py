"""Shapley values and greedy curves of swapped kept sets, with what is unsure of them.

Outcomes of measured mixtures as arrays over samples, and by how much of the baseline's they differ from it.

Mixtures that were asked for by name against the baseline alone: heads, drift, KL, answers.

What was found of swapped kept sets: the fields of the result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from perturbkv.analyses.heads.head_comparison import HeadKind, compare_kind
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.outcomes import Divergence
from perturbkv.analyses.stats import coalition, intervals
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.coalition import Orders, Path
from perturbkv.analyses.stats.intervals import LEVEL, RATIO, Band, Scalar, difference_of
from perturbkv.analyses.text import at
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.patching import Coalition, Game, Mixture, SwapConfig
from perturbkv.errors import ConfigError, FailedRunError
from perturbkv.storage.patching_file import SwapRow, SwapStore


class Measured:
    """What a store holds of complete samples at one decode step.

    Args:
        store: of measurements.
        game: whose mixtures they are.
        step: decode step looked at.

    Raises FailedRunError where no sample is complete, ConfigError where none has the step.
    """

    def __init__(self, store: SwapStore, game: Game, step: int = 0) -> None:
        complete = [name for name, rows in store.rows.items() if game.none in rows and name not in store.failed]
        if not complete:
            raise FailedRunError(str(store.path or "the measurements"), store.failed)
        self.store, self.game, self.step = store, game, step
        self.samples = [name for name in complete if step < len(store.rows[name][game.none].values["drift"])]
        self.ended = len(complete) - len(self.samples)
        if not self.samples:
            msg = (
                f"expected a step that some sample has, got {step}; --steps {step + 1} asks for it, as far as texts go"
            )
            raise ConfigError(msg)

    def only(self, places: Sequence[int] | NDArray[np.int64]) -> Measured:
        """The same of some of the samples, by their places."""
        found = copy.copy(self)
        found.samples = [self.samples[place] for place in places]
        return found

    def rows(self, mixture: Mixture) -> list[SwapRow]:
        """One of each sample."""
        return [self.store.rows[name][mixture] for name in self.samples]

    def outcome(self, mixture: Mixture, name: str) -> Floats:
        """(sample,) of one of `PER_STEP`, or `score`."""
        rows = self.rows(mixture)
        return np.array([row.score if name == "score" else row.values[name][self.step] for row in rows])

    def coalition(self, coalition: Coalition, name: str) -> Floats:
        """The same of what a coalition of players keeps."""
        return self.outcome(self.game.mixture(coalition), name)

    def heads(self, mixture: Mixture) -> Floats:
        """(sample, layer, head) propagated L1 perturbation of a mixture whose heads were asked for."""
        return np.array([row.heads[self.step] for row in self.rows(mixture) if row.heads is not None])

    def of_heads(self, name: str) -> Floats:
        """(sample, layer, head) `head_floors` or `head_norms`."""
        return np.array([self.store.head_floors(sample, name)[self.step] for sample in self.samples])


def change(differences: Floats, baseline: Floats, outcome: str) -> tuple[Floats, Band]:
    """By how much outcomes (…, sample) differ from the baseline's (sample,), with intervals over samples.

    Of drift and KL Σ differences over Σ baseline, as a share: −0.1 is a tenth less. It is a ratio of sums less 1, and
    has the interval of one. Of scores the mean difference. NaN where the baseline's sum is 0.
    """
    samples, scored = len(baseline), outcome == "score"
    flat = differences.reshape(-1, samples)

    def statistic(weights: Floats) -> Floats:
        if scored:
            return np.asarray(weights @ flat.T)
        below = weights @ baseline
        return np.asarray((weights @ (baseline + flat).T) / np.where(below == 0, np.nan, below)[:, None])

    value = statistic(np.full((1, samples), 1 / samples))[0].reshape(differences.shape[:-1])
    found = intervals.band(statistic, samples, difference_of(1) if scored else RATIO)
    shift = 0.0 if scored else 1.0
    if found is None:
        return value - shift, None
    low, high = (np.asarray(end).reshape(value.shape) - shift for end in (found.low, found.high))
    return value - shift, intervals.Interval(low, high, found.kind)


def scale(baseline: Floats, outcome: str) -> float:
    """What a sum over samples of differences is divided by, to be in the unit of `change`."""
    return float(len(baseline) if outcome == "score" else baseline.sum())


def better(outcome: str) -> int:
    """1 where more is better, −1 where less is."""
    return 1 if outcome == "score" else -1


def all_of(measured: Measured, coalitions: Sequence[Coalition], outcome: str) -> dict[Coalition, Floats]:
    """Coalition -> (sample,) outcomes."""
    return {coalition: measured.coalition(coalition, outcome) for coalition in coalitions}


@dataclass(frozen=True)
class Shift:
    """What a player brings beside certain others.

    Attributes:
        value: (player,) by how much the outcome changes, as `patching_values.change` says it.
        interval: over samples.
        per_sample: (player, sample) in the outcome's own unit.
    """

    value: Floats
    interval: Band
    per_sample: Floats

    @classmethod
    def of(cls, per_sample: Floats, baseline: Floats, outcome: str) -> Self:
        """Of (player, sample) differences, over the baseline's (sample,)."""
        return cls(*change(per_sample, baseline, outcome), per_sample)


@dataclass(frozen=True)
class Shapley:
    """What each player's kept sets do to the outcome, over all orders in which they may be switched.

    Attributes:
        value: (player,) by how much the treatment's sets there change the outcome, as `patching_values.change` says it.
        interval: over samples.
        sampling: (player,) half a 95 % interval of drawing orders, these samples given; 0 where all subsets were
            measured.
        total: all players together: what the values add up to.
        total_interval: over samples.
        permutations: orders drawn, reverses included; 0 where all subsets were measured.
        coalitions: that were measured for it.
        per_sample: (player, sample) in the outcome's own unit.
        alone: the same change where nobody else is switched.
        last: likewise where all others are. Both are the value where players do not interact.
    """

    value: Floats
    interval: Band
    sampling: Floats
    total: float
    total_interval: Scalar
    permutations: int
    coalitions: int
    per_sample: Floats
    alone: Shift
    last: Shift


@dataclass(frozen=True)
class Greedy:
    """Players switched one after the other, each the one that helps most on the samples that choose.

    Attributes:
        paths: the players that each half of the samples chose, by their places.
        chosen: (count,) the outcome's change with 0, 1, 2, … players switched, on the samples that chose them.
        judged: (count,) the same on the samples that did not.
        chosen_interval, judged_interval: over samples.
    """

    paths: tuple[tuple[int, ...], tuple[int, ...]]
    chosen: Floats
    chosen_interval: Band
    judged: Floats
    judged_interval: Band


def shapley(measured: Measured, outcome: str, orders: Orders | None) -> Shapley:
    """Values from drawn orders; from all subsets where they are None."""
    players = len(measured.game.players)
    nobody, everybody = frozenset[int](), measured.game.everybody
    passed = coalition.needed(players, orders)
    values = all_of(measured, passed, outcome)
    baseline = values[nobody]
    if orders is None:
        found, sampling = coalition.exact(values, players), np.zeros(players)
    else:
        each = coalition.marginals(values, orders)
        found, sampling = each.mean(axis=0), sampling_error(each, scale(baseline, outcome))
    value, interval = change(found, baseline, outcome)
    total, total_interval = change((values[everybody] - baseline)[None], baseline, outcome)
    drawn = 0 if orders is None else len(orders)
    ends = [Shift.of(one(values, players), baseline, outcome) for one in (coalition.alone, coalition.last)]
    return Shapley(value, interval, sampling, float(total[0]), at(total_interval, 0), drawn, len(passed), found, *ends)


def greedy(measured: Measured, outcome: str, paths: Sequence[Path]) -> Greedy:
    """The curves of two paths, which choose on one half of the samples and are judged on the other."""
    baseline = measured.coalition(frozenset(), outcome)

    def value(coalition: Coalition, places: NDArray[np.int64]) -> Floats:
        return measured.only(places).coalition(coalition, outcome)

    chosen, judged = coalition.greedy_curves(paths, value, len(baseline))
    first, second = (change(curve - baseline, baseline, outcome) for curve in (chosen, judged))
    both = (tuple(paths[0].chosen), tuple(paths[1].chosen))
    return Greedy(both, first[0], first[1], second[0], second[1])


def sampling_error(each: Floats, unit: float) -> Floats:
    """(player,) half a 95 % interval, over drawn pairs of orders, of the mean of (order, player, sample) marginals.

    Student's t of the pairs' means, whose sums over samples are divided by `unit`.
    """
    pairs = coalition.by_pair(each.sum(axis=-1)) / (unit if unit else np.nan)
    error = pairs.std(axis=0, ddof=1) / np.sqrt(len(pairs))
    return np.asarray(stats.t.ppf((1 + LEVEL) / 2, len(pairs) - 1) * error)


@dataclass(frozen=True)
class Named:
    """One mixture against the baseline's kept sets everywhere.

    Attributes:
        name: as it was asked for.
        mixture: who has which kept set.
        held: entries of its cache over those of the full one, mean over samples.
        heads: propagated L1 perturbation, head by head.
        drift_ratio: Σ over samples of the last layer's drift over the baseline's.
        kl: of the next token.
        top1: share of samples whose next token is the full run's.
        score: mean of the answers'; NaN where none was asked for.
        score_change: over the baseline's, likewise.
    """

    name: str
    mixture: Mixture
    held: float
    heads: HeadKind
    drift_ratio: float
    drift_ratio_interval: Scalar
    kl: Divergence
    top1: float
    score: float
    score_change: float
    score_change_interval: Scalar

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = {
            "name": self.name,
            "mixture": str(self.mixture),
            "held_over_full": self.held,
            "propagated": self.heads.to_dict(),
            "drift_ratio": self.drift_ratio,
            "drift_ratio_interval": self.drift_ratio_interval,
            "kl_median": self.kl.median,
            "kl_median_interval": self.kl.interval,
            "top1": self.top1,
            "score": self.score,
            "score_change": self.score_change,
            "score_change_interval": self.score_change_interval,
        }
        numbers: dict[str, Any] = plain(found)
        return numbers


def named(measured: Measured, name: str, mixture: Mixture) -> Named:
    """What a mixture does; equal kept sets are ties (METHOD: the protocol, 4)."""
    none = measured.game.none
    first = measured.heads(none)
    second = np.where(_same(measured, mixture, first.shape[-1]), first, measured.heads(mixture))
    floors, norms = (measured.of_heads(kind) for kind in ("head_floors", "head_norms"))
    drift = _change(measured, mixture, "drift")
    score = _change(measured, mixture, "score")
    return Named(
        name=name,
        mixture=mixture,
        held=float(np.mean([row.held for row in measured.rows(mixture)])),
        heads=compare_kind(first, second, floors, norms, np.zeros(first.shape[1:], dtype=bool)),
        drift_ratio=drift[0] + 1,
        drift_ratio_interval=_shifted(drift[1]),
        kl=divergence(measured, mixture),
        top1=float(measured.outcome(mixture, "top1").mean()),
        score=float(measured.outcome(mixture, "score").mean()),
        score_change=score[0],
        score_change_interval=score[1],
    )


def divergence(measured: Measured, mixture: Mixture) -> Divergence:
    """KL of a mixture: its median over samples."""
    found = measured.outcome(mixture, "kl")[:, None]
    return Divergence(float(np.median(found)), at(intervals.of_medians(found), 0))


def _change(measured: Measured, mixture: Mixture, outcome: str) -> tuple[float, Scalar]:
    baseline = measured.outcome(measured.game.none, outcome)
    if np.isnan(baseline).any():
        return float("nan"), None
    value, interval = change((measured.outcome(mixture, outcome) - baseline)[None], baseline, outcome)
    return float(value[0]), at(interval, 0)


def _shifted(interval: Scalar) -> Scalar:
    """An interval of a ratio out of that of a change."""
    return None if interval is None else intervals.Interval(interval.low + 1, interval.high + 1, interval.kind)


def _same(measured: Measured, mixture: Mixture, heads: int) -> NDArray[np.bool_]:
    """(sample, layer, head) True where the head's set and all of earlier layers are the baseline's."""
    treated = np.array(mixture.layers)
    equal = np.array([~treated | measured.store.same[sample] for sample in measured.samples])
    equal = np.repeat(equal, heads // equal.shape[-1], axis=-1)
    layers = np.logical_and.accumulate(equal.all(axis=2), axis=1)
    before = np.concatenate([np.ones((len(equal), 1), dtype=bool), layers[:, :-1]], axis=1)
    return np.asarray(equal & before[:, :, None])


@dataclass(frozen=True, repr=False)
class Found:
    """What switching kept sets from a baseline's to a treatment's does, player by player.

    Attributes:
        baseline, treatment: the configurations.
        asked: the question.
        game: its players, and mixtures that were asked for by name.
        baseline_kl: of the baseline everywhere.
        held: entries of the baseline's cache over those of the full one.
        shapley: None where no order was asked for.
        greedy: None where it was not asked for, or a single sample could not judge itself.
        named: the treatment everywhere, then what was asked for.
        same: share of kept sets that both sides agree in.
        sample_ids: of the samples behind all numbers.
        failures: sample -> why it could not be measured.
        identity: of the run.
    """

    baseline: EvictionConfig
    treatment: EvictionConfig
    asked: SwapConfig
    game: Game
    baseline_kl: Divergence
    held: float
    shapley: Shapley | None
    greedy: Greedy | None
    named: tuple[Named, ...]
    same: float
    sample_ids: tuple[str, ...]
    failures: Mapping[str, str]
    identity: RunIdentity

    @property
    def names(self) -> list[str]:
        """Of the players."""
        return list(map(str, self.game.players))

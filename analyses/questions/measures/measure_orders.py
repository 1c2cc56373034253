"""Configurations in every distance: pairs head by head, methods by rank, and correlations with losses.

Correlations are within each prompt, between its configurations of one setting. KL is of the very step whose heads are
measured, so that the correlation with it is circular (METHOD: the protocol, 7); answers are compared with the first
step alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import ClassVar

import numpy as np

from perturbkv.analyses import measurements, text
from perturbkv.analyses.columns import Record, column, derived, interval, record
from perturbkv.analyses.correlation.lost_answers import AREA, Rule
from perturbkv.analyses.correlation.method_identity import AREAS, DIFFERENCES, correlate_within_prompts
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison, HeadKind, perturbation_and_floor, sum_ratio
from perturbkv.analyses.layers import drift as layers
from perturbkv.analyses.measurements import Floats, Measurements, scores
from perturbkv.analyses.pairing import Pair, PairRecord
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import (
    CORRELATION,
    Estimate,
    OptionalInterval,
    estimate_mean,
    mean_where_known,
    rare_share_kind,
)
from perturbkv.analyses.stats.rank_correlation import mean_ranks, spearman
from perturbkv.analyses.text import interval_verdict
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace

ANALYSIS = "measures"
KINDS = ("isolated", "propagated")
FIRST, *OTHERS = DISTANCES
"""The paper's distance, L1, and the distances that are compared with it."""
_NUMBERS = ("sum_ratio", "sum_ratio_interval", "median_ratio", "median_ratio_interval", "better_share",
            "better_share_interval", "improved", "tied", "worsened")  # fmt: skip
"""Numbers of a `HeadKind` that a `KindInDistance` shows."""


@record
class VerdictChange(Record):
    """The shares of heads whose verdict in another distance differs from that in L1."""

    SECTION: ClassVar[str] = "measures verdicts"

    kind: str = column("isolated or propagated")
    distance: str = column("the other distance, l2 or cosine", heading="distance")
    opposite: float = column(
        "share of heads better in L1 and worse here, or the other way, beyond two noise floors of each; mean over "
        "samples",
        unit="share",
        heading="#opposite\nto L1",
    )
    opposite_interval: OptionalInterval = interval()
    alone: float = column(
        "share of heads decided in one of both distances and tied in the other; mean over samples",
        unit="share",
        heading="#decided in\none alone",
    )
    alone_interval: OptionalInterval = interval()


@record
class DriftRatio(Record):
    """The ratio of drift after the last layer, treatment over baseline; NaN where the baseline does not drift."""

    SECTION: ClassVar[str] = "measures of drift"

    distance: str = column("the distance: l1, l2 or cosine", heading="distance")
    ratio: float = column("mean drift after the last layer over the baseline's", heading="#last layer's\ndrift")
    interval: OptionalInterval = column("over samples")

    @property
    def ratio_interval(self) -> OptionalInterval:
        """The interval of the column `ratio`."""
        return self.interval


@record
class KindInDistance(Record):
    """One kind of perturbation of a pair in one distance, over all heads."""

    SECTION: ClassVar[str] = "measures of heads"

    kind: str = column("isolated or propagated", heading="perturbation")
    distance: str = column("the distance: l1, l2 or cosine", heading="distance")
    sum_ratio: float = column("treatment over baseline, summed over heads and samples", heading="#sum over\nbaseline's")
    sum_ratio_interval: OptionalInterval = interval()
    median_ratio: float = column("the median head's treatment over baseline", heading="#median\nhead's")
    median_ratio_interval: OptionalInterval = interval()
    better_share: float = column(
        "mean over samples of each sample's share of better heads", unit="share", heading="#heads\nbetter"
    )
    better_share_interval: OptionalInterval = interval()
    improved: int = column("heads whose mean over samples is lower, beyond two noise floors")
    tied: int = column("heads whose means differ by less")
    worsened: int = column("heads whose mean is higher")
    noise_floor_relative_median: float = column("noise floor over ‖o_h‖, median head; of cosine the floor itself")


@record
class KindRatios(Record):
    """One kind of perturbation of a pair in all distances: a line of the table."""

    l1: float = column("L1 over the baseline's, summed over heads and samples", heading="#L1")
    l1_interval: OptionalInterval = interval()
    l2: float = column("L2 over the baseline's, summed over heads and samples", heading="#L2")
    l2_interval: OptionalInterval = interval()
    cosine: float = column("1 − cos over the baseline's, summed over heads and samples", heading="#cosine")
    cosine_interval: OptionalInterval = interval()
    l2_opposite: float = column(
        "share of heads whose verdict in L2 is the opposite of that in L1", unit="share", heading="#L2:\nopposite",
    )  # fmt: skip
    l2_opposite_interval: OptionalInterval = interval()
    cosine_opposite: float = column(
        "share of heads whose verdict in cosine is the opposite of that in L1", unit="share",
        heading="#cosine:\nopposite",
    )  # fmt: skip
    cosine_opposite_interval: OptionalInterval = interval()


@record
class Row(PairRecord, Record):
    """A treatment compared with its baseline in every distance.

    Attributes:
        heads: distance -> the comparison head by head.
    """

    SECTION: ClassVar[str] = "measures comparison"

    baseline: EvictionConfig = column("what is compared with")
    treatment: EvictionConfig = column("what is compared")
    heads: Mapping[str, HeadComparison]
    drift: tuple[DriftRatio, ...] = column("after the last layer, in l1, l2 and cosine")
    against: tuple[VerdictChange, ...] = column("isolated and propagated, in l2 and cosine", key="against_l1")

    def kind(self, name: str, distance: str) -> HeadKind:
        """Return the comparison of the perturbation `name`, isolated or propagated, in one distance."""
        kind: HeadKind = getattr(self.heads[distance], name)
        return kind

    @derived(key="held_over_full_baseline")
    def cache_share_baseline(self) -> float:
        """Entries that the baseline's cache holds over those of the full cache."""
        return self.heads[FIRST].cache_shares[0]

    @derived(key="held_over_full_treatment", heading="#cache\nshare")
    def cache_share(self) -> float:
        """Entries that the treatment's cache holds over those of the full cache."""
        return self.heads[FIRST].cache_shares[1]

    @derived()
    def measured(self) -> list[KindInDistance]:
        """Isolated and propagated perturbation, in l1, l2 and cosine."""
        return [
            _kind_in_distance(kind, distance, self.kind(kind, distance)) for kind in KINDS for distance in DISTANCES
        ]

    def ratios(self, kind: str) -> KindRatios:
        """Return one kind of perturbation in all distances, with the heads whose verdict is the opposite of L1's."""
        numbers: dict[str, float | OptionalInterval] = {}
        for distance in DISTANCES:
            heads = self.kind(kind, distance)
            numbers |= {distance: heads.sum_ratio, f"{distance}_interval": heads.sum_ratio_interval}
        for change in self.against:
            if change.kind == kind:
                name = f"{change.distance}_opposite"
                numbers |= {name: change.opposite, f"{name}_interval": change.opposite_interval}
        return KindRatios(**numbers)  # type: ignore[arg-type]  # names and types are those of the columns


def _kind_in_distance(kind: str, distance: str, heads: HeadKind) -> KindInDistance:
    """Return the record of one kind of perturbation in one distance."""
    numbers = {name: getattr(heads, name) for name in _NUMBERS}
    return KindInDistance(
        kind=kind, distance=distance, **numbers, noise_floor_relative_median=heads.floor_relative_median
    )


def compare_in_distances(trace: Trace, pair: Pair, step: int) -> Row:
    """Compare a pair in every distance. Raises as `head_comparison.summarise` and `drift.summarise`."""
    heads = {distance: head_comparison.summarise(trace, *pair, step, distance) for distance in DISTANCES}
    return Row(
        baseline=pair[0],
        treatment=pair[1],
        heads=heads,
        drift=tuple(_drift_ratio(trace, pair, distance, step) for distance in DISTANCES),
        against=tuple(
            verdict_change(kind, distance, getattr(heads[FIRST], kind), getattr(heads[distance], kind))
            for kind in KINDS
            for distance in OTHERS
        ),
    )


def verdict_change(kind: str, distance: str, first: HeadKind, second: HeadKind) -> VerdictChange:
    """Return the shares of heads whose verdict in the second distance differs from that in the first."""
    signs = [np.sign(heads.differences).reshape(len(heads.differences), -1) for heads in (first, second)]
    opposite = (signs[0] * signs[1] < 0).mean(axis=1)
    alone = ((signs[0] == 0) != (signs[1] == 0)).mean(axis=1)
    share = rare_share_kind(signs[0].shape[1])
    return VerdictChange(
        kind=kind,
        distance=distance,
        opposite=float(opposite.mean()),
        opposite_interval=intervals.of_mean(opposite, share),
        alone=float(alone.mean()),
        alone_interval=intervals.of_mean(alone, share),
    )


def _drift_ratio(trace: Trace, pair: Pair, distance: str, step: int) -> DriftRatio:
    """Return the ratio of drift after the last layer in one distance."""
    drift = layers.summarise(trace, *pair, distance, step)
    return DriftRatio(distance, float(drift.ratio[-1]), text.interval_at(drift.ratio_interval, -1))


Measure = tuple[str, str]
"""A kind of perturbation and a distance: ('isolated', 'l2')."""
MEASURES: tuple[Measure, ...] = tuple((kind, distance) for kind in KINDS for distance in DISTANCES)


@record
class Exchange(Record):
    """Two methods that another distance ranks in the other order than L1."""

    SECTION: ClassVar[str] = "measures swap"

    distance: str = column("the other distance, l2 or cosine")
    first: EvictionConfig = column("the one that perturbs less in L1")
    second: EvictionConfig = column("the other")
    decided: bool = column("whether the ratio of both sums leaves out 1 in both distances")


@record
class MethodRanks(Record):
    """A method's rank by each distance; 1 perturbs least, equal sums share their mean rank."""

    SECTION: ClassVar[str] = "measures place"

    config: EvictionConfig = column("the method")
    ranks: Mapping[str, float] = column("distance → its rank by the sum over heads and samples; 1 perturbs least")

    @derived(json=False, heading="#L1")
    def l1(self) -> str:
        """Rank by the sum over heads and samples in L1; 1 perturbs least."""
        return f"{self.ranks['l1']:g}"

    @derived(json=False, heading="#L2")
    def l2(self) -> str:
        """Rank by the sum over heads and samples in L2."""
        return f"{self.ranks['l2']:g}"

    @derived(json=False, heading="#cosine")
    def cosine(self) -> str:
        """Rank by the sum over heads and samples in 1 − cos."""
        return f"{self.ranks['cosine']:g}"


@record
class Order(Record):
    """The ranks of one setting's methods by one kind of perturbation, in every distance.

    Attributes:
        configs: the methods.
        ranks: distance -> (method,) rank by Σ over heads and samples.
        each: other distance -> (sample,) each prompt's value of `rho`.
    """

    SECTION: ClassVar[str] = "measures order"

    kind: str = column("isolated or propagated")
    configs: tuple[EvictionConfig, ...]
    ranks: Mapping[str, Floats]
    rho: Mapping[str, Estimate] = column(
        "other distance → Spearman's ρ with L1 between the configurations of a prompt, mean over prompts"
    )
    swaps: tuple[Exchange, ...] = column("every two methods in another order than by L1")
    each: Mapping[str, Floats]

    @property
    def pairs(self) -> int:
        """The number of pairs of methods."""
        return len(self.configs) * (len(self.configs) - 1) // 2

    @derived()
    def methods(self) -> list[MethodRanks]:
        """Ranks of each configuration."""
        return [
            MethodRanks(config, {name: float(ranks[index]) for name, ranks in self.ranks.items()})
            for index, config in enumerate(self.configs)
        ]

    def exchanges(self, distance: str) -> list[Exchange]:
        """Return the pairs of methods that `distance` ranks in the opposite order to L1."""
        return [swap for swap in self.swaps if swap.distance == distance]


def head_sums(measured: Measurements) -> dict[Measure, Floats]:
    """Return measure -> (sample, config) sums over heads; identical runs get equal values.

    Raises as `head_comparison.perturbation_and_floor`.
    """
    sums = {
        f"{kind} {name}": perturbation_and_floor(measured, kind, name)[0].sum(axis=(2, 3)) for kind, name in MEASURES
    }
    equal = measurements.equalise_identical_runs(measured.trace, sums)
    return {(kind, name): equal[f"{kind} {name}"] for kind, name in MEASURES}


def agreement(sums: Mapping[Measure, Floats], indices: Sequence[int]) -> dict[Measure, Floats]:
    """Return (kind, distance) -> (sample,) Spearman's ρ between the distance and L1, over configurations at `indices`.

    NaN where all of a prompt's configurations are equal.
    """
    return {
        (kind, other): spearman(sums[kind, other][:, indices].T, sums[kind, FIRST][:, indices].T)
        for kind in KINDS
        for other in OTHERS
    }


def orders(
    sums: Mapping[Measure, Floats], indices: Sequence[int], configs: Sequence[EvictionConfig]
) -> tuple[Order, ...]:
    """Return the order of the methods `configs` per kind of perturbation; `indices`: their columns in `sums`."""
    rho = agreement(sums, indices)
    return tuple(
        Order(
            kind=kind,
            configs=tuple(configs),
            ranks={name: mean_ranks(sums[kind, name][:, indices].mean(axis=0)) for name in DISTANCES},
            rho={other: estimate_mean(rho[kind, other], CORRELATION) for other in OTHERS},
            swaps=_exchanges({name: sums[kind, name][:, indices] for name in DISTANCES}, configs),
            each={other: rho[kind, other] for other in OTHERS},
        )
        for kind in KINDS
    )


def _exchanges(sums: Mapping[str, Floats], configs: Sequence[EvictionConfig]) -> tuple[Exchange, ...]:
    """Return the pairs of methods that a distance ranks opposite to L1; `sums`: distance -> (sample, config)."""
    swaps = []
    for pair in combinations(np.argsort(sums[FIRST].mean(axis=0), kind="stable").tolist(), 2):
        signs = {name: _order_signs(array, pair) for name, array in sums.items()}
        for other in OTHERS:
            if signs[FIRST][0] * signs[other][0] < 0:
                decided = bool(signs[FIRST][1]) and bool(signs[other][1])
                swaps.append(Exchange(other, configs[pair[0]], configs[pair[1]], decided))
    return tuple(swaps)


def _order_signs(sums: Floats, pair: tuple[int, int]) -> tuple[int, int | None]:
    """Return the sign of second − first of a pair (1, 0, −1): by the sums, and by the interval of their ratio.

    None for the interval where there are too few samples for one.
    """
    first, second = (sums[:, index, None, None] for index in pair)
    _, band = sum_ratio(first, second)
    return int(np.sign(second.sum() - first.sum())), interval_verdict(band, 1)


RULE = Rule()
KL, SCORE, LOST = "kl", "score", "lost"
TARGETS = (KL, SCORE, LOST)
"""Losses that measures are correlated with: KL of the same step in nat, the answer's score, lost or kept answer."""
_STATISTIC_KINDS = {KL: (CORRELATION, DIFFERENCES), SCORE: (CORRELATION, DIFFERENCES), LOST: (AREA, AREAS)}
EachPrompt = Mapping[tuple[str, Measure], Floats]
"""(Loss, measure) -> (prompt,) correlation; NaN where the prompt does not decide."""


def format_estimate(estimate: Estimate) -> str:
    """Return an estimate with its interval: '0.71 [0.65, 0.78]'."""
    return text.decimal(estimate.value, estimate.interval)


@record
class LossCorrelation(Record):
    """The correlation of one measure with one loss, over prompts."""

    SECTION: ClassVar[str] = "measures link"

    target: str = column(
        "what is lost: kl (ρ with KL of the same step, which nearly is the same thing), score (ρ with the answer's "
        "score) or lost (share of pairs of a lost and a kept answer in which the lost one is more perturbed)",
        heading="with",
    )
    kind: str = column("isolated or propagated", heading="perturbation")
    distance: str = column("the distance: l1, l2 or cosine", heading="distance")
    value: Estimate = column("over prompts", heading="#ρ, or share", text=format_estimate)
    less_l1: Estimate | None = column(
        "the same less that of L1 on the same prompts; null of L1", heading="#less L1", text=format_estimate
    )

    @derived(json=False, heading="#n")
    def prompts(self) -> int:
        """Prompts whose configurations differ in both measure and loss."""
        return self.value.prompts


def has_scores(trace: Trace) -> bool:
    """Return whether every complete sample's answers have scores."""
    return "score_full" in trace.arrays and all(
        not np.isnan(np.asarray(trace.arrays[name], dtype=np.float64)[trace.ok]).any()
        for name in ("score_full", "score")
    )


def correlate_each_prompt(
    trace: Trace, measured: Measurements, sums: Mapping[Measure, Floats], indices: Sequence[int]
) -> EachPrompt:
    """Return each prompt's correlation of every measure with every loss, over the configurations at `indices`.

    Args:
        trace: with all complete samples, whose answers are compared with the first step.
        measured: the trace at the step.
        sums: `head_sums` at that step.
        indices: of the configurations.
    """
    lost = measurements.equalise_identical_runs(measured.trace, {KL: measured["logit_kl"]})[KL][:, indices]
    each: dict[tuple[str, Measure], Floats] = {
        (KL, measure): spearman(sums[measure][:, indices].T, lost.T) for measure in MEASURES
    }
    return {**each, **_answer_correlations(trace, indices)} if has_scores(trace) else each


def _answer_correlations(trace: Trace, indices: Sequence[int]) -> EachPrompt:
    """Return each answered prompt's correlations of first-step measures with scores and with lost answers.

    Only prompts that the full cache answers have one.
    """
    measured = Measurements(trace, ANALYSIS)
    graded, sums = scores(measured.trace, ANALYSIS), head_sums(measured)
    answered = graded.full > RULE.right
    scored = graded.evicted[answered][:, indices]
    lost = RULE.lost_of(graded.full[answered], scored)
    ranks = {
        measure: correlate_within_prompts(sums[measure][answered][:, indices], scored, lost) for measure in MEASURES
    }
    return {
        **{(SCORE, measure): one.rho for measure, one in ranks.items()},
        **{(LOST, measure): one.area for measure, one in ranks.items()},
    }


def mean_over_settings(settings: Sequence[EachPrompt]) -> EachPrompt:
    """Return each prompt's values, averaged over settings."""
    return {key: mean_where_known([setting[key] for setting in settings]) for key in settings[0]}


def correlations(each: EachPrompt) -> tuple[LossCorrelation, ...]:
    """Return the correlation of every measure with every loss, mean over prompts."""
    return tuple(
        _correlation(each, target, measure) for target in TARGETS for measure in MEASURES if (target, measure) in each
    )


def _correlation(each: EachPrompt, target: str, measure: Measure) -> LossCorrelation:
    """Return the correlation of one measure with one loss, and its difference from that of L1."""
    (kind, distance), (own, between) = measure, _STATISTIC_KINDS[target]
    value, first = each[target, measure], each[target, (kind, FIRST)]
    less = None if distance == FIRST else estimate_mean(value - first, between)
    return LossCorrelation(target, kind, distance, estimate_mean(value, own), less)

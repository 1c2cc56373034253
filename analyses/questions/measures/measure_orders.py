"""Methods of one budget ranked by each distance: do they come in another order?.

Two configurations compared in every distance: the same heads and samples, and whether the verdicts are the same.

Which distance tells best what is lost: KL of the same step, and the scores of answers by the rules of `link`.

Within each prompt, between its configurations of one setting. KL is of the very step whose heads are measured, so that
it nearly is what they are (METHOD: the protocol, 7); answers are held against the first step alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from perturbkv.analyses import measurements, text
from perturbkv.analyses.correlation.lost_answers import AREA, Rule
from perturbkv.analyses.correlation.method_identity import AREAS, DIFFERENCES, within
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison, HeadKind, sum_ratio, with_floor
from perturbkv.analyses.layers import drift as layers
from perturbkv.analyses.measurements import Floats, at_step, scores, values
from perturbkv.analyses.pairing import OfPair, Pair
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import CORRELATION, Estimate, Scalar, mean_of, over_prompts, rare_share_of
from perturbkv.analyses.stats.rank_correlation import mean_ranks, spearman
from perturbkv.analyses.text import decided
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace

KINDS = ("isolated", "propagated")
FIRST, *OTHERS = DISTANCES
"""The paper's distance, and those that are held against it."""


@dataclass(frozen=True)
class Against:
    """How heads fare in another distance than L1: shares of all heads, mean over samples, in [0, 1].

    Attributes:
        kind, distance: isolated or propagated, in l2 or cosine.
        opposite: better in one of both distances and worse in the other, beyond two noise floors of each.
        alone: better or worse in one of both, tied in the other.
    """

    kind: str
    distance: str
    opposite: float
    opposite_interval: Scalar
    alone: float
    alone_interval: Scalar


@dataclass(frozen=True)
class Drift:
    """Mean drift after the last layer, treatment over baseline; NaN where the baseline does not drift."""

    ratio: float
    interval: Scalar


@dataclass(frozen=True, repr=False)
class Row(OfPair):
    """One treatment against its baseline.

    Attributes:
        baseline, treatment: the configurations.
        heads: distance -> their heads.
        drift: distance -> what comes out of the last layer.
        against: for each kind every distance but L1.
    """

    baseline: EvictionConfig
    treatment: EvictionConfig
    heads: Mapping[str, HeadComparison]
    drift: Mapping[str, Drift]
    against: tuple[Against, ...]

    def kind(self, name: str, distance: str) -> HeadKind:
        """Isolated or propagated, in one distance."""
        found: HeadKind = getattr(self.heads[distance], name)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        held = self.heads[FIRST].held
        return {
            "baseline": self.baseline,
            "treatment": self.treatment,
            "held_over_full_baseline": held[0],
            "held_over_full_treatment": held[1],
            "measured": [_measured(self, kind, distance) for kind in KINDS for distance in DISTANCES],
            "drift": [{"distance": name, **vars(one)} for name, one in self.drift.items()],
            "against_l1": self.against,
        }


def row(trace: Trace, pair: Pair, step: int) -> Row:
    """A pair of configurations in every distance. Raises as `head_comparison.summarise` and `drift.summarise`."""
    found = {distance: head_comparison.summarise(trace, *pair, step, distance) for distance in DISTANCES}
    return Row(
        baseline=pair[0],
        treatment=pair[1],
        heads=found,
        drift={distance: _drift(trace, pair, distance, step) for distance in DISTANCES},
        against=tuple(
            against(kind, distance, getattr(found[FIRST], kind), getattr(found[distance], kind))
            for kind in KINDS
            for distance in OTHERS
        ),
    )


def against(kind: str, distance: str, first: HeadKind, other: HeadKind) -> Against:
    """Of each sample's heads, which are decided otherwise in another distance."""
    sides = [np.sign(one.differences).reshape(len(one.differences), -1) for one in (first, other)]
    opposite = (sides[0] * sides[1] < 0).mean(axis=1)
    alone = ((sides[0] == 0) != (sides[1] == 0)).mean(axis=1)
    share = rare_share_of(sides[0].shape[1])
    return Against(
        kind=kind,
        distance=distance,
        opposite=float(opposite.mean()),
        opposite_interval=intervals.of_mean(opposite, share),
        alone=float(alone.mean()),
        alone_interval=intervals.of_mean(alone, share),
    )


def _drift(trace: Trace, pair: Pair, distance: str, step: int) -> Drift:
    found = layers.summarise(trace, *pair, distance, step)
    return Drift(float(found.ratio[-1]), text.at(found.ratio_interval, -1))


def _measured(row: Row, kind: str, distance: str) -> dict[str, Any]:
    found = row.kind(kind, distance)
    shown = ("sum_ratio", "median_ratio", "better_share")
    return {
        "kind": kind,
        "distance": distance,
        **{name: value for name, value in vars(found).items() if name.removesuffix("_interval") in shown},
        "improved": found.improved_count,
        "tied": found.tied_count,
        "worsened": found.worsened_count,
        "noise_floor_relative_median": found.floor_relative_median,
    }


Measure = tuple[str, str]
"""A kind of perturbation and a distance."""
MEASURES: tuple[Measure, ...] = tuple((kind, distance) for kind in KINDS for distance in DISTANCES)


@dataclass(frozen=True)
class Swap:
    """Two methods that stand in another order than by L1.

    Attributes:
        distance: l2 or cosine.
        first, second: the one that perturbs less in L1 first.
        decided: whether both orders are decided: the ratio's interval leaves out 1 in L1, and on the other side here.
    """

    distance: str
    first: EvictionConfig
    second: EvictionConfig
    decided: bool


@dataclass(frozen=True)
class Order:
    """Methods of one setting by one kind of perturbation.

    Attributes:
        kind: isolated or propagated.
        configs: the methods.
        ranks: distance -> (method,) place by Σ over heads and samples, 1 perturbs least; equal sums share theirs.
        rho: distance but L1 -> Spearman's ρ with L1 between the methods of a prompt, over prompts.
        swaps: every two methods in another order.
        each: of `rho` what every prompt says (sample,).
    """

    kind: str
    configs: tuple[EvictionConfig, ...]
    ranks: Mapping[str, Floats]
    rho: Mapping[str, Estimate]
    swaps: tuple[Swap, ...]
    each: Mapping[str, Floats]

    @property
    def pairs(self) -> int:
        """How many two methods there are."""
        return len(self.configs) * (len(self.configs) - 1) // 2

    def swapped(self, distance: str) -> list[Swap]:
        """Those of one distance."""
        return [swap for swap in self.swaps if swap.distance == distance]

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        methods = [{"config": config, "ranks": {name: float(ranks[place]) for name, ranks in self.ranks.items()}}
                   for place, config in enumerate(self.configs)]  # fmt: skip
        return {"kind": self.kind, "methods": methods, "rho": self.rho, "swaps": self.swaps}


def sums(trace: Trace, step: int) -> dict[Measure, Floats]:
    """(sample, config) Σ over heads of each measure, equal where all kept sets are.

    Raises as `head_comparison.with_floor`.
    """
    found = {f"{kind} {name}": with_floor(trace, kind, name, step)[0].sum(axis=(2, 3)) for kind, name in MEASURES}
    equal = measurements.alike_first_steps(trace, found)
    return {(kind, name): equal[f"{kind} {name}"] for kind, name in MEASURES}


def agreement(moved: Mapping[Measure, Floats], places: Sequence[int]) -> dict[Measure, Floats]:
    """Kind and distance but L1 -> (sample,) ρ with L1; NaN where a prompt's methods are all alike."""
    return {
        (kind, other): spearman(moved[kind, other][:, places].T, moved[kind, FIRST][:, places].T)
        for kind in KINDS
        for other in OTHERS
    }


def orders(
    moved: Mapping[Measure, Floats], places: Sequence[int], configs: Sequence[EvictionConfig]
) -> tuple[Order, ...]:
    """One per kind, of `configs` at these places."""
    rho = agreement(moved, places)
    return tuple(
        Order(
            kind=kind,
            configs=tuple(configs),
            ranks={name: mean_ranks(moved[kind, name][:, places].mean(axis=0)) for name in DISTANCES},
            rho={other: over_prompts(rho[kind, other], CORRELATION) for other in OTHERS},
            swaps=_swaps({name: moved[kind, name][:, places] for name in DISTANCES}, configs),
            each={other: rho[kind, other] for other in OTHERS},
        )
        for kind in KINDS
    )


def _swaps(moved: Mapping[str, Floats], configs: Sequence[EvictionConfig]) -> tuple[Swap, ...]:
    found = []
    for pair in combinations(np.argsort(moved[FIRST].mean(axis=0), kind="stable").tolist(), 2):
        sides = {name: _side(array, pair) for name, array in moved.items()}
        for other in OTHERS:
            if sides[FIRST][0] * sides[other][0] < 0:
                both = sides[FIRST][1], sides[other][1]
                certain = None not in both and both[0] != 0 and both[1] != 0
                found.append(Swap(other, configs[pair[0]], configs[pair[1]], certain))
    return tuple(found)


def _side(moved: Floats, pair: tuple[int, int]) -> tuple[int, int | None]:
    """1 where the second perturbs more, −1 less, 0 alike: by the sums, and as far as their ratio's interval decides."""
    first, second = (moved[:, place, None, None] for place in pair)
    _, interval = sum_ratio(first, second)
    return int(np.sign(second.sum() - first.sum())), decided(interval, 1)


RULE = Rule()
KL, SCORE, LOST = "kl", "score", "lost"
TARGETS = (KL, SCORE, LOST)
"""What is lost: nats of the same step; the answer's score; a lost answer among kept ones."""
_KINDS = {KL: (CORRELATION, DIFFERENCES), SCORE: (CORRELATION, DIFFERENCES), LOST: (AREA, AREAS)}
EachPrompt = Mapping[tuple[str, Measure], Floats]
"""Target and measure -> (prompt,), NaN where the prompt does not decide."""


@dataclass(frozen=True)
class Linked:
    """How strongly one measure is linked with one thing that is lost.

    Attributes:
        target: `kl` (Spearman's ρ with KL of the same step: above 0 more perturbed methods lose more), `score` (ρ with
            the answer's score: below 0 they score less), or `lost` (share of pairs of a lost and a kept answer in which
            the lost one is more perturbed).
        kind, distance: the measure.
        value: over prompts.
        less_l1: the same less that of L1 on the same prompts; None of L1 itself.
    """

    target: str
    kind: str
    distance: str
    value: Estimate
    less_l1: Estimate | None


def answered(trace: Trace) -> bool:
    """Whether every complete sample's answers have scores."""
    return "score_full" in trace.arrays and all(
        not np.isnan(np.asarray(trace.arrays[name], dtype=np.float64)[trace.ok]).any()
        for name in ("score_full", "score")
    )


def each_prompt(trace: Trace, moved: Mapping[Measure, Floats], places: Sequence[int], step: int) -> EachPrompt:
    """What every prompt says of these configurations; `moved`: of the trace's samples at `step`, as `sums` gives it."""
    held = at_step(trace, "measures", step)
    lost = measurements.alike_first_steps(held, {KL: values(held, "logit_kl", "measures", step)})[KL][:, places]
    found: dict[tuple[str, Measure], Floats] = {
        (KL, measure): spearman(moved[measure][:, places].T, lost.T) for measure in MEASURES
    }
    return {**found, **_of_answers(trace, places)} if answered(trace) else found


def _of_answers(trace: Trace, places: Sequence[int]) -> EachPrompt:
    """Of the prompts that the full cache answers, by the first step."""
    held = at_step(trace, "measures", 0)
    graded, moved = scores(held, "measures"), sums(held, 0)
    right = graded.full > RULE.right
    scored = graded.evicted[right][:, places]
    gone = RULE.lost_of(graded.full[right], scored)
    found = {measure: within(moved[measure][right][:, places], scored, gone) for measure in MEASURES}
    return {
        **{(SCORE, measure): one.rho for measure, one in found.items()},
        **{(LOST, measure): one.area for measure, one in found.items()},
    }


def together(settings: Sequence[EachPrompt]) -> EachPrompt:
    """Each prompt's mean over several settings, in every one of which its configurations were compared."""
    return {key: mean_of([one[key] for one in settings]) for key in settings[0]}


def linked(each: EachPrompt) -> tuple[Linked, ...]:
    """One per target and measure that is there."""
    return tuple(
        _linked(each, target, measure) for target in TARGETS for measure in MEASURES if (target, measure) in each
    )


def _linked(each: EachPrompt, target: str, measure: Measure) -> Linked:
    (kind, distance), (own, between) = measure, _KINDS[target]
    value, first = each[target, measure], each[target, (kind, FIRST)]
    less = None if distance == FIRST else over_prompts(value - first, between)
    return Linked(target, kind, distance, over_prompts(value, own), less)

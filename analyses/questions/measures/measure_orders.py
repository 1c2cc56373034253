"""Methods of one budget ranked by each distance: do they come in another order?."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from perturbkv.analyses import first_step
from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.heads.head_comparison import with_floor
from perturbkv.analyses.heads.head_kind import sum_ratio
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.questions.measures.measure_rows import FIRST, KINDS, OTHERS
from perturbkv.analyses.sentences import decided
from perturbkv.analyses.stats.estimates import Estimate, over_prompts
from perturbkv.analyses.stats.intervals import CORRELATION
from perturbkv.analyses.stats.rank_correlation import mean_ranks, spearman
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace

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
    """(sample, config) Σ over heads of each measure, equal where all kept sets are. Raises as `heads.with_floor`."""
    found = {f"{kind} {name}": with_floor(trace, kind, name, step)[0].sum(axis=(2, 3)) for kind, name in MEASURES}
    equal = first_step.alike(trace, found)
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

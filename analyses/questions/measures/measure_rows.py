"""Two configurations compared in every distance: the same heads and samples, and whether the verdicts are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.heads.head_kind import HeadKind
from perturbkv.analyses.layers import drift as layers
from perturbkv.analyses.pairing import OfPair, Pair
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import Scalar, rare_share_of
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
    """A pair of configurations in every distance. Raises as `heads.summarise` and `layers.summarise`."""
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

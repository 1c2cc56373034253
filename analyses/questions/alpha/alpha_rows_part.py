"""What choosing α brings, isolated: every choice against the paper's α and against one α for all heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.heads.head_comparison import HeadKind, compare_kind
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.questions.alpha.alpha_choice import BASELINE, PAPER, Chosen, Fold, Sweep, composed, judged
from perturbkv.analyses.stats.intervals import Scalar
from perturbkv.configs.alpha_table import GLOBAL, HEAD, LAYER

NAMES = {GLOBAL: "one for all heads", LAYER: "per layer", HEAD: "per head"}
OTHERS, SAME = "others", "same"
"""Chosen on other samples than those it is judged on, or on the same ones."""


@dataclass(frozen=True)
class Row:
    """One way to set α, over all samples.

    Attributes:
        name: `attention`, `α = 0.25`, or at which level α was chosen.
        chosen_on: `others`, `same` (which flatters), or empty where nothing is chosen.
        over_paper: against α = 0.25.
        over_fixed: against one α for all heads, chosen on other samples.
    """

    name: str
    chosen_on: str
    over_paper: HeadKind
    over_fixed: HeadKind

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        found: dict[str, Any] = {"name": self.name, "chosen_on": self.chosen_on}
        for against in ("over_paper", "over_fixed"):
            kind: HeadKind = getattr(self, against)
            for name in ("sum_ratio", "median_ratio", "better_share"):
                found |= {f"{against}_{one}": getattr(kind, one) for one in (name, f"{name}_interval")}
        return found


@dataclass(frozen=True)
class Point:
    """One α for all heads: Σ isolated L1 over that of the paper's α, and who chooses it, on all samples.

    Attributes:
        alpha: in [0, 1].
        ratio, interval: of Σ over all heads and samples.
        layers, heads: the share of layers and of heads that choose it; None where these choose nothing.
    """

    alpha: float
    ratio: float
    interval: Scalar
    layers: float
    heads: float | None


def rows(found: Sweep, parts: tuple[Fold, ...], whole: Chosen) -> tuple[Row, ...]:
    """Attention, the paper's α, every choice on other samples, and the same on all samples."""
    paper, fixed = found.moved[:, found.paper], judged(found, parts, GLOBAL)
    told = [(BASELINE, "", found.baseline_moved), (f"α = {PAPER}", "", paper)]
    told += [(NAMES[by], OTHERS, judged(found, parts, by)) for by in whole]
    told += [(NAMES[by], SAME, composed(found, places)) for by, places in whole.items()]
    return tuple(Row(name, on, _over(found, paper, moved), _over(found, fixed, moved)) for name, on, moved in told)


def curve(found: Sweep, whole: Chosen) -> tuple[Point, ...]:
    """Σ over α, one for all heads, and how often each is chosen."""
    paper = found.moved[:, found.paper]
    each = [_over(found, paper, found.moved[:, place]) for place in range(len(found.alphas))]
    return tuple(
        Point(
            alpha=float(alpha),
            ratio=kind.sum_ratio,
            interval=kind.sum_ratio_interval,
            layers=float((whole[LAYER] == place).mean()),
            heads=float((whole[HEAD] == place).mean()) if HEAD in whole else None,
        )
        for place, (alpha, kind) in enumerate(zip(found.alphas, each, strict=True))
    )


def _over(found: Sweep, baseline: Floats, treatment: Floats) -> HeadKind:
    flagged = np.zeros(found.floor.shape[1:], dtype=bool)
    return compare_kind(baseline, treatment, found.floor, found.norm, flagged)

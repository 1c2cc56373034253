"""What comes out where each fold's samples are run with what was chosen on the others: KL, drift, propagated L1.

What choosing α brings, isolated: every choice against the paper's α and against one α for all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.heads.head_comparison import HeadKind, compare_kind, sum_ratio
from perturbkv.analyses.measurements import Floats, at_step, values
from perturbkv.analyses.questions.alpha.alpha_choice import (
    ANALYSIS,
    BASELINE,
    PAPER,
    PAPER_ROLE,
    Chosen,
    Fold,
    Sweep,
    composed,
    judged,
)
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import Scalar
from perturbkv.configs.alpha_table import GLOBAL, HEAD, LAYER
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

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


_VARIABLES = ("logit_kl", "hidden_drift_l1", "perturbation_propagated", "perturbation_isolated")


@dataclass(frozen=True)
class Outcome:
    """What one way to set α gives, measured on samples that it was not chosen on.

    Attributes:
        name: as of an isolated row.
        kl_median: KL(full ‖ evicted) of the next token, nat.
        kl: mean KL over that at α = 0.25.
        kl_lower: the share of samples whose KL is lower than at α = 0.25; `kl_over_fixed` against one α for all heads.
        drift: mean drift after the last layer over that at α = 0.25.
        propagated: Σ propagated L1 of all heads over that at α = 0.25.
    """

    name: str
    kl_median: float
    kl_median_interval: Scalar
    kl: float
    kl_interval: Scalar
    kl_lower: float
    kl_lower_interval: Scalar
    kl_over_fixed: float
    kl_over_fixed_interval: Scalar
    drift: float
    drift_interval: Scalar
    propagated: float
    propagated_interval: Scalar


@dataclass(frozen=True)
class Measured:
    """All folds together.

    Attributes:
        outcomes: attention, α = 0.25, then each choice.
        samples: complete ones.
        off: the largest difference between a composed isolated L1 and the measured one, over the head's largest.
    """

    outcomes: tuple[Outcome, ...]
    samples: int
    off: float


def measured(found: Sweep, parts: Sequence[Fold], traces: Sequence[Trace]) -> Measured:
    """What the folds' traces show; each holds a fold's samples at its configurations, in any order.

    Raises TraceError where a fold has no such trace, or two.
    """
    each = [_of_fold(part, traces) for part in parts]
    held = {name: np.concatenate([one[name] for one in each]) for name in _VARIABLES}
    roles = list(parts[0].configs)
    paper, fixed = roles.index(PAPER_ROLE), roles.index(GLOBAL)
    return Measured(
        outcomes=tuple(_outcome(_name(role), held, place, paper, fixed) for place, role in enumerate(roles)),
        samples=len(held["logit_kl"]),
        off=max(_off(found, part, trace) for part in parts for trace in [_trace_of(part, traces)]),
    )


def _name(role: str) -> str:
    return f"α = {PAPER}" if role == PAPER_ROLE else NAMES.get(role, role)


def _trace_of(part: Fold, traces: Sequence[Trace]) -> Trace:
    fits = [one for one in traces if part.is_in(one)]
    if len(fits) != 1:
        msg = (
            f"expected one trace of fold {part.number}: the samples {', '.join(part.samples)} at what was chosen on "
            f"the others; got {len(fits)} among {len(traces)}"
        )
        raise TraceError(msg)
    return at_step(fits[0], ANALYSIS, 0)


def _of_fold(part: Fold, traces: Sequence[Trace]) -> dict[str, Floats]:
    """Variable -> (sample, role, …)."""
    trace = _trace_of(part, traces)
    places = [trace.config_index(config.label()) for config in part.configs.values()]
    return {name: values(trace, name, ANALYSIS, 0)[:, places] for name in _VARIABLES}


def _off(found: Sweep, part: Fold, trace: Trace) -> float:
    whole = [name for name, ok in zip(trace.sample_ids, trace.ok, strict=True) if ok]
    rows = [found.samples.index(name) for name in whole]
    moved = values(trace, "perturbation_isolated", ANALYSIS, 0)
    largest = np.maximum(found.moved.max(axis=(0, 1)), np.finfo(float).tiny)
    off = [
        np.abs(moved[:, trace.config_index(part.configs[by].label())] - composed(found, places)[rows]) / largest
        for by, places in part.chosen.items()
    ]
    return float(np.max(off))


def _outcome(name: str, held: dict[str, Floats], place: int, paper: int, fixed: int) -> Outcome:
    kl, drift = held["logit_kl"], held["hidden_drift_l1"][:, :, -1]
    median = intervals.of_medians(kl[:, [place]])
    over_paper, over_fixed = (_ratio(kl[:, other], kl[:, place]) for other in (paper, fixed))
    drifted, lower = _ratio(drift[:, paper], drift[:, place]), kl[:, place] < kl[:, paper]
    propagated = sum_ratio(*(held["perturbation_propagated"][:, one] for one in (paper, place)))
    return Outcome(
        name=name,
        kl_median=float(np.median(kl[:, place])),
        kl_median_interval=None if median is None else median.at(0),
        kl=over_paper[0],
        kl_interval=over_paper[1],
        kl_lower=float(lower.mean()),
        kl_lower_interval=intervals.of_samples(lower),
        kl_over_fixed=over_fixed[0],
        kl_over_fixed_interval=over_fixed[1],
        drift=drifted[0],
        drift_interval=drifted[1],
        propagated=propagated[0],
        propagated_interval=propagated[1],
    )


def _ratio(baseline: Floats, treatment: Floats) -> tuple[float, Scalar]:
    """Mean treatment over mean baseline of (sample,) values."""
    return sum_ratio(baseline[:, None, None], treatment[:, None, None])


def to_dict(found: Measured) -> dict[str, Any]:
    """Everything a reader needs, not yet plain."""
    return {"samples": found.samples, "composed_off": found.off, "rows": [vars(one) for one in found.outcomes]}

"""Each way to choose α compared with the paper's α and one α for all: isolated L1, and outcomes of runs of folds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.columns import Record, column, interval, record
from perturbkv.analyses.heads.head_comparison import HeadKind, compare_kind, sum_ratio
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.questions.alpha.alpha_choice import (
    ANALYSIS,
    BASELINE,
    PAPER,
    PAPER_ROLE,
    Chosen,
    Fold,
    Sweep,
    compose,
    judged_loss,
)
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import OptionalInterval
from perturbkv.analyses.text import equal_in_every_sample
from perturbkv.configs.alpha_table import GLOBAL, HEAD, LAYER
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

NAMES = {GLOBAL: "one for all heads", LAYER: "per layer", HEAD: "per head"}
OTHERS, SAME = "others", "same"
"""Whether α was chosen on other samples than those that it is judged on, or on the same samples."""
_SHOWN = ("sum_ratio", "median_ratio", "better_share")
"""Numbers of a `HeadKind` that a row shows."""


def _format_ratio(value: float, interval: OptionalInterval = None, digits: int = 2) -> str:
    """Return a ratio with its interval; '1' where both sides are equal in every sample."""
    return "1" if equal_in_every_sample(value, interval) else text.decimal(value, interval, digits)


_format_fine_ratio = partial(_format_ratio, digits=3)


@record
class Row(Record):
    """One way to choose α, over all samples.

    Attributes:
        over_paper: comparison with α = 0.25.
        over_fixed: comparison with one α for all heads, chosen on other samples.
    """

    SECTION: ClassVar[str] = "alpha row"

    name: str = column("attention, α = 0.25, one for all heads, per layer, per head")
    chosen_on: str = column("others, same (flatters), or empty where nothing is chosen")
    over_paper: HeadKind
    over_fixed: HeadKind
    over_paper_sum_ratio: float = column(
        f"isolated L1 over that of α = {PAPER}, summed over heads and samples", heading=f"#sum over\nα = {PAPER}",
        text=_format_ratio,
    )  # fmt: skip
    over_paper_sum_ratio_interval: OptionalInterval = interval("over samples, choices fixed")
    over_paper_median_ratio: float = column(
        f"the median head's isolated L1 over that of α = {PAPER}", heading="#median head\nover it", text=_format_ratio
    )
    over_paper_median_ratio_interval: OptionalInterval = interval()
    over_paper_better_share: float = column(
        f"share of heads that perturb less than at α = {PAPER}, mean over samples", unit="share",
        heading="#heads\nbetter",
    )  # fmt: skip
    over_paper_better_share_interval: OptionalInterval = interval()
    over_fixed_sum_ratio: float = column(
        "isolated L1 over that of one α for all heads, chosen on other samples, summed over heads and samples",
        heading="#sum over\none for all", text=_format_fine_ratio,
    )  # fmt: skip
    over_fixed_sum_ratio_interval: OptionalInterval = interval()
    over_fixed_median_ratio: float = column("the median head's isolated L1 over that of one α for all heads")
    over_fixed_median_ratio_interval: OptionalInterval = interval()
    over_fixed_better_share: float = column(
        "share of heads that perturb less than with one α for all heads, mean over samples", unit="share"
    )
    over_fixed_better_share_interval: OptionalInterval = interval()


def _row(name: str, chosen_on: str, over_paper: HeadKind, over_fixed: HeadKind) -> Row:
    """Return the row of a way of choosing α, from its comparisons with α = 0.25 and with one α for all heads."""
    numbers: dict[str, Any] = {"over_paper": over_paper, "over_fixed": over_fixed}
    numbers |= {
        f"{against}_{number}{part}": getattr(kind, f"{number}{part}")
        for against, kind in (("over_paper", over_paper), ("over_fixed", over_fixed))
        for number in _SHOWN
        for part in ("", "_interval")
    }
    return Row(name=name, chosen_on=chosen_on, **numbers)


@record
class Point(Record):
    """One α for all heads: isolated L1 over that of the paper's α, and the heads that choose it on all samples."""

    SECTION: ClassVar[str] = "alpha point"

    alpha: float = column("share of stage 1, in [0, 1]", heading="α")
    ratio: float = column(
        f"isolated L1 over that of α = {PAPER}, summed over heads and samples", heading=f"#sum over\nα = {PAPER}",
        text=_format_fine_ratio,
    )  # fmt: skip
    interval: OptionalInterval = column("over samples")
    layers: float = column(
        "share of layers that choose it, on all samples", unit="share", heading="#layers\nthat choose it"
    )
    heads: float | None = column(
        "share of heads that choose it; null where all heads of a layer share a kept set", unit="share",
        heading="#heads\nthat choose it",
    )  # fmt: skip

    @property
    def ratio_interval(self) -> OptionalInterval:
        """The interval of the column `ratio`."""
        return self.interval


def rows(sweep: Sweep, folds: tuple[Fold, ...], whole: Chosen) -> tuple[Row, ...]:
    """Return the rows: attention, the paper's α, choices made on other samples, and choices made on all samples."""
    paper, fixed = sweep.loss[:, sweep.paper_index], judged_loss(sweep, folds, GLOBAL)
    losses = [(BASELINE, "", sweep.baseline_loss), (f"α = {PAPER}", "", paper)]
    losses += [(NAMES[level], OTHERS, judged_loss(sweep, folds, level)) for level in whole]
    losses += [(NAMES[level], SAME, compose(sweep, indices)) for level, indices in whole.items()]
    return tuple(
        _row(name, chosen_on, _compare_heads(sweep, paper, loss), _compare_heads(sweep, fixed, loss))
        for name, chosen_on, loss in losses
    )


def curve(sweep: Sweep, whole: Chosen) -> tuple[Point, ...]:
    """Return a point per α: isolated L1 with that α for all heads, and the share of layers and heads that choose it."""
    paper = sweep.loss[:, sweep.paper_index]
    kinds = [_compare_heads(sweep, paper, sweep.loss[:, index]) for index in range(len(sweep.alphas))]
    return tuple(
        Point(
            alpha=float(alpha),
            ratio=kind.sum_ratio,
            interval=kind.sum_ratio_interval,
            layers=float((whole[LAYER] == index).mean()),
            heads=float((whole[HEAD] == index).mean()) if HEAD in whole else None,
        )
        for index, (alpha, kind) in enumerate(zip(sweep.alphas, kinds, strict=True))
    )


def _compare_heads(sweep: Sweep, baseline: Floats, treatment: Floats) -> HeadKind:
    """Return the head-by-head comparison of two choices' isolated L1, (sample, layer, head)."""
    flagged = np.zeros(sweep.floor.shape[1:], dtype=bool)
    return compare_kind(baseline, treatment, sweep.floor, sweep.norm, flagged)


_VARIABLES = ("logit_kl", "hidden_drift_l1", "perturbation_propagated", "perturbation_isolated")


@record
class Outcome(Record):
    """One way to choose α, measured by runs of samples on which it was not chosen."""

    SECTION: ClassVar[str] = "alpha outcome"

    name: str = column("as of an alpha row")
    kl_median: float = column(
        "KL(full ‖ evicted) of the next token, median over samples", unit="nat", heading="#KL,\nmedian, nat",
        text=text.three_digits,
    )  # fmt: skip
    kl_median_interval: OptionalInterval = interval()
    kl: float = column(f"mean KL over that at α = {PAPER}", heading=f"#mean KL over\nα = {PAPER}", text=_format_ratio)
    kl_interval: OptionalInterval = interval()
    kl_lower: float = column(
        f"share of samples whose KL is lower than at α = {PAPER}", unit="share", heading="#samples\nlower"
    )
    kl_lower_interval: OptionalInterval = column("exact")
    kl_over_fixed: float = column(
        "mean KL over that of one α for all heads", heading="#mean KL over\none for all", text=_format_ratio
    )
    kl_over_fixed_interval: OptionalInterval = interval()
    drift: float = column(
        f"mean drift after the last layer over that at α = {PAPER}", heading="#last layer's\ndrift", text=_format_ratio
    )
    drift_interval: OptionalInterval = interval()
    propagated: float = column(
        f"propagated L1 over that at α = {PAPER}, summed over heads and samples", heading="#sum,\nprop.",
        text=_format_ratio,
    )  # fmt: skip
    propagated_interval: OptionalInterval = interval()


@record
class FoldOutcomes(Record):
    """The outcomes of all folds together, each run with the α chosen on the other folds."""

    SECTION: ClassVar[str] = "alpha measured"

    outcomes: tuple[Outcome, ...] = column("attention, α = 0.25, then each choice", key="rows")
    samples: int = column("complete samples")
    composition_error: float = column(
        "largest difference of composed and measured isolated L1, over the head's largest", key="composed_off"
    )


def summarise_folds(sweep: Sweep, folds: Sequence[Fold], traces: Sequence[Trace]) -> FoldOutcomes:
    """Return the outcomes of all folds from their traces, given in any order.

    Each trace holds one fold's samples at the fold's configurations. Raises TraceError where a fold has none, or two.
    """
    measured = [_measurements(fold, traces) for fold in folds]
    parts = [_fold_arrays(fold, one) for fold, one in zip(folds, measured, strict=True)]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in _VARIABLES}
    roles = list(folds[0].configs)
    paper, fixed = roles.index(PAPER_ROLE), roles.index(GLOBAL)
    return FoldOutcomes(
        outcomes=tuple(_outcome(_role_name(role), arrays, index, paper, fixed) for index, role in enumerate(roles)),
        samples=len(arrays["logit_kl"]),
        composition_error=max(_composition_error(sweep, fold, one) for fold, one in zip(folds, measured, strict=True)),
    )


def _role_name(role: str) -> str:
    """Return the row name of a configuration's role in a fold."""
    return f"α = {PAPER}" if role == PAPER_ROLE else NAMES.get(role, role)


def _measurements(fold: Fold, traces: Sequence[Trace]) -> Measurements:
    """Return the measurements of the trace that fits a fold. Raises TraceError for none, or for several."""
    fitting = [trace for trace in traces if fold.fits(trace)]
    if len(fitting) != 1:
        raise TraceError(
            f"expected one trace of fold {fold.number}: the samples {', '.join(fold.samples)} at what was chosen on "
            f"the others; got {len(fitting)} among {len(traces)}"
        )
    return Measurements(fitting[0], ANALYSIS)


def _fold_arrays(fold: Fold, measured: Measurements) -> dict[str, Floats]:
    """Return variable -> values of a fold's samples at its configurations, (sample, role, …)."""
    indices = [measured.index(config) for config in fold.configs.values()]
    return {name: measured[name][:, indices] for name in _VARIABLES}


def _composition_error(sweep: Sweep, fold: Fold, measured: Measurements) -> float:
    """Return the largest error of composed against measured isolated L1, relative to the head's largest L1."""
    rows = [sweep.samples.index(name) for name in measured.sample_ids]
    loss = measured["perturbation_isolated"]
    largest = np.maximum(sweep.loss.max(axis=(0, 1)), np.finfo(float).tiny)
    errors = [
        np.abs(loss[:, measured.index(fold.configs[level])] - compose(sweep, indices)[rows]) / largest
        for level, indices in fold.chosen.items()
    ]
    return float(np.max(errors))


def _outcome(name: str, arrays: dict[str, Floats], index: int, paper: int, fixed: int) -> Outcome:
    """Return the outcome of the role at `index`, relative to those at `paper` (α = 0.25) and `fixed` (one α)."""
    kl, drift = arrays["logit_kl"], arrays["hidden_drift_l1"][:, :, -1]
    over_paper, over_fixed = (_ratio(kl[:, base], kl[:, index]) for base in (paper, fixed))
    drift_over_paper, lower = _ratio(drift[:, paper], drift[:, index]), kl[:, index] < kl[:, paper]
    propagated = sum_ratio(*(arrays["perturbation_propagated"][:, role] for role in (paper, index)))
    return Outcome(
        name=name,
        kl_median=float(np.median(kl[:, index])),
        kl_median_interval=intervals.of_median(kl[:, index]),
        kl=over_paper[0],
        kl_interval=over_paper[1],
        kl_lower=float(lower.mean()),
        kl_lower_interval=intervals.of_share(lower),
        kl_over_fixed=over_fixed[0],
        kl_over_fixed_interval=over_fixed[1],
        drift=drift_over_paper[0],
        drift_interval=drift_over_paper[1],
        propagated=propagated[0],
        propagated_interval=propagated[1],
    )


def _ratio(baseline: Floats, treatment: Floats) -> tuple[float, OptionalInterval]:
    """Return Σ treatment / Σ baseline over (sample,) values, with its interval."""
    return sum_ratio(baseline[:, None, None], treatment[:, None, None])

"""Rows of choices of α: isolated against the paper's α and one α for all, and as run with the folds' choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
"""Whether α was chosen on other samples than those that it is judged on, or on the same ones."""


_SHOWN = ("sum_ratio", "median_ratio", "better_share")
"""Numbers of a `HeadKind` that a row shows."""


def _format_ratio(value: float, interval: OptionalInterval = None) -> str:
    """Return a ratio with its interval; '1' where something is compared with itself."""
    return "1" if equal_in_every_sample(value, interval) else text.decimal(value, interval)


def _format_fine_ratio(value: float, interval: OptionalInterval = None) -> str:
    """Return a ratio with three decimals and its interval; '1' where something is compared with itself."""
    return "1" if equal_in_every_sample(value, interval) else text.decimal(value, interval, digits=3)


@record
class Row(Record):
    """One way to set α, over all samples.

    Attributes:
        over_paper: against α = 0.25.
        over_fixed: against one α for all heads, chosen on other samples.
    """

    SECTION = "alpha row"

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

    SECTION = "alpha point"

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
    """Return attention, the paper's α, every choice on other samples, and the same on all samples."""
    paper, fixed = sweep.loss[:, sweep.paper], judged_loss(sweep, folds, GLOBAL)
    each = [(BASELINE, "", sweep.baseline_loss), (f"α = {PAPER}", "", paper)]
    each += [(NAMES[by], OTHERS, judged_loss(sweep, folds, by)) for by in whole]
    each += [(NAMES[by], SAME, compose(sweep, indices)) for by, indices in whole.items()]
    return tuple(_row(name, on, _compare(sweep, paper, loss), _compare(sweep, fixed, loss)) for name, on, loss in each)


def curve(sweep: Sweep, whole: Chosen) -> tuple[Point, ...]:
    """Return the isolated L1 of each α for all heads, and how often layers and heads choose it."""
    paper = sweep.loss[:, sweep.paper]
    each = [_compare(sweep, paper, sweep.loss[:, index]) for index in range(len(sweep.alphas))]
    return tuple(
        Point(
            alpha=float(alpha),
            ratio=kind.sum_ratio,
            interval=kind.sum_ratio_interval,
            layers=float((whole[LAYER] == index).mean()),
            heads=float((whole[HEAD] == index).mean()) if HEAD in whole else None,
        )
        for index, (alpha, kind) in enumerate(zip(sweep.alphas, each, strict=True))
    )


def _compare(sweep: Sweep, baseline: Floats, treatment: Floats) -> HeadKind:
    flagged = np.zeros(sweep.floor.shape[1:], dtype=bool)
    return compare_kind(baseline, treatment, sweep.floor, sweep.norm, flagged)


_VARIABLES = ("logit_kl", "hidden_drift_l1", "perturbation_propagated", "perturbation_isolated")


@record
class Outcome(Record):
    """One way to set α, measured on samples that it was not chosen on."""

    SECTION = "alpha outcome"

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
    """The outcomes of all folds together, each run with the choices of the others."""

    SECTION = "alpha measured"

    outcomes: tuple[Outcome, ...] = column("attention, α = 0.25, then each choice", key="rows")
    samples: int = column("complete samples")
    composition_error: float = column(
        "largest difference of composed and measured isolated L1, over the head's largest", key="composed_off"
    )


def summarise_folds(sweep: Sweep, folds: Sequence[Fold], traces: Sequence[Trace]) -> FoldOutcomes:
    """Return the outcomes in the folds' traces, each of one fold's samples at its configurations, in any order.

    Raises TraceError where a fold has no such trace, or two.
    """
    measured = [_measurements(fold, traces) for fold in folds]
    each = [_fold_arrays(fold, one) for fold, one in zip(folds, measured, strict=True)]
    arrays = {name: np.concatenate([one[name] for one in each]) for name in _VARIABLES}
    roles = list(folds[0].configs)
    paper, fixed = roles.index(PAPER_ROLE), roles.index(GLOBAL)
    return FoldOutcomes(
        outcomes=tuple(_outcome(_name(role), arrays, index, paper, fixed) for index, role in enumerate(roles)),
        samples=len(arrays["logit_kl"]),
        composition_error=max(_composition_error(sweep, fold, one) for fold, one in zip(folds, measured, strict=True)),
    )


def _name(role: str) -> str:
    return f"α = {PAPER}" if role == PAPER_ROLE else NAMES.get(role, role)


def _measurements(fold: Fold, traces: Sequence[Trace]) -> Measurements:
    fits = [trace for trace in traces if fold.is_in(trace)]
    if len(fits) != 1:
        msg = (
            f"expected one trace of fold {fold.number}: the samples {', '.join(fold.samples)} at what was chosen on "
            f"the others; got {len(fits)} among {len(traces)}"
        )
        raise TraceError(msg)
    return Measurements(fits[0], ANALYSIS)


def _fold_arrays(fold: Fold, own: Measurements) -> dict[str, Floats]:
    """Return variable -> (sample, role, …) of a fold."""
    indices = [own.index(config) for config in fold.configs.values()]
    return {name: own[name][:, indices] for name in _VARIABLES}


def _composition_error(sweep: Sweep, fold: Fold, own: Measurements) -> float:
    whole = [name for name, ok in zip(own.trace.sample_ids, own.trace.ok, strict=True) if ok]
    rows = [sweep.samples.index(name) for name in whole]
    loss = own["perturbation_isolated"]
    largest = np.maximum(sweep.loss.max(axis=(0, 1)), np.finfo(float).tiny)
    off = [
        np.abs(loss[:, own.index(fold.configs[by])] - compose(sweep, indices)[rows]) / largest
        for by, indices in fold.chosen.items()
    ]
    return float(np.max(off))


def _outcome(name: str, arrays: dict[str, Floats], index: int, paper: int, fixed: int) -> Outcome:
    kl, drift = arrays["logit_kl"], arrays["hidden_drift_l1"][:, :, -1]
    over_paper, over_fixed = (_ratio(kl[:, other], kl[:, index]) for other in (paper, fixed))
    drifted, lower = _ratio(drift[:, paper], drift[:, index]), kl[:, index] < kl[:, paper]
    propagated = sum_ratio(*(arrays["perturbation_propagated"][:, one] for one in (paper, index)))
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
        drift=drifted[0],
        drift_interval=drifted[1],
        propagated=propagated[0],
        propagated_interval=propagated[1],
    )


def _ratio(baseline: Floats, treatment: Floats) -> tuple[float, OptionalInterval]:
    """Return mean treatment over mean baseline of (sample,) values, with its interval."""
    return sum_ratio(baseline[:, None, None], treatment[:, None, None])

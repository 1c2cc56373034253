"""Caches that are cut again while a text is read: jumps at the cuts, what is between them, attention on what is gone.

Numbers are of all heads, and means over the samples. The cut at the prompt's end has no step before it: jumps are those
of later cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.columns import Record, column, interval, record
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import RATIO, OptionalInterval, share_kind
from perturbkv.schema import PLACES

PLACE = ("place",)
HELD, ADDED, CARRIED = "held_entries", "perturbation_added", "perturbation_carried"
GONE, WENT = "gone_attention", "went_entries"


@record
class Cuts(Record):
    """What cutting a cache again does to one configuration, along the text."""

    SECTION: ClassVar[str] = "configuration cut again"

    cuts: float = column("cuts after the first step, mean over samples", heading="#cuts")
    most_held: float = column(
        "most entries that a query attends to, mean over layers, heads and samples",
        unit="entries",
        heading="#most\nheld",
    )
    jump: float = column(
        "propagated Σ L / Σ ‖o_h‖₁ at the step after a cut over that of the step before, cuts together",
        heading="#jump at\na cut", text=text.factor,
    )  # fmt: skip
    jump_interval: OptionalInterval = interval()
    between: float = column(
        "the same of the last step before the next cut over the first step after a cut; below 1: it recovers",
        heading="#between\ncuts", text=text.factor,
    )  # fmt: skip
    between_interval: OptionalInterval = interval()
    carried: float = column(
        "isolated Σ L / Σ ‖o_h‖₁ at later cuts, of what was gone before", heading="#carried", text=text.three_digits
    )
    added: float = column("the same that a cut adds", heading="#added", text=text.three_digits)
    gone: float = column(
        "attention of the steps on entries that are gone, mean over layers and heads", unit="share",
        heading="#attention\non what is gone",
    )  # fmt: skip
    gone_interval: OptionalInterval = interval()
    gone_by_place: Floats = column("the same by the place where the entries stood", unit="share", dims=PLACE)
    went_by_place: Floats = column("share of the entries that went, by place", unit="share", dims=PLACE)
    gone_by_head: Floats = column("the same attention by head", unit="share", dims=("layer", "head"))
    held: Floats = column("entries that a query attends to, by step", unit="entries", dims=("step",))
    cut_share: Floats = column("share of the samples cut right before the step", unit="share", dims=("step",))


@dataclass(frozen=True)
class _Sums:
    """Per sample, sums over some steps of perturbation and norm, all heads, at earlier and at later steps."""

    earlier: tuple[Floats, Floats]
    later: tuple[Floats, Floats]

    @classmethod
    def of(cls, moved: Floats, norm: Floats, earlier: NDArray[np.bool_], later: NDArray[np.bool_]) -> _Sums:
        """Return the sums of (sample, step) perturbations and norms over masked steps."""
        of_steps = [((moved * mask).sum(axis=1), (norm * mask).sum(axis=1)) for mask in (earlier, later)]
        return cls(of_steps[0], of_steps[1])

    def factor(self, weights: Floats) -> Floats:
        """Return the later relative perturbation over the earlier one, (row,), from weights (row, sample)."""
        first, last = (ratio(weights @ moved, weights @ norm) for moved, norm in (self.earlier, self.later))
        return np.asarray(ratio(last, first))

    def estimate(self) -> tuple[float, OptionalInterval]:
        """Return the factor over all samples, NaN without steps, with its interval."""
        samples = len(self.earlier[0])
        if not self.earlier[1].any():
            return float("nan"), None
        return float(self.factor(np.ones((1, samples)))[0]), intervals.of_statistic(self.factor, samples, RATIO)


def cuts_of(
    measured: Measurements, config: int, measured_steps: NDArray[np.bool_], total: Floats, norm: Floats
) -> Cuts | None:
    """Return what cutting again does to a configuration; None where the run cuts once.

    `measured` is of all steps, `measured_steps` (sample, step) which of them a sample has; `total` and `norm` are its
    propagated perturbation and ‖o_h‖₁ there, summed over heads.
    """
    if not measured.trace.run.compresses:
        return None
    length = measured_steps.shape[1]

    def read(name: str) -> Floats:
        """Return a variable of the configuration, (sample, step, …), 0 where the text has ended."""
        array = np.asarray(measured.trace.get(name, measured.analysis))[:, config, :length].astype(np.float64)
        where = measured_steps.reshape(*measured_steps.shape, *[1] * (array.ndim - 2))
        return np.where(where, array, 0.0)

    cut = measured_steps & ~np.isnan(read(CARRIED)).all(axis=(2, 3))
    again = cut & (np.arange(length) > 0)
    before = np.pad(again, ((0, 0), (0, 1)))[:, 1:]  # steps that a cut follows
    ends = np.pad(measured_steps, ((0, 0), (0, 1)))[:, 1:]
    first, last = measured_steps & (cut | (np.arange(length) == 0)), measured_steps & (before | ~ends)
    alone = first & last  # a span of one step has no growth
    jump = _Sums.of(total, norm, before, again).estimate()
    between = _Sums.of(total, norm, first & ~alone, last & ~alone).estimate()
    held, gone, went = read(HELD), read(GONE), read(WENT)
    counts, by_sample = measured_steps.sum(axis=0), measured_steps.sum(axis=1)
    attention = gone.sum(axis=1) / by_sample[:, None, None, None]  # (sample, layer, head, place)
    at_cuts = {
        name: np.where(again[..., None, None], np.nan_to_num(read(name)), 0.0).sum() for name in (CARRIED, ADDED)
    }
    of_samples = attention.sum(axis=-1).mean(axis=(1, 2))
    return Cuts(
        cuts=float(again.sum(axis=1).mean()),
        most_held=float(held.mean(axis=(2, 3)).max(axis=1).mean()),
        jump=jump[0],
        jump_interval=jump[1],
        between=between[0],
        between_interval=between[1],
        carried=float(ratio(at_cuts[CARRIED], (norm * again).sum())),
        added=float(ratio(at_cuts[ADDED], (norm * again).sum())),
        gone=float(of_samples.mean()),
        gone_interval=intervals.of_mean(of_samples, share_kind(0)),
        gone_by_place=attention.mean(axis=(0, 1, 2)),
        went_by_place=np.asarray(ratio(went.sum(axis=(0, 1, 2, 3)), went.sum())),
        gone_by_head=attention.sum(axis=-1).mean(axis=0),
        held=held.mean(axis=(2, 3)).sum(axis=0) / counts,
        cut_share=cut.sum(axis=0) / counts,
    )


def places_text(shares: Floats) -> str:
    """Return the shares by place as text: 'sink 0 %, prompt 12 %, own text 3 %, recent 0 %'."""
    return ", ".join(f"{place} {text.percent(float(share))}" for place, share in zip(PLACES, shares, strict=True))

"""Caches that are compressed again while a text is read: jumps, what is between them, attention on what is gone.

Numbers are of all heads, and means over the samples. The compression at the prompt's end has no step before it: jumps
are those of later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.columns import Record, column, interval, record
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import RATIO, OptionalInterval, share_kind
from perturbkv.analyses.verdicts import TIE_FLOORS
from perturbkv.schema import PLACES

PLACE = ("place",)
HELD, ADDED, CARRIED = "held_entries", "perturbation_added", "perturbation_carried"
GONE, WENT, OUTPUT = "gone_attention", "went_entries", "went_output"


@record
class Compressions(Record, section="configuration compressed again"):
    """Effect of compressing a configuration's cache again, along the text."""

    times: float = column("compressions after the first step, mean over samples", heading="#times")
    most_held: float = column(
        "most entries that a query attends to, mean over layers, heads and samples",
        unit="entries",
        heading="#most\nheld",
    )
    jump: float = column(
        "propagated Σ L / Σ ‖o_h‖₁ at the step after a compression over that of the step before, all together",
        heading="#jump", text=text.factor,
    )  # fmt: skip
    jump_interval: OptionalInterval = interval()
    between: float = column(
        "the same of the last step before the next one over the first step after a compression; below 1: it recovers",
        heading="#between", text=text.factor,
    )  # fmt: skip
    between_interval: OptionalInterval = interval()
    carried: float = column(
        "isolated Σ L / Σ ‖o_h‖₁ at later compressions, of what was gone before",
        heading="#carried",
        text=text.three_digits,
    )
    added: float = column("the same that a compression adds", heading="#added", text=text.three_digits)
    gone: float = column(
        "attention of the steps on entries that are gone, mean over layers and heads", unit="share",
        heading="#attention on\nwhat is gone",
    )  # fmt: skip
    gone_interval: OptionalInterval = interval()
    gone_by_place: Floats = column("the same by the place where the entries stood", unit="share", dims=PLACE)
    went_output_by_place: Floats = column(
        "share of Σ A ν that goes at a compression, mean over layers, heads and compressions, by place", unit="share",
        dims=PLACE,
    )  # fmt: skip
    went_by_place: Floats = column("share of the entries that went, by place", unit="share", dims=PLACE)
    gone_by_head: Floats = column("the same attention by head", unit="share", dims=("layer", "head"))
    held: Floats = column("entries that a query attends to, by step", unit="entries", dims=("step",))
    share: Floats = column(
        "share of the samples that are compressed right before the step", unit="share", dims=("step",)
    )


def factor_of(weights: Floats, earlier: Sequence[Floats], later: Sequence[Floats]) -> Floats:
    """Return the later relative perturbation over the earlier one, (row,), from weights (row, sample).

    Each is a perturbation and a norm, sums over heads and steps (sample,).
    """
    first, last = (ratio(*(weights @ part for part in sums)) for sums in (earlier, later))
    return np.asarray(ratio(last, first))


def compressions_of(
    measured: Measurements,
    config: int,
    measured_steps: NDArray[np.bool_],
    total: Floats,
    norm: Floats,
    floor: Floats,
) -> Compressions | None:
    """Return what compressing again does to a configuration; None where the run compresses once.

    `measured` is of all steps, `measured_steps` (sample, step) which of them a sample has; `total`, `norm` and `floor`
    are its propagated perturbation, ‖o_h‖₁ and noise floor there, summed over heads.
    """
    if not measured.trace.run.compresses or measured.trace.run.configs[config].is_external:
        return None
    length = measured_steps.shape[1]

    def read(name: str) -> Floats:
        """Return a variable of the configuration, (sample, step, …), 0 where the text has ended."""
        array = np.asarray(measured.trace.get(name, measured.analysis))[:, config, :length].astype(np.float64)
        where = measured_steps.reshape(*measured_steps.shape, *[1] * (array.ndim - 2))
        return np.where(where, array, 0.0)

    compressed = measured_steps & ~np.isnan(read(CARRIED)).all(axis=(2, 3))
    again = compressed & (np.arange(length) > 0)
    before = np.pad(again, ((0, 0), (0, 1)))[:, 1:]  # steps that a compression follows
    ends = np.pad(measured_steps, ((0, 0), (0, 1)))[:, 1:]
    first, last = measured_steps & (compressed | (np.arange(length) == 0)), measured_steps & (before | ~ends)
    alone = first & last  # a span of one step has no growth

    def growth(earlier: NDArray[np.bool_], later: NDArray[np.bool_]) -> tuple[float, OptionalInterval]:
        """Return the factor between the steps of two masks with its interval; NaN where either is within noise."""
        sums = [[(numbers * mask).sum(axis=1) for numbers in (total, norm)] for mask in (earlier, later)]
        noise = [TIE_FLOORS * (floor * mask).sum() for mask in (earlier, later)]
        if any(moved.sum() <= least for (moved, _), least in zip(sums, noise, strict=True)):
            return float("nan"), None
        factor = partial(factor_of, earlier=sums[0], later=sums[1])
        return float(factor(np.ones((1, len(total))))[0]), intervals.of_statistic(factor, len(total), RATIO)

    jump, between = growth(before, again), growth(first & ~alone, last & ~alone)
    held, gone, went, output = read(HELD), read(GONE), read(WENT), read(OUTPUT)
    counts, by_sample = measured_steps.sum(axis=0), measured_steps.sum(axis=1)
    attention = gone.sum(axis=1) / by_sample[:, None, None, None]  # (sample, layer, head, place)
    at_compressions = {
        name: np.where(again[..., None, None], np.nan_to_num(read(name)), 0.0).sum() for name in (CARRIED, ADDED)
    }
    of_samples = attention.sum(axis=-1).mean(axis=(1, 2))
    return Compressions(
        times=float(again.sum(axis=1).mean()),
        most_held=float(held.mean(axis=(2, 3)).max(axis=1).mean()),
        jump=jump[0],
        jump_interval=jump[1],
        between=between[0],
        between_interval=between[1],
        carried=float(ratio(at_compressions[CARRIED], (norm * again).sum())),
        added=float(ratio(at_compressions[ADDED], (norm * again).sum())),
        gone=float(of_samples.mean()),
        gone_interval=intervals.of_mean(of_samples, share_kind(0)),
        gone_by_place=attention.mean(axis=(0, 1, 2)),
        went_by_place=np.asarray(ratio(went.sum(axis=(0, 1, 2, 3)), went.sum())),
        went_output_by_place=output.mean(axis=(2, 3)).sum(axis=(0, 1)) / max(1, compressed.sum()),
        gone_by_head=attention.sum(axis=-1).mean(axis=0),
        held=held.mean(axis=(2, 3)).sum(axis=0) / counts,
        share=compressed.sum(axis=0) / counts,
    )


def places_text(shares: Floats) -> str:
    """Return the shares by place as text: 'sink 0 %, prompt 12 %, own text 3 %, recent 0 %'."""
    return ", ".join(f"{place} {text.percent(float(share))}" for place, share in zip(PLACES, shares, strict=True))

"""Numbers as tables show them: rounded, with their interval or range, a dash where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isnan
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from perturbkv.analyses.stats.intervals import Band, Scalar
    from perturbkv.analyses.stats.permutation import Decided


def decimal(value: float, interval: Scalar = None, digits: int = 2, apart: str = " ") -> str:
    """'0.71 [0.65, 0.78]', or of a range '0.71 (0.65 … 0.78)'; fewer digits from 10 on. `apart` may be a new line."""
    digits = max(0, digits - 1) if abs(value) >= 10 else digits
    return "–" if isnan(value) else fixed(value, digits) + ends(interval, lambda end: fixed(end, digits), apart)


def percent(share: float, interval: Scalar = None, apart: str = " ") -> str:
    """'72 % [58, 82]' of a share in [0, 1]."""
    return "–" if isnan(share) else f"{fixed(100 * share, 0)} %" + ends(interval, _hundredths, apart)


def significant(value: float, interval: Scalar = None) -> str:
    """Three significant digits, thousands apart; the interval on a line of its own."""
    return "–" if isnan(value) else _three(value) + ends(interval, _three, "\n")


def held(share: float) -> str:
    """'0.33' of held / full; a dash where the trace does not tell."""
    return "–" if isnan(share) else f"{share:.2f}"


def at(band: Band, place: int) -> Scalar:
    """One interval out of an array of them."""
    return None if band is None else band.at(place)


def about_intervals(samples: int, exact: bool = False, medians: bool = False) -> str:
    """What a table's caption says of n and its intervals; `exact` where it holds shares of samples.

    `medians` where it holds medians over samples, whose intervals have a level of their own.
    """
    from perturbkv.analyses.stats.intervals import LEAST, median_level

    if samples < 2:
        return "One sample: no intervals."
    if samples >= LEAST:
        own = f" (medians: {100 * median_level(samples):.0f} %)" if medians else ""
        return f"n = {samples} samples; in brackets: 95 % intervals over samples{own}."
    also = " In brackets: exact 95 % intervals of shares of samples." if exact else ""
    return f"n = {samples} samples, too few for intervals; in parentheses: {ABOUT_RANGES}.{also}"


def about_shares(samples: int) -> str:
    """What a caption says of shares of samples alone."""
    return "Shares of samples have exact 95 % intervals, in brackets." if samples > 1 else about_intervals(samples)


def about_floor(relative: float) -> str:
    """What a caption says of the noise floor of a head's perturbation."""
    return f"Noise floor: {relative:.1e} of ‖o_h‖ (median)."


ABOUT_RANGES = "the range of single samples, outside which a number of all of them together can lie"
"""As a median over heads of what each loses in all samples is not the mean of each sample's median."""
ABOUT_DRIFT = "Drift: distance of the evicted run's residual stream from the full run's, median over samples."
ABOUT_TIES = "A tie differs by at most 2 noise floors, or keeps the same entries."
ABOUT_HELD = "held / full: entries that the evicted cache holds over those of the full cache."
ABOUT_READ = "nothing is evicted; held / full is what each head reads at a step, and all stays in memory."
ABOUT_LINED = (
    "nothing is evicted; held / full is the share of pairs of query and entry that its own prefill looks at; "
    "isolated is a mean over 32 queries of the prompt."
)
HELD_AT_START = "#held / full\nat the start"
"""A column's name where caches are compressed again later."""
_ABOVE_FULL = (
    "Above 1 nothing is saved: every query head keeps a set of its own; --granularity kv keeps one for all query heads "
    "that share keys and values."
)


def about_held(shares: Iterable[float], limit: int | None = None) -> str:
    """What a caption says of held / full, and why some of the shares exceed 1, if any does.

    `limit`: entries above which caches were compressed again while they answered.
    """
    later = f" As the answers began; above {limit:,} entries caches were compressed again." if limit else ""
    return ABOUT_HELD + later + (f" {_ABOVE_FULL}" if any(share > 1 for share in shares) else "")


def verdicts(verdict: NDArray[np.int8]) -> str:
    """'7/0/1': better, tied, worse."""
    return "/".join(str(int((verdict == sign).sum())) for sign in (1, 0, -1))


def about_flips(decided: Decided, words: tuple[str, str] = ("better", "worse")) -> str:
    """How many of many tests stand out, and how many would by chance."""
    chance = decimal(decided.chance_mean, digits=1)
    return (
        f"p ≤ 0.05 in {decided.uncorrected} of {decided.verdict.size} heads, by chance in {chance} "
        f"(95 %: ≤ {decided.chance_high}); corrected: {decided.better} {words[0]}, {decided.worse} {words[1]}"
    )


def about_power(decided: Decided) -> str:
    """What a caption says of the test, and of what so few samples cannot show."""
    said = f"{decided.flips:,} flips of whole samples' signs, Benjamini–Hochberg at 5 %"
    smallest = f"the smallest p of so few samples is {decided.smallest:.2g}"
    if not decided.least_together:
        return f"{said}; {smallest}: no head can be decided."
    if decided.least_together > 1:
        return f"{said}; {smallest}: it counts only where {decided.least_together} heads reach it together."
    return f"{said}."


def ends(interval: Scalar, shown: Callable[[float], str], apart: str) -> str:
    """'[0.65, 0.78]' behind what keeps it apart, of a range '(0.65 … 0.78)'; empty where there is none."""
    if interval is None:
        return ""
    low, high = shown(interval.low), shown(interval.high)
    return apart + (f"({low} … {high})" if interval.kind == "range" else f"[{low}, {high}]")


def _three(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _hundredths(share: float) -> str:
    return fixed(100 * share, 0)


def fixed(value: float, digits: int) -> str:
    """With a true minus sign instead of a hyphen, and no negative zero."""
    return f"{value:z.{digits}f}".replace("-", "−")

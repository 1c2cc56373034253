"""Text of results: numbers with their intervals, and notes under tables.

Numbers are as tables show them: rounded, with their interval or range, a dash for NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isnan
from typing import TYPE_CHECKING

from perturbkv.analyses.stats.intervals import MIN_SAMPLES, Interval, OptionalInterval, median_level
from perturbkv.configs.run import FULL, MEAN
from perturbkv.display import plural

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from perturbkv.analyses.stats.intervals import Band


def decimal(value: float, interval: OptionalInterval = None, digits: int = 2, separator: str = " ") -> str:
    """Return a number with its interval, '0.71 [0.65, 0.78]', or range, '0.71 (0.65 … 0.78)'; fewer digits from 10."""
    digits = max(0, digits - 1) if abs(value) >= 10 else digits
    return (
        "–"
        if isnan(value)
        else fixed(value, digits) + interval_text(interval, lambda end: fixed(end, digits), separator)
    )


def percent(share: float, interval: OptionalInterval = None, separator: str = " ") -> str:
    """Return a share in [0, 1] with its interval in percent: '72 % [58, 82]'."""
    return (
        "–"
        if isnan(share)
        else f"{fixed(100 * share, 0)} %" + interval_text(interval, lambda end: fixed(100 * end, 0), separator)
    )


def points(score: float, interval: OptionalInterval = None, separator: str = " ", end_digits: int = 1) -> str:
    """Return a score or a difference of scores times 100, as papers show it, with its interval: '43.8 [40.1, 47.5]'.

    Scores are known: NaN is not expected. `end_digits`: decimals of the interval's ends.
    """
    return fixed(100 * score, 1) + interval_text(interval, lambda end: fixed(100 * end, end_digits), separator)


def difference_in_points(difference: float, interval: OptionalInterval = None) -> str:
    """Return a difference of scores or shares in points of 100, with its interval: '3.1 [1.2, 5.0] points'."""
    return f"{points(difference, interval)} points"


def join_names(names: Sequence[str]) -> str:
    """Return several names as one text: 'a, b and c'."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def three_digits(value: float, interval: OptionalInterval = None) -> str:
    """Return a number with three significant digits, thousands separated, its interval on a second line."""
    return "–" if isnan(value) else _three_digits(value) + interval_text(interval, _three_digits, "\n")


def cache_share(share: float) -> str:
    """Return a cache share with two digits: '0.33'; a dash where it is unknown."""
    return "–" if isnan(share) else f"{share:.2f}"


def interval_at(band: Band, index: int) -> OptionalInterval:
    """Return the interval at an index of an array of intervals; None for None."""
    return None if band is None else band.at(index)


def intervals_note(samples: int, exact: bool = False, medians: bool = False) -> str:
    """Return the note under a table on the number of samples and the kind of its intervals.

    Args:
        samples: n.
        exact: whether the table holds shares of samples.
        medians: whether it holds medians over samples, whose intervals have another level.
    """
    if samples < 2:
        return "One sample: no intervals."
    if samples >= MIN_SAMPLES:
        median = f" (medians: {100 * median_level(samples):.0f} %)" if medians else ""
        return f"n = {samples} samples; in brackets: 95 % intervals over samples{median}."
    shares = " In brackets: exact 95 % intervals of shares of samples." if exact else ""
    return f"n = {samples} samples, too few for intervals; in parentheses: {RANGES_NOTE}.{shares}"


def effect_note(gradient: str) -> str:
    """Return the definition of a head's effect on the text, by a gradient."""
    return (
        "|Δ log p|: first-order change of the text's log p by a head's loss, in nat; the mean of its absolute value "
        f"over steps. Propagated, a loss counts again in later layers. {FIRST_ORDER_NOTES[gradient]}"
    )


def noise_floor_note(relative: float, unit: str = "of ‖o_h‖") -> str:
    """Return the note on the noise floor of the heads' perturbation, relative to ‖o_h‖ or in a unit."""
    return f"Noise floor: {relative:.1e} {unit} (median)."


RANGES_NOTE = "the range of single samples, outside which a number of all of them together can lie"
"""The median over heads of their sums over samples is not the mean of the samples' medians."""
DRIFT_NOTE = "Drift: distance of the evicted run's residual stream from the full run's, median over samples."
FIRST_ORDER_NOTES = {
    FULL: "By the gradient of the full run: it misses most of a large loss, and can have its sign wrong.",
    MEAN: "By the mean of both runs' gradients: it can miss much of a large loss, too.",
}
"""Gradient by which effects on the text are measured -> the note on it."""
TIES_NOTE = "A tie differs by at most 2 noise floors, or keeps the same entries."
CACHE_SHARE_NOTE = "cache share: entries that the evicted cache holds over those of the full cache."
ABOVE_FULL = (
    "Above 1 nothing is saved: every query head keeps a set of its own; --granularity kv keeps one for all query heads "
    "that share keys and values."
)


def cache_share_note(shares: Iterable[float], compressed_again: str = "") -> str:
    """Return the note that defines the cache share, and explains shares above 1 if there are any.

    Args:
        shares: the cache shares of the table.
        compressed_again: when caches were compressed again during generation, as `RunConfig.compressed_again`.
    """
    later = f" As the answers began; caches were compressed again {compressed_again}." if compressed_again else ""
    return CACHE_SHARE_NOTE + later + (f" {ABOVE_FULL}" if any(share > 1 for share in shares) else "")


def verdict_counts(verdict: NDArray[np.int8]) -> str:
    """Return how many of the verdicts, 1, 0 or −1, are better, tied and worse: '7/0/1'."""
    return "/".join(str(int((verdict == sign).sum())) for sign in (1, 0, -1))


def interval_text(interval: OptionalInterval, write: Callable[[float], str], separator: str) -> str:
    """Return separator and interval as text, '[0.65, 0.78]', or range, '(0.65 … 0.78)'; empty for None."""
    if interval is None:
        return ""
    low, high = write(interval.low), write(interval.high)
    return separator + (f"({low} … {high})" if interval.kind == "range" else f"[{low}, {high}]")


def _three_digits(value: float) -> str:
    """Return a number with three significant digits, from 1,000 on without decimals."""
    size = f"{abs(value):,.0f}" if abs(value) >= 1000 else f"{abs(value):.3g}"
    return f"−{size}" if value < 0 else size


def fixed(value: float, digits: int) -> str:
    """Return a number with a fixed number of decimals, thousands separated, a true minus sign, no negative zero."""
    return f"{value:z,.{digits}f}".replace("-", "−")


STEP = "decode step, from 0; null: the mean over the steps of each sample"
"""The meaning of a result's `step`."""


def sample_note(samples: int, unit: str = "sample") -> str:
    """Return the number of samples as text, 'n = 8 samples', with a remark where they are too few for intervals."""
    if samples < 2:
        return f"one {unit}: no interval"
    few = ": ranges, too few for intervals" if samples < MIN_SAMPLES else ""
    return f"n = {plural(samples, unit)}{few}"


_FACTORS_FROM = 10
"""Ratio from which a difference is told as a factor: 36 times as much reads better than 3,500 % more."""


def relative_difference(ratio: float, interval: OptionalInterval = None) -> str:
    """Return a ratio as a difference: 0.83 as '17 % [12, 22] less', 1.09 as '9 % more', and 37 as '37 × as much'."""
    if ratio <= 1:
        return f"{percent(1 - ratio, complement(interval))} less"
    if ratio >= _FACTORS_FROM:
        return f"{factor(ratio, interval)} as much"
    excess = None if interval is None else Interval(interval.low - 1, interval.high - 1, interval.kind)
    return f"{percent(ratio - 1, excess)} more"


def factor(ratio: float, interval: OptionalInterval = None) -> str:
    """Return a ratio as a factor with its interval: '3.1 × [2.4, 4.0]'."""
    value, separator, limits = decimal(ratio, interval, digits=1 if ratio >= 2 else 2).partition(" ")
    return f"{value} ×{separator}{limits}"


def capitalise(text: str, *names: str) -> str:
    """Return the text with a capital first letter, unless it begins with any of `names`."""
    return text if text.startswith(names) else text[:1].upper() + text[1:]


def complement(interval: OptionalInterval) -> OptionalInterval:
    """Return the interval of 1 − x, from the interval of x."""
    return None if interval is None else Interval(1 - interval.high, 1 - interval.low, interval.kind)

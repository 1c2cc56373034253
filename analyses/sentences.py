"""Parts of a sentence that says what to conclude: how many samples, by how much, decided or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

from perturbkv.analyses.intervals import LEAST, Interval, Scalar
from perturbkv.analyses.naming import counted
from perturbkv.analyses.numbers import decimal, percent

_TWICE = 2.0
"""A ratio of at least this is told as a factor: '3.1 × as much' reads more easily than '210 % more'."""


def over(samples: int, what: str = "sample") -> str:
    """'n = 8 samples', and of fewer than five why no interval stands there."""
    if samples < 2:
        return f"one {what}: no interval"
    few = ": ranges, too few for intervals" if samples < LEAST else ""
    return f"n = {counted(samples, what)}{few}"


def decided(interval: Scalar, at: float) -> int | None:
    """1 where an interval lies above `at`, −1 below, 0 where it holds it; None where a number has no interval."""
    if interval is None or interval.kind == "range":
        return None
    return int(interval.low > at) - int(interval.high < at)


def difference(ratio: float, interval: Scalar = None) -> str:
    """'17 % [12, 22] less' of a ratio of 0.83, '3.1 × [2.4, 4.0] as much' of a large one; and where it is undecided."""
    if isnan(ratio):
        return "by an amount that cannot be told"
    if ratio == 1 and (interval is None or interval.low == interval.high):
        return "exactly as much"
    unsure = ", undecided" if decided(interval, 1) == 0 else ""
    if ratio >= _TWICE:
        return f"{factor(ratio, interval)} as much{unsure}"
    share, ends = (1 - ratio, _turned(interval)) if ratio <= 1 else (ratio - 1, _from_one(interval))
    return f"{percent(share, ends)} {'less' if ratio <= 1 else 'more'}{unsure}"


def factor(ratio: float, interval: Scalar = None) -> str:
    """'3.1 × [2.4, 4.0]'."""
    value, apart, ends = decimal(ratio, interval, digits=1 if ratio >= _TWICE else 2).partition(" ")
    return f"{value} ×{apart}{ends}"


def ends(told: Sequence[tuple[str, float, str]]) -> str:
    """The least and the largest of several numbers, each as it is said and of what: '3 % (b=64) to 9 % (b=128)'.

    A number is its name, its size and its words; one that is NaN is left out, a single one stands without its name.
    """
    known = sorted((one for one in told if not isnan(one[1])), key=lambda one: one[1])
    shown = list(dict.fromkeys((known[0], known[-1]))) if known else []
    if len({words for _, _, words in shown}) < 2:
        return shown[0][2] if shown else "–"
    return " to ".join(f"{words} ({name})" if name else words for name, _, words in shown)


def tally(verdicts: Sequence[int | None], words: Mapping[int, str], case: str) -> str:
    """'less in 4 of 6 cases, undecided in 2': how often each verdict was found; of a single one the word alone."""
    held = [verdict or 0 for verdict in verdicts]
    counts = {verdict: held.count(verdict) for verdict in words if verdict in held}
    first, *others = counts
    if not others:
        return words[first] if len(held) == 1 else f"{words[first]} in all {counted(len(held), case)}"
    rest = "".join(f", {words[verdict]} in {counts[verdict]}" for verdict in others)
    return f"{words[first]} in {counts[first]} of {counted(len(held), case)}{rest}"


def _turned(interval: Scalar) -> Scalar:
    """Of 1 − the number."""
    return None if interval is None else Interval(1 - interval.high, 1 - interval.low, interval.kind)


def _from_one(interval: Scalar) -> Scalar:
    """Of the number − 1."""
    return None if interval is None else Interval(interval.low - 1, interval.high - 1, interval.kind)

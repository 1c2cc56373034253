"""Parts of a sentence that says what to conclude: how many samples, by how much, decided or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

from perturbkv.analyses.naming import counted
from perturbkv.analyses.stats.intervals import LEAST, Interval, Scalar
from perturbkv.analyses.text import decimal, percent


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


Case = tuple[str, float, Scalar]
"""What a ratio is of, the ratio, and its interval."""
Words = Mapping[int, tuple[str, str]]
"""A verdict as a clause of its own, and as what may follow on another's."""


def compared(treatment: str, baseline: str, cases: Sequence[Case], where: str = "") -> str:
    """'two-stage perturbs 17 % [12, 22] less than attention' of one case; of several in how many, and both ends.

    A case is the treatment's perturbation over the baseline's, NaN where there is nothing to compare; `where` follows
    on the baseline.
    """
    known = [case for case in cases if not isnan(case[1])]
    if not known:
        return f"{treatment} cannot be compared with {baseline}{where}: too little is perturbed"
    if all(same(ratio, interval) for _, ratio, interval in known):
        return f"{treatment} perturbs exactly as much as {baseline}{where}"
    if all(_hardly(ratio, interval) for _, ratio, interval in known):
        return f"{treatment} perturbs as much as {baseline}{where}, within 0.5 %"
    verdicts = [decided(interval, 1) for _, _, interval in known]
    told = ends([(name, ratio, difference(ratio, interval)) for name, ratio, interval in known])
    if None in verdicts or verdicts in ([1], [-1]):
        return f"{treatment} perturbs {told} than {baseline}{where}"
    return f"{tally(verdicts, _contest(treatment, f'{baseline}{where}'), 'case')}: {told}"


def _contest(treatment: str, baseline: str) -> Words:
    """The words of a ratio's verdicts: below 1 the treatment perturbs less."""
    return {
        -1: (f"{treatment} perturbs less than {baseline}", "less"),
        1: (f"{treatment} perturbs more than {baseline}", "more"),
        0: (f"whether {treatment} perturbs less than {baseline} is undecided", "undecided"),
    }


def same(ratio: float, interval: Scalar) -> bool:
    """True where the two sides are equal in every sample, as where they keep the same entries."""
    return ratio == 1 and (interval is None or interval.low == interval.high)


def _hardly(ratio: float, interval: Scalar) -> bool:
    """True where the difference and its ends would read 0 %."""
    ends = () if interval is None else (interval.low, interval.high)
    return all(round(100 * (1 - one)) == 0 for one in (ratio, *ends))


def difference(ratio: float, interval: Scalar = None) -> str:
    """'17 % [12, 22] less' of a ratio of 0.83, '9 % [3, 15] more' of 1.09."""
    share, ends = (1 - ratio, turned(interval)) if ratio <= 1 else (ratio - 1, _from_one(interval))
    return f"{percent(share, ends)} {'less' if ratio <= 1 else 'more'}"


def factor(ratio: float, interval: Scalar = None) -> str:
    """'3.1 × [2.4, 4.0]'."""
    value, apart, ends = decimal(ratio, interval, digits=1 if ratio >= 2 else 2).partition(" ")
    return f"{value} ×{apart}{ends}"


def ends(told: Sequence[tuple[str, float, str]], joint: str = "at") -> str:
    """The least and the largest of several numbers, each as it is said and of what: '3 % at b=64 to 9 % at b=128'.

    A number is its name, its size and its words; one that is NaN is left out, a single one stands without its name.
    """
    known = sorted((one for one in told if not isnan(one[1])), key=lambda one: one[1])
    shown = list(dict.fromkeys((known[0], known[-1]))) if known else []
    if len({words for _, _, words in shown}) < 2:
        return shown[0][2] if shown else "–"
    return " to ".join(f"{words} {joint} {name}" if name else words for name, _, words in shown)


def tally(verdicts: Sequence[int | None], words: Words, case: str) -> str:
    """What most cases show, in how many of them, and what the others show; of a single one its clause alone."""
    held = [verdict or 0 for verdict in verdicts]
    first, *others = sorted(set(held), key=lambda verdict: (-held.count(verdict), list(words).index(verdict)))
    clause = words[first][0]
    if not others:
        return clause if len(held) == 1 else f"{clause} in {_all(len(held))} {case}s"
    rest = "".join(f", {words[verdict][1]} in {held.count(verdict)}" for verdict in others)
    return f"{clause} in {held.count(first)} of {counted(len(held), case)}{rest}"


def capital(text: str, *names: str) -> str:
    """With a capital letter but where one of the names begins it: that stays as it is typed."""
    return text if text.startswith(names) else text[:1].upper() + text[1:]


def sentence(text: str, *names: str) -> str:
    """The same with a full stop."""
    return f"{capital(text, *names)}."


def _all(count: int) -> str:
    return "both" if count == 2 else f"all {count}"


def turned(interval: Scalar) -> Scalar:
    """Of 1 − the number, such as the share of the heads that are not flagged."""
    return None if interval is None else Interval(1 - interval.high, 1 - interval.low, interval.kind)


def _from_one(interval: Scalar) -> Scalar:
    """Of the number − 1."""
    return None if interval is None else Interval(interval.low - 1, interval.high - 1, interval.kind)

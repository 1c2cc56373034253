"""Text of results: numbers with their intervals, notes under tables, and sentences that say what to conclude.

Numbers are as tables show them: rounded, with their interval or range, a dash for NaN. Sentences say less, more, alike
or undecided, with the numbers and the sample size behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any, NamedTuple

from perturbkv.analyses.names import plural, short_names, side_names
from perturbkv.analyses.sides import Pair
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, Interval, OptionalInterval, median_level

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
    return "–" if isnan(share) else f"{fixed(100 * share, 0)} %" + interval_text(interval, _hundredths, separator)


def points(score: float, interval: OptionalInterval = None, separator: str = " ", end_digits: int = 1) -> str:
    """Return a score or a difference of scores times 100, as papers show it, with its interval: '43.8 [40.1, 47.5]'."""
    return fixed(100 * score, 1) + interval_text(interval, lambda end: fixed(100 * end, end_digits), separator)


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


def noise_floor_note(relative: float) -> str:
    """Return the note on the noise floor of the heads' perturbation, relative to ‖o_h‖."""
    return f"Noise floor: {relative:.1e} of ‖o_h‖ (median)."


RANGES_NOTE = "the range of single samples, outside which a number of all of them together can lie"
"""The median over heads of their sums over samples is not the mean of the samples' medians."""
DRIFT_NOTE = "Drift: distance of the evicted run's residual stream from the full run's, median over samples."
TIES_NOTE = "A tie differs by at most 2 noise floors, or keeps the same entries."
CACHE_SHARE_NOTE = "cache share: entries that the evicted cache holds over those of the full cache."
ABOVE_FULL = (
    "Above 1 nothing is saved: every query head keeps a set of its own; --granularity kv keeps one for all query heads "
    "that share keys and values."
)


def cache_share_note(shares: Iterable[float], limit: int | None = None) -> str:
    """Return the note that defines the cache share, and explains shares above 1 if there are any.

    Args:
        shares: the cache shares of the table.
        limit: number of entries above which caches were compressed again during generation.
    """
    later = f" As the answers began; above {limit:,} entries caches were compressed again." if limit else ""
    return CACHE_SHARE_NOTE + later + (f" {ABOVE_FULL}" if any(share > 1 for share in shares) else "")


def verdict_counts(verdict: NDArray[np.int8]) -> str:
    """Return the numbers of better, tied and worse verdicts: '7/0/1'."""
    return "/".join(str(int((verdict == sign).sum())) for sign in (1, 0, -1))


def interval_text(interval: OptionalInterval, write: Callable[[float], str], separator: str) -> str:
    """Return separator and interval as text, '[0.65, 0.78]', or range, '(0.65 … 0.78)'; empty for None."""
    if interval is None:
        return ""
    low, high = write(interval.low), write(interval.high)
    return separator + (f"({low} … {high})" if interval.kind == "range" else f"[{low}, {high}]")


def _three_digits(value: float) -> str:
    """Return a number with three significant digits, from 1,000 on without decimals."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _hundredths(share: float) -> str:
    """Return a share in percent without decimals and sign: '72'."""
    return fixed(100 * share, 0)


def fixed(value: float, digits: int) -> str:
    """Return a number with a fixed number of decimals, a true minus sign and no negative zero."""
    return f"{value:z.{digits}f}".replace("-", "−")


def sample_note(samples: int, unit: str = "sample") -> str:
    """Return the number of samples as text, 'n = 8 samples', with a remark where they are too few for intervals."""
    if samples < 2:
        return f"one {unit}: no interval"
    few = ": ranges, too few for intervals" if samples < MIN_SAMPLES else ""
    return f"n = {plural(samples, unit)}{few}"


def interval_verdict(interval: OptionalInterval, at: float) -> int | None:
    """Return 1 for an interval above `at`, −1 for below, 0 if it contains `at`; None without interval."""
    if interval is None or interval.kind == "range":
        return None
    return int(interval.low > at) - int(interval.high < at)


LESS, MORE, ALIKE, UNDECIDED, FEW = "less", "more", "alike", "undecided", "few"


class Case(NamedTuple):
    """The ratio of a treatment's number to its baseline's, as one case of a comparison.

    Attributes:
        name: distinguishes it from the other cases, such as 'b=64'; empty for a single case.
        ratio: NaN where there is nothing to compare.
        interval: of the ratio; None or a range where there are too few samples.
        tied: whether rounding explains the difference.
    """

    name: str
    ratio: float
    interval: OptionalInterval
    tied: bool = False

    @property
    def verdict(self) -> str:
        """LESS, MORE, ALIKE (up to rounding), UNDECIDED (the interval contains 1), or FEW (too few samples)."""
        if self.tied or equal_in_every_sample(self.ratio, self.interval):
            return ALIKE
        side = interval_verdict(self.interval, 1)
        return FEW if side is None else (UNDECIDED, MORE, LESS)[side]


Words = Mapping[Any, tuple[str, str]]
"""Verdict -> its clause, and the shorter words for it after another verdict's clause."""


def comparison(treatment: str, baseline: str, cases: Sequence[Case], where: str = "", verb: str = "perturbs") -> str:
    """Return the clause that compares two sides: 'two-stage perturbs 17 % [12, 22] less than attention'.

    Of several cases it says in how many, and the least and the largest difference.

    Args:
        treatment: name of the one side.
        baseline: name of the other.
        cases: ratios of the treatment's number to the baseline's.
        where: text that follows on the baseline's name.
        verb: what the treatment does.
    """
    known = [case for case in cases if not isnan(case.ratio)]
    verdicts = [case.verdict for case in known]
    if not known:
        return f"{treatment} cannot be compared with {baseline}{where}: too little is perturbed"
    if set(verdicts) == {ALIKE}:
        return f"{treatment} {verb} as much as {baseline}{where}, up to rounding"
    if all(_rounds_to_zero(case.ratio, case.interval) for case in known):
        return f"{treatment} {verb} as much as {baseline}{where}, within 0.5 %"
    differences = extremes([(case.name, case.ratio, difference(case.ratio, case.interval)) for case in known])
    if verdicts in ([LESS], [MORE]):
        return f"{treatment} {verb} {differences} than {baseline}{where}"
    if FEW in verdicts:
        return f"too few samples to decide whether {treatment} {verb} less than {baseline}{where}: {differences}"
    return f"{tally(verdicts, _comparison_words(f'{treatment} {verb}', f'{baseline}{where}'), 'case')}: {differences}"


_MOST_CLAUSES = 3
"""Above so many pairs of sides, one clause speaks of all of them."""


def comparisons(pairs: Sequence[Pair], cases: Sequence[Case], where: str = "", verb: str = "perturbs") -> str:
    """Return a `comparison` clause for each baseline and treatment, over all their settings.

    More than three pairs of sides are compared in one clause, as 'the treatment' with 'its baseline'.

    Args:
        pairs: baseline and treatment of each case.
        cases: one per pair.
        where: text that follows on each baseline's name.
        verb: what the treatments do.
    """
    return "; ".join(
        comparison(treatment, baseline, [cases[index]._replace(name=name) for index, name in settings], where, verb)
        for (baseline, treatment), settings in pairs_by_sides(pairs).items()
    )


def pairs_by_sides(pairs: Sequence[Pair]) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """Return (baseline's name, treatment's name) -> (index, distinct name) of its pairs.

    More than three combinations of sides are one, of 'its baseline' and 'the treatment'.
    """
    indices: dict[tuple[str, str], list[int]] = {}
    for index, pair in enumerate(pairs):
        indices.setdefault(side_names(*pair), []).append(index)
    if len(indices) > _MOST_CLAUSES:
        indices = {("its baseline", "the treatment"): list(range(len(pairs)))}
    return {
        sides: list(zip(members, short_names([pairs[index][1] for index in members]), strict=True))
        for sides, members in indices.items()
    }


def _comparison_words(treatment: str, baseline: str) -> Words:
    """Return verdict -> (clause, short word) for a comparison of ratios; `treatment` includes the verb."""
    return {
        LESS: (f"{treatment} less than {baseline}", "less"),
        MORE: (f"{treatment} more than {baseline}", "more"),
        ALIKE: (f"{treatment} as much as {baseline} up to rounding", "as much"),
        UNDECIDED: (f"whether {treatment} less than {baseline} is undecided", "undecided"),
    }


def equal_in_every_sample(ratio: float, interval: OptionalInterval) -> bool:
    """Return whether both sides of a ratio are equal in every sample, as with equal kept sets."""
    return ratio == 1 and (interval is None or interval.low == interval.high)


def _rounds_to_zero(ratio: float, interval: OptionalInterval) -> bool:
    """Return whether a ratio's difference from 1, and both ends of its interval, are printed as 0 %."""
    limits = () if interval is None else (interval.low, interval.high)
    return all(round(100 * (1 - number)) == 0 for number in (ratio, *limits))


def difference(ratio: float, interval: OptionalInterval = None) -> str:
    """Return a ratio as a difference: 0.83 as '17 % [12, 22] less', 1.09 as '9 % [3, 15] more'."""
    if ratio <= 1:
        return f"{percent(1 - ratio, complement(interval))} less"
    excess = None if interval is None else Interval(interval.low - 1, interval.high - 1, interval.kind)
    return f"{percent(ratio - 1, excess)} more"


def factor(ratio: float, interval: OptionalInterval = None) -> str:
    """Return a ratio as a factor with its interval: '3.1 × [2.4, 4.0]'."""
    value, separator, limits = decimal(ratio, interval, digits=1 if ratio >= 2 else 2).partition(" ")
    return f"{value} ×{separator}{limits}"


def extremes(numbers: Sequence[tuple[str, float, str]], preposition: str = "at") -> str:
    """Return the least and largest of (name, size, text) numbers as text: '3 % at b=64 to 9 % at b=128'.

    A number is its name, its size and its text. NaN is left out; a single number, or equal texts, come without a name.
    """
    known = sorted((number for number in numbers if not isnan(number[1])), key=lambda number: number[1])
    shown = list(dict.fromkeys((known[0], known[-1]))) if known else []
    if len({words for _, _, words in shown}) < 2:
        return shown[0][2] if shown else "–"
    return " to ".join(f"{words} {preposition} {name}" if name else words for name, _, words in shown)


def tally(verdicts: Sequence[Any], words: Words, case: str) -> str:
    """Return the most frequent verdict's clause with its count, then the remaining verdicts with their counts.

    A verdict of None counts as 0, undecided; a single case has its clause alone.

    Args:
        verdicts: one per case.
        words: text of each verdict.
        case: noun for what is counted.
    """
    decided = [0 if verdict is None else verdict for verdict in verdicts]
    first, *others = sorted(set(decided), key=lambda verdict: (-decided.count(verdict), list(words).index(verdict)))
    clause, count = words[first][0], len(decided)
    if not others:
        return clause if count == 1 else f"{clause} in {'both' if count == 2 else f'all {count}'} {case}s"
    rest = "".join(f", {words[verdict][1]} in {decided.count(verdict)}" for verdict in others)
    return f"{clause} in {decided.count(first)} of {plural(count, case)}{rest}"


def capitalise(text: str, *names: str) -> str:
    """Return the text with a capital first letter, unless it begins with any of `names`."""
    return text if text.startswith(names) else text[:1].upper() + text[1:]


def sentence(text: str, *names: str) -> str:
    """Return the text with a capital first letter, as `capitalise` sets it, and a full stop."""
    return f"{capitalise(text, *names)}."


def complement(interval: OptionalInterval) -> OptionalInterval:
    """Return the interval of 1 − x, from the interval of x."""
    return None if interval is None else Interval(1 - interval.high, 1 - interval.low, interval.kind)

"""Words of a result: numbers with their intervals, parts of sentences, and what comparisons let a reader say.

Numbers as tables show them: rounded, with their interval or range, a dash where there is none.

Parts of a sentence that says what to conclude: how many samples, by how much, decided or not.

What comparisons let a reader say: less, more, alike or not decided, in plain words with the numbers behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perturbkv.analyses.pairing import Pair, apart, counted, short_names, side_names
from perturbkv.analyses.stats.intervals import LEAST, Interval, Scalar
from perturbkv.configs.eviction import EvictionConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perturbkv.analyses.stats.intervals import Band


def decimal(value: float, interval: Scalar = None, digits: int = 2, apart: str = " ") -> str:
    """Return '0.71 [0.65, 0.78]', or of a range '0.71 (0.65 … 0.78)'; fewer digits from 10 on.

    `apart` may be a new line.
    """
    digits = max(0, digits - 1) if abs(value) >= 10 else digits
    return "–" if isnan(value) else fixed(value, digits) + ends(interval, lambda end: fixed(end, digits), apart)


def percent(share: float, interval: Scalar = None, apart: str = " ") -> str:
    """Return '72 % [58, 82]' of a share in [0, 1]."""
    return "–" if isnan(share) else f"{fixed(100 * share, 0)} %" + ends(interval, _hundredths, apart)


def points(score: float, interval: Scalar = None, apart: str = " ", end_digits: int = 1) -> str:
    """Return '43.8 [40.1, 47.5]' of a score, or of a difference of two, in [−1, 1]: times 100, as papers show it."""
    return fixed(100 * score, 1) + ends(interval, lambda end: fixed(100 * end, end_digits), apart)


def joined_names(names: Sequence[str]) -> str:
    """Return 'a, b and c'."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def significant(value: float, interval: Scalar = None) -> str:
    """Three significant digits, thousands apart; the interval on a line of its own."""
    return "–" if isnan(value) else _three(value) + ends(interval, _three, "\n")


def cache_share(share: float) -> str:
    """Return '0.33' of held / full; a dash where the trace does not tell."""
    return "–" if isnan(share) else f"{share:.2f}"


def interval_at(band: Band, place: int) -> Scalar:
    """Return one interval out of an array of them."""
    return None if band is None else band.at(place)


def intervals_note(samples: int, exact: bool = False, medians: bool = False) -> str:
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
    return f"n = {samples} samples, too few for intervals; in parentheses: {RANGES_NOTE}.{also}"


def shares_note(samples: int) -> str:
    """What a caption says of shares of samples alone."""
    return "Shares of samples have exact 95 % intervals, in brackets." if samples > 1 else intervals_note(samples)


def noise_floor_note(relative: float) -> str:
    """What a caption says of the noise floor of a head's perturbation."""
    return f"Noise floor: {relative:.1e} of ‖o_h‖ (median)."


RANGES_NOTE = "the range of single samples, outside which a number of all of them together can lie"
"""As a median over heads of what each loses in all samples is not the mean of each sample's median."""
DRIFT_NOTE = "Drift: distance of the evicted run's residual stream from the full run's, median over samples."
TIES_NOTE = "A tie differs by at most 2 noise floors, or keeps the same entries."
CACHE_SHARE_NOTE = "held / full: entries that the evicted cache holds over those of the full cache."
READ_NOTE = "nothing is evicted; held / full is what each head reads at a step, and all stays in memory."
SPARSE_PREFILL_NOTE = (
    "nothing is evicted; held / full is the share of pairs of query and entry that its own prefill looks at; "
    "isolated is a mean over 32 queries of the prompt."
)
CACHE_SHARE_AT_START = "#held / full\nat the start"
"""A column's name where caches are compressed again later."""
ABOVE_FULL = (
    "Above 1 nothing is saved: every query head keeps a set of its own; --granularity kv keeps one for all query heads "
    "that share keys and values."
)


def cache_share_note(shares: Iterable[float], limit: int | None = None) -> str:
    """What a caption says of held / full, and why some of the shares exceed 1, if any does.

    `limit`: entries above which caches were compressed again while they answered.
    """
    later = f" As the answers began; above {limit:,} entries caches were compressed again." if limit else ""
    return CACHE_SHARE_NOTE + later + (f" {ABOVE_FULL}" if any(share > 1 for share in shares) else "")


def verdict_counts(verdict: NDArray[np.int8]) -> str:
    """Return '7/0/1': better, tied, worse."""
    return "/".join(str(int((verdict == sign).sum())) for sign in (1, 0, -1))


def ends(interval: Scalar, shown: Callable[[float], str], apart: str) -> str:
    """Return '[0.65, 0.78]' behind what keeps it apart, of a range '(0.65 … 0.78)'; empty where there is none."""
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


def sample_note(samples: int, what: str = "sample") -> str:
    """Return 'n = 8 samples', and of fewer than five why no interval stands there."""
    if samples < 2:
        return f"one {what}: no interval"
    few = ": ranges, too few for intervals" if samples < LEAST else ""
    return f"n = {counted(samples, what)}{few}"


def interval_verdict(interval: Scalar, at: float) -> int | None:
    """Return 1 where an interval lies above `at`, −1 below, 0 where it holds it.

    None where a number has no interval.
    """
    if interval is None or interval.kind == "range":
        return None
    return int(interval.low > at) - int(interval.high < at)


LESS, MORE, ALIKE, UNDECIDED, FEW = "less", "more", "alike", "undecided", "few"


class Case(NamedTuple):
    """A ratio of a treatment's number to a baseline's.

    Attributes:
        name: what tells it from the others, such as 'b=64'; empty where it stands alone.
        ratio: NaN where there is nothing to compare.
        interval: of the ratio; None or a range where there are too few samples.
        tied: whether rounding explains the difference.
    """

    name: str
    ratio: float
    interval: Scalar
    tied: bool = False

    @property
    def verdict(self) -> str:
        """LESS, MORE, ALIKE (up to rounding), UNDECIDED (the interval holds 1), or FEW (too few samples)."""
        if self.tied or same(self.ratio, self.interval):
            return ALIKE
        side = interval_verdict(self.interval, 1)
        return FEW if side is None else (UNDECIDED, MORE, LESS)[side]


Words = Mapping[Any, tuple[str, str]]
"""A verdict as a clause of its own, and as what may follow on another's."""


def comparison(treatment: str, baseline: str, cases: Sequence[Case], where: str = "", verb: str = "perturbs") -> str:
    """Return 'two-stage perturbs 17 % [12, 22] less than attention'; of several cases in how many, and the extremes.

    A case is the treatment's perturbation over the baseline's; `where` follows on the baseline.
    """
    known = [case for case in cases if not isnan(case.ratio)]
    verdicts = [case.verdict for case in known]
    if not known:
        return f"{treatment} cannot be compared with {baseline}{where}: too little is perturbed"
    if set(verdicts) == {ALIKE}:
        return f"{treatment} {verb} as much as {baseline}{where}, up to rounding"
    if all(_hardly(case.ratio, case.interval) for case in known):
        return f"{treatment} {verb} as much as {baseline}{where}, within 0.5 %"
    differences = extremes([(case.name, case.ratio, difference(case.ratio, case.interval)) for case in known])
    if verdicts in ([LESS], [MORE]):
        return f"{treatment} {verb} {differences} than {baseline}{where}"
    if FEW in verdicts:
        return f"too few samples to decide whether {treatment} {verb} less than {baseline}{where}: {differences}"
    return f"{tally(verdicts, _contest(f'{treatment} {verb}', f'{baseline}{where}'), 'case')}: {differences}"


_MOST_CLAUSES = 3


def comparisons(pairs: Sequence[Pair], cases: Sequence[Case], where: str = "", verb: str = "perturbs") -> str:
    """Return a `comparison` for each two sides, of all their settings; of more than three two sides one of all cases.

    Args:
        pairs: baseline and treatment of each case.
        cases: likewise.
        where: follows on each baseline.
        verb: what the sides do.
    """
    return "; ".join(
        comparison(treatment, baseline, [cases[index]._replace(name=name) for index, name in named], where, verb)
        for (baseline, treatment), named in contests(pairs).items()
    )


def contests(pairs: Sequence[Pair]) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """Return the pairs of each two sides, baseline and treatment: their indices, and what tells them apart.

    More than three two sides are one contest of 'the treatment' with 'its baseline'.
    """
    indices: dict[tuple[str, str], list[int]] = {}
    for index, pair in enumerate(pairs):
        indices.setdefault(side_names(*pair), []).append(index)
    if len(indices) > _MOST_CLAUSES:
        indices = {("its baseline", "the treatment"): list(range(len(pairs)))}
    return {
        sides: list(zip(own, short_names([pairs[index][1] for index in own]), strict=True))
        for sides, own in indices.items()
    }


def _contest(treatment: str, baseline: str) -> Words:
    """Return the words of a ratio's verdicts; `treatment` comes with its verb."""
    return {
        LESS: (f"{treatment} less than {baseline}", "less"),
        MORE: (f"{treatment} more than {baseline}", "more"),
        ALIKE: (f"{treatment} as much as {baseline} up to rounding", "as much"),
        UNDECIDED: (f"whether {treatment} less than {baseline} is undecided", "undecided"),
    }


def same(ratio: float, interval: Scalar) -> bool:
    """Return True where the two sides are equal in every sample, as where they keep the same entries."""
    return ratio == 1 and (interval is None or interval.low == interval.high)


def _hardly(ratio: float, interval: Scalar) -> bool:
    """Return True where the difference and its ends would read 0 %."""
    ends = () if interval is None else (interval.low, interval.high)
    return all(round(100 * (1 - one)) == 0 for one in (ratio, *ends))


def difference(ratio: float, interval: Scalar = None) -> str:
    """Return '17 % [12, 22] less' of a ratio of 0.83, '9 % [3, 15] more' of 1.09."""
    share, ends = (1 - ratio, complement(interval)) if ratio <= 1 else (ratio - 1, _from_one(interval))
    return f"{percent(share, ends)} {'less' if ratio <= 1 else 'more'}"


def factor(ratio: float, interval: Scalar = None) -> str:
    """Return '3.1 × [2.4, 4.0]'."""
    value, apart, ends = decimal(ratio, interval, digits=1 if ratio >= 2 else 2).partition(" ")
    return f"{value} ×{apart}{ends}"


def extremes(told: Sequence[tuple[str, float, str]], joint: str = "at") -> str:
    """The least and the largest of several numbers, each as it is said and of what: '3 % at b=64 to 9 % at b=128'.

    A number is its name, its size and its words; one that is NaN is left out, a single one stands without its name.
    """
    known = sorted((one for one in told if not isnan(one[1])), key=lambda one: one[1])
    shown = list(dict.fromkeys((known[0], known[-1]))) if known else []
    if len({words for _, _, words in shown}) < 2:
        return shown[0][2] if shown else "–"
    return " to ".join(f"{words} {joint} {name}" if name else words for name, _, words in shown)


def tally(verdicts: Sequence[Any], words: Words, case: str) -> str:
    """What most cases show, in how many of them, and what the others show; of a single one its clause alone."""
    held = [0 if verdict is None else verdict for verdict in verdicts]
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
    """Return the same with a full stop."""
    return f"{capital(text, *names)}."


def _all(count: int) -> str:
    return "both" if count == 2 else f"all {count}"


def complement(interval: Scalar) -> Scalar:
    """Of 1 − the number, such as the share of the heads that are not flagged."""
    return None if interval is None else Interval(1 - interval.high, 1 - interval.low, interval.kind)


def _from_one(interval: Scalar) -> Scalar:
    """Of the number − 1."""
    return None if interval is None else Interval(interval.low - 1, interval.high - 1, interval.kind)


@dataclass(frozen=True)
class Outcome:
    """What one comparison says.

    Attributes:
        name: what tells it from the others, such as 'at budget 64'; empty where it stands alone.
        verdict: LESS, MORE, ALIKE (no difference beyond rounding), UNDECIDED (the interval holds both), FEW (too few
            samples for an interval).
        value: the number that says it: smallest to largest is the order in which outcomes are told.
        shown: the same as text, with its interval.
    """

    name: str
    verdict: str
    value: float
    shown: str


def by_ratio(name: str, ratio: float, interval: Scalar, tied: bool, samples: int) -> Outcome:
    """Of treatment over baseline: decided where its interval leaves 1 out; `tied` where rounding explains it."""
    verdict = ALIKE if tied else _side(interval, 1.0, samples)
    return Outcome(name, verdict, ratio, decimal(ratio, interval))


def by_share(name: str, share: float, interval: Scalar, samples: int) -> Outcome:
    """Of a share that is better: MORE than half of all, LESS, or undecided."""
    return Outcome(name, _side(interval, 0.5, samples), share, percent(share, interval))


def _side(interval: Scalar, middle: float, samples: int) -> str:
    """On which side of the middle an interval lies."""
    side = interval_verdict(interval, middle)
    if side is None:
        return FEW if samples < LEAST else UNDECIDED
    return (UNDECIDED, MORE, LESS)[side]


def conclusion_of_many(outcomes: Sequence[Outcome], who: str, words: Mapping[str, str], samples: int) -> str:
    """'two-stage moves it less than attention in 3 of 8 comparisons, more in 2, not decided in 3 (8 samples, …)'.

    `who` stands before the counts, `words` say what LESS and MORE are, the one that is counted first in front.
    """
    counts = f"{counted(samples, 'sample')}, each comparison at 95 %"
    question = f"whether {who} {next(iter(words.values()))}"
    if any(one.verdict == FEW for one in outcomes):
        return f"{too_few(samples)} in any of {len(outcomes)} comparisons {question}"
    if all(one.verdict == UNDECIDED for one in outcomes):
        return f"in none of {len(outcomes)} comparisons is it decided {question} ({counts})"
    return f"{who} {tally_outcomes(outcomes, words)} ({counts})"


def tally_outcomes(outcomes: Sequence[Outcome], words: Mapping[str, str]) -> str:
    """Return 'less in 3 of 8 comparisons, more in 2, not decided in 3'; what is none is left out but for the first."""
    said = {**words, ALIKE: "no difference beyond rounding", UNDECIDED: "not decided"}
    count = {verdict: sum(one.verdict == verdict for one in outcomes) for verdict in said}
    first, *others = said
    told = [f"{said[verdict]} in {count[verdict]}" for verdict in others if count[verdict]]
    return ", ".join([f"{said[first]} in {count[first]} of {len(outcomes)} comparisons", *told])


def outcome_extremes(outcomes: Sequence[Outcome]) -> str:
    """Return 'from 0.61 [0.50, 0.70] at budget 64 to 1.20 [1.10, 1.30] at budget 128': the least and the largest."""
    told = sorted((one for one in outcomes if not np.isnan(one.value)), key=lambda one: one.value)
    return f"from {' to '.join(f'{one.shown} {one.name}' for one in (told[0], told[-1]))}" if told else "no number"


def too_few(samples: int) -> str:
    """Who cannot decide: 'One sample is too few to decide'."""
    return f"{'One sample is' if samples == 1 else f'{samples} samples are'} too few to decide"


def setting_names(configs: Sequence[EvictionConfig], *without: str) -> list[str]:
    """Of each configuration what tells it from the others beside its selection: 'with adakv at budget 64'; or nothing.

    Choices of `without` are left out.
    """
    return [_setting(config, told) for config, told in zip(configs, apart(configs, "selection", *without), strict=True)]


def _setting(config: EvictionConfig, told: Mapping[str, str]) -> str:
    words = [
        f"budget {config.budget}" if choice == "budget" else word for choice, word in told.items() if choice != "policy"
    ]
    return " ".join([*([f"with {told['policy']}"] if "policy" in told else []), *(["at"] if words else []), *words])

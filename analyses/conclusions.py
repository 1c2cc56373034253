"""Conclusions: one sentence for every result, from its claims and their scope.

A claim is data: a subject, a verb, a word for each verdict, a baseline, and cases, each a number with its interval and
verdict. The sentence says what the verdicts allow, in how many cases, and the least and the largest number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import NamedTuple

from perturbkv.analyses.names import PairRecord, short_names
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, OptionalInterval
from perturbkv.analyses.text import capitalise, relative_difference
from perturbkv.analyses.verdicts import ALIKE, EQUIVALENT, FEW, LESS, MORE, UNDECIDED, ratio_verdict, verdict_at
from perturbkv.display import plural

COMPARED = {LESS: "less", MORE: "more", ALIKE: "as much"}
"""Words of most comparisons."""
NOTHING_TO_LOSE = "there is nothing that eviction can lose"
_MOST_CLAIMS = 3
"""Above so many pairs of sides, one claim is of all of them."""


class Case(NamedTuple):
    """One number of a claim.

    Attributes:
        name: distinguishes it from the claim's other cases, such as 'b=64'; empty for a single case.
        value: NaN where it is not known.
        text: the number with its interval, as it is printed.
        verdict: one of `perturbkv.analyses.verdicts`; empty where numbers alone are stated.
    """

    name: str
    value: float
    text: str
    verdict: str = ""

    @classmethod
    def ratio(cls, name: str, ratio: float, interval: OptionalInterval, tied: bool = False) -> Case:
        """Return a treatment's number over its baseline's as a case; `tied`: rounding explains the difference.

        A ratio that lies within 0.5 % of 1, together with its interval, is EQUIVALENT.
        """
        verdict = ratio_verdict(ratio, interval, tied)
        if verdict == ALIKE:
            return cls(name, ratio, "0 %", ALIKE)
        ends = () if interval is None else (interval.low, interval.high)
        if all(abs(100 * (1 - number)) <= 0.5 for number in (ratio, *ends)):
            return cls(name, ratio, "within 0.5 %", EQUIVALENT)
        return cls(name, ratio, relative_difference(ratio, interval), verdict)

    @classmethod
    def number(
        cls,
        name: str,
        value: float,
        interval: OptionalInterval,
        write: Callable[[float, OptionalInterval], str],
        null: float | None = None,
        samples: int = MIN_SAMPLES,
    ) -> Case:
        """Return a number as a case, with the side of `null` on which its interval lies as its verdict.

        Args:
            name: of the case.
            value: the number.
            interval: of the number.
            write: makes their text.
            null: the number of no effect, such as 0.5 of a share; None: no verdict.
            samples: n, where the interval is exact: fewer than five have one, too, and get the verdict FEW.
        """
        verdict = "" if null is None else FEW if samples < MIN_SAMPLES else verdict_at(interval, null)
        return cls(name, value, write(value, interval), verdict)


@dataclass(frozen=True)
class Claim:
    """One claim of a result on a subject.

    Attributes:
        subject: such as 'two-stage'.
        verb: such as 'perturbs'.
        cases: its numbers.
        words: verdict -> word after the verb, the one in question first; empty where numbers alone are stated.
        baseline: what the subject is compared with; empty for no comparison.
        where: text after the baseline.
        noun: what cases are.
        margin: what EQUIVALENT cases are alike within, as text: 'within 5 %'; empty where their numbers say it.
        missing: why no number is known.
        is_name: whether the subject is a name, whose first letter stands as it is.
    """

    subject: str
    verb: str
    cases: Sequence[Case]
    words: Mapping[str, str] = field(default_factory=dict)
    baseline: str = ""
    where: str = ""
    noun: str = "case"
    margin: str = ""
    missing: str = "too little is perturbed"
    is_name: bool = False

    def clause(self) -> str:
        """Return the claim as a clause, no stronger than its verdicts."""
        known = [case for case in self.cases if not isnan(case.value)]
        if not known:
            asked = f"{self._question()} cannot be said" if self.words else f"nothing can be said of {self.subject}"
            return f"{asked}: {self.missing}"
        numbers, verdicts = extremes(known), [case.verdict for case in known]
        if not self.words:
            return self._statement(numbers)
        if {*verdicts} == {ALIKE}:
            return self._verdict_clause(ALIKE)
        if EQUIVALENT in verdicts:
            verdicts = [EQUIVALENT if one == ALIKE else one for one in verdicts]
        if FEW in verdicts:
            return f"too few samples to decide {self._question()}: {numbers}"
        if len(known) == 1 and numbers.endswith(self._word(verdicts[0])):
            return self._statement(numbers)
        return f"{self._counts_clause(verdicts)}: {numbers}"

    def _statement(self, word: str, than: str = "than") -> str:
        """Return subject, verb, a word or a number, and the baseline: 'two-stage perturbs less than attention'.

        `than` stands before the baseline.
        """
        baseline = f"{than} {self.baseline}" if self.baseline else ""
        return " ".join(filter(None, (self.subject, self.verb, word, baseline))) + self.where

    def _question(self) -> str:
        """Return the claim as an indirect question: 'whether two-stage perturbs less than attention'."""
        return f"whether {self._statement(next(iter(self.words.values())))}"

    def _word(self, verdict: str) -> str:
        """Return the word of a verdict; 'undecided' for one that the claim has no word for."""
        return self.words.get(ALIKE if verdict == EQUIVALENT else verdict, UNDECIDED)

    def _verdict_clause(self, verdict: str) -> str:
        """Return the clause of one verdict, without a number."""
        if verdict == UNDECIDED:
            return f"{self._question()} is undecided"
        than = "as" if verdict in (ALIKE, EQUIVALENT) else "than"
        within = {ALIKE: "up to rounding", EQUIVALENT: self.margin}.get(verdict, "")
        return " ".join(filter(None, (self._statement(self._word(verdict), than), within)))

    def _counts_clause(self, verdicts: Sequence[str]) -> str:
        """Return the most frequent verdict's clause with its count, then the other verdicts with theirs."""
        order = [*self.words, EQUIVALENT, UNDECIDED]
        first, *others = sorted({*verdicts}, key=lambda verdict: (-verdicts.count(verdict), order.index(verdict)))
        clause, count = self._verdict_clause(first), len(verdicts)
        if not others:
            return clause if count == 1 else f"{clause} in {'both' if count == 2 else f'all {count}'} {self.noun}s"
        rest = ", ".join(f"{self._word(verdict)}: {verdicts.count(verdict)}" for verdict in others)
        return f"{clause} in {verdicts.count(first)} of {plural(count, self.noun)} ({rest})"


def extremes(cases: Sequence[Case]) -> str:
    """Return the least and the largest number as text: '3 % at b=64 to 9 % at b=128'; equal texts once, unnamed."""
    ordered = sorted(cases, key=lambda case: case.value)
    ends = list(dict.fromkeys((ordered[0], ordered[-1])))
    if len({case.text for case in ends}) == 1:
        return ends[0].text
    return " to ".join(f"{case.text} at {case.name}" if case.name else case.text for case in ends)


def conclude(claims: Sequence[Claim], scope: Sequence[str]) -> str:
    """Return claims as one sentence, with their scope (settings and n) behind them in parentheses.

    The sentence begins with a capital letter, unless it begins with the name of a method.
    """
    clauses = "; ".join(claim.clause() for claim in claims)
    names = tuple(claim.subject for claim in claims[:1] if claim.is_name)
    return f"{capitalise(clauses, *names)} ({'; '.join(scope)})."


def cut_off_claim(count: int, samples: int, limits: Iterable[int]) -> Claim:
    """Return the claim that `count` answers of the full cache were cut off at the largest number of tokens.

    `limits` are these numbers, one per data set.
    """
    cases = [Case("", limit, plural(limit, "token")) for limit in limits]
    subject = f"{count} of {plural(samples, 'answer')} of the full cache"
    return Claim(subject, "was cut off at" if count == 1 else "were cut off at", cases)


def unanswered_claims(claim: Claim, fails: str, cut_off: int, samples: int, limits: Iterable[int]) -> list[Claim]:
    """Return a claim on evicted caches with why it cannot be made: `fails`, what the full cache does not answer.

    Answers that were cut off come first, as in `cut_off_claim`; without any, eviction has nothing to lose.
    """
    if not cut_off:
        return [replace(claim, missing=f"{fails}, so {NOTHING_TO_LOSE}")]
    unanswered = replace(claim, missing=f"{fails}; --max-new-tokens allows longer answers")
    return [cut_off_claim(cut_off, samples, limits), unanswered]


def compare_sides(
    comparisons: Sequence[PairRecord], cases: Sequence[Case], verb: str = "perturbs", where: str = ""
) -> list[Claim]:
    """Return a claim for each baseline and treatment, over all their settings.

    More than three combinations of sides are one claim, of 'the treatment' and 'its baseline'. A case is named by what
    distinguishes it within its claim.

    Args:
        comparisons: of pairs of configurations.
        cases: one per comparison, ratios of the treatment's number to the baseline's.
        verb: what treatments do.
        where: text after each baseline's name.
    """
    members: dict[tuple[str, str], list[int]] = {}
    for index, comparison in enumerate(comparisons):
        members.setdefault(comparison.sides, []).append(index)
    is_name = len(members) <= _MOST_CLAIMS
    if not is_name:
        members = {("its baseline", "the treatment"): list(range(len(comparisons)))}
    claims = []
    for (baseline, treatment), indices in members.items():
        names = short_names([comparisons[index].treatment for index in indices])
        own = [cases[index]._replace(name=name) for index, name in zip(indices, names, strict=True)]
        claims.append(Claim(treatment, verb, own, COMPARED, baseline, where, is_name=is_name))
    return claims

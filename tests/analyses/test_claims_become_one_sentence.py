"""A conclusion claims what its verdicts allow: each verdict, of one case and of several, of few samples and of none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from perturbkv.analyses import text
from perturbkv.analyses.conclusions import COMPARED, Case, Claim, compare_sides, conclude, extremes
from perturbkv.analyses.names import PairRecord, pair_names
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.analyses.verdicts import (
    ALIKE,
    EQUIVALENT,
    FEW,
    LESS,
    MORE,
    UNDECIDED,
    interval_side,
    ratio_verdict,
    verdict_at,
)
from tests.support.measured import config

NAN = float("nan")
RATIOS = {
    LESS: (0.7, Interval(0.6, 0.8)),
    MORE: (1.5, Interval(1.2, 2.0)),
    ALIKE: (1.0, Interval(1.0, 1.0)),
    EQUIVALENT: (1.003, Interval(0.996, 1.004)),
    UNDECIDED: (0.9, Interval(0.7, 1.1)),
    FEW: (0.9, Interval(0.7, 1.1, "range")),
}
"""Verdict -> a ratio and an interval that have it."""
NUMBERS = {
    LESS: "30 % [20, 40] less",
    MORE: "50 % [20, 100] more",
    UNDECIDED: "10 % [−10, 30] less",
    FEW: "10 % (−10 … 30) less",
}


def of(*verdicts: str) -> Claim:
    """That a perturbs less than b, of a case x, y, … per verdict."""
    names = "xyzuvw" if len(verdicts) > 1 else [""]
    cases = [Case.ratio(name, *RATIOS[verdict]) for name, verdict in zip(names, verdicts, strict=False)]
    assert [case.verdict for case in cases] == list(verdicts)
    return Claim("a", "perturbs", cases, COMPARED, "b", " there")


@pytest.mark.parametrize(
    ("verdicts", "clause"),
    [
        ([LESS], f"a perturbs {NUMBERS[LESS]} than b there"),
        ([MORE], f"a perturbs {NUMBERS[MORE]} than b there"),
        ([ALIKE], "a perturbs as much as b there up to rounding"),
        ([EQUIVALENT], "a perturbs as much as b there: within 0.5 %"),
        ([UNDECIDED], f"whether a perturbs less than b there is undecided: {NUMBERS[UNDECIDED]}"),
        ([FEW], f"too few samples to decide whether a perturbs less than b there: {NUMBERS[FEW]}"),
        ([], "whether a perturbs less than b there cannot be said: too little is perturbed"),
        ([LESS, LESS], f"a perturbs less than b there in both cases: {NUMBERS[LESS]}"),
        ([MORE] * 3, f"a perturbs more than b there in all 3 cases: {NUMBERS[MORE]}"),
        ([ALIKE, ALIKE], "a perturbs as much as b there up to rounding"),
        ([EQUIVALENT] * 3, "a perturbs as much as b there in all 3 cases: within 0.5 %"),
        ([UNDECIDED] * 2, f"whether a perturbs less than b there is undecided in both cases: {NUMBERS[UNDECIDED]}"),
        (
            [LESS, MORE, UNDECIDED],
            "a perturbs less than b there in 1 of 3 cases (more: 1, undecided: 1): "
            f"{NUMBERS[LESS]} at x to {NUMBERS[MORE]} at y",
        ),
        (
            [UNDECIDED, MORE, UNDECIDED],
            "whether a perturbs less than b there is undecided in 2 of 3 cases (more: 1): "
            f"{NUMBERS[UNDECIDED]} at x to {NUMBERS[MORE]} at y",
        ),
        (
            [ALIKE, ALIKE, LESS],
            f"a perturbs as much as b there up to rounding in 2 of 3 cases (less: 1): {NUMBERS[LESS]} at z to 0 % at y",
        ),
        (
            [ALIKE, EQUIVALENT, LESS],
            f"a perturbs as much as b there in 2 of 3 cases (less: 1): {NUMBERS[LESS]} at z to within 0.5 % at y",
        ),
        (
            [LESS, FEW],
            "too few samples to decide whether a perturbs less than b there: "
            f"{NUMBERS[LESS]} at x to {NUMBERS[FEW]} at y",
        ),
    ],
)
def test_a_clause_says_no_more_than_its_verdicts(verdicts: Sequence[str], clause: str) -> None:
    assert of(*verdicts).clause() == clause


def test_a_number_without_a_verdict_is_stated_and_an_unknown_one_has_its_reason() -> None:
    shares = [Case.number(name, share, None, text.percent) for name, share in (("a", 0.2), ("b", 0.1), ("c", NAN))]
    assert Claim("the token", "is equal in", shares).clause() == "the token is equal in 10 % at b to 20 % at a"
    assert Claim("the token", "is equal in", shares[:1]).clause() == "the token is equal in 20 %"
    unknown = Claim("the token", "is equal in", shares[2:], missing="there is none")
    assert unknown.clause() == "nothing can be said of the token: there is none"


@pytest.mark.parametrize(
    ("interval", "samples", "clause"),
    [
        (Interval(0.6, 1.0), 8, "it holds in most heads: 70 % [60, 100]"),
        (Interval(0.1, 0.4), 8, "it holds in few heads: 70 % [10, 40]"),
        (Interval(0.1, 0.9), 8, "whether it holds in most heads is undecided: 70 % [10, 90]"),
        (Interval(0.6, 1.0, "range"), 4, "too few samples to decide whether it holds in most heads: 70 % (60 … 100)"),
        (Interval(0.6, 1.0), 4, "too few samples to decide whether it holds in most heads: 70 % [60, 100]"),
        (None, 1, "too few samples to decide whether it holds in most heads: 70 %"),
    ],
)
def test_the_first_word_is_what_is_asked(interval: Interval | None, samples: int, clause: str) -> None:
    case = Case.number("", 0.7, interval, text.percent, 0.5, samples)
    assert Claim("it", "holds in", [case], {MORE: "most heads", LESS: "few heads"}).clause() == clause


def test_a_margin_is_said_with_the_number_that_lies_within_it() -> None:
    cases = [Case("", 1.02, "2 % [−1, 4] more", EQUIVALENT)]
    claim = Claim("a", "perturbs", cases, COMPARED, "b", margin="within 5 %")
    assert claim.clause() == "a perturbs as much as b within 5 %: 2 % [−1, 4] more"


def test_claims_are_one_sentence_with_their_scope() -> None:
    assert conclude([of(UNDECIDED), of(ALIKE)], ["all heads", "n = 8 samples"]) == (
        f"Whether a perturbs less than b there is undecided: {NUMBERS[UNDECIDED]}; a perturbs as much as b there up "
        "to rounding (all heads; n = 8 samples)."
    )
    named = Claim("adakv", "perturbs", [Case.ratio("", *RATIOS[LESS])], COMPARED, "b", is_name=True)
    assert conclude([named], ["n = 8 samples"]).startswith("adakv perturbs 30 %")


def test_what_rounds_to_nothing_is_no_difference() -> None:
    """A ratio whose number and ends print as 0 % is 'within 0.5 %'; with an end that does not, the number stands."""
    for kind in ("range", "interval"):
        near, seen = Interval(0.996, 1.004, kind), Interval(0.99, 1.002, kind)
        assert Case.ratio("", 1.003, near).verdict == EQUIVALENT
        assert Case.ratio("", 0.998, seen).verdict in (FEW, UNDECIDED)
    assert Case.ratio("", 0.997, None).verdict == EQUIVALENT
    assert of(EQUIVALENT, MORE, MORE).clause() == (
        "a perturbs more than b there in 2 of 3 cases (as much: 1): within 0.5 % at x to 50 % [20, 100] more at z"
    )


class Pair(PairRecord):
    """A baseline and a treatment of one budget."""

    def __init__(self, treatment: str, budget: int) -> None:
        self.baseline, self.treatment = config("attention", budget), config(treatment, budget)


def test_sides_have_a_claim_each_and_many_sides_one_together() -> None:
    names = ("two-stage", "random", "value", "hindsight")
    pairs = [Pair(name, budget) for name in names for budget in (64, 128)]
    ratios = (0.5, 0.6, 2.0, 2.0, 0.7, 0.7, 1, 1)
    cases = [Case.ratio(name, ratio, Interval(ratio - 0.1, ratio + 0.1))
             for name, ratio in zip(pair_names(pairs), ratios, strict=True)]  # fmt: skip
    first, second = compare_sides(pairs[:4], cases[:4], "drifts")
    assert (first.subject, first.verb, first.baseline, first.is_name) == ("two-stage", "drifts", "attention", True)
    assert [(case.name, case.value) for case in first.cases] == [("b=64", 0.5), ("b=128", 0.6)]
    assert (second.subject, [case.verdict for case in second.cases]) == ("random", [MORE, MORE])
    (together,) = compare_sides(pairs, cases)
    assert (together.subject, together.baseline, together.is_name) == ("the treatment", "its baseline", False)
    assert [case.verdict for case in together.cases] == [LESS] * 2 + [MORE] * 2 + [LESS] * 2 + [UNDECIDED] * 2


def test_extremes_are_the_least_and_the_largest() -> None:
    assert extremes([Case("a", 2.0, "two"), Case("b", 1.0, "one"), Case("c", 1.5, "–")]) == "one at b to two at a"
    assert extremes([Case("a", 2.0, "two"), Case("b", 2.0, "two")]) == "two"


def test_sides_of_an_interval() -> None:
    ends = ((0.5, 0.99), (0.5, 1.0), (1.0, 2.0), (1.01, 2.0))
    intervals = [Interval(*pair) for pair in ends]
    assert [verdict_at(interval, 1) for interval in intervals] == [LESS, UNDECIDED, UNDECIDED, MORE]
    assert [interval_side(interval, 1) for interval in intervals] == [-1, 0, 0, 1]
    assert interval_side(Interval(0.5, 0.9, "range"), 1) is interval_side(None, 1) is None
    assert verdict_at(None, 1) == verdict_at(Interval(0.4, 0.6, "range"), 1) == FEW
    assert ratio_verdict(0.7, None, tied=True) == ratio_verdict(1.0, None) == ALIKE
    assert text.relative_difference(0.83, Interval(0.78, 0.88)) == "17 % [12, 22] less"
    assert text.relative_difference(1337.4, Interval(9.5, 20000, "range")) == "1,337 × (10 … 20,000) as much"
    assert text.relative_difference(3.1, Interval(2.4, 4.0)) == "210 % [140, 300] more"
    assert [text.sample_note(number) for number in (1, 4, 8)] == [
        "one sample: no interval", "n = 4 samples: ranges, too few for intervals", "n = 8 samples"]  # fmt: skip

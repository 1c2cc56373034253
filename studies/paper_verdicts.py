"""What makes a row of docs/results/paper.md: what it reads, and the verdicts with their rules.

Words and rules were written before the numbers, and the page prints both. A rule that can give no other verdict is
none: each can fall. No rule looks at a number of the page.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Floats, to_json
from scipy import stats
from tables import Ends, number, percent

import perturbkv as pk

intervals = pk.stats.intervals
Document = dict[str, Any]
CHECKED, VIOLATED = "checked", "violated"
SUPPORTS, UNLIKE, UNDECIDED = "supports", "unlike", "undecided"
ANSWERED, APART, OPEN = "answered", "not comparable", "not measured"
LEVEL = 0.05
"""Largest p of a sign test that decides."""
LEAST_FULL, LEAST_KEPT = 0.1, 0.1
"""A case is at the floor where the full cache scores less, or both sides keep less than this share of its score."""
MARGIN = 1.1
"""Harm up to this factor counts as none: chosen before, as what nobody would give up a method for."""

WORDS = {
    CHECKED: "a proved theorem holds in every head that was looked at",
    VIOLATED: "it does not: an error of this toolkit, or of the proof",
    SUPPORTS: "this model does what the claim says, decided by the row's rule",
    UNLIKE: "this model does the opposite, decided by the same rule. It has 135 million parameters and the paper's "
    "have 8 billion: neither refutes the other",
    UNDECIDED: "the rule decides neither way",
    APART: "task, reading or measure are not the paper's; the bracket names which. The number stands there without a "
    "verdict",
    ANSWERED: "an open question has an answer on this model, by the row's rule",
    OPEN: "nothing was measured",
}
"""Verdicts in the order in which they are counted."""
RULES = {
    "bound": "*checked* where no inequality is violated by more than rounding, else *violated*",
    "most": "a share per prompt, of heads or of what the row names, averaged over prompts: its 95 % interval lies "
    "above ½ (*supports*) or below (*unlike*). A head that ties counts half, so that equal kept sets are even. Of "
    "heads the propagated share decides; the isolated one stands beside it",
    "pair": "two numbers of the same prompts: the 95 % interval of their paired difference leaves out 0 (of their "
    "ratio, 1); where at least half of the differences are 0, the two-sided exact sign test of better against worse "
    "prompts has p ≤ 0.05",
    "prompts": "more prompts better than worse (*supports*), or worse than better (*unlike*), by the two-sided exact "
    "sign test, p ≤ 0.05; ties do not count",
    "score": "as *pair*, of answers' scores. A case at the floor is named and left out: the full cache scores less "
    "than 0.1, or both sides keep less than a tenth of its score. A task that is not the paper's is *not comparable*",
    "half": "score less the mean of attention's and the full cache's, prompt by prompt: above 0 more than half of the "
    "loss is gone (*supports*), below 0 less (*unlike*); *undecided* where attention's loss is not decided itself",
    "count": "heads whose mean over prompts is at most ½: none outside the first layer (*supports*), else *unlike*; a "
    "count has no interval",
    "margin": "the drift with the first layer's two-stage sets over that without: *unlike* where its 95 % interval "
    "lies above 1, *supports* where it lies below 1.1, a margin named before",
    "falls": "the ratio after the last layer lies below 1 and below that after the first, each with its 95 % interval "
    "(*supports*); above 1 (*unlike*); else *undecided*",
    "names": "ρ between a prompt's perturbation and its scores, less the ρ that the methods' names alone give: the "
    "95 % interval lies below 0 (*supports*) or above (*unlike*)",
    "cost": "the value norms take less than a tenth of a prefill (*supports*), else *unlike*; seconds have no interval",
    "effect": "*answered* where the 95 % interval of each ratio leaves out 1, else *undecided*",
    "factor": "*answered* where the 95 % interval of the factor over the best set known lies above 1, else *undecided*",
    "tight": "*answered* where stage 1 holds more than half in some head, so that the bounds say something, else "
    "*undecided*",
    "alike": "*answered* where the 95 % interval of the ratio leaves out 1 or lies within 0.98 and 1.02, a margin "
    "named before, else *undecided*",
    "players": "*answered* where more of the layers' 95 % intervals leave out 0 than chance gives in 95 of 100 cases, "
    "if one in twelve errs, else *undecided*",
    "inside": "*answered* where the budget and both ends of its interval lie within the budgets measured, else "
    "*undecided*",
    "same": "*answered* where the 95 % interval of ρ between the data sets leaves out ½: mostly the same heads above "
    "it, mostly others below, else *undecided*",
    "none": "no rule, as nothing is measured, or what is measured is not what the claim speaks of",
}


@dataclass(frozen=True)
class Paired:
    """The difference of two numbers of the same prompts.

    Attributes:
        value: mean difference.
        interval: of it.
        better, worse: prompts whose difference is above 0, below 0.
        verdict: that the first number is the larger one.
    """

    value: float
    interval: Ends
    better: int
    worse: int
    verdict: str

    @property
    def p(self) -> float:
        """The two-sided exact sign test's."""
        return sign_test(self.better, self.worse)

    def text(self, digits: int = 3) -> str:
        """Return '−0.042 [−0.160, 0.046], 0 better, 6 worse, p = 0.031'."""
        counts = f"{self.better} better, {self.worse} worse, p = {p_text(self.p)}"
        return f"{number(self.value, self.interval, digits)}, {counts}"


def p_text(p: float) -> str:
    """Return p with two significant digits: '0.031', '1', 'below 0.001'."""
    return "below 0.001" if p < 0.001 else f"{p:.2g}"


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided exact p of so many differences above and below 0; 1 without any."""
    return float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0


def judge_counts(better: int, worse: int) -> str:
    """Return what the rule `prompts` says of so many better and worse prompts."""
    if sign_test(better, worse) > LEVEL:
        return UNDECIDED
    return SUPPORTS if better > worse else UNLIKE


def judge_pair(differences: Floats) -> Paired:
    """Return what the rule `pair` says of (prompt,) differences from −1 to 1; above 0 is better."""
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    interval = to_json(intervals.of_mean(differences, intervals.DIFFERENCE))
    rare = 2 * (better + worse) <= len(differences)
    decided = judge_counts(better, worse) if rare else verdict(interval, 0, 1)
    return Paired(float(differences.mean()), interval, better, worse, decided)


def paired_ratio(numerators: tuple[Floats, Floats], denominators: tuple[Floats, Floats]) -> tuple[float, Ends]:
    """Return a ratio of sums over another one of the same prompts, with the interval that their pairing gives.

    Each pair: (prompt,) values above and below the line.
    """

    def over(weights: Floats) -> Floats:
        first, second = ((weights @ above) / (weights @ below) for above, below in (numerators, denominators))
        return np.asarray(first / second)

    count = len(numerators[0])
    value = float(over(np.full((1, count), 1 / count))[0])
    return value, to_json(intervals.of_statistic(over, count, intervals.RATIO))


def ratio_of_sums(above: Floats, below: Floats) -> tuple[float, Ends]:
    """Return a ratio of sums over prompts with its interval; (prompt,) values each."""
    return float(above.sum() / below.sum()), to_json(intervals.of_ratio(above, below))


def at_floor(full: float, *sides: float) -> bool:
    """Return whether a case says nothing: nothing to lose, or nothing left on either side."""
    return full < LEAST_FULL or max(sides) < LEAST_KEPT * full


def verdict(interval: Ends, at: float, wanted: int) -> str:
    """Return SUPPORTS for an interval on the `wanted` side of `at` (1: above, −1: below), UNLIKE on the other side.

    UNDECIDED where it holds `at`, and for a range, or None, of too few samples.
    """
    if interval is None or interval["kind"] == "range":
        return UNDECIDED
    side = int(interval["low"] > at) - int(interval["high"] < at)
    return SUPPORTS if side == wanted else UNLIKE if side else UNDECIDED


def judge_effect(interval: Ends, at: float = 1) -> str:
    """Return what the rule `effect` says: ANSWERED where the interval leaves out `at`, else UNDECIDED."""
    return UNDECIDED if verdict(interval, at, 1) == UNDECIDED else ANSWERED


def judge_margin(interval: Ends) -> str:
    """Return what the rule `margin` says of the drift with the sets in question over that without."""
    if verdict(interval, 1, 1) == SUPPORTS:
        return UNLIKE
    return SUPPORTS if verdict(interval, MARGIN, -1) == SUPPORTS else UNDECIDED


def judge_falls(last: Ends, factor: Ends) -> str:
    """Return what the rule `falls` says of the last ratio and of its factor over the first."""
    if verdict(last, 1, 1) == SUPPORTS:
        return UNLIKE
    return SUPPORTS if verdict(last, 1, -1) == verdict(factor, 1, -1) == SUPPORTS else UNDECIDED


def judge_alike(interval: Ends) -> str:
    """Return what the rule `alike` says of a ratio."""
    within = verdict(interval, 0.98, 1) == verdict(interval, 1.02, -1) == SUPPORTS
    return ANSWERED if within else judge_effect(interval)


def judge_players(decided: int, players: int) -> str:
    """Return what the rule `players` says of so many decided intervals."""
    return ANSWERED if decided > most_by_chance(players) else UNDECIDED


def most_by_chance(players: int) -> int:
    """Return how many of so many intervals leave out 0 by chance at most, in 95 of 100 cases, if one in twelve errs."""
    return int(stats.binom.ppf(1 - LEVEL, players, 1 - intervals.COVERED))


def not_comparable(which: str) -> str:
    """Return the verdict that a number is not comparable; `which`: what is not the paper's, such as its task."""
    return f"{APART} ({which})"


def join_verdicts(verdicts: Iterable[str]) -> str:
    """Return one verdict of several cases: theirs where all agree, else how many say what; undecided without any."""
    found = Counter(verdicts)
    if len(found) <= 1:
        return next(iter(found), UNDECIDED)
    order = sorted(found, key=lambda one: [*WORDS].index(one.partition(" (")[0]))
    return ", ".join(f"{one} {found[one]}" for one in order)


@dataclass(frozen=True)
class Finding:
    """A finding on a claim, or on an open question.

    Attributes:
        text: the numbers in words, with interval and n.
        verdict: one of WORDS, or several with their counts.
    """

    text: str
    verdict: str


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
        place: where the paper says so.
        claim: what it says, or asks.
        rule: by which a verdict is reached, of RULES.
        step: whose folders tell, separated by commas; empty where none does.
        find: returns the finding, from the folder of all steps.
        settles: the commands of studies/paper.py that would settle it on a large model, separated by commas.
    """

    place: str
    claim: str
    rule: str
    step: str
    find: Callable[[Path], Finding]
    settles: str

    @property
    def steps(self) -> list[str]:
        """Names of the steps."""
        return self.step.split(", ") if self.step else []


def analysis(output: Path, step: str, name: str) -> Document:
    """Return the numbers of an analysis from a step's summary."""
    found: Document = document(output, step, "summary.json")["analyses"][name]
    return found


def document(output: Path, step: str, file: str) -> Document:
    """Return the content of a JSON file that a step left."""
    found: Document = json.loads((output / step / file).read_text())
    return found


def trace(output: Path, path: str) -> pk.Trace:
    """Return a step's trace."""
    return pk.read_trace(output / path)


def indices(measured: pk.Trace) -> dict[tuple[str, str, Any], int]:
    """Return (policy, selection as it is written, budget) -> index of the configuration."""
    documents = [config.to_document() for config in measured.run.configs]
    keys = [(policy_of(one), str(one["selection"]), one["budget"]) for one in documents]
    return {key: index for index, key in enumerate(keys)}


def comparisons(
    output: Path, step: str, baseline: str, treatment: str = "two-stage", policy: str = "snapkv"
) -> list[Document]:
    """Return a policy's comparisons of two selections, one per budget, with shares in which a tie counts half."""
    found = pk.compare_heads(trace(output, f"{step}/trace.h5"), baseline, treatment)
    return [_with_even_shares(one) for one in found if one.treatment.policy.name == policy]


def _with_even_shares(one: Any) -> Document:
    """Return a comparison of heads as a document, with the numbers of `even_share` in both kinds of perturbation."""
    kinds = {kind.name: even_share(kind.differences) for kind in (one.isolated, one.propagated)}
    compared: Document = one.to_dict()
    return compared | {name: compared[name] | shares for name, shares in kinds.items()}


def even_share(differences: Floats) -> Document:
    """Return the share of a prompt's heads that are better, with its interval, and the share of ties, `even`.

    `differences`: (sample, layer, head), above 0 where better, ties 0. A tie counts half, so that equal kept sets are
    even.
    """
    each = ((np.sign(differences) + 1) / 2).reshape(len(differences), -1)
    interval = intervals.of_mean(each.mean(axis=1), intervals.share_kind(each.shape[1]))
    return {"share": float(each.mean()), "share_interval": to_json(interval), "even": float((each == 0.5).mean())}


def share_text(one: Document, kind: str = "propagated") -> str:
    """Return '52 % [47, 57] of the heads of a prompt': averaged over prompts, where a tie counts half."""
    return f"{percent(one[kind]['share'], one[kind]['share_interval'])} of the heads of a prompt{_tied_text(one[kind])}"


def _tied_text(kind: Document) -> str:
    """Return ' (3 % tied)'; empty where that rounds to 0."""
    return f" ({percent(kind['even'])} tied)" if kind["even"] >= 0.005 else ""


def means_text(one: Document, kind: str = "propagated") -> str:
    """Return '171 of 270 heads by their means (3 tied)': the paper's estimator, which no interval is known to cover."""
    tied = one[kind]["tied"]
    return f"{one[kind]['improved']} of {one['heads']} heads by their means" + (f" ({tied} tied)" if tied else "")


def ratio_text(one: Document, kind: str = "propagated") -> str:
    """Return 'Σ × 0.84 [0.74, 0.95]'."""
    return f"Σ × {number(one[kind]['sum_ratio'], one[kind]['sum_ratio_interval'])}"


def value_text(one: Document, name: str, digits: int = 2) -> str:
    """Return a document's number of a name, with its interval, as text."""
    return number(one[name], one[f"{name}_interval"], digits)


def estimate_text(one: Document, digits: int = 2) -> str:
    """Return a document's `value` with its `interval` as text."""
    return number(one["value"], one["interval"], digits)


def samples(output: Path, step: str) -> int:
    """Return how many complete samples a step's run has."""
    found = document(output, step, "summary.json")
    return int(found["run"]["samples"]) - len(found["failed"])


def policy_of(config: Document) -> str:
    """Return a configuration's policy, without its options."""
    return str(config["policy"]).partition("(")[0]


def join_cells(cells: Iterable[str]) -> str:
    """Return several texts as one: 'a; b; c'."""
    return "; ".join(cells)

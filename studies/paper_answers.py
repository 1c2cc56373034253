"""Rows of results/paper.md: scores, budgets saved, chats, and what measuring costs (tables 1 to 8, figures 1 and 8).

Scores are compared prompt by prompt. `multi_news` is one of the paper's data sets; the retrieval tasks are none of
LongBench's, and stand for the needle test of figure 8 alone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from paper_read import (
    Document,
    Row,
    Told,
    analysis,
    document,
    estimate,
    indices,
    listed,
    trace,
)
from paper_verdicts import (
    OPEN,
    SUPPORTS,
    UNDECIDED,
    UNLIKE,
    Floats,
    apart,
    at_floor,
    joined,
    paired,
    shown_p,
    sign_test,
    verdict,
)
from tables import number, percent, selection

from perturbkv.analyses.json_values import json_value
from perturbkv.analyses.measurements import scores
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import DIFFERENCE

_BENCH = Path(__file__).parents[1] / "bench" / "cpu.json"
CHEAP = 0.1
"""What the value norms may take of a prefill to cost next to nothing."""
NEWS = ("summaries", "multi_news")
LONGBENCH = frozenset({"multi_news"})
"""Data sets here that the paper's tables have."""
NEEDLES = (("quality", "needle"), ("quality", "ruler:niah_single_1"))
RETRIEVAL = frozenset(name for _, name in NEEDLES)
SUITES = (NEWS, *NEEDLES)
LATER = tuple((f"{step}-v2", name) for step, name in SUITES)
_BUDGETS = (128, 256)
_RISING = ("snapkv", "pyramidkv", "adakv")
Method = tuple[str, str]
"""A policy and a selection as it is written."""


@dataclass(frozen=True)
class Answers:
    """Scores of one data set's answers: (prompt,) of the full cache, and of each policy, selection and budget."""

    name: str
    full: Floats
    of: dict[tuple[str, str, Any], Floats]

    def sides(self, better: Method, worse: Method, budget: int) -> tuple[Floats, Floats]:
        """Return both methods' scores at a budget."""
        return self.of[*better, budget], self.of[*worse, budget]

    def by_name(self, name: str, budget: int) -> Floats:
        """Return the scores of the only selection of a name at a budget, whatever its parameters."""
        (found,) = (each for (_, way, at), each in self.of.items() if (way.split("(")[0], at) == (name, budget))
        return found


def answers(output: Path, step: str, name: str) -> Answers:
    """Return the scores that a step's trace of a data set holds."""
    measured = trace(output, f"{step}/{name.replace(':', '-')}/trace.h5")
    graded = scores(measured.trace, "paper")
    return Answers(name, graded.full, {key: graded.evicted[:, index] for key, index in indices(measured).items()})


def against(
    pairs: Sequence[tuple[Method, Method]], suites: Sequence[tuple[str, str]], task: frozenset[str], output: Path
) -> Told:
    """Compare each pair's first method with its second on each data set, where it is no case of the floor.

    `task`: the data sets whose task is the paper's; the others' numbers stand without a verdict.
    """
    cells, verdicts, floor = [], [], []
    cases = [*_cases(pairs, suites, output)]
    for one, budget, better, worse in cases:
        first, second = one.sides(better, worse, budget)
        over = f" over {worse[0]}" if better[0] != worse[0] else ""
        case = f"{one.name}{f', {better[0]}{over}' if len(pairs) > 1 else ''}, b = {budget}"
        if at_floor(one.full.mean(), first.mean(), second.mean()):
            floor.append(case)
            continue
        difference = paired(first - second)
        verdicts.append(difference.verdict if one.name in task else apart("task"))
        cells.append(f"{case}: {number(second.mean())} → {number(first.mean())}, {difference.told()}")
    sizes = sorted({len(one.full) for one, *_ in cases})
    told = [*cells, *([f"left out, at the floor: {listed(floor)}"] if floor else [])]
    return Told(f"{listed(told)}; n = {' and '.join(map(str, sizes))} each", joined(verdicts))


def _cases(
    pairs: Sequence[tuple[Method, Method]], suites: Sequence[tuple[str, str]], output: Path
) -> Iterator[tuple[Answers, int, Method, Method]]:
    for step, name in suites:
        one = answers(output, step, name)
        for budget in _BUDGETS:
            for better, worse in pairs:
                yield one, budget, better, worse


def _gains(*policies: str) -> list[tuple[Method, Method]]:
    return [((policy, "two-stage"), (policy, "attention")) for policy in policies]


def _order() -> list[tuple[Method, Method]]:
    """Return each policy of figure 8 with the one below it."""
    return [((high, "attention"), (low, "attention")) for low, high in zip(_RISING, _RISING[1:], strict=False)]


def _saved(output: Path) -> Told:
    cells = []
    found = document(output, "savings", "savings.json")
    for one in found["savings"]:
        for measure in one["measures"]:
            told = [point for point in measure["points"] if point["saving"] is not None]
            shown = [f"b = {point['config']['budget']}: {_saving(point)}" for point in told]
            cells.append(f"by {measure['measure']}, {', '.join(shown) or 'outside the budgets measured'}")
    text = f"budget saved (below 0: lost), of ruler:niah_single_1, {listed(cells)}; n = {found['samples']}"
    return Told(text, apart("task"))


def _saving(point: Document) -> str:
    """Return a saving in percent, and its interval where the samples allow one."""
    ends = point["saving_interval"]
    if ends is None:
        return percent(point["saving"]).replace("-", "−")
    low, high = ("…" if ends[end] is None else f"{100 * ends[end]:.0f}" for end in ("low", "high"))
    return f"{percent(point['saving'])} [{low}, {high}]".replace("-", "−")


def _half(output: Path) -> Told:
    """Return how much of attention's loss is left."""
    cells, verdicts, floor = [], [], []
    for one, budget in ((answers(output, *suite), budget) for suite in LATER for budget in _BUDGETS):
        first, second = (one.by_name(name, budget) for name in ("two-stage", "attention"))
        if at_floor(one.full.mean(), first.mean(), second.mean()):
            floor.append(f"{one.name}, b = {budget}")
            continue
        losses = [_difference(side - one.full) for side in (second, first)]
        gone, ends = halved(one.full, second, first)
        verdicts.append(gone if one.name in LONGBENCH else apart("task"))
        cells.append(f"{one.name}, b = {budget}: {losses[0]} → {losses[1]}, beyond the half {ends}")
    told = [*cells, *([f"left out, at the floor: {listed(floor)}"] if floor else [])]
    return Told(f"score less the full cache's, attention → two-stage: {listed(told)}", joined(verdicts))


def halved(full: Floats, before: Floats, after: Floats) -> tuple[str, str]:
    """Return what the rule `half` says, and the number that it looks at with its interval."""
    beyond = after - (before + full) / 2
    lost = verdict(json_value(intervals.of_mean(before - full, DIFFERENCE)), 0, -1) == SUPPORTS
    return paired(beyond).verdict if lost else UNDECIDED, _difference(beyond)


def _difference(values: Floats) -> str:
    return number(float(values.mean()), json_value(intervals.of_mean(values, DIFFERENCE)))


def _linked(output: Path) -> Told:
    """Return Spearman's ρ of perturbation with scores over a prompt's methods, and what the methods' names leave."""
    cells, verdicts = [], []
    for step, name in (("link/news", "multi_news"), ("link", "retrieval")):
        found = analysis(output, step, "correlation")["overall"][0]
        rhos = {one["measure"]: one["rho"] for one in found["strengths"]}
        names = {one["measure"]: one["rho"] for one in found["names"]}
        for measure in ("isolated", "propagated"):
            beyond = names[measure]["beyond"]
            verdicts.append(verdict(beyond["interval"], 0, -1))
            cells.append(
                f"{name}, {measure}: {estimate(rhos[measure])}, of which the names alone give "
                f"{estimate(names[measure]['others'])} and the prompt's own perturbation {estimate(beyond, 3)} "
                f"({rhos[measure]['prompts']} prompts)"
            )
    return Told(f"ρ of the first token's perturbation with the score: {listed(cells)}", joined(verdicts))


def _chats(output: Path) -> Told:
    """Return the finding on 8 instructions, with answers of at most 320 tokens, compressed to 64 entries beyond 256."""
    found = {selection(one["config"]): one for one in document(output, "chats", "quality-divergence.json")["configs"]}
    sides = [found[way] for way in ("attention", "two-stage")]
    kls = [both for both in zip(*(one["forced"]["kl"] for one in sides), strict=True) if None not in both]
    better, worse = sum(two < one for one, two in kls), sum(two > one for one, two in kls)
    cells = [
        f"{selection(one['config'])} first differs {_tokens(one['median_first_difference'])}, KL {middle:.3f} nat"
        for one, middle in zip(sides, np.median(kls, axis=0), strict=True)
    ]
    counts = f"lower KL in {better} answers, higher in {worse}, p = {shown_p(sign_test(better, worse))}"
    return Told(f"medians, {listed(cells)}; {counts}; n = {len(kls)}", apart("measure"))


def _tokens(count: float | None) -> str:
    return "never" if count is None else f"after {count:.0f} tokens"


def _larger(output: Path) -> Told:
    return Told(
        "one model here; [second_model.md](second_model.md) has Gemma 3 270M beside it, on the same prompts", OPEN
    )


def _overhead(output: Path) -> Told:
    """Return the cost of a sweep of 24 configurations over 4,096 tokens."""
    row = next(one for one in json.loads(_BENCH.read_text())["rows"] if one["name"] == "sweep-24")
    phases, whole = row["details"]["phases"], statistics.median(row["details"]["seconds"])
    text = (
        f"value norms take {phases['norms']:.2f} s, {percent(phases['norms'] / phases['prefill'])} of a prefill of "
        f"4,096 tokens; measuring 24 configurations {whole:.1f} s, × {number(row['value'])} of a plain prefill; "
        "GPU: not measured"
    )
    return Told(text, SUPPORTS if phases["norms"] < CHEAP * phases["prefill"] else UNLIKE)


ROWS = (
    Row("table 1", "the criterion improves SnapKV's scores", "score", "summaries, quality",
        partial(against, _gains("snapkv"), SUITES, LONGBENCH), "tables"),
    Row("table 2", "it improves Pyramid's", "score", "summaries, quality",
        partial(against, _gains("pyramidkv"), SUITES, LONGBENCH), "tables"),
    Row("table 3", "it improves AdaKV's", "score", "summaries, quality",
        partial(against, _gains("adakv"), SUITES, LONGBENCH), "tables"),
    Row("later version", "it more than halves the loss on average", "half", "summaries-v2, quality-v2", _half,
        "tables"),
    Row("table 5", "α = 0 does worse than α = 0.25", "score", "summaries",
        partial(against, [(("snapkv", "two-stage"), ("snapkv", "two-stage(alpha=0.0)"))], [NEWS], LONGBENCH),
        "alpha, tables"),
    Row("figure 7", "and still better than SnapKV", "score", "summaries",
        partial(against, [(("snapkv", "two-stage(alpha=0.0)"), ("snapkv", "attention"))], [NEWS], LONGBENCH),
        "alpha, tables"),
    Row("figure 1", "for the same score it saves 18.7 to 34 % of the budget", "none", "savings", _saved, "tables"),
    Row("figure 8", "it improves the retrieval of SnapKV, Pyramid and AdaKV", "score", "quality",
        partial(against, _gains(*_RISING), NEEDLES, RETRIEVAL), "needle"),
    Row("figure 8", "retrieval rises from SnapKV to Pyramid to AdaKV", "score", "quality",
        partial(against, _order(), NEEDLES, RETRIEVAL), "needle"),
    Row("table 6", "StreamingLLM is far worse", "score", "summaries, quality",
        partial(against, [(("snapkv", "two-stage"), ("streaming-llm", "position"))], SUITES, LONGBENCH), "tables"),
    Row("appendix I", "less perturbation means better answers", "names", "link", _linked, "link"),
    Row("table 7", "long answers, compressed to 64 entries beyond 256, are better", "none", "chats", _chats, "chats"),
    Row("table 8", "the gain holds on a model of 32 billion parameters", "none", "", _larger, "larger"),
    Row("abstract", "the criterion costs next to nothing", "cost", "", _overhead, "heads"),
)  # fmt: skip

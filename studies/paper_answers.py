"""Rows of docs/results/paper.md: scores, budgets saved, chats, what measuring costs, and what the paper leaves open.

Scores (tables 1 to 8, figures 1 and 8) are compared prompt by prompt. `multi_news` is one of the paper's data sets; the
retrieval tasks are none of LongBench's, and stand for the needle test of figure 8 alone. Of open questions
docs/results/questions.md has more.
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
from common import Floats, to_json
from paper_verdicts import (
    ANSWERED,
    OPEN,
    SUPPORTS,
    UNDECIDED,
    UNLIKE,
    Document,
    Finding,
    Row,
    analysis,
    at_floor,
    document,
    estimate_text,
    indices,
    join_cells,
    join_verdicts,
    judge_alike,
    judge_effect,
    judge_pair,
    judge_players,
    most_by_chance,
    not_comparable,
    p_text,
    policy_of,
    ratio_text,
    samples,
    sign_test,
    trace,
    value_text,
    verdict,
)
from tables import number, percent, selection_name

import perturbkv as pk

_BENCH = Path(__file__).parents[1] / "docs" / "bench" / "cpu.json"
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
        """Return the scores of the only selection of a name at a budget, whatever its parameters and its policy."""
        (found,) = (each for (_, way, at), each in self.of.items() if (way.split("(")[0], at) == (name, budget))
        return found


def answers(output: Path, step: str, name: str) -> Answers:
    """Return the scores that a step's trace of a data set holds."""
    measured = trace(output, f"{step}/{name.replace(':', '-')}/trace.h5")
    full, evicted = (np.asarray(measured.get(one, "paper"), dtype=np.float64) for one in ("score_full", "score"))
    return Answers(name, full, {key: evicted[:, index] for key, index in indices(measured).items()})


def compare_methods(
    pairs: Sequence[tuple[Method, Method]], suites: Sequence[tuple[str, str]], task: frozenset[str], output: Path
) -> Finding:
    """Compare each pair's first method with its second on each data set (step, name), but for cases at the floor.

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
        difference = judge_pair(first - second)
        verdicts.append(difference.verdict if one.name in task else not_comparable("task"))
        cells.append(f"{case}: {number(second.mean())} → {number(first.mean())}, {difference.text()}")
    sizes = sorted({len(one.full) for one, *_ in cases})
    texts = [*cells, *([f"left out, at the floor: {join_cells(floor)}"] if floor else [])]
    return Finding(f"{join_cells(texts)}; n = {' and '.join(map(str, sizes))} each", join_verdicts(verdicts))


def _cases(
    pairs: Sequence[tuple[Method, Method]], suites: Sequence[tuple[str, str]], output: Path
) -> Iterator[tuple[Answers, int, Method, Method]]:
    """Yield (answers, budget, first method, second method) of every data set, budget and pair."""
    for step, name in suites:
        one = answers(output, step, name)
        for budget in _BUDGETS:
            for better, worse in pairs:
                yield one, budget, better, worse


def _two_stage_gains(*policies: str) -> list[tuple[Method, Method]]:
    """Return two-stage with attention of each policy, as pairs of `compare_methods`."""
    return [((policy, "two-stage"), (policy, "attention")) for policy in policies]


def _rising_policies() -> list[tuple[Method, Method]]:
    """Return each policy of figure 8 with the one that the paper has below it, both with attention."""
    return [((high, "attention"), (low, "attention")) for low, high in zip(_RISING, _RISING[1:], strict=False)]


def _savings(output: Path) -> Finding:
    """Return the share of the budget that two-stage saves, by each measure."""
    cells = []
    found = document(output, "savings", "savings.json")
    for one in found["savings"]:
        for measure in one["measures"]:
            known = [point for point in measure["points"] if point["saving"] is not None]
            shown = [f"b = {point['config']['budget']}: {_saving_text(point)}" for point in known]
            cells.append(f"by {measure['measure']}, {', '.join(shown) or 'outside the budgets measured'}")
    text = f"budget saved (below 0: lost), of ruler:niah_single_1, {join_cells(cells)}; n = {found['samples']}"
    return Finding(text, not_comparable("task"))


def _saving_text(point: Document) -> str:
    """Return a saving in percent, and its interval where the samples allow one."""
    ends = point["saving_interval"]
    if ends is None:
        return percent(point["saving"]).replace("-", "−")
    low, high = ("…" if ends[end] is None else f"{100 * ends[end]:.0f}" for end in ("low", "high"))
    return f"{percent(point['saving'])} [{low}, {high}]".replace("-", "−")


def _loss_left(output: Path) -> Finding:
    """Return how much of attention's loss of score two-stage leaves, by the rule `half`."""
    cells, verdicts, floor = [], [], []
    for one, budget in ((answers(output, *suite), budget) for suite in LATER for budget in _BUDGETS):
        first, second = (one.by_name(name, budget) for name in ("two-stage", "attention"))
        if at_floor(one.full.mean(), first.mean(), second.mean()):
            floor.append(f"{one.name}, b = {budget}")
            continue
        losses = [_difference_text(side - one.full) for side in (second, first)]
        gone, ends = judge_half(one.full, second, first)
        verdicts.append(gone if one.name in LONGBENCH else not_comparable("task"))
        cells.append(f"{one.name}, b = {budget}: {losses[0]} → {losses[1]}, beyond the half {ends}")
    texts = [*cells, *([f"left out, at the floor: {join_cells(floor)}"] if floor else [])]
    return Finding(f"score less the full cache's, attention → two-stage: {join_cells(texts)}", join_verdicts(verdicts))


def judge_half(full: Floats, before: Floats, after: Floats) -> tuple[str, str]:
    """Return what the rule `half` says, and the number that it looks at with its interval, as text.

    Scores, (prompt,) each: of the full cache, and of the evicted one `before` the change and `after` it.
    """
    beyond = after - (before + full) / 2
    lost = verdict(to_json(pk.stats.intervals.of_mean(before - full, pk.stats.intervals.DIFFERENCE)), 0, -1) == SUPPORTS
    return judge_pair(beyond).verdict if lost else UNDECIDED, _difference_text(beyond)


def _difference_text(values: Floats) -> str:
    """Return the mean of (prompt,) differences with its interval."""
    return number(float(values.mean()), to_json(pk.stats.intervals.of_mean(values, pk.stats.intervals.DIFFERENCE)))


def _score_correlations(output: Path) -> Finding:
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
                f"{name}, {measure}: {estimate_text(rhos[measure])}, of which the names alone give "
                f"{estimate_text(names[measure]['others'])} and the prompt's own perturbation "
                f"{estimate_text(beyond, 3)} ({rhos[measure]['prompts']} prompts)"
            )
    return Finding(f"ρ of the first token's perturbation with the score: {join_cells(cells)}", join_verdicts(verdicts))


def _chats(output: Path) -> Finding:
    """Return the finding on 8 instructions, with answers of at most 320 tokens, compressed to 64 entries beyond 256."""
    found = {
        selection_name(one["config"]): one for one in document(output, "chats", "quality-divergence.json")["configs"]
    }
    sides = [found[way] for way in ("attention", "two-stage")]
    kls = [both for both in zip(*(one["forced"]["kl"] for one in sides), strict=True) if None not in both]
    better, worse = sum(two < one for one, two in kls), sum(two > one for one, two in kls)
    cells = [
        f"{selection_name(one['config'])} first differs {_tokens_text(one['median_first_difference'])}, "
        f"KL {middle:.3f} nat"
        for one, middle in zip(sides, np.median(kls, axis=0), strict=True)
    ]
    counts = f"lower KL in {better} answers, higher in {worse}, p = {p_text(sign_test(better, worse))}"
    return Finding(f"medians, {join_cells(cells)}; {counts}; n = {len(kls)}", not_comparable("measure"))


def _tokens_text(count: float | None) -> str:
    """Return 'after 3 tokens'; 'never' for None."""
    return "never" if count is None else f"after {count:.0f} tokens"


def _larger_model(output: Path) -> Finding:
    """Return that nothing was measured, and where another model is."""
    return Finding(
        "one model here; [second_model.md](second_model.md) has Gemma 3 270M beside it, on the same prompts", OPEN
    )


def _overhead(output: Path) -> Finding:
    """Return the cost of a sweep of 24 configurations over 4,096 tokens."""
    row = next(one for one in json.loads(_BENCH.read_text())["rows"] if one["name"] == "sweep-24")
    phases, whole = row["details"]["phases"], statistics.median(row["details"]["seconds"])
    text = (
        f"value norms take {phases['norms']:.2f} s, {percent(phases['norms'] / phases['prefill'])} of a prefill of "
        f"4,096 tokens; measuring 24 configurations {whole:.1f} s, × {number(row['value'])} of a plain prefill; "
        "GPU: not measured"
    )
    return Finding(text, SUPPORTS if phases["norms"] < CHEAP * phases["prefill"] else UNLIKE)


ANSWERS = (
    Row("table 1", "the criterion improves SnapKV's scores", "score", "summaries, quality",
        partial(compare_methods, _two_stage_gains("snapkv"), SUITES, LONGBENCH), "tables"),
    Row("table 2", "it improves Pyramid's", "score", "summaries, quality",
        partial(compare_methods, _two_stage_gains("pyramidkv"), SUITES, LONGBENCH), "tables"),
    Row("table 3", "it improves AdaKV's", "score", "summaries, quality",
        partial(compare_methods, _two_stage_gains("adakv"), SUITES, LONGBENCH), "tables"),
    Row("later version", "it more than halves the loss on average", "half", "summaries-v2, quality-v2", _loss_left,
        "tables"),
    Row("table 5", "α = 0 does worse than α = 0.25", "score", "summaries",
        partial(compare_methods, [(("snapkv", "two-stage"), ("snapkv", "two-stage(alpha=0.0)"))], [NEWS], LONGBENCH),
        "alpha, tables"),
    Row("figure 7", "and still better than SnapKV", "score", "summaries",
        partial(compare_methods, [(("snapkv", "two-stage(alpha=0.0)"), ("snapkv", "attention"))], [NEWS], LONGBENCH),
        "alpha, tables"),
    Row("figure 1", "for the same score it saves 18.7 to 34 % of the budget", "none", "savings", _savings, "tables"),
    Row("figure 8", "it improves the retrieval of SnapKV, Pyramid and AdaKV", "score", "quality",
        partial(compare_methods, _two_stage_gains(*_RISING), NEEDLES, RETRIEVAL), "needle"),
    Row("figure 8", "retrieval rises from SnapKV to Pyramid to AdaKV", "score", "quality",
        partial(compare_methods, _rising_policies(), NEEDLES, RETRIEVAL), "needle"),
    Row("table 6", "StreamingLLM is far worse", "score", "summaries, quality",
        partial(compare_methods, [(("snapkv", "two-stage"), ("streaming-llm", "position"))], SUITES, LONGBENCH),
        "tables"),
    Row("appendix I", "less perturbation means better answers", "names", "link", _score_correlations, "link"),
    Row("table 7", "long answers, compressed to 64 entries beyond 256, are better", "none", "chats", _chats, "chats"),
    Row("table 8", "the gain holds on a model of 32 billion parameters", "none", "", _larger_model, "larger"),
    Row("abstract", "the criterion costs next to nothing", "cost", "", _overhead, "heads"),
)  # fmt: skip


_MOSTLY_SAME = 0.5
"""ρ above which two data sets are said to hurt mostly the same heads."""


def _alpha_per_head(output: Path) -> Finding:
    """Return the gain of an α per head, chosen on other samples, over the best α for all heads, chosen likewise."""
    found = document(output, "alpha", "alpha.json")
    (one,) = (one for one in found["rows"] if (one["name"], one["chosen_on"]) == ("per head", "others"))
    curve = {round(point["alpha"], 2): point for point in found["curve"]}
    cells = [f"α = {at:g}: {number(curve[at]['ratio'], curve[at]['ratio_interval'])}" for at in (0.0, 0.5, 1.0)]
    text = (
        f"per head, chosen on other prompts: isolated Σ {value_text(one['over_fixed'], 'sum_ratio')} of the best fixed "
        f"α's; one for all heads, over that of α = 0.25: {join_cells(cells)}"
    )
    return Finding(f"{text}; n = {found['about']['samples']}", judge_effect(one["over_fixed"]["sum_ratio_interval"]))


def _distances(output: Path) -> Finding:
    """Return what selecting by ν in L2 brings over L1, and what L2 and cosine conclude of the same comparisons."""
    (setting,) = document(output, "measures", "measures.json")["settings"]
    cells = []
    for one in setting["orders"]:
        rho = one["rho"]
        cells.append(f"{one['kind']} " + join_cells(f"{name} {estimate_text(rho[name])}" for name in rho))
    norms = [measured for one in setting["norms"] for measured in one["measured"] if measured["distance"] == "l1"]
    sums = join_cells(f"{one['kind']} {value_text(one, 'sum_ratio', 3)}" for one in norms[:2])
    return Finding(
        f"methods' order, ρ with L1's: {join_cells(cells)}; two-stage by L2 norms, Σ in L1 over L1 norms': {sums}",
        join_verdicts(judge_alike(one["sum_ratio_interval"]) for one in norms[:2]),
    )


def _sparse_decoding(output: Path) -> Finding:
    """Return what choosing quest's pages by A ν brings over choosing them by A."""
    found = {selection_name(one["treatment"]): one for one in analysis(output, "pages", "heads")["comparisons"]}
    one, best = found["two-stage"], found["hindsight-attention"]
    text = (
        f"quest, pages by A ν over pages by A: isolated {ratio_text(one, 'isolated')}, propagated "
        f"{ratio_text(one)}; by a page's true A (control): isolated {ratio_text(best, 'isolated')}"
    )
    return Finding(f"{text}; n = {one['samples']}", _judge_both_kinds(one))


def _judge_both_kinds(one: Document) -> str:
    """Return isolated and propagated sums, each judged by the rule `effect`."""
    return join_verdicts(judge_effect(one[kind]["sum_ratio_interval"]) for kind in ("isolated", "propagated"))


def _sparse_prefill(output: Path) -> Finding:
    """Return the criterion over attention: with all sums, and without those that every query looks at anyway."""
    found = {}
    for one in analysis(output, "lines", "heads")["comparisons"]:
        sides = one["baseline"], one["treatment"]
        found[*(side["policy_options"].get("sums") for side in sides), selection_name(sides[1])] = one
    keys = ("all", "all", "two-stage"), ("all", "free", "attention"), ("free", "free", "two-stage")
    one, free, own = (found[key] for key in keys)
    text = (
        f"vertical-slash, by A ν over by A: isolated {ratio_text(one, 'isolated')}, propagated "
        f"{ratio_text(one)}; control, sums without first entries and band: by A {ratio_text(free, 'isolated')} and "
        f"{ratio_text(free)}, by A ν over that {ratio_text(own, 'isolated')} and {ratio_text(own)}; "
        f"n = {one['samples']}"
    )
    return Finding(text, _judge_both_kinds(one))


def _regret(output: Path) -> Finding:
    """Return the factor over the best set known, and its parts, which depend on the order in which they are taken."""
    found = document(output, "regret", "regret.json")
    part = next(one for one in found["parts"] if one["part"] == "prompt")
    one = next(one for one in part["methods"] if selection_name(one["config"]) == "two-stage")
    least = "at least " if part["closed"] < part["heads"] else ""
    factors = join_cells(
        f"{name} {least if name == 'criterion' else ''}{estimate_text(one[name])}"
        for name in ("form", "query", "criterion")
    )
    text = (
        f"two-stage's isolated L over that of the best set known: × {least}{estimate_text(one['factor'])}; in steps "
        f"from two-stage to Top-k of the window's A ν, to Top-k of the realised A ν, to that set (another order would "
        f"share it out otherwise): {factors}; that set is proven best in {part['closed']} of {part['heads']} heads"
    )
    above = verdict(one["factor"]["interval"], 1, 1) == SUPPORTS
    return Finding(f"{text}; n = {len(found['samples'])}", ANSWERED if above else UNDECIDED)


def _variance_split(output: Path) -> Finding:
    """Return how much of the heads' differences comes from how much goes, and what a stored mean wins back."""
    found = document(output, "split", "split.json")
    one = next(one for one in found["spreads"] if one["config"].startswith("snapkv:two-stage "))
    setting = next(each for each in found["corrections"] if each["baseline"] == one["config"])
    row = next(one for one in setting["rows"] if one["name"] == "corrected(mass=linear)")
    text = (
        f"{percent(one['by_mass'], one['by_mass_interval'])} of the variance of log L over heads is how much goes; "
        f"corrected by a stored mean of what went: propagated {ratio_text(row)} of two-stage's"
    )
    return Finding(f"{text}; n = {found['about']['samples']}", judge_effect(row["propagated"]["sum_ratio_interval"]))


def _deciding_layers(output: Path) -> Finding:
    """Return the layers whose kept sets change the last layer's drift most, and how many are decided."""
    found = document(output, "swap", "patching.json")
    shapley = found["shapley"]
    players = sorted(shapley["players"], key=lambda one: -abs(one["value"]))[:3]
    cells = join_cells(f"layer {one['player']} {percent(one['value'], one['interval'])}" for one in players)
    whole = percent(shapley["everybody"], shapley["everybody_interval"])
    count = len(shapley["players"])
    decided = sum(judge_effect(one["interval"], 0) == ANSWERED for one in shapley["players"])
    text = (
        f"two-stage changes the last layer's drift by {whole}; Shapley values, the largest three of {count}: {cells}; "
        f"{decided} of {count} intervals leave out 0, by chance up to {most_by_chance(count)}"
    )
    return Finding(f"{text}; n = {found['samples']}", judge_players(decided, count))


def _budget_cliff(output: Path) -> Finding:
    """Return the budgets at which the median KL of attention and of two-stage passes each threshold."""
    cells, verdicts = [], []
    for one in analysis(output, "cliff", "budget-cliff")["methods"]:
        if selection_name(one["configs"][0]) in ("attention", "two-stage") and policy_of(one["configs"][0]) == "snapkv":
            for crossing in one["crossings"]:
                cells.append(f"{one['name']}, {crossing['threshold']:g} nat: {_crossing_text(crossing)}")
                verdicts.append(judge_inside(crossing))
    text = f"budget at which the median KL passes {join_cells(cells)}"
    return Finding(f"{text}; n = {samples(output, 'cliff')}", join_verdicts(verdicts))


def judge_inside(crossing: Document) -> str:
    """Return what the rule `inside` says of a threshold crossing."""
    ends = crossing["interval"]
    known = crossing["value"] is not None and ends is not None and ends["kind"] == "interval"
    return ANSWERED if known and ends["low"] and ends["high"] is not None else UNDECIDED


def _crossing_text(one: Document) -> str:
    """Return a crossing's budget with its interval, an unknown upper end as …; the side where it is not known."""
    if one["value"] is None:
        return str(one["beyond"])
    if one["interval"] is not None and one["interval"]["high"] is None:
        return f"{number(one['value'], None, 3)} [{number(one['interval']['low'], None, 3)}, …]"
    return estimate_text(one, 3)


def _head_stability(output: Path) -> Finding:
    """Return how alike the heads' ranks are within and between two data sets."""
    found = document(output, "stability", "stability.json")
    within = [one["perturbation"]["propagated"]["split_half"] for one in found["members"]]
    between = found["pairs"][0]["perturbation"]["propagated"]["rho"]
    cells = join_cells(
        f"{one['dataset']} {estimate_text(half)}" for one, half in zip(found["members"], within, strict=True)
    )
    text = f"ρ of heads' propagated L between halves of the prompts: {cells}; between the two data sets"
    return Finding(f"{text} {estimate_text(between)}", judge_effect(between["interval"], _MOSTLY_SAME))


OPEN_QUESTIONS = (
    Row("open question 1", "is an α of its own for each head worth it?", "effect", "alpha", _alpha_per_head, "alpha"),
    Row("open question 2, appendix G", "would L2 or cosine do better than L1?", "alike", "measures", _distances,
        "heads"),
    Row("open question 3, appendix J", "does the criterion refine sparse decoding?", "effect", "pages",
        _sparse_decoding, "sparse"),
    Row("open question 3", "does it refine a sparse prefill?", "effect", "lines", _sparse_prefill, "sparse"),
    Row("conclusion", "how far is the selection from the best one?", "factor", "regret", _regret, "regret"),
    Row("section 3.2", "is a head hurt by how much goes, or by what goes?", "effect", "split", _variance_split,
        "heads"),
    Row("section 5.2", "which layers decide what comes out?", "players", "swap", _deciding_layers, "swap"),
    Row("limitations", "where is the fundamental loss of extremely small budgets (2.5 %)?", "inside", "cliff",
        _budget_cliff, "heads"),
    Row("figure 2", "are they the same heads in other texts?", "same", "stability", _head_stability, "heads"),
)  # fmt: skip

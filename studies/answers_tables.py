"""Tables and pictures of the answers' study: methods, what foretells a lost answer, and pooling kernels.

`python studies/answers_tables.py` reads the rows that `answers.py` left, prints the tables with the rules' verdicts and
draws the picture. The rules stand in docs/results/rules.md, which was written first.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import common
import numpy as np
from answers import (
    BASELINE,
    BUDGETS,
    CROSSED,
    KERNELS,
    LARGER,
    METHODS,
    MOVED,
    POOLED,
    QWEN,
    ROWS,
    SMOLLM2,
    runs,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from paper_verdicts import p_text, sign_test
from specification import FIGURES, read_rows

import perturbkv as pk

NAMES = {QWEN: "Qwen2.5-Coder 0.5B", SMOLLM2: "SmolLM2 135M", LARGER: "Qwen2.5-Coder 1.5B"}
HEADS = {QWEN: 336, SMOLLM2: 270, LARGER: 336}
# θ̂'s first stages differ between methods; the others nearly are the score
NO_VERDICT = ("theta_hat", "propagated", "effect_propagated", "kl", "drift", "text_loss")
FEWEST, AT_FLOOR = 10, 0.05  # answered prompts for a verdict; share found, or lost, under which nothing is told
LENGTHS = ((7, 1, 7), (15, 7, 21))
"""Digits, narrower and wider kernel of the two tests that say whether a kernel keeps answers as long as itself."""
MODELS, SUPPORTED = 2, 0.75  # of a general difference; share of settings in which a supported measure foretells


@dataclass(frozen=True)
class Outcomes:
    """Answers of a run: which prompts each cache answers, of those that the full cache answers.

    Attributes:
        model, digits: the run's.
        prompts: number of prompts that were read.
        found: (method, budget, kernel) -> (answered prompt,) whether its cache finds the number.
        moved: the same -> (answered prompt, 3) the columns `MOVED`.
    """

    model: str
    digits: int
    prompts: int
    found: Mapping[tuple[str, float, int], np.ndarray]
    moved: Mapping[tuple[str, float, int], np.ndarray]

    @property
    def answered(self) -> int:
        """Number of prompts that the full cache answers."""
        return len(next(iter(self.found.values())))


def outcomes(cells: Sequence[Mapping[str, str]]) -> list[Outcomes]:
    """Return the outcomes of each run, in the order of the rows."""
    found = []
    for name, digits in dict.fromkeys((row["model"], row["digits"]) for row in cells):
        own = [row for row in cells if (row["model"], row["digits"]) == (name, digits)]
        each: dict[tuple[str, float, int], list[Mapping[str, str]]] = {}
        for row in own:
            key = row["method"], float(row["budget"]), int(row["kernel"])
            each.setdefault(key, []).extend([row] if row["full"] == "1" else [])
        for rows in each.values():
            if [row["sample"] for row in rows] != [row["sample"] for row in next(iter(each.values()))]:
                raise pk.PerturbkvError(f"{name}: caches answer other prompts")
        hits = {key: np.array([row["found"] == "1" for row in one]) for key, one in each.items()}
        moved = {key: np.array([[float(row[name]) for name in MOVED] for row in one]) for key, one in each.items()}
        found.append(Outcomes(name, int(digits), len({row["sample"] for row in own}), hits, moved))
    return found


@dataclass(frozen=True)
class Pair:
    """A comparison of two caches on the prompts that the full cache answers.

    Attributes:
        run: whose prompts.
        first, second: (method, budget, kernel); `second` is claimed to find more.
        more, fewer: prompts that only the second finds, and only the first.
        decided: whether both differ, with the tests of its table corrected together.
    """

    run: Outcomes
    first: tuple[str, float, int]
    second: tuple[str, float, int]
    more: int
    fewer: int
    decided: bool = False

    @property
    def p(self) -> float:
        """McNemar's exact p, two-sided."""
        return sign_test(self.more, self.fewer)

    def text(self) -> str:
        """Return '12 more, 3 fewer, p = 0.035', with a star where it is decided."""
        p = f"p {'' if self.p < 0.001 else '= '}{p_text(self.p)}{'*' * self.decided}"
        return f"{self.more} more, {self.fewer} fewer, {p}"


def decide(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs with `decided` set (Benjamini–Hochberg, 5 %), but not for runs of too few answered prompts."""
    counted = list(pairs)
    p = np.array([pair.p if pair.run.answered >= FEWEST else np.nan for pair in counted])
    marks = pk.stats.permutation.benjamini_hochberg(p)
    return [dataclasses.replace(pair, decided=bool(mark)) for pair, mark in zip(counted, marks, strict=True)]


def pair_of(run: Outcomes, first: tuple[str, float, int], second: tuple[str, float, int]) -> Pair:
    """Return the comparison of two caches of a run."""
    one, other = run.found[first], run.found[second]
    return Pair(run, first, second, int((other & ~one).sum()), int((one & ~other).sum()))


def method_pairs(found: Sequence[Outcomes]) -> list[Pair]:
    """Return every method against SnapKV, at every budget of every model, all tests corrected together."""
    return decide(
        pair_of(run, (BASELINE, budget, 7), (method, budget, 7))
        for run in found
        for budget in BUDGETS
        for method in METHODS
        if method != BASELINE and (method, budget, 7) in run.found
    )


def kernel_pairs(found: Sequence[Outcomes]) -> list[Pair]:
    """Return every two kernels of a method, the wider one second, for every length, all tests corrected together."""
    return decide(
        pair_of(run, (method, CROSSED, narrow), (method, CROSSED, wide))
        for run in found
        for method in POOLED
        for narrow, wide in combinations(KERNELS, 2)
        if run.found.keys() >= {(method, CROSSED, narrow), (method, CROSSED, wide)}
    )


def share_text(hits: np.ndarray) -> str:
    """Return '54 % [44, 64]', the share of answers that are found."""
    return common.percent_text(float(hits.mean()), pk.stats.intervals.of_share(hits)) if len(hits) else "–"


def at_end(run: Outcomes, budget: float) -> bool:
    """Return whether all methods of a budget find so few answers, or lose so few, that nothing tells them apart."""
    shares = [one.mean() for (_, at, kernel), one in run.found.items() if (at, kernel) == (budget, 7)]
    return not shares or max(shares) < AT_FLOOR or min(shares) > 1 - AT_FLOOR


def tables(found: Sequence[Outcomes], foretold: Sequence[Mapping[str, str]]) -> Iterator[common.Table]:
    """Yield every table of the page."""
    compared = [run for run in found if run.digits == 7]
    told = method_pairs(compared)
    pairs = {(pair.run.model, pair.second): pair for pair in told}
    for run in compared:
        budgets = [budget for budget in BUDGETS if (BASELINE, budget, 7) in run.found]
        ends = [f"b={budget:g}" for budget in budgets if at_end(run, budget)]
        title = f"{run.model}: the full cache answers {run.answered} of {run.prompts}; the others find of these"
        lines = []
        for method in METHODS:
            cells_of = [(share_text(run.found[method, budget, 7]), pairs.get((run.model, (method, budget, 7))))
                        for budget in budgets]  # fmt: skip
            lines.append([method, *(f"{share}; {pair.text()}" if pair else share for share, pair in cells_of)])
        at = f" (at an end: {', '.join(ends)})" if ends else ""
        yield title + at, ["method, against SnapKV", *(f"b = {budget:g} n" for budget in budgets)], lines
        yield moved_table(run)
    yield general_table(told)
    yield from foretelling_tables(foretold)
    yield verdict_table(foretold)
    yield from kernel_tables([run for run in found if (BASELINE, CROSSED, 1) in run.found])


def general_table(pairs: Sequence[Pair]) -> common.Table:
    """Return what is decided of each method against SnapKV, and whether that is so in general."""
    lines = []
    for method in dict.fromkeys(pair.second[0] for pair in pairs):
        own = [pair for pair in pairs if pair.second[0] == method and pair.decided]
        more, fewer = ([pair for pair in own if (pair.more > pair.fewer) == side] for side in (True, False))
        places = (", ".join(f"{pair.run.model} b={pair.second[1]:g}" for pair in side) or "–" for side in (more, fewer))
        lines.append([method, *places, in_general(more, fewer)])
    return "methods against SnapKV, in general", ["method", "more, decided in", "fewer, decided in", "verdict"], lines


def in_general(more: Sequence[Pair], fewer: Sequence[Pair]) -> str:
    """Return whether a method keeps more, or fewer, in two models or more and the opposite in none."""
    for word, side, other in (("more", more, fewer), ("fewer", fewer, more)):
        if len({pair.run.model for pair in side}) >= MODELS and not other:
            return f"{word} in general"
    return "not general"


def verdict_table(foretold: Sequence[Mapping[str, str]]) -> common.Table:
    """Return each measure's verdicts over the settings with enough prompts, and the one of all."""
    lines = []
    for measure in dict.fromkeys(row["measure"] for row in foretold if row["measure"] not in NO_VERDICT):
        told = [verdict_of(row) for row in foretold if row["measure"] == measure and int(row["prompts"]) >= FEWEST]
        counts = ", ".join(f"{verdict} {count}" for verdict, count in Counter(told).items())
        lines.append([measure, str(len(told)), counts, overall(told)])
    return "which number foretells lost answers", ["measure", "settings", "verdicts", "all"], lines


def overall(verdicts: Sequence[str]) -> str:
    """Return what the rules say of a measure, given its verdicts in the settings with enough prompts."""
    count, told = len(verdicts), Counter(verdicts)
    if count and told["foretells"] >= SUPPORTED * count and not told["reversed"]:
        return "supported"
    most = told["no more than names"] > count / 2 or told["reversed"] > count / 2
    return "contradicted" if not told["foretells"] and most else "undecided"


def kernel_tables(found: Sequence[Outcomes]) -> Iterator[common.Table]:
    """Yield what each kernel finds of numbers of each length, and the tests between kernels."""
    lines = [
        [run.model, str(run.digits), method, f"{run.answered} of {run.prompts}",
         *(share_text(run.found[method, CROSSED, kernel]) for kernel in KERNELS)]
        for run in sorted(found, key=lambda run: (run.model, run.digits)) for method in POOLED
    ]  # fmt: skip
    heads = ["model", "digits", "method", "answered in full", *(f"kernel {kernel}" for kernel in KERNELS)]
    yield f"numbers found at b = {CROSSED:g} n, by the width of pooling", heads, lines
    told = kernel_pairs(found)
    tests = [[pair.run.model, str(pair.run.digits), pair.first[0], f"{pair.first[2]} → {pair.second[2]}", pair.text()]
             for pair in told]  # fmt: skip
    yield "wider kernels against narrower ones", ["model", "digits", "method", "kernel", "found by the wider"], tests
    verdicts = []
    for name, method in product(dict.fromkeys(run.model for run in found), POOLED):
        own = [pair for pair in told if (pair.run.model, pair.first[0]) == (name, method)]
        verdicts.append([name, method, kernel_verdict(own)])
    yield "a kernel keeps answers about as long as itself", ["model", "method", "verdict"], verdicts


def kernel_verdict(pairs: Sequence[Pair]) -> str:
    """Return holds, contradicted or undecided: 7 entries against 1 at seven digits, and 21 against 7 at fifteen."""
    asked = [pair for pair in pairs if (pair.run.digits, pair.first[2], pair.second[2]) in LENGTHS]
    decided = [np.sign(pair.more - pair.fewer) if pair.decided else 0 for pair in asked]
    if -1 in decided:
        return "contradicted"
    return "holds" if decided == [1] * len(LENGTHS) else "undecided"


def foretelling_tables(foretold: Sequence[Mapping[str, str]]) -> Iterator[common.Table]:
    """Yield what each measure foretells of lost answers, per model and budget."""
    for name, budget in dict.fromkeys((row["model"], row["budget"]) for row in foretold):
        own = [row for row in foretold if (row["model"], row["budget"]) == (name, budget)]
        lines = [[row["measure"], _cell(row, "rho", 1, 2), *(_cell(row, one, 100, 0) for one in ("area", "beyond")),
                  row["prompts"], _cell(row, "without", 100, 0), row["prompts_without"], verdict_of(row)]
                 for row in own]  # fmt: skip
        heads = ["measure", "ρ with found", "lost above kept, %", "less names, points", "deciding prompts",
                 "without random, %", "deciding", "verdict"]  # fmt: skip
        yield f"{name}, b = {budget}: does it foretell lost answers between methods?", heads, lines


def _cell(row: Mapping[str, str], name: str, scale: float, digits: int) -> str:
    """Return a number of a row with its interval."""
    value, low, high = (scale * float(row[one]) for one in (name, f"{name}_low", f"{name}_high"))
    return "–" if np.isnan(value) else f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def verdict_of(row: Mapping[str, str]) -> str:
    """Return what the rules say of a measure in a setting."""
    if row["measure"] in NO_VERDICT or int(row["prompts"]) < FEWEST:
        return "–" if row["measure"] in NO_VERDICT else "too few"
    low, high, least, most = (float(row[name]) for name in ("area_low", "area_high", "beyond_low", "beyond_high"))
    if low > 0.5 and least > 0:
        return "foretells"
    if high < 0.5 and most < 0:
        return "reversed"
    return "no more than names" if max(abs(least), abs(most)) <= 0.1 else "undecided"


def moved_ratio(run: Outcomes, cache: tuple[str, float, int], column: int) -> common.Estimated:
    """Return how far a cache moves outputs, over SnapKV's of its budget; `column` is an index of `MOVED`."""
    one, other = run.moved[cache][:, column], run.moved[BASELINE, cache[1], 7][:, column]
    return float(one.sum() / other.sum()), pk.stats.intervals.of_ratio(one, other)


def moved_table(run: Outcomes) -> common.Table:
    """Return how far each cache moves outputs, over SnapKV's, at the answer's first token and over all of them."""
    lines = []
    for (method, budget, kernel), hits in run.found.items():
        ratios = (common.interval_text(*moved_ratio(run, (method, budget, kernel), column)) for column in (0, 1))
        each = run.moved[method, budget, kernel][:, 2]
        less = common.percent_text(
            float(each.mean()), pk.stats.intervals.of_mean(each, pk.stats.intervals.share_kind(HEADS.get(run.model, 0)))
        )
        name = f"{method}{f', kernel {kernel}' if kernel != 7 else ''}"
        lines.append([name, f"{budget:g}", *ratios, less, share_text(hits)])
    heads = ["method", "b / n", "first token", "whole answer", "heads that move less", "found"]
    return f"{run.model}: isolated L1 along the right answer, over SnapKV's", heads, lines


BESIDE = {
    **dict.fromkeys((BASELINE, "two-stage, later, kernel 21"), (4, 4)),
    **dict.fromkeys(("two-stage, later", "two-stage, later, kernel 1"), (-4, 5)),
    "two-stage, first": (-4, -10),
}
"""A cache's name -> where it stands beside its point, in points; others to the right of it, below."""
PLAIN = {"un-pooled": "SnapKV, not smoothed", "two-stage, first": "two-stage, first version",
         "two-stage, later": "two-stage, later version"}  # fmt: skip
"""Method -> its name for readers without the page."""


def shown_budget(run: Outcomes) -> float:
    """Return the budget at which a run's methods differ: the smallest that is at no end."""
    return next(budget for budget in BUDGETS if not at_end(run, budget))


def draw_found(found: Sequence[Outcomes]) -> Figure:
    """Draw how many numbers each method's cache finds, and how many heads move less than under SnapKV."""
    axis = (figure := common.page_figure(76, 150)).subplots()
    for place, run in enumerate(found):
        budget, colour = shown_budget(run), f"C{place}"
        hits = [run.found[method, budget, 7] for method in METHODS]
        shares = [100 * float(one.mean()) for one in hits]
        ends = [common.in_percent(pk.stats.intervals.of_share(one)) for one in hits]
        rows = np.arange(len(METHODS)) + 0.26 * (place - (len(found) - 1) / 2)
        label = f"{NAMES.get(run.model, run.model)}, {100 * budget:.0f} % of the cache kept, {run.answered} numbers"
        axis.errorbar(shares, rows, xerr=common.error_bars(shares, ends), fmt="o", markersize=4, elinewidth=0.8,
                      color=colour, label=label)  # fmt: skip
        heads = [100 * float(run.moved[method, budget, 7][:, 2].mean()) for method in METHODS]
        axis.plot(heads[1:], rows[1:], "s", color=colour, fillstyle="none", markersize=4)
    axis.plot([], [], "s", color="0.3", fillstyle="none", markersize=4,
              label="heads that move less than under SnapKV along the right answer")  # fmt: skip
    axis.set_yticks(range(len(METHODS)), [PLAIN.get(method, method) for method in METHODS])
    axis.set(xlabel="% of the numbers that the full cache finds (circles), of heads (squares)", xlim=(-3, 103))
    axis.invert_yaxis()
    figure.legend(loc="outside upper center")
    return figure


def draw_moved(found: Sequence[Outcomes]) -> Figure:
    """Draw, a panel per model, what each cache finds over how far it moves outputs: first token and whole answer.

    `random`, which moves them several times as far, is told at the right edge.
    """
    figure = common.page_figure(78)
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axis, run in zip(axes, found, strict=True):
        _draw_panel(axis, run, shown_budget(run))
    axes[0].set_ylabel("numbers found, %")
    for column, (fill, label) in enumerate(
        (("none", "at the answer's first token"), ("full", "over the whole answer"))
    ):
        axes[0].plot([], [], "o", color=f"C{column}", fillstyle=fill, markersize=4, label=label)
    figure.legend(loc="outside upper center", ncols=2)
    figure.supxlabel("isolated L1 of all heads, over SnapKV's", fontsize="medium")
    return figure


def _draw_panel(axis: Axes, run: Outcomes, budget: float) -> None:
    """Draw one model's caches of one budget."""
    caches = [key for key in run.found if key[1] == budget and key[0] != "random" and (key[0], key[2]) != (BASELINE, 1)]
    for cache in caches:
        hits = run.found[cache]
        share, ends = 100 * float(hits.mean()), common.in_percent(pk.stats.intervals.of_share(hits))
        for column, fill in enumerate(("none", "full")):
            ratio, sides = moved_ratio(run, cache, column)
            across = common.error_bars([share], [ends]) if column else None
            axis.errorbar(ratio, share, across, common.error_bars([ratio], [sides]), fmt="o", markersize=3.5,
                          elinewidth=0.7, color=f"C{column}", fillstyle=fill)  # fmt: skip
        name = cache[0] + (f", kernel {cache[2]}" if cache[2] != 7 else "")
        at = BESIDE.get(name, (4, -10))
        side = "left" if at[0] > 0 else "right"
        axis.annotate(name, (ratio, share), at, textcoords="offset points", ha=side, fontsize="x-small")
    far = " and ".join(f"{moved_ratio(run, ('random', budget, 7), column)[0]:.1f}" for column in (0, 1))
    axis.text(1, 0.02, f"random: {far} →", transform=axis.transAxes, ha="right", fontsize="x-small")
    axis.axvline(1, color="0.3", linewidth=0.6, linestyle=":")
    axis.set(ylim=(-22, 116), yticks=range(0, 101, 20))
    axis.set_title(f"{NAMES.get(run.model, run.model)}, {100 * budget:.0f} %")
    axis.margins(x=0.4)


def study(asked: argparse.Namespace) -> None:
    """Print what was measured, and draw it."""
    cells, foretold = (read_rows(ROWS / f"{run.name}{end}.csv" for run in runs()) for end in ("", "-foretelling"))
    found = outcomes(cells)
    compared = [run for run in found if run.digits == 7]
    for name, draw in (("found", draw_found), ("moved", draw_moved)):
        asked.written.append(asked.figures / f"answers-{name}.png")
        draw(compared).savefig(asked.written[-1], dpi=200)
    common.write_tables(asked, tables(found, foretold))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder of the pictures")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    common.main(study, parser)

"""What tables of scores say in words: the conclusion, and what a number in them is."""

from __future__ import annotations

from collections.abc import Sequence

from perturbkv.analyses import first_token, numbers
from perturbkv.analyses.intervals import LEAST
from perturbkv.analyses.naming import counted, short
from perturbkv.analyses.quality_columns import Column, Mean, Sides
from perturbkv.analyses.quality_layout import Line, lines
from perturbkv.analyses.sentences import Words, decided, sentence, tally
from perturbkv.configs.eviction import EvictionConfig

_MOST_NAMED = 3


def points(mean: Mean) -> str:
    """'43.8 [40.1, 47.5]' of a score, or of a difference of two, in [−1, 1]: times 100, as papers show it."""
    return f"{value(mean)} {ends(mean)}".strip()


def value(mean: Mean) -> str:
    """'43.8'."""
    return numbers.fixed(100 * mean.value, 1)


def ends(mean: Mean, digits: int = 1) -> str:
    """'[40.1, 47.5]', of a range '(40.1 … 47.5)'; empty where there is none."""
    return numbers.ends(mean.interval, lambda end: numbers.fixed(100 * end, digits), "")


def conclusion(
    average: Column, configs: Sequence[EvictionConfig], pairs: Sequence[Sides], sides: tuple[str, str]
) -> str:
    """Of each budget what scores best beside the full cache, and how often the treatment beats the baseline."""
    full, over = points(average.full), _over(average)
    if not average.full.value:
        return f"Even the full cache scores 0 ({over}): there is nothing that eviction can lose."
    best = "; ".join(_best_of_budgets(lines(configs, [average])))
    told = f"the full cache scores {full} of 100 ({over}); {best}"
    said = _beaten(average, configs, pairs, sides)
    return sentence(f"{told}; {said}" if said else told, *short(configs))


def _best_of_budgets(shown: Sequence[Line]) -> list[str]:
    """The highest score of each budget; of many budgets of the least and the largest."""
    by_budget: dict[str, list[Line]] = {}
    for line in shown[1:]:
        by_budget.setdefault(line.budget, []).append(line)
    found = [f"at b={budget} {_best(some)}" for budget, some in by_budget.items()]
    return found if len(found) <= _MOST_NAMED else [found[0], found[-1]]


def _best(some: Sequence[Line]) -> str:
    """'two-stage scores best, 45.1 [40.2, 50.0]' of the lines of one budget."""
    best = max(some, key=lambda line: line.cells[0].mean.value)
    shown = points(best.cells[0].mean)
    if len(some) == 1:
        return f"{best.method} scores {shown}"
    return f"{best.method} scores best, {shown}" if best.cells[0].best else f"all {len(some)} methods score {shown}"


def _beaten(average: Column, configs: Sequence[EvictionConfig], pairs: Sequence[Sides], sides: tuple[str, str]) -> str:
    """'two-stage scores higher than attention in 2 of 6 cases, undecided in 4'; empty without such pairs."""
    baseline, treatment = sides
    if not pairs:
        return ""
    if len(pairs) == 1:
        return f"{treatment} scores {points(average.gains[0].difference)} more than {baseline}"
    words: Words = {
        1: (f"{treatment} scores higher than {baseline}", "higher"),
        -1: (f"{treatment} scores lower than {baseline}", "lower"),
        0: (f"whether {treatment} scores higher than {baseline} is undecided", "undecided"),
    }
    verdicts = [decided(gain.difference.interval, 0) for gain in average.gains]
    return tally(verdicts, words, "case")


def _over(average: Column) -> str:
    """'the average of 3 data sets, 24 samples'."""
    samples = counted(average.samples, "sample")
    return samples if len(average.tasks) == 1 else f"the average of {len(average.tasks)} data sets, {samples}"


def about_scores(datasets: Sequence[Column]) -> str:
    """What a score is, and of how many samples."""
    sizes = sorted({one.samples for one in datasets})
    said = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    each = " of each data set" if len(datasets) > 1 else ""
    return f"Scores: means of the data sets' own metrics × 100, n = {said}{each}."


def notes(datasets: Sequence[Column], left_out: Sequence[EvictionConfig]) -> str:
    """What a score and its brackets are, what is few, and what was left out."""
    several = "; over several data sets each one's interval counts by itself" if len(datasets) > 1 else ""
    few = [one.name for one in datasets if one.samples < LEAST]
    said = [
        f"{about_scores(datasets)} In brackets: 95 % intervals over samples{several}. *: the highest mean of its "
        f"budget; whether that is decided, differences tell. Better/equal/worse: samples. {numbers.ABOUT_HELD}"
    ]
    if few:
        said.append(f"Too few samples for intervals: {', '.join(few)}; in parentheses the range of single samples.")
    if len(datasets) > 1:
        said.append("Every data set counts the same in a kind's mean and in the average.")
    if alike := sum(task.alike for one in datasets for task in one.tasks):
        said.append(first_token.about(alike, sum(one.samples for one in datasets)))
    if left_out:
        said.append(f"Left out, as not every trace holds them: {', '.join(one.label() for one in left_out)}.")
    return "\n".join(said)

"""What tables of scores say in words: the conclusion, and what a number in them is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import isnan

from perturbkv.analyses import first_token, text
from perturbkv.analyses.naming import counted, short
from perturbkv.analyses.quality.quality_layout import Line, lines
from perturbkv.analyses.quality.quality_terms import departures, graded_by
from perturbkv.analyses.quality.score_columns import Column, Mean, Sides
from perturbkv.analyses.ranked_together import APART
from perturbkv.analyses.sentences import Words, decided, sentence, tally
from perturbkv.analyses.stats.intervals import LEAST
from perturbkv.configs.eviction import EvictionConfig

_MOST_NAMED = 3
_ROUNDED = 0.005
"""What two shares differ by that are shown alike."""
BEST = "the highest mean of its budget, granularity and protection, by looking, for which no interval allows"
"""What a mark is."""


def points(mean: Mean) -> str:
    """'43.8 [40.1, 47.5]' of a score, or of a difference of two, in [−1, 1]: times 100, as papers show it."""
    return f"{value(mean)} {ends(mean)}".strip()


def value(mean: Mean) -> str:
    """'43.8'."""
    return text.fixed(100 * mean.value, 1)


def ends(mean: Mean, digits: int = 1) -> str:
    """'[40.1, 47.5]', of a range '(40.1 … 47.5)'; empty where there is none."""
    return text.ends(mean.interval, lambda end: text.fixed(100 * end, digits), "")


def conclusion(
    average: Column, configs: Sequence[EvictionConfig], pairs: Sequence[Sides], sides: tuple[str, str]
) -> str:
    """Of each budget what scores best beside the full cache, and how often the treatment beats the baseline."""
    full, over = points(average.full), _over(average)
    if not average.full.value:
        return f"Even the full cache scores 0 ({over}): there is nothing that eviction can lose."
    best = "; ".join(_best_of_rivals(configs, lines(configs, [average])))
    told = f"the full cache scores {full} of 100 ({over}); {best}"
    said = _beaten(average, pairs, sides)
    return sentence(f"{told}; {said}" if said else told, *short(configs))


def _best_of_rivals(configs: Sequence[EvictionConfig], shown: Sequence[Line]) -> list[str]:
    """The highest score of each budget and granularity; of many those of the least and the largest budget."""
    names = [name or "evicted" for name in short(configs, "budget", *APART)]
    groups = [list(some) for _, some in groupby(shown[1:], key=lambda line: line.rivals)]
    ends = (shown[1].budget, shown[-1].budget)
    told = [some for some in groups if len(groups) <= _MOST_NAMED or some[0].budget in ends]
    return [f"at b={some[0].rivals} {_best(some, configs, names)}" for some in told]


def _best(some: Sequence[Line], configs: Sequence[EvictionConfig], names: Sequence[str]) -> str:
    """'two-stage scores best by looking, 45.1 [40.2, 50.0] (held / full 1.20)' of rivals, equal ones together."""
    first = max(some, key=lambda line: line.cells[0].mean.value)
    place = first.place or 0
    shown = f"{points(first.cells[0].mean)}{_held(first.held, configs[place])}"
    if len(some) == 1:
        return f"{names[place]} scores {shown}"
    best = [names[line.place or 0] for line in some if line.cells[0].best]
    if not best:
        return f"all {len(some)} methods score {shown}"
    return f"{' and '.join(best)} {'score alike and' if len(best) > 1 else 'scores'} best by looking, {shown}"


def _held(share: float, config: EvictionConfig) -> str:
    """' (held / full 1.20)' where that is not the budget, which in entries is no share; empty where it is unknown."""
    alike = isinstance(config.budget.value, float) and abs(share - config.budget.value) < _ROUNDED
    return "" if isnan(share) or alike else f" (held / full {text.held(share)})"


def _beaten(average: Column, pairs: Sequence[Sides], sides: tuple[str, str]) -> str:
    """'two-stage scores higher than attention in 2 of 6 cases, undecided in 4'; empty without such pairs."""
    baseline, treatment = sides
    if not pairs:
        return ""
    words: Words = {
        1: (f"{treatment} scores higher than {baseline}", "higher"),
        -1: (f"{treatment} scores lower than {baseline}", "lower"),
        0: (f"whether {treatment} scores higher than {baseline} is undecided", "undecided"),
    }
    said = tally([decided(gain.difference.interval, 0) for gain in average.gains], words, "case")
    return f"{said} (difference {points(average.gains[0].difference)})" if len(pairs) == 1 else said


def _over(average: Column) -> str:
    """'the average of 3 data sets, 24 samples'."""
    samples = counted(average.samples, "sample")
    return samples if len(average.tasks) == 1 else f"the average of {len(average.tasks)} data sets, {samples}"


def about_scores(datasets: Sequence[Column]) -> str:
    """What a score is, what graded it, and of how many samples; what is not as the data sets have it."""
    named = [(one.name, one.tasks[0].terms) for one in datasets]
    sizes = sorted({one.samples for one in datasets})
    said = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    each = " of each data set" if len(datasets) > 1 else ""
    return " ".join([f"Scores × 100: means of {graded_by(named)}, n = {said}{each}.", *departures(named)])


def about_marks(datasets: Sequence[Column]) -> str:
    """What a table's caption says of its numbers: scores, brackets, bold ones."""
    return f"{about_scores(datasets)} {about_brackets(datasets)} Bold: {BEST}."


def about_brackets(datasets: Sequence[Column]) -> str:
    """What brackets and parentheses are, as far as there are any."""
    several = "; over several data sets each one's interval counts by itself" if len(datasets) > 1 else ""
    found = {one.full.interval.kind for one in datasets if one.full.interval is not None}
    said = [f"In brackets: 95 % intervals over samples{several}."] if "interval" in found else []
    if few := [one.name for one in datasets if one.samples < LEAST]:
        range_ = "; in parentheses the range of single samples" if "range" in found else ""
        said.append(f"Too few samples for intervals: {', '.join(few)}{range_}.")
    return " ".join(said)


def notes(datasets: Sequence[Column], left_out: Sequence[EvictionConfig], lacking: Sequence[str]) -> str:
    """What a score and its brackets are, what is few, and what was left out."""
    said = [
        f"{about_scores(datasets)} {about_brackets(datasets)} *: {BEST}; whether that is decided, differences tell. "
        f"Better/equal/worse: samples. {text.about_held([share for one in datasets for share in one.held])}"
    ]
    if len(datasets) > 1:
        said.append("Every data set counts the same in a kind's mean and in the average.")
    if alike := sum(task.alike for one in datasets for task in one.tasks):
        said.append(first_token.about(alike, sum(one.samples for one in datasets)))
    if left_out:
        labels = ", ".join(one.label() for one in left_out)
        said.append(f"Left out, as not all data sets have them ({', '.join(lacking)}): {labels}.")
    return "\n".join(said)

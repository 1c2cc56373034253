"""Columns of a table of scores: data sets, kinds of tasks, and the average over all data sets.

A table of scores as papers lay it out: methods by budget beneath the full cache, data sets by kind, the average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from perturbkv.analyses.pairing import ranked_together, short_names
from perturbkv.analyses.quality.graded_tasks import Task
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import Floats, Kind, Scalar, share_of
from perturbkv.analyses.text import at
from perturbkv.configs.eviction import EvictionConfig

_SCORE = share_of(0)
AVERAGE = "average"
_EQUAL = 1e-12
"""Means of the same scores in another order differ by rounding."""
Sides = tuple[int, int]
"""Places of baseline and treatment among the configurations."""
Rivals = Mapping[str, Sequence[int]]
"""Places of the configurations that may be held against each other, of `ranked_together`."""


@dataclass(frozen=True)
class Mean:
    """A mean over the samples of a data set, and then over data sets, with its interval."""

    value: float
    interval: Scalar


@dataclass(frozen=True)
class Contest:
    """One cache's answers against another's to the same prompts.

    Attributes:
        difference: mean of the first's scores minus the second's.
        wins, ties, losses: samples in which the first's answer is better, as good, worse.
    """

    difference: Mean
    wins: int
    ties: int
    losses: int

    @property
    def samples(self) -> str:
        """'3/4/1': better, as good, worse."""
        return f"{self.wins}/{self.ties}/{self.losses}"


@dataclass(frozen=True)
class Column:
    """One data set, one kind of task, or all data sets; every data set counts the same.

    Attributes:
        name: the data set's, the kind's, or `average`.
        tasks: what it is the mean of.
        full: the full cache's score.
        evicted: (config,) score of each configuration.
        held: (config,) entries over the full cache's, mean over data sets; NaN where a trace does not tell.
        lost: (config,) each configuration against the full cache.
        gains: (pair,) the treatment against the baseline.
        best: (config,) whether none of its rivals has a higher mean, and some a lower one.
    """

    name: str
    tasks: tuple[Task, ...]
    full: Mean
    evicted: tuple[Mean, ...]
    held: Floats
    lost: tuple[Contest, ...]
    gains: tuple[Contest, ...]
    best: tuple[bool, ...]

    @property
    def samples(self) -> int:
        """Complete ones, of all its data sets."""
        return sum(len(task.samples) for task in self.tasks)

    @property
    def kind(self) -> str:
        """Of its first data set: all columns but the average have one kind."""
        return self.tasks[0].kind


def column(name: str, tasks: Sequence[Task], pairs: Sequence[Sides], rivals: Rivals) -> Column:
    """The column of some data sets; of `rivals` the best are found."""
    found = tuple(tasks)
    full, evicted = [task.full for task in found], [task.evicted for task in found]
    places = range(evicted[0].shape[1])
    means = tuple(_mean([one[:, place] for one in evicted], _SCORE) for place in places)
    return Column(
        name=name,
        tasks=found,
        full=_mean(full, _SCORE),
        evicted=means,
        held=held_in(found),
        lost=tuple(_contest([one[:, place] for one in evicted], full) for place in places),
        gains=tuple(
            _contest([one[:, second] for one in evicted], [one[:, first] for one in evicted]) for first, second in pairs
        ),
        best=_best([one.value for one in means], rivals),
    )


def held_in(tasks: Sequence[Task]) -> Floats:
    """(config,) entries over the full cache's, mean over data sets of each one's mean over samples."""
    return np.asarray(np.mean([task.held.mean(axis=0) for task in tasks], axis=0))


def by_dataset(tasks: Sequence[Task], pairs: Sequence[Sides], rivals: Rivals) -> tuple[Column, ...]:
    """A column per data set."""
    return tuple(column(task.name, [task], pairs, rivals) for task in tasks)


def by_kind(tasks: Sequence[Task], pairs: Sequence[Sides], rivals: Rivals) -> tuple[Column, ...]:
    """A column per kind of task: the mean over its data sets."""
    return tuple(column(kind, list(some), pairs, rivals) for kind, some in groupby(tasks, key=lambda task: task.kind))


def of_first_step(task: Task, config: int) -> dict[str, Any]:
    """What the first step of a data set showed of a configuration: medians over samples, with their intervals."""
    found: dict[str, Any] = {}
    for name, array in (("propagated", task.propagated), ("kl", task.kl)):
        found[name] = float(np.median(array[:, config]))
        found[f"{name}_interval"] = at(intervals.of_medians(array[:, [config]]), 0)
    return found


def _mean(parts: Sequence[Floats], kind: Kind) -> Mean:
    return Mean(intervals.stratified_mean(parts), intervals.of_stratified_mean(parts, kind))


def _contest(first: Sequence[Floats], second: Sequence[Floats]) -> Contest:
    """Sample by sample, data set by data set."""
    differences = [one - other for one, other in zip(first, second, strict=True)]
    signs = np.sign(np.concatenate(differences))
    wins, ties, losses = (int((signs == sign).sum()) for sign in (1, 0, -1))
    return Contest(_mean(differences, intervals.DIFFERENCE), wins, ties, losses)


def _best(means: Sequence[float], rivals: Rivals) -> tuple[bool, ...]:
    """Whether each is the highest among its rivals, where these differ; equal ones all are."""
    found = [False] * len(means)
    for places in rivals.values():
        some = [means[place] for place in places]
        for place in places:
            found[place] = max(some) - min(some) > _EQUAL and means[place] >= max(some) - _EQUAL
    return tuple(found)


FULL = "full cache"


@dataclass(frozen=True)
class Cell:
    """One score.

    Attributes:
        mean: in [0, 1].
        best: whether none of its rivals has a higher one.
    """

    mean: Mean
    best: bool


@dataclass(frozen=True)
class Line:
    """The full cache, or one configuration.

    Attributes:
        place: among the configurations; None of the full cache.
        method: what tells it from the others beside its budget.
        budget: as the user gave it; empty of the full cache.
        rivals: what it may be held against: name of a group of `ranked_together`; empty of the full cache.
        held: entries over the full cache's, mean over the data sets shown; NaN where a trace does not tell.
        cells: one per column.
    """

    place: int | None
    method: str
    budget: str
    rivals: str
    held: float
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Layout:
    """One table.

    Attributes:
        columns: names, the average behind the others, where there are several.
        groups: kind and number of columns of those beside each other that share it; empty names stand for none.
        lines: the full cache, then the configurations, the smallest budget first, rivals together.
    """

    columns: tuple[str, ...]
    groups: tuple[tuple[str, int], ...]
    lines: tuple[Line, ...]

    def starts_rivals(self, line: Line) -> bool:
        """Whether a line is the first among its rivals."""
        before = self.lines[self.lines.index(line) - 1]
        return line.place is not None and line.rivals != before.rivals


def layout(configs: Sequence[EvictionConfig], columns: Sequence[Column], average: Column) -> Layout:
    """The table of some columns, and of the average where they are several."""
    shown = (*columns, average) if len(columns) > 1 else tuple(columns)
    kinds = ["" if one.name in (AVERAGE, one.kind) else one.kind for one in shown]
    return Layout(
        columns=tuple(one.name for one in shown),
        groups=tuple((kind, len(list(some))) for kind, some in groupby(kinds)),
        lines=lines(configs, shown),
    )


def lines(configs: Sequence[EvictionConfig], columns: Sequence[Column]) -> tuple[Line, ...]:
    """The full cache, then every configuration, the smallest budget first: shares of a prompt before entries."""
    names = [name or "evicted" for name in short_names(configs, "budget")]
    held = held_in(list({task.dataset: task for one in columns for task in one.tasks}.values()))
    groups = ranked_together(configs)
    full = Line(None, FULL, "", "", 1.0, tuple(Cell(one.full, best=False) for one in columns))
    evicted = [
        Line(
            place, names[place], str(configs[place].budget), group, float(held[place]),
            tuple(Cell(one.evicted[place], one.best[place]) for one in columns),
        )
        for group in sorted(groups, key=lambda group: _size(configs[groups[group][0]]))
        for place in groups[group]
    ]  # fmt: skip
    return (full, *evicted)


def _size(config: EvictionConfig) -> tuple[bool, float]:
    return isinstance(config.budget.value, int), float(config.budget.value)

"""Columns of a table of scores: data sets, kinds of tasks, and the average over all data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from perturbkv.analyses.quality.graded_tasks import Task
from perturbkv.analyses.stats import intervals, strata
from perturbkv.analyses.stats.intervals import Floats, Kind, Scalar, share_of
from perturbkv.analyses.text import at

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
    return Mean(strata.mean(parts), strata.of_mean(parts, kind))


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

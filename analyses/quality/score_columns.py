"""Columns of a table of scores: data sets, kinds of tasks, and the average over all data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.columns import Record, column, derived, interval, record
from perturbkv.analyses.names import distinct_names
from perturbkv.analyses.quality.graded_tasks import Task
from perturbkv.analyses.sides import budget_order, comparable_groups
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import Floats, OptionalInterval, share_kind
from perturbkv.configs.eviction import EvictionConfig

_SCORE = share_kind(0)
AVERAGE = "average"
_EQUAL = 1e-12
"""Means of the same scores in another order differ by rounding."""


@dataclass(frozen=True)
class Comparison:
    """The configurations, and the pairs and groups in which they are compared with each other.

    Attributes:
        configs: the configurations, which all data sets have.
        pairs: indices of each baseline and its treatment.
        groups: name -> indices of the configurations of one budget, granularity and protection.
    """

    configs: tuple[EvictionConfig, ...]
    pairs: tuple[tuple[int, int], ...]
    groups: Mapping[str, Sequence[int]]


@record
class ScoreDifference(Record, section="score difference"):
    """The difference between two caches' scores of answers to the same prompts."""

    difference: float = column("mean of the first answers' scores less the second's, −1 to 1")
    difference_interval: OptionalInterval = interval()
    wins: int = column("samples in which the first answer is better")
    ties: int = column("as good")
    losses: int = column("worse")

    @property
    def samples(self) -> str:
        """Numbers of samples with a better, an equally good and a worse answer: '3/4/1'."""
        return f"{self.wins}/{self.ties}/{self.losses}"


@record
class Gain(ScoreDifference, section="gain"):
    """A treatment's scores less its baseline's, sample by sample."""

    baseline: EvictionConfig = column("what is subtracted")
    treatment: EvictionConfig = column("from what")


@record
class MethodScore(Record, section="method's score"):
    """One configuration's mean score, and its difference from the full cache's."""

    config: EvictionConfig = column("the configuration")
    cache_share: float = column(
        "entries of its cache over those of the full one, mean over data sets; null where a trace lacks them",
        key="held",
    )  # fmt: skip
    score: float = column("of its answers, 0 to 1")
    score_interval: OptionalInterval = interval()
    best: bool = column(
        "whether none of the same budget, granularity and protection has a higher mean, and some a lower one"
    )
    minus_full: ScoreDifference = column("its scores less the full cache's, sample by sample")


@record
class ScoreColumn(Record, section="scores"):
    """Mean scores over one data set, one kind of task, or all data sets; every data set counts the same."""

    name: str = column("of the data set, the kind, or `average`")
    tasks: tuple[Task, ...]
    full: float = column("score of the full cache's answers, 0 to 1")
    full_interval: OptionalInterval = interval("over samples; over several data sets each one's counts by itself")
    methods: tuple[MethodScore, ...] = column("one per configuration")
    gains: tuple[Gain, ...] = column("one per treatment and baseline that differ in selection alone")

    @derived()
    def kind(self) -> str:
        """Kind of task; empty for the average over all data sets."""
        return "" if self.name == AVERAGE else self.tasks[0].kind

    @derived()
    def datasets(self) -> list[str]:
        """Data sets, as the runs name them."""
        return [task.dataset for task in self.tasks]

    @derived()
    def samples(self) -> int:
        """Complete samples of all these data sets."""
        return sum(len(task.samples) for task in self.tasks)

    @derived()
    def cut_off(self) -> int:
        """Samples whose full answer was cut off at the largest number of tokens, without an end token."""
        return sum(task.cut_off for task in self.tasks)


@record
class FirstStep(Record, section="first step"):
    """One configuration's perturbation and KL at the first decode step."""

    config: EvictionConfig = column("the configuration")
    propagated: float = column("propagated L1 over the norms of the full run's heads, median over samples")
    propagated_interval: OptionalInterval = interval()
    kl: float = column("KL(full ‖ evicted), median over samples", unit="nat")
    kl_interval: OptionalInterval = interval()


@record
class DatasetScores(ScoreColumn, section="data set's scores"):
    """One data set's scores, and its first decode step."""

    failed: int = column("samples that failed")
    first_step: tuple[FirstStep, ...] = column("one per configuration")


def score_column(name: str, tasks: Sequence[Task], compared: Comparison) -> ScoreColumn:
    """Return the mean scores over some data sets, as a column called `name`."""
    return ScoreColumn(**_column_fields(name, tasks, compared))


def dataset_columns(tasks: Sequence[Task], compared: Comparison) -> tuple[DatasetScores, ...]:
    """Return each data set's scores, with perturbation and KL at the first decode step."""
    return tuple(
        DatasetScores(
            **_column_fields(task.name, [task], compared),
            failed=task.failed,
            first_step=tuple(
                FirstStep(
                    config=config,
                    propagated=float(np.median(task.propagated[:, index])),
                    propagated_interval=intervals.of_median(task.propagated[:, index]),
                    kl=float(np.median(task.kl[:, index])),
                    kl_interval=intervals.of_median(task.kl[:, index]),
                )
                for index, config in enumerate(compared.configs)
            ),
        )
        for task in tasks
    )


def _column_fields(name: str, tasks: Sequence[Task], compared: Comparison) -> dict[str, Any]:
    """Return the fields of the `ScoreColumn` named `name` over some data sets."""
    full, evicted = [task.full for task in tasks], [task.evicted for task in tasks]
    means = [_stratified_mean([part[:, index] for part in evicted]) for index in range(len(compared.configs))]
    best, shares = [False] * len(means), cache_shares(tasks)
    for indices in compared.groups.values():  # of equal means none is the best
        some = [means[index][0] for index in indices]
        for index in indices:
            best[index] = max(some) - min(some) > _EQUAL and means[index][0] >= max(some) - _EQUAL
    methods = tuple(
        MethodScore(
            config=config,
            cache_share=float(shares[index]),
            score=means[index][0],
            score_interval=means[index][1],
            best=best[index],
            minus_full=ScoreDifference(**_difference_fields([part[:, index] for part in evicted], full)),
        )
        for index, config in enumerate(compared.configs)
    )
    gains = tuple(
        Gain(
            **_difference_fields([part[:, second] for part in evicted], [part[:, first] for part in evicted]),
            baseline=compared.configs[first],
            treatment=compared.configs[second],
        )
        for first, second in compared.pairs
    )
    value, ends = _stratified_mean(full)
    return {
        "name": name,
        "tasks": tuple(tasks),
        "full": value,
        "full_interval": ends,
        "methods": methods,
        "gains": gains,
    }


def cache_shares(tasks: Sequence[Task]) -> Floats:
    """Return (config,) cache shares: entries over the full cache's, mean over samples, then over data sets."""
    return np.asarray(np.mean([task.cache_shares.mean(axis=0) for task in tasks], axis=0))


def _stratified_mean(parts: Sequence[Floats]) -> tuple[float, OptionalInterval]:
    """Return the mean over data sets of mean scores over samples, with its interval; `parts`: (sample,) each."""
    return intervals.stratified_mean(parts), intervals.of_stratified_mean(parts, _SCORE)


def _difference_fields(first: Sequence[Floats], second: Sequence[Floats]) -> dict[str, Any]:
    """Return the fields of the `ScoreDifference` first − second, from each data set's (sample,) scores."""
    differences = [own - base for own, base in zip(first, second, strict=True)]
    signs = np.sign(np.concatenate(differences))
    wins, ties, losses = (int((signs == sign).sum()) for sign in (1, 0, -1))
    return {
        "difference": intervals.stratified_mean(differences),
        "difference_interval": intervals.of_stratified_mean(differences, intervals.DIFFERENCE),
        "wins": wins,
        "ties": ties,
        "losses": losses,
    }


FULL = "full cache"


@dataclass(frozen=True)
class Cell:
    """A number of an exported table: a mean score, a perplexity or a ratio.

    Attributes:
        value: the number; NaN where it is not known.
        interval: its interval.
        best: whether no configuration of the same group has a higher score.
        write: writes a value with its interval.
        scale: factor by which a CSV multiplies the value.
    """

    value: float
    interval: OptionalInterval
    best: bool
    write: Callable[[float, OptionalInterval], str] = text.points
    scale: float = 100


@dataclass(frozen=True)
class Row:
    """A row of a table of scores: the full cache, or one configuration.

    Attributes:
        index: index of the configuration; None for the full cache.
        method: short name without the budget.
        budget: as the user gave it; empty for the full cache.
        group: name of its group of comparable configurations, as in `comparable_groups`; empty for the full cache.
        cache_share: entries over the full cache's, mean over the data sets shown; NaN where a trace lacks them.
        cells: one per column.
    """

    index: int | None
    method: str
    budget: str
    group: str
    cache_share: float
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Layout:
    """The columns and rows of one table of scores, as a paper prints it.

    Attributes:
        columns: names of the columns; where there are several, the average is last.
        kinds: (kind of task, number of neighbouring columns of that kind); an empty kind has no heading.
        rows: the full cache, then the configurations, the smallest budget first, groups together.
    """

    columns: tuple[str, ...]
    kinds: tuple[tuple[str, int], ...]
    rows: tuple[Row, ...]

    def starts_group(self, row: Row) -> bool:
        """Return whether a row is the first of its group."""
        previous = self.rows[self.rows.index(row) - 1]  # the first row is the full cache's, which has no index
        return row.index is not None and row.group != previous.group


def layout(configs: Sequence[EvictionConfig], columns: Sequence[ScoreColumn], average: ScoreColumn) -> Layout:
    """Return the layout of a table of scores; the average is added if there are several columns."""
    shown = (*columns, average) if len(columns) > 1 else tuple(columns)
    kinds = ["" if one.name in (AVERAGE, one.kind) else one.kind for one in shown]
    return Layout(
        columns=tuple(one.name for one in shown),
        kinds=tuple((kind, len(list(some))) for kind, some in groupby(kinds)),
        rows=rows(configs, shown),
    )


def rows(configs: Sequence[EvictionConfig], columns: Sequence[ScoreColumn]) -> tuple[Row, ...]:
    """Return the row of the full cache, then of every configuration by budget, shares of a prompt before entries."""
    shares = cache_shares(list({task.dataset: task for one in columns for task in one.tasks}.values()))
    full = tuple(Cell(one.full, one.full_interval, best=False) for one in columns)
    cells = ([Cell(each.score, each.score_interval, each.best) for each in one.methods] for one in columns)
    return layout_rows(configs, shares, full, list(zip(*cells, strict=True)))


def layout_rows(
    configs: Sequence[EvictionConfig], shares: Sequence[float] | Floats, full: tuple[Cell, ...],
    cells: Sequence[tuple[Cell, ...]],
) -> tuple[Row, ...]:  # fmt: skip
    """Return the rows of the cells of the `full` cache and of every configuration; `shares`: its cache shares."""
    names, groups = distinct_names(configs, "budget"), comparable_groups(configs)
    evicted = [
        Row(index, names[index], str(configs[index].budget), group, float(shares[index]), cells[index])
        for group in sorted(groups, key=lambda group: budget_order(configs[groups[group][0]])[1:])
        for index in groups[group]
    ]
    return (Row(None, FULL, "", "", 1.0, full), *evicted)

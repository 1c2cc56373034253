"""A table of scores as papers lay it out: methods by budget beneath the full cache, data sets by kind, the average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from perturbkv.analyses.naming import short
from perturbkv.analyses.quality.score_columns import AVERAGE, Column, Mean, held_in
from perturbkv.analyses.ranked_together import ranked_together
from perturbkv.configs.eviction import EvictionConfig

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
    names = [name or "evicted" for name in short(configs, "budget")]
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

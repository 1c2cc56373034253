"""Tables of scores for 80 columns: data sets by kind, the kinds beside their average, and differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perturbkv.analyses import text
from perturbkv.analyses.naming import folded
from perturbkv.analyses.quality.quality_layout import Cell, Line, lines
from perturbkv.analyses.quality.quality_told import ends, value
from perturbkv.analyses.quality.score_columns import Column, Contest, Sides
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table

_ROOM = 55
"""Letters of 80 for columns of scores, behind a method and what it holds."""
_LEAST = len("(10 … 26)")


def tables(
    configs: Sequence[EvictionConfig],
    datasets: Sequence[Column],
    kinds: Sequence[Column],
    average: Column,
    pairs: Sequence[Sides],
    sides: tuple[str, str],
) -> list[Table]:
    """Every table, one after the other."""
    shown = [part for some in _groups(datasets, kinds, average) for part in _parts(some)]
    return [*(_scores(configs, part, average) for part in shown), _differences(configs, average, pairs, sides)]


def _groups(datasets: Sequence[Column], kinds: Sequence[Column], average: Column) -> list[Sequence[Column]]:
    """The data sets of each kind with that kind's mean, then all kinds beside the average."""
    wide: list[Sequence[Column]] = [(*_of_kind(kind, datasets), kind) for kind in kinds if len(kind.tasks) > 1]
    if len(kinds) == 1:  # whose mean is the average
        return wide or [datasets]
    named = [kind if len(kind.tasks) > 1 else _of_kind(kind, datasets)[0] for kind in kinds]
    return [*wide, (*named, average)]


def _of_kind(kind: Column, datasets: Sequence[Column]) -> tuple[Column, ...]:
    return tuple(one for one in datasets if one.kind == kind.name)


def _parts(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """As many columns as have room beside each other."""
    part: list[Column] = []
    for one in columns:
        if part and sum(map(_width, (*part, one))) > _ROOM:
            yield part
            part = []
        part.append(one)
    yield part


def _width(column: Column) -> int:
    """Letters that a column takes, and the gap before it."""
    return max(_LEAST, *map(len, _head(column).splitlines())) + 1


def _scores(configs: Sequence[EvictionConfig], columns: Sequence[Column], average: Column) -> Table:
    kinds = list(dict.fromkeys(one.kind for one in columns if one is not average))
    title = f"{', '.join(kinds) or average.name}: scores × 100"
    heads = ("method", "#held /\nfull", *(f"#{_head(one)}" for one in columns))
    return Table(title, heads, [_row(line) for line in lines(configs, columns)])


def _head(column: Column) -> str:
    """A name that may break behind its signs, and n."""
    apart = column.name.replace("_", "_ ").replace("-", "- ")
    return f"{folded(apart, 12).replace('_ ', '_').replace('- ', '-')}\nn = {column.samples}"


def _row(line: Line) -> list[str]:
    return [_name(line), text.held(line.held), *map(_cell, line.cells)]


def _name(line: Line) -> str:
    return "\n".join(filter(None, (folded(line.method), f"b={line.budget}" if line.budget else "")))


def _cell(cell: Cell) -> str:
    return f"{'*' if cell.best else ''}{value(cell.mean)}\n{ends(cell.mean, digits=0)}"


def _differences(
    configs: Sequence[EvictionConfig], average: Column, pairs: Sequence[Sides], sides: tuple[str, str]
) -> Table:
    """Each configuration minus the full cache, and each treatment minus its baseline."""
    over = "average" if len(average.tasks) > 1 else average.tasks[0].name
    heads = ["method", "#− full cache", "#better/equal/\nworse"]
    heads += [f"#− {folded(sides[0])}", "#better/equal/\nworse"] if pairs else []
    gains = {second: gain for (_, second), gain in reversed([*zip(pairs, average.gains, strict=True)])}  # the first
    rows = []
    for line in lines(configs, [average]):
        if line.place is not None:
            shown = [average.lost[line.place], *([gains.get(line.place)] if pairs else [])]
            rows.append([_name(line), *(part for one in shown for part in _contest(one))])
    return Table(f"{over}: differences of scores × 100", heads, rows)


def _contest(one: Contest | None) -> list[str]:
    """Difference and samples; blank where a configuration is no treatment."""
    return [f"{value(one.difference)}\n{ends(one.difference)}", one.samples] if one else ["", ""]

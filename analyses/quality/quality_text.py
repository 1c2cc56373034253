"""Tables of scores as Markdown and CSV."""

from __future__ import annotations

import io
from collections.abc import Sequence

from perturbkv.analyses import text as numbers
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.quality.quality_layout import FULL, Cell, Layout, Line
from perturbkv.analyses.quality.quality_told import ends, value
from perturbkv.analyses.quality.score_columns import Mean
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.visible import line as in_a_line

MARKDOWN = "<!-- perturbkv quality -->\n"
"""The first line of a page of ours."""
CSV = ("config", "policy", "selection", "budget", "held")
"""The first columns of a file of ours."""


def markdown(layouts: Sequence[Layout], caption: str) -> str:
    """Every table beneath its caption; the best of a budget is bold."""
    return "\n".join([f"{MARKDOWN}{_escaped(caption)}\n", *map(_table, layouts)])


def _table(layout: Layout) -> str:
    heads = ["method", "b", "held / full", *map(_escaped, _named(layout))]
    rule = ["---", *["---:"] * (len(heads) - 1)]
    rows = [_row(one) for one in layout.lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, rule, *rows))


def _named(layout: Layout) -> list[str]:
    """Each column's name behind its kind."""
    kinds = [kind for kind, count in layout.groups for _ in range(count)]
    return [f"{kind}: {name}" if kind else name for kind, name in zip(kinds, layout.columns, strict=True)]


def _row(one: Line) -> list[str]:
    return [_escaped(one.method), one.budget, numbers.held(one.held), *map(_cell, one.cells)]


def _cell(cell: Cell) -> str:
    shown = f"**{value(cell.mean)}**" if cell.best else value(cell.mean)
    return f"{shown} {ends(cell.mean)}".strip()


def _escaped(text: str) -> str:
    r"""As text that Markdown shows as it is: what it would read has a backslash before it."""
    return "".join(f"\\{sign}" if sign in r"\`*_{}[]<>#|~" else sign for sign in in_a_line(text))


def csv(layout: Layout, configs: Sequence[EvictionConfig]) -> str:
    """A row per method, a column per score × 100 and two for the ends of its interval, empty where there is none."""
    import pyarrow as pa
    import pyarrow.csv

    from perturbkv.storage.trace.export import guarded

    names = [*CSV, *(f"{name}{end}" for name in layout.columns for end in ("", " low", " high"))]
    heads = guarded(pa.RecordBatch.from_pydict({"name": names})).column(0).to_pylist()
    told, measured = zip(*(_values(one, configs) for one in layout.lines), strict=True)
    texts = [pa.array(column, pa.string()) for column in zip(*told, strict=True)]
    values = [pa.array(column, pa.float64()) for column in zip(*measured, strict=True)]
    held = io.BytesIO()
    pyarrow.csv.write_csv(guarded(pa.RecordBatch.from_arrays([*texts, *values], names=heads)), held)
    return held.getvalue().decode()


def _values(one: Line, configs: Sequence[EvictionConfig]) -> tuple[list[str], list[float | None]]:
    """The texts and the numbers of a row."""
    about = {"config": FULL} if one.place is None else columns_of(configs[one.place])
    texts = [about.get(name, "") for name in CSV[:-1]]
    return texts, [one.held, *(number for cell in one.cells for number in _ends(cell.mean))]


def _ends(mean: Mean) -> list[float | None]:
    low, high = (None, None) if mean.interval is None else (100 * mean.interval.low, 100 * mean.interval.high)
    return [100 * mean.value, low, high]

"""Display of results in notebooks and terminals: tables, highlighted text and lines."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from perturbkv.escaping import HighlightedText, escape_control_characters

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod, RenderableType


@dataclass(frozen=True)
class Table:
    """A table of text; columns whose heading begins with '#' hold numbers and are right-aligned."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_html(self) -> str:
        """Return the table as HTML for a notebook; its text is escaped."""
        sides = ["right" if heading.startswith("#") else "left" for heading in self.columns]
        head = "".join(map(_cell_html, ["th"] * len(sides), [name.removeprefix("#") for name in self.columns], sides))
        body = "".join(f"<tr>{''.join(map(_cell_html, ['td'] * len(sides), row, sides))}</tr>" for row in self.rows)
        title = html.escape(escape_control_characters(self.title))
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def to_rich(self, width: int = 80) -> RenderableType:
        """Return the table as a rich table for `width` columns of a terminal; its text is not interpreted as markup."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        numbers = [heading.startswith("#") for heading in self.columns]
        headings = [heading.removeprefix("#") for heading in self.columns]
        rows = [list(map(escape_control_characters, row)) for row in (headings, *self.rows)]
        gap, widths = _fit_columns(list(zip_longest(*rows, fillvalue="")), numbers, width)
        table = RichTable(
            box=box.SIMPLE_HEAD, show_header=any(self.columns), show_edge=False, pad_edge=False, padding=(0, gap, 0, 0)
        )
        for index, (heading, number, own) in enumerate(zip(rows[0], numbers, widths, strict=True)):
            justify: JustifyMethod = "right" if number else "left"
            no_wrap = index == 0 and len(self.columns) > 2 and own is None
            table.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=no_wrap, width=own)
        for row in rows[1:]:
            table.add_row(*map(Text, map(_break_before_intervals, row, numbers, widths)))
        return table


_UNBROKEN = re.compile(r"[\[(][^\])]*[\])]|\S+")
"""What stays on one line in a column of numbers: an interval, or a word."""


def _fit_columns(
    columns: Sequence[Sequence[str]], numbers: Sequence[bool], width: int
) -> tuple[int, Sequence[int | None]]:
    """Return the gap between columns, beside the box's own, and the widths of columns that break no interval.

    In a table that is too wide, the widest columns shrink; where that does not do, the gaps close, and at last the
    names in the first column are folded. The widths are None, and rich's own, where no column holds numbers, and where
    even then an interval does not fit.
    """
    from rich.cells import cell_len

    usual = 0 if sum(numbers) > 4 and len(columns) > 6 else 1
    most = [max(cell_len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
    least = [
        max(
            cell_len(piece) for cell in cells for piece in (_UNBROKEN.findall(cell) if number else cell.split()) or [""]
        )
        for cells, number in zip(columns, numbers, strict=True)
    ]
    whole_names = [most[0], *least[1:]] if len(columns) > 2 else least
    for gap, lowest in ((usual, whole_names), (0, whole_names), (0, least)) if any(numbers) else ():
        widths, room = list(most), width - (len(columns) - 1) * (gap + 1)
        while sum(widths) > room >= sum(lowest):
            _, widest = max((own, index) for index, own in enumerate(widths) if own > lowest[index])
            widths[widest] -= 1
        if sum(widths) <= room:
            return gap, widths
    return usual, [None] * len(columns)


def _break_before_intervals(cell: str, is_number: bool, width: int | None) -> str:
    """Return a cell with line breaks before intervals, in lines wider than its column; text stays as it is."""
    if width is None or not is_number:
        return cell
    return "\n".join(re.sub(r" (?=[\[(])", "\n", line) if len(line) > width else line for line in cell.split("\n"))


Part = Table | HighlightedText | str
"""An element of a displayed result: a table, highlighted text or a line."""


def as_text(parts: Sequence[Part], width: int = 80) -> str:
    """Return the parts of a result as uncoloured text, laid out for a terminal of `width` columns."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    for part in parts:
        print_part(console, part)
    console.file.seek(0)
    return "\n".join(line.rstrip() for line in console.file.read().splitlines())


def as_html(parts: Sequence[Part]) -> str:
    """Return the parts of a result as HTML for a notebook."""
    return "".join(f"<p>{_escape_html(part)}</p>" if isinstance(part, str) else part.as_html() for part in parts)


def print_part(console: Console, part: Part) -> None:
    """Print a part of a result to a console: a table, highlighted text, or a line without markup."""
    if isinstance(part, HighlightedText):
        console.print(part.to_rich(console.color_system is not None and not console.no_color), soft_wrap=False)
        console.print()
        return
    if isinstance(part, str):
        console.print(escape_control_characters(part), highlight=False, markup=False, emoji=False)
        return
    if part.title:
        console.print(escape_control_characters(part.title), highlight=False, markup=False, emoji=False, style="bold")
    console.print(part.to_rich(console.width))
    console.print()


def _cell_html(tag: str, text: str, side: str) -> str:
    """Return a table cell as HTML, its text escaped and aligned to `side`."""
    return f'<{tag} style="text-align:{side}">{_escape_html(text)}</{tag}>'


def _escape_html(text: str) -> str:
    """Return the text escaped for HTML, newlines as line breaks."""
    return html.escape(escape_control_characters(text.strip("\n"))).replace("\n", "<br>")


def shorten_middle(text: str, width: int = 30) -> str:
    """Return the text on one line, reduced to about `width` characters at either end, in whole words."""
    line = " ".join(text.split())
    if len(line) <= 2 * width:
        return line
    first, last = line[: width + 1].rpartition(" ")[0], line[-width - 1 :].partition(" ")[2]
    return f"{first or line[:width]} … {last or line[-width:]}"


def plural(number: int, word: str, many: str = "") -> str:
    """Return a number with its noun: '1 sample', '8 samples', or with the plural in `many` '8 batches'."""
    return f"{number:,} {word if number == 1 else many or f'{word}s'}"

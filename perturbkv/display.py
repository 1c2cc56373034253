"""Display of results in notebooks and terminals: tables, highlighted text and lines."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
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

    def to_rich(self) -> RenderableType:
        """Return the table as a rich table for a terminal; its text is not interpreted as markup."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        numbers = sum(heading.startswith("#") for heading in self.columns)
        gap = 0 if numbers > 4 and len(self.columns) > 6 else 1  # beside the box's own; a wide table has to fit
        table = RichTable(
            box=box.SIMPLE_HEAD, show_header=any(self.columns), show_edge=False, pad_edge=False, padding=(0, gap, 0, 0)
        )
        for index, heading in enumerate(self.columns):
            justify: JustifyMethod = "right" if heading.startswith("#") else "left"
            no_wrap = index == 0 and len(self.columns) > 2
            text = Text(escape_control_characters(heading.removeprefix("#")))
            table.add_column(text, justify=justify, overflow="fold", no_wrap=no_wrap)
        for row in self.rows:
            table.add_row(*(Text(escape_control_characters(cell)) for cell in row))
        return table


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
    console.print(part.to_rich())
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

"""Display of results in notebooks and terminals: tables, highlighted text and lines."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perturbkv.escaping import Passage, plain

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod, RenderableType


@dataclass(frozen=True)
class Table:
    """A title and rows of text; columns whose heading begins with '#' hold numbers and are right-aligned."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_html(self) -> str:
        """Return the table for a notebook; its text is escaped."""
        sides = ["right" if heading.startswith("#") else "left" for heading in self.columns]
        head = "".join(map(_cell, ["th"] * len(sides), [one.removeprefix("#") for one in self.columns], sides))
        body = "".join(f"<tr>{''.join(map(_cell, ['td'] * len(sides), row, sides))}</tr>" for row in self.rows)
        title = html.escape(plain(self.title))
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def drawn(self) -> RenderableType:
        """Return the table for a terminal, as rich draws it; its text is not interpreted as markup."""
        from rich import box
        from rich.table import Table as Drawn
        from rich.text import Text

        heads = any(self.columns)
        drawn = Drawn(box=box.SIMPLE_HEAD, show_header=heads, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for place, heading in enumerate(self.columns):
            justify: JustifyMethod = "right" if heading.startswith("#") else "left"
            whole = place == 0 and len(self.columns) > 2
            drawn.add_column(Text(plain(heading.removeprefix("#"))), justify=justify, overflow="fold", no_wrap=whole)
        for row in self.rows:
            drawn.add_row(*(Text(plain(cell)) for cell in row))
        return drawn


Part = Table | Passage | str
"""An element of a displayed result: a table, highlighted text or a line."""


def as_text(parts: Sequence[Part], width: int = 80) -> str:
    """Return tables and lines as a terminal of this width shows them, without colours."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    for part in parts:
        show(console, part)
    console.file.seek(0)
    return "\n".join(line.rstrip() for line in console.file.read().splitlines())


def as_html(parts: Sequence[Part]) -> str:
    """Return tables and lines for a notebook."""
    return "".join(f"<p>{_escaped(part)}</p>" if isinstance(part, str) else part.as_html() for part in parts)


def show(console: Console, part: Part) -> None:
    """Print a table, highlighted text, or a line whose text is not interpreted as markup."""
    if isinstance(part, Passage):
        console.print(part.drawn(console.color_system is not None and not console.no_color), soft_wrap=False)
        console.print()
        return
    if isinstance(part, str):
        console.print(plain(part), highlight=False, markup=False, emoji=False)
        return
    if part.title:
        console.print(plain(part.title), highlight=False, markup=False, emoji=False, style="bold")
    console.print(part.drawn())
    console.print()


def _cell(tag: str, text: str, side: str) -> str:
    return f'<{tag} style="text-align:{side}">{_escaped(text)}</{tag}>'


def _escaped(text: str) -> str:
    return html.escape(plain(text.strip("\n"))).replace("\n", "<br>")


def ends(text: str, width: int = 30) -> str:
    """Return the text's first and last whole words, at most `width` characters each, in one line."""
    line = " ".join(text.split())
    if len(line) <= 2 * width:
        return line
    first, last = line[: width + 1].rpartition(" ")[0], line[-width - 1 :].partition(" ")[2]
    return f"{first or line[:width]} … {last or line[-width:]}"

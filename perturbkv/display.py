"""How objects show themselves: a table in the interpreter, the same table in a notebook."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text


@dataclass(frozen=True)
class Table:
    """A title and rows of text; columns whose heading begins with '#' hold numbers and are set to the right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]

    def as_text(self, width: int = 100) -> str:
        """The table for a terminal of so many columns."""
        drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for heading in self.columns:
            drawn.add_column(
                heading.removeprefix("#"), justify="right" if heading.startswith("#") else "left", overflow="fold"
            )
        for row in self.rows:
            drawn.add_row(*map(Text, row))
        screen = Console(file=io.StringIO(), width=width, color_system=None)
        screen.print(Text(self.title))
        screen.print(drawn)
        return "\n".join(line.rstrip() for line in screen.file.getvalue().rstrip().split("\n"))  # type: ignore[attr-defined]

    def as_html(self) -> str:
        """The table for a notebook; nothing in it is read as markup."""
        sides = ["right" if heading.startswith("#") else "left" for heading in self.columns]
        head = "".join(map(_cell, ["th"] * len(sides), [one.removeprefix("#") for one in self.columns], sides))
        body = "".join(f"<tr>{''.join(map(_cell, ['td'] * len(sides), row, sides))}</tr>" for row in self.rows)
        title = html.escape(self.title)
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(tag: str, text: str, side: str) -> str:
    return f'<{tag} style="text-align:{side}">{html.escape(text)}</{tag}>'

"""How objects show themselves in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A title and rows of text; columns whose heading begins with '#' hold numbers and are set to the right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]

    def as_html(self) -> str:
        """The table for a notebook; nothing in it is read as markup."""
        sides = ["right" if heading.startswith("#") else "left" for heading in self.columns]
        head = "".join(map(_cell, ["th"] * len(sides), [one.removeprefix("#") for one in self.columns], sides))
        body = "".join(f"<tr>{''.join(map(_cell, ['td'] * len(sides), row, sides))}</tr>" for row in self.rows)
        title = html.escape(self.title)
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(tag: str, text: str, side: str) -> str:
    return f'<{tag} style="text-align:{side}">{html.escape(text)}</{tag}>'

"""The commands of the table, as Click knows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from perturbkv.cli.command_line import build
from perturbkv.cli.commands import COMMANDS, FILE, Command


def every_command(rows: Iterable[Command] = COMMANDS, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command; a file stands for `FILE`."""
    for row in rows:
        words = (*before, "trace.h5" if row.name == FILE else row.name)
        yield words
        yield from every_command(row.commands, words)


def row_of(words: Sequence[str]) -> Command:
    """Return the line of the table."""
    rows = {row.name: row for row in COMMANDS}
    for word in words[:-1]:
        rows = {row.name: row for row in rows[word].commands}
    return rows[FILE if words[-1] == "trace.h5" else words[-1]]


def command_of(words: Sequence[str]) -> Any:
    """Return the command of these words."""
    return build(row_of(words))

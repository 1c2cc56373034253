"""Command lines made of others: an option is given once, so one that is to differ takes the other's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def instead(given: Sequence[object], *more: object) -> list[object]:
    """`given`, pairs of an option and its value, without the options that `more` names; then `more`."""
    pairs = zip(given[::2], given[1::2], strict=True)
    kept = [part for name, value in pairs if name not in more for part in (name, value)]
    return [*kept, *more]


def refused(ran: Any, *words: str) -> None:
    """One line on stderr that holds these words, exit code 2."""
    assert ran.code == 2, (ran.out, ran.err)
    (line,) = ran.err.splitlines()
    assert line.startswith("error: "), line
    for word in words:
        assert word in line

"""What a page is made of: the heads that stand in its markup, its JSON document and its compressed blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perturbkv.visible import line


@dataclass(frozen=True)
class Head:
    """One trace's head, which is readable without JavaScript.

    Attributes:
        name: unique among the page's traces.
        title: model and data set, one line.
        facts: (label, value) pairs in their order.
        warnings: sentences that have to be read before any number.
    """

    name: str
    title: str
    facts: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Payload:
    """Everything of a page but its looks.

    Attributes:
        title: names of models and data sets, one line without markup.
        heads: one per trace.
        document: what the page's JavaScript reads, free of NaN and infinities.
        blocks: id -> bytes, compressed already (raw deflate).
    """

    title: str
    heads: tuple[Head, ...]
    document: Mapping[str, Any]
    blocks: Mapping[str, bytes]

    def __post_init__(self) -> None:
        if self.title != line(self.title):
            msg = f"expected a title of one line without characters that nobody sees, got {self.title!r}"
            raise ValueError(msg)

"""The attack campaign's parts: each module gives cases, so many and from such a seed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tests.attack.running import Case

NAMES: tuple[str, ...] = ("outputs", "traces", "models", "options", "texts", "terminals")
"""Modules of this folder."""


class Part(Protocol):
    """What each of them has."""

    COUNT: int
    """How many cases `make attack` tries."""

    def cases(self, workshop: Path, seed: int, count: int) -> Iterator[Case]:
        """So many cases, alike for one seed; what they need is made in the empty folder `workshop`."""


def part(name: str) -> Part:
    return importlib.import_module(f"tests.attack.{name}")

"""One of so many equal shares of a run, which a process of its own measures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from perturbkv.configs import numbers
from perturbkv.errors import ConfigError, UnknownNameError

BY = ("samples", "configs")
MOST = 100_000
"""Shards of a run: as many as it may have samples."""
_WRITTEN = re.compile(r"([0-9]+)/([0-9]+)", re.ASCII)
_DIGITS = 18
"""Of a number that is read as one: Python refuses to read thousands of them."""
_One = TypeVar("_One")


@dataclass(frozen=True)
class Shard:
    """Share `number`, from 1, of `count`; `by` says whether samples or configurations are shared out."""

    number: int
    count: int
    by: str = BY[0]

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise UnknownNameError(self.by, "way to share a run out", BY)
        numbers.check("the number of shards", self.count, MOST)
        if not 1 <= self.number <= self.count:
            most = max(self.count, 1)
            msg = f"expected a shard from 1/{most} to {most}/{most}, got {self}; shards are counted from 1"
            raise ConfigError(msg)

    @classmethod
    def parse(cls, text: str, by: str = BY[0]) -> Self:
        """The shard that `3/16` names. Raises ConfigError for any other text, and for 0/16 and 17/16."""
        found = _WRITTEN.fullmatch(text)
        if found is None or len(text) > 2 * _DIGITS:
            msg = f"expected a shard of so many, such as 3/16, got '{text[:40]}'; shards are counted from 1"
            raise ConfigError(msg)
        return cls(int(found[1]), int(found[2]), by)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def share(self, items: Sequence[_One]) -> tuple[_One, ...]:
        """Every `count`th item from the `number`th on: 3, 19, 35, … of 3/16. Shares of fewer items may be empty."""
        return tuple(items[self.number - 1 :: self.count])

    def of(self, sample_ids: Sequence[str], configs: Sequence[_One]) -> tuple[tuple[str, ...], tuple[_One, ...]]:
        """Its samples, and the configurations that it measures of each."""
        if self.by == "configs":
            return tuple(sample_ids), self.share(configs)
        return self.share(sample_ids), tuple(configs)

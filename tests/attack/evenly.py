"""A few cases of every kind: a smaller part of a campaign still touches all that the whole one does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

_Case = TypeVar("_Case")


def evenly(kinds: Mapping[str, Sequence[_Case]], seed: int, count: int) -> Iterator[_Case]:
    """`count` cases, fewer where there are no more: one of each kind in turn, the order drawn from `seed`."""
    draw = random.Random(seed)
    hands = [draw.sample(held, len(held)) for held in draw.sample(list(kinds.values()), len(kinds))]
    dealt = [hand[turn] for turn in range(max(map(len, hands), default=0)) for hand in hands if turn < len(hand)]
    yield from dealt[:count]

"""Which tokens of a long prompt are shown: those that differ and what stands around them."""

from __future__ import annotations

from collections.abc import Sequence

AROUND = 8
"""Tokens before and after one that differs."""
MOST = 1200
"""Tokens that are shown of a folded prompt: some six screens."""
_SHORTEST = 16
"""Fewer tokens are not folded: the line that tells of them is as long."""


def shown(differs: Sequence[bool], everything: bool = False) -> list[tuple[int, int, bool]]:
    """(first, end, whether it is shown) of every part of the prompt, in its order.

    Where nothing differs both ends are shown.
    """
    count = len(differs)
    if everything or count <= 4 * AROUND:
        return [(0, count, True)]
    wanted = [place for place, one in enumerate(differs) if one] or [0, count - 1]
    return _with_gaps(_limited(_merged(wanted, count)), count)


def _merged(wanted: Sequence[int], count: int) -> list[tuple[int, int]]:
    """What stands around the places, parts that nearly touch as one."""
    parts: list[tuple[int, int]] = []
    for place in wanted:
        first, end = max(0, place - AROUND), min(count, place + AROUND + 1)
        first, end = 0 if first < _SHORTEST else first, count if count - end < _SHORTEST else end
        if parts and first - parts[-1][1] < _SHORTEST:
            parts[-1] = (parts[-1][0], end)
        else:
            parts.append((first, end))
    return parts


def _limited(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first parts that are no more than `MOST` tokens together."""
    found: list[tuple[int, int]] = []
    room = MOST
    for first, end in parts:
        if room > 0:
            found.append((first, min(end, first + room)))
        room -= end - first
    return found


def _with_gaps(parts: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int, bool]]:
    found: list[tuple[int, int, bool]] = []
    reached = 0
    for first, end in parts:
        found += [(reached, first, False)] if first > reached else []
        found.append((first, end, True))
        reached = end
    return found + ([(reached, count, False)] if reached < count else [])

"""Naive reference of kept entries in few bits: one group of numbers at a time, codes that would be stored.

Asymmetric min–max, rounded to nearest; scale and minimum are 16-bit floats before they are used. Arithmetic in 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle.theory import Array


def group_of(numbers: list[float], bits: int) -> list[float]:
    """What is left of the numbers of one group."""
    held = [np.float32(number) for number in numbers]
    least, most, levels = min(held), max(held), 2**bits - 1
    scale, low = np.float32(np.float16((most - least) / np.float32(levels))), np.float32(np.float16(least))
    if scale == 0:
        return [float(low) for _ in held]
    codes = [min(max(int(np.rint((number - low) / scale)), 0), levels) for number in held]
    return [float(np.float32(code) * scale + low) for code in codes]


def keys(entries: list[Array], bits: int, group: int) -> list[Array]:
    """Entries of one kept set in their order: each channel by itself, `group` entries at a time."""
    found = [np.array(entry, dtype=np.float64) for entry in entries]
    for begin in range(0, len(entries), group):
        some = range(begin, min(begin + group, len(entries)))
        for channel in range(len(entries[0])):
            left = group_of([float(entries[place][channel]) for place in some], bits)
            for place, number in zip(some, left, strict=True):
                found[place][channel] = number
    return found


def values(entries: list[Array], bits: int, group: int) -> list[Array]:
    """Each entry by itself, `group` channels at a time."""
    return [
        np.array([
            number
            for begin in range(0, len(entry), group)
            for number in group_of([float(one) for one in entry[begin : begin + group]], bits)
        ])
        for entry in entries
    ]  # fmt: skip


def stored(config: Any, positions: list[int], key: Any, value: Any, n: int) -> dict[int, tuple[Array, Array]]:
    """Position -> key and value of a kept set as they are stored, those of the window left out, as they are.

    `key` and `value` are lists by place in `positions`.
    """
    before = [place for place, position in enumerate(positions) if position < n - config.window]
    if not before:
        return {}
    left = (
        keys([key[place] for place in before], config.bits, config.group),
        values([value[place] for place in before], config.bits, config.group),
    )
    return {positions[place]: (left[0][place], left[1][place]) for place in before}


def bits_held(config: Any, kept: int, n: int, d_head: int) -> int:
    """Bits of a kept set, counted number by number."""
    window = min(config.window, n)
    total = 0
    for _ in range(window):
        total += 16 * d_head + 16 * d_head
    few = kept - window
    if config.bits == 16:
        return total + few * 32 * d_head
    groups = sum(32 for channel in range(d_head) if channel % config.group == 0)
    for entry in range(few):
        total += 2 * config.bits * d_head
        total += groups
        total += 32 * d_head * (entry % config.group == 0)
    return total


def entries_of(config: Any, n: int, d_head: int) -> int:
    """The most entries that take no more than the budget's would in 16 bits, counted one by one."""
    room, kept = config.budget.tokens(n) * 32 * d_head, min(config.window, n)
    while kept < n and bits_held(config, kept + 1, n, d_head) <= room:
        kept += 1
    return kept

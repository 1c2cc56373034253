"""Naive reference of kept entries in few bits: one group of numbers at a time, codes that would be stored.

Integers: asymmetric min–max, rounded to nearest; scale and minimum are 16-bit floats before they are used. Those, fp8
and llama.cpp's blocks in 32 bits, number by number; rotated codebooks in 64.
"""

from __future__ import annotations

import math
from functools import cache
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


EIGHTHS = [eighths / 8 for eighths in range(8)]
E4M3 = [
    *(eighths * 2.0**-6 for eighths in EIGHTHS),
    *((1 + eighths) * 2.0**power for power in range(-6, 9) for eighths in EIGHTHS),
][:-1]
"""Every number of float8 e4m3 from 0 to 448, ascending; the code after the last is NaN."""


def fp8(entries: list[Array]) -> list[Array]:
    """One scale for all entries: their largest number becomes 448. The even one of two that are equally near."""
    scale = np.float32(max(abs(np.float32(one)) for entry in entries for one in entry)) / np.float32(448)

    def nearest(number: float) -> float:
        size = float(abs(np.float32(number) / scale))
        index = min(range(len(E4M3)), key=lambda place: (abs(E4M3[place] - size), place % 2))
        return math.copysign(float(np.float32(E4M3[index]) * scale), number)

    return [np.array([nearest(one) for one in entry]) for entry in entries] if scale else list(entries)


@cache
def levels(bits: int) -> tuple[float, ...]:
    """Lloyd's iteration: each level the mean of a standard normal number between the midpoints beside it."""
    found = [2 * (place + 0.5) / 2**bits - 1 for place in range(2**bits)]
    for _ in range(3000):
        ends = [-math.inf, *((low + high) / 2 for low, high in zip(found, found[1:], strict=False)), math.inf]
        density = [math.exp(-end * end / 2) / math.sqrt(2 * math.pi) for end in ends]
        below = [math.erf(end / math.sqrt(2)) / 2 for end in ends]
        found = [(density[i] - density[i + 1]) / (below[i + 1] - below[i]) for i in range(2**bits)]
    return tuple(found)


def rotated(entries: list[Array], bits: int, rotation: Array) -> list[Array]:
    """Norm in 16 bits, direction turned by the map, each component at its nearest level, turned back."""
    width, found = len(rotation), []
    for entry in entries:
        norm = math.sqrt(sum(float(one) ** 2 for one in entry))
        turned = [sum(rotation[i][j] * entry[j] for j in range(width)) / (norm or 1) for i in range(width)]
        near = [min(levels(bits), key=lambda level, at=one: abs(level / math.sqrt(width) - at)) for one in turned]
        back = [sum(rotation[i][j] * near[i] for i in range(width)) / math.sqrt(width) for j in range(width)]
        found.append(np.array(back) * float(np.float16(norm)))
    return found


def q8_0(entry: Array) -> Array:
    """llama.cpp's blocks of 32: the largest magnitude is 127, halves go away from zero."""
    found: list[float] = []
    for begin in range(0, len(entry), 32):
        block = [np.float32(one) for one in entry[begin : begin + 32]]
        scale = max(map(abs, block)) / np.float32(127)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        codes = [math.copysign(math.floor(abs(float(one * inverse)) + 0.5), one) for one in block]
        found += [float(np.float32(code) * np.float32(np.float16(scale))) for code in codes]
    return np.array(found)


def q4_0(entry: Array) -> Array:
    """llama.cpp's blocks of 32: the first number of largest magnitude is −8, the others are cut off after + 8.5."""
    found: list[float] = []
    for begin in range(0, len(entry), 32):
        block = [np.float32(one) for one in entry[begin : begin + 32]]
        scale = max(block, key=abs) / np.float32(-8)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        codes = [min(15, int(one * inverse + np.float32(8.5))) - 8 for one in block]
        found += [float(np.float32(code) * np.float32(np.float16(scale))) for code in codes]
    return np.array(found)


def codes_of(config: Any, layer: int) -> tuple[str, str]:
    """The codes of keys and values in a layer, by the rules as a configuration prints them: `0, 3-6: keys=8; 7: 16`."""
    found = [str(getattr(config, kind, config.bits)) for kind in ("keys", "values")]
    for rule in filter(None, config.by_layer.split("; ")):
        numbers, _, told = rule.partition(": ")
        ends = [[int(end) for end in part.split("-")] for part in numbers.split(", ")]
        if any(part[0] <= layer <= part[-1] for part in ends):
            own = dict(part.split("=") for part in told.split(", ")) if "=" in told else {"keys": told, "values": told}
            found = [own.get(kind, code) for kind, code in zip(("keys", "values"), found, strict=True)]
    return found[0], found[1]


def coded(entries: list[Array], code: str, kind: str, group: int) -> list[Array]:
    """Entries of one kept set as their code gives them back."""
    if code in ("16", "fp8"):
        return fp8(entries) if code == "fp8" else entries
    if code in ("q8_0", "q4_0"):
        return [q8_0(entry) if code == "q8_0" else q4_0(entry) for entry in entries]
    by_channel = code.endswith("-channel") or (kind == "keys" and "-" not in code)
    return (keys if by_channel else values)(entries, int(code[0]), group)


def stored(
    config: Any, positions: list[int], key: Any, value: Any, n: int, layer: int
) -> dict[int, tuple[Array, Array]]:
    """Position -> key and value of a layer's kept set as they are stored, those of the window left out, as they are.

    `key` and `value` are lists by place in `positions`.
    """
    before = [place for place, position in enumerate(positions) if position < n - config.window]
    if not before:
        return {}
    codes = codes_of(config, layer)
    left = [
        coded([numbers[place] for place in before], code, kind, config.group)
        for numbers, code, kind in zip((key, value), codes, ("keys", "values"), strict=True)
    ]
    return {positions[place]: (left[0][place], left[1][place]) for place in before}


def bits_held(config: Any, kept: int, n: int, d_head: int, layer: int = -1) -> int:
    """Bits of a layer's kept set, counted number by number; layer −1 has no rule."""
    window = min(config.window, n)
    total = 0
    for _ in range(window):
        total += 16 * d_head + 16 * d_head
    for code, kind in zip(codes_of(config, layer), ("keys", "values"), strict=True):
        bits = int(code) if "-" not in code and code.isdecimal() else {"fp8": 8}.get(code.split("-")[0], 0)
        bits = bits or int(code[-1] if code.startswith("rotated") else code.strip("q")[0])
        by_channel = code.endswith("channel") or (kind == "keys" and code.isdecimal())
        total += 32 * (code.startswith("fp8") and kept > window)
        for entry, component in np.ndindex(max(0, kept - window), d_head):
            total += bits
            if code.startswith("rotated"):
                total += 16 * (component == 0)
            elif code.startswith("q"):
                total += 16 * (component % 32 == 0)
            elif code != "16" and not code.startswith("fp8"):
                total += 32 * ((entry if by_channel else component) % config.group == 0)
    return total


def entries_of(config: Any, n: int, d_head: int) -> int:
    """The most entries that take no more than the budget's would in 16 bits, counted one by one."""
    room, kept = config.budget.tokens(n) * 32 * d_head, min(config.window, n)
    while kept < n and bits_held(config, kept + 1, n, d_head) <= room:
        kept += 1
    return kept

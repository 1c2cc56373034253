"""The page's blocks of bytes: arrays and texts, deflated, and how much room they take.

Numbers in two bytes each: logarithms of what is positive, equal steps of shares, codes of their own for the rest.

What a page is made of: the heads that stand in its markup, its JSON document and its compressed blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.escaping import line

Codes = NDArray[np.uint16]
LOG, LINEAR = "log", "linear"
NOT_A_NUMBER, INFINITE = 65534, 65535
_LAST = 65533
"""The largest code of a number."""
_LOG_STEP = 0.0019
"""Half a step is 0.095 % of a value: less would spend bytes on digits that nobody reads."""
_LINEAR_STEP = 1.9e-4


@dataclass(frozen=True)
class Scale:
    """What a code stands for.

    Attributes:
        kind: `log`: exp(low + (code − 1) · step), and 0 is 0; `linear`: low + code · step.
        low, step: as these formulas say.
    """

    kind: str
    low: float
    step: float

    def to_dict(self) -> dict[str, Any]:
        """As the page's JSON holds it."""
        return dict(vars(self))


def log_scale(values: Floats) -> Scale:
    """The scale of values that are 0 or positive; negative ones, which only rounding makes, count as 0.

    Errors are at most 0.1 % of a value where the largest is at most e¹²⁴ times the smallest.
    """
    held = np.log(values[np.isfinite(values) & (values > 0)])
    low, high = (float(held.min()), float(held.max())) if held.size else (0.0, 0.0)
    return Scale(LOG, low, max(_LOG_STEP, (high - low) / (_LAST - 1)))


def linear_scale(values: Floats) -> Scale:
    """The scale of shares. Errors are at most 0.0001 where they spread over at most 12."""
    held = values[np.isfinite(values)]
    low, high = (float(held.min()), float(held.max())) if held.size else (0.0, 0.0)
    return Scale(LINEAR, low, max(_LINEAR_STEP, (high - low) / _LAST))


def encode(values: Floats, scale: Scale) -> Codes:
    """The code of each value, of any shape."""
    if scale.kind == LOG:
        positive = np.isfinite(values) & (values > 0)
        places = np.round((np.log(np.where(positive, values, 1.0)) - scale.low) / scale.step) + 1
        found = np.where(positive, np.clip(places, 1, _LAST), 0)
    else:
        found = np.clip(np.round((np.where(np.isfinite(values), values, scale.low) - scale.low) / scale.step), 0, _LAST)
    found = np.where(np.isnan(values), NOT_A_NUMBER, np.where(np.isposinf(values), INFINITE, found))
    return found.astype(np.uint16)


def logarithm_below_one(shares: Floats, step: float, largest: int) -> NDArray[np.int64]:
    """Codes of shares: 0 of 0 and of what is no number, else that of exp((code − largest) · step), at least 1."""
    held = np.isfinite(shares) & (shares > 0)
    places = largest + np.round(np.log(np.where(held, shares, 1.0)) / step)
    return np.where(held, np.clip(places, 1, largest), 0).astype(np.int64)


def four_a_byte(verdicts: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Verdicts 1, 0 and −1 as 1, 0 and 2 in two bits each, the first in the lowest bits of the first byte."""
    flat = np.where(verdicts < 0, 2, verdicts).astype(np.uint8).reshape(-1)
    padded = np.concatenate([flat, np.zeros(-len(flat) % 4, dtype=np.uint8)]).reshape(-1, 4)
    return np.asarray((padded << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=1), dtype=np.uint8)


_AROUND = 100
"""Bytes of the element that a block stands in."""
SMALL, SMALL_VALUES = 4_600_000, 51_840
"""Bytes of a page's blocks and libraries, of traces of so many values: samples × configurations × heads."""
LARGE, LARGE_VALUES = 23_000_000, 786_432
LIBRARIES = 700_000
"""Bytes that the page's own code and its libraries take of these at most."""


def deflated(content: bytes, level: int = 9) -> bytes:
    """The content as raw deflate, as a browser inflates it."""
    packer = zlib.compressobj(level, zlib.DEFLATED, -15)
    return packer.compress(content) + packer.flush()


def size_of(block: bytes) -> int:
    """Bytes that a block takes of a page."""
    return -(-len(block) // 3) * 4 + _AROUND


def limit(values: int) -> int:
    """Bytes that a page's blocks may take, for traces of so many values."""
    slope = (LARGE - SMALL) / (LARGE_VALUES - SMALL_VALUES)
    return SMALL - LIBRARIES + max(0, round(slope * (values - SMALL_VALUES)))


@dataclass
class Blocks:
    """The blocks of one trace.

    Attributes:
        prefix: what their ids begin with.
        room: bytes that are left; None: without end.
        arrays: name -> how the array lies in its block, for the page's JSON.
        blocks: id -> bytes.
    """

    prefix: str
    room: float = np.inf
    arrays: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, bytes] = field(default_factory=dict)

    def put(self, name: str, block: bytes) -> str:
        """Hold a block, whatever its size, and say its id."""
        place = f"{self.prefix}-{name}"
        self.blocks[place] = block
        self.room -= size_of(block)
        return place

    def offer(self, name: str, block: bytes) -> str | None:
        """Hold a block if there is room for it, and say its id; None where there is none."""
        return self.put(name, block) if size_of(block) <= self.room else None

    def floats(self, name: str, array: NDArray[Any]) -> None:
        """An array of floats in four bytes each, all first bytes before all second ones."""
        with np.errstate(over="ignore"):  # a bound that four bytes cannot hold is shown as infinite
            held = np.ascontiguousarray(array, dtype="<f4")
        self._array(name, deflated(planes(held)), "f4", array.shape, None)

    def codes(self, name: str, array: Sequence[Floats], scales: Sequence[Scale], most: float = np.inf) -> float:
        """Arrays of floats, one behind the other, in two bytes each, and a scale for each.

        They are held where they take no more than `most` of the room that is left; what they take over that is told.
        """
        found = np.stack([encode(part, scale) for part, scale in zip(array, scales, strict=True)]).astype("<u2")
        block = deflated(planes(found))
        taken = 0.0 if np.isinf(most) else size_of(block) / max(self.room * most, 1.0)
        if taken <= 1:
            self._array(name, block, "u2", found.shape, [scale.to_dict() for scale in scales])
        return taken

    def packed(self, name: str, content: NDArray[np.uint8], shape: tuple[int, ...]) -> None:
        """Bytes that stand for an array of this shape."""
        self._array(name, deflated(content.tobytes()), "u1", shape, None)

    def _array(self, name: str, content: bytes, dtype: str, shape: tuple[int, ...], scale: Any) -> None:
        """`content`: already deflated."""
        block = self.put(name, content)
        told = {"dtype": dtype, "shape": list(shape), "shuffled": dtype != "u1", "scale": scale}
        self.arrays[name] = {"block": block, **told}


def planes(array: NDArray[Any]) -> bytes:
    """The first bytes of all elements, then the second ones, and so on: like bytes beside each other deflate better."""
    return np.ascontiguousarray(array.reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T).tobytes()


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

"""The page's blocks of bytes: arrays and texts, deflated, and how much room they take."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.reporting.quantising import Scale, encode

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

"""The contents of a page: headers in its markup, a JSON document, and compressed blocks of arrays and texts.

Numbers in blocks take two bytes each, on a logarithmic scale for positive values and a linear one for shares, with
reserved codes for NaN and infinity. A page's blocks have a limited size.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.escaping import escape_line

LOG, LINEAR = "log", "linear"
NOT_A_NUMBER, INFINITE = 65534, 65535
_LAST = 65533
"""The largest code of a number."""
_LOG_STEP = 0.0019
"""Step of the logarithmic scale; half of it is 0.095 % of a value, below the digits that the page shows."""
_LINEAR_STEP = 1.9e-4


@dataclass(frozen=True)
class Scale:
    """The scale of two-byte codes.

    Attributes:
        kind: `log`: exp(low + (code − 1) · step), and 0 is 0; `linear`: low + code · step.
        low, step: as in these formulas.
    """

    kind: str
    low: float
    step: float


def log_scale(values: Floats) -> Scale:
    """Return the logarithmic scale of non-negative values; negative values, from rounding, count as 0.

    Errors are at most 0.1 % of a value where the largest is at most e¹²⁴ times the smallest.
    """
    logs = np.log(values[np.isfinite(values) & (values > 0)])
    low, high = (float(logs.min()), float(logs.max())) if logs.size else (0.0, 0.0)
    return Scale(LOG, low, max(_LOG_STEP, (high - low) / (_LAST - 1)))


def linear_scale(values: Floats, least_step: float = _LINEAR_STEP) -> Scale:
    """Return the linear scale of values, by default of shares, with steps of at least `least_step`.

    Errors of shares are at most 0.0001 where their range is at most 12, those of others 1/131,000 of their range.
    """
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return Scale(LINEAR, low, max(least_step, (high - low) / _LAST))


def encode(values: Floats, scale: Scale) -> NDArray[np.uint16]:
    """Return values of any shape as two-byte codes on a scale.

    NaN and +∞ have codes of their own; −∞ and, on a logarithmic scale, values that are not positive get code 0.
    """
    if scale.kind == LOG:
        positive = np.isfinite(values) & (values > 0)
        steps = np.round((np.log(np.where(positive, values, 1.0)) - scale.low) / scale.step) + 1
        codes = np.where(positive, np.clip(steps, 1, _LAST), 0)
    else:
        codes = np.clip(np.round((np.where(np.isfinite(values), values, scale.low) - scale.low) / scale.step), 0, _LAST)
    codes = np.where(np.isnan(values), NOT_A_NUMBER, np.where(np.isposinf(values), INFINITE, codes))
    return codes.astype(np.uint16)


def encode_shares(shares: Floats, step: float, largest: int) -> NDArray[np.int64]:
    """Return logarithmic codes of shares: share ≈ exp((code − largest) · step), code ≥ 1.

    Code 0 stands for 0, and for NaN, infinite and negative values.
    """
    positive = np.isfinite(shares) & (shares > 0)
    codes = largest + np.round(np.log(np.where(positive, shares, 1.0)) / step)
    return np.where(positive, np.clip(codes, 1, largest), 0).astype(np.int64)


def pack_verdicts(verdicts: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return verdicts −1, 0 and 1 of any shape packed into two bits each, with 2 for −1.

    The first verdict is in the lowest bits of the first byte; bits past the last verdict are 0.
    """
    flat = np.where(verdicts < 0, 2, verdicts).astype(np.uint8).reshape(-1)
    padded = np.concatenate([flat, np.zeros(-len(flat) % 4, dtype=np.uint8)]).reshape(-1, 4)
    return np.asarray((padded << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=1), dtype=np.uint8)


_ELEMENT_BYTES = 100
"""Bytes of the element of a block, without its content."""
SMALL, SMALL_VALUES = 4_600_000, 51_840
"""Bytes of the blocks and libraries of a small page, and its number of values: samples × configurations × heads."""
LARGE, LARGE_VALUES = 23_000_000, 786_432
"""The same of a large page."""
LIBRARY_BYTES = 700_000
"""Most bytes of a page that code and libraries take."""


def deflate(content: bytes, level: int = 9) -> bytes:
    """Return the content compressed as raw deflate, which browsers inflate."""
    packer = zlib.compressobj(level, zlib.DEFLATED, -15)
    return packer.compress(content) + packer.flush()


def block_bytes(block: bytes) -> int:
    """Return the bytes that a block occupies in a page, in its text encoding."""
    return -(-len(block) // 3) * 4 + _ELEMENT_BYTES


def blocks_limit(values: int) -> int:
    """Return the largest number of bytes allowed for the blocks of a page, for traces with `values` values.

    That of a small page for few values; beyond them it grows along the line through the small and the large page.
    """
    slope = (LARGE - SMALL) / (LARGE_VALUES - SMALL_VALUES)
    return SMALL - LIBRARY_BYTES + max(0, round(slope * (values - SMALL_VALUES)))


@dataclass
class Blocks:
    """The blocks of one trace.

    Attributes:
        prefix: beginning of their ids.
        room: remaining bytes; infinite: unlimited.
        arrays: name -> the array's layout in its block, for the page's JSON.
        blocks: id -> bytes.
    """

    prefix: str
    room: float = np.inf
    arrays: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, bytes] = field(default_factory=dict)

    def put(self, name: str, block: bytes) -> str:
        """Store a block, regardless of the remaining bytes, and return its id."""
        block_id = f"{self.prefix}-{name}"
        self.blocks[block_id] = block
        self.room -= block_bytes(block)
        return block_id

    def offer(self, name: str, block: bytes) -> str | None:
        """Store a block and return its id; None if it exceeds the remaining bytes."""
        return self.put(name, block) if block_bytes(block) <= self.room else None

    def put_floats(self, name: str, array: NDArray[Any]) -> None:
        """Store an array as four-byte floats in byte planes: every float's first byte, then every second byte, etc."""
        with np.errstate(over="ignore"):  # a bound that four bytes cannot hold is shown as infinite
            floats = np.ascontiguousarray(array, dtype="<f4")
        self._put_array(name, deflate(byte_planes(floats)), "f4", array.shape, None)

    def put_codes(self, name: str, parts: Sequence[Floats], scales: Sequence[Scale], most: float = np.inf) -> float:
        """Store float arrays of one shape as two-byte codes, one scale per array; return needed over allowed bytes.

        Allowed is the share `most` of the remaining bytes, at least 1 byte: where more are needed, nothing is stored.
        An infinite `most` allows any number, and the result is 0.
        """
        codes = np.stack([encode(part, scale) for part, scale in zip(parts, scales, strict=True)]).astype("<u2")
        block = deflate(byte_planes(codes))
        taken = 0.0 if np.isinf(most) else block_bytes(block) / max(self.room * most, 1.0)
        if taken <= 1:
            self._put_array(name, block, "u2", codes.shape, [dict(vars(scale)) for scale in scales])
        return taken

    def put_packed(self, name: str, content: NDArray[np.uint8], shape: tuple[int, ...]) -> None:
        """Store the bytes of a packed array of shape `shape`."""
        self._put_array(name, deflate(content.tobytes()), "u1", shape, None)

    def _put_array(self, name: str, content: bytes, dtype: str, shape: tuple[int, ...], scale: Any) -> None:
        """Store an array's bytes, which are deflated already, and its layout."""
        self.arrays[name] = {
            "block": self.put(name, content),
            "dtype": dtype,
            "shape": list(shape),
            "shuffled": dtype != "u1",
            "scale": scale,
        }


def byte_planes(array: NDArray[Any]) -> bytes:
    """Return the bytes of an array by plane: every element's first byte, then every second byte, and so on."""
    return np.ascontiguousarray(array.reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T).tobytes()


@dataclass(frozen=True)
class TraceHeader:
    """The header of a trace, which is readable without JavaScript.

    Attributes:
        name: unique among the page's traces.
        title: model and data set, one line.
        facts: (label, value) pairs in their order.
        warnings: sentences to read before any number.
    """

    name: str
    title: str
    facts: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Payload:
    """Everything in a page but its appearance.

    Attributes:
        title: names of models and data sets, one line without markup.
        headers: one per trace.
        document: the JSON document for the page's JavaScript, free of NaN and infinities.
        blocks: id -> bytes, compressed already (raw deflate).
    """

    title: str
    headers: tuple[TraceHeader, ...]
    document: Mapping[str, Any]
    blocks: Mapping[str, bytes]

    def __post_init__(self) -> None:
        if self.title != escape_line(self.title):
            raise ValueError(f"expected a title of one line without characters that nobody sees, got {self.title!r}")

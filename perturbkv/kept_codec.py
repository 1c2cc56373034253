"""Compact codes of kept sets: a bit mask over the prompt, or the gaps between positions, whichever is shorter.

A mask has a bit for each of the n entries, the first one the highest of the first byte, in ⌈n / 8⌉ bytes. Gaps are the
first position and the differences between successive ones, each an unsigned LEB128. They are used only where they are
shorter than the mask: a code's length alone determines which it is, and equal sets of one prompt have equal codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Counts = NDArray[np.int64]
_STEP_BYTES = 4 * 2**20
"""Bytes of masks that are processed at once."""
_WIDEST = 5
"""Most bytes of a gap: 5 hold numbers below 2³⁵, and positions are 32-bit numbers."""


def mask_bytes(tokens: int) -> int:
    """Return the byte length of a bit mask over `tokens` entries; a shorter code holds gaps instead of a mask."""
    return -(-tokens // 8)


def encode_masks(masks: Bytes, counts: Counts) -> tuple[Bytes, Counts]:
    """Return the concatenated codes of kept sets, and the byte length of every code.

    Args:
        masks: (set, byte) bit masks; bits after the last entry are 0.
        counts: (set,) number of entries of each.
    """
    encoded = [_encode_step(masks[step], counts[step]) for step in _step_slices(*masks.shape)]
    codes, lengths = zip(*encoded, strict=True)
    return np.concatenate(codes), np.concatenate(lengths)


def decode_positions(code: Bytes, tokens: int) -> NDArray[np.int32]:
    """Return the ascending positions (kept_entry,) of one kept set, of a prompt of `tokens` tokens."""
    if len(code) == mask_bytes(tokens):
        return np.flatnonzero(np.unpackbits(code, count=tokens)).astype(np.int32)
    return np.cumsum(_decode_leb128(code), dtype=np.int32)


def decode_masks(codes: Bytes, offsets: Counts, lengths: Counts, tokens: int) -> NDArray[np.bool_]:
    """Return the boolean masks (set, key) of kept sets of one prompt of `tokens` tokens.

    `offsets` and `lengths` (set,) say where each set's code lies in `codes`. Positions beyond the prompt are dropped.
    """
    size = mask_bytes(tokens)
    bits, is_mask = np.zeros((len(lengths), size), dtype=np.uint8), lengths == size
    bits[is_mask] = codes[offsets[is_mask, np.newaxis] + np.arange(size)]
    content = codes[byte_indices(offsets[~is_mask], lengths[~is_mask])]
    sets, gaps = int(np.count_nonzero(~is_mask)), _decode_leb128(content)
    of_set = np.repeat(np.arange(sets), lengths[~is_mask])[content < 128]  # of each gap
    sums, first = np.cumsum(gaps), np.flatnonzero(np.diff(of_set, prepend=-1))
    position = sums - np.repeat((sums - gaps)[first], np.diff(first, append=len(of_set)))  # sums within every set
    inside = position < tokens
    flags = np.zeros((sets, 8 * size), dtype=bool)
    flags[of_set[inside], position[inside]] = True
    bits[~is_mask] = np.packbits(flags, axis=1)
    return np.unpackbits(bits, axis=1, count=tokens).view(bool)


def digests(codes: Bytes, offsets: Counts, lengths: Counts, counts: Counts) -> Counts:
    """Return a 64-bit BLAKE2b digest of every code, in the shape of `offsets`; equal kept sets have equal digests.

    0 for a missing code: one without bytes, whose kept set has entries by `counts`.
    """
    slices, of_set = np.unique(np.stack([offsets.reshape(-1), lengths.reshape(-1)]), axis=1, return_inverse=True)
    raw = [
        blake2b(codes[begin : begin + length].tobytes(), digest_size=8).digest() for begin, length in slices.T.tolist()
    ]
    result = np.frombuffer(b"".join(raw), dtype="<i8").astype(np.int64)[of_set.reshape(-1)].reshape(offsets.shape)
    return np.where((lengths == 0) & (counts > 0), 0, result)


def byte_indices(offsets: Counts, lengths: Counts) -> Counts:
    """Return the indices, in the concatenated codes, of all bytes of the codes at `offsets`, in order."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(offsets - before, lengths) + np.arange(int(lengths.sum()))


def _step_slices(sets: int, size: int) -> Iterator[slice]:
    """Return slices that divide the sets into steps whose masks take at most `_STEP_BYTES`."""
    step = max(1, _STEP_BYTES // max(1, size))
    return (slice(begin, begin + step) for begin in range(0, max(1, sets), step))


def _encode_step(masks: Bytes, counts: Counts) -> tuple[Bytes, Counts]:
    """Return the concatenated codes of one step's bit masks, and the byte length of every code."""
    sets, size = masks.shape
    rows, lengths = masks.copy(), np.full(sets, size, dtype=np.int64)
    few = np.flatnonzero(counts < size)  # a gap takes a byte at least
    of_set, gaps = _position_gaps(masks, few)
    widths = np.ones(len(gaps), dtype=np.int64)  # bytes of each gap
    for byte in range(1, _WIDEST):
        widths += gaps >= 1 << 7 * byte
    needed = np.bincount(of_set, widths, minlength=sets).astype(np.int64)
    lengths[few] = np.minimum(needed[few], size)
    shorter = needed[of_set] < size
    _write_gaps(rows, of_set[shorter], gaps[shorter], widths[shorter])
    return rows[np.arange(size) < lengths[:, np.newaxis]], lengths


def _position_gaps(masks: Bytes, chosen: Counts) -> tuple[Counts, Counts]:
    """Return (set index, gap to the previous position) arrays of all kept entries of the sets `chosen`."""
    size = masks.shape[1]
    content = masks[chosen].reshape(-1)
    filled = np.flatnonzero(content)
    bit = np.flatnonzero(np.unpackbits(content[filled]))
    index = filled[bit >> 3] * 8 + (bit & 7)  # of each kept entry, in bits, with all masks one after the other
    row = index // (8 * size)
    gaps = np.diff(index, prepend=0)
    first = np.flatnonzero(np.diff(row, prepend=-1))  # the first entry of each set, whose gap is its position
    gaps[first] = index[first] % (8 * size)
    return chosen[row], gaps


def _write_gaps(rows: Bytes, of_set: Counts, gaps: Counts, widths: Counts) -> None:
    """Write gaps in LEB128 to the start of the rows of their sets; `of_set`: the set of every gap, ascending."""
    ends = np.cumsum(widths)
    first = np.flatnonzero(np.diff(of_set, prepend=-1))  # the first gap of each set
    begins = ends - widths
    at = begins - np.repeat(begins[first], np.diff(first, append=len(of_set)))
    for byte in range(int(widths.max(initial=0))):
        has, more = widths > byte, widths > byte + 1  # 7 bits a byte; the eighth says that another follows
        rows[of_set[has], at[has] + byte] = ((gaps >> 7 * byte) & 127 | more << 7)[has]


def _decode_leb128(code: Bytes) -> Counts:
    """Return the LEB128 numbers of a code; a truncated last number is dropped."""
    last = np.flatnonzero(code < 128)
    begins = np.concatenate([[0], last[:-1] + 1])[: len(last)]
    numbers = np.zeros(len(last), dtype=np.int64)
    for byte in range(min(_WIDEST, int((last - begins).max(initial=-1)) + 1)):
        has = np.flatnonzero(last - begins >= byte)
        numbers[has] |= (code[begins[has] + byte].astype(np.int64) & 127) << 7 * byte
    return numbers

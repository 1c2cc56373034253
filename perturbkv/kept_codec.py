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
"""Bytes of a gap below 2³⁵; positions are 32-bit numbers."""


def mask_bytes(tokens: int) -> int:
    """Return the bytes of a mask over `tokens` entries; a code of this length is a mask, a shorter one gaps."""
    return -(-tokens // 8)


def of_masks(masks: Bytes, counts: Counts) -> tuple[Bytes, Counts]:
    """Return the concatenated codes of kept sets, and the bytes of each.

    Args:
        masks: (set, byte) bit masks; bits after the last entry are 0.
        counts: (set,) number of entries of each.
    """
    found = [_encode(masks[some], counts[some]) for some in _steps(*masks.shape)]
    codes, lengths = zip(*found, strict=True)
    return np.concatenate(codes), np.concatenate(lengths)


def of_positions(positions: NDArray[np.integer], counts: Counts, tokens: int) -> tuple[Bytes, Counts]:
    """Return the concatenated codes of kept sets, and the bytes of each, from each set's ascending positions."""
    ends, found = np.cumsum(counts), []
    for some in _steps(len(counts), 8 * mask_bytes(tokens)):
        own = counts[some]
        of_set = np.repeat(np.arange(len(own)), own)
        last = int(ends[some][-1]) if len(own) else 0
        found.append(_encode(_scatter(of_set, positions[last - len(of_set) : last], len(own), tokens), own))
    codes, lengths = zip(*found, strict=True)
    return np.concatenate(codes), np.concatenate(lengths)


def positions(code: Bytes, tokens: int) -> NDArray[np.int32]:
    """Return the ascending positions (kept_entry,) of one kept set."""
    if len(code) == mask_bytes(tokens):
        return np.flatnonzero(np.unpackbits(code, count=tokens)).astype(np.int32)
    return np.cumsum(_decode(code), dtype=np.int32)


def masks(codes: Bytes, offsets: Counts, lengths: Counts, tokens: int) -> NDArray[np.bool_]:
    """Return the masks (set, key) of several kept sets of one prompt, whose codes begin at `offsets`."""
    return np.unpackbits(_bits(codes, offsets, lengths, tokens), axis=1, count=tokens).view(bool)


def digests(codes: Bytes, offsets: Counts, lengths: Counts, counts: Counts) -> Counts:
    """Return 64 bits of BLAKE2b of each code; 0 where a set's code is missing.

    Equal sets of one prompt have equal digests.
    """
    held, of_set = np.unique(np.stack([offsets.reshape(-1), lengths.reshape(-1)]), axis=1, return_inverse=True)
    raw = [
        blake2b(codes[begin : begin + length].tobytes(), digest_size=8).digest() for begin, length in held.T.tolist()
    ]
    found = np.frombuffer(b"".join(raw), dtype="<i8").astype(np.int64)[of_set.reshape(-1)].reshape(offsets.shape)
    return np.where((lengths == 0) & (counts > 0), 0, found)


def are_sound(codes: Bytes, offsets: Counts, lengths: Counts, counts: Counts, tokens: int) -> bool:
    """Return whether each code, which lies within `codes`, is that of a set of its count within the prompt."""
    return all(
        _are_valid(codes, offsets[some], lengths[some], counts[some], tokens)
        for some in _steps(len(lengths), mask_bytes(tokens))
    )


def places(offsets: Counts, lengths: Counts) -> Counts:
    """Return the index of every byte of the codes that begin at `offsets`, code after code."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(offsets - before, lengths) + np.arange(int(lengths.sum()))


def _steps(sets: int, size: int) -> Iterator[slice]:
    """Yield slices over the sets, at least one, of at most `_STEP_BYTES` each."""
    step = max(1, _STEP_BYTES // max(1, size))
    return (slice(begin, begin + step) for begin in range(0, max(1, sets), step))


def _encode(masks: Bytes, counts: Counts) -> tuple[Bytes, Counts]:
    sets, size = masks.shape
    held, lengths = masks.copy(), np.full(sets, size, dtype=np.int64)
    few = np.flatnonzero(counts < size)  # a gap takes a byte at least
    of_set, gaps = _gaps(masks, few)
    widths = _widths(gaps)
    needed = np.bincount(of_set, widths, minlength=sets).astype(np.int64)
    lengths[few] = np.minimum(needed[few], size)
    shorter = needed[of_set] < size
    _write_gaps(held, of_set[shorter], gaps[shorter], widths[shorter])
    return held[np.arange(size) < lengths[:, np.newaxis]], lengths


def _gaps(masks: Bytes, few: Counts) -> tuple[Counts, Counts]:
    """Return, for each entry of the sets `few`, its set and the gap before it."""
    size = masks.shape[1]
    own = masks[few].reshape(-1)
    filled = np.flatnonzero(own)
    bit = np.flatnonzero(np.unpackbits(own[filled]))
    place = filled[bit >> 3] * 8 + (bit & 7)
    row = place // (8 * size)
    gaps = np.diff(place, prepend=0)
    first = np.flatnonzero(np.diff(row, prepend=-1))
    gaps[first] = place[first] % (8 * size)
    return few[row], gaps


def _widths(gaps: Counts) -> Counts:
    """Return the bytes of each number as LEB128."""
    widths = np.ones(len(gaps), dtype=np.int64)
    for byte in range(1, _WIDEST):
        widths += gaps >= 1 << 7 * byte
    return widths


def _write_gaps(held: Bytes, of_set: Counts, gaps: Counts, widths: Counts) -> None:
    """Write numbers as LEB128 into the beginning of their set's row."""
    ends = np.cumsum(widths)
    first = np.flatnonzero(np.diff(of_set, prepend=-1))
    begins = ends - widths
    at = begins - np.repeat(begins[first], np.diff(first, append=len(of_set)))
    for byte in range(int(widths.max(initial=0))):
        has, more = widths > byte, widths > byte + 1
        held[of_set[has], at[has] + byte] = ((gaps >> 7 * byte) & 127 | more << 7)[has]


def _decode(code: Bytes) -> Counts:
    """Return the LEB128 numbers of a code; one that is cut off at the end is left out."""
    last = np.flatnonzero(code < 128)
    begins = np.concatenate([[0], last[:-1] + 1])[: len(last)]
    found = np.zeros(len(last), dtype=np.int64)
    for byte in range(min(_WIDEST, int((last - begins).max(initial=-1)) + 1)):
        has = np.flatnonzero(last - begins >= byte)
        found[has] |= (code[begins[has] + byte].astype(np.int64) & 127) << 7 * byte
    return found


def _bits(codes: Bytes, offsets: Counts, lengths: Counts, tokens: int) -> Bytes:
    """Return bit masks (set, byte); positions beyond the prompt are left out."""
    size = mask_bytes(tokens)
    found, whole = np.zeros((len(lengths), size), dtype=np.uint8), lengths == size
    found[whole] = codes[offsets[whole, np.newaxis] + np.arange(size)]
    held = codes[places(offsets[~whole], lengths[~whole])]
    of_set = np.repeat(np.arange(np.count_nonzero(~whole)), lengths[~whole])[held < 128]
    position = _cumulative(_decode(held), of_set)
    inside = position < tokens
    found[~whole] = _scatter(of_set[inside], position[inside], int(np.count_nonzero(~whole)), tokens)
    return found


def _cumulative(gaps: Counts, of_set: Counts) -> Counts:
    """Return positions from gaps: cumulative sums within each set."""
    sums = np.cumsum(gaps)
    first = np.flatnonzero(np.diff(of_set, prepend=-1))
    return sums - np.repeat((sums - gaps)[first], np.diff(first, append=len(of_set)))


def _scatter(of_set: Counts, position: NDArray[np.integer], sets: int, tokens: int) -> Bytes:
    """Return bit masks (set, byte) of entries."""
    found = np.zeros((sets, 8 * mask_bytes(tokens)), dtype=bool)
    found[of_set, position] = True
    return np.packbits(found, axis=1)


def _are_valid(codes: Bytes, offsets: Counts, lengths: Counts, counts: Counts, tokens: int) -> bool:
    if (lengths > mask_bytes(tokens)).any():
        return False
    found = _bits(codes, offsets, lengths, tokens)
    behind = found[:, -1] & ((1 << 8 * mask_bytes(tokens) - tokens) - 1)
    if behind.any() or (np.bitwise_count(found).sum(axis=1) != counts).any():
        return False
    again, expected = _encode(found, counts)
    return np.array_equal(expected, lengths) and np.array_equal(again, codes[places(offsets, lengths)])

"""Codes of kept sets, as `perturbkv.kept_codec` defines them, computed on the device where the sets were chosen.

Nothing here waits for the device: a code gets as many bytes as its set's bit mask, which none exceeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from perturbkv.devices import to_device

_BITS = 7
"""Bits of a number in a byte of LEB128."""


def encode(
    position: Int[Tensor, " kept"], counts: Sequence[int], masks: UInt8[Tensor, "kept_set byte"]
) -> tuple[UInt8[Tensor, "kept_set byte"], Int[Tensor, " kept_set"]]:
    """Return the codes of kept sets, each at the beginning of a row as long as a mask, and their byte lengths.

    Args:
        position: kept positions in the prompt, ascending within each set, one set after the other.
        counts: number of kept entries of each set.
        masks: the sets as bits.
    """
    (sets, size), device = masks.shape, masks.device
    few = [index for index, count in enumerate(counts) if count < size]  # a gap takes a byte at least
    kept = [counts[index] for index in few]
    parts = torch.split(position, list(counts))
    chosen = torch.cat([parts[index] for index in few]) if few else position[:0]
    of_set = to_device(few, device, torch.int64).repeat_interleave(
        to_device(kept, device, torch.int64), output_size=len(chosen)
    )
    starts_set = torch.ones_like(of_set, dtype=torch.bool)
    starts_set[1:] = of_set[1:] != of_set[:-1]
    gaps = chosen - chosen.roll(1).masked_fill_(starts_set, 0)
    longest = max(1, -(-(8 * size).bit_length() // _BITS))  # bytes of the largest gap
    widths = torch.ones_like(gaps)
    for byte in range(1, longest):
        widths += gaps >= 1 << _BITS * byte
    gap_bytes = torch.zeros(sets, dtype=torch.int64, device=device).index_add_(0, of_set, widths.to(torch.int64))
    is_short = torch.zeros(sets, dtype=torch.bool, device=device)
    is_short.index_fill_(0, to_device(few, device, torch.int64), True)
    is_short &= gap_bytes < size
    lengths = gap_bytes.where(is_short, size)
    before = gap_bytes.cumsum(dim=0) - gap_bytes
    place = widths.cumsum(dim=0) - widths - before[of_set] + of_set * size
    beyond = sets * size  # where what belongs to no code is written
    codes = torch.cat([masks.masked_fill(is_short.unsqueeze(-1), 0).flatten(), masks.new_zeros(1)])
    written = is_short[of_set]
    for byte in range(longest):
        value = (gaps >> _BITS * byte & 127) | (widths > byte + 1).to(gaps.dtype) << _BITS
        index = (place + byte).where(written & (widths > byte), beyond)
        codes.scatter_(0, index, value.to(torch.uint8))
    return codes[:-1].view(sets, size), lengths

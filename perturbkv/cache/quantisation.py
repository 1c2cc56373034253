"""Quantised kept entries, as KIVI stores them: keys per channel, values per entry (https://arxiv.org/abs/2402.02750).

Asymmetric, from minimum to maximum, rounded to nearest. Keys are grouped per channel over consecutive kept entries of a
kept set, in the order of their positions, after rotation (KIVI's and transformers' caches quantise rotated keys too);
values per entry over consecutive channels. The last group may be smaller, with a scale of its own. The window and later
decoded entries are not quantised. A group's scale and minimum are rounded to 16-bit floats before they are used, so
that attention sees exactly what would be stored.

The quantisers of transformers' QuantizedCache, optimum-quanto and HQQ, take one whole tensor whose groups cut through
its flattened dimensions; kept sets of different lengths per head do not fit, so that this arithmetic is our own.
`tests/quantised` compares it with optimum-quanto's where both apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.cache.entries import KeptEntries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.devices import to_device


def quantise_dequantise(
    data: Float[Tensor, "row column"], groups: Sequence[int], bits: int
) -> Float[Tensor, "row column"]:
    """Return the data quantised to `bits` bits and dequantised; each group of a column's rows shares scale and minimum.

    `groups` are the numbers of rows of consecutive groups. A group of one value, or of a range too small for a 16-bit
    scale, becomes its minimum. Numbers beyond 16-bit floats give NaN or infinity. Computed in float32; the result has
    the data's dtype.
    """
    lengths = to_device(list(groups), data.device)
    group = torch.arange(len(groups), device=data.device).repeat_interleave(lengths, output_size=len(data))
    least, most = _group_ranges(data.to(torch.float32), lengths, max(groups))
    largest_code = 2**bits - 1
    scale, low = (kind.to(torch.float16).to(torch.float32)[group] for kind in ((most - least) / largest_code, least))
    codes = ((data.to(torch.float32) - low) / scale.where(scale > 0, 1)).round().clamp(0, largest_code)
    return (codes * scale + low).to(data.dtype)


def _group_ranges(data: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each group of `lengths` consecutive rows, both (group, column)."""
    begins = lengths.cumsum(0) - lengths
    index = torch.arange(longest, device=data.device)
    padded = data[begins.unsqueeze(-1) + torch.minimum(index, lengths.unsqueeze(-1) - 1)]  # repeats the last row
    return padded.amin(dim=1), padded.amax(dim=1)


def quantise_entries(entries: KeptEntries, config: EvictionConfig) -> KeptEntries:
    """Return copies of a configuration's kept entries, quantised except for the window at each kept set's end."""
    keys, values = (torch.cat(kind) for kind in zip(*entries.sets(), strict=True))
    counts = [max(0, length - config.window) for length in entries.lengths]
    bits, group = config.bits, int(config.precision["group"])
    indices = _first_indices(entries.lengths, counts, keys.device)
    if len(indices):
        per_channel = [length for count in counts for length in group_lengths(count, group)]
        keys[indices] = quantise_dequantise(keys[indices], per_channel, bits)
        values[indices] = quantise_dequantise(values[indices].mT, group_lengths(values.shape[-1], group), bits).mT
    return KeptEntries(keys, values, torch.arange(len(keys), device=keys.device), entries.lengths)


def group_lengths(count: int, group: int) -> list[int]:
    """Return the sizes of the groups that `count` numbers are split into: `group` each, the last the remainder."""
    remainder = count % group
    return [group] * (count // group) + [remainder] * (remainder > 0)


def _first_indices(lengths: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the indices of each kept set's first entries, in sets that are concatenated.

    Set i has `lengths[i]` entries, and the first `counts[i]` of them are meant.
    """
    left_out = accumulate((length - count for length, count in zip(lengths, counts, strict=True)), initial=0)
    before = to_device(list(left_out)[:-1], device, torch.int64)  # entries that earlier sets leave out
    return torch.arange(sum(counts), device=device) + before.repeat_interleave(
        to_device(list(counts), device, torch.int64), output_size=sum(counts)
    )

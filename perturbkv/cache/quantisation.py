"""Kept entries in few bits: the formats of a configuration's layer, applied to its kept sets.

Integers of keys are grouped over consecutive kept entries of a kept set, in the order of their positions, after
rotation (KIVI's and transformers' caches quantise rotated keys too); those of values over consecutive channels. The
last group may be smaller, with a scale of its own. The window and later decoded entries are not quantised. Scales,
minima and norms are rounded as they would be stored before they are used, so that attention sees exactly what an
engine would read back.

The quantisers of transformers' QuantizedCache, optimum-quanto and HQQ, take one whole tensor whose groups cut through
its flattened dimensions; kept sets of different lengths per head do not fit, so that this arithmetic is our own.
`tests/quantised` compares it with optimum-quanto's where both apply.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from perturbkv.cache.codecs import read_back
from perturbkv.cache.entries import KeptEntries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.number_formats import GROUP
from perturbkv.configs.precision import number_formats
from perturbkv.devices import to_device


def quantise_entries(entries: KeptEntries, config: EvictionConfig, layer: int) -> KeptEntries:
    """Return copies of a configuration's kept entries of a decoder layer, as its precision stores them.

    The window at each kept set's end stays as it is. The maps of rotated keys and of rotated values have the seeds 0
    and 1.
    """
    keys, values = (torch.cat(kind) for kind in zip(*entries.sets(), strict=True))
    counts = [max(0, length - config.window) for length in entries.lengths]
    left_out = accumulate((length - count for length, count in zip(entries.lengths, counts, strict=True)), initial=0)
    before = to_device(list(left_out)[:-1], keys.device, torch.int64)  # entries that earlier sets leave out
    indices = torch.arange(sum(counts), device=keys.device) + before.repeat_interleave(
        to_device(counts, keys.device, torch.int64), output_size=sum(counts)
    )
    group = config.precision.options.get("group", GROUP)
    if len(indices):
        formats = number_formats(config.precision, layer)
        for seed, (numbers, each) in enumerate(zip((keys, values), formats, strict=True)):
            numbers[indices] = read_back(numbers[indices], counts, each, group, seed)
    return KeptEntries(keys, values, torch.arange(len(keys), device=keys.device), entries.lengths)

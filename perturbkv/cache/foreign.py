"""A cache that is not ours, as keys and values per layer: transformers' `Cache` classes, or pairs of tensors.

What cannot be read is refused here, in one line, so that nothing behind asks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from transformers import Cache

from perturbkv.errors import UnreadableError

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, (batch, kv_head, entry, d_head)."""
LayerEntries = tuple[Tensor, Tensor]
"""Keys and values of one row of a layer, (kv_head, entry, d_head)."""


def layers_of(cache: Cache | Layers) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer. Raises UnreadableError where a layer shows none."""
    if not isinstance(cache, Cache):
        return [(keys, values) for keys, values in cache]
    held = getattr(cache, "layers", None)
    if not held:
        _refuse(f"no keys to look at: {type(cache).__name__} has no layers")
    return [_shown(layer, place) for place, layer in enumerate(held)]


def _shown(layer: object, place: int) -> tuple[Tensor, Tensor]:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    kind = type(layer).__name__
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor)):
        _refuse(f"no keys to look at: layer {place} ({kind}) has no tensors `keys` and `values`")
    said = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
    if keys.numel() == 0 and said:
        _refuse(f"no keys to look at: layer {place} ({kind}) says {said} entries and its `keys` are empty")
    return keys, values


def rows(
    foreign: Cache | Layers, full: Cache | Layers, row: int = 0, first: int = 0
) -> list[tuple[LayerEntries, LayerEntries]]:
    """Per layer one row's entries in a foreign cache and in the full one, whose shapes fit each other.

    A full cache of one row stands for whichever row; layers are called from `first` on.

    Raises UnreadableError with what does not fit.
    """
    theirs, whole = layers_of(foreign), layers_of(full)
    if len(theirs) != len(whole):
        _refuse(f"it has {len(theirs)} layers, the full cache {len(whole)}")
    for place, (one, other) in enumerate(zip(theirs, whole, strict=True), start=first):
        _check_shape(place, one, other[0], row)
    _check_lengths(foreign, theirs, whole[0][0].shape[2])
    return [(_row(one, row), _row(other, row)) for one, other in zip(theirs, whole, strict=True)]


def _row(layer: tuple[Tensor, Tensor], row: int) -> LayerEntries:
    place = row if len(layer[0]) > 1 else 0
    return layer[0][place], layer[1][place]


def _check_shape(place: int, layer: tuple[Tensor, Tensor], full: Tensor, row: int) -> None:
    """Raise UnreadableError unless keys and values are (batch, kv_head, entry, d_head) like the full ones."""
    keys, values = layer
    if keys.ndim != 4 or keys.shape != values.shape:
        shapes = f"keys {tuple(keys.shape)} and values {tuple(values.shape)}"
        _refuse(f"expected keys and values (batch, kv_head, entry, d_head) of one shape in layer {place}, got {shapes}")
    batch, heads, entries, d_head = keys.shape
    if row >= batch:
        _refuse(f"row {row} of a batch was asked for, and layer {place} holds {batch}")
    if heads != full.shape[1]:
        times, rest = divmod(heads, full.shape[1])
        why = f"; each {times} times, as `repeat_kv` before caching makes them?" if times > 1 and not rest else ""
        _refuse(f"layer {place} holds {heads} key/value heads, the model has {full.shape[1]}{why}")
    if d_head != full.shape[3]:
        _refuse(f"keys of layer {place} have {d_head} components, the model's {full.shape[3]}")
    if entries > full.shape[2]:
        _refuse(f"layer {place} keeps {entries} entries, more than the {full.shape[2]} that there were")


def _check_lengths(foreign: Cache | Layers, layers: Layers, tokens: int) -> None:
    """Raise UnreadableError where the cache says one length for all layers, not the prompt's, and holds others."""
    if not isinstance(foreign, Cache):
        return
    said = {int(foreign.get_seq_length(place)) for place in range(len(layers))}
    held = [keys.shape[2] for keys, _ in layers]
    wrong = [place for place, length in enumerate(held) if length not in said]
    if len(said) == 1 and said != {tokens} and wrong:
        _refuse(
            f"lengths differ between layers where the cache says that they do not: it says {said.pop()} entries in "
            f"every layer, and layer {wrong[0]} holds {held[wrong[0]]}"
        )


def _refuse(reason: str) -> NoReturn:
    raise UnreadableError(reason)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as whole numbers of its size."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])

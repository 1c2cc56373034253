"""What no eviction touches in a cache: the windows and recurrent states of layers that are not measured.

The masked reference decodes from the plain model's, and an eviction's cache must hold the same: a window's last
entries, or more, and each state as it is after the prompt. A state beside a measured layer's entries is part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from perturbkv.analyses.audit.cache_entries import FLOORS, UNMEASURED, Alteration
from perturbkv.auditing.forward_passes import ForwardPass, record_pass
from perturbkv.cache.compact import full_cache
from perturbkv.cache.external_cache import Layers
from perturbkv.models import recurrent_states
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache

UnmeasuredLayers = Mapping[int, Any]
"""Number of a layer → what its cache layer holds that no eviction touches."""
Reading = tuple[Layers, UnmeasuredLayers]
"""What a cache holds: the entries that may be evicted, and the rest."""


def measured_numbers(adapter: Adapter) -> tuple[int, ...]:
    """Return the numbers of the measured layers in the model; empty where these are all."""
    return adapter.layer_indices if adapter.is_mixed else ()


def cache_numbers(adapter: Adapter) -> tuple[int, ...]:
    """Return per measured layer the cache's layer whose entries it reads, by number; empty where these are all."""
    owners = tuple(adapter.layer_indices[owner] for owner in adapter.owners)
    return owners if adapter.is_mixed or adapter.shares_caches else ()


def read_contents(adapter: Adapter, cache: Cache) -> Reading:
    """Return what a cache of the plain model holds; the rest is copied, as decoding changes it in place.

    Latents are a part of the rest, and the entries the keys and values that the attention of a next token gets.
    """
    if adapter.holds_latents:
        rest = {index: copy.deepcopy(layer) for index, layer in enumerate(cache.layers)}
        record, rows = ForwardPass(), len(adapter.cache_layer(cache, 0).keys)
        token = torch.zeros(rows, 1, dtype=torch.int64, device=adapter.device)
        with record_pass(adapter, record):
            run_with_cache(adapter.model, token, copy.deepcopy(cache), logits_to_keep=1)
        return [record.previous_entries(layer) for layer in range(len(adapter.layers))], rest
    measured, rest = {adapter.layer_indices[layer]: adapter.cache_layer(cache, layer) for layer in adapter.holders}, {}
    for index, facts in enumerate(adapter.facts.layers[: len(cache.layers)]):
        if index not in measured or facts.state:
            layer = copy.copy(cache.layers[index])
            if index in measured:
                layer.keys = layer.values = None
            rest[index] = copy.deepcopy(layer)
    entries = [(layer.keys, layer.values) for layer in measured.values()]
    return [entries[owner] for owner in adapter.owners], rest


def fill_cache(adapter: Adapter, reading: Reading) -> Cache:
    """Return a new cache that holds what was read."""
    (entries, rest), cache = reading, full_cache(adapter)
    if adapter.holds_latents:
        cache.layers = [copy.deepcopy(held) for held in rest.values()]
        return cache
    for index, held in rest.items():
        cache.layers[index] = copy.deepcopy(held)
    for index, (keys, values) in zip(adapter.layer_indices, entries[: len(adapter.holders)], strict=False):
        if index in rest:
            cache.layers[index].keys, cache.layers[index].values = keys, values
        else:
            cache.update(keys, values, index)
    return cache


def find_changes(
    cache: Cache, rests: Sequence[UnmeasuredLayers], row: int, padding: int, least: float, evicted: Collection[int] = ()
) -> Iterator[Alteration]:
    """Yield the changes to the rest in one row of an external cache, one per layer at most, before anything is decoded.

    Args:
        cache: the external cache; what it does not show is passed over.
        rests: the plain model's, read in several ways; the largest distance between these is a layer's noise floor.
        row: the row.
        padding: entries of padding before its prompt.
        least: the least noise floor; those of a layer are never below those of an earlier layer.
        evicted: numbers of layers that may be changed: those of latents.
    """
    (plain, *others), floor = rests, least
    for number, known in plain.items():
        if number in evicted:
            continue
        expected = _parts(known, known, row, padding)
        for other in others:
            floor = max([floor, *_distances(_parts(other[number], known, row, padding), expected).values()])
        own = cache.layers[number] if number < len(cache.layers) else None
        found = _parts(own, known, row, padding)
        changed = [part for part in _distances(found, expected).items() if part[1] > FLOORS * floor]
        for name, distance in changed[:1]:
            held, full = (tuple(parts[name].shape) for parts in (found, expected))
            differs = f"differ by {distance:.2g} of their norm from" if held == full else f"are {held}, not {full} as"
            yield Alteration(number, -1, UNMEASURED, f"{name} {differs} the plain model's", -1)


def window_distances(cache: Cache, rest: UnmeasuredLayers, padding: int) -> list[float]:
    """Return the distance of each window in a cache's last row, of so much padding, from the plain model's `rest`."""
    distances = []
    for number, known in rest.items():
        own = cache.layers[number] if number < len(cache.layers) else None
        own_parts, parts = (_parts(layer, known, -1, padding) for layer in (own, known))
        distances += [own_distance for name, own_distance in _distances(own_parts, parts).items() if "window" in name]
    return distances


def _parts(layer: Any, known: Any, row: int, padding: int) -> dict[str, Tensor]:
    """Return name → tensor of what a cache layer holds in a row: the window's entries, and the states.

    Of the entries those are returned that stand where the `known` layer of the plain model has its, without padding.
    """
    parts: dict[str, Tensor] = {}
    for name in ("keys", "values"):
        own, full = getattr(layer, name, None), getattr(known, name, None)
        if isinstance(own, Tensor) and isinstance(full, Tensor):
            entries = full.shape[2]
            first = max(0, padding - known.get_seq_length() + entries)
            parts[f"{name} of its window"] = own[row, :, -entries:][:, first:] if entries else own[row, :, :0]
    for place, state in enumerate(recurrent_states.tensors(layer)):
        parts[f"numbers of its recurrent state {place}"] = state[row]
    return parts


def _distances(own: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> dict[str, float]:
    """Return name → distance of a part from the plain model's, over the norm of that; infinite for another shape."""
    found = {}
    for name, known in plain.items():
        if name in own and own[name].shape != known.shape:
            found[name] = float("inf")
        elif name in own:
            distance = torch.linalg.vector_norm(own[name].double() - known.double())
            norm = torch.linalg.vector_norm(known.double()).clamp(min=torch.finfo(torch.float64).tiny)
            found[name] = float((distance / norm).nan_to_num(nan=torch.inf))
    return found

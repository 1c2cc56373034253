"""What a package's cache makes of the keys and values that a model writes to it, found without perturbkv."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from transformers import DynamicCache

Kinds = tuple[Tensor, Tensor]
"""Keys and values (batch, kv_head, entry, width)."""


@dataclass
class Written:
    """What every layer wrote to a cache in one forward pass, and what its attention got back."""

    given: dict[int, Kinds] = field(default_factory=dict)
    returned: dict[int, Kinds] = field(default_factory=dict)


@contextmanager
def spied(cache: Any) -> Iterator[Written]:
    """Record all that goes through the cache's `update`, which stays what it is."""
    seen, update = Written(), cache.update

    def spy(keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any) -> Kinds:
        seen.given[layer] = (keys.clone(), values.clone())
        found = update(keys, values, layer, *more, **named)
        seen.returned[layer] = (found[0].clone(), found[1].clone())
        return found

    cache.update = spy
    yield seen
    del cache.update


def decoding_error(model: Any, cache: Any, entries: dict[int, Kinds], token: Tensor) -> float:
    """Return the distance of a token's logits from those of a plain cache of these entries, over their norm."""
    plain = DynamicCache()
    for layer, kinds in sorted(entries.items()):
        plain.update(*kinds, layer)
    own, known = (model(input_ids=token, past_key_values=one).logits.double().numpy() for one in (cache, plain))
    return float(np.linalg.norm(own - known) / np.linalg.norm(known))


def plain_entries(model: Any, ids: Tensor) -> dict[int, Kinds]:
    """Return what the plain model's cache holds of a prompt, per layer."""
    cache = DynamicCache()
    model(input_ids=ids, past_key_values=cache)
    return {index: (layer.keys, layer.values) for index, layer in enumerate(cache.layers)}


def errors(own: dict[int, Kinds], known: dict[int, Kinds], kind: int) -> np.ndarray:
    """Return ‖own − known‖₂ over the root mean square norm of the head's, in float64: (layer, head, entry).

    `kind` is 0 for keys and 1 for values.
    """
    pairs = [(own[layer][kind][0].double().numpy(), known[layer][kind][0].double().numpy()) for layer in sorted(known)]
    return np.stack([np.linalg.norm(one - other, axis=-1) / _unit(other) for one, other in pairs])


def nearest(own: dict[int, Kinds], known: dict[int, Kinds]) -> np.ndarray:
    """Return the entry whose key and value together are nearest to each entry's, in float64: (layer, head, entry)."""
    found = []
    for layer in sorted(known):
        both = [(own[layer][kind][0].double().numpy(), known[layer][kind][0].double().numpy()) for kind in range(2)]
        squares = [
            np.square(one[:, :, None] - other[:, None]).sum(-1) / _unit(other)[..., None] ** 2 for one, other in both
        ]
        found.append((squares[0] + squares[1]).argmin(axis=-1))
    return np.stack(found)


def _unit(known: np.ndarray) -> np.ndarray:
    """Return the root mean square norm of each head's vectors, (head, 1)."""
    return np.sqrt(np.square(known).sum(axis=-1).mean(axis=-1, keepdims=True))


def rounding(keys: np.ndarray, values: np.ndarray) -> str:
    """Return the largest errors as the first line of an audit has them: '8.6 % and 12 %'."""
    return " and ".join(f"{100 * float(one.max()):.2g} %" for one in (keys, values))

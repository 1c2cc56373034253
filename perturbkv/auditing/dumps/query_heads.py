"""Which key/value heads an engine's query heads read, from entries of the layer above (METHOD: Engines' caches)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from perturbkv.auditing.dumps.dump_entries import Pair
from perturbkv.auditing.dumps.plain_entries import (
    Computation,
    LayerReached,
    StoredCache,
    StoredEntries,
    attend_to_heads,
)
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.models.interface import AttentionFunction
from perturbkv.pipeline.sample.capture import Observer, capture, intercept_attention

_TOKENS = 16
"""Earliest tokens that are read."""
_ROWS = 64
"""Candidates that are computed at once."""
_ROUNDS = 4
"""Most rounds of the search."""
_NEARER = 0.99
"""Share of the distance below which a step, or a head other than its own, must leave it to count."""
_MOST_TOLD = 3
"""Most runs of query heads that are named."""


def find_read_heads(
    adapter: Adapter, token_ids: Sequence[int], stored: StoredEntries, entries: Pair, layer: int
) -> tuple[int, ...]:
    """Return the key/value head that each query head of a layer read, so that the layer above got its entries.

    Empty where no other heads bring the computed entries nearer. A round computes the layer above with each query head
    reading each key/value head, takes the changes to add up, follows the sums towards the dumped entries, computes the
    mappings on that way, and goes on from the nearest. In the end each head goes back to its own unless that is clearly
    farther.

    Args:
        adapter: the model.
        token_ids: the request's tokens.
        stored: its dumped entries, which attention reads.
        entries: those of the layer above, keys and values (kv_head, token, width); NaN where a token has none.
        layer: the layer whose query heads are told of.
    """
    ids = torch.tensor([list(token_ids[:_TOKENS])], device=adapter.device)
    dumped = [kind[:, :_TOKENS].float() for kind in entries]
    units = [kind.square().sum(dim=-1).nanmean(dim=-1).sqrt()[:, None, None] for kind in dumped]

    def differences(rows: Int[Tensor, "row head"]) -> Float[Tensor, "row component"]:
        """Return the dumped entries minus those of each candidate, over the norm of the head's; 0 without an entry."""
        parts = []
        for part in torch.split(rows, _ROWS):
            computed = _compute_entries(adapter, ids, stored, layer, part)
            kinds = [(own - new) / unit for own, new, unit in zip(dumped, computed, units, strict=True)]
            parts.append(torch.cat([kind.flatten(1) for kind in kinds], dim=1).nan_to_num(0, 0, 0).cpu())
        return torch.cat(parts)

    own = heads = own_heads(adapter)
    left = differences(own[None])[0]
    for _ in range(_ROUNDS):
        single = heads.repeat(len(heads), adapter.kv_heads, 1)
        single[range(len(heads)), :, range(len(heads))] = torch.arange(adapter.kv_heads)
        steps = _descend(left, left - differences(single.flatten(0, 1)), heads)
        found = differences(torch.stack([heads, *steps]))
        best = int(found.norm(dim=-1).argmin())
        if not found[best].norm() < _NEARER * left.norm():
            break
        left, heads = found[best], torch.stack([heads, *steps])[best]
    back = torch.where(torch.eye(len(heads), dtype=torch.bool), own, heads)
    heads = torch.where(_NEARER * differences(back).norm(dim=-1) < left.norm(), own, heads)
    return tuple(heads.tolist()) if not torch.equal(heads, own) else ()


def _descend(
    left: Float[Tensor, " component"],
    changes: Float[Tensor, "change component"],
    heads: Int[Tensor, " head"],
) -> list[Int[Tensor, " head"]]:
    """Return the key/value heads that query heads read after each step towards the dumped entries, if changes add up.

    A step moves the one or two query heads by which it gets nearest: the changes of two may nearly cancel.

    Args:
        left: the dumped entries minus the computed ones.
        changes: of the computed entries, by query head and then by the key/value head that it reads.
        heads: the key/value heads that they read in the beginning.
    """
    products, gains = changes @ changes.T, changes @ left
    head_of = torch.arange(len(heads)).repeat_interleave(len(changes) // len(heads))
    first = torch.arange(len(heads)) * (len(changes) // len(heads))
    steps: list[Tensor] = []
    for _ in heads:
        chosen = first + heads
        now = chosen[head_of]
        among = products - products[now] - products[:, now] + products[now][:, now]
        rest = gains - products[:, chosen].sum(dim=1)
        alone = among.diagonal() - 2 * (rest - rest[now])
        pairs = (alone[:, None] + alone + 2 * among).masked_fill(head_of[:, None] == head_of, torch.inf)
        square = left @ left - 2 * gains[chosen].sum() + products[chosen][:, chosen].sum()
        if not pairs.min() < (_NEARER**2 - 1) * square:
            break
        heads = heads.clone()
        for change in divmod(int(pairs.argmin()), len(changes)):
            heads[head_of[change]] = change - first[head_of[change]]
        steps.append(heads)
    return steps


def own_heads(adapter: Adapter) -> Int[Tensor, " head"]:
    """Return the key/value head that each query head reads: heads that stand together share one."""
    return torch.arange(adapter.heads) // (adapter.heads // adapter.kv_heads)


def _compute_entries(
    adapter: Adapter, ids: Int[Tensor, "1 token"], stored: StoredEntries, layer: int, heads: Int[Tensor, "row head"]
) -> tuple[Float[Tensor, "row kv_head token d_key"], Float[Tensor, "row kv_head token d_value"]]:
    """Return the keys and values of the layer above, for each row of key/value heads that a layer's query heads read.

    One forward pass, whose layers below have one row.
    """
    outputs: list[Tensor] = []

    def attend(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the stock attention; in the layer, record that of every row."""
        if adapter.layer_of(module) == layer:
            outputs.append(attend_to_heads(heads, stock, module, args, kwargs).flatten(2))
        return stock(module, *args, **kwargs)

    def widen(index: int, output: Tensor) -> Tensor | None:
        """Return the outputs of all rows in the layer: an `Observer.head_output`."""
        return outputs[0] if index == layer else None

    cache = StoredCache(stored, {}, Computation(), last=layer + 1)
    with intercept_attention(adapter, attend), capture(adapter, Observer(head_output=widen)), suppress(LayerReached):
        run_with_cache(adapter.base, ids, cache)
    above = cache.layers[layer + 1]
    return above.keys, above.values


def describe_read_heads(heads: Sequence[int], own: Sequence[int], layer: int) -> str:
    """Return in words the key/value heads that query heads of a layer read, of those alone that read another's."""
    count = max(own) + 1
    if all(read == head % count for head, read in enumerate(heads)):
        return f"query head i of layer {layer} read key/value head i mod {count}"
    told = []
    moved = [head for head in range(len(heads)) if heads[head] != own[head]]
    for _, run in groupby(enumerate(moved), lambda pair: (pair[1] - pair[0], heads[pair[1]])):
        together = [head for _, head in run]
        first, last = together[0], together[-1]
        which = f"head {first}" if first == last else f"heads {first} to {last}"
        told.append(f"query {which} of layer {layer} read key/value head {heads[first]}")
    if len(told) > _MOST_TOLD:
        return f"query heads of layer {layer} read other key/value heads than their own"
    return ", ".join(told)

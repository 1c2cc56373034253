"""CompactCache: the physically evicted cache of many configurations, one configuration per batch row.

Per layer, rows whose kept sets have the same shape share one frozen block; tokens decoded afterwards go to a tail
that grows by doubling, shared by all rows. Attention runs over block and tail without joining them, so that a step
copies nothing that was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from perturbkv.errors import ConfigError

_FIRST_TAIL = 8


@dataclass(frozen=True)
class KeptEntries:
    """The kept entries of one configuration in one layer; kept_head is H_kv or H."""

    keys: Float[Tensor, "kept_head kept d_head"]
    values: Float[Tensor, "kept_head kept d_head"]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


def gather(
    key: Float[Tensor, "kv_head key d_head"],
    value: Float[Tensor, "kv_head key d_head"],
    positions: Int[Tensor, "kept_head kept"],
) -> KeptEntries:
    """Copy the kept entries out of a layer's full cache; the copies share no memory with it."""
    heads = torch.arange(len(positions), device=positions.device) // (len(positions) // key.shape[0])
    rows = heads.unsqueeze(-1)
    return KeptEntries(key[rows, positions], value[rows, positions])


@dataclass(frozen=True)
class _Block:
    """Rows of one shape: keys and values (row, kept_head, kept, d_head)."""

    rows: list[int]
    keys: Tensor
    values: Tensor


class CompactLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a CompactCache. `seen` counts the prompt's entries, evicted ones included, for positions."""

    def __init__(self, entries: Sequence[KeptEntries], seen: int) -> None:
        super().__init__()
        self.blocks = _blocks(entries)
        self.batch, self.seen, self.length = len(entries), seen, 0
        self.attached = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for the first decoded tokens."""
        shape = (self.batch, key_states.shape[1], _FIRST_TAIL, key_states.shape[-1])
        self.keys, self.values = key_states.new_empty(shape), value_states.new_empty(shape)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append decoded tokens (row, kv_head, query, d_head); amortised, as the tail doubles when it is full.

        Raises ConfigError outside `capture.decode_from`: a model's own attention would see only the new tokens.
        """
        if not self.attached:
            msg = "a CompactCache decodes only inside `with decode_from(model, cache):`"
            raise ConfigError(msg)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self._grow(end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return key_states, value_states

    def _grow(self, length: int) -> None:
        while self.keys.shape[2] < length:
            self.keys = torch.cat([self.keys, torch.empty_like(self.keys)], dim=2)
            self.values = torch.cat([self.values, torch.empty_like(self.values)], dim=2)

    def attend(self, query: Float[Tensor, "row head query d_head"], scale: float) -> Tensor:
        """Attention of the newest tokens over block and tail: (row, query, head, d_head), in the query's dtype."""
        output = torch.empty_like(query)
        for block in self.blocks:
            output[block.rows] = self._attend_block(block, query[block.rows], scale).to(query.dtype)
        return output.transpose(1, 2).contiguous()

    def _attend_block(self, block: _Block, query: Tensor, scale: float) -> Tensor:
        work = torch.promote_types(query.dtype, torch.float32)
        tail_keys = self.keys[block.rows, :, : self.length].to(work)
        tail_values = self.values[block.rows, :, : self.length].to(work)
        query = query.to(work) * scale
        kept = block.keys.shape[2]
        logits = torch.cat([_scores(query, block.keys.to(work)), _scores(query, tail_keys)], dim=-1)
        logits[..., kept:].masked_fill_(self._future(query.shape[2], query.device), -torch.inf)
        weights = logits.softmax(dim=-1)
        return _mix(weights[..., :kept], block.values.to(work)) + _mix(weights[..., kept:], tail_values)

    def _future(self, queries: int, device: torch.device) -> Bool[Tensor, "query tail"]:
        """True where a tail entry is later than the query."""
        newest = torch.arange(self.length - queries, self.length, device=device)
        return torch.arange(self.length, device=device) > newest.unsqueeze(-1)

    def get_seq_length(self) -> int:
        """Tokens seen so far, evicted ones included: the next token's position."""
        return self.seen + self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset for transformers' mask, which attention over a CompactCache does not read."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    @property
    def nbytes(self) -> int:
        """Bytes of the kept entries, without the tail."""
        return sum(block.keys.nbytes + block.values.nbytes for block in self.blocks)


def _blocks(entries: Sequence[KeptEntries]) -> list[_Block]:
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for row, entry in enumerate(entries):
        by_shape.setdefault(tuple(entry.keys.shape), []).append(row)
    return [_block(rows, [entries[row] for row in rows]) for rows in by_shape.values()]


def _block(rows: list[int], entries: list[KeptEntries]) -> _Block:
    """A single row stays a view of what it was given: the run that keeps everything borrows the full cache."""
    if len(entries) == 1:
        return _Block(rows, entries[0].keys.unsqueeze(0), entries[0].values.unsqueeze(0))
    return _Block(rows, torch.stack([entry.keys for entry in entries]), torch.stack([e.values for e in entries]))


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """(row, head, query, d_head) against (row, kept_head, key, d_head) -> (row, head, query, key)."""
    rows, heads, queries, d_head = query.shape
    kept_heads = keys.shape[1]
    grouped = query.reshape(rows, kept_heads, -1, d_head)
    return (grouped @ keys.transpose(2, 3)).view(rows, heads, queries, keys.shape[2])


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """(row, head, query, key) times (row, kept_head, key, d_head) -> (row, head, query, d_head)."""
    rows, heads, queries, keys = weights.shape
    grouped = weights.reshape(rows, values.shape[1], -1, keys)
    return (grouped @ values).view(rows, heads, queries, values.shape[-1])


class CompactCache(Cache):  # type: ignore[misc]
    """Only the kept entries, one configuration per row of the batch, usable through `capture.decode_from`.

    Args:
        layers: per layer, the kept entries of each row.
        seen: tokens of the prompt, evicted ones included: the first decoded token stands at this position.
    """

    def __init__(self, layers: Sequence[Sequence[KeptEntries]], seen: int) -> None:
        super().__init__(layers=[CompactLayer(entries, seen) for entries in layers])

    @property
    def nbytes(self) -> int:
        """Bytes of the kept entries of all layers and rows, without decoded tokens."""
        return sum(layer.nbytes for layer in self.layers)

    def attach(self, attached: bool) -> None:
        """Allow or forbid updates; `capture.decode_from` does both."""
        for layer in self.layers:
            layer.attached = attached


class SharedCache(Cache):  # type: ignore[misc]
    """A full cache of one prompt that a batch of identical rows decodes from: only row 0 is stored.

    The full run so goes through linear layers of the same batch as the evicted runs (METHOD: protocol, 4).
    """

    def __init__(self, full: Cache) -> None:
        super().__init__(layers=full.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append row 0's token."""
        stored: tuple[Tensor, Tensor] = super().update(key_states[:1], value_states[:1], layer_idx, *args, **kwargs)
        return stored

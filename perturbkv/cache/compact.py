"""CompactCache, the physically evicted cache of many configurations with one configuration per batch row.

Per layer the kept entries are frozen in blocks (`ragged`); decoded tokens go to a tail that grows by doubling, shared
by all rows. Attention over blocks and over the tail is merged by log-sum-exps, so that a step copies no kept entry. The
full cache of a model is here too: measured layers keep everything, others their sliding window or recurrent state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.ragged import AnyBlock, build_blocks
from perturbkv.cache.recurrent import Recurrence, RecurrentLayer, RecurrentState
from perturbkv.cache.sliding import INITIAL_CAPACITY, SlidingLayer, Tail, Window, merge_sinks
from perturbkv.cache.stand_in import StandIn, merge_stand_ins
from perturbkv.configs.resources import SLACK
from perturbkv.devices import to_device
from perturbkv.errors import ConfigError
from perturbkv.models import recurrent_states
from perturbkv.models.adapter import Adapter
from perturbkv.models.attention_facts import CHUNKED
from perturbkv.theory import Softmax

_NO_STAND_INS: Mapping[int, StandIn] = MappingProxyType({})
PromptStates = Mapping[int, Window | RecurrentState]
"""Layer index -> what eviction leaves as it is after the prompt: windows of sliding layers, and recurrent states."""


class CompactLayer(Tail, CacheLayerMixin):  # type: ignore[misc]
    """One layer of a CompactCache.

    Args:
        entries: the kept entries of each row.
        heads: number of query heads.
        seen: number of the prompt's entries, evicted ones included: the position of the first decoded token.
        layout: `ragged` or `rectangular`.
        passing: whether entries stay in the full cache and are copied block by block in every pass.
        stand_ins: row -> the correction for its evicted entries.

    Attributes:
        blocks: the kept entries of all rows.
        kept_entries: their number, padding left out.
        borrowed_rows: row that keeps everything -> its entries, which are views of the full cache.
        tail_from: per row the index of its first decoded token in the tail; `replace_rows` puts earlier ones in blocks.

    Raises ConfigError where the layout is rectangular and a row's kept sets differ in length.
    """

    is_sliding = False
    keys: Tensor
    values: Tensor
    batch: int
    seen: int
    length: int
    blocks: list[AnyBlock]
    kept_entries: int
    borrowed_rows: dict[int, KeptEntries]
    tail_from: list[int]
    stand_ins: Mapping[int, StandIn]

    def __init__(
        self,
        entries: Sequence[KeptEntries],
        heads: int,
        seen: int,
        layout: str = "ragged",
        passing: bool = False,
        stand_ins: Mapping[int, StandIn] = _NO_STAND_INS,
    ) -> None:
        CacheLayerMixin.__init__(self)
        self.heads = heads
        self.layout = layout
        self.passing = passing
        self._freeze(entries)
        self.batch, self.seen, self.length = len(entries), seen, 0
        self.tail_from, self.stand_ins = [0] * len(entries), stand_ins
        self.attached = False

    def fork(self) -> CompactLayer:
        """Return a second layer with the same frozen entries, not copied; valid only before any decoding."""
        other = copy.copy(self)
        other.tail_from = [0] * self.batch
        return other

    def _freeze(self, entries: Sequence[KeptEntries]) -> None:
        """Store the kept entries of all rows in blocks. Raises ConfigError for unequal lengths if rectangular."""
        if self.layout == "rectangular" and any(len(set(row.lengths)) > 1 for row in entries):
            raise ConfigError("a rectangular cache cannot hold heads of different budgets; use the layout 'ragged'")
        self.borrowed_rows = {row: kept for row, kept in enumerate(entries) if kept.rectangle is not None}
        self.blocks = build_blocks(entries, self.heads, SLACK if self.layout == "ragged" else 0.0, self.passing)
        self.kept_entries = sum(sum(row.lengths) for row in entries)

    def attend(
        self, query: Float[Tensor, "row head query d_key"], softmax: Softmax
    ) -> Float[Tensor, "row query head d_value"]:
        """Return the newest tokens' attention output, in the dtype of `query`."""
        output, logsumexp = merge_sinks(*self._attend_tail(query, softmax), softmax.sinks)
        output, logsumexp = merge_stand_ins(self.stand_ins, output, logsumexp, query, softmax)
        for block in self.blocks:  # of different heads or rows, so that each is merged once
            block_output, block_sum = block.attend(query, softmax)
            block_output, block_sum = block_output.to(output.dtype), block_sum.to(logsumexp.dtype).unsqueeze(-1)
            before = logsumexp[block.query_index].unsqueeze(-1)
            joint = torch.logaddexp(before, block_sum)
            output[block.query_index] = (
                output[block.query_index] * (before - joint).exp() + block_output * (block_sum - joint).exp()
            )
        return output.to(query.dtype).transpose(1, 2).contiguous()

    def _attend_tail(
        self, query: Float[Tensor, "row head query d_key"], softmax: Softmax
    ) -> tuple[Float[Tensor, "row head query d_value"], Float[Tensor, "row head query"]]:
        """Return attention outputs over the decoded tokens, and logits' log-sum-exps."""
        work = torch.promote_types(query.dtype, torch.float32)
        rows, heads, queries, d_key = query.shape
        keys, values = (tail[:, :, : self.length].to(work) for tail in (self.keys, self.values))
        grouped = query.to(work).reshape(rows, keys.shape[1], -1, d_key)
        logits = softmax.logits_of_scaled(grouped, keys).view(rows, heads, queries, self.length)
        index = torch.arange(self.length, device=query.device)
        first = to_device(self.tail_from, query.device).view(-1, 1, 1, 1)  # those before are in a block of the row
        logits.masked_fill_((index > index[-queries:].unsqueeze(-1)) | (index < first), -torch.inf)
        logsumexp = logits.logsumexp(dim=-1)
        weights = (logits - logsumexp.unsqueeze(-1)).exp_().view(rows, keys.shape[1], -1, self.length)
        return (weights @ values).view(rows, heads, queries, -1), logsumexp

    @property
    def nbytes(self) -> int:
        """Bytes of the frozen blocks, padding included, without decoded tokens."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def borrowed_nbytes(self) -> int:
        """Bytes in `nbytes` that are views of the full cache, counted once per row that keeps everything."""
        return sum(tensor.nbytes for row in self.borrowed_rows.values() for tensor in row.rectangle or ())

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the kept entries, without padding."""
        return self.kept_entries * self.blocks[0].entry_bytes

    def lengths(self, row: int) -> list[int]:
        """Return the numbers of entries of a row's nonempty kept sets, decoded tokens included, in no fixed order."""
        lengths = [segment.length for block in self.blocks for segment in block.segments if segment.row == row]
        return [length + self.length - self.tail_from[row] for length in lengths]

    def entries(self, row: int) -> KeptEntries:
        """Return all entries of a row: per nonempty kept set the frozen ones, then the decoded tokens."""
        if not self.is_initialized:
            return self._frozen_entries(row)
        sets = self._frozen_entries(row).sets()
        decoded = slice(self.tail_from[row], self.length)
        kv_heads = [index * self.keys.shape[1] // len(sets) for index in range(len(sets))]
        keys, values = (
            [torch.cat([frozen[kind], tail[row, head, decoded]]) for frozen, head in zip(sets, kv_heads, strict=True)]
            for kind, tail in enumerate((self.keys, self.values))
        )
        return KeptEntries.of(keys, values)

    def replace_rows(self, entries: dict[int, KeptEntries]) -> None:
        """Replace all entries of rows, decoded tokens included, by new frozen ones; `entries` has them by row."""
        self._freeze([entries[row] if row in entries else self._frozen_entries(row) for row in range(self.batch)])
        for row in entries:
            self.tail_from[row] = self.length
        stored = min(self.tail_from)  # decoded tokens that all rows have in their blocks
        if stored and self.is_initialized:
            self.keys, self.values = (_copy_tail(tail, stored, self.length) for tail in (self.keys, self.values))
            self.seen, self.length = self.seen + stored, self.length - stored
            self.tail_from = [start - stored for start in self.tail_from]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Restrict the layer to the given rows, in the given order."""
        self.blocks = [kept for block in self.blocks if (kept := block.keep_rows(rows)) is not None]
        self.kept_entries = sum(segment.length for block in self.blocks for segment in block.segments)
        self.borrowed_rows = {
            index: self.borrowed_rows[row] for index, row in enumerate(rows) if row in self.borrowed_rows
        }
        self.stand_ins = {index: self.stand_ins[row] for index, row in enumerate(rows) if row in self.stand_ins}
        self.batch, self.tail_from = len(rows), [self.tail_from[row] for row in rows]
        self._keep_tail_rows(rows)

    def forget(self, after: int) -> None:
        """Drop all decoded tokens after the first `after`; kept entries stay."""
        self.length, self.tail_from = after, [0] * self.batch

    def _frozen_entries(self, row: int) -> KeptEntries:
        """Return the frozen entries of a row, without decoded tokens."""
        if row in self.borrowed_rows:
            return self.borrowed_rows[row]
        sets = {
            segment.head: block.entries(index)
            for block in self.blocks
            for index, segment in enumerate(block.segments)
            if segment.row == row
        }
        keys, values = zip(*(sets[head] for head in sorted(sets)), strict=True)
        return KeptEntries.of(keys, values)


def _copy_tail(tail: Tensor, begin: int, end: int) -> Tensor:
    """Return a copy of the tail's entries from `begin` to before `end`, with at least the initial capacity."""
    capacity = max(INITIAL_CAPACITY, end - begin)
    fresh = tail.new_empty(*tail.shape[:2], capacity, tail.shape[3])
    fresh[:, :, : end - begin] = tail[:, :, begin:end]
    return fresh


if TYPE_CHECKING:
    _AttentionLayer = object
else:
    _AttentionLayer = recurrent_states.ATTENTION_LAYER or object  # older transformers have none


class RecurrentCompactLayer(Recurrence, CompactLayer, _AttentionLayer):
    """A `CompactLayer` of a decoder layer that has a recurrent state beside its attention.

    Args:
        layer: the kept entries.
        state: the prompt's, which all rows start from.
    """

    def __init__(self, layer: CompactLayer, state: RecurrentState) -> None:
        self.__dict__.update(layer.__dict__)
        self.start(state, layer.batch)

    def fork(self) -> RecurrentCompactLayer:
        """Return a second layer with the same frozen entries, not copied, whose rows start from the prompt's state."""
        return RecurrentCompactLayer(super().fork(), self.marks[0][0])

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Restrict the layer to the given rows, in the given order."""
        super().keep_rows(rows)
        self.keep_state_rows(rows)

    def forget(self, after: int) -> None:
        """Drop all decoded tokens after the first `after`, and go back to the state that is marked there."""
        super().forget(after)
        self.go_back(after)


class CompactCache(Cache):  # type: ignore[misc]
    """A cache of the kept entries only, one configuration per row of the batch, for use in `capture.decode_from`.

    Args:
        layers: the model's layers; only a `CompactLayer` is evicted, transformers' own stand where nothing is held.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers=list(layers))

    @property
    def evicted_layers(self) -> list[CompactLayer]:
        """Layers of kept entries, in order."""
        return [layer for layer in self.layers if isinstance(layer, CompactLayer)]

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return self.evicted_layers[0].batch

    @property
    def prompt_states(self) -> PromptStates:
        """Windows and recurrent states of the prompt, which no eviction changes."""
        sliding = {index: layer.window for index, layer in enumerate(self.layers) if isinstance(layer, SlidingLayer)}
        recurrent = {
            index: layer.marks[0][0] for index, layer in enumerate(self.layers) if isinstance(layer, Recurrence)
        }
        return {**sliding, **recurrent}

    @property
    def _holding_layers(self) -> list[CompactLayer | SlidingLayer | RecurrentLayer]:
        """Layers that hold anything."""
        return [layer for layer in self.layers if isinstance(layer, CompactLayer | SlidingLayer | RecurrentLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes of the evicted layers' entries in all rows, padding included, without decoded tokens."""
        return sum(layer.nbytes for layer in self.evicted_layers)

    @property
    def padding_nbytes(self) -> int:
        """Bytes of padding in `nbytes`."""
        return int(self.nbytes - sum(layer.kept_nbytes for layer in self.evicted_layers))

    def mark(self) -> None:
        """Store the recurrent states after the tokens decoded so far, so that `forget` can go back to them."""
        for layer in self.layers:
            if isinstance(layer, Recurrence):
                layer.mark(self.evicted_layers[0].length)

    def forget(self, after: int = 0) -> None:
        """Drop all decoded tokens after the first `after`; kept entries stay for the next decoding.

        In a cache with recurrent states `after` must be 0, or where `mark` was called.
        """
        for layer in self._holding_layers:
            layer.forget(after)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Restrict the cache to the given rows, in the given order."""
        if list(rows) == list(range(self.rows)):
            return
        for layer in self._holding_layers:
            layer.keep_rows(rows)

    def fork(self) -> CompactCache:
        """Return a second cache with the same kept entries, not copied; valid only before any decoding.

        Later decoding or compression in one of them does not change the other.
        """
        forked = {id(layer): layer.fork() for layer in self._holding_layers}
        return CompactCache([forked.get(id(layer), layer) for layer in self.layers])

    def attach(self, attached: bool) -> None:
        """Allow or forbid appending tokens, which only `capture.decode_from` allows."""
        for layer in self._holding_layers:
            layer.attached = attached


class SharedCache(Cache):  # type: ignore[misc]
    """A full cache of one prompt from which a batch of identical rows decodes: only row 0 is stored.

    The full run thereby uses linear layers of the same batch size as the evicted runs (METHOD: protocol, 4). Recurrent
    states are those of all rows: `restore_states` gives the full cache its one row back.

    Args:
        full: the full cache after a prompt.
        states: of the prompt.
        rows: number of rows of the batch.
    """

    def __init__(self, full: Cache, states: PromptStates, rows: int) -> None:
        super().__init__(layers=full.layers)
        restore_states(full, states, rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append row 0's keys and values, and return all keys and values of the layer (1, kv_head, key, …)."""
        return cast(
            "tuple[Tensor, Tensor]", super().update(key_states[:1], value_states[:1], layer_idx, *args, **kwargs)
        )


class _CopyingSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding layer of a full cache that copies its window; transformers' own keeps the whole prompt in memory."""

    keys: Tensor
    values: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append entries, and return the keys and values that the new queries may attend to."""
        entries: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = self.keys.clone(), self.values.clone()
        return entries


def full_cache(adapter: Adapter) -> DynamicCache:
    """Return an empty full cache: measured layers store all entries, others their window, state or nothing."""
    if not (adapter.is_mixed or adapter.is_recurrent or adapter.shares_caches):
        return DynamicCache()
    cache = DynamicCache(config=adapter.config)
    cache.layers = [
        _CopyingSlidingLayer(layer.sliding_window) if getattr(layer, "is_sliding", False) else layer
        for layer in cache.layers
    ]
    return cache


def prompt_states(adapter: Adapter, cache: Cache) -> PromptStates:
    """Return what eviction leaves as it is in row 0 of a full cache after a prompt, unchanged by later decoding."""
    found: dict[int, Window | RecurrentState] = {}
    for index, (facts, layer) in enumerate(zip(adapter.facts.layers, cache.layers, strict=True)):
        if facts.state:
            found[index] = RecurrentState(layer)
        elif facts.attends and facts.owner is None and index not in adapter.layer_indices:
            seen, size, chunked = layer.cumulative_length, layer.sliding_window, facts.kind == CHUNKED
            found[index] = Window(layer.keys[0], layer.values[0], seen, size, chunked)
    return found


def restore_states(cache: Cache, states: PromptStates, rows: int = 1) -> None:
    """Reset a full cache to `prompt_states`: windows, stored once, and recurrent states for a number of rows."""
    for index, state in states.items():
        layer: Any = cache.layers[index]
        if isinstance(state, RecurrentState):
            state.put_into(layer, [0] * rows)
        else:
            layer.keys, layer.values = state.keys.unsqueeze(0), state.values.unsqueeze(0)
            layer.cumulative_length = state.seen


def rebuild_cache(adapter: Adapter, entries: Sequence[tuple[Tensor, Tensor]], states: PromptStates) -> DynamicCache:
    """Return a full cache of the entries, keys and values, of the measured layers that fill one, and of states.

    The cache holds views of the entries, not copies.
    """
    cache = full_cache(adapter)
    for index, (keys, values) in zip(adapter.layer_indices, entries, strict=False):  # those with a cache come first
        cache.update(keys.unsqueeze(0), values.unsqueeze(0), index)
        cache.layers[index].keys, cache.layers[index].values = keys.unsqueeze(0), values.unsqueeze(0)
    for index, state in states.items():
        if isinstance(state, Window):
            cache.layers[index].update(state.keys.unsqueeze(0), state.values.unsqueeze(0))
    restore_states(cache, states)
    return cache


def join_layers(adapter: Adapter, measured: Sequence[CompactLayer], states: PromptStates) -> list[Any]:
    """Return all layers of a compact cache in the model's order: the measured ones, and those of the prompt's states.

    Layers without a memory of their own are those of an empty full cache.
    """
    rows, compact = measured[0].batch, dict(zip(adapter.layer_indices, measured, strict=False))
    layers: dict[int, Any] = {**dict(enumerate(full_cache(adapter).layers)), **compact}
    for index, state in states.items():
        if isinstance(state, Window):
            layers[index] = SlidingLayer(state, adapter.heads, rows)
        elif index in compact:
            layers[index] = RecurrentCompactLayer(compact[index], state)
        else:
            layers[index] = RecurrentLayer(state, rows)
    return [layers[index] for index in sorted(layers)]

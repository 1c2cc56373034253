"""Cache layers with a sliding window, which eviction elsewhere does not change; and the tail of decoded tokens.

In a cache of evicted rows a sliding layer holds the prompt's last entries once for all rows, and each row's decoded
tokens in a tail that grows by doubling.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from perturbkv.devices import to_device
from perturbkv.errors import ConfigError
from perturbkv.theory import Softmax

INITIAL_CAPACITY = 8
"""Initial capacity of a tail, in tokens."""


def merge_sinks(
    output: Float[Tensor, "row head query d_value"],
    logsumexp: Float[Tensor, "row head query"],
    sinks: Float[Tensor, " head"] | None,
) -> tuple[Tensor, Tensor]:
    """Return attention outputs and log-sum-exps after adding each head's sink logit, which has no value.

    `output` is the attention over some entries, `logsumexp` that of their logits. Both are returned as they are for a
    model without sinks.
    """
    if sinks is None:
        return output, logsumexp
    joint = torch.logaddexp(logsumexp, sinks.to(logsumexp).view(1, -1, 1).expand_as(logsumexp))
    return output * (logsumexp - joint).exp().unsqueeze(-1), joint


class Tail:
    """The decoded tokens of one layer: `keys` and `values` (row, kv_head, capacity, …), the first `length` in use.

    `batch` is the number of rows, `seen` that of the prompt's entries, evicted ones included; only an `attached` tail
    accepts tokens.
    """

    keys: Tensor
    values: Tensor
    is_initialized: bool
    batch: int
    seen: int
    length: int
    attached: bool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the tensors of the initial capacity."""
        tail = (self.batch, key_states.shape[1], INITIAL_CAPACITY)
        self.keys, self.values = (new.new_empty(*tail, new.shape[-1]) for new in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return what a layer stores of decoded tokens as it is; `append` gets what its attention reads of them.

        Raises ConfigError outside `capture.decode_from`: a model's own attention would see only the new tokens.
        """
        if not self.attached:
            raise ConfigError("a CompactCache decodes only inside `with decode_from(model, cache):`")
        return key_states, value_states

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append the keys and values (row, kv_head, query, …) of decoded tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        while self.keys.shape[2] < end:
            self.keys = torch.cat([self.keys, torch.empty_like(self.keys)], dim=2)
            self.values = torch.cat([self.values, torch.empty_like(self.values)], dim=2)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end

    def _keep_tail_rows(self, rows: Sequence[int]) -> None:
        """Restrict the tail to the given rows, in the given order."""
        if self.is_initialized:
            kept = to_device(list(rows), self.keys.device)
            self.keys, self.values = self.keys[kept], self.values[kept]

    def get_seq_length(self) -> int:
        """Return the position of the next token: the number of tokens read, evicted ones included."""
        return self.seen + self.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (length, offset) of transformers' mask, which attention over a CompactCache ignores.

        Older versions of transformers pass the queries' positions instead of their number.
        """
        queries = len(query_length) if isinstance(query_length, Tensor) else query_length
        return self.get_seq_length() + queries, 0

    def get_max_length(self) -> int:
        """Return −1, as the length is unlimited."""
        return -1

    get_max_cache_shape = get_max_length
    """The name of `get_max_length` in older versions of transformers."""


@dataclass(frozen=True, eq=False)
class Window:
    """The entries of a prompt in a sliding layer: at most the last `size` − 1 of its `seen` entries.

    Queries of a `chunked` layer see the entries of their own chunk of `size` positions, others the last `size` ones.
    """

    keys: Float[Tensor, "kv_head entry d_key"]
    values: Float[Tensor, "kv_head entry d_value"]
    seen: int
    size: int
    chunked: bool = False


class SlidingLayer(Tail, CacheLayerMixin):  # type: ignore[misc]
    """A layer of a `CompactCache` whose queries see the last `window.size` entries, their own included, or a chunk.

    Args:
        window: the prompt's entries, which all rows share.
        heads: number of query heads.
        rows: number of rows of the batch.
    """

    is_sliding = True
    batch: int
    seen: int
    length: int

    def __init__(self, window: Window, heads: int, rows: int) -> None:
        CacheLayerMixin.__init__(self)
        self.window = window
        self.heads = heads
        self.batch, self.seen, self.length = rows, window.seen, 0
        self.attached = False

    def fork(self) -> SlidingLayer:
        """Return a second layer with the same window, not copied; valid only before any decoding."""
        return copy.copy(self)

    def attend(
        self, query: Float[Tensor, "row head query d_key"], softmax: Softmax
    ) -> Float[Tensor, "row query head d_value"]:
        """Return the newest tokens' attention output, in the dtype of `query`."""
        work = torch.promote_types(query.dtype, torch.float32)
        rows, heads, queries, d_key = query.shape
        kv_heads, entries = self.window.keys.shape[:2]
        first = max(0, self.length - queries - self.window.size + 1)  # the oldest token in the first query's window
        keys, values = (tail[:, :, first : self.length].to(work) for tail in (self.keys, self.values))
        grouped = query.to(work).reshape(rows, kv_heads, -1, d_key)
        in_window, decoded = (softmax.logits_of_scaled(grouped, seen) for seen in (self.window.keys.to(work), keys))
        logits = torch.cat([in_window, decoded], dim=-1)
        excluded = self._exclusion_mask(queries, first, query.device)
        logits = logits.view(rows, heads, queries, -1).masked_fill_(excluded, -torch.inf)
        logsumexp = logits.logsumexp(dim=-1)
        weights = (logits - logsumexp.unsqueeze(-1)).exp().view(rows, kv_heads, -1, logits.shape[-1])
        output = weights[..., :entries] @ self.window.values.to(work) + weights[..., entries:] @ values
        output, _ = merge_sinks(output.view(rows, heads, queries, -1), logsumexp, softmax.sinks)
        return output.to(query.dtype).transpose(1, 2).contiguous()

    def _exclusion_mask(self, queries: int, first: int, device: torch.device) -> Bool[Tensor, "query entry"]:
        """Return a mask, True for the entries hidden from a query: later ones, and ones outside its window.

        Entries are those of the prompt's window, then the decoded tokens from `first` on.
        """
        entries = self.window.keys.shape[1]
        indices = torch.cat([
            torch.arange(self.seen - entries, self.seen, device=device),
            torch.arange(self.seen + first, self.seen + self.length, device=device),
        ])  # fmt: skip
        newest = torch.arange(self.seen + self.length - queries, self.seen + self.length, device=device).unsqueeze(-1)
        size = self.window.size
        outside = indices // size != newest // size if self.window.chunked else indices <= newest - size
        return (indices > newest) | outside

    def forget(self, after: int) -> None:
        """Drop all decoded tokens after the first `after`."""
        self.length = after

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Restrict the layer to the given rows, in the given order."""
        self.batch = len(rows)
        self._keep_tail_rows(rows)

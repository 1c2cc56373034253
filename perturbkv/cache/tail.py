"""What rows of an evicted cache decoded since: keys and values that grow by doubling, each row's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.devices import on_device
from perturbkv.errors import ConfigError

FIRST = 8
"""Tokens that a tail has room for at first."""


def with_sinks(
    output: Float[Tensor, "row head query d_head"],
    total: Float[Tensor, "row head query"],
    sinks: Float[Tensor, " head"] | None,
) -> tuple[Tensor, Tensor]:
    """Attention over some entries and its log-sum-exps, joined with each head's sink: a logit without a value."""
    if sinks is None:
        return output, total
    joint = torch.logaddexp(total, sinks.to(total).view(1, -1, 1).expand_as(total))
    return output * (total - joint).exp().unsqueeze(-1), joint


class Tail:
    """Of one layer: `keys` and `values` (row, kv_head, room, d_head), of which the first `length` are there.

    `seen` counts the prompt's entries, evicted ones included, for positions; only an `attached` one takes tokens.
    """

    keys: Tensor
    values: Tensor
    is_initialized: bool
    batch: int
    seen: int
    length: int
    attached: bool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for the first decoded tokens."""
        shape = (self.batch, key_states.shape[1], FIRST, key_states.shape[-1])
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

    def _only(self, rows: Sequence[int]) -> None:
        """Keep the tails of these rows alone, in this order."""
        if self.is_initialized:
            kept = on_device(list(rows), self.keys.device)
            self.keys, self.values = self.keys[kept], self.values[kept]

    def get_seq_length(self) -> int:
        """Tokens seen so far, evicted ones included: the next token's position."""
        return self.seen + self.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset for transformers' mask, which attention over a CompactCache does not read.

        Older transformers hand over the queries' positions instead of their number.
        """
        queries = len(query_length) if isinstance(query_length, Tensor) else query_length
        return self.get_seq_length() + queries, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length
    """Its name in older transformers."""

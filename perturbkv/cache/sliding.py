"""A layer that sees the last entries alone: its window is the same whatever is evicted elsewhere.

In a cache of evicted rows it holds the prompt's last entries once for all rows, and a tail of what each row decoded.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from perturbkv.cache.tail import Tail, with_sinks


@dataclass(frozen=True, eq=False)
class Window:
    """What a sliding layer holds of a prompt: at most the last `size` − 1 of its `seen` entries."""

    keys: Float[Tensor, "kv_head entry d_head"]
    values: Float[Tensor, "kv_head entry d_head"]
    seen: int
    size: int


class SlidingLayer(Tail, CacheLayerMixin):  # type: ignore[misc]
    """A layer of a `CompactCache` whose queries see the last `window.size` entries, their own among them."""

    is_sliding = True

    def __init__(self, window: Window, heads: int, rows: int) -> None:
        CacheLayerMixin.__init__(self)
        self.window, self.heads = window, heads
        self.batch, self.seen, self.length = rows, window.seen, 0
        self.attached = False

    def fresh(self) -> SlidingLayer:
        """Another layer of the same window, which both share; nothing may have been decoded from this one."""
        return copy.copy(self)

    def attend(
        self, query: Float[Tensor, "row head query d_head"], scale: float, sinks: Float[Tensor, " head"] | None = None
    ) -> Tensor:
        """Attention of the newest tokens over window and tail: (row, query, head, d_head), in the query's dtype."""
        work = torch.promote_types(query.dtype, torch.float32)
        rows, heads, queries, d_head = query.shape
        kv_heads, entries = self.window.keys.shape[:2]
        first = max(0, self.length - queries - self.window.size + 1)
        keys, values = (tail[:, :, first : self.length].to(work) for tail in (self.keys, self.values))
        asked = (query.to(work) * scale).reshape(rows, kv_heads, -1, d_head)
        logits = torch.cat([asked @ self.window.keys.to(work).mT, asked @ keys.mT], dim=-1)
        hidden = self._unseen(queries, first, query.device)
        logits = logits.view(rows, heads, queries, -1).masked_fill_(hidden, -torch.inf)
        total = logits.logsumexp(dim=-1)
        weights = (logits - total.unsqueeze(-1)).exp().view(rows, kv_heads, -1, logits.shape[-1])
        found = weights[..., :entries] @ self.window.values.to(work) + weights[..., entries:] @ values
        found, _ = with_sinks(found.view(rows, heads, queries, d_head), total, sinks)
        return found.to(query.dtype).transpose(1, 2).contiguous()

    def _unseen(self, queries: int, first: int, device: torch.device) -> Bool[Tensor, "query entry"]:
        """True where an entry is later than the query, or too far before it; the tail's from its `first` on."""
        entries = self.window.keys.shape[1]
        places = torch.cat([
            torch.arange(self.seen - entries, self.seen, device=device),
            torch.arange(self.seen + first, self.seen + self.length, device=device),
        ])  # fmt: skip
        newest = torch.arange(self.seen + self.length - queries, self.seen + self.length, device=device).unsqueeze(-1)
        return (places > newest) | (places <= newest - self.window.size)

    def forget(self, after: int) -> None:
        """Forget what was decoded after the first `after` tokens."""
        self.length = after

    def only(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        self.batch = len(rows)
        self._only(rows)

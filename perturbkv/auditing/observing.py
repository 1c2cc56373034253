"""What a forward pass hands to the attention and gets from it, whoever's cache it decodes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import AttentionFunction, Observer, capture, intercept_attention

Attend = Callable[[int, AttentionFunction, nn.Module, Any, Any], Any]
"""`(layer, stock, module, args, kwargs)`: what runs in place of the model's attention."""


@dataclass
class Seen:
    """One forward pass of a batch; layer → tensor, nothing for layers whose attention was not the model's own.

    Attributes:
        query: after RoPE (row, head, new, d_head).
        key, value: as the attention gets them (row, kept_head, entry, d_head), those of the new tokens last.
        mask: as the attention gets it; None where it gets none.
        head_output: before the output projection (row, new, head, d_head).
        hidden: residual stream after the layer (row, new, d_model).
        logits: (row, new, vocab).
        entries: how many the attention got, those of the new tokens with them.
        hidden_keys: entries that kvpress hides from the attention, which gets them all the same: row, head and place
            of each (`masked_key_indices`).
    """

    query: dict[int, Tensor] = field(default_factory=dict)
    key: dict[int, Tensor] = field(default_factory=dict)
    value: dict[int, Tensor] = field(default_factory=dict)
    mask: dict[int, Tensor | None] = field(default_factory=dict)
    head_output: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0, 0, 0))
    entries: dict[int, int] = field(default_factory=dict)
    hidden_keys: dict[int, tuple[Tensor, ...] | None] = field(default_factory=dict)

    def whole(self, layers: int) -> bool:
        """Whether the attention of every layer was seen."""
        return len(self.head_output) == layers

    def own(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the new tokens (row, kept_head, new, d_head)."""
        new = self.query[layer].shape[2]
        return self.key[layer][:, :, -new:], self.value[layer][:, :, -new:]

    def before(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of everything before the new tokens."""
        new = self.query[layer].shape[2]
        return self.key[layer][:, :, :-new], self.value[layer][:, :, :-new]

    def forget_entries(self) -> None:
        """Keep keys and values of the new tokens alone: all together are as large as the cache."""
        for layer in self.key:
            own = self.own(layer)
            self.key[layer], self.value[layer] = own[0].clone(), own[1].clone()


@contextmanager
def observed(adapter: Adapter, seen: Seen, attend: Attend | None = None) -> Iterator[None]:
    """Fill `seen` by the forward pass inside the block; `attend` runs in place of the model's attention."""

    def watch(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        layer = adapter.layer_of(module)
        seen.query[layer], seen.key[layer], seen.value[layer], seen.mask[layer] = args[:4]
        seen.entries[layer] = args[1].shape[2]
        seen.hidden_keys[layer] = getattr(module, "masked_key_indices", None)
        found = stock(module, *args, **kwargs) if attend is None else attend(layer, stock, module, args, kwargs)
        seen.head_output[layer] = found[0]
        return found

    def hidden(layer: int, output: Tensor) -> None:
        seen.hidden[layer] = output

    with intercept_attention(adapter, watch), capture(adapter, Observer(hidden=hidden)):
        yield


def masked(kept: Sequence[Bool[Tensor, "row kept_head entry"]], reverse: bool = False) -> Attend:
    """Attention that shows each head exactly what it keeps of the entries before the new tokens, and those causally.

    With `reverse` entries come in the opposite order, which makes no difference but in rounding.
    """

    def attend(layer: int, stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        query, key, value, _, *others = args
        shown = _shown(kept[layer], query.shape[1], query.shape[2])
        if reverse:
            key, value, shown = key.flip(2), value.flip(2), shown.flip(-1)
        return stock(module, query, key, value, shown, *others, **kwargs)

    return attend


def _shown(kept: Bool[Tensor, "row kept_head entry"], heads: int, new: int) -> Bool[Tensor, "row head new all"]:
    sets = kept.repeat_interleave(heads // kept.shape[1], dim=1)
    causal = torch.ones(new, new, dtype=torch.bool, device=kept.device).tril()
    before = sets.unsqueeze(2).expand(-1, -1, new, -1)
    return torch.cat([before, causal.expand(*before.shape[:2], -1, -1)], dim=-1)


def visible(mask: Tensor | None, entries: int, new: int) -> Bool[Tensor, "row head new all"] | None:
    """Which entries each new token sees by the mask that its attention got; None where it sees all before it."""
    if mask is None:
        return None
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return allowed[..., :new, :entries]


def sees_later(seen: Seen) -> bool:
    """Whether the mask of a block lets a token see those behind it."""
    new = seen.query[0].shape[2]
    for layer, mask in seen.mask.items():
        allowed = visible(mask, seen.entries[layer], new)
        if new > 1 and allowed is not None:
            later = torch.ones(new, new, dtype=torch.bool, device=allowed.device).triu(1)
            if bool((allowed[..., -new:] & later).any()):
                return True
    return False


def hides(seen: Seen) -> bool:
    """Whether the mask of a block hides an entry from a token that another one sees, or itself from itself."""
    new = seen.query[0].shape[2]
    for layer, mask in seen.mask.items():
        entries = seen.entries[layer]
        if new > 1 and mask is None and entries > new:
            return True
        allowed = visible(mask, entries, new)
        if new > 1 and allowed is not None:
            before, own = allowed[..., :-new], allowed[..., -new:]
            causal = torch.ones(new, new, dtype=torch.bool, device=own.device).tril()
            if bool((before.any(dim=-2, keepdim=True) & ~before).any()) or bool((~own & causal).any()):
                return True
    return False

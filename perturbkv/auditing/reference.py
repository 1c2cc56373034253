"""The masked reference: the plain model decodes with a mask of exactly the kept entries.

Forward passes are recorded at the attention, whoever's cache they decode from; noise floors are the distances that
rounding alone makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from perturbkv.auditing.situations import Situation
from perturbkv.cache.external_cache import Layers
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.models.families import check_plain
from perturbkv.pipeline.sample.capture import AttentionFunction, Observer, capture, intercept_attention

Attend = Callable[[int, AttentionFunction, nn.Module, Any, Any], Any]
"""`(layer, stock, module, args, kwargs)`: the function that replaces the model's attention."""


@dataclass
class Seen:
    """A record of one forward pass of a batch: layer → tensor, without layers whose attention was not the model's own.

    Attributes:
        query: after RoPE (row, head, new, d_head).
        key, value: as the attention gets them (row, kept_head, entry, d_head), those of the new tokens last.
        mask: as the attention gets it; None where it gets none.
        head_output: before the output projection (row, new, head, d_head).
        hidden: residual stream after the layer (row, new, d_model).
        logits: (row, new, vocab).
        entries: number of entries that the attention got, the new tokens' included.
        hidden_keys: entries that kvpress hides from the attention, which gets them all the same: row, head and index of
            each (`masked_key_indices`).
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
        """Return whether the attention of every layer was recorded."""
        return len(self.head_output) == layers

    def own(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the new tokens (row, kept_head, new, d_head)."""
        new = self.query[layer].shape[2]
        return self.key[layer][:, :, -new:], self.value[layer][:, :, -new:]

    def before(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of all entries before the new tokens."""
        new = self.query[layer].shape[2]
        return self.key[layer][:, :, :-new], self.value[layer][:, :, :-new]

    def forget_entries(self) -> None:
        """Drop all keys and values but the new tokens', as they are as large as the cache."""
        for layer in self.key:
            own = self.own(layer)
            self.key[layer], self.value[layer] = own[0].clone(), own[1].clone()


@contextmanager
def record_pass(adapter: Adapter, seen: Seen, attend: Attend | None = None) -> Iterator[None]:
    """Record the forward pass inside the block in `seen`; `attend` replaces the model's attention."""

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
    """Return an attention in which each head sees the entries that it keeps, and causally the new tokens.

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
    """Return which entries each new token sees by its attention's mask; None where it sees all before it."""
    if mask is None:
        return None
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return allowed[..., :new, :entries]


def sees_later(seen: Seen) -> bool:
    """Return whether the mask of a block lets a token see later ones."""
    new = seen.query[0].shape[2]
    for layer, mask in seen.mask.items():
        allowed = visible(mask, seen.entries[layer], new)
        if new > 1 and allowed is not None:
            later = torch.ones(new, new, dtype=torch.bool, device=allowed.device).triu(1)
            if bool((allowed[..., -new:] & later).any()):
                return True
    return False


def hides(seen: Seen) -> bool:
    """Return whether the mask of a block hides an entry from a token that another one sees, or a token from itself."""
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


_KERNEL = "sdpa"
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Distance:
    """Relative distances in one row of one forward pass, the maximum over its tokens.

    Attributes:
        head: before the output projection.
        hidden: residual stream after the layer.
        logits: less their mean, at the tokens that both have.
    """

    head: Float[Tensor, "layer head"]
    hidden: Float[Tensor, " layer"]
    logits: Tensor


@dataclass(frozen=True)
class Floors:
    """Relative distances that rounding alone makes (METHOD: protocol, 4): never below the dtype's epsilon.

    Attributes:
        head, hidden, logits: as in `Distance`, the maximum over a layer's heads.
    """

    head: Float[Tensor, " layer"]
    hidden: Float[Tensor, " layer"]
    logits: Tensor


@dataclass(frozen=True)
class EntryFloors:
    """Noise floors of entries, over the root mean square norm of a head's, from reading the prompt in two parts."""

    key: Float[Tensor, " layer"]
    value: Float[Tensor, " layer"]


def check(adapter: Adapter) -> None:
    """Raise ModelError unless every layer's attention takes a mask per head, over all entries."""
    check_plain(adapter.config, adapter.name, "an audit")
    name = adapter.config._attn_implementation
    if name != _KERNEL:
        msg = f"an audit masks entries per head, which needs attention '{_KERNEL}', got '{name}'; load with '{_KERNEL}'"
        raise ModelError(msg)


def read(adapter: Adapter, situation: Situation) -> Layers:
    """Return keys and values of every layer after the plain model has read the prompts."""
    cache = DynamicCache()
    padded = {} if bool(situation.attention_mask.all()) else {
        "attention_mask": situation.attention_mask, "position_ids": situation.prompt_positions()
    }  # fmt: skip
    adapter.model(input_ids=situation.ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **padded)
    return [(layer.keys, layer.values) for layer in cache.layers]


def greedy(adapter: Adapter, ids: Int[Tensor, " token"], count: int) -> Int[Tensor, " new"]:
    """Return the model's own greedy continuation."""
    cache, fed, found = DynamicCache(), ids.unsqueeze(0), []
    for _ in range(count):
        logits = adapter.model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        fed = logits[:, -1:].argmax(dim=-1)
        found.append(fed[0, 0])
    return torch.stack(found)


def decode(
    adapter: Adapter, full: Layers, situation: Situation, kept: Sequence[Sequence[Tensor]], reverse: bool = False
) -> Iterator[Seen]:
    """Yield forward passes from the full cache; `kept` are per pass and layer masks (row, kept_head, entry)."""
    cache = _filled(full)
    for chunk in range(len(situation.chunks)):
        yield _forward(adapter, cache, situation, chunk, masked(kept[chunk], reverse))


def _plain(adapter: Adapter, full: Layers, situation: Situation) -> Iterator[Seen]:
    """Yield the model's forward passes without our masks: only padding is hidden."""
    cache, seen = _filled(full), situation.attention_mask
    for chunk, tokens in enumerate(situation.chunks):
        seen = torch.cat([seen, seen.new_ones(situation.rows, len(tokens))], dim=-1)
        yield _forward(adapter, cache, situation, chunk, None, seen)


def _forward(
    adapter: Adapter, cache: Cache, situation: Situation, chunk: int, attend: Attend | None, mask: Tensor | None = None
) -> Seen:
    seen = Seen()
    with record_pass(adapter, seen, attend):
        seen.logits = adapter.model(
            input_ids=situation.fed(chunk), position_ids=situation.positions(chunk), past_key_values=cache,
            use_cache=True, attention_mask=mask,
        ).logits  # fmt: skip
    return seen


def _filled(full: Layers) -> DynamicCache:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(full):
        cache.update(keys, values, layer)
    return cache


def full_masks(situation: Situation, full: Layers) -> list[list[Bool[Tensor, "row kept_head entry"]]]:
    """Return per forward pass and layer the mask of a run that keeps everything but padding."""
    found, mask = [], situation.attention_mask.bool()
    for tokens in situation.chunks:
        found.append([mask.unsqueeze(1).expand(-1, keys.shape[1], -1) for keys, _ in full])
        mask = torch.cat([mask, mask.new_ones(situation.rows, len(tokens))], dim=-1)
    return found


def floors(adapter: Adapter, full: Layers, situation: Situation) -> Floors:
    """Return the differences between runs that keep everything: without mask, with one, and in the opposite order.

    The maximum over all heads, rows and passes; a layer's is never below those before it, as rounding accumulates.
    """
    whole, layers, least = full_masks(situation, full), len(full), torch.finfo(adapter.dtype).eps
    runs = zip(
        _plain(adapter, full, situation),
        decode(adapter, full, situation, whole),
        decode(adapter, full, situation, whole, reverse=True),
        strict=True,
    )
    found = [
        compare(one, other, row, layers)
        for passes in runs for one, other in pairwise(passes) for row in range(situation.rows)
    ]  # fmt: skip
    head, hidden, logits = (
        torch.stack([getattr(one, name).cpu() for one in found]).amax(dim=0).clamp(min=least)
        for name in ("head", "hidden", "logits")
    )
    return Floors(head.amax(dim=-1).cummax(dim=0).values, hidden.cummax(dim=0).values, logits)


def entry_floors(adapter: Adapter, ids: Int[Tensor, " token"], full: Layers) -> EntryFloors:
    """Return how far entries move where the prompt is read in two parts instead of at once, as `full` was."""
    cache, middle, least = DynamicCache(), len(ids) // 2, torch.finfo(adapter.dtype).eps
    for part in (ids[:middle], ids[middle:]):
        adapter.model(input_ids=part.unsqueeze(0), past_key_values=cache, use_cache=True, logits_to_keep=1)
    apart = [
        [_entry_distance(one[0], other[0]).cpu() for one, other in zip((layer.keys, layer.values), kinds, strict=True)]
        for layer, kinds in zip(cache.layers, full, strict=True)
    ]
    key, value = (torch.stack([layer[kind] for layer in apart]).clamp(min=least) for kind in (0, 1))
    return EntryFloors(key.cummax(dim=0).values, value.cummax(dim=0).values)


def _entry_distance(one: Float[Tensor, "kv_head entry d_head"], other: Float[Tensor, "kv_head entry d_head"]) -> Tensor:
    """Return the largest distance of an entry, over the root mean square norm of its head's."""
    unit = other.float().square().sum(dim=-1).mean(dim=-1, keepdim=True).sqrt()
    apart: Tensor = torch.linalg.vector_norm(one.float() - other.float(), dim=-1) / unit
    return apart.amax()


def compare(found: Seen, reference: Seen, row: int, layers: int) -> Distance:
    """Return the distances of a forward pass from the reference's in one row.

    A head is measured against its own length or the layer's root mean square one, whichever is larger: rounding of the
    values does not shrink where their weighted sum nearly cancels.
    """
    heads, hidden = [], []
    for layer in range(layers):
        outputs = reference.head_output[layer][row].double()
        length = torch.linalg.vector_norm(outputs, dim=-1)
        usual = length.square().mean(dim=-1, keepdim=True).sqrt()
        apart = torch.linalg.vector_norm(found.head_output[layer][row].double() - outputs, dim=-1)
        heads.append((apart / torch.maximum(length, usual).clamp(min=_TINY)).amax(dim=0))
        hidden.append(_relative(found.hidden[layer][row], reference.hidden[layer][row]))
    return Distance(torch.stack(heads), torch.stack(hidden), logits_distance(found.logits[row], reference.logits[row]))


def _relative(one: Float[Tensor, "new column"], other: Float[Tensor, "new column"]) -> Tensor:
    """Return the distance over the length, the maximum over the new tokens."""
    length = torch.linalg.vector_norm(other.double(), dim=-1).clamp(min=_TINY)
    apart: Tensor = torch.linalg.vector_norm(one.double() - other.double(), dim=-1) / length
    return apart.amax()


def logits_distance(one: Float[Tensor, "new vocab"], other: Float[Tensor, "most vocab"]) -> Tensor:
    """Return the relative distance of logits less their mean, at the last tokens that both have."""
    centred = [logits.double() - logits.double().mean(dim=-1, keepdim=True) for logits in (one, other[-len(one) :])]
    return _relative(centred[0], centred[1])


def with_padding_counted(situation: Situation) -> Situation:
    """Return the situation with positions counted from the padding on, as plain calls of a model count them."""
    return replace(situation, counts_padding=True)

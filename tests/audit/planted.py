"""Small evictions, right ones and wrong ones, for an audit to tell apart; each says where its fault is planted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

KEPT = 20
"""Entries that stay of a prompt, the last `RECENT` ones and the first `SINKS` among them."""
SINKS, RECENT = 4, 8


def positions(tokens: int, head: int, *, sinks: int = SINKS, recent: int = RECENT) -> Tensor:
    """Sinks, recent entries, and between them others in every head."""
    between = torch.arange(sinks, tokens - recent)
    more = KEPT - sinks - recent
    chosen = between[torch.linspace(head, len(between) - 1, more).round().long()]
    return torch.cat([torch.arange(sinks), chosen, torch.arange(tokens - recent, tokens)])


def full(model: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
    """The full cache, as a user reads a padded batch."""
    cache, places = DynamicCache(), (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    model(input_ids=input_ids, attention_mask=attention_mask, position_ids=places, past_key_values=cache)
    return cache


def gathered(cache: DynamicCache, attention_mask: Tensor, padding: bool = False, **asked: int) -> DynamicCache:
    """Only what `positions` says, per row and head; with `padding` counted from the padding on."""
    for layer in cache.layers:
        rows = []
        for mask in attention_mask:
            start = 0 if padding else int((mask == 0).sum())
            heads = layer.keys.shape[1]
            rows.append(torch.stack([start + positions(len(mask) - start, head, **asked) for head in range(heads)]))
        place = torch.stack(rows).unsqueeze(-1).expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, place), layer.values.gather(2, place)
    return cache


def right(model: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
    return gathered(full(model, input_ids, attention_mask), attention_mask)


def off_by_one(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Right entries; its own decoding puts new tokens one position too early."""
    cache = right(model, input_ids, attention_mask)
    cache.tokens = attention_mask.sum(dim=-1)  # type: ignore[attr-defined]
    return cache


def decode_early(model: Any, cache: Any, token: Tensor, step: int) -> Tensor:
    new = torch.arange(token.shape[1])
    places = cache.tokens.unsqueeze(-1) + step - 1 + new
    return model(input_ids=token, position_ids=places, past_key_values=cache).logits


off_by_one.decode = decode_early  # type: ignore[attr-defined]


def rotated_again(model: Any, input_ids: Tensor, attention_mask: Tensor, layer: int = 1) -> Cache:
    """Keys of one layer are rotated a second time when they are gathered."""
    cache = full(model, input_ids, attention_mask)
    places = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    cosine, sine = model.model.rotary_emb(cache.layers[layer].values, places)
    keys = cache.layers[layer].keys
    first, second = keys.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    cache.layers[layer].keys = keys * cosine.unsqueeze(1) + turned * sine.unsqueeze(1)
    return gathered(cache, attention_mask)


class _Seen(DynamicLayer):
    """Says how many tokens it has seen, and makes masks for the entries that it holds: not the same thing."""

    gone = 0

    def get_seq_length(self) -> int:
        return super().get_seq_length() + self.gone

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_seq_length() + query_length, 0


def mask_of_evicted_length(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    cache = right(model, input_ids, attention_mask)
    for place, layer in enumerate(cache.layers):
        other = _Seen()
        other.keys, other.values, other.is_initialized = layer.keys, layer.values, True
        other.dtype, other.device = layer.keys.dtype, layer.keys.device
        other.gone = input_ids.shape[1] - layer.keys.shape[2]
        cache.layers[place] = other
    return cache


def swapped_values(model: Any, input_ids: Tensor, attention_mask: Tensor, layer: int = 1) -> Cache:
    """Head 0 of one layer has the values of head 1 at its own positions."""
    cache = full(model, input_ids, attention_mask)
    values = cache.layers[layer].values.clone()
    values[:, 0] = values[:, 1]
    cache.layers[layer].values = values
    return gathered(cache, attention_mask)


def without_sinks(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    cache = full(model, input_ids, attention_mask)
    gathered(cache, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, SINKS:], layer.values[:, :, SINKS:]
    return cache


def without_window(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    cache = full(model, input_ids, attention_mask)
    gathered(cache, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :-RECENT], layer.values[:, :, :-RECENT]
    return cache


def with_padding(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Sinks are the first entries, padding or not."""
    return gathered(full(model, input_ids, attention_mask), attention_mask, padding=True)


def quantised(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Keys of layer 1 on went through 8 bits, one scale per entry."""
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers[1:]:
        step = layer.keys.abs().amax(dim=-1, keepdim=True) / 127
        layer.keys = (layer.keys / step).round() * step
    return cache


class RepeatedLayer(DynamicLayer):
    """Caches keys and values once per query head."""

    group = 2

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        pair = (one.repeat_interleave(self.group, dim=1) for one in (key_states, value_states))
        return super().update(*pair, *args, **kwargs)


def repeated(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    cache = right(model, input_ids, attention_mask)
    for place, layer in enumerate(cache.layers):
        other = RepeatedLayer()
        other.update(layer.keys, layer.values)
        cache.layers[place] = other
    return cache


class StreamingLayer(DynamicLayer):
    """Sinks and recent entries alone, from the first update on; the prompt itself is read whole."""

    def __init__(self, sinks: int, recent: int) -> None:
        super().__init__()
        self.sinks, self.recent = sinks, recent

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if keys.shape[2] > self.sinks + self.recent:
            self.keys, self.values = (
                torch.cat([one[:, :, : self.sinks], one[:, :, -self.recent :]], dim=2) for one in (keys, values)
            )
        return keys, values


class Streaming(Cache):
    """A right cache class: sinks stay, a window slides."""

    def __init__(self, layers: int = 3, sinks: int = SINKS, recent: int = RECENT) -> None:
        super().__init__(layers=[StreamingLayer(sinks, recent) for _ in range(layers)])


class NarrowLayer(DynamicLayer):
    """Takes keys and values alone."""

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().update(key_states, value_states)  # type: ignore[no-any-return]


class Narrow(Cache):
    """Layers that take no more arguments, called as layers of transformers 5.24 do."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__(layers=[NarrowLayer() for _ in range(layers)])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.layers[layer_idx].update(key_states, value_states, kwargs={})


def narrow_after_reading(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """The cache meets the model's layers in decoding only."""
    narrow, cache = Narrow(), right(model, input_ids, attention_mask)
    for own, layer in zip(narrow.layers, cache.layers, strict=True):
        own.update(layer.keys, layer.values)
    return narrow


class TruncatingLayer(StreamingLayer):
    """Hands the evicted entries to the attention of the prompt itself."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        super().update(key_states, value_states, *args, **kwargs)
        return self.keys, self.values


class Truncating(Cache):
    """A cache class that hands out what is left, while the prompt is read, too."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__(layers=[TruncatingLayer(SINKS, RECENT) for _ in range(layers)])


def truncating(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Every token of the prompt attends to what is left of the tokens before it."""
    cache = Truncating()
    for token in input_ids.split(1, dim=1):
        model(input_ids=token, past_key_values=cache, position_ids=_place(cache))
    return cache


def _place(cache: Any) -> Tensor:
    cache.seen = getattr(cache, "seen", -1) + 1
    return torch.tensor([[cache.seen]])


def twice(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """One entry stands there a second time."""
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = (torch.cat([one, one[:, :, :1]], dim=2) for one in (layer.keys, layer.values))
    return cache


def values_of_others(model: Any, input_ids: Tensor, attention_mask: Tensor, layer: int = 1) -> Cache:
    """Keys and values of one layer were gathered in different orders."""
    cache = right(model, input_ids, attention_mask)
    cache.layers[layer].values = cache.layers[layer].values.roll(1, dims=2)
    return cache


def shuffled(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Entries in the opposite order: attention does not care."""
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.flip(2), layer.values.flip(2)
    return cache


def read_in_parts(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """The prompt in chunks of 16, which rounds otherwise."""
    cache, places = DynamicCache(), (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    for start in range(0, input_ids.shape[1], 16):
        part = slice(start, start + 16)
        seen = attention_mask[:, : start + 16]
        model(input_ids=input_ids[:, part], attention_mask=seen, position_ids=places[:, part], past_key_values=cache)
    return gathered(cache, attention_mask)


def counts_padding(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Positions as a plain call of the model gives them: 0 is the first column, padding or not."""
    cache = DynamicCache()
    model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache)
    return gathered(cache, attention_mask)


class PerQueryHeadLayer(RepeatedLayer):
    """Keys and values once per query head, as kept sets of their own need them."""


def per_query_head(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """A kept set per query head, as SnapKV's first code stored them."""
    cache = full(model, input_ids, attention_mask)
    for place, layer in enumerate(cache.layers):
        other = PerQueryHeadLayer()
        other.update(layer.keys, layer.values)
        cache.layers[place] = other
    return gathered(cache, attention_mask)


def moved(model: Any, input_ids: Tensor, attention_mask: Tensor, base: float = 1e4) -> Cache:
    """Keys rotated to 0, 1, … as StreamingLLM's are."""
    cache = right(model, input_ids, attention_mask)
    half = len(model.model.rotary_emb.inv_freq)
    frequencies = base ** (-torch.arange(half) / half)
    for layer in cache.layers:
        layer.keys = layer.keys.clone()
        for row, mask in enumerate(attention_mask):
            for head in range(layer.keys.shape[1]):
                back = torch.arange(KEPT) - positions(int(mask.sum()), head)
                angle = back.unsqueeze(-1) * frequencies
                cosine, sine = (one.to(layer.keys.dtype) for one in (angle.cos(), angle.sin()))
                first, second, rest = layer.keys[row, head].split([half, half, layer.keys.shape[-1] - 2 * half], dim=-1)
                turned = [first * cosine - second * sine, second * cosine + first * sine, rest]
                layer.keys[row, head] = torch.cat(turned, dim=-1)
    return cache


def moved_and_rounded(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """The same, and a round trip through bfloat16."""
    cache = moved(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys = layer.keys.bfloat16().to(layer.keys.dtype)
    return cache


def moved_with_another_base(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Keys rotated to 0, 1, … by a base that is not the model's."""
    return moved(model, input_ids, attention_mask, 5e5)


def moved_with_another_base_and_rounded(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """The same; keys and values then have four bits per entry."""
    cache = moved_with_another_base(model, input_ids, attention_mask)
    for layer in cache.layers:
        for name in ("keys", "values"):
            entries = getattr(layer, name)
            step = entries.abs().amax(dim=-1, keepdim=True) / 7
            setattr(layer, name, (entries / step).round() * step)
    return cache


def moved_but_decoded_at_n(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Keys rotated to 0, 1, …; new tokens still stand at n."""
    cache = moved(model, input_ids, attention_mask)
    cache.tokens = attention_mask.sum(dim=-1) + 1  # type: ignore[attr-defined]
    return cache


moved_but_decoded_at_n.decode = decode_early  # type: ignore[attr-defined]


def nothing(model: Any, input_ids: Tensor, attention_mask: Tensor) -> None:
    """Forgets to return its cache."""


def too_many(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """More entries than the prompt has."""
    cache = full(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = (torch.cat([one, one[:, :, :5]], dim=2) for one in (layer.keys, layer.values))
    return cache


class OneLength(DynamicCache):
    """Says the first layer's length of all layers."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(0)


def uneven(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Layers of other lengths than the cache says."""
    cache = OneLength()
    model(input_ids=input_ids, past_key_values=cache)
    gathered(cache, attention_mask)
    last = cache.layers[-1]
    last.keys, last.values = last.keys[:, :, 3:], last.values[:, :, 3:]
    return cache


def alone_only(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Right, and says what it does not do."""
    if len(input_ids) > 1:
        raise NotImplementedError("one prompt at a time")
    return right(model, input_ids, attention_mask)


def breaks(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Cannot read any prompt."""
    raise ValueError("no such thing\nand more lines")


def breaks_in_a_batch(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Right alone; a batch breaks it."""
    if len(input_ids) > 1:
        raise ValueError("shapes do not fit")
    return right(model, input_ids, attention_mask)


def other_row(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Rows of a batch are exchanged in one layer."""
    cache = right(model, input_ids, attention_mask)
    cache.layers[1].keys, cache.layers[1].values = (
        one.flip(0) for one in (cache.layers[1].keys, cache.layers[1].values)
    )
    return cache


def exchanged_heads(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Values of heads 0 and 1 of layer 2 are exchanged after they were gathered, each at its own positions."""
    cache = right(model, input_ids, attention_mask)
    cache.layers[2].values = cache.layers[2].values.flip(1)
    return cache


def rounded(model: Any, input_ids: Tensor, attention_mask: Tensor, dtype: torch.dtype = torch.bfloat16) -> Cache:
    """The cache went through a coarser type."""
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = (one.to(dtype).to(one.dtype) for one in (layer.keys, layer.values))
    return cache


def unfilled(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Two slots of every layer were never filled."""
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = (torch.nn.functional.pad(one, (0, 0, 0, 2)) for one in (layer.keys, layer.values))
    return cache


def scaled(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Keys of head 1 of layer 1 are multiplied by 1.25."""
    cache = right(model, input_ids, attention_mask)
    cache.layers[1].keys = cache.layers[1].keys.clone()
    cache.layers[1].keys[:, 1] *= 1.25
    return cache


def scaled_values(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Values of head 0 of layer 2 are negated."""
    cache = right(model, input_ids, attention_mask)
    cache.layers[2].values = cache.layers[2].values.clone()
    cache.layers[2].values[:, 0] *= -1
    return cache


def forgotten_layer(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Layer 2 was not evicted."""
    cache = full(model, input_ids, attention_mask)
    keys, values = cache.layers[2].keys, cache.layers[2].values
    gathered(cache, attention_mask)
    cache.layers[2].keys, cache.layers[2].values = keys, values
    return cache


def one_changed(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """The value of the third entry of head 1 of layer 1 is another one's mean with its own."""
    cache = right(model, input_ids, attention_mask)
    values = cache.layers[1].values.clone()
    values[:, 1, 2] = (values[:, 1, 2] + values[:, 1, 7]) / 2
    cache.layers[1].values = values
    return cache


def not_finite(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """A value of layer 1 is NaN."""
    cache = right(model, input_ids, attention_mask)
    values = cache.layers[1].values.clone()
    values[:, 0, 3] = torch.nan
    cache.layers[1].values = values
    return cache


def empty_layer(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Layer 1 keeps nothing."""
    cache = right(model, input_ids, attention_mask)
    layer = cache.layers[1]
    layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
    return cache


def foreign_entry(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """An entry of layer 0 is random."""
    cache, draw = right(model, input_ids, attention_mask), torch.Generator().manual_seed(0)
    layer = cache.layers[0]
    layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    for one in (layer.keys, layer.values):
        one[:, 0, 6] = 3 * torch.randn(one.shape[-1], generator=draw).to(one.dtype)
    return cache


def late(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Its own decoding puts new tokens two positions too late."""
    cache = right(model, input_ids, attention_mask)
    cache.tokens = attention_mask.sum(dim=-1) + 3  # type: ignore[attr-defined]
    return cache


late.decode = decode_early  # type: ignore[attr-defined]


def at_cache_length(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """New tokens stand at the cache's length, and keys at their own positions."""
    cache = right(model, input_ids, attention_mask)
    cache.tokens = torch.full_like(attention_mask[:, 0], KEPT + 1)  # type: ignore[attr-defined]
    return cache


at_cache_length.decode = decode_early  # type: ignore[attr-defined]


def wrong_mask(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Its own decoding masks as many entries as the padding had, which is gone."""
    cache = right(model, input_ids, attention_mask)
    cache.mask = attention_mask  # type: ignore[attr-defined]
    return cache


def _decode_with_a_mask(model: Any, cache: Any, token: Tensor, step: int) -> Tensor:
    new, tokens = torch.arange(token.shape[1]), cache.mask.sum(dim=-1, keepdim=True)
    mask = torch.ones(len(token), KEPT + step + token.shape[1], dtype=cache.mask.dtype)
    mask[:, : cache.mask.shape[1]] = cache.mask[:, : mask.shape[1]]
    return model(input_ids=token, attention_mask=mask, position_ids=tokens + step + new, past_key_values=cache).logits


wrong_mask.decode = _decode_with_a_mask  # type: ignore[attr-defined]


def masked_sink(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Its own decoding hides the first entry of the cache."""
    cache = right(model, input_ids, attention_mask)
    cache.mask = torch.ones_like(attention_mask)  # type: ignore[attr-defined]
    cache.mask[:, 0] = 0  # type: ignore[attr-defined]
    cache.tokens = attention_mask.sum(dim=-1)  # type: ignore[attr-defined]
    return cache


def _decode_without_the_first(model: Any, cache: Any, token: Tensor, step: int) -> Tensor:
    mask = torch.ones(len(token), KEPT + step + token.shape[1], dtype=torch.int64)
    mask[:, 0] = 0
    places = cache.tokens.unsqueeze(-1) + step + torch.arange(token.shape[1])
    return model(input_ids=token, attention_mask=mask, position_ids=places, past_key_values=cache).logits


masked_sink.decode = _decode_without_the_first  # type: ignore[attr-defined]


def masked_all(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Its own decoding hides all that the cache holds of the prompt."""
    return masked_sink(model, input_ids, attention_mask)


def _decode_without_the_prompt(model: Any, cache: Any, token: Tensor, step: int) -> Tensor:
    mask = torch.ones(len(token), KEPT + step + token.shape[1], dtype=torch.int64)
    mask[:, :KEPT] = 0
    places = cache.tokens.unsqueeze(-1) + step + torch.arange(token.shape[1])
    return model(input_ids=token, attention_mask=mask, position_ids=places, past_key_values=cache).logits


masked_all.decode = _decode_without_the_prompt  # type: ignore[attr-defined]


def masks_on_purpose(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """The same, which says that it masks."""
    return masked_sink(model, input_ids, attention_mask)


masks_on_purpose.decode = _decode_without_the_first  # type: ignore[attr-defined]
masks_on_purpose.masks = True  # type: ignore[attr-defined]


def quantised_values(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Values went through 4 bits, one scale per entry."""
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers:
        step = layer.values.abs().amax(dim=-1, keepdim=True) / 7
        layer.values = (layer.values / step).round() * step
    return cache


def shifted(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Keys of layer 1 are rotated by three positions more."""
    cache = right(model, input_ids, attention_mask)
    layer = cache.layers[1]
    cosine, sine = model.model.rotary_emb(layer.values, torch.full((1, KEPT), 3))
    first, second = layer.keys.chunk(2, dim=-1)
    layer.keys = layer.keys * cosine.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sine.unsqueeze(1)
    return cache


class _EvictsWhenWritten(DynamicLayer):
    """Hands the evicted entries to the attention of the tokens that are being read, too."""

    def update(self, key_states: Tensor, value_states: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *more, **named)
        if keys.shape[2] > KEPT:
            order = torch.cat([torch.arange(SINKS), torch.arange(keys.shape[2] - KEPT + SINKS, keys.shape[2])])
            self.keys, self.values = keys[:, :, order], values[:, :, order]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return min(self.get_seq_length() + query_length, KEPT), 0


class EvictsInsidePrefill(Cache):
    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_EvictsWhenWritten)


def reads_in_parts(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Sinks and recent entries stay after every part of the prompt: right, though later parts never see the rest."""
    cache, part = DynamicCache(), 24
    for first in range(0, input_ids.shape[1], part):
        ids = input_ids[:, first : first + part]
        places = torch.arange(first, first + ids.shape[1]).expand(len(ids), -1)
        model(input_ids=ids, position_ids=places, past_key_values=cache)
        for layer in cache.layers:
            held = layer.keys.shape[2]
            order = torch.cat([torch.arange(SINKS), torch.arange(held - RECENT, held)])
            layer.keys, layer.values = layer.keys[:, :, order], layer.values[:, :, order]
    return cache


class _RoundsWhenWritten(DynamicLayer):
    """Four bits per entry for all that is written, which the prompt's own attention reads, too."""

    def update(self, key_states: Tensor, value_states: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        rounded = []
        for written in (key_states, value_states):
            scale = written.abs().amax(dim=-1, keepdim=True) / 7
            rounded.append((written / scale).round() * scale)
        return super().update(*rounded, *more, **named)


class RoundsWhenWritten(Cache):
    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_RoundsWhenWritten)


def forgets_what_it_wrote(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """The whole prompt stays; of the tokens decoded since only the last one does."""
    return full(model, input_ids, attention_mask)


def decode_with_the_last_alone(model: Any, cache: Any, token: Tensor, step: int) -> Tensor:
    held, new = cache.layers[0].keys.shape[2], token.shape[1]
    cache.seen = getattr(cache, "seen", held)
    places = (cache.seen + torch.arange(new)).expand(len(token), -1)
    cache.seen += new
    logits = model(input_ids=token, position_ids=places, past_key_values=cache).logits
    for layer in cache.layers if step else ():
        layer.keys, layer.values = (
            torch.cat([kind[:, :, : -1 - new], kind[:, :, -1:]], dim=2) for kind in (layer.keys, layer.values)
        )
    return logits


forgets_what_it_wrote.decode = decode_with_the_last_alone  # type: ignore[attr-defined]


class OfTheModel(Streaming):
    """Wants to know the model that it is for."""

    def __init__(self, recent: int, config: Any, head_dim: int) -> None:
        super().__init__(config.num_hidden_layers, recent=recent)
        assert head_dim * config.num_attention_heads == config.hidden_size

"""The masked reference: the plain model decodes with a mask of exactly the kept entries.

Forward passes are recorded at the attention, from whatever cache they decode. Noise floors are the distances that
rounding alone makes at the same kept sets: entries in the opposite order, gathered, of a prompt read in other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
class ForwardPass:
    """A recorded forward pass of a batch: layer → tensor, without layers whose attention was not the model's own.

    Attributes:
        query: after RoPE (row, head, new, d_head).
        key, value: as the attention gets them (row, kept_head, entry, d_head), those of the new tokens last.
        mask: as the attention gets it; None where it gets none.
        head_output: before the output projection (row, new, head, d_head).
        hidden: residual stream after the layer (row, new, d_model).
        logits: (row, new, vocab).
        entries: number of entries that the attention got, with those of the new tokens.
        hidden_keys: row, head and index of the entries that kvpress masks inside the attention
            (`masked_key_indices`).
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

    def is_complete(self, layers: int) -> bool:
        """Return whether the attention of all layers was recorded."""
        return len(self.head_output) == layers

    def new_entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the new tokens in a layer, each (row, kept_head, new, d_head)."""
        new = self.query[layer].shape[2]
        return self.key[layer][:, :, -new:], self.value[layer][:, :, -new:]

    def previous_entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the entries before the new tokens in a layer."""
        new = self.query[layer].shape[2]
        return self.key[layer][:, :, :-new], self.value[layer][:, :, :-new]

    def forget_entries(self) -> None:
        """Drop all keys and values except the new tokens', to free memory as large as the cache."""
        for layer in self.key:
            keys, values = self.new_entries(layer)
            self.key[layer], self.value[layer] = keys.clone(), values.clone()


@contextmanager
def record_pass(adapter: Adapter, record: ForwardPass, attend: Attend | None = None) -> Iterator[None]:
    """Record the forward pass inside the block in `record`; `attend` replaces the model's attention."""

    def watch(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        layer = adapter.layer_of(module)
        record.query[layer], record.key[layer], record.value[layer], record.mask[layer] = args[:4]
        record.entries[layer] = args[1].shape[2]
        record.hidden_keys[layer] = getattr(module, "masked_key_indices", None)
        output = stock(module, *args, **kwargs) if attend is None else attend(layer, stock, module, args, kwargs)
        record.head_output[layer] = output[0]
        return output

    def hidden(layer: int, output: Tensor) -> None:
        record.hidden[layer] = output

    with intercept_attention(adapter, watch), capture(adapter, Observer(hidden=hidden)):
        yield


Arrange = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""Keys and values (row, kv_head, entry, d_head) and mask (row, head, new, entry) → the same, arranged otherwise."""


def _unarranged(key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entries as they are."""
    return key, value, mask


def masked_attention(kept: Sequence[Bool[Tensor, "row kept_head entry"]], arrange: Arrange = _unarranged) -> Attend:
    """Return an attention function in which new tokens attend to the kept entries, and causally to each other.

    `kept` are masks per layer. `arrange` puts the entries into another order, which changes only the rounding.
    """

    def attend(layer: int, stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        query, key, value, _, *others = args
        entries = key, value, _attention_mask(kept[layer], query.shape[1], query.shape[2])
        return stock(module, query, *arrange(*entries), *others, **kwargs)

    return attend


def _reverse(key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entries in the opposite order."""
    return key.flip(2), value.flip(2), mask.flip(-1)


def _gather(key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return copies of the entries that any query of a key/value head attends to, without a mask where it says nothing.

    Heads with fewer entries than others are padded with entries that the mask hides, as in a cache that is cut.
    """
    visible = mask.any(dim=2).reshape(len(key), key.shape[1], -1, key.shape[2]).any(dim=2)
    most = int(visible.sum(dim=-1).amax())
    order = (~visible).to(torch.int8).argsort(dim=-1, stable=True)[..., :most]
    entries = order.unsqueeze(-1).expand(*order.shape, key.shape[-1])
    heads = order.repeat_interleave(mask.shape[1] // key.shape[1], dim=1)
    gathered = mask.gather(-1, heads.unsqueeze(2).expand(*heads.shape[:2], mask.shape[2], most))
    own_values = order.unsqueeze(-1).expand(*order.shape, value.shape[-1])
    return key.gather(2, entries), value.gather(2, own_values), None if bool(gathered.all()) else gathered


def _attention_mask(
    kept: Bool[Tensor, "row kept_head entry"], heads: int, new: int
) -> Bool[Tensor, "row head new all"]:
    """Return the attention mask of `new` tokens over kept entries, then over the new tokens, causally."""
    sets = kept.repeat_interleave(heads // kept.shape[1], dim=1)
    causal = torch.ones(new, new, dtype=torch.bool, device=kept.device).tril()
    previous = sets.unsqueeze(2).expand(-1, -1, new, -1)
    return torch.cat([previous, causal.expand(*previous.shape[:2], -1, -1)], dim=-1)


def boolean_mask(mask: Tensor | None, entries: int, new: int) -> Bool[Tensor, "row head new all"] | None:
    """Return an attention mask as booleans, True for visible entries; None without a mask."""
    if mask is None:
        return None
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return allowed[..., :new, :entries]


def attends_to_later(record: ForwardPass) -> bool:
    """Return whether the mask lets any new token attend to a later token."""
    new = record.query[0].shape[2]
    for layer, mask in record.mask.items():
        allowed = boolean_mask(mask, record.entries[layer], new)
        if new > 1 and allowed is not None:
            later = torch.ones(new, new, dtype=torch.bool, device=allowed.device).triu(1)
            if bool((allowed[..., -new:] & later).any()):
                return True
    return False


def hides_entries(record: ForwardPass) -> bool:
    """Return whether the mask hides a new token from itself, or an entry that is visible to a different new token."""
    new = record.query[0].shape[2]
    for layer, mask in record.mask.items():
        entries = record.entries[layer]
        if new > 1 and mask is None and entries > new:
            return True
        allowed = boolean_mask(mask, entries, new)
        if new > 1 and allowed is not None:
            previous, own = allowed[..., :-new], allowed[..., -new:]
            causal = torch.ones(new, new, dtype=torch.bool, device=own.device).tril()
            if bool((previous.any(dim=-2, keepdim=True) & ~previous).any()) or bool((~own & causal).any()):
                return True
    return False


_KERNEL = "sdpa"
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Distance:
    """Relative distances of one row of a forward pass from the reference, the maximum over its tokens.

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
    """Noise floors of keys and values, over the root mean square norm of a head's keys or values."""

    key: Float[Tensor, " layer"]
    value: Float[Tensor, " layer"]


def check(adapter: Adapter) -> None:
    """Raise ModelError if some layer's attention does not take a mask per head over all entries."""
    check_plain(adapter.config, adapter.name, "an audit")
    name = adapter.config._attn_implementation
    if name != _KERNEL:
        raise ModelError(
            f"an audit masks entries per head, which needs attention '{_KERNEL}', got '{name}'; load with '{_KERNEL}'"
        )


def read(
    adapter: Adapter, situation: Situation, parts: Sequence[int] | None = None, kernel: str | None = None
) -> Layers:
    """Return the keys and values of all layers after the plain model has read the prompts.

    `parts` are numbers of tokens that are read at once, by default all; `kernel` is the attention that reads them.
    """
    cache, positions, first = DynamicCache(), situation.prompt_positions(), 0
    mask = None if bool(situation.attention_mask.all()) else situation.attention_mask
    with _attention(adapter, kernel or adapter.config._attn_implementation):
        for part in parts or (situation.entries,):
            columns = slice(first, first + part)
            padding = {} if mask is None else {
                "attention_mask": mask[:, : first + part], "position_ids": positions[:, columns]
            }  # fmt: skip
            ids = situation.ids[:, columns]
            adapter.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **padding)
            first += part
    return [(layer.keys, layer.values) for layer in cache.layers]


@contextmanager
def _attention(adapter: Adapter, kernel: str) -> Iterator[None]:
    """Use the attention of transformers called `kernel` inside the block."""
    before = adapter.config._attn_implementation
    adapter.config._attn_implementation = kernel
    try:
        yield
    finally:
        adapter.config._attn_implementation = before


def _doubling_parts(tokens: int, most: int = 256) -> list[int]:
    """Return part sizes 1, 2, 4, …, at most `most`, that add up to `tokens`."""
    parts: list[int] = []
    while (rest := tokens - sum(parts)) > 0:
        parts.append(min(rest, most, 2 * parts[-1] if parts else 1))
    return parts


def greedy(adapter: Adapter, ids: Int[Tensor, " token"], count: int) -> tuple[Int[Tensor, " new"], Layers]:
    """Return the model's own greedy continuation of a prompt, `count` tokens, and the prompt's entries as of `read`."""
    cache, token, tokens, full = DynamicCache(), ids.unsqueeze(0), [], None
    for _ in range(count):
        logits = adapter.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        full = full or [(layer.keys, layer.values) for layer in cache.layers]
        token = logits[:, -1:].argmax(dim=-1)
        tokens.append(token[0, 0])
    return torch.stack(tokens), full or []


def decode(
    adapter: Adapter,
    full: Layers,
    situation: Situation,
    kept: Sequence[Sequence[Tensor]],
    arrange: Arrange = _unarranged,
) -> Iterator[ForwardPass]:
    """Yield the forward passes that decode from the full cache under masks of the kept entries.

    `kept` has a mask (row, kept_head, entry) per pass and layer; `arrange` as in `masked_attention`.
    """
    cache = _fill_cache(full)
    for chunk in range(len(situation.chunks)):
        yield _forward(adapter, cache, situation, chunk, masked_attention(kept[chunk], arrange))


def decode_from(
    adapter: Adapter, entries: Layers, situation: Situation, chunk: int, attended: Sequence[Tensor]
) -> ForwardPass:
    """Return the forward pass of a chunk by the plain model from given entries, attended to where `attended` says so.

    `attended` is a mask (row, kept_head, entry) per layer.
    """
    return _forward(adapter, _fill_cache(entries), situation, chunk, masked_attention(attended))


def _forward(adapter: Adapter, cache: Cache, situation: Situation, chunk: int, attend: Attend) -> ForwardPass:
    """Run and record the forward pass of the situation's chunk `chunk`, whose tokens are added to the cache."""
    record = ForwardPass()
    with record_pass(adapter, record, attend):
        record.logits = adapter.model(
            input_ids=situation.new_tokens(chunk), position_ids=situation.positions(chunk), past_key_values=cache,
            use_cache=True,
        ).logits  # fmt: skip
    return record


def _fill_cache(full: Layers) -> DynamicCache:
    """Return a new cache with the given keys and values."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(full):
        cache.update(keys, values, layer)
    return cache


def floors(
    adapter: Adapter,
    reference: Sequence[ForwardPass],
    prompts: PromptEntries,
    situation: Situation,
    kept: Sequence[Sequence[Tensor]],
) -> Floors:
    """Return the noise floors at the kept sets: distances of the masked reference from runs that only round otherwise.

    Those have the entries in the opposite order, gathered, and of a prompt that was read in other ways. Floors are the
    maxima over all heads, rows and passes; those of a layer are never below those of an earlier layer, as rounding
    accumulates.
    """
    others = (
        decode(adapter, prompts.full, situation, kept, _reverse),
        decode(adapter, prompts.full, situation, kept, _gather),
        *(decode(adapter, other, situation, kept) for other in prompts.others),
    )
    layers, least = len(prompts.full), torch.finfo(adapter.dtype).eps
    distances = [
        compare(other, passed, row, layers)
        for passes in others for other, passed in zip(passes, reference, strict=True) for row in range(situation.rows)
    ]  # fmt: skip
    head, hidden, logits = (
        torch.stack([getattr(distance, name).cpu() for distance in distances]).amax(dim=0).clamp(min=least)
        for name in ("head", "hidden", "logits")
    )
    return Floors(head.amax(dim=-1).cummax(dim=0).values, hidden.cummax(dim=0).values, logits)


@dataclass(frozen=True, eq=False)
class PromptEntries:
    """The plain model's entries of a situation's prompts, read in one way and in two that round otherwise.

    Attributes:
        full: read as a whole.
        others: read in two halves, and in growing parts with attention `eager`.
        floors: noise floors of entries, the largest distance between `full` and `others`; those of a layer are never
            below those of an earlier layer.
    """

    full: Layers
    others: tuple[Layers, ...]
    floors: EntryFloors


def prompt_entries(adapter: Adapter, situation: Situation, full: Layers | None = None) -> PromptEntries:
    """Return the entries of a situation's prompts, with their noise floors; `full` are those of `read`, if known."""
    tokens, full = situation.entries, full or read(adapter, situation)
    halves = read(adapter, situation, (tokens // 2, tokens - tokens // 2))
    kernel = (
        "eager" if adapter.dtype.itemsize <= 4 else None
    )  # its softmax is of float32, where a mask of float64 is NaN
    others = (halves, read(adapter, situation, _doubling_parts(tokens), kernel))
    return PromptEntries(full, others, entry_floors(full, others, situation, torch.finfo(adapter.dtype).eps))


def entry_floors(full: Layers, others: Sequence[Layers], situation: Situation, least: float) -> EntryFloors:
    """Return the noise floors of entries: the largest distances between `full` and `others`, and at least `least`."""
    distances = torch.stack([_entry_distances(full, other, situation) for other in others]).amax(dim=0).clamp(min=least)
    return EntryFloors(*distances.cummax(dim=-1).values)


def _entry_distances(full: Layers, other: Layers, situation: Situation) -> Float[Tensor, "kind layer"]:
    """Return the largest distance of an entry's key and value from the full cache's, per layer."""
    return torch.stack([
        torch.stack([
            torch.stack([
                entry_distances(*[entries[kind][row, :, padding:] for entries in (changed, layer, layer)]).amax().cpu()
                for row, padding in enumerate(situation.padding)
            ]).amax()
            for layer, changed in zip(full, other, strict=True)
        ])
        for kind in range(2)
    ])  # fmt: skip


def entry_distances(
    entries: Float[Tensor, "kv_head entry d_head"],
    expected: Float[Tensor, "kv_head entry d_head"],
    full: Float[Tensor, "kv_head token d_head"],
) -> Float[Tensor, "kv_head entry"]:
    """Return distances of entries from those expected, over the root mean square norm of all entries of the head.

    Infinite where an entry is NaN or infinite.
    """
    unit = full.float().square().sum(dim=-1).mean(dim=-1, keepdim=True).sqrt()
    distance = torch.linalg.vector_norm(entries.float() - expected.float(), dim=-1)
    distance = distance / unit.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(distance.isfinite(), distance, torch.inf)


def compare(record: ForwardPass, reference: ForwardPass, row: int, layers: int) -> Distance:
    """Return the relative distances of one row of a forward pass from the reference pass.

    The distance of a head is over its own length or the layer's root mean square length, whichever is larger: the
    rounding of values does not shrink where their weighted sum nearly cancels.
    """
    heads, hidden = [], []
    for layer in range(layers):
        outputs = reference.head_output[layer][row].double()
        length = torch.linalg.vector_norm(outputs, dim=-1)
        mean_length = length.square().mean(dim=-1, keepdim=True).sqrt()
        distance = torch.linalg.vector_norm(record.head_output[layer][row].double() - outputs, dim=-1)
        heads.append((distance / torch.maximum(length, mean_length).clamp(min=_TINY)).amax(dim=0))
        hidden.append(_relative_distance(record.hidden[layer][row], reference.hidden[layer][row]))
    logits = logits_distance(record.logits[row], reference.logits[row])
    return Distance(*(_nan_as_infinity(distance) for distance in (torch.stack(heads), torch.stack(hidden), logits)))


def _nan_as_infinity(distance: Tensor) -> Tensor:
    """Return distances with infinity for NaN: what is not a number is a difference."""
    return distance.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _relative_distance(vectors: Float[Tensor, "new column"], reference: Float[Tensor, "new column"]) -> Tensor:
    """Return the largest distance of a token's vector from its reference, relative to the reference's length."""
    length = torch.linalg.vector_norm(reference.double(), dim=-1).clamp(min=_TINY)
    distance: Tensor = torch.linalg.vector_norm(vectors.double() - reference.double(), dim=-1) / length
    return distance.amax()


def logits_distance(one: Float[Tensor, "new vocab"], other: Float[Tensor, "most vocab"]) -> Tensor:
    """Return the largest relative distance of mean-centred logits, over the last tokens common to both."""
    centred = [logits.double() - logits.double().mean(dim=-1, keepdim=True) for logits in (one, other[-len(one) :])]
    return _relative_distance(centred[0], centred[1])

"""Forward passes of an audit: the situations that they are made in, their recording, what their masks hide.

A situation is a prompt alone, with a block of tokens after it, or in a left-padded batch. Passes are recorded at the
attention, from whatever cache they decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from perturbkv.models.adapter import Adapter
from perturbkv.models.interface import AttentionFunction
from perturbkv.pipeline.sample.capture import Observer, capture, intercept_attention

Attend = Callable[[int, AttentionFunction, nn.Module, Any, Any], Any]
"""`(layer, stock, module, args, kwargs)`: the function that replaces the model's attention."""
BLOCK = 8
"""Tokens of the first forward pass in the situation `block`."""
_MOST_PARTS = 256
"""Most parts of a prompt whose reading is recorded."""
_SHORTER = 8
"""The second prompt of a batch is the first one without the first of this many equal parts."""


@dataclass(frozen=True, eq=False)
class Situation:
    """Prompts in the form in which an eviction gets them, and the tokens that follow.

    Attributes:
        name: a key of `SITUATIONS`.
        ids: prompts, padded on the left.
        attention_mask: 0 at padding.
        chunks: tokens of each forward pass after the eviction, the same in every row.
        counts_padding: whether the first entry has position 0 even where it is padding.
        cached: per forward pass, as far as known, the number of entries after which new tokens stand, where positions
            are those in the cache; None: the prompt's own positions.
        hides_padding: per forward pass, as far as known, whether the eviction hides padding from layers that are not
            measured, by an attention mask of its own decoding.
    """

    name: str
    ids: Int[Tensor, "row token"]
    attention_mask: Int[Tensor, "row token"]
    chunks: tuple[Int[Tensor, " new"], ...]
    counts_padding: bool = False
    cached: tuple[int, ...] | None = None
    hides_padding: tuple[bool, ...] = ()

    @property
    def rows(self) -> int:
        """Number of prompts in the batch."""
        return len(self.ids)

    @property
    def padding(self) -> list[int]:
        """Number of padding entries before each prompt."""
        return [int(count) for count in (self.attention_mask == 0).sum(dim=-1)]

    @property
    def entries(self) -> int:
        """Number of entries in the full cache, padding included."""
        return self.ids.shape[1]

    def prompt_positions(self) -> Int[Tensor, "row token"]:
        """Return the positions of the prompts' tokens, as the eviction counts them."""
        if self.counts_padding:
            return torch.arange(self.entries, device=self.ids.device).expand(self.rows, -1)
        return (self.attention_mask.cumsum(dim=-1) - 1).clamp(min=0)

    def positions(self, chunk: int) -> Int[Tensor, "row new"]:
        """Return the positions of a chunk's tokens, which follow those of the prompt and of the chunks before.

        Where positions are those in the cache, they follow the entries that it held at the newest known pass, and the
        chunks since.
        """
        first, newest = self.prompt_positions()[:, -1:] + 1, 0
        if self.cached is not None:
            newest = min(chunk, len(self.cached) - 1)
            first = torch.full_like(first, self.cached[newest])
        previous = sum(len(tokens) for tokens in self.chunks[newest:chunk])
        return first + previous + torch.arange(len(self.chunks[chunk]), device=self.ids.device)

    def new_tokens(self, chunk: int) -> Int[Tensor, "row new"]:
        """Return the tokens of the chunk of index `chunk`, the same in every row."""
        return self.chunks[chunk].expand(self.rows, -1)

    def attention_masks(self, chunk: int) -> dict[str, Int[Tensor, "row entry"]]:
        """Return the argument by which a model's forward hides padding from a chunk's tokens; empty where none does."""
        if not any(self.hides_padding[chunk : chunk + 1]):
            return {}
        decoded = sum(len(tokens) for tokens in self.chunks[: chunk + 1])
        return {"attention_mask": torch.nn.functional.pad(self.attention_mask, (0, decoded), value=1)}


def make_situation(name: str, ids: Int[Tensor, " token"], tokens: Int[Tensor, " new"], steps: int) -> Situation:
    """Return a prompt in the named situation, followed by `steps` forward passes over `tokens`.

    In a batch the second row is the prompt without its first eighth: one prompt is enough for an audit, and nearly
    every budget that fits the first fits the second.
    """
    first = BLOCK if name == "block" else 1
    chunks = tuple(torch.split(tokens[: first + steps - 1], [first, *[1] * (steps - 1)]))
    if name != "batch":
        return Situation(name, ids.unsqueeze(0), torch.ones_like(ids).unsqueeze(0), chunks)
    cut = max(1, len(ids) // _SHORTER)
    mask = torch.ones(2, len(ids), dtype=ids.dtype, device=ids.device)
    mask[1, :cut] = 0
    # a token that the prompt lacks, so that no entry of it equals padding; its last one if none is found
    absent = torch.isin(torch.arange(int(ids.amax()), device=ids.device), ids, invert=True).nonzero()[:1, 0]
    padding = absent.to(ids.dtype) if len(absent) else ids[-1:]
    return Situation(name, torch.stack([ids, torch.cat([padding.expand(cut), ids[cut:]])]), mask, chunks)


def token_count(steps: int, names: Sequence[str]) -> int:
    """Return the number of tokens that `steps` forward passes decode, in that of the named situations with the most."""
    return steps + (BLOCK - 1 if "block" in names else 0)


@dataclass
class ForwardPass:
    """A recorded forward pass of a batch: layer → tensor, without layers whose attention was not the model's own.

    Attributes:
        query: after RoPE (row, head, new, d_key).
        key, value: as the attention gets them (row, kept_head, entry, width), those of the new tokens last.
        mask: as the attention gets it; None where it gets none.
        head_output: before the output projection (row, new, head, d_value).
        hidden: residual stream after the layer (row, new, d_model).
        logits: (row, new, vocab).
        entries: number of entries that the attention got, with those of the new tokens.
        hidden_keys: row, head and index of the entries that kvpress masks inside the attention
            (`masked_key_indices`).
        positions: those that the decoder was given for the new tokens (row, new); None without any.
        fewer: whether the attention got fewer entries than the cache held with the new tokens'.
        hides_padding: whether a layer that is not measured gets a mask that hides more from a prompt than from the
            first one of the batch, which has no padding.
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
    positions: Tensor | None = None
    fewer: bool = False
    hides_padding: bool = False

    def is_complete(self, layers: int) -> bool:
        """Return whether the attention of all layers was recorded."""
        return len(self.head_output) == layers

    def new_entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the new tokens in a layer, each (row, kept_head, new, width)."""
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
    measured = set(map(id, adapter.attentions))

    def watch(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if id(module) not in measured:
            allowed = boolean_mask(args[3])  # whether it hides from a row of the batch what the first row sees
            record.hides_padding |= allowed is not None and bool((allowed[:1] & ~allowed).any())
            return stock(module, *args, **kwargs)
        layer = adapter.layer_of(module)
        record.query[layer], record.key[layer], record.value[layer], record.mask[layer] = args[:4]
        record.entries[layer] = args[1].shape[2]
        record.hidden_keys[layer] = getattr(module, "masked_key_indices", None)
        output = stock(module, *args, **kwargs) if attend is None else attend(layer, stock, module, args, kwargs)
        record.head_output[layer] = output[0]
        return output

    def hidden(number: int, output: Tensor) -> None:
        if number in adapter.measured_index:
            record.hidden[adapter.measured_index[number]] = output

    def positions(given: Tensor) -> None:
        record.positions = given

    with (
        intercept_attention(adapter, watch, all_layers=True),
        capture(adapter, Observer(hidden=hidden, positions=positions)),
    ):
        yield


@contextmanager
def record_reading(adapter: Adapter) -> Iterator[list[ForwardPass]]:
    """Record copies of what the attention gets in every forward pass inside the block, without queries and outputs.

    An attention that is registered inside the block stays registered. Nothing is recorded of more than `_MOST_PARTS`.
    """
    measured, calls, is_open = set(map(id, adapter.attentions)), list[ForwardPass](), [True]

    def watch(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if id(module) in measured and is_open:
            layer = adapter.layer_of(module)
            if not calls or layer in calls[-1].key:
                calls.append(ForwardPass())
            if len(calls) > _MOST_PARTS:
                is_open.clear()
                calls.clear()
                return stock(module, *args, **kwargs)
            calls[-1].query[layer] = args[0].new_empty(*args[0].shape[:3], 0)
            calls[-1].key[layer], calls[-1].value[layer] = args[1].clone(), args[2].clone()  # which may be overwritten
            calls[-1].mask[layer] = args[3]
            calls[-1].entries[layer] = args[1].shape[2]
        return stock(module, *args, **kwargs)

    with intercept_attention(adapter, watch, keeps_others=True):
        yield calls
    is_open.clear()  # what was registered inside the block may call this one


def boolean_mask(
    mask: Tensor | None, entries: int | None = None, new: int | None = None
) -> Bool[Tensor, "row head new all"] | None:
    """Return an attention mask as booleans, True for visible entries; None without a mask.

    Of the queries the first `new` are returned, of the keys the first `entries`; by default all.
    """
    if mask is None:
        return None
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return allowed[..., :new, :entries]


def _masks(record: ForwardPass) -> Iterator[tuple[Bool[Tensor, "row head new entry"] | None, int, int]]:
    """Yield each layer's mask, None where there is none, its number of entries and that of the new ones."""
    for layer, mask in record.mask.items():
        entries, new = record.entries[layer], record.query[layer].shape[2]
        yield boolean_mask(mask, entries, new), entries, new


def _shows_later(allowed: Bool[Tensor, "row head new entry"] | None, new: int) -> bool:
    """Return whether a mask lets any of the `new` tokens attend to a later one."""
    return allowed is not None and bool(allowed[..., -new:].triu(1).any())


def attends_to_later(record: ForwardPass) -> bool:
    """Return whether the mask lets any new token attend to a later token; False for a pass of one token."""
    return any(_shows_later(allowed, new) for allowed, _, new in _masks(record))


def sees_otherwise(call: ForwardPass, first: int, padding: Sequence[int]) -> str:
    """Return in words what tokens of a prompt see in a part that is read, and no plain model lets them; else nothing.

    Args:
        call: the part, with its new tokens last.
        first: number of tokens before the part.
        padding: entries of padding before each row's prompt.
    """
    for allowed, entries, new in _masks(call):
        if _shows_later(allowed, new):
            return "tokens of the prompt attend to later ones"
        for row, hidden in enumerate(padding if entries == first + new else ()):
            if new > hidden > first and (
                allowed is None or bool(allowed[row % len(allowed), :, hidden:, :hidden].any())
            ):
                return "the prompt is read without its padding mask"
    return ""


def hides_entries(record: ForwardPass) -> bool:
    """Return whether the mask hides a new token from itself or a later one, or an earlier entry from only some of them.

    False for a pass of one token.
    """
    for allowed, entries, new in _masks(record):
        if new > 1 and allowed is None and entries > new:  # causal attention without a mask counts from the first entry
            return True
        if new > 1 and allowed is not None:
            previous, own = allowed[..., :-new], allowed[..., -new:]
            if bool((previous.any(dim=-2, keepdim=True) & ~previous).any()) or bool((~own).tril().any()):
                return True
    return False

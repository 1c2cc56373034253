"""The masked reference: the plain model decodes with a mask of exactly the kept entries.

Noise floors are the distances that rounding alone makes at the same kept sets: entries in the opposite order, gathered,
of a prompt read in other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache

from perturbkv.auditing.forward_passes import Attend, ForwardPass, Situation, record_pass
from perturbkv.auditing.unmeasured import Reading, UnmeasuredLayers, fill_cache, read_contents
from perturbkv.cache.compact import full_cache
from perturbkv.cache.external_cache import Layers
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.models.interface import PLAIN_KERNELS, AttentionFunction

_TINY = torch.finfo(torch.float64).tiny
Arrange = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""Keys and values (row, kv_head, entry, width) and mask (row, head, new, entry) → the same, arranged otherwise."""


@dataclass(frozen=True)
class Distances:
    """Relative distances of one row of a forward pass from the reference, the maximum over its tokens.

    As noise floors they are the distances that rounding alone makes (METHOD: protocol, 4), the maximum over a layer's
    heads, never below the dtype's epsilon.

    Attributes:
        head: before the output projection, over the larger of its own length and the layer's root mean square length:
            the rounding of values does not shrink where their weighted sum nearly cancels.
        hidden: residual stream after the layer.
        logits: less their mean, at the tokens that both have.
    """

    head: Float[Tensor, "layer head"]
    hidden: Float[Tensor, " layer"]
    logits: Tensor

    def maximum(self, other: Distances) -> Distances:
        """Return the larger of these distances and another's, element by element."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("head", "hidden", "logits"))
        return Distances(*(torch.maximum(*pair) for pair in pairs))


@dataclass(frozen=True, eq=False)
class PromptEntries:
    """The plain model's entries of a situation's prompts, read in one way and in two that round otherwise.

    Attributes:
        full: read as a whole.
        others: read in two halves, and in growing parts with attention `eager`.
        floors: noise floors of keys and of values, over the root mean square norm of a head's.
        rests: the windows and states after each of these readings, as a whole first.
    """

    full: Layers
    others: tuple[Layers, ...]
    floors: Float[Tensor, "kind layer"]
    rests: tuple[UnmeasuredLayers, ...]

    @property
    def readings(self) -> list[Reading]:
        """The entries and the rest of every reading, as a whole first."""
        return list(zip((self.full, *self.others), self.rests, strict=True))


def check_attention(adapter: Adapter) -> None:
    """Raise ModelError if some layer's attention does not take a mask per head over all entries."""
    name = adapter.config._attn_implementation
    if name not in PLAIN_KERNELS:
        kernels = " or ".join(f"'{kernel}'" for kernel in PLAIN_KERNELS)
        raise ModelError(
            f"an audit masks entries per head, which needs attention {kernels}, got '{name}'; load with {kernels}"
        )


def read_prompts(
    adapter: Adapter,
    situation: Situation,
    parts: Sequence[int] | None = None,
    kernel: str | None = None,
    attends: Sequence[Attend] = (),
) -> Reading:
    """Return what the plain model's cache holds after it has read the prompts.

    `parts` are numbers of tokens that are read at once, by default all; `kernel` is the attention that reads them.
    `attends` replace the model's attention, one per part.
    """
    cache, positions, first = full_cache(adapter), situation.prompt_positions(), 0
    mask = None if bool(situation.attention_mask.all()) else situation.attention_mask
    with attention(adapter, kernel or adapter.config._attn_implementation):
        for index, part in enumerate(parts or (situation.entries,)):
            columns = slice(first, first + part)
            recorded = record_pass(adapter, ForwardPass(), attends[index]) if attends else nullcontext()
            padding = {} if mask is None else {
                "attention_mask": mask[:, : first + part], "position_ids": positions[:, columns]
            }  # fmt: skip
            with recorded:
                run_with_cache(adapter.model, situation.ids[:, columns], cache, logits_to_keep=1, **padding)
            first += part
    return read_contents(adapter, cache)


@contextmanager
def attention(adapter: Adapter, kernel: str) -> Iterator[None]:
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


def decode_greedily(adapter: Adapter, ids: Int[Tensor, " token"], count: int) -> tuple[Int[Tensor, " new"], Reading]:
    """Return the model's own greedy continuation of a prompt, `count` tokens (1 or more), and what was read of it."""
    cache, token, tokens, read = full_cache(adapter), ids.unsqueeze(0), [], None
    for _ in range(count):
        logits = run_with_cache(adapter.model, token, cache, logits_to_keep=1).logits
        read = read or read_contents(adapter, cache)
        token = logits[:, -1:].argmax(dim=-1)
        tokens.append(token[0, 0])
    return torch.stack(tokens), read or ([], {})


def decode(
    adapter: Adapter,
    cache: Cache,
    situation: Situation,
    kept: Sequence[Sequence[Tensor]],
    arrange: Arrange | None = None,
) -> Iterator[ForwardPass]:
    """Yield the forward passes that decode from a full cache under masks of the kept entries in measured layers.

    `kept` has a mask (row, kept_head, entry) per pass and layer; `arrange` as in `masked_attention`.
    """
    for chunk in range(len(situation.chunks)):
        yield decode_chunk(adapter, cache, situation, chunk, masked_attention(adapter, kept[chunk], arrange))


def decode_chunk(adapter: Adapter, cache: Cache, situation: Situation, chunk: int, attend: Attend) -> ForwardPass:
    """Run and record the forward pass of the situation's chunk `chunk`, whose tokens are added to the cache."""
    record = ForwardPass()
    with record_pass(adapter, record, attend):
        record.logits = run_with_cache(
            adapter.model, situation.new_tokens(chunk), cache, position_ids=situation.positions(chunk),
            **situation.attention_masks(chunk),
        ).logits  # fmt: skip
    return record


def noise_floors(
    adapter: Adapter,
    reference: Sequence[ForwardPass],
    prompts: PromptEntries,
    situation: Situation,
    kept: Sequence[Sequence[Tensor]],
) -> Distances:
    """Return the noise floors at the kept sets: distances of the masked reference from runs that only round otherwise.

    Those have the entries in the opposite order, gathered, and of a prompt that was read in other ways. `kept` has a
    mask (row, kept_head, entry) per pass and layer.
    """
    full, *read_otherwise = prompts.readings
    others = (
        decode(adapter, fill_cache(adapter, reading), situation, kept, arrange)
        for reading, arrange in (
            *((full, arrange) for arrange in ARRANGEMENTS), *((other, None) for other in read_otherwise)
        )
    )  # fmt: skip
    return floors_between(adapter, reference, others, situation.rows, len(prompts.full))


def floors_between(
    adapter: Adapter, reference: Sequence[ForwardPass], others: Iterable[Iterable[ForwardPass]], rows: int, layers: int
) -> Distances:
    """Return the noise floors from other runs' forward passes, which only round otherwise than the reference's.

    Floors are the maxima over all heads, rows and passes; those of a layer are never below those of an earlier layer,
    as rounding accumulates.
    """
    least = torch.finfo(adapter.dtype).eps
    distances = [
        pass_distances(other, expected, row, layers)
        for passes in others for other, expected in zip(passes, reference, strict=True) for row in range(rows)
    ]  # fmt: skip
    head, hidden, logits = (
        torch.stack([getattr(distance, name).cpu() for distance in distances]).amax(dim=0).clamp(min=least)
        for name in ("head", "hidden", "logits")
    )
    return Distances(head.amax(dim=-1, keepdim=True).cummax(dim=0).values, hidden.cummax(dim=0).values, logits)


def prompt_entries(adapter: Adapter, situation: Situation, read: Reading | None = None) -> PromptEntries:
    """Return the entries of a situation's prompts, with their noise floors; `read` is the reading at once, if known."""
    tokens, (full, rest) = situation.entries, read or read_prompts(adapter, situation)
    halves = read_prompts(adapter, situation, (tokens // 2, tokens - tokens // 2))
    kernel = "eager" if adapter.dtype.itemsize <= 4 else None  # softmax in float32: a mask of float64 is NaN there
    padding = max(situation.padding) if adapter.is_recurrent else 0  # a part of one token is no padding to a state
    first, *parts = _doubling_parts(tokens - padding)
    growing = read_prompts(adapter, situation, (padding + first, *parts), kernel)
    others = (halves[0], growing[0])
    floors = entry_floors(full, others, situation, torch.finfo(adapter.dtype).eps)
    return PromptEntries(full, others, floors, (rest, halves[1], growing[1]))


def entry_floors(
    full: Layers, others: Sequence[Layers], situation: Situation, least: float
) -> Float[Tensor, "kind layer"]:
    """Return the noise floors of entries: the largest distances between `full` and `others`, and at least `least`.

    Those of a layer are never below those of an earlier layer.
    """
    distances = torch.zeros(len(others), 2, len(full), dtype=torch.float32)
    for reading, other in enumerate(others):
        for layer, (changed, known) in enumerate(zip(other, full, strict=True)):
            for kind, (own, expected) in enumerate(zip(changed, known, strict=True)):
                rows = [
                    entry_distances(own[row, :, first:], expected[row, :, first:], expected[row, :, first:]).amax()
                    for row, first in enumerate(situation.padding)
                ]
                distances[reading, kind, layer] = torch.stack(rows).amax()
    return distances.amax(dim=0).clamp(min=least).cummax(dim=-1).values


def entry_distances(
    entries: Float[Tensor, "kv_head entry width"],
    expected: Float[Tensor, "kv_head entry width"],
    full: Float[Tensor, "kv_head token width"],
) -> Float[Tensor, "kv_head entry"]:
    """Return distances of entries from those expected, over the root mean square norm of all entries of the head.

    Infinite where an entry is NaN or infinite.
    """
    unit = full.float().square().sum(dim=-1).mean(dim=-1, keepdim=True).sqrt()
    distance = torch.linalg.vector_norm(entries.float() - expected.float(), dim=-1)
    distance = distance / unit.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(distance.isfinite(), distance, torch.inf)


def pass_distances(record: ForwardPass, reference: ForwardPass, row: int, layers: int) -> Distances:
    """Return the relative distances of one row of a forward pass from the reference pass; infinite where one is NaN.

    `layers` is the number of the model's.
    """
    heads, hidden = [], []
    for layer in range(layers):
        outputs = reference.head_output[layer][row].double()
        length = torch.linalg.vector_norm(outputs, dim=-1)
        mean_length = length.square().mean(dim=-1, keepdim=True).sqrt()
        distance = torch.linalg.vector_norm(record.head_output[layer][row].double() - outputs, dim=-1)
        heads.append((distance / torch.maximum(length, mean_length).clamp(min=_TINY)).amax(dim=0))
        hidden.append(_relative_distance(record.hidden[layer][row], reference.hidden[layer][row]))
    found = torch.stack(heads), torch.stack(hidden), logits_distance(record.logits[row], reference.logits[row])
    return Distances(*(distance.nan_to_num(nan=torch.inf, posinf=torch.inf) for distance in found))


def _relative_distance(vectors: Float[Tensor, "new column"], reference: Float[Tensor, "new column"]) -> Tensor:
    """Return the largest distance of a token's vector from its reference, relative to the reference's length."""
    length = torch.linalg.vector_norm(reference.double(), dim=-1).clamp(min=_TINY)
    distance: Tensor = torch.linalg.vector_norm(vectors.double() - reference.double(), dim=-1) / length
    return distance.amax()


def logits_distance(one: Float[Tensor, "new vocab"], other: Float[Tensor, "most vocab"]) -> Tensor:
    """Return the largest relative distance of mean-centred logits `one` from the last as many tokens of `other`."""
    centred = [logits.double() - logits.double().mean(dim=-1, keepdim=True) for logits in (one, other[-len(one) :])]
    return _relative_distance(centred[0], centred[1])


def masked_attention(
    adapter: Adapter,
    kept: Sequence[Bool[Tensor, "row kept_head entry"]],
    arrange: Arrange | None = None,
    given: Layers | None = None,
) -> Attend:
    """Return an attention function in which new tokens attend to the kept entries, and causally to each other.

    `kept` are masks per layer. `arrange` puts the entries into another order, which changes only the rounding. `given`
    are keys and values per layer instead of the model's own.
    """

    def attend(layer: int, stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        query, key, value, _, *others = args
        key, value = (key, value) if given is None else given[layer]
        heads, new = query.shape[1:3]
        causal = torch.ones(new, new, dtype=torch.bool, device=query.device).tril()
        sets = kept[layer].repeat_interleave(heads // kept[layer].shape[1], dim=1)
        previous = sets.unsqueeze(2).expand(-1, -1, new, -1)
        mask = torch.cat([previous, causal.expand(*previous.shape[:2], -1, -1)], dim=-1)
        key, value, shown = (key, value, mask) if arrange is None else arrange(key, value, mask)
        if shown is None and adapter.config._attn_implementation == "eager":  # of some families it needs one
            shown = torch.ones_like(mask[..., : key.shape[2]])
        return stock(module, query, key, value, as_given(adapter, shown, query.dtype), *others, **kwargs)

    return attend


def as_given(adapter: Adapter, shown: Bool[Tensor, ...] | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask, True for visible entries, in the form in which the model's attention takes it."""
    if shown is None or adapter.config._attn_implementation != "eager":
        return shown
    return torch.zeros_like(shown, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)


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


ARRANGEMENTS: tuple[Arrange, ...] = (_reverse, _gather)
"""Other orders of entries, which change only the rounding."""

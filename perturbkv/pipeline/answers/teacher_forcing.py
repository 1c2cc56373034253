"""How far evicted caches lead the model away while all of them read the full cache's own answer (teacher forcing).

Free answers part at the first token that differs and say little of each other afterwards; reading one text, every cache
gives a distribution for each next token of it (METHOD: KL(full ‖ evicted), top-1 agreement, at each decode step).
Caches are compressed again where they were while they answered freely: when they hold more than the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from perturbkv import theory
from perturbkv.cache.compact import CompactCache, SharedCache, restored
from perturbkv.devices import to_device
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.recompression import Compressor
from perturbkv.pipeline.sample.capture import LOGITS, FiniteCheck, Observer, capture, decode_from, decode_shared

_TOGETHER = 16
"""Tokens read in one pass at most: their logits, of all caches, lie there at once."""


@dataclass(frozen=True)
class Divergence:
    """What every cache makes of each next token of the full cache's answer; step t has read t + 1 of its tokens.

    Attributes:
        kl: nat.
        top1: whether the full and the evicted run would take the same token.
        noise_floor: KL of a cache of the same kind that keeps everything: what rounding alone does.
    """

    kl: Float[Tensor, "config step"]
    top1: Bool[Tensor, "config step"]
    noise_floor: Float[Tensor, " step"]


@torch.inference_mode()
def follow(
    adapter: Adapter,
    cache: CompactCache,
    question: Sequence[int],
    tokens: Sequence[int],
    compressor: Compressor | None = None,
    check: FiniteCheck | None = None,
) -> Divergence:
    """Read the question and then `tokens` from every row of `cache`, and as the plain model reads them: the reference.

    The first row keeps everything; the plain model's cache are its entries. `compressor` is the cache's; `check` looks
    at all logits.
    """
    rows, looked = cache.layers[0].batch, check or FiniteCheck()
    reference = SharedCache(_whole(adapter, cache))
    watch = Observer(attention=None if compressor is None else compressor.watch)

    def read(ids: Int[Tensor, " token"]) -> tuple[Tensor, Tensor]:
        """Logits after each of these tokens: the reference's (token, vocab), every row's (row, token, vocab)."""
        batch = ids.unsqueeze(0).expand(rows, -1)
        with decode_shared(adapter):
            full = _logits(adapter, reference, batch, looked)[0]
        with decode_from(adapter, cache), capture(adapter, watch):
            return full, _logits(adapter, cache, batch, looked)

    for part in torch.split(to_device(list(question), adapter.device), _TOGETHER) if question else ():
        read(part)
    ids, found = to_device(list(tokens), adapter.device), list[tuple[Tensor, Tensor]]()
    while len(found) < len(tokens):
        if compressor is not None:
            compressor.compress(len(found) + 1)
        ahead = _TOGETHER if compressor is None else min(_TOGETHER, compressor.room())
        full, evicted = read(ids[len(found) : len(found) + ahead])
        found += [theory.logit_divergence(full[place], evicted[:, place]) for place in range(len(full))]
    return _joined(found, rows)


def _whole(adapter: Adapter, cache: CompactCache) -> Cache:
    """The first row's entries, which are all there were, as the model's own kind of cache."""
    kinds = [list(zip(*layer.entries(0).sets(), strict=True)) for layer in cache.evicted]
    found = [(torch.stack(keys), torch.stack(values)) for keys, values in kinds]
    held = {index: layer.window for index, layer in enumerate(cache.layers) if layer.is_sliding}
    return restored(adapter, found, held)


def _logits(adapter: Adapter, cache: Cache, ids: Tensor, check: FiniteCheck) -> Float[Tensor, "row token vocab"]:
    logits: Tensor = adapter.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    check.look(LOGITS, logits)
    return logits


def _joined(found: Sequence[tuple[Tensor, Tensor]], rows: int) -> Divergence:
    """What the first row shows is rounding; a KL below 0 is too."""
    if not found:
        nothing = torch.zeros(rows - 1, 0)
        return Divergence(nothing, nothing > 0, nothing[:0].sum(dim=0))
    kl, top1 = (torch.stack(kind, dim=-1).cpu() for kind in zip(*found, strict=True))
    return Divergence(kl[1:].clamp(min=0), top1[1:], kl[0].clamp(min=0))

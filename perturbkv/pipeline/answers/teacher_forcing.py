"""Divergence of evicted caches while all of them read the full cache's own answer (teacher forcing).

Free answers are hard to compare after the first token that differs; reading one text, every cache gives a
distribution for each next token of it (METHOD: KL(full ‖ evicted), top-1 agreement, at each decode step).
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
from perturbkv.cache.compact import CompactCache, SharedCache, rebuild_cache
from perturbkv.devices import to_device
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.pipeline.answers.compression import Compressor, EvictedPrompt
from perturbkv.pipeline.sample.capture import LOGITS, FiniteCheck, Observer, capture, decode_from, decode_shared
from perturbkv.pipeline.sample.measure import check_everything_kept
from perturbkv.pipeline.sample.prefill import free_entries

_TOKENS_PER_PASS = 16
"""Largest number of tokens per pass: their logits, of all caches, are in memory at once."""


@dataclass(frozen=True)
class Divergence:
    """The divergence of every cache at each token of the full cache's answer; at step t, t + 1 of its tokens are read.

    Attributes:
        kl: KL(full ‖ evicted) in nat.
        top1: whether the full and the evicted run would take the same token.
        noise_floor: KL of a compact cache that keeps everything, which is due to rounding alone.
    """

    kl: Float[Tensor, "config step"]
    top1: Bool[Tensor, "config step"]
    noise_floor: Float[Tensor, " step"]


@torch.inference_mode()
def teacher_force(
    adapter: Adapter,
    prompt: EvictedPrompt,
    question: Sequence[int],
    tokens: Sequence[int],
    compressor: Compressor | None = None,
    check: FiniteCheck | None = None,
) -> Divergence:
    """Read the question, then `tokens`, with every row of a cache, and return the divergence from the plain model.

    The first row keeps everything, and the plain model's cache has its entries, or the prompt's latents. `compressor`
    is the cache's; `check` records all logits.
    """
    cache, finite = prompt.cache, check or FiniteCheck()
    rows = cache.rows
    reference = SharedCache(prompt.full or _full_cache_of_first_row(adapter, cache), cache.prompt_states, rows)
    observer = Observer() if compressor is None else compressor.observer()

    def read(ids: Int[Tensor, " token"]) -> tuple[Tensor, Tensor]:
        """Return the logits after each token: the plain model's (token, vocab), and the rows' (row, token, vocab)."""
        batch = ids.unsqueeze(0).expand(rows, -1)
        with decode_shared(adapter):
            full = _read_tokens(adapter, reference, batch, finite)[0]
        with decode_from(adapter, cache), capture(adapter, observer):
            evicted = _read_tokens(adapter, cache, batch, finite)
        check_everything_kept(finite, adapter, full, evicted[0])
        return full, evicted

    for chunk in torch.split(to_device(list(question), adapter.device), _TOKENS_PER_PASS) if question else ():
        read(chunk)
    ids, divergences = to_device(list(tokens), adapter.device), list[tuple[Tensor, Tensor]]()
    while len(divergences) < len(tokens):
        count = _TOKENS_PER_PASS
        if compressor is not None:
            compressor.compress(len(divergences))
            count = min(count, compressor.tokens_until_due(len(divergences)))
        full, evicted = map(theory.log_probabilities, read(ids[len(divergences) : len(divergences) + count]))
        divergences += [theory.logit_divergence(full[index], evicted[:, index]) for index in range(len(full))]
    if not divergences:
        return Divergence(torch.zeros(rows - 1, 0), torch.zeros(rows - 1, 0, dtype=torch.bool), torch.zeros(0))
    kl, top1 = (torch.stack(kind, dim=-1).cpu() for kind in zip(*divergences, strict=True))
    return Divergence(kl[1:].clamp(min=0), top1[1:], kl[0].clamp(min=0))  # KL below 0 is rounding


@torch.inference_mode()
def check_first_row(adapter: Adapter, prompt: EvictedPrompt, question: Sequence[int], check: FiniteCheck) -> None:
    """Record whether the first row, which keeps everything, decodes as the plain model does, by their next logits.

    Both read the question, or without one the first token of an answer; `prompt.cache` stays as it is. The plain
    model's cache shares the row's entries, and is freed layer by layer, `prompt.full` too.
    """
    cache = prompt.cache.fork()
    cache.keep_rows([0])
    full = prompt.full or _full_cache_of_first_row(adapter, cache)
    ids = to_device(list(question), adapter.device) if question else prompt.logits.argmax().view(1)

    def free(number: int, hidden: Tensor) -> None:
        if (layer := adapter.measured_index.get(number)) is not None:
            free_entries(adapter, full, {}, layer)

    with capture(adapter, Observer(hidden=free)):
        expected = _read_tokens(adapter, full, ids.unsqueeze(0), check, last=1)
    with decode_from(adapter, cache):
        found = _read_tokens(adapter, cache, ids.unsqueeze(0), check, last=1)
    check_everything_kept(check, adapter, expected, found)


def _full_cache_of_first_row(adapter: Adapter, cache: CompactCache) -> Cache:
    """Return a plain cache of the model with row 0's entries, all and not copied, and the prompt's states."""
    rows = (layer.borrowed_rows[0] for layer in cache.evicted_layers)
    return rebuild_cache(adapter, [row.rectangle for row in rows if row.rectangle is not None], cache.prompt_states)


def _read_tokens(
    adapter: Adapter, cache: Cache, ids: Tensor, check: FiniteCheck, last: int = 0
) -> Float[Tensor, "row token vocab"]:
    """Read tokens (row, token) into the cache, and return the logits after the `last` of them; 0 for all tokens."""
    logits: Tensor = run_with_cache(adapter.model, ids, cache, logits_to_keep=last).logits
    check.check(LOGITS, logits)
    return logits

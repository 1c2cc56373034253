"""Calls of transformers' attention interface in a pass over a short text, each recomputed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from perturbkv.models.forward import run_with_cache
from perturbkv.models.interface import (
    AttentionFunction,
    implementation,
    intercept,
    intercept_masks,
    text_config,
)
from perturbkv.models.proof.masks import Masks, visible

TOKENS = 24
"""Length of the probe's text."""

TEXT_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")
"""Keys of a configuration with special tokens that stand in texts."""

ERRORS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Relative rounding error that recomputed attention may have, by dtype; eager softmax is in float32 for all."""

LOGIT_ERRORS = {torch.float64: 1e-4, torch.float32: 5e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Relative rounding error that logits may have which were computed in another order, routing to experts included."""

_ARGUMENTS = ("query", "key", "value", "attention_mask")
"""Arguments of the attention interface after the module, by keyword or in this order."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the attention interface: the module, what it was given, and the relative error of recomputing it."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    error: float


def probe_text(model: Any, seed: int = 0) -> Tensor:
    """Return random tokens (1, token), none of them special, with one of each of `TEXT_TOKENS` put in.

    Other special tokens, in whose place images or sounds are read, are left out.
    """
    config = text_config(model)
    settings = {**model.config.to_dict(), **config.to_dict()}
    special = {
        key: token
        for key, token in settings.items()
        if key.endswith("_token_id") and isinstance(token, int) and 0 <= token < config.vocab_size
    }
    allowed = torch.ones(config.vocab_size, dtype=torch.bool)
    allowed[list(special.values())] = False
    choices = allowed.nonzero()[:, 0] if allowed.any() else torch.arange(config.vocab_size)
    length = min(TOKENS, getattr(config, "max_position_embeddings", TOKENS) // 2)
    text = choices[torch.randint(len(choices), (1, length), generator=torch.Generator().manual_seed(seed))]
    inserted = [special[key] for key in TEXT_TOKENS if key in special]
    text[0, 3 : 3 + len(inserted)] = torch.tensor(inserted)  # inside the text, as those of turns of a chat are
    return text.to(model.device)


def observe(model: Any, ids: Tensor) -> tuple[list[Call], Masks, Cache]:
    """Read a text; return its attention calls, each recomputed, the masks of the pass, and the cache."""
    kernel, calls, cache = implementation(model), list[Call](), DynamicCache(config=model.config)
    masks = Masks(ALL_MASK_ATTENTION_FUNCTIONS[kernel])

    def attend(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        found = stock(module, *args, **kwargs)
        calls.append(record(module, args, kwargs, found[0]))
        return found

    with intercept(kernel, list(model.modules()), attend), intercept_masks(kernel, masks):
        read_tokens(model, ids, cache, logits_to_keep=1)
    return calls, masks, cache


def read_tokens(model: Any, ids: Tensor, cache: Cache | None = None, **more: Any) -> Tensor:
    """Return the logits (batch, token, vocab) of tokens that follow a cache."""
    if cache is not None:
        return cast("Tensor", run_with_cache(model, ids, cache, **more).logits)
    return cast("Tensor", model(input_ids=ids, use_cache=False, **more).logits)


def record(module: nn.Module, args: Any, kwargs: Any, found: Tensor) -> Call:
    """Return a call of the interface with the relative error of recomputing what it returned."""
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    query, key, value, mask = (given.pop(name) for name in _ARGUMENTS)
    options = {name: option for name, option in given.items() if option is not None and option is not False}
    scale = options.get("scaling", query.shape[-1] ** -0.5)
    seen = visible(mask, query, key)
    expected = recompute(query, key, value, seen, scale, options.get("softcap"), options.get("s_aux"))
    error = (found.double() - expected).abs().amax() / expected.abs().amax().clamp(min=1e-30)
    options["scaling"] = float(scale)
    return Call(module, query, key, value, mask, options, float(error))


def recompute(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return softmax attention (batch, query, head, d_value) in float64 over the entries that each query sees."""
    group = query.shape[1] // key.shape[1]
    keys, values = (entries.double().repeat_interleave(group, dim=1) for entries in (key, value))
    logits = query.double() @ keys.mT * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks.double().reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], dim=-1)
    return (logits.softmax(dim=-1)[..., : key.shape[2]] @ values).transpose(1, 2)

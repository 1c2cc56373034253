"""Plain use of an evicted cache: a call of the model and `generate`, where transformers chooses the positions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from perturbkv.audit_trace import PlainUse
from perturbkv.auditing.evictions import Eviction, FailedError
from perturbkv.auditing.situations import Situation
from perturbkv.configs.plugins import external_code
from perturbkv.errors import PerturbkvError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import Observer, capture


def plain_use(adapter: Adapter, eviction: Eviction, situation: Situation) -> PlainUse:
    """Return how a model call and `generate` use the cache after the prompt, in a situation `single`.

    Each call of `generate` gets a new cache; exceptions are recorded.
    """
    lengths: list[int] = []

    token = situation.new_tokens(0)[:, :1]
    prompt_and_token = torch.cat([situation.ids, token], dim=-1)  # as a user of `generate` passes them

    def new_cache() -> Cache:
        return eviction.read(adapter.model, situation.ids, situation.attention_mask)

    first = new_cache()
    return PlainUse(
        position=_next_position(first),
        expected=situation.entries if situation.cached is None else situation.cached[0],
        failed=_failure(lambda: _generate(adapter, first, prompt_and_token, lengths)),
        fed=lengths[0] if lengths else 0,
        continued=_failure(lambda: _generate(adapter, new_cache(), token, [])),
    )


def _next_position(cache: Cache) -> int | None:
    """Return the next token's position in the call `model(token, past_key_values=cache)`; None if the call fails."""
    try:
        with external_code("", FailedError):
            return int(cache.get_seq_length())
    except FailedError:
        return None


def _generate(adapter: Adapter, cache: Cache, ids: Tensor, lengths: list[int]) -> None:
    """Generate one token from a cache and `ids`; append the token count of every forward pass to `lengths`."""

    def count(layer: int, hidden: Tensor) -> None:
        if layer == 0:
            lengths.append(hidden.shape[1])

    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    with warnings.catch_warnings(), capture(adapter, Observer(hidden=count)):
        warnings.simplefilter("ignore")
        adapter.model.generate(ids, past_key_values=cache, **options)


def _failure(call: Callable[[], object]) -> str:
    """Return the exception raised by a call as one line of text; empty if none is raised."""
    try:
        with external_code("", FailedError):
            call()
    except PerturbkvError as error:
        return str(error).strip()
    return ""

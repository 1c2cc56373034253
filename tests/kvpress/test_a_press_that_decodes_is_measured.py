"""kvpress' DecodingPress, which compresses while it decodes, measured as somebody's cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from kvpress import DecodingPress, KnormPress
from torch import Tensor
from transformers import DynamicCache

import perturbkv as pk
from tests.kvpress.test_kept_sets_equal_kvpress import tiny
from tests.support.models import token_ids

EVERY, TARGET, TOKENS, STEPS = 8, 40, 60, 20


class GoingOn(DecodingPress):
    """Counts on from one token to the next, whose hooks lie on the model for that token alone."""

    def reset(self) -> None:
        pass


def knorm(model: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
    cache = DynamicCache()
    model(input_ids=input_ids, past_key_values=cache)
    cache.tokens = input_ids.shape[1]
    cache.press = GoingOn(KnormPress(), compression_interval=EVERY, target_size=TARGET)
    return cache


def decode(model: Any, cache: Any, token: Tensor, step: int) -> Tensor:
    places = cache.tokens + step + torch.arange(token.shape[1])
    with cache.press(model):
        logits: Tensor = model(token, None, places[None], cache, cache_position=places).logits
    return logits


knorm.decode = decode  # type: ignore[attr-defined]


def test_it_is_measured_beside_snapkv_step_by_step() -> None:
    adapter = tiny(4, 2)
    prompt = pk.Prompt("s", token_ids(TOKENS, seed=5), 0, text_tokens=token_ids(STEPS + 1, seed=7))
    configs = pk.grid(TARGET, policy=[pk.external(knorm), "snapkv"], selection="attention", granularity="kv", window=8)
    settings = pk.Settings(steps=STEPS, text="given", compress_every=EVERY)
    trace = pk.measure(adapter, [prompt], configs, settings=settings, progress=False)
    (theirs,) = [place for place, config in enumerate(configs) if config.is_external]
    kl = trace.arrays["logit_kl"][0, theirs]
    assert kl[:EVERY].max() < 1e-6 < 1e-4 < kl[EVERY:].max()
    expected = alone(adapter.model, prompt)
    np.testing.assert_allclose(kl, expected, rtol=1e-3, atol=1e-7)
    assert np.isnan(trace.arrays["perturbation_carried"][0, theirs]).all()


def alone(model: Any, prompt: pk.Prompt) -> list[float]:
    """KL of what its users would decode, from plain calls."""
    ids, found = torch.tensor([list(prompt.token_ids)]), []
    with torch.inference_mode():
        evicted, full = knorm(model, ids, torch.ones_like(ids)), DynamicCache()
        model(input_ids=ids, past_key_values=full)
        for step, token in enumerate(list(prompt.text_tokens)[:STEPS]):
            one = torch.tensor([[token]])
            after = [decode(model, evicted, one, step), model(input_ids=one, past_key_values=full).logits]
            q, p = (logits[0, -1].double().log_softmax(-1) for logits in after)
            found.append(float((p.exp() * (p - q)).sum()))
    return found

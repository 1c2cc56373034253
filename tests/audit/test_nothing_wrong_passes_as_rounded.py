"""A reading or a decoding that no plain model makes is never exact, nor lossy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

import perturbkv as pk
from tests.audit import planted
from tests.audit.test_faults_under_rounding_are_found import rounded
from tests.audit.test_planted_faults_are_told_apart import audited, model
from tests.support.models import token_ids

SAYS = ["lossy"]


def handing(change: Any) -> Any:
    """A cache class that stores rightly, and hands the prompt's own attention something else."""

    class Layer(DynamicLayer):
        def update(self, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
            own_keys, own_values = super().update(keys, values, *more, **named)
            return (own_keys, change(own_values)) if keys.shape[2] > 8 else (own_keys, own_values)

    class Handing(Cache):
        def __init__(self) -> None:
            super().__init__(layer_class_to_replicate=Layer)

    return Handing


@pytest.mark.parametrize(
    "change", [lambda values: values.roll(1, dims=2), torch.zeros_like, lambda values: values.flip(1)]
)
def test_a_prompt_whose_attention_gets_other_values_is_not_right(change: Any) -> None:
    result = audited("llama", handing(change), allow=SAYS, situations=["single"])
    assert result.verdict in ("unknown", "differs"), result.conclusion()
    assert result.exit_code == 1


def test_a_prompt_whose_attention_gets_rounded_values_is_lossy_though_they_are_stored_whole() -> None:
    result = audited("llama", handing(lambda values: rounded(values, 4, False)), allow=SAYS, situations=["single"])
    assert (result.verdict, result.exit_code) == ("lossy", 0), result.conclusion()


def test_a_batch_that_is_read_without_its_padding_mask_is_named() -> None:
    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        cache = DynamicCache()
        places = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
        loaded(input_ids=input_ids, position_ids=places, past_key_values=cache)
        return planted.gathered(cache, attention_mask)

    result = audited("llama", evict, allow=SAYS, situations=["batch"])
    assert (result.verdict, result.faults[0].kind) == ("differs", "reading"), result.conclusion()
    assert result.faults[0].what == "the prompt is read without its padding mask"


def test_a_prompt_that_sees_its_future_is_named() -> None:
    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        cache, tokens = DynamicCache(), input_ids.shape[1]
        seen = torch.ones(len(input_ids), 1, tokens, tokens, dtype=torch.bool)
        loaded(input_ids=input_ids, attention_mask=seen, past_key_values=cache)
        return planted.gathered(cache, attention_mask)

    result = audited("llama", evict, allow=SAYS, situations=["single"])
    assert (result.verdict, result.faults[0].kind) == ("differs", "reading"), result.conclusion()


def test_rounded_entries_that_change_while_it_decodes_are_found() -> None:
    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        cache = planted.right(loaded, input_ids, attention_mask)
        for layer in cache.layers:
            layer.keys, layer.values = (rounded(one, 8, False) for one in (layer.keys, layer.values))
        cache.seen = input_ids.shape[1]  # type: ignore[attr-defined]
        return cache

    def decode(loaded: Any, cache: Any, token: Tensor, step: int) -> Tensor:
        if step == 1:
            cache.layers[1].values = cache.layers[1].values * 0
        places = (cache.seen + step + torch.arange(token.shape[1])).expand(len(token), -1)
        return loaded(input_ids=token, position_ids=places, past_key_values=cache).logits

    evict.decode = decode  # type: ignore[attr-defined]
    result = audited("llama", evict, allow=SAYS, situations=["single"])
    assert (result.verdict, result.faults[0].what) == ("differs", "entries change while it decodes")


def test_a_single_zero_among_rounded_values_is_no_rounding() -> None:
    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        cache = planted.rounded(loaded, input_ids, attention_mask)
        values = cache.layers[1].values.clone()
        values[:, 0, 3] = 0
        cache.layers[1].values = values
        return cache

    result = audited("llama", evict, allow=SAYS, situations=["single"])
    assert (result.verdict in ("unknown", "differs"), result.exit_code) == (True, 1), result.conclusion()


def test_slots_that_were_never_filled_are_nothing() -> None:
    result = audited("llama", planted.unfilled, allow=["unknown"], situations=["single"])
    assert (result.verdict, result.exit_code, result.faults[0].kind) == ("differs", 1, "zeros"), result.conclusion()


def test_what_is_allowed_allows_nothing_else() -> None:
    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        if input_ids.shape[1] < 50:
            return planted.full(loaded, input_ids, attention_mask)
        return planted.rounded(loaded, input_ids, attention_mask)

    prompts = [pk.Prompt("short", token_ids(40), 0), pk.Prompt("long", token_ids(60), 0)]
    asked = {"steps": 2, "losses": False, "plain_use": False, "progress": False, "situations": ["single"]}
    codes = {
        allow: pk.audit(model("llama"), prompts, evict, allow=list(allow), **asked).exit_code
        for allow in ((), ("idle",), ("lossy",), ("idle", "lossy"))
    }
    assert codes == {(): 1, ("idle",): 1, ("lossy",): 1, ("idle", "lossy"): 0}
    named = pk.audit(model("llama"), prompts, evict, **asked)
    assert named.conclusion().startswith("did nothing: nothing was evicted of short; elsewhere")
    assert 'message="nothing was evicted"' in named.to_junit()


@pytest.mark.parametrize("codec", [None, 8, 4])
def test_new_keys_of_wrong_positions_above_the_first_layer_are_no_rounding(codec: int | None) -> None:
    """Each layer above the first rotates new keys by one position more, which moves them by less than half."""

    class Layer(DynamicLayer):
        def update(self, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
            if getattr(self, "late", False):
                half = keys.shape[-1] // 2
                angle = 1e4 ** (-torch.arange(half) / half)
                first, second = keys.chunk(2, dim=-1)
                turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
                keys = torch.cat(turned, dim=-1)
            if codec is not None:
                keys, values = rounded(keys, codec, False), rounded(values, codec, False)
            return super().update(keys, values, *more, **named)

    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        cache = Cache(layer_class_to_replicate=Layer)
        loaded(input_ids=input_ids, past_key_values=cache)
        for layer in cache.layers[1:]:
            layer.late = True
        return cache

    result = audited("llama", evict, allow=SAYS, situations=["block"])
    assert (result.verdict, result.exit_code) == ("differs", 1), result.conclusion()
    assert "1 position too late" in result.conclusion()

"""Caches of latents are audited by what attention gets of them, readers of another layer's cache with their owner."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import perturbkv as pk
from perturbkv.analyses.audit.audit import Audit
from perturbkv.models.adapter import Adapter
from perturbkv.models.proof.twin import make_twin
from tests.audit import planted
from tests.support.models import ByteTokenizer, tiny_adapter, token_ids

pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="older transformers cache all heads' keys, and keep no layers that share",
)
SHARED = {"gemma3n_text": {}, "gemma4_text": {"num_kv_shared_layers": 4}}
FAMILIES = ("deepseek_v3", "minicpm3", *SHARED)


@functools.cache
def model(family: str) -> Adapter:
    if family not in SHARED:
        return tiny_adapter(family, 4, 4)
    twin = make_twin(CONFIG_MAPPING[family](**SHARED[family])).float()
    return Adapter(twin, ByteTokenizer(), f"twin-{family}", "test", True)


def audited(family: str, fault: str = "", **more: Any) -> Audit:
    """The verdict on an eviction that keeps four sinks and twelve recent entries, with a fault in the last cache."""
    adapter = model(family)

    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
        cache = DynamicCache(config=loaded.config)
        places = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
        padded = {} if bool(attention_mask.all()) else {"attention_mask": attention_mask, "position_ids": places}
        loaded(input_ids=input_ids, past_key_values=cache, **padded)
        n, first = input_ids.shape[1], int((attention_mask == 0).sum())
        holders = sorted({adapter.layer_indices[owner] for owner in adapter.owners})
        kept = torch.cat([first + torch.arange(4), torch.arange(n - 12, n)])
        for index in holders:
            layer = cache.layers[index]
            layer.keys, layer.values = layer.keys[..., kept, :], layer.values[..., kept, :]
        if fault == "rolled":
            layer.keys, layer.values = layer.keys.roll(1, dims=-2), layer.values
        if fault == "twice":
            layer.keys[..., 0, :], layer.values[..., 0, :] = layer.keys[..., 5, :], layer.values[..., 5, :]
        if fault == "scaled":
            layer.keys = layer.keys * 1.25
        return cache

    if fault == "early":
        evict.decode = planted.decode_early  # type: ignore[attr-defined]
    asked = {"steps": 2, "losses": False, "plain_use": False, "progress": False, **more}
    prompt = pk.Prompt("p", token_ids(24, vocab=200), 0)
    return pk.audit(adapter, prompt, evict, **{"situations": ["single", "block", "batch"], **asked})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_eviction_is_exact(family: str) -> None:
    result = audited(family)
    assert (result.verdict, result.exit_code) == ("exact", 0), result.conclusion()
    kept = result.runs[0].entries
    assert kept is not None
    assert all(head.tolist() == [0, 1, 2, 3, *range(12, 24)] for layer in kept.kept_sets for head in layer)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", ["rolled", "twice", "scaled"])
def test_a_wrong_one_is_not(family: str, fault: str) -> None:
    result = audited(family, fault, situations=["single"])
    adapter = model(family)
    last = adapter.layer_indices[max(adapter.owners)]
    named = result.faults[0] if result.faults else result.runs[0].first_unmatched
    assert result.exit_code == 1, result.conclusion()
    assert named.layer == last
    if fault == "twice":
        assert named.kind == "duplicate"


def test_rounded_latents_are_lossy() -> None:
    adapter = model("deepseek_v3")

    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
        cache = DynamicCache(config=loaded.config)
        loaded(input_ids=input_ids, past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.bfloat16().float(), layer.values.bfloat16().float()
        return cache

    result = pk.audit(adapter, pk.Prompt("p", token_ids(24), 0), evict, steps=2, situations=["single"], progress=False)
    assert result.verdict == "lossy", result.conclusion()


def test_the_loss_of_latents_is_measured_and_of_shared_caches_told_why_not() -> None:
    assert len(audited("deepseek_v3", losses=True, situations=["single"]).losses) == 5
    assert "reads the entries of layer" in audited("gemma3n_text", losses=True, situations=["single"]).lossless

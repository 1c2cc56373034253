"""adaptivekv 0.1.0 hands out what it was given, not what it quantised, and makes masks that are too short."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perturbkv.analyses.audit.audit import Audit
from tests.packages.conftest import TOKENS, tiny
from tests.packages.evictions import AdaptiveKVCache, read
from tests.packages.truth import errors, spied

KEPT = 40
EVICTING = f"AdaptiveKVCache(enable_token_eviction=true,max_cache_tokens={KEPT},recent_window=8)"


@torch.no_grad()
def test_what_is_attended_to_was_never_quantised(audited: Callable[..., Audit], ids: Tensor) -> None:
    cache = AdaptiveKVCache()
    with spied(cache) as seen:
        tiny().model(input_ids=ids, past_key_values=cache)
    layers = cache.layers.items()
    stored = {index: tuple(map(layer.quantizer.dequantize, (layer.compressed_keys, layer.compressed_values)))
              for index, layer in layers}  # fmt: skip
    for kind in range(2):
        assert errors(stored, seen.given, kind).max() > 0.3
        assert errors(seen.returned, seen.given, kind).max() == 0
    assert audited("AdaptiveKVCache", "single").verdict == "did nothing"


@torch.no_grad()
def test_a_block_gets_a_mask_without_the_block(audited: Callable[..., Audit], ids: Tensor) -> None:
    cache = read(tiny().model, AdaptiveKVCache(), ids, torch.ones_like(ids))
    assert cache.get_mask_sizes(8, 0) == (TOKENS, 0)  # 88 are needed
    result = audited("AdaptiveKVCache", "single", "block")
    assert [(fault.situation, fault.kind) for fault in result.faults] == [("block", "raised")]
    assert f"size of tensor a ({TOKENS + 8}) must match the size of tensor b ({TOKENS})" in result.conclusion()


@torch.no_grad()
def test_padding_is_attended_to_while_a_prompt_is_read(audited: Callable[..., Audit], ids: Tensor) -> None:
    mask = (torch.arange(TOKENS) >= 10).long().unsqueeze(0)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    one, two = AdaptiveKVCache(), AdaptiveKVCache()
    tiny().model(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=one)
    tiny().model(input_ids=ids, position_ids=positions, past_key_values=two)
    assert torch.equal(one[2].retained_keys, two[2].retained_keys), "the mask changes nothing"
    result = audited("AdaptiveKVCache", "batch")
    assert {(fault.kind, fault.what) for fault in result.faults} == {
        ("reading", "the prompt is read without its padding mask")
    }


@torch.no_grad()
def test_its_eviction_takes_effect_while_the_prompt_is_read(audited: Callable[..., Audit], ids: Tensor) -> None:
    cache = AdaptiveKVCache(enable_token_eviction=True, max_cache_tokens=KEPT, recent_window=8)
    with spied(cache) as seen:
        tiny().model(input_ids=ids, past_key_values=cache)
    assert {keys.shape[2] for keys, _ in seen.returned.values()} == {KEPT}
    result = audited(EVICTING)
    assert result.verdict == "differs"
    assert {fault.what for fault in result.faults} == {
        f"the prompt is read through its own eviction: {KEPT} of {TOKENS} entries"
    }

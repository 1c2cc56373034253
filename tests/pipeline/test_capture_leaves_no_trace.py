from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import Observer, capture, intercept_attention
from tests.support.models import FAMILIES, tiny_adapter, token_ids

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def watcher(seen: list[str]) -> Observer:
    return Observer(
        attention=lambda layer, query, key, value: seen.append(f"attention {layer}"),
        head_output=lambda layer, mixed: seen.append(f"head_output {layer}"),
        hidden=lambda layer, hidden: seen.append(f"hidden {layer}"),
        final=lambda hidden: seen.append("final"),
    )


def prefill_and_decode(model: nn.Module) -> torch.Tensor:
    cache = DynamicCache()
    with torch.inference_mode():
        first = model(input_ids=torch.tensor([token_ids(20)]), past_key_values=cache).logits
        return torch.cat([first, model(input_ids=torch.tensor([[7]]), past_key_values=cache).logits], dim=1)


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def registered() -> dict[str, object]:
    return {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_the_plain_models_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    adapter, seen = tiny_adapter(family, dtype=dtype), []
    plain = prefill_and_decode(adapter.model)
    with capture(adapter, watcher(seen)):
        watched = prefill_and_decode(adapter.model)
    assert torch.equal(plain, watched)
    one_pass = ["attention 0", "head_output 0", "hidden 0", "attention 1", "head_output 1", "hidden 1", "final"]
    assert seen == one_pass * 2


def test_hooks_and_attention_are_gone_afterwards() -> None:
    adapter, seen = tiny_adapter(), []
    before, hooks = registered(), hook_count(adapter.model)
    with capture(adapter, watcher(seen)):
        assert hook_count(adapter.model) > hooks
        assert registered() != before
    assert hook_count(adapter.model) == hooks
    assert registered() == before
    prefill_and_decode(adapter.model)
    assert seen == []


def test_hooks_and_attention_are_gone_after_an_exception() -> None:
    adapter, before = tiny_adapter(), registered()

    def explode(layer: int, hidden: torch.Tensor) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), capture(adapter, Observer(hidden=explode)):
        prefill_and_decode(adapter.model)
    with pytest.raises(RuntimeError, match="planted"), capture(adapter, watcher([])):
        raise RuntimeError("planted")
    assert hook_count(adapter.model) == 0
    assert registered() == before


def test_the_hook_check_itself_can_fail() -> None:
    model = tiny_adapter().model
    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: None)
    assert hook_count(model) == 1
    handle.remove()
    assert hook_count(model) == 0


def test_captures_nest_and_end_in_turn() -> None:
    adapter, outer, inner, before = tiny_adapter(), [], [], registered()
    with capture(adapter, watcher(outer)):
        with capture(adapter, watcher(inner)):
            prefill_and_decode(adapter.model)
        assert len(outer) == len(inner) > 0
        prefill_and_decode(adapter.model)
    assert len(outer) == 2 * len(inner)
    assert registered() == before


def test_other_models_keep_their_attention() -> None:
    watched, other, seen = tiny_adapter(), tiny_adapter("qwen3"), []
    with capture(watched, watcher(seen)):
        prefill_and_decode(other.model)
    assert seen == []


def test_an_unregistered_attention_is_refused() -> None:
    adapter: Adapter = tiny_adapter()
    adapter.model.config._attn_implementation = "nowhere"
    with pytest.raises(ModelError, match="'nowhere'"), intercept_attention(adapter, lambda *given: None):
        pass

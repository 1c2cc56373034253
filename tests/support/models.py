"""Tiny models with random weights, one per family, for shapes; the embedded model is for meaning."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from perturbkv.models import proof
from perturbkv.models.adapter import Adapter
from perturbkv.models.attention_facts import Facts
from perturbkv.models.loading import ByteTokenizer

PLAIN = ("llama", "mistral", "qwen2", "qwen3", "phi3")
MIXED = ("gemma3_text", "olmo3", "gpt_oss")
"""Every second layer slides over a window of `WINDOW` entries; the others are measured."""
FAMILIES = (*PLAIN, *MIXED, "olmo2", "granite", "qwen3_moe", "mixtral")
GATED = "laguna"
"""Its heads' outputs are multiplied by a gate before the projection, component by component; mixed as the others."""
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")
"""Which rows go to an expert together depends on the whole batch, and so does the rounding of its products."""
WINDOW = 12
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}


def tiny_model(
    family: str = "llama",
    heads: int = 4,
    kv_heads: int = 2,
    *,
    layers: int = 2,
    d_head: int = 8,
    vocab: int = 260,
    positions: int = 512,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Any:
    """Weights large enough that attention is far from uniform, norms and biases off their defaults.

    `layers` are measured; a family that mixes has a sliding one before each.
    """
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    shapes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": d_head,
        "hidden_size": heads * d_head,
        "intermediate_size": 48,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "initializer_range": 0.25,
        "sliding_window": None,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(family, **{**shapes, **_own(family, layers), **more})
    kernel = "eager" if family in ("gpt_oss", "gemma2") else "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(0.2 * torch.randn(parameter.shape).to(dtype))
                if name.endswith("sinks"):
                    parameter.add_(torch.randn(parameter.shape).to(dtype))
    return model.eval()


def _own(family: str, layers: int) -> dict[str, Any]:
    """What a family has beside the shapes of all, none of it where its default is."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    sliding: dict[str, Any] = {
        "num_hidden_layers": 2 * layers,
        "layer_types": ["sliding_attention", "full_attention"] * layers,
        "sliding_window": WINDOW,
    }
    each = {"rope_parameters": {"full_attention": plain, "sliding_attention": {**plain, "rope_theta": 1e3}}}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return {
        "gemma3_text": {**sliding, **each, "query_pre_attn_scalar": 12},
        "gemma2": {**sliding, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 1.5,
                   "final_logit_softcapping": 9.0},
        "olmo3": {**sliding, **(each if family == "olmo3" and _rotates_by_kind(family) else {})},
        "qwen3_moe": {**experts, "norm_topk_prob": True, "mlp_only_layers": [0]},
        "mixtral": experts,
        "gpt_oss": {**sliding, **experts},
        "afmoe": {**sliding, "num_dense_layers": 2 * layers},
        "beam": {**sliding, **each},
        "laguna": {**sliding, **each, "gating": "per-element", "mlp_layer_types": ["dense"] * 2 * layers},
        "qwen3_next": {**experts, "layer_types": ["full_attention"] * layers, "mlp_only_layers": [*range(layers)]},
        "deepseek_v3": {"head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
                        "kv_lora_rank": 10, "q_lora_rank": None, "first_k_dense_replace": layers},
        "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0,
                    "logits_scaling": 2.0},
    }.get(family, {})  # fmt: skip


def _rotates_by_kind(family: str) -> bool:
    """Whether rotations of this transformers' family are asked for by the kind of layer."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rotary = getattr(module, f"{family.title()}RotaryEmbedding")
    return "layer_type" in inspect.signature(rotary.forward).parameters


def exact(model: Any) -> Any:
    """The model with norms and rotations in float64 too, which transformers computes in float32 whatever the dtype."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = functools.partial(_exact_norm, module)
        elif kind in ("Qwen3MoeTopKRouter", "MixtralTopKRouter"):
            module.forward = functools.partial(_exact_routing, module)
        elif kind == "LagunaAttention":
            module.g_proj.forward = functools.partial(_exact_gate, module.g_proj)
        elif kind.endswith("ScaledWordEmbedding"):
            module.embed_scale = torch.tensor(model.config.hidden_size, dtype=torch.float64).sqrt()
    model.config._experts_implementation = "eager"  # products of groups take no float64
    asked = model.config.rope_parameters
    found = {
        name: _frequencies(model, asked[kind] if kind in asked else asked)
        for name, kind in (("inv_freq", ""), *((f"{kind}_inv_freq", kind) for kind in asked))
        if hasattr(model.model.rotary_emb, name)
    }

    def rotate(
        hidden: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = found[f"{layer_type}_inv_freq" if layer_type else "inv_freq"]
        times = 1 if model.config.model_type == "gpt_oss" else 2  # its module gives each pair's angle once
        angles = (position_ids.double().unsqueeze(-1) * own).repeat(1, 1, times)
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward = rotate
    for name, own in found.items():
        setattr(model.model.rotary_emb, name, own)
    return model


def _frequencies(model: Any, asked: dict[str, Any]) -> torch.Tensor:
    rotary = int(model.model.layers[0].self_attn.head_dim * asked.get("partial_rotary_factor", 1.0))
    found: torch.Tensor = asked["rope_theta"] ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    return found


def _exact_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    variance = hidden.square().mean(dim=-1, keepdim=True)
    gemma = type(module).__name__.startswith("Gemma")
    eps = module.eps if gemma else module.variance_epsilon
    return (module.weight + gemma) * hidden * torch.rsqrt(variance + eps)


class _StaysDouble(torch.Tensor):
    def float(self, *more: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _exact_gate(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(hidden, module.weight).as_subclass(_StaysDouble)


def _exact_routing(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
    shares, chosen = logits.softmax(dim=-1).topk(module.top_k, dim=-1)
    return logits, shares / shares.sum(dim=-1, keepdim=True), chosen


_PROVEN: dict[tuple[str, str], Facts] = {}
"""Name and arguments of an adapter -> what its proof found, which is the same of the same model."""


def _adapter(model: Any, name: str, *arguments: object) -> Adapter:
    """An adapter of a model that these arguments make; only the first of them is proven."""
    key = (name, repr(arguments))
    known = mock.patch.object(proof, "prove", lambda model: _PROVEN[key]) if key in _PROVEN else nullcontext()
    with known:
        made = Adapter(model, ByteTokenizer(), name, "test", True)
    _PROVEN[key] = made.facts
    return made


def exact_adapter(family: str, heads: int, kv_heads: int, **more: Any) -> Adapter:
    model = exact(tiny_model(family, heads, kv_heads, dtype=torch.float64, **more))
    return _adapter(model, f"exact-{family}", heads, kv_heads, sorted(more.items()))


def tiny_adapter(family: str = "llama", heads: int = 4, kv_heads: int = 2, **more: Any) -> Adapter:
    model = tiny_model(family, heads, kv_heads, **more)
    return _adapter(model, f"tiny-{family}", heads, kv_heads, sorted(more.items()))


def wide_adapter(d_value: int = 5, **more: Any) -> Adapter:
    """An exact llama whose values have fewer components than its keys."""
    model = tiny_model("llama", 4, 2, dtype=torch.float64, **more)
    for layer in model.model.layers:
        attention, size = layer.self_attn, model.config.hidden_size
        attention.v_proj = torch.nn.Linear(size, 2 * d_value, bias=False, dtype=torch.float64)
        attention.o_proj = torch.nn.Linear(4 * d_value, size, bias=False, dtype=torch.float64)
        for projection in (attention.v_proj, attention.o_proj):
            torch.nn.init.normal_(
                projection.weight, std=0.25, generator=torch.Generator().manual_seed(attention.layer_idx)
            )
        attention.forward = functools.partial(_wide_attention, attention)
    return Adapter(exact(model), ByteTokenizer(), "exact-wide", "test", True)


def _wide_attention(attention: Any, hidden_states: torch.Tensor, position_embeddings: Any, **more: Any) -> Any:
    """Llama's own, but that each projection is divided among its heads."""
    module, heads = sys.modules[type(attention).__module__], attention.config.num_key_value_heads
    cache, mask = more.pop("past_key_values", more.pop("cache", None)), more.pop("attention_mask", None)
    numbers = (heads * attention.num_key_value_groups, heads, heads)
    query, key, value = (
        projection(hidden_states).unflatten(-1, (count, -1)).transpose(1, 2)
        for projection, count in zip((attention.q_proj, attention.k_proj, attention.v_proj), numbers, strict=True)
    )
    query, key = module.apply_rotary_pos_emb(query, key, *position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    attend = module.ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    output, weights = attend(attention, query, key, value, mask, dropout=0.0, scaling=attention.scaling, **more)
    return attention.o_proj(output.flatten(2)), weights


def token_ids(count: int, seed: int = 0, vocab: int = 256) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())

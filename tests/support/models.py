"""Tiny models with random weights, one per family, for shapes; the embedded model is for meaning."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from perturbkv.models.adapter import Adapter
from perturbkv.models.tokenization import ByteTokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
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
    """Weights large enough that attention is far from uniform, norms and biases off their defaults."""
    shapes = {
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
    config = AutoConfig.for_model(family, **{**shapes, **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(0.2 * torch.randn(parameter.shape).to(dtype))
    return model.eval()


def exact(model: Any) -> Any:
    """The model with norms and rotations in float64 too, which transformers computes in float32 whatever the dtype."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_exact_norm, module)
    asked = model.config.rope_parameters
    rotary = int(model.model.layers[0].self_attn.head_dim * asked.get("partial_rotary_factor", 1.0))
    frequencies = asked["rope_theta"] ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)

    def rotate(hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (position_ids.double().unsqueeze(-1) * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward, model.model.rotary_emb.inv_freq = rotate, frequencies
    return model


def _exact_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    variance = hidden.square().mean(dim=-1, keepdim=True)
    return module.weight * hidden * torch.rsqrt(variance + module.variance_epsilon)


def exact_adapter(family: str, heads: int, kv_heads: int, **more: Any) -> Adapter:
    model = exact(tiny_model(family, heads, kv_heads, dtype=torch.float64, **more))
    return Adapter(model, ByteTokenizer(), f"exact-{family}", "test", True)


def tiny_adapter(family: str = "llama", heads: int = 4, kv_heads: int = 2, **more: Any) -> Adapter:
    return Adapter(tiny_model(family, heads, kv_heads, **more), ByteTokenizer(), f"tiny-{family}", "test", True)


def token_ids(count: int, seed: int = 0, vocab: int = 256) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())

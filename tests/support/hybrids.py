"""Tiny models of families some of whose layers are recurrent, beside attention or in its place, or without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from perturbkv.models import recurrent_states
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ByteTokenizer

_EVERY_SECOND = ["linear_attention", "full_attention"] * 2
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_SHAPES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_multiple_of": 8},
    "olmo_hybrid": {"layer_types": _EVERY_SECOND, **_LINEAR},
    "granitemoehybrid": {"layer_types": _EVERY_SECOND, "shared_intermediate_size": 24, "num_local_experts": 4,
                         "num_experts_per_tok": 2, **_MAMBA},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp", "full_attention"],
                   "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "falcon_h1": {"num_hidden_layers": 2, "mamba_d_ssm": 64, **_MAMBA},
}  # fmt: skip
HYBRIDS = tuple(_SHAPES)
MEASURED = {family: (0, 1) if family == "falcon_h1" else (1, 3) for family in HYBRIDS}
STATES = {"lfm2": 2 * 32 * 3, "olmo_hybrid": 2 * (4 * 8 * 8 + 64 * 4), "granitemoehybrid": 2 * (4 * 16 * 8 + 80 * 4),
          "nemotron_h": 4 * 16 * 8 + 80 * 4, "falcon_h1": 2 * (4 * 16 * 8 + 80 * 4)}  # fmt: skip
"""Numbers of all layers' recurrent states: heads × head × state, and channels × kernel of the convolutions."""


def hybrid_model(family: str, **more: Any) -> Any:
    shapes = {
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32,
        "intermediate_size": 48, "vocab_size": 260, "max_position_embeddings": 512, "initializer_range": 0.25,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **_SHAPES.get(family, {}), **more,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shapes)).eval()


def hybrid_adapter(family: str, **more: Any) -> Adapter:
    if recurrent_states.LAYER is None:
        pytest.skip("this transformers keeps no states in caches")
    return Adapter(hybrid_model(family, **more), ByteTokenizer(), f"tiny-{family}", "test", True)

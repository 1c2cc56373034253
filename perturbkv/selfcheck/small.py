"""A small model with random weights whose heads attend sharply, so that what is kept makes a difference."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from perturbkv.models.adapter import Adapter
from perturbkv.models.tokenization import ByteTokenizer

HEADS, KV_HEADS, D_HEAD, LAYERS, VOCAB = 8, 2, 64, 3, 260


def small_model(dtype: torch.dtype, device: torch.device) -> Adapter:
    """A Llama of three layers; the same weights on every device, rounded to `dtype`."""
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=D_HEAD,
        hidden_size=HEADS * D_HEAD, intermediate_size=2 * HEADS * D_HEAD, vocab_size=VOCAB,
        max_position_embeddings=4096, initializer_range=0.1, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exact = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.load_state_dict(exact.state_dict())  # rounds weights alone: rotations stay in float32
    return Adapter(model.eval().to(device), ByteTokenizer(), "small", "seed 0", True)


def tokens(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Random token ids, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).to(device)


def full_cache(adapter: Adapter, count: int) -> DynamicCache:
    """The cache of a random prompt of `count` tokens."""
    cache = DynamicCache()
    with torch.inference_mode():
        adapter.model(input_ids=tokens(count, 0, adapter.device)[None], past_key_values=cache, logits_to_keep=1)
    return cache

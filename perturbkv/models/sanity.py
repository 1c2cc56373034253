"""A configuration that no model can have is refused before anything is made of it: its sizes would be allocated first.

transformers checks the types of some values in some versions; ranges, and what has to go together, it does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from perturbkv.errors import ModelError
from perturbkv.models import quantisers

SIZES: Mapping[str, tuple[int, int]] = {
    "num_hidden_layers": (1, 1000),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "head_dim": (1, 2**14),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "vocab_size": (2, 2**30),
    "max_position_embeddings": (3, 2**31 - 1),
    "sliding_window": (1, 2**31 - 1),
    "num_experts": (1, 2**16),
    "num_local_experts": (1, 2**16),
    "num_experts_per_tok": (1, 2**16),
}
"""Key -> least and largest whole number: far beyond every model that there is. A key that is not there, or null, is
left to transformers."""
_MUST_BE_THERE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size",
                  "max_position_embeddings")  # fmt: skip
_FACTORS = ("query_pre_attn_scalar", "attention_multiplier", "residual_multiplier", "embedding_multiplier",
            "logits_scaling")  # fmt: skip
"""What some families scale by."""
_POSITIVE = ("rope_theta", "factor", "original_max_position_embeddings")
"""Of the rotations, wherever they stand."""


def check(config: Any, name: str) -> None:
    """Raise ModelError for the first value of a model's configuration that cannot be, which it names."""
    _check_sizes(config, name)
    types = getattr(config, "layer_types", None)
    if types is not None and not (isinstance(types, list | tuple) and all(isinstance(one, str) for one in types)):
        _refuse(name, "layer_types", "a list of texts", types)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None and not _is_quantised(quantised):
        _refuse(name, "quantization_config", "an object whose quant_method transformers knows", quantised)
    _check_numbers(config, name)


def _check_sizes(config: Any, name: str) -> None:
    for key, (low, high) in SIZES.items():
        value = getattr(config, key, None)
        if (value is not None or key in _MUST_BE_THERE) and not _is_whole(value, low, high):
            _refuse(name, key, f"a whole number from {low} to {high}", value)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        _refuse(name, "num_key_value_heads", f"a divisor of {heads} heads", kv_heads)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if experts and chosen and chosen > experts:
        _refuse(name, "num_experts_per_tok", f"at most its {experts} experts", chosen)


def _check_numbers(config: Any, name: str) -> None:
    epsilon = getattr(config, "rms_norm_eps", 0.0)
    if not (_is_number(epsilon) and epsilon >= 0):
        _refuse(name, "rms_norm_eps", "a finite number of at least 0", epsilon)
    rotations = _rotations(getattr(config, "rope_parameters", None))
    positive = [
        *((key, getattr(config, key, None)) for key in _FACTORS),
        *((f"{key} (of rope_parameters)", value) for key, value in rotations if key in _POSITIVE),
    ]
    for called, value in positive:
        if value is not None and not (_is_number(value) and value > 0):
            _refuse(name, called, "a finite number above 0", value)


def _is_quantised(about: Any) -> bool:
    """Whether transformers knows how the weights are quantised: what it does not know it passes over."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return quantisers.method(about) in {"bitsandbytes", *AUTO_QUANTIZATION_CONFIG_MAPPING}


def _rotations(parameters: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of the rotations, those of each kind of layer where layers have their own."""
    for key, value in parameters.items() if isinstance(parameters, dict) else ():
        yield from _rotations(value) if isinstance(value, dict) else [(key, value)]


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(name: str, key: str, expected: str, value: Any) -> None:
    shown = repr(value)
    msg = (
        f"expected {key} of model '{name}' to be {expected}, got {shown[:40]}{'…' if len(shown) > 40 else ''}; get its "
        "config.json anew"
    )
    raise ModelError(msg)

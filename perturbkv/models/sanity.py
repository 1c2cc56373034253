"""Checks that a model's configuration is possible and that its weights are complete and finite.

A configuration is checked before anything is made of it, as its sizes would be allocated first; transformers checks the
types of some values in some versions, but no ranges and no dependencies. A model with missing weights is refused:
transformers would fill the gaps with random weights and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from perturbkv.configs import layer_types
from perturbkv.configs.option import is_number
from perturbkv.errors import ModelError
from perturbkv.models import quantisers
from perturbkv.models.sources import Source, explain_errors

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
"""Key -> smallest and largest integer, far beyond every existing model.

A missing or null key is left to transformers.
"""
_BY_LAYER = ("intermediate_size", "num_experts", "num_experts_per_tok")
"""Keys that may be a list, a number for each layer."""
_MUST_BE_THERE = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")
_FACTORS = ("query_pre_attn_scalar", "attention_multiplier", "residual_multiplier", "embedding_multiplier",
            "logits_scaling")  # fmt: skip
"""Scaling factors of some families."""
_POSITIVE = ("rope_theta", "factor", "original_max_position_embeddings")
"""Parameters of the rotations, at any depth."""


def check_config(config: Any, name: str) -> None:
    """Raise ModelError for a family without a causal language model, or for the first impossible value of its decoder.

    What the model's attention is, is found when it is loaded (`proof`).
    """
    check_class(config, name)
    config = config.get_text_config(decoder=True)
    if (types := getattr(config, "layer_types", None)) is not None:
        if not (isinstance(types, list | tuple) and all(isinstance(kind, str) for kind in types)):
            _refuse(name, "layer_types", "a list of texts", types)
        if len(types) != config.num_hidden_layers:
            _refuse(name, "layer_types", f"the kinds of its {config.num_hidden_layers} layers", types)
    _check_sizes(config, name)
    quantised = getattr(config, "quantization_config", None)
    known = {"bitsandbytes", *AUTO_QUANTIZATION_CONFIG_MAPPING}  # transformers passes over others without a word
    if quantised is not None and quantisers.quant_method(quantised) not in known:
        _refuse(name, "quantization_config", "an object whose quant_method transformers knows", quantised)
    _check_numbers(config, name)


def check_class(config: Any, name: str) -> None:
    """Raise ModelError for a configuration of which transformers makes no causal language model that only decodes."""
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"model '{name}' is of the family '{config.model_type}', of which transformers {transformers.__version__} "
            "makes no causal language model"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"model '{name}' is an encoder with a decoder; decoders alone are measured")


def _check_sizes(config: Any, name: str) -> None:
    """Raise ModelError for a size outside `SIZES`, or for inconsistent numbers of heads or experts."""
    own = layer_types.measured_config(config)
    for key, (low, high) in SIZES.items():
        value = getattr(own, key, None)
        if key == "sliding_window" and value == 0 and not getattr(config, "use_sliding_window", True):
            continue  # families that turn windows off set their width to 0
        each = _each(value) if key in _BY_LAYER else [value]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and low <= n <= high for n in each)
        if (value is not None or key in _MUST_BE_THERE) and not whole:
            _refuse(name, key, f"a whole number from {low} to {high}", value)
    heads, kv_heads = own.num_attention_heads, getattr(own, "num_key_value_heads", None)
    if kv_heads and heads % kv_heads:
        _refuse(name, "num_key_value_heads", f"a divisor of {heads} heads", kv_heads)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if experts and chosen and max(_each(chosen)) > max(_each(experts)):
        _refuse(name, "num_experts_per_tok", f"at most its {experts} experts", chosen)


def _each(value: Any) -> list[Any]:
    """Return a list of numbers, one for each layer, or the number of all layers as a list."""
    return value if isinstance(value, list) else [value]


def _check_numbers(config: Any, name: str) -> None:
    """Raise ModelError for a negative epsilon, or for a scaling factor or rotary parameter that is not positive."""
    epsilon = getattr(config, "rms_norm_eps", None)  # None in a family that has another norm
    if epsilon is not None and not (is_number(epsilon) and epsilon >= 0):
        _refuse(name, "rms_norm_eps", "a finite number of at least 0", epsilon)
    rotations = _rotations(getattr(config, "rope_parameters", None))
    positive = [
        *((key, getattr(config, key, None)) for key in _FACTORS),
        *((f"{key} (of rope_parameters)", value) for key, value in rotations if key in _POSITIVE),
    ]
    for key, value in positive:
        if value is not None and not (is_number(value) and value > 0):
            _refuse(name, key, "a finite number above 0", value)


def _rotations(parameters: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of `rope_parameters`, which some families nest per layer type."""
    for key, value in parameters.items() if isinstance(parameters, dict) else ():
        yield from _rotations(value) if isinstance(value, dict) else [(key, value)]


def _refuse(name: str, key: str, expected: str, value: Any) -> None:
    """Raise ModelError for a value in the configuration of model `name`; it names the key and the expected value."""
    shown = repr(value)
    raise ModelError(
        f"expected {key} of model '{name}' to be {expected}, got {shown[:40]}{'…' if len(shown) > 40 else ''}; get its "
        "config.json anew"
    )


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a tensor, with names: itself, or a quantised tensor's values and scales.

    `name` is the tensor's; names of inner tensors begin with it.
    """
    if (flatten := getattr(tensor, "__tensor_flatten__", None)) is None:
        yield name, tensor.detach()
        return
    for inside in flatten()[0]:
        yield from plain_tensors(f"{name}.{inside}", getattr(tensor, inside))


_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be summed; quantised ones hold no NaN, and their scales have one of these dtypes."""


def load_whole_model(source: Source, **arguments: Any) -> Any:
    """Return a source's model in eval mode, after checking that every weight was read from its files and is finite.

    Raises ModelError for unreadable files, and with the name of the first tensor that is missing, unexpected, of
    another shape, or not finite. `arguments` are further ones of `AutoModelForCausalLM.from_pretrained`.
    """
    with explain_errors(source, "the weights"):
        model, info = AutoModelForCausalLM.from_pretrained(
            source.location, **source.arguments, **arguments, output_loading_info=True, ignore_mismatched_sizes=True
        )
    if mismatched := sorted(info["mismatched_keys"]):
        tensor, actual, expected = mismatched[0]
        _refuse_incomplete(
            source.name, f"expected '{tensor}' of shape {tuple(expected)}, got {tuple(actual)}", len(mismatched)
        )
    for key, problem in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for")):
        if tensors := sorted(info[key]):
            seen = f"its files and its configuration disagree: it {problem} '{tensors[0]}'"
            _refuse_incomplete(source.name, seen, len(tensors))
    if info["error_msgs"]:
        _refuse_incomplete(source.name, " ".join(info["error_msgs"][0].split())[:200], len(info["error_msgs"]))
    check_finite(model, source.name)
    return model.eval()


def check_shapes(name: str, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError if a stored weight's shape is not the model's: transformers would use random weights instead."""
    wrong = sorted(tensor for tensor in expected if stored.get(tensor, expected[tensor]) != expected[tensor])
    if wrong:
        _refuse_incomplete(
            name, f"expected '{wrong[0]}' of shape {expected[wrong[0]]}, got {stored[wrong[0]]}", len(wrong)
        )


def _refuse_incomplete(name: str, what: str, count: int) -> None:
    """Raise ModelError for an incomplete model: `what` describes the first of `count` problems."""
    more = f" and {count - 1} more" if count > 1 else ""
    raise ModelError(
        f"model '{name}' is not whole: {what}{more}; get its files anew, or a configuration that fits them"
    )


def check_finite(model: Any, name: str) -> None:
    """Raise ModelError for the first weight with NaN or Inf in it, reading every weight once."""
    tensors = (part for key, weight in model.named_parameters() for part in plain_tensors(key, weight))
    weights = {key: tensor for key, tensor in tensors if tensor.dtype in _PLAIN}
    # a sum is finite only where all its terms are; it may overflow where they are, so a bad one is looked at closely
    sums = torch.stack([weight.sum().to("cpu", torch.float64) for weight in weights.values()])
    suspects = [key for key, fine in zip(weights, torch.isfinite(sums).tolist(), strict=True) if not fine]
    for key in suspects:
        if not_finite := int((~torch.isfinite(weights[key])).sum()):
            raise ModelError(
                f"model '{name}' is not whole: '{key}' holds {not_finite} values that are NaN or Inf of "
                f"{weights[key].numel():,}; get its files anew"
            )

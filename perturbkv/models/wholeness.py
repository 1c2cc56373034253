"""A model that is not whole is refused: transformers would fill its gaps with random weights and say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from perturbkv.errors import ModelError
from perturbkv.models.sources import Source, explained
from perturbkv.models.tensors import parts

_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types that can be added up; quantised ones hold no NaN, and their scales are of these."""


def whole_model(source: Source, **arguments: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained` of a source in eval mode, every tensor from its files and finite.

    Raises ModelError for files that cannot be read, and one that names the first tensor which is missing, left over,
    of another shape, or not finite.
    """
    with explained(source, "the weights"):
        model, info = AutoModelForCausalLM.from_pretrained(
            source.location, **source.arguments, **arguments, output_loading_info=True, ignore_mismatched_sizes=True
        )
    _check_tensors(info, source.name)
    check_finite(model, source.name)
    return model.eval()


def check_shapes(name: str, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError for stored weights of other shapes than the model's: transformers would draw them anew first."""
    wrong = sorted(tensor for tensor in expected if stored.get(tensor, expected[tensor]) != expected[tensor])
    if wrong:
        _refuse(name, f"expected '{wrong[0]}' of shape {expected[wrong[0]]}, got {stored[wrong[0]]}", len(wrong))


def _check_tensors(info: Mapping[str, Any], name: str) -> None:
    """Hold what from_pretrained found against what the model needs; tied weights it has settled already."""
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        tensor, found, expected = mismatched[0]
        _refuse(name, f"expected '{tensor}' of shape {tuple(expected)}, got {tuple(found)}", len(mismatched))
    for key, problem in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for")):
        if tensors := sorted(info[key]):
            _refuse(name, f"its files and its configuration disagree: it {problem} '{tensors[0]}'", len(tensors))
    if info["error_msgs"]:
        _refuse(name, " ".join(info["error_msgs"][0].split())[:200], len(info["error_msgs"]))


def _refuse(name: str, what: str, count: int) -> None:
    more = f" and {count - 1} more" if count > 1 else ""
    msg = f"model '{name}' is not whole: {what}{more}; get its files anew, or a configuration that fits them"
    raise ModelError(msg)


def check_finite(model: Any, name: str) -> None:
    """Raise ModelError for the first weight that holds NaN or Inf; one pass, waiting for the device once."""
    held = (part for key, weight in model.named_parameters() for part in parts(key, weight))
    weights = {key: tensor for key, tensor in held if tensor.dtype in _PLAIN}
    # a sum is finite only where all its terms are; it may overflow where they are, so a bad one is looked at closely
    sums = torch.stack([weight.sum().to("cpu", torch.float64, non_blocking=True) for weight in weights.values()])
    suspects = [key for key, fine in zip(weights, torch.isfinite(sums).tolist(), strict=True) if not fine]
    for key in suspects:
        if not_finite := _not_finite(weights[key]):
            msg = (
                f"model '{name}' is not whole: '{key}' holds {not_finite} values that are NaN or Inf of "
                f"{weights[key].numel():,}; get its files anew"
            )
            raise ModelError(msg)


def _not_finite(weight: Tensor) -> int:
    return int((~torch.isfinite(weight)).sum())

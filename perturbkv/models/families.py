"""Supported model families, their particularities, and the variants that are refused. No torch here.

A family is a line of `FAMILIES`; a variant that decoding from an evicted cache would get wrong is refused by name and
never approximated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perturbkv.configs.layer_types import FULL, SLIDING, configured_window, is_mixed
from perturbkv.errors import ModelError

_WINDOWS = "layers of full attention are measured, sliding ones keep their own window"
_NORM_AFTER = "norm after the output projection: o_h and L stand before it"
_EXPERTS = "mixture of experts, routed token by token: rounding depends on what else is in the batch"


@dataclass(frozen=True)
class Family:
    """A family whose output projection is at `model.layers[i].self_attn.o_proj`.

    Attributes:
        name: common spelling of its name.
        special: particularities that matter for the interpretation of its numbers.
        sinks: whether each head has a sink in its softmax, the parameter `sinks` of its attention: an entry that always
            stays and has no value (METHOD: Attention sinks in the softmax).
        by_layer: whether its code applies `layer_types` to each layer; other families ignore that key.
    """

    name: str
    special: str = ""
    sinks: bool = False
    by_layer: bool = False

    @property
    def kernel(self) -> str:
        """Value of transformers' `attn_implementation`: eager for a family with sinks, else sdpa."""
        return "eager" if self.sinks else "sdpa"


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral"),
    "qwen2": Family("Qwen2", by_layer=True),
    "qwen3": Family("Qwen3", by_layer=True),
    "phi3": Family("Phi-3"),
    "gemma3_text": Family("Gemma 3", f"{_WINDOWS}; {_NORM_AFTER}", by_layer=True),
    "qwen3_moe": Family("Qwen3-MoE", _EXPERTS),
    "mixtral": Family("Mixtral", _EXPERTS),
    "olmo2": Family("OLMo 2", _NORM_AFTER),
    "olmo3": Family("OLMo 3", f"{_WINDOWS}; {_NORM_AFTER}", by_layer=True),
    "gpt_oss": Family(
        "gpt-oss",
        f"{_WINDOWS}; a sink in each head's softmax, which always stays; {_EXPERTS}",
        sinks=True,
        by_layer=True,
    ),
    "granite": Family("Granite", "what attention adds is scaled before the residual stream: o_h and L stand before it"),
}
"""transformers' model_type -> family."""
REFUSED = {
    "gemma2": "soft-caps the logits of its attention",
    "gemma3": "reads images beside text; its text part alone (gemma3_text) is supported",
    "llama4": "attends in chunks and scales its queries by their position",
    "llama4_text": "attends in chunks and scales its queries by their position",
}
"""Near relatives of supported families -> the reason why an eviction study would misread them."""
_SOFT_CAPS = ("attn_logit_softcapping", "attn_logit_softcap", "logit_softcap")


def soft_cap(config: Any) -> float | None:
    """Return the soft cap that a model's configuration names for the logits of its attention; None without one."""
    caps = (getattr(config, name, None) for name in _SOFT_CAPS)
    return next(filter(None, caps), None)


def check_family(config: Any, name: str) -> None:
    """Raise ModelError unless the model is of a supported family and its attention is a plain softmax."""
    kind = config.model_type
    if kind not in FAMILIES:
        why = f", which {REFUSED[kind]}" if kind in REFUSED else ""
        known = ", ".join(family.name for family in FAMILIES.values())
        raise ModelError(f"model '{name}' is of the family '{kind}'{why}; supported: {known}")
    _refuse_first(_softmax_deviations(config), name)


def check_layers(config: Any, name: str) -> None:
    """Raise ModelError unless `layer_types` has one entry per layer, full or sliding attention."""
    _refuse_first(_layer_type_problems(config), name)


def check_plain(config: Any, name: str, feature: str) -> None:
    """Raise ModelError for a model with sliding layers or attention sinks, which `feature` does not support."""
    obstacle = "layers that hold a sliding window" if is_mixed(config) else ""
    if FAMILIES[config.model_type].sinks:
        obstacle = "sinks in its softmax"
    if obstacle:
        raise ModelError(
            f"{feature} expects layers that all see the whole prompt and nothing else; model '{name}' has {obstacle}"
        )


def _refuse_first(reasons: Iterator[str], name: str) -> None:
    """Raise ModelError with the first of the reasons against model `name`; nothing without a reason."""
    if (reason := next(reasons, "")) != "":
        raise ModelError(f"model '{name}' {reason}; an eviction study would misread it")


def _softmax_deviations(config: Any) -> Iterator[str]:
    """Yield each deviation of a model's attention from a causal softmax, as a phrase to follow the model's name."""
    yield from (f"soft-caps its attention ({cap})" for cap in _SOFT_CAPS if getattr(config, cap, None))
    if getattr(config, "attention_sink", None) or getattr(config, "sinks", None):
        yield "has attention sinks beside its entries"
    if getattr(config, "use_bidirectional_attention", None):
        yield "attends to later tokens (use_bidirectional_attention)"
    if not getattr(config, "is_causal", True):
        yield "attends to later tokens (is_causal)"


def _layer_type_problems(config: Any) -> Iterator[str]:
    """Yield each unsupported property of `layer_types`, as a phrase to follow the model's name."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return
    yield from (f"has layers of the type '{kind}'" for kind in types if kind not in (FULL, SLIDING))
    if len(types) != config.num_hidden_layers:
        yield f"names the types of {len(types)} layers (layer_types) and has {config.num_hidden_layers}"
    if not FAMILIES[config.model_type].by_layer and (set(types) != {FULL} or configured_window(config)):
        yield "names kinds of layers (layer_types), which the code of its family passes over"
    if SLIDING in types and (configured_window(config) or 0) < 2:
        yield f"has sliding layers with a window of {configured_window(config)} entries (sliding_window)"

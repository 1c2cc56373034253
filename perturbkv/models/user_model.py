"""A model that somebody else has loaded: measured where it is, and left as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perturbkv.errors import ModelError
from perturbkv.models import stored_weights
from perturbkv.models.adapter import Adapter, check_projections
from perturbkv.models.families import check_family
from perturbkv.models.sanity import parts
from perturbkv.models.stored_weights import Stored

GIVEN = "given"
"""The revision of a model that came loaded, until its weights are told apart."""


def adapted(model: Any, tokenizer: Any) -> Adapter:
    """The model as measurements need it.

    Raises ModelError where it is none of ours, comes without a tokenizer, predicts no tokens, or projects its heads by
    no matrix.
    """
    if not hasattr(getattr(model, "config", None), "model_type"):
        msg = f"expected a model's name or a transformers model, got {type(model).__name__}"
        raise ModelError(msg)
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    if tokenizer is None:
        msg = f"model '{name}' is given without its tokenizer; give it as load_model(model, tokenizer=…)"
        raise ModelError(msg)
    check_family(model.config, name)
    _check_layers(model, name)
    if any(weight.is_meta for weight in model.parameters()):
        msg = f"expected model '{name}' with all its weights in memory, got some on the meta device; load it whole"
        raise ModelError(msg)
    found = Adapter(model, tokenizer, name, GIVEN, stored=_stored(model))
    with evaluating(found):
        check_projections(found)
    return found


def _stored(model: Any) -> Stored:
    """How its weights are stored, and what those that are quantised take, everything inside them counted."""
    stored = stored_weights.of_safetensors(None, model.config)
    if not stored.quantised:
        return stored
    whole = [*model.named_parameters(), *model.named_buffers()]
    return replace(stored, nbytes=sum(part.nbytes for held in whole for _, part in parts(*held)))


def _check_layers(model: Any, name: str) -> None:
    """Raise ModelError unless a model predicts tokens, from as many layers as its configuration says."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not hasattr(model, "lm_head"):
        msg = f"expected a causal language model (AutoModelForCausalLM), got '{name}', a {type(model).__name__}"
        raise ModelError(msg)
    if len(layers) != (said := getattr(model.config, "num_hidden_layers", len(layers))):
        msg = f"model '{name}' has {len(layers)} layers and its configuration says {said}; change num_hidden_layers too"
        raise ModelError(msg)


def fingerprint(model: Adapter) -> str:
    """Tells one set of weights from another: all bytes of weights and buffers, configuration, every layer's scale."""
    digest = hashlib.sha256(str(model.config.to_json_string()).encode())
    digest.update(repr([float(layer.self_attn.scaling) for layer in model.every_layer]).encode())
    for whole, held in [*model.model.state_dict().items(), *model.model.named_buffers()]:
        for name, tensor in parts(whole, held) if isinstance(held, Tensor) else ():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()[:16]}"


@contextmanager
def evaluating(model: Adapter) -> Iterator[None]:
    """Dropout and the like are off inside the block, and every module's mode is what it was behind it."""
    modes = {module: module.training for module in model.model.modules()}
    model.model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training

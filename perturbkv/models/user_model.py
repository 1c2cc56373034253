"""A model that the user has loaded: measured in place, and left as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from perturbkv.errors import ModelError
from perturbkv.models import stored_weights
from perturbkv.models.adapter import Adapter
from perturbkv.models.sanity import plain_tensors

GIVEN = "given"
"""The revision of a user's model as long as its fingerprint is not computed."""


def adapt(model: Any, tokenizer: Any) -> Adapter:
    """Return the adapter of a transformers model that the user has loaded.

    Raises ModelError where it is no transformers model, is compiled or wrapped by PEFT, lacks a tokenizer, predicts no
    tokens, or fails the proof.
    """
    if not hasattr(getattr(model, "config", None), "model_type"):
        raise ModelError(f"expected a model's name or a transformers model, got {type(model).__name__}")
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules):
        raise ModelError(
            f"expected model '{name}' as it is before torch.compile, which hides its attention; give the plain model "
            "(that of torch.compile(model) is its _orig_mod), or load it anew"
        )
    if callable(getattr(model, "merge_and_unload", None)):
        raise ModelError(
            f"expected a transformers model, got a {type(model).__name__} around one; give it as "
            "load_model(model.merge_and_unload(), tokenizer=…)"
        )
    if tokenizer is None:
        raise ModelError(f"model '{name}' is given without its tokenizer; give it as load_model(model, tokenizer=…)")
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise ModelError(
            f"expected a causal language model (AutoModelForCausalLM), got '{name}', a {type(model).__name__}"
        )
    if any(weight.is_meta for weight in model.parameters()):
        raise ModelError(
            f"expected model '{name}' with all its weights in memory, got some on the meta device; load it whole"
        )
    stored = stored_weights.safetensors_storage(None, model.config)
    if stored.quantised:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        stored = replace(stored, nbytes=sum(plain.nbytes for named in tensors for _, plain in plain_tensors(*named)))
    with eval_mode(model):
        return Adapter(model, tokenizer, name, GIVEN, stored=stored)


def fingerprint(model: Adapter) -> str:
    """Return a digest of a loaded model: its configuration, the scale of every layer, and all weights and buffers."""
    digest = hashlib.sha256(str(model.config.to_json_string()).encode())
    digest.update(repr([getattr(module, "scaling", None) for module in model.every_attention.values()]).encode())
    for key, value in [*model.model.state_dict().items(), *model.model.named_buffers()]:
        for name, tensor in plain_tensors(key, value) if isinstance(value, Tensor) else ():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()[:16]}"


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set every module to eval mode inside the block, and restore its mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training

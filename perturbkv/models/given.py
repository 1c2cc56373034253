"""A model that somebody else has loaded: measured where it is, and left as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perturbkv.errors import ModelError
from perturbkv.models import stored_weights
from perturbkv.models.adapter import Adapter


def adapted(model: Any, tokenizer: Any) -> Adapter:
    """The model as measurements need it. Raises ModelError where it is none of ours, or comes without a tokenizer."""
    if not hasattr(model, "config") or not hasattr(getattr(model, "config", None), "model_type"):
        msg = f"expected a model's name or a transformers model, got {type(model).__name__}"
        raise ModelError(msg)
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    if tokenizer is None:
        msg = f"model '{name}' is given without its tokenizer; give it as load_model(model, tokenizer=…)"
        raise ModelError(msg)
    return Adapter(model, tokenizer, name, fingerprint(model), stored=stored_weights.of_safetensors(None, model.config))


def fingerprint(model: Any) -> str:
    """Tells one set of weights from another without reading them all from the device: names, shapes, types and sums."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(repr(_sums(weight)).encode())
    return f"fingerprint:{digest.hexdigest()[:16]}"


def _sums(weight: Any) -> tuple[float, float]:
    """Sum, and sum of magnitudes, in float64; integers, as quantised weights are, count as numbers."""
    if not isinstance(weight, torch.Tensor):
        return 0.0, 0.0
    work = weight.detach().to(torch.float64)
    return float(work.sum()), float(work.abs().sum())


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

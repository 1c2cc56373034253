"""Tiny models on GPUs that are not there: on one, or their layers on two."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from perturbkv.cache import ragged
from perturbkv.models import adapter, projection
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ByteTokenizer
from perturbkv.scoring import value_norms
from tests.rehearsal.pretend_gpu import Rehearsal, as_kernel, pretend_gpus
from tests.support.models import tiny_model
from tests.support.varlen import varlen

WITH_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and "CI" not in os.environ, reason="no g++, which the pretended GPU needs"
)
"""Of every file that uses `rehearsal`; in a CI a missing compiler is a failure."""

ONE, TWO_GPUS = ("cuda:0",), ("cuda:0", "cuda:1")
OFFLOADED = ("cuda:0", "cpu")
"""Devices of a model: one GPU, two, and one with the later layers left on the CPU."""


@contextmanager
def rehearsal(count: int = 1) -> Iterator[Rehearsal]:
    """Pretended GPUs, with stand-ins for kernels that only a real one has; its Triton does not run."""
    with pretend_gpus(count) as counted, ExitStack() as stack:
        kernel = as_kernel(varlen)
        stack.enter_context(mock.patch.object(ragged, "variable_length_attention", lambda: kernel))
        stack.enter_context(mock.patch.object(value_norms, "triton_unavailable_reason", lambda device: "no GPU"))
        stack.enter_context(mock.patch.object(projection, "is_plain", lambda found: type(found) is nn.Linear))
        stack.enter_context(mock.patch.object(adapter, "check_twin", lambda model: None))  # of code alone
        yield counted


def tiny(family: str = "llama", devices: Sequence[str] = (), **more: Any) -> Adapter:
    """A tiny model on the CPU, or its layers on one device after the other, the embedding on the first."""
    model = tiny_model(family, **more)
    move_layers(model, devices)
    return Adapter(model, ByteTokenizer(), f"tiny-{family}", "test", True)


def move_layers(model: Any, devices: Sequence[str]) -> None:
    """Move a model's layers to one device after the other, the embedding to the first."""
    layers, last = len(model.model.layers), len(devices) - 1
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": last, "lm_head": last}
    places |= {f"model.layers.{layer}": layer * len(devices) // layers for layer in range(layers)}
    for name, place in places.items() if devices else ():
        module, device = model.get_submodule(name), torch.device(devices[place])
        if device.type != "cpu":
            _move(module, device)
        if len(devices) > 1:
            module.register_forward_pre_hook(_follow(device), with_kwargs=True)


def counted(measure: Callable[[Adapter], object], layers: int = 1, dtype: torch.dtype = torch.float32) -> Rehearsal:
    """What a measurement counts on one pretended GPU, without making the model."""
    with rehearsal() as counts:
        model = tiny(layers=layers, devices=ONE, dtype=dtype)
        counts.clear()
        measure(model)
    return counts


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module's weights to a device, as new parameters: tensors of another class cannot replace their data."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        module._parameters[name] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
    for name, buffer in list(module.named_buffers(recurse=False)):
        module._buffers[name] = buffer.to(device)
    for child in module.children():
        _move(child, device)


def _follow(device: torch.device) -> Any:
    """A hook that moves a module's inputs to its device, as accelerate does where a model lies on several."""

    def move(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda one: one.to(device), (args, kwargs))

    return move

"""A pretended GPU that counts the bytes of its tensors, and one without numbers, for models of any size.

On paper, tensors have sizes alone. The numbers that the host reads are made up: everything is finite, and every head
keeps its mean budget. Not counted is what a GPU takes besides tensors: its context, the memory that kernels use within
an operation, and what the allocator cannot join.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import perturbkv as pk
from perturbkv.cache import ragged
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.models import adapter as adapters
from perturbkv.models import proof
from perturbkv.models.adapter import Adapter
from perturbkv.models.attention_facts import Facts
from perturbkv.models.loading import ByteTokenizer
from perturbkv.pipeline.sample import capture, one_sample
from perturbkv.schema import VARIABLES
from perturbkv.scoring import value_norms
from perturbkv.scoring.kernels import projected_norms
from perturbkv.selection.resolved_config import ResolvedRun
from tests.rehearsal import pretend_gpu
from tests.rehearsal.models import ONE, move_layers, rehearsal
from tests.rehearsal.pretend_gpu import PretendTensor, Rehearsal
from tests.support.models import tiny_adapter
from tests.support.resolved import resolved_run

_META = torch.device("meta")
_aten = torch.ops.aten
STAGES = {"prefill": "prefill", "measure_layer": "layer", "_select_layers": "layer", "_evict": "decoding",
          "_decode": "decoding", "_measure": "decoding"}  # fmt: skip
"""Function of a sample -> its stage, as `footprint.Memory` names it."""


_NOTHING = {name: np.zeros((1,) * len(variable.dims)) for name, variable in VARIABLES.items()}


class Counting(Rehearsal):
    """Pretended devices whose tensors' bytes are counted.

    Attributes:
        live: bytes of the tensors that are alive.
        peaks: stage -> most bytes alive in it; "" of everything else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peaks: Counter[str] = Counter()
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, PretendTensor):
                self._count(tensor.held.untyped_storage())
        stage = _stage()
        self.peaks[stage] = max(self.peaks[stage], self.live)
        return result

    def _count(self, storage: Any) -> None:
        """Count a storage until it is freed."""
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, identity: int, size: int) -> None:
        """Count a storage that is freed."""
        self._seen.remove(identity)
        self.live -= size


def _stage() -> str:
    """The stage of a sample that is being run; empty where none is."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in STAGES:
        frame = frame.f_back
    return STAGES[frame.f_code.co_name] if frame else ""


def _without_numbers(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, on meta tensors where its device is pretended; what the host reads is 1."""
    pretended = any(isinstance(leaf, PretendTensor) for leaf in tree_leaves((args, kwargs)))
    device = kwargs.get("device")
    if pretended and function is _aten._local_scalar_dense.default:
        return 1
    if pretended and function in pretend_gpu._MOVES and device == torch.device("cpu"):
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    place = _META if pretended or (device is not None and device.type == "cuda") else None
    args, kwargs = tree_map_only(PretendTensor, lambda one: one.held, (args, kwargs))
    if place is not None:
        args = tree_map_only(Tensor, lambda one: one.to(_META) if one.ndim else one, args)
    kwargs = {name: place or one if name == "device" else one for name, one in kwargs.items() if name != "pin_memory"}
    return function(*args, **kwargs)


def _mean_lengths(run: ResolvedRun, tokens: int) -> Any:
    """A stand-in for `entries.kept_lengths` that reads no numbers: every kept set has the mean budget."""

    def kept_lengths(layers: Sequence[Any], configs: int, device: torch.device) -> list[list[list[int]]]:
        sets = {index: group.kept_heads for group in layers[0] for index in group.config_indices}
        return [[[run.configs[index].kept_entries(tokens)] * sets[index] for index in range(configs)] for _ in layers]

    return kept_lengths


def _kernel(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """What CUDA's attention over segments leaves."""
    return torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)


def _norms(value: Tensor, w_o: Tensor) -> Tensor:
    """What the Triton kernel leaves."""
    return value.new_empty(w_o.shape[1] // value.shape[-1], value.shape[1], dtype=torch.float32)


@contextmanager
def _paper_gpu(run: ResolvedRun, tokens: int) -> Iterator[Counting]:
    """Inside, this machine has a GPU whose tensors hold no numbers, for a run on prompts of `tokens` tokens."""
    changes = [
        (pretend_gpu, "_on_cpu", _without_numbers),
        (one_sample, "kept_lengths", _mean_lengths(run, tokens)),
        (one_sample, "_assemble_arrays", lambda *_: _NOTHING),  # on the host
        (capture.FiniteCheck, "raise_if_not", lambda *_: None),
    ]
    kernels = [
        (ragged, "variable_length_attention", lambda: _kernel),
        (value_norms, "_use_triton", lambda *_: True),
        (projected_norms, "projected_value_norms", _norms),
    ]
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        counting = stack.enter_context(counting_gpu())
        for change in kernels:
            stack.enter_context(mock.patch.object(*change))
        yield counting


@contextmanager
def counting_gpu() -> Iterator[Counting]:
    """Inside, this machine has a pretended GPU whose tensors' bytes are counted."""
    with mock.patch.object(pretend_gpu, "Rehearsal", Counting), rehearsal() as counting:
        yield counting  # type: ignore[misc]


def _facts_on_paper(config: Any) -> Facts:
    """What the proof finds of a tiny llama, with the sizes of a model without numbers."""
    found = tiny_adapter("llama").facts
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layer = replace(found.layers[0], heads=heads, kv_heads=kv_heads, d_key=size, d_value=size, scale=size**-0.5)
    return replace(found, layers=(layer,) * config.num_hidden_layers)


def on_paper(model: nn.Module, tokens: int, configs: Iterable[EvictionConfig], **fields: Any) -> Counting:
    """What a sample of `tokens` tokens takes of a GPU with a model that lies on torch's device `meta`."""
    run = resolved_run(configs, **fields)
    facts = _facts_on_paper(model.config)
    with (
        _paper_gpu(run, tokens) as counting,
        mock.patch.object(proof, "prove", lambda model: facts),
        mock.patch.object(adapters, "check_twin", lambda model: None),
    ):
        move_layers(model, ONE)
        adapter = Adapter(model, ByteTokenizer(), "paper", "test", True)
        one_sample.trace_sample(adapter, pk.Prompt("p", (5,) * tokens, 0), run, Resources())
    return counting

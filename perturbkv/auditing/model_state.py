"""The model's weights and parts before an audited eviction runs, and what it changed in them (METHOD: Audit, 3).

Hooks, replaced forwards and masks that it leaves are removed without a word, as its decoding may need them; changed
weights, buffers and modules are named. Replaced ones are put back; those changed in place cannot be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perturbkv.cache.external_cache import bits

_PARTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True, eq=False)
class ModelState:
    """A model as it was.

    Attributes:
        model: the model.
        parts: (module, attribute, its items) of every module: parameters, buffers, modules and hooks.
        checksums: name -> checksum of a parameter's or buffer's numbers.
    """

    model: nn.Module
    parts: tuple[tuple[nn.Module, str, dict[str, Any]], ...]
    checksums: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Return the present state of a model."""
        parts = tuple(
            (module, name, dict(getattr(module, name))) for module in model.modules() for name in (*_PARTS, *_HOOKS)
        )
        return cls(model, parts, {name: _checksum(tensor) for name, tensor in _tensors(model)})

    def restore(self) -> list[str]:
        """Put back what was replaced, and return in words what was changed: 'weights of lm_head', 'replaced: model'."""
        names = {module: name or "the model" for name, module in self.model.named_modules()}
        replaced = []
        for module, attribute, items in self.parts:
            present: dict[str, Any] = getattr(module, attribute)
            if attribute in _PARTS and not _same(present, items):
                replaced.append(f"replaced: parts of {names.get(module, type(module).__name__)}")
            if not _same(present, items):
                present.clear()
                present.update(items)
        after = {name: _checksum(tensor) for name, tensor in _tensors(self.model)}
        return replaced + [f"weights of {name}" for name, before in self.checksums.items() if after.get(name) != before]


def _same(items: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether two dicts hold the same objects under the same names in the same order."""
    return list(items) == list(others) and all(value is others[name] for name, value in items.items())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters and buffers of a model."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _checksum(tensor: Tensor) -> tuple[int, int]:
    """Return two integers that change with any number of a tensor, and with the order of its rows or columns."""
    if not tensor.numel():
        return 0, 0
    rows = bits(tensor.detach()).reshape(len(tensor) if tensor.ndim else 1, -1)
    sums = rows.sum(dim=1, dtype=torch.int64), rows.sum(dim=0, dtype=torch.int64)
    by_place = (part * torch.arange(1, 2 * len(part), 2, device=part.device) for part in sums)
    first, second = (int(part.sum()) for part in by_place)
    return first, second

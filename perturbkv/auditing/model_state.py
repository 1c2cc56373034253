"""The model before an audited eviction runs, and what the eviction changed in it (METHOD: Audit, 3).

Everything replaced is put back. Hooks, masks and functions (forwards of modules, methods of their classes, functions of
the model's file) go without a word, as the eviction's decoding may need them. Weights, modules, and numbers such as an
attention's scaling are named, and so is a model that computes other logits than before, whatever the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perturbkv.auditing.evictions import FailedError
from perturbkv.cache.external_cache import bits
from perturbkv.configs.plugins import defined_in_user_file, external_code

_PARTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TOKENS = 8
"""Tokens of the prompt whose logits are compared before and after."""


@dataclass(frozen=True, eq=False)
class ModelState:
    """A model as it was.

    Attributes:
        model: the model.
        parts: (module, attribute, its items) of every module: parameters, buffers, modules and hooks.
        attributes: (module, name -> value) of every module: everything else.
        code: (class or Python module, name -> value) of the model's own classes and the files that define them.
        config: the model's configuration.
        checksums: name -> checksum of a parameter's or buffer's numbers.
        logits: bits of the logits after a few tokens.
    """

    model: nn.Module
    parts: tuple[tuple[nn.Module, str, dict[str, Any]], ...]
    attributes: tuple[tuple[nn.Module, dict[str, Any]], ...]
    code: tuple[tuple[Any, dict[str, Any]], ...]
    config: dict[str, Any]
    checksums: dict[str, tuple[int, int]]
    logits: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Return the present state of a model."""
        modules = list(model.modules())
        return cls(
            model=model,
            parts=tuple((module, name, dict(getattr(module, name))) for module in modules for name in _PARTS + _HOOKS),
            attributes=tuple((module, _attributes(module)) for module in modules),
            code=tuple((owner, dict(vars(owner))) for owner in _code(model)),
            config=_config(model),
            checksums={name: _checksum(tensor) for name, tensor in _tensors(model)},
            logits=_logits(model),
        )

    def replaced_on_import(self) -> str:
        """Return the name of a part of the model's code that a user's file has replaced; empty where none has."""
        replaced = (
            f"{owner.__name__}.{name}" for owner, values in self.code for name, value in values.items()
            if defined_in_user_file(value)
        )  # fmt: skip
        return next(replaced, "")

    def restore(self) -> list[str]:
        """Put back what was replaced, and return in words what was changed: 'weights of lm_head', 'replaced: model'."""
        names = {module: name or "the model" for name, module in self.model.named_modules()}
        changed = self._restore_parts(names)
        for module, before in self.attributes:
            changed += [f"{name} of {names.get(module, type(module).__name__)}" for name in _put_back(module, before)]
        for owner, values in self.code:
            for name, value in values.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
        present: Any = self.model.config
        for name, value in _config(self.model).items():
            if name in self.config and value != self.config[name]:
                changed.append(f"config.{name}")
                setattr(present, name, self.config[name])
        after = {name: _checksum(tensor) for name, tensor in _tensors(self.model)}
        changed += [f"weights of {name}" for name, before in self.checksums.items() if after.get(name) != before]
        return changed or self._compare_logits()

    def _restore_parts(self, names: Mapping[nn.Module, str]) -> list[str]:
        """Put back parameters, buffers, modules and hooks, and return in words which were others, hooks aside."""
        replaced = []
        for module, attribute, items in self.parts:
            present: dict[str, Any] = getattr(module, attribute)
            if _same(present, items):
                continue
            if attribute in _PARTS:
                replaced.append(f"replaced: parts of {names.get(module, type(module).__name__)}")
            present.clear()
            present.update(items)
        return replaced

    def _compare_logits(self) -> list[str]:
        """Return in words how the model computes otherwise than before; nothing where it does not."""
        try:
            with external_code("plain calls of it raise", FailedError):
                same = torch.equal(_logits(self.model), self.logits)
        except FailedError as error:
            return [str(error)]
        return [] if same else ["plain calls of it give other logits, though its weights and parts are as before"]


def _put_back(module: nn.Module, before: Mapping[str, Any]) -> list[str]:
    """Put back a module's attributes and return the names of changed ones; functions that were replaced go silently."""
    changed, values = [], vars(module)
    for name in [name for name in values if name not in before and hasattr(type(module), name)]:
        del values[name]  # it hides the class's own, such as `forward`
    for name, value in before.items():
        present = values.get(name)
        if present is value or (isinstance(value, int | float | str | tuple) and present == value):
            continue
        if not callable(value):
            changed.append(name)
        values[name] = value
    return changed


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are no parts of it."""
    return {name: value for name, value in vars(module).items() if name not in _PARTS + _HOOKS}


def _code(model: nn.Module) -> Iterator[Any]:
    """Yield the Python modules that define a model's classes, and all classes of theirs."""
    files = {type(module).__module__ for module in model.modules()}
    for name in sorted(file for file in files if not file.startswith("torch.")):
        file = sys.modules[name]
        yield file
        yield from (value for value in vars(file).values() if isinstance(value, type) and value.__module__ == name)


def _config(model: nn.Module) -> dict[str, Any]:
    """Return a model's configuration as a dict of its own."""
    config: Any = model.config
    return dict(config.to_dict())


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    """Return the bits of a model's logits after a few tokens, read as plain calls read them."""
    ids = torch.arange(_TOKENS, device=next(model.parameters()).device).unsqueeze(0)
    return bits(model(input_ids=ids).logits)


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

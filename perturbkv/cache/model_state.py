"""The model before an audited eviction runs, and what the eviction changed in it (METHOD: Audit, 3).

Everything replaced is put back, and everything added is removed. Of hooks, settings, additions, functions and classes
nothing is said, as the eviction's decoding may need them; functions and classes are those of the model, of the file
that defines it, and of what models share (attention functions, caches, `torch.nn.functional`). Named are changed
weights, replaced parts, other numbers (an attention's scaling), and a model that computes other logits than before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import linear
from torch.nn.modules import module as module_file
from transformers import Cache, DynamicCache, cache_utils, masking_utils
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from perturbkv.cache.external_cache import bit_patterns
from perturbkv.configs.plugins import external_code, is_library_file
from perturbkv.models.forward import run_with_cache
from perturbkv.models.interface import text_config
from perturbkv.selection.external_eviction import FailedError

_PARTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
_SHARED = (cache_utils, masking_utils, sdpa_attention, functional, linear, module_file)
"""Python modules whose functions and classes all models use."""
_REGISTRIES = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
_TOKENS, _PADDING = 12, 4
"""Size of the batch whose logits are compared before and after, and padding of its second row."""
_PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of attributes that are compared by value."""


@dataclass(frozen=True, eq=False)
class ModelState:
    """A model as it was.

    Attributes:
        model: the model.
        parts: (module, attribute, its items) of every module: parameters, buffers, modules and hooks.
        attributes: (module, name -> value) of every module: everything else.
        classes: (module, class) of every module.
        code: (class or Python module, name -> value) of the model's own and of what all models share.
        registries: (dict, its items) of attention and mask functions and of hooks of all modules.
        config: settings of the model's configuration.
        checksums: name -> checksum of a parameter's or buffer's numbers.
        logits: bits of logits of a padded batch, read at once and continued.
    """

    model: nn.Module
    parts: tuple[tuple[nn.Module, str, dict[str, Any]], ...]
    attributes: tuple[tuple[nn.Module, dict[str, Any]], ...]
    classes: tuple[tuple[nn.Module, type], ...]
    code: tuple[tuple[Any, dict[str, Any]], ...]
    registries: tuple[tuple[dict[Any, Any], dict[Any, Any]], ...]
    config: dict[str, Any]
    checksums: dict[str, tuple[int, int]]
    logits: Tensor

    @classmethod
    def capture(cls, model: nn.Module) -> ModelState:
        """Return the present state of a model."""
        modules, config = list(model.modules()), model.config
        return cls(
            model=model,
            parts=tuple((module, name, dict(getattr(module, name))) for module in modules for name in _PARTS + _HOOKS),
            attributes=tuple(
                (module, {name: value for name, value in vars(module).items() if name not in _PARTS + _HOOKS})
                for module in modules
            ),
            classes=tuple((module, type(module)) for module in modules),
            code=tuple((owner, dict(vars(owner))) for owner in _code_owners(model)),
            registries=tuple((items, dict(items)) for items in _registries()),
            config=dict(vars(config)),
            checksums={name: _checksum(tensor) for name, tensor in _tensors(model)},
            logits=_logit_bits(model),
        )

    def restore(self) -> list[str]:
        """Put back what was replaced, and return in words what was changed, such as 'weights of lm_head.weight'.

        Weights that were changed in place stay so.
        """
        for owner, items in self.code:
            for name, value in items.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
            for name in [name for name in vars(owner) if name not in items]:
                with contextlib.suppress(AttributeError):  # what cannot be removed stays
                    delattr(owner, name)
        for present, before in self.registries:
            if not _have_same_items(present, before):
                present.clear()
                present.update(before)
        for module, kind in self.classes:
            if type(module) is not kind:
                module.__class__ = kind
        changed = self._restore_parts()
        changed += [words for module, before in self.attributes for words in self._restore_attributes(module, before)]
        settings = vars(self.model.config)
        settings.clear()
        settings.update(self.config)
        after = {name: _checksum(tensor) for name, tensor in _tensors(self.model)}
        changed += [f"weights of {name}" for name, before in self.checksums.items() if after.get(name) != before]
        return changed or self._compare_logits()

    def _module_name(self, module: nn.Module) -> str:
        """Return a module's name in the model; its class's where it is no part of it."""
        names = {known: name or "the model" for name, known in self.model.named_modules()}
        return names.get(module, type(module).__name__)

    def _restore_attributes(self, module: nn.Module, before: Mapping[str, Any]) -> list[str]:
        """Put back a module's attributes, and return in words which plain values and tensors were others.

        What was not there or None, as kvpress' indices of masked entries are, is put back and not told.
        """
        values, changed = vars(module), []
        for name in [name for name in values if name not in before and name not in _PARTS + _HOOKS]:
            del values[name]
        for name, value in before.items():
            if _are_equal(values.get(name), value):
                continue
            if value is not None and isinstance(value, (*_PLAIN, Tensor)):
                changed.append(f"{name} of {self._module_name(module)}")
            values[name] = value
        return changed

    def _restore_parts(self) -> list[str]:
        """Put back parameters, buffers, modules and hooks, and return in words which parts were others or gone."""
        replaced = []
        for module, attribute, items in self.parts:
            present: dict[str, Any] = getattr(module, attribute)
            if _have_same_items(present, items):
                continue
            if attribute in _PARTS and not _have_same_items({name: present.get(name) for name in items}, items):
                replaced.append(f"replaced: parts of {self._module_name(module)}")
            present.clear()
            present.update(items)
        return replaced

    def _compare_logits(self) -> list[str]:
        """Return in words how the model computes otherwise than before; nothing where it does not."""
        try:
            with external_code("plain calls of it raise", FailedError):
                same = torch.equal(_logit_bits(self.model), self.logits)
        except FailedError as error:
            return [str(error)]
        return [] if same else ["plain calls of it give other logits, though its weights and parts are as before"]


def foreign_code(model: nn.Module) -> str:
    """Return in words which function of a model's code no installed library defines, and its file; empty if none."""
    values = [
        (f"{owner.__name__}.{name}", value) for owner in _code_owners(model) for name, value in vars(owner).items()
    ]
    config: Any = model.config
    own = config._attn_implementation  # others may be registered, as the model does not call them
    values += [(f"the attention function or mask '{own}'", items[own]) for items in _registries() if own in items]
    found = ((name, _foreign_file(value)) for name, value in values)
    return next((f"{name} is of {file}" for name, file in found if file), "")


def describe_damage(changed: Sequence[str]) -> str:
    """Return in words that the model was changed; empty where it was not."""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"it changed the model ({changed[0]}{more})" if changed else ""


def _are_equal(value: Any, other: Any) -> bool:
    """Return whether two values are the same object, equal plain values, or equal tensors."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, _PLAIN):
        return bool(value == other)
    if isinstance(value, Tensor):
        return value.shape == other.shape and torch.equal(value, other)
    return False


def _code_owners(model: nn.Module) -> Iterator[Any]:
    """Yield the Python modules that define a model's classes, what all models share, and all classes of these."""
    names = {type(module).__module__ for module in model.modules()}
    own = sorted(name for name in names if not name.startswith("torch."))
    for code in [*(sys.modules[name] for name in own), *_SHARED]:
        yield code
        yield from (
            value for value in vars(code).values() if isinstance(value, type) and value.__module__ == code.__name__
        )


def _registries() -> Iterator[dict[Any, Any]]:
    """Yield the dicts of attention and mask functions, and of hooks of all modules."""
    for registry in _REGISTRIES:
        yield registry._global_mapping
        yield registry._local_mapping
    named = vars(module_file).items()
    yield from (value for name, value in named if name.startswith("_global_") and isinstance(value, dict))


def _foreign_file(value: Any) -> str:
    """Return the name of the file that defines a function, where no installed library does; else an empty text.

    The function may be wrapped, as a property or a partial; empty for any other value.
    """
    while isinstance(value, functools.partial | staticmethod | classmethod):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    value = value.fget if isinstance(value, property) else value
    if not inspect.isfunction(value) or value.__code__.co_filename.startswith("<"):  # some are generated
        return ""
    file = Path(value.__code__.co_filename)
    return "" if is_library_file(file) else file.name


@torch.no_grad()
def _logit_bits(model: nn.Module) -> Tensor:
    """Return the bits of logits (row, token, vocab) of a padded batch, read at once and continued by a token."""
    ids = torch.arange(_TOKENS, device=next(model.parameters()).device).expand(2, -1)
    mask = torch.ones_like(ids)
    mask[1, :_PADDING] = 0
    cache: Cache = DynamicCache(config=text_config(model))
    read = run_with_cache(model, ids, cache, attention_mask=mask).logits
    mask = torch.cat([mask, mask[:, :1] * 0 + 1], dim=-1)
    continued = run_with_cache(model, ids[:, :1], cache, attention_mask=mask).logits
    return bit_patterns(torch.cat([read, continued], dim=1))


def _have_same_items(items: Mapping[Any, Any], others: Mapping[Any, Any]) -> bool:
    """Return whether two dicts hold the same objects under the same names in the same order."""
    return list(items) == list(others) and all(value is others[name] for name, value in items.items())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters and buffers of a model."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _checksum(tensor: Tensor) -> tuple[int, int]:
    """Return two integers that change with any number of a tensor, and with the order of its rows or columns.

    0 and 0 for an empty tensor.
    """
    if not tensor.numel():
        return 0, 0
    rows = bit_patterns(tensor.detach()).reshape(len(tensor) if tensor.ndim else 1, -1)
    sums = rows.sum(dim=1, dtype=torch.int64), rows.sum(dim=0, dtype=torch.int64)
    # times 1, 3, 5, …: the order counts, and an odd factor loses no bit when the sum wraps around
    by_place = (part * torch.arange(1, 2 * len(part), 2, device=part.device) for part in sums)
    of_rows, of_columns = (int(part.sum()) for part in by_place)
    return of_rows, of_columns

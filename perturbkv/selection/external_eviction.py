"""Evictions by somebody's code, which are audited and measured: a function or a transformers `Cache` class.

It reads prompts and returns a cache, and may have its own decoding. It is given as an object, or named by a text,
`file.py:name(option=…)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from perturbkv.configs.choice import UNNAMED, Choice
from perturbkv.configs.option import KINDS
from perturbkv.configs.plugins import external_code, format_error, load_module
from perturbkv.errors import ConfigError, PerturbkvError, UnknownNameError, UnreadableCacheError
from perturbkv.models.forward import run_with_cache
from perturbkv.models.interface import text_config

_LOGIT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FUNCTION, CLASS, PRESS = "function", "cache class", "press"
BUDGET = "budget"
"""Argument that gets the number of entries per head which a budget asks for."""
_INPUTS = ("model", "input_ids", "attention_mask")
"""Arguments of an eviction that is a function."""

_OF_MODEL: Mapping[str, Callable[[Any], Any]] = {
    "config": lambda config: config,
    "head_dim": lambda config: getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
}
"""Argument of a cache class -> what it is of a model's configuration."""
_UNKNOWN_ARGUMENT = "update() got an unexpected keyword argument"
"""Part of Python's message where a cache, or a layer of it, does not take an argument of `update`."""

Evict = Callable[[Any, Tensor, Tensor], Any]
"""`(model, input_ids, attention_mask)`, both (batch, token), padding on the left → cache."""
Decode = Callable[[Any, Any, Tensor, int], Tensor]
"""`(model, cache, token, step)`: token (batch, new), step tokens decoded before → logits (batch, new, vocab)."""


class FailedError(PerturbkvError):
    """An exception of an eviction; its text says which, where, and what was being done."""


class RefusedError(PerturbkvError):
    """A situation that an eviction says it does not take."""


@contextmanager
def eviction_code(what: str) -> Iterator[None]:
    """Run an eviction's code, or the model with its cache: an exception becomes a FailedError that begins with `what`.

    Raises UnreadableCacheError where the cache's `update` takes fewer arguments than the model's layers pass.
    """
    with external_code(what, FailedError):
        try:
            yield
        except TypeError as error:
            if _UNKNOWN_ARGUMENT not in str(error):
                raise
            raise UnreadableCacheError(
                f"{error}; layers of transformers 5.24 and newer pass more to it, so let update take **kwargs"
            ) from error


@dataclass(frozen=True)
class Eviction:
    """An external eviction.

    Attributes:
        name: the text that names it.
        kind: function, cache class or press.
        evict: reads prompts and returns a transformers cache.
        decode: its own decoding, where it has one.
        masks: whether it masks entries instead of removing them.
    """

    name: str
    kind: str
    evict: Evict
    decode: Decode | None = None
    masks: bool = False

    @property
    def places_new_tokens(self) -> bool:
        """True where its users decode at positions that it gives: by its own decoding, or kvpress' pipeline."""
        return self.decode is not None or self.kind == PRESS

    def read(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        """Return the evicted cache of prompts, which are given as copies.

        Raises UnreadableCacheError unless it is a transformers cache that the model can update, RefusedError for a
        NotImplementedError, and FailedError for whatever else the eviction raises.
        """
        with eviction_code("reading the prompt raises"):
            try:
                cache = self.evict(model, input_ids.clone(), attention_mask.clone())
            except NotImplementedError as error:
                raise RefusedError(format_error(error)) from error
        if not isinstance(cache, Cache):
            raise UnreadableCacheError(
                f"expected {self.name} to return a transformers Cache, got {type(cache).__name__}"
            )
        return cache

    def logits(self, model: Any, cache: Cache, token: Tensor, step: int, what: str) -> Tensor:
        """Return the logits (batch, new, vocab) of its own decoding, or those of the last new token alone.

        `token` (batch, new) are the new tokens, decoded after `step` others. Raises FailedError, whose text begins with
        `what`, for an exception and for anything but such logits.
        """
        assert self.decode is not None
        with eviction_code(f"{what} raises"):
            logits = self.decode(model, cache, token.clone(), step)
        rows, new, vocabulary = *token.shape, int(model.config.get_text_config().vocab_size)
        if isinstance(logits, Tensor) and logits.ndim == 2:
            logits = logits.unsqueeze(1)
        expected = {(rows, count, vocabulary) for count in (1, new)}
        if not isinstance(logits, Tensor) or tuple(logits.shape) not in expected:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise FailedError(f"{what} gives {shape}, expected logits (batch, new, vocab) {(rows, new, vocabulary)}")
        if logits.dtype not in _LOGIT_TYPES or logits.layout != torch.strided or logits.device != token.device:
            raise FailedError(
                f"{what} gives {logits.dtype} ({logits.layout}) on {logits.device}, expected dense floating-point "
                f"logits on {token.device}"
            )
        return logits


def callable_eviction(
    target: Any, name: str, options: Mapping[str, Any] | None = None, decode: Decode | None = None
) -> Eviction:
    """Return the eviction by a function or a cache class, `target`, called with the keyword arguments `options`.

    `name` is the text that names it, `decode` its decoding where the target has none of its own. A target with an
    attribute `masks = True` masks entries that its cache holds. Raises ConfigError for any other object, and for
    options that the target does not take.
    """
    arguments, decode = dict(options or {}), getattr(target, "decode", None) or decode
    masks = getattr(target, "masks", False) is True
    if inspect.isclass(target) and issubclass(target, Cache):
        wanted = _wanted_of_model(target, arguments)
        _check_options(target, name, {**dict.fromkeys(wanted), **arguments})
        if not wanted:
            with external_code(f"{name} cannot be made:", ConfigError):  # before a model is loaded
                target(**arguments)

        def evict(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
            of_model = {argument: _OF_MODEL[argument](text_config(model)) for argument in wanted}
            cache, padding = target(**of_model, **arguments), padding_arguments(attention_mask)
            run_with_cache(model, input_ids, cache, logits_to_keep=1, **padding)
            return cache

        return Eviction(name, CLASS, evict, decode, masks)
    if inspect.isclass(target) or not callable(target):
        raise ConfigError(
            f"expected {name} to be a function ({', '.join(_INPUTS)}) or a transformers Cache class, got {target!r}"
        )
    _check_options(target, name, arguments, _INPUTS)
    return Eviction(name, FUNCTION, lambda *inputs: target(*inputs, **arguments), decode, masks)


def _wanted_of_model(target: Any, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments without default that a cache class takes from the model, in their order."""
    empty, parameters = inspect.Parameter.empty, inspect.signature(target).parameters.values()
    return tuple(
        one.name for one in parameters if one.name in _OF_MODEL and one.default is empty and one.name not in options
    )


def _check_options(target: Any, name: str, options: Mapping[str, Any], inputs: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for options that the function or class does not take, or whose values are of another type.

    `inputs` are the names of the positional arguments before the options.
    """
    signature = inspect.signature(target)
    try:
        signature.bind(*inputs, **options)
    except TypeError as error:
        known = [str(parameter) for parameter in signature.parameters.values() if parameter.name not in inputs]
        raise ConfigError(
            f"{name} cannot be called like this ({error}); it takes {', '.join(inputs)}{'; ' if inputs else ''}"
            f"{', '.join(known) or 'nothing'}"
        ) from None
    for option, value in options.items():
        parameter = signature.parameters.get(option)
        if parameter is None or value is None or (kind := _option_type(parameter)) is None:
            continue
        accepted, description = KINDS[kind]
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, accepted):
            raise ConfigError(f"expected {option} of {name} to be {description} ({parameter}), got '{value}'")


def _option_type(parameter: inspect.Parameter) -> type | None:
    """Return an option's plain type: its annotation, else its default's type; None for an unknown type or a union.

    A default such as 1 without annotation stands for any number: float. Of `int | None` the type is int.
    """
    annotation, default = parameter.annotation, parameter.default
    if annotation is inspect.Parameter.empty:
        return float if type(default) is int else type(default) if type(default) in KINDS else None
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation).removesuffix(" | None")
    return {kind.__name__: kind for kind in KINDS}.get(name)


def padding_arguments(attention_mask: Tensor) -> dict[str, Tensor]:
    """Return the model's keyword arguments for padded prompts, mask and positions; empty without padding."""
    if bool(attention_mask.all()):
        return {}
    positions = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    return {"attention_mask": attention_mask.clone(), "position_ids": positions.clone()}


def named_eviction(choice: Choice, budget: int | None = None) -> Eviction:
    """Return the eviction that a text names, `file.py:name(option=value, …)`; `budget` as in `with_budget`.

    Raises PluginError for a file that cannot be loaded, UnknownNameError for a name that it lacks, and ConfigError for
    options without a name, and what `callable_eviction` raises it for.
    """
    if UNNAMED in choice.options:
        raise ConfigError(
            f"expected every option of '{choice}' by its name, as {choice.name}(option=value), got one without"
        )
    target, decode = named_code(choice.name)
    return callable_eviction(target, str(choice), with_budget(target, choice.options, budget), decode)


def named_code(name: str) -> tuple[Any, Decode | None]:
    """Return the function or class that a text such as `file.py:name` names, and the file's `decode`, if it has one.

    Raises PluginError for a file that cannot be loaded, UnknownNameError for a name that it lacks.
    """
    path, _, own = name.rpartition(":")
    module = load_module(Path(path))
    if not hasattr(module, own):
        callables = [(known, value) for known, value in vars(module).items() if callable(value)]
        known = [known for known, value in callables if getattr(value, "__module__", "") == module.__name__]
        raise UnknownNameError(own, f"name in {path}", known)
    return getattr(module, own), getattr(module, "decode", None)


def with_budget(target: Any, options: Mapping[str, Any], budget: int | None) -> dict[str, Any]:
    """Return the options, with `budget` entries per head as one of them where the target has such an argument."""
    takes = budget is not None and callable(target) and BUDGET in inspect.signature(target).parameters
    return {**options, BUDGET: budget} if takes else dict(options)

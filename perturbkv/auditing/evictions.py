"""What can be audited: something that reads prompts and leaves an evicted cache, and may decode from it itself.

A press of kvpress as an eviction that is audited: it reads prompts as for its users, at the ratio of a budget.

From what a user names to what is audited: `file.py:name(option=…)`, a function, a class, or a file of positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from perturbkv.auditing.positions_file import SUFFIXES, KeptFile, read
from perturbkv.configs.choice import FIRST, Choice, parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.option import KINDS
from perturbkv.configs.plugins import module_of_file, said
from perturbkv.errors import ConfigError, UnknownNameError, UnreadableError
from perturbkv.pipeline.variants.presses import set_ratio
from perturbkv.selection.policies import kvpress
from perturbkv.selection.policies.kvpress import is_press

FUNCTION, CLASS, PRESS = "function", "cache class", "press"
_TAKES = ("model", "input_ids", "attention_mask")

Evict = Callable[[Any, Tensor, Tensor], Any]
"""`(model, input_ids, attention_mask)`, both (batch, token), padding on the left → cache."""
Decode = Callable[[Any, Any, Tensor, int], Tensor]
"""`(model, cache, token, step)`, token (batch, new), step tokens decoded before → logits (batch, new, vocab)."""


@dataclass(frozen=True)
class Eviction:
    """An eviction that is not ours.

    Attributes:
        name: as its user wrote it.
        kind: function, cache class or press.
        evict: reads prompts, returns a transformers cache.
        decode: its own decoding, where it brings one.
    """

    name: str
    kind: str
    evict: Evict
    decode: Decode | None = None

    def read(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        """The evicted cache. Raises UnreadableError for anything that is no cache of transformers'."""
        cache = self.evict(model, input_ids, attention_mask)
        if not isinstance(cache, Cache):
            msg = f"expected {self.name} to return a transformers Cache, got {type(cache).__name__}"
            raise UnreadableError(msg)
        return cache


def eviction(made: Any, name: str, options: Mapping[str, Any] | None = None, decode: Decode | None = None) -> Eviction:
    """The eviction that a function or a cache class is, `options` given to it by name.

    `decode` is used where it brings none of its own. Raises ConfigError for what is neither, and for options that it
    does not take.
    """
    chosen, own = dict(options or {}), getattr(made, "decode", None) or decode
    if inspect.isclass(made) and issubclass(made, Cache):
        _check_options(made, name, chosen)
        _check_made(made, name, chosen)
        return Eviction(name, CLASS, _reading(lambda: made(**chosen)), own)
    if inspect.isclass(made) or not callable(made):
        msg = f"expected {name} to be a function ({', '.join(_TAKES)}) or a transformers Cache class, got {made!r}"
        raise ConfigError(msg)
    _check_options(made, name, chosen, _TAKES)
    return Eviction(name, FUNCTION, lambda *given: made(*given, **chosen), own)


def _reading(build: Callable[[], Cache]) -> Evict:
    """A cache class reads a prompt as `past_key_values` of the plain model."""

    def evict(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        cache, padded = build(), {}
        if not bool(attention_mask.all()):
            places = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
            padded = {"attention_mask": attention_mask, "position_ids": places}
        model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **padded)
        return cache

    return evict


def _check_options(made: Any, name: str, options: Mapping[str, Any], given: tuple[str, ...] = ()) -> None:
    """Raise ConfigError where a call with these options is none that the function or class takes."""
    signature = inspect.signature(made)
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        takes = [one for one in signature.parameters.values() if one.name not in given]
        known = ", ".join(map(str, takes)) or "nothing"
        msg = f"{name} cannot be called like this ({error}); it takes {', '.join(given)}{'; ' if given else ''}{known}"
        raise ConfigError(msg) from None
    for option, value in options.items():
        _check_kind(signature.parameters.get(option), option, value, name)


def _check_kind(parameter: inspect.Parameter | None, option: str, value: Any, name: str) -> None:
    """Raise ConfigError for a value of another type than the option's annotation says, or its default is."""
    if parameter is None or value is None or (kind := _kind(parameter)) is None:
        return
    kinds, words = KINDS[kind]
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, kinds):
        msg = f"expected {option} of {name} to be {words} ({parameter}), got '{value}'"
        raise ConfigError(msg)


def _kind(parameter: inspect.Parameter) -> type | None:
    """The plain type of an option; a number that is not annotated may be any. None: not known, or of several."""
    written, default = parameter.annotation, parameter.default
    if written is inspect.Parameter.empty:
        return float if type(default) is int else type(default) if type(default) in KINDS else None
    said = written.__name__ if isinstance(written, type) else str(written).removesuffix(" | None")
    return {kind.__name__: kind for kind in KINDS}.get(said)


def _check_made(made: type[Cache], name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError where the class cannot be made with these options: before a model is loaded."""
    try:
        made(**options)
    except Exception as error:
        msg = f"{name} cannot be made: {said(error)}"
        raise ConfigError(msg) from error


def of_press(text: str, budget: Budget) -> Eviction:
    """The press that `kvpress:NAME(…)` writes, which keeps `budget` of each prompt.

    Raises ConfigError or UnknownNameError as `kvpress.Press.completed`.
    """
    choice = kvpress.policy(parse(text).name).completed(parse(text))

    def evict(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        cache, press, tokens = DynamicCache(), kvpress.build(choice), input_ids.shape[1]
        set_ratio(press, tokens, min(tokens, budget.tokens(tokens)))
        padded = {} if bool(attention_mask.all()) else _padded(attention_mask)
        with kvpress.quiet(), torch.inference_mode(False), torch.no_grad(), press(model):
            model.model(input_ids=input_ids.clone(), past_key_values=cache, **padded)
        return cache

    return Eviction(text, PRESS, evict)


def _padded(attention_mask: Tensor) -> dict[str, Tensor]:
    places = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    return {"attention_mask": attention_mask.clone(), "position_ids": places.clone()}


_WRITTEN = "file.py:name(option=value, …), a .npz or .json file of kept positions, or kvpress:Press(…)"


def load(given: Any, budget: Budget | None = None) -> Eviction | KeptFile:
    """What is audited; `budget` is what a press is to keep, and of a press alone.

    Raises ConfigError, PluginError or UnknownNameError in one line for what cannot be audited.
    """
    if isinstance(given, str) and not given.endswith(SUFFIXES) and is_press(parse(given)):
        return of_press(given, _needed(budget, given))
    if budget is not None:
        msg = (
            f"a budget has no effect here: it needs a press of kvpress, {given} says itself what it keeps; leave it out"
        )
        raise ConfigError(msg)
    if isinstance(given, Eviction | KeptFile):
        return given
    if isinstance(given, str | Path):
        return _written(str(given))
    return eviction(given, getattr(given, "__name__", type(given).__name__))


def _needed(budget: Budget | None, text: str) -> Budget:
    if budget is None:
        msg = f"expected a budget for the press {text}, got none; give --budget (budget=), such as 128 or 0.3"
        raise ConfigError(msg)
    return budget


def _written(text: str) -> Eviction | KeptFile:
    if Path(text).suffix in SUFFIXES:
        return read(Path(text))
    choice = parse(text)
    path, colon, name = choice.name.rpartition(":")
    if not colon or not path.endswith(".py"):
        msg = f"expected an eviction as {_WRITTEN}, got '{text}'"
        raise ConfigError(msg)
    module = module_of_file(Path(path))
    return eviction(_named(module, name, path), text, _options(choice, text), getattr(module, "decode", None))


def _named(module: ModuleType, name: str, path: str) -> Any:
    """What a file calls by this name. Raises UnknownNameError with what else it defines."""
    own = [
        one
        for one, held in vars(module).items()
        if callable(held) and getattr(held, "__module__", "") == module.__name__
    ]
    if not hasattr(module, name):
        raise UnknownNameError(name, f"name in {path}", own)
    return getattr(module, name)


def _options(choice: Choice, text: str) -> dict[str, Any]:
    """The options by name. Raises ConfigError for one without."""
    if FIRST in choice.options:
        msg = f"expected every option of '{text}' by its name, as {choice.name}(option=value), got one without"
        raise ConfigError(msg)
    return dict(choice.options)

"""From what a user names to what is audited: `file.py:name(option=…)`, a function, a class, or a file of positions."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from perturbkv.auditing.evictions import Eviction, eviction
from perturbkv.auditing.positions_file import SUFFIXES, KeptFile, read
from perturbkv.auditing.presses import of_press
from perturbkv.configs.choice import FIRST, Choice, parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.plugins import module_of_file
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.selection.policies.kvpress import is_press

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

"""`kvpress:NAME(…)`: a press of kvpress (https://github.com/NVIDIA/kvpress), whose own parameters are its options.

kvpress is imported where such a policy is completed, which is before anything is planned; a finished trace that holds
one is read without it. Its `compression_ratio` is no option: the budget says it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from perturbkv.configs.choice import UNNAMED, Choice
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.selection.policies.external import Outside

PREFIX = "kvpress"
_BELOW = (5, 3)
"""kvpress 0.5.5 reads what attention layers are called with, which transformers changed in this version."""
RATIO = "compression_ratio"
_SIMPLE = (int, float, str, bool, type(None))
_DECODING = "compresses while it decodes: nothing of the prompt is evicted, and it decodes differently"
REFUSED: Mapping[str, str] = {
    "BasePress": "is what presses are made of, and evicts nothing itself",
    "ScorerPress": "is what presses are made of, and has no score of its own",
    "KVPressTextGenerationPipeline": "is no press",
    "DecodingPress": _DECODING,
    "CompressionRatioDecodingPress": _DECODING,
    "CAMPress": f"{_DECODING}; what it evicts it merges into other values",
    "KeyRerotationPress": "changes keys: it turns those that it keeps to other positions",
    "FinchPress": "changes keys: it turns them to other positions; and it needs a delimiter of its own in the prompt",
    "MergingPress": "changes values: what it evicts is merged into what it keeps",
    "ThinKPress": "changes keys: it empties channels of them, and evicts no entry",
    "RestoreKVPress": "adds entries of its own to the cache, and adapters to the model",
    "ComposedPress": "takes a list of presses, each with a ratio of its own, where one budget says one ratio",
    "ObservedAttentionPress": "needs attention weights, which only attn_implementation='eager' gives",
}  # fmt: skip
"""Presses that leave more than a kept set behind, or nothing of one, and why."""


class Press(Outside):
    """A press of kvpress."""

    summary: ClassVar[str] = "a press of kvpress with its own parameters, run as for its users"
    paper: ClassVar[str] = "https://github.com/NVIDIA/kvpress"

    @classmethod
    def completed(cls, choice: Choice) -> Choice:
        """The press with all of its parameters, nested ones too; whether it can be made is tried.

        Raises ConfigError where kvpress is missing or another transformers is there, for a press that is refused, a
        parameter that it lacks, or what the press itself does not take; UnknownNameError for one that does not exist.
        """
        library()
        found = _completed(choice, choice.name.partition(":")[2])
        build(found)
        return found


@functools.cache
def policy(name: str) -> type[Press]:
    """The class of `kvpress:NAME`."""
    return type("NamedPress", (Press,), {"name": name})


def is_press(choice: Choice) -> bool:
    """Whether a policy is a press."""
    return choice.name.startswith(f"{PREFIX}:")


@functools.cache
def library() -> Any:
    """The kvpress package. Raises ConfigError where it is not installed, or not with a transformers that it can use."""
    here = importlib.metadata.version("transformers")
    needs = "kvpress 0.5.5, which runs with transformers below 5.3 (pip install 'perturbkv[kvpress]', best apart)"
    if not version():
        msg = f"policy 'kvpress:…' needs {needs}; kvpress is not installed, and transformers here is {here}"
        raise ConfigError(msg)
    if tuple(int(number) for number in re.findall(r"\d+", here)[:2]) >= _BELOW:
        msg = f"policy 'kvpress:…' needs {needs}; here are kvpress {version()} and transformers {here}"
        raise ConfigError(msg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("kvpress")


def version() -> str:
    """Of kvpress; empty where it is not installed."""
    try:
        return importlib.metadata.version("kvpress")
    except importlib.metadata.PackageNotFoundError:
        return ""


def exported() -> list[str]:
    """Everything that kvpress offers by name."""
    return sorted(library().__all__)


def _class(name: str) -> Any:
    """The press of this name. Raises UnknownNameError, and ConfigError for one that is refused."""
    if name in REFUSED:
        msg = f"press '{name}' cannot be measured: it {REFUSED[name]} (docs/kvpress.md)"
        raise ConfigError(msg)
    if name not in exported():
        raise UnknownNameError(name, "press", [known for known in exported() if known not in REFUSED])
    return getattr(library(), name)


def _parameters(name: str) -> dict[str, Any]:
    """Parameters of a press by name, each with its default, but for the ratio and what is its own business."""
    found = inspect.signature(_class(name)).parameters
    return {key: one.default for key, one in found.items() if key != RATIO and not key.startswith("_")}


def _completed(choice: Choice, name: str) -> Choice:
    """A press with its parameters in their order, those at a plain default as the usual ones."""
    known = _parameters(name)
    given = dict(_named(name, key, value, known) for key, value in choice.options.items())
    if len(given) < len(choice.options):
        msg = f"press '{name}' gets one parameter twice: {choice}"
        raise ConfigError(msg)
    plain = {key: default for key, default in known.items() if isinstance(default, _SIMPLE)}
    whole = {key: {**plain, **given}[key] for key in known if key in given or key in plain}
    if missing := [key for key, default in known.items() if default is inspect.Parameter.empty and key not in given]:
        wanted = ", ".join(f"{key}=…" for key in missing)
        msg = f"press '{name}' needs {' and '.join(missing)}: write kvpress:{name}({wanted})"
        raise ConfigError(msg)
    usual = {key for key, default in plain.items() if whole[key] == default and key not in _presses(whole)}
    return Choice(choice.name, whole, frozenset(usual))


def _presses(options: Mapping[str, Any]) -> list[str]:
    return [key for key, value in options.items() if isinstance(value, Choice)]


def _named(name: str, key: str, value: Any, known: Mapping[str, Any]) -> tuple[str, Any]:
    """One parameter, by its name, presses in it completed. Raises ConfigError for one that the press lacks."""
    first = next(iter(inspect.signature(_class(name)).parameters), UNNAMED)
    key = first if key == UNNAMED else key
    if key == RATIO:
        msg = f"{RATIO} of press '{name}' is what --budget says; leave it out"
        raise ConfigError(msg)
    if key not in known:
        msg = f"press '{name}' takes no '{key}'; its parameters: {', '.join(known) or 'none'}"
        raise ConfigError(msg)
    if isinstance(value, str) and value in exported():
        value = Choice(value)
    return key, _completed(value, value.name) if isinstance(value, Choice) else value


def described(name: str) -> dict[str, Any]:
    """A press' parameters and their defaults, by the policy's name. Raises as `Press.completed`."""
    return _parameters(name.partition(":")[2])


def build(choice: Choice) -> Any:
    """The press that a completed choice describes. Raises ConfigError for what the press does not take."""
    name = choice.name.removeprefix(f"{PREFIX}:")
    options = {key: build(value) if isinstance(value, Choice) else value for key, value in choice.options.items()}
    kind = _class(name)
    hints = {key: str(one.annotation).lower() for key, one in inspect.signature(kind).parameters.items()}
    options = {key: _listed(value) if "list[float]" in hints[key] else value for key, value in options.items()}
    try:
        with quiet():
            return kind(**options)
    except Exception as error:
        raise ConfigError(failed(name, "made", error)) from None


def _listed(value: Any) -> Any:
    """Numbers of a quoted text: compression_ratios="0.5, 0.25"."""
    return [float(number) for number in re.findall(r"[\d.eE+-]+", value)] if isinstance(value, str) else value


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the block kvpress logs errors alone."""
    log = logging.getLogger(PREFIX)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def failed(name: str, what: str, error: Exception) -> str:
    """One line of what a press could not do, in its own words, cut where they are many."""
    said = " ".join(str(error).split())
    return f"press '{name}' cannot be {what}: {type(error).__name__}: {said[:240]}{'…' if len(said) > 240 else ''}"

"""`kvpress:NAME(…)`: a press of kvpress (https://github.com/NVIDIA/kvpress) with its own parameters as options.

kvpress is imported when such a policy's choice is completed, before anything is planned; a finished trace with a press
is read without kvpress. `compression_ratio` is no option: the budget decides it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from perturbkv.configs.choice import UNNAMED, Choice
from perturbkv.configs.layer_types import is_mixed, is_recurrent
from perturbkv.configs.plugins import external_code
from perturbkv.errors import ConfigError, ModelError, UnknownNameError, install_extra
from perturbkv.models.forward import run_with_cache
from perturbkv.selection.external_eviction import PRESS, Eviction, padding_arguments
from perturbkv.selection.policies.external import ExternalPolicy

PREFIX = "kvpress"
_log = logging.getLogger(__name__)
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
    "RestoreKVPress": "adds entries of its own to the cache, and adapters to the model",
    "ComposedPress": "takes a list of presses, each with a ratio of its own, where one budget says one ratio",
    "ObservedAttentionPress": "needs attention weights, which only attn_implementation='eager' gives",
}  # fmt: skip
"""Presses that cannot be measured -> the reason, as the end of a sentence."""
_INNER_PRESS = "prefilling_press"
"""Attribute with the press whose ratio is set, where a press has none: PrefillDecodingPress."""
_DECODING_OPTIONS = ("decoding_press", "decoding")
"""Parameters that make a press compress again while it decodes."""


class Press(ExternalPolicy):
    """A press of kvpress."""

    summary: ClassVar[str] = "a press of kvpress with its own parameters, run as for its users"
    paper: ClassVar[str] = "https://github.com/NVIDIA/kvpress"

    @classmethod
    def check_model(cls, model_config: Any, name: str) -> None:
        """Raise ModelError for a model with layers that presses cannot compress."""
        press = cls.name.partition(":")[2]
        if is_mixed(model_config):
            raise ModelError(
                f"press '{press}' expects layers that all see the whole prompt; some of model '{name}' do not"
            )
        if is_recurrent(model_config):
            raise ModelError(f"press '{press}' expects a cache of keys and values; model '{name}' has recurrent states")

    @classmethod
    def provenance(cls) -> dict[str, str]:
        """Return the version of kvpress."""
        return {"kvpress_version": version()}

    @classmethod
    def complete(cls, choice: Choice) -> Choice:
        """Return the choice of a press with all its parameters, nested ones too, after building the press once.

        Raises ConfigError where kvpress or a suitable transformers is missing, for a press that cannot be measured, a
        parameter that it lacks, or a value that it refuses; UnknownNameError for a press that does not exist.
        """
        library()
        complete = _complete(choice, choice.name.partition(":")[2])
        build(complete)
        return complete


@functools.cache
def policy_class(name: str) -> type[Press]:
    """Return the policy class of the press `kvpress:NAME`."""
    return type("NamedPress", (Press,), {"name": name})


def is_press(choice: Choice) -> bool:
    """Return whether a policy's choice is a KVPress press, `kvpress:NAME`."""
    return choice.name.startswith(f"{PREFIX}:")


@functools.cache
def library() -> Any:
    """Return the kvpress module. Raises ConfigError if it is missing or transformers has an unsuitable version."""
    installed = importlib.metadata.version("transformers")
    needs = f"kvpress 0.5.5, which runs with transformers below 5.3 ({install_extra('kvpress')}, best apart)"
    if not version():
        raise ConfigError(
            f"policy 'kvpress:…' needs {needs}; kvpress is not installed, and transformers here is {installed}"
        )
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) >= _BELOW:
        raise ConfigError(
            f"policy 'kvpress:…' needs {needs}; here are kvpress {version()} and transformers {installed}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("kvpress")


def version() -> str:
    """Return the installed version of kvpress; empty if not installed."""
    try:
        return importlib.metadata.version("kvpress")
    except importlib.metadata.PackageNotFoundError:
        return ""


def exported_names() -> list[str]:
    """Return the public names in the kvpress module."""
    return sorted(library().__all__)


def _press_class(name: str) -> Any:
    """Return the kvpress class of a press. Raises UnknownNameError, ConfigError for a press that cannot be measured."""
    if name in REFUSED:
        raise ConfigError(f"press '{name}' cannot be measured: it {REFUSED[name]} (docs/how-to/kvpress.md)")
    if name not in exported_names():
        raise UnknownNameError(name, "press", [known for known in exported_names() if known not in REFUSED])
    return getattr(library(), name)


def _parameters(name: str) -> dict[str, Any]:
    """Return name -> default of a press's public parameters, without the compression ratio."""
    parameters = inspect.signature(_press_class(name)).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key != RATIO and not key.startswith("_")}


def _complete(choice: Choice, name: str) -> Choice:
    """Return the choice of the press `name` with all its parameters, in the order of the press's signature.

    Parameters at a plain default are marked as defaults.
    """
    known = _parameters(name)
    written = dict(_complete_parameter(name, key, value, known) for key, value in choice.options.items())
    if len(written) < len(choice.options):
        raise ConfigError(f"press '{name}' gets one parameter twice: {choice}")
    plain = {key: default for key, default in known.items() if isinstance(default, _SIMPLE)}
    complete = {key: {**plain, **written}[key] for key in known if key in written or key in plain}
    if missing := [key for key, default in known.items() if default is inspect.Parameter.empty and key not in written]:
        missing_options = ", ".join(f"{key}=…" for key in missing)
        raise ConfigError(f"press '{name}' needs {' and '.join(missing)}: write kvpress:{name}({missing_options})")
    at_default = {
        key for key, default in plain.items() if complete[key] == default and not isinstance(complete[key], Choice)
    }
    return Choice(choice.name, complete, frozenset(at_default))


def _complete_parameter(name: str, key: str, value: Any, known: Mapping[str, Any]) -> tuple[str, Any]:
    """Return (name, value) of a parameter of the press `name`, with nested presses completed.

    `key` is its name as written, `UNNAMED` for the press's first; `known` are the names that the press takes. Raises
    ConfigError for any other.
    """
    first = next(iter(inspect.signature(_press_class(name)).parameters), UNNAMED)
    key = first if key == UNNAMED else key
    if key == RATIO:
        raise ConfigError(f"{RATIO} of press '{name}' is what --budget says; leave it out")
    if key not in known:
        raise ConfigError(f"press '{name}' takes no '{key}'; its parameters: {', '.join(known) or 'none'}")
    if isinstance(value, str) and value in exported_names():
        value = Choice(value)
    return key, _complete(value, value.name) if isinstance(value, Choice) else value


def press_parameters(name: str) -> dict[str, Any]:
    """Return name -> default of the parameters of the press `kvpress:NAME`. Raises as `Press.complete`."""
    return _parameters(name.partition(":")[2])


def build(choice: Choice) -> Any:
    """Return a new kvpress object of a completed choice. Raises ConfigError for a value that the press refuses."""
    name = choice.name.removeprefix(f"{PREFIX}:")
    options = {key: build(value) if isinstance(value, Choice) else value for key, value in choice.options.items()}
    kind = _press_class(name)
    hints = {key: str(parameter.annotation).lower() for key, parameter in inspect.signature(kind).parameters.items()}
    options = {key: _parse_numbers(value) if "list[float]" in hints[key] else value for key, value in options.items()}
    with external_code(f"press '{name}' cannot be made:", ConfigError), quiet():
        return kind(**options)


def press_eviction(choice: Choice, kept: Callable[[int], int]) -> Eviction:
    """Return the eviction by a completed choice of a press, `kvpress:NAME(…)`, at the ratio that its budget asks for.

    `kept` maps a number of tokens to that of the entries that it is to keep. Raises ConfigError for a value that the
    press refuses, and for one that compresses while it decodes.
    """
    name = choice.name.removeprefix(f"{PREFIX}:")

    def evict(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        cache, press, tokens = DynamicCache(), build(choice), input_ids.shape[1]
        if not set_ratio(press, tokens, min(tokens, kept(tokens))):
            _log_ignored_budget(name)
        padding = padding_arguments(attention_mask)
        with quiet(), torch.inference_mode(False), torch.no_grad(), press(model):
            run_with_cache(model.model, input_ids.clone(), cache, **padding)
        return cache

    if any(getattr(build(choice), later, None) for later in _DECODING_OPTIONS):
        later = " and ".join(_DECODING_OPTIONS)
        raise ConfigError(f"press '{name}' compresses again while it decodes; leave its {later} out")
    return Eviction(str(choice), PRESS, evict)


@functools.cache
def _log_ignored_budget(name: str) -> None:
    """Log, once per press, that the press's own parameters rather than the budget decide how much is kept."""
    _log.info("press '%s' has no ratio to set: what it keeps, its own parameters say, and not --budget", name)


def set_ratio(press: Any, tokens: int, kept: int) -> bool:
    """Set a press's compression ratio to keep `kept` of `tokens` entries; return whether the press has a ratio.

    1 − kept / n is lowered by roundings until ⌊n (1 − ratio)⌋, which is what kvpress keeps, is `kept`.
    """
    ratio = max(0.0, 1 - kept / tokens)
    while int(tokens * (1 - ratio)) < kept:
        ratio = math.nextafter(ratio, 0)  # the next smaller float
    owner = press if hasattr(type(press), RATIO) else getattr(press, _INNER_PRESS, None)
    try:
        setattr(owner, RATIO, ratio)
    except AttributeError:
        return False
    return owner is not None


def _parse_numbers(value: Any) -> Any:
    """Return a text of comma-separated numbers, such as "0.5, 0.25", as a list; other values unchanged."""
    return [float(number) for number in re.findall(r"[\d.eE+-]+", value)] if isinstance(value, str) else value


@contextmanager
def quiet() -> Iterator[None]:
    """Silence kvpress's log messages below errors inside the block."""
    log = logging.getLogger(PREFIX)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)

"""`cache:file.py:NAME(…)`: somebody's cache, a function or a transformers `Cache` class, measured as it is.

It is what `perturbkv audit` takes, too (`selection.external_eviction`). What it holds, and how large that is, its own
options say; an argument `budget` gets the number of entries per head that the budget asks for. A finished trace with
such a policy is read without its code.
"""

from __future__ import annotations

import functools
import re
from typing import Any, ClassVar

from perturbkv.configs.cache_contents import CACHE_PREFIX
from perturbkv.configs.choice import UNNAMED, Choice
from perturbkv.configs.plugins import refers_to_file
from perturbkv.errors import ConfigError
from perturbkv.selection.external_eviction import (
    BUDGET,
    Eviction,
    callable_eviction,
    named_code,
    named_eviction,
    with_budget,
)
from perturbkv.selection.policies.external import ExternalPolicy

_NAME = re.compile(r"[A-Za-z][\w.-]*")
_REGISTERED: dict[str, Any] = {}
"""Name that `external` was given -> function or `Cache` class."""
_ANY_BUDGET = 128
"""Budget with which options are checked before any prompt is known."""


class CachePolicy(ExternalPolicy):
    """Somebody's cache; `name` is that of the policy."""

    summary: ClassVar[str] = "somebody's function or Cache class, run as for its users"

    @classmethod
    def complete(cls, choice: Choice) -> Choice:
        """Return the choice unchanged, after its code was loaded and its options were checked.

        Raises PluginError, UnknownNameError or ConfigError for code or options that `external_eviction` refuses.
        """
        load(choice, _ANY_BUDGET)
        return Choice(choice.name, choice.options, frozenset())


@functools.cache
def policy_class(name: str) -> type[CachePolicy]:
    """Return the policy class `cache:NAME`; that of a registered cache is named after the code and its module."""
    target = _REGISTERED.get(name.removeprefix(CACHE_PREFIX))
    module = {} if target is None else {"__module__": target.__module__}
    return type(getattr(target, "__name__", "NamedCache"), (CachePolicy,), {"name": name, **module})


def load(choice: Choice, budget: int) -> Eviction:
    """Return the eviction that a policy `cache:NAME(option=value)` stands for, told of a budget of so many entries.

    Raises as `CachePolicy.complete`.
    """
    own = Choice(choice.name.removeprefix(CACHE_PREFIX), choice.options)
    if BUDGET in choice.options:
        raise ConfigError(f"{BUDGET} of '{choice}' is what --budget says; leave it out")
    if refers_to_file(own.name):
        return named_eviction(own, budget)
    if UNNAMED in own.options:
        raise ConfigError(f"expected every option of '{choice}' by its name, got one without")
    target = _registered(own.name)
    return callable_eviction(target, str(own), with_budget(target, own.options, budget))


def code_of(name: str) -> Any:
    """Return the function or class of the policy `cache:NAME`. Raises as `CachePolicy.complete`."""
    own = name.removeprefix(CACHE_PREFIX)
    return named_code(own)[0] if refers_to_file(own) else _registered(own)


def _registered(name: str) -> Any:
    """Return the registered function or class of this name. Raises ConfigError."""
    if name not in _REGISTERED:
        raise ConfigError(
            f"no cache is registered as '{name}' here; write cache:file.py:name, or in Python pk.external(make)"
        )
    return _REGISTERED[name]


def external(make: Any, name: str = "") -> str:
    """Register somebody's cache, and return the policy that measures it, for `grid`.

    Args:
        make: a function `(model, input_ids, attention_mask) -> cache`, both tensors (1, token), or a transformers
            `Cache` class. It may have an argument `budget`, the number of entries per head; an attribute `decode`, its
            own decoding `(model, cache, token, step) -> logits`; and an attribute `nbytes` of the cache that it
            returns, the bytes that a file of it would hold.
        name: of the policy, without `cache:`; by default that of `make`.

    Another one of the same name takes its place. Raises ConfigError for what is no function or Cache class, and for no
    name.

    >>> import perturbkv as pk
    >>> from transformers import DynamicCache
    >>> def halves(model, input_ids, attention_mask):
    ...     cache = DynamicCache()
    ...     model(input_ids=input_ids, past_key_values=cache)
    ...     for layer in cache.layers:
    ...         layer.values = layer.values / 2
    ...     return cache
    >>> pk.grid(1.0, policy=pk.external(halves))
    (<EvictionConfig cache:halves:given b=1.0 kv>,)
    """
    name = name or getattr(make, "__name__", "")
    if not _NAME.fullmatch(name) or refers_to_file(name):
        raise ConfigError(f"expected a name of letters, digits, '-', '_' and '.', a letter first, got {name!r}")
    callable_eviction(make, name, with_budget(make, {}, _ANY_BUDGET))
    _REGISTERED[name] = make
    policy_class.cache_clear()
    return f"{CACHE_PREFIX}{name}"

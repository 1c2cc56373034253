"""The options that a policy or a selection has for itself, as `name(option=value)` takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError

_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a name"),
}
_TYPES = {field.name: str(field.type) for field in dataclasses.fields(EvictionConfig)}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(EvictionConfig)}


@dataclass(frozen=True)
class Parameter:
    """An option of a policy or a selection: its field of `EvictionConfig`, and what it does."""

    field: str
    about: str

    @property
    def default(self) -> Any:
        """Its value where nobody says otherwise."""
        return _DEFAULTS[self.field]


_STAGES = {
    "alpha": Parameter("alpha", "share of stage 1, 0 to 1"),
    "split": Parameter("split", "what alpha is a share of: prefix (b − w), or total (b, the window in stage 1)"),
    "score": Parameter("stage2_score", "of stage 2: accumulated (unpooled) or pooled"),
}
SELECTION_PARAMETERS: Mapping[str, Mapping[str, Parameter]] = {
    "two-stage": {**_STAGES, "epsilon": Parameter("epsilon", "added to the score before the norm multiplies it")},
    "two-stage-uniform": _STAGES,
    "random": {"seed": Parameter("seed", "of the random numbers")},
}
"""Selection -> its own options."""


def own(choice: Choice, what: str, parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Fields of `EvictionConfig` that a choice names as its own parameters; `what` names it.

    Raises ConfigError for an option that is not among them, one without a name, and a value of another kind.
    """
    found: dict[str, Any] = {}
    for option, value in choice.options.items():
        if option not in parameters:
            msg = f"{what} has no option '{option or value}'; its options: {', '.join(parameters) or 'none'}"
            raise ConfigError(msg)
        name = parameters[option].field
        found[name] = _of_kind(value, name, f"{what}: {option}")
    return found


def _of_kind(value: Any, name: str, what: str) -> Any:
    """The value as its field holds it. Raises ConfigError where it is of another kind."""
    kinds, words = _KINDS[_TYPES[name]]
    if isinstance(value, bool) or not isinstance(value, kinds):
        msg = f"{what} is {words}, got '{value}'"
        raise ConfigError(msg)
    return kinds[-1](value)

"""Options of policies, selections and granularities, with default, meaning and range; and the limits of all numbers."""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeGuard

from perturbkv.configs.choice import UNNAMED, Choice, as_choice
from perturbkv.errors import ConfigError, UnknownNameError

LARGEST = 2**63 - 1
"""Largest integer that arrays, files and random generators can represent."""
MOST_CONFIGURATIONS = 10_000
"""Limit of configurations in one run: planning more takes too long."""
MOST_SAMPLES = 100_000
LONGEST_PROMPT = 2_000_000
"""Limit of tokens of a synthetic prompt: longer than every model's context, and still generated in seconds."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value, such as one of JSON, is a finite number and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_number(what: str, value: float, most: float = LARGEST) -> None:
    """Raise ConfigError, which names `what`, for a number that is NaN, infinite or beyond ±`most`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{what} must be a finite number, got {value}")
    if not -most <= value <= most:
        got = f"{value:.3g}" if abs(value) > 1e15 else str(value)
        raise ConfigError(f"{what} must be at most {most:,}, got {got}")


def check_whole(what: str, value: object) -> None:
    """Raise ConfigError, which names `what`, for a value that is no whole number, such as 2.5, None or True.

    NumPy's whole numbers are accepted.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{what} must be a whole number, got {value!r:.80}")


def check_configurations(count: int) -> None:
    """Raise ConfigError if `count` exceeds the maximum number of configurations of a run."""
    if count > MOST_CONFIGURATIONS:
        raise ConfigError(
            f"expected at most {MOST_CONFIGURATIONS:,} configurations in a run, got {count:,}; give fewer values, or "
            "make several runs of it"
        )


KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a name"),
}
"""Type of an option -> accepted types, and their description."""


@dataclass(frozen=True)
class Option:
    """An option of a policy, a score or another choice.

    Attributes:
        default: its default value, whose type is the option's type.
        about: its meaning, in one line.
        known: accepted names.
        low, high: smallest and largest number; `high` itself is accepted where it is finite.
        odd: whether the number must be odd.
        allowed: accepted numbers, where these are few.
        call: whether it accepts another choice, `name(option=value)`, besides its default.
        path: whether it is the path of a file, any text.
        new: whether choices in older traces lack it; they mean the default.
        omitted: whether every choice at the default lacks it, so that older traces have equal choices.
    """

    default: bool | int | float | str
    about: str
    known: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf
    odd: bool = False
    allowed: tuple[int, ...] = ()
    call: bool = False
    path: bool = False
    new: bool = False
    omitted: bool = False

    @property
    def default_text(self) -> str:
        """Default value as it is written in a choice."""
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    def convert(self, value: Any, name: str, owner: str = "") -> Any:
        """Return a value validated and converted to the option's type; `name` and `owner` occur in messages.

        Raises ConfigError for another type or a number out of range, UnknownNameError for an unknown name.
        """
        if self.call and isinstance(value, str | Choice):
            return value if value == self.default else as_choice(value)
        accepted, description = KINDS[type(self.default)]
        value = "none" if value is None and "none" in self.known else value
        what = f"{name} of {owner}" if owner else name
        if isinstance(value, bool) != isinstance(self.default, bool) or not isinstance(value, accepted):
            raise ConfigError(f"{what} is {description}, got '{value}'")
        if isinstance(value, str):
            if value not in self.known and not self.path:
                raise UnknownNameError(value, name, self.known)
            return value
        if not isinstance(value, bool):
            self._check_number(value, what)
        return accepted[-1](value)

    def _check_number(self, value: Any, what: str) -> None:
        """Raise ConfigError, which names `what`, for a number outside the option's range."""
        if not (self.low <= value <= self.high and value <= LARGEST):
            finite = " and finite" if isinstance(self.default, float) else ""
            bounds = (
                f"be at least {self.low:g}{finite}"
                if self.high == math.inf
                else f"lie in [{self.low:.9g}, {self.high:.9g}]"
            )
            raise ConfigError(f"{what} must {bounds}, got {value}")
        if self.allowed and value not in self.allowed:
            raise ConfigError(f"{what} is one of {', '.join(map(str, self.allowed))}, got {value}")
        if self.odd and value % 2 == 0:
            raise ConfigError(f"{what} must be odd, got {value}; try {value + 1 if value < self.high else value - 1}")


def option(default: Any, about: str, **limits: Any) -> Any:
    """Return a dataclass field that declares an option of a score or policy; `limits` are fields of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(default, about, **limits)})


def field_name(name: str) -> str:
    """Return the field of an option: the option's name, behind a keyword of Python an underscore, as in `lambda_`."""
    return f"{name}_" if keyword.iskeyword(name) else name


def _option_name(field: str) -> str:
    """Return the option of a field: the inverse of `field_name`."""
    name = field.removesuffix("_")
    return name if keyword.iskeyword(name) else field


class WithOptions:
    """A frozen dataclass whose fields are its options, an option `lambda` as the field `lambda_`."""

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return name -> option of the class: its own before inherited ones, those that choices omit last."""
        own_fields = cls.__dict__.get("__annotations__", {})
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        ordered = sorted(fields, key=lambda field: (field.metadata["option"].omitted, field.name not in own_fields))
        return {_option_name(field.name): field.metadata["option"] for field in ordered}

    @classmethod
    def summary_line(cls) -> str:
        """Return a one-line summary: the class's `summary`, its docstring's first line, or its base's summary."""
        summary = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
        is_generated = summary.startswith(f"{cls.__name__}(")  # by `dataclass`, for a class without a docstring
        return str(vars(cls).get("summary") or ("" if is_generated else summary) or getattr(cls, "summary", ""))


def complete_choice(choice: Choice, what: str, options: Mapping[str, Option]) -> Choice:
    """Return the choice with all `options`, validated and with defaults for missing ones that are not `omitted`.

    A choice that is resolved already gets only options that are new. `what` names the choice in messages.

    Raises ConfigError for an unknown option, one without a name, or a wrong value.
    """
    if choice.defaults is not None:
        return _with_new_options(choice, options)
    for name, value in choice.options.items():
        if name == UNNAMED or name not in options:
            raise ConfigError(f"{what} has no option '{name or value}'; its options: {', '.join(options) or 'none'}")
    values = {
        name: option.convert(choice.options.get(name, option.default), name, what) for name, option in options.items()
    }
    defaults = frozenset(name for name, value in values.items() if value == options[name].default)
    return Choice(choice.name, values, defaults).drop(name for name in defaults if options[name].omitted)


def _with_new_options(choice: Choice, options: Mapping[str, Option]) -> Choice:
    """Return a resolved choice from an older trace, with the options introduced since added."""
    missing = {name: option.default for name, option in options.items() if option.new and name not in choice.options}
    if not missing or choice.defaults is None:
        return choice
    return Choice(choice.name, {**choice.options, **missing}, choice.defaults | missing.keys())

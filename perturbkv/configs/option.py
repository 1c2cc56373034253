"""An option of a policy, a selection or a granularity: its default, what it means, and what it may be.

What a number that a user gives may be, whatever it is for: finite, and small enough to count with.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perturbkv.configs.choice import FIRST, Choice, as_choice
from perturbkv.errors import ConfigError, UnknownNameError

LARGEST = 2**63 - 1
"""The largest whole number that arrays, files and drawn numbers hold."""
MOST_CONFIGURATIONS = 10_000
"""Of one run: more are nobody's sweep, and planning them alone takes longer than anybody waits."""
MOST_SAMPLES = 100_000
LONGEST_NUMBER = 2_000_000
"""Tokens of a prompt that is made: beyond every model's context, and made in seconds."""


def check_number(what: str, value: float, most: float = LARGEST) -> None:
    """Raise ConfigError for what is NaN, infinite or beyond `most`; `what` names it."""
    if isinstance(value, float) and not math.isfinite(value):
        msg = f"{what} must be a finite number, got {value}"
        raise ConfigError(msg)
    if not -most <= value <= most:
        msg = f"{what} must be at most {most:,}, got {_said(value)}"
        raise ConfigError(msg)


def check_configurations(count: int) -> None:
    """Raise ConfigError for more configurations than a run takes."""
    if count > MOST_CONFIGURATIONS:
        msg = (
            f"expected at most {MOST_CONFIGURATIONS:,} configurations in a run, got {count:,}; give fewer values, or "
            "make several runs of it"
        )
        raise ConfigError(msg)


def _said(value: float) -> str:
    return f"{value:.3g}" if abs(value) > 1e15 else str(value)


KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a name"),
}
"""Type of an option -> what may be given, and how that is called."""


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        default: its value where nobody says otherwise; its type is the option's.
        about: what it does, in a line.
        known: what a name may be.
        low, high: least and largest number, `high` itself allowed where it is finite.
        odd: whether a number has to be odd.
        among: the numbers that it may be, where these are few.
        call: whether it takes another choice, `name(option=value)`, beside its default.
        later: whether older traces' choices lack it: what they did is the default.
    """

    default: bool | int | float | str
    about: str
    known: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf
    odd: bool = False
    among: tuple[int, ...] = ()
    call: bool = False
    later: bool = False

    @property
    def written(self) -> str:
        """The default as it stands in a choice."""
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    def checked(self, value: Any, name: str, of: str = "") -> Any:
        """The value as its type; `name` is the option's, `of` its owner's, for messages.

        Raises ConfigError for another kind or range, UnknownNameError for an unknown name.
        """
        if self.call and isinstance(value, str | Choice):
            return value if value == self.default else as_choice(value)
        kinds, words = KINDS[type(self.default)]
        value = "none" if value is None and "none" in self.known else value
        what = f"{name} of {of}" if of else name
        if isinstance(value, bool) != isinstance(self.default, bool) or not isinstance(value, kinds):
            msg = f"{what} is {words}, got '{value}'"
            raise ConfigError(msg)
        if isinstance(value, str):
            if value not in self.known:
                raise UnknownNameError(value, name, self.known)
            return value
        if not isinstance(value, bool):
            self._check_number(value, what)
        return kinds[-1](value)

    def _check_number(self, value: Any, what: str) -> None:
        if not (self.low <= value <= self.high and value <= LARGEST):
            msg = f"{what} must {self._range()}, got {value}"
            raise ConfigError(msg)
        if self.among and value not in self.among:
            msg = f"{what} is one of {', '.join(map(str, self.among))}, got {value}"
            raise ConfigError(msg)
        if self.odd and value % 2 == 0:
            msg = f"{what} must be odd, got {value}; try {value + 1 if value < self.high else value - 1}"
            raise ConfigError(msg)

    def _range(self) -> str:
        if self.high < math.inf:
            return f"lie in [{self.low:.9g}, {self.high:.9g}]"
        return f"be at least {self.low:g}" + (" and finite" if isinstance(self.default, float) else "")


def option(default: Any, about: str, **limits: Any) -> Any:
    """A field of a score or a policy that is an option of its own; `limits` are further fields of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(default, about, **limits)})


class WithOptions:
    """A frozen dataclass whose fields are its options."""

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Its options by name, those of its own class first."""
        own = cls.__dict__.get("__annotations__", {})
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        ordered = sorted(fields, key=lambda field: field.name not in own)
        return {field.name: field.metadata["option"] for field in ordered}

    @classmethod
    def summed_up(cls) -> str:
        """What it is in a line: its own `summary`, else its docstring's first line, else the summary of its base."""
        said = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
        made = said.startswith(f"{cls.__name__}(")  # by `dataclass`, of a class that says nothing
        return str(vars(cls).get("summary") or ("" if made else said) or getattr(cls, "summary", ""))


def completed(choice: Choice, what: str, options: Mapping[str, Option]) -> Choice:
    """The choice with all of its owner's options, each checked; a resolved one as it is, with those that came later.

    `what` names the owner. Raises ConfigError for an option that it lacks, one without a name, or a wrong value.
    """
    if choice.usual is not None:
        return _of_today(choice, options)
    for name, value in choice.options.items():
        if name == FIRST or name not in options:
            msg = f"{what} has no option '{name or value}'; its options: {', '.join(options) or 'none'}"
            raise ConfigError(msg)
    held = {
        name: option.checked(choice.options.get(name, option.default), name, what) for name, option in options.items()
    }
    return Choice(choice.name, held, frozenset(name for name, value in held.items() if value == options[name].default))


def _of_today(choice: Choice, options: Mapping[str, Option]) -> Choice:
    """A resolved choice, which an older trace may hold without options that came later."""
    missing = {name: one.default for name, one in options.items() if one.later and name not in choice.options}
    if not missing or choice.usual is None:
        return choice
    return Choice(choice.name, {**choice.options, **missing}, choice.usual | missing.keys())

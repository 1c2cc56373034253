"""Commands that refuse what Click takes in silence: an option that is given twice, of which the last would win.

They tell too whether JSON was asked for, which an error needs to know of a command line that cannot be read whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from perturbkv.cli.choices import apart
from perturbkv.cli.help import Compact
from perturbkv.configs import numbers
from perturbkv.errors import ConfigError


@dataclass
class Asked:
    """The object of a Click context that learns from commands whether they were given --json."""

    as_json: bool = False


class _Once:
    """Reads the command line once more, as far as it can be, for the order in which its options stand there.

    Raises ConfigError for an option that takes one value and is given twice, in whichever spelling, and for one that
    takes several and is given the same value twice; and for a whole number that is none to count with.
    """

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        """Click's parsing, refused where something of it would be dropped."""
        lenient = type(ctx)(self, parent=ctx, resilient_parsing=True, ignore_unknown_options=True)
        options, rest, order = self.make_parser(lenient).parse_args(args=list(args))
        if asked := ctx.find_object(Asked):
            asked.as_json = self.asks_for_json(options, rest)
        if not any(getattr(given, "is_eager", False) for given in order):
            _check_once(order)
        left: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        for parameter in dict.fromkeys(order):
            _check_apart(parameter, ctx.params)
            _check_numbers(parameter, ctx.params)
        return left


class OnceCommand(Compact, _Once, TyperCommand):
    """A command whose options are given once."""

    def asks_for_json(self, options: Mapping[str, Any], rest: list[str]) -> bool:
        """Whether --json stands among its options, and not as the value of another."""
        return bool(options.get("as_json"))


class OnceGroup(Compact, _Once, TyperGroup):
    """A group whose own options are given once."""

    def asks_for_json(self, options: Mapping[str, Any], rest: list[str]) -> bool:
        """What counts where no command of that name is there to ask: whether --json stands before any `--`."""
        return "--json" in rest[: rest.index("--") if "--" in rest else None]


def _check_once(order: list[Any]) -> None:
    for parameter in dict.fromkeys(order):
        times = order.count(parameter)
        if parameter.param_type_name == "option" and not parameter.multiple and times > 1:
            names = "/".join([*parameter.opts, *parameter.secondary_opts])
            msg = f"expected {names} once, got it {times} times; leave all but one out"
            raise ConfigError(msg)


def _check_numbers(parameter: Any, values: dict[str, Any]) -> None:
    """No command takes a whole number beyond all that can be counted; what else it may be, its own check says."""
    given = values.get(parameter.name)
    for value in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(value, int):
            numbers.check(parameter.opts[0], value)


def _check_apart(parameter: Any, values: dict[str, Any]) -> None:
    """What is repeatable names different things."""
    given = values.get(parameter.name)
    if isinstance(given, (list, tuple)):
        apart(parameter.opts[0], given)

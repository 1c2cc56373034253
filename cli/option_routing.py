"""The decorator that gives a command the options of a dataclass, as if they were its own parameters.

Every field that is annotated with an option becomes one. A field `typed` gets the names of what the user really wrote,
a field `asked` the values of the command's own parameters.

A command's help: one line an option, in groups; the defaults in brackets, what may be repeated with an ellipsis.

Commands that refuse what Click takes in silence: an option that is given twice, of which the last would win.

They tell too whether JSON was asked for, which an error needs to know of a command line that cannot be read whole.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from perturbkv.cli import console
from perturbkv.cli.choices import apart
from perturbkv.configs import option
from perturbkv.errors import ConfigError


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Spread each parameter that is annotated with a dataclass of options over the command's own parameters."""
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hints[name] for name in signature.parameters if dataclasses.is_dataclass(hints[name])}
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name not in groups
    ]
    spread = [parameter for group in groups.values() for parameter in _parameters(group)]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    @functools.wraps(command)
    def wrapper(context: typer.Context, **values: Any) -> None:
        told = {"typed": typed(context), "asked": {parameter.name: values[parameter.name] for parameter in own}}
        made = {name: _made(group, values, told) for name, group in groups.items()}
        command(**made, **values)

    parameters = [context, *own, *spread]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def showing(**defaults: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say in a command's help what its own defaults are of options that it shares with others."""
    return _changing({name: {"show_default": default} for name, default in defaults.items()})


def telling(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a command's help tell of options that are hidden elsewhere."""
    return _changing({name: {"hidden": False} for name in names})


def hiding(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Keep out of a command's help the options that it shares with others and has no use for."""
    return _changing({name: {"hidden": True} for name in names})


def _changing(
    changes: Mapping[str, Mapping[str, Any]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command some options of its own, which differ from the shared ones in this."""

    def changed(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        parameters = [_with(one, changes.get(one.name, {})) for one in signature.parameters.values()]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return changed


def _with(parameter: inspect.Parameter, changes: Mapping[str, Any]) -> inspect.Parameter:
    if not changes:
        return parameter
    kind, option = get_args(parameter.annotation)
    own = copy.copy(option)
    vars(own).update(changes)
    return parameter.replace(annotation=Annotated[kind, own])


def typed(context: typer.Context) -> frozenset[str]:
    """Names of the parameters that stand on the command line; neither defaults nor the environment's values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def options(group: Any) -> dict[str, Any]:
    """The annotations of a dataclass' fields that are options, by name."""
    hints = get_type_hints(group, include_extras=True)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(group)
        if get_origin(hints[field.name]) is Annotated
    }


def _made(group: Any, values: dict[str, Any], told: dict[str, Any]) -> Any:
    """The dataclass of its options' values, which are taken out of `values`, and of what is told of the command."""
    named = {field.name for field in dataclasses.fields(group)}
    chosen = {name: values.pop(name) for name in options(group)}
    return group(**chosen, **{name: value for name, value in told.items() if name in named})


def _parameters(group: Any) -> list[inspect.Parameter]:
    defaults = {field.name: field.default for field in dataclasses.fields(group)}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
        for name, hint in options(group).items()
    ]


Sections = dict[str, list[tuple[str, str]]]
_WIDEST = 100
_OWN, _HELP = "Options", "help"
_NO_DEFAULT = ("", "None", "False")
_LEGEND = "  [default]  … repeatable"


class Compact:
    """A command that writes its help itself; every line counts on a screen."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        """Write usage, what the command does, its options and its subcommands."""
        with console.out.capture() as written:
            _text(f"Usage: {_usage(self, ctx)}")
            for text in (self.help or "").split("\n\n"):
                _paragraph(" ".join(text.split()))
            found = {**_options(self, ctx), **_commands(self)}
            column = max((len(name) for rows in found.values() for name, _ in rows), default=0)
            for title, rows in found.items():
                _section(title, rows, column)
        formatter.write(written.get())


def _usage(command: Any, ctx: Any) -> str:
    arguments = [
        _name(one) if one.required else f"[{_name(one)}]"
        for one in command.get_params(ctx)
        if one.param_type_name == "argument"
    ]
    behind = [command.subcommand_metavar] if _has_commands(command) else []
    return " ".join([ctx.command_path, "[OPTIONS]", *arguments, *behind])


def _options(command: Any, ctx: Any) -> Sections:
    """Group -> names and texts; arguments come first."""
    found: Sections = {}
    for one in sorted(command.get_params(ctx), key=lambda one: one.param_type_name != "argument"):
        if not one.hidden and one.name != _HELP:
            panel = getattr(one, "rich_help_panel", None) or _OWN
            found.setdefault(panel, []).append((_name(one), _about(one, ctx)))
    return found


def _commands(command: Any) -> Sections:
    """Group -> names of subcommands and what they do: the first paragraph of their own help."""
    found: Sections = {}
    for name, one in (command.commands if _has_commands(command) else {}).items():
        about = " ".join((one.help or "").partition("\n\n")[0].split()).rstrip(".")
        found.setdefault(one.rich_help_panel or "Commands", []).append((name, about))
    return found


def _has_commands(command: Any) -> bool:
    return isinstance(getattr(command, "commands", None), Mapping)


def _name(parameter: Any) -> str:
    """`--model, -m NAME`; an argument's name in capitals."""
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    if parameter.secondary_opts:  # --chat-template/--no-chat-template
        return str(parameter.opts[0]).replace("--", "--[no-]")
    names = ", ".join(sorted(parameter.opts, key=lambda name: not name.startswith("--")))
    value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
    return names + value + ("…" if parameter.multiple else "")


def _about(parameter: Any, ctx: Any) -> str:
    """What it does, and its default: in words where its declaration has them."""
    default = str(parameter.get_default(ctx, call=False) if parameter.show_default is True else parameter.show_default)
    return f"{(parameter.help or '').rstrip('.')}{'' if default in _NO_DEFAULT else f' [{default}]'}"


def _text(text: str) -> None:
    console.out.print(text, markup=False, highlight=False, emoji=False, width=_width())


def _paragraph(text: str) -> None:
    _text(text)
    console.out.print()


def _section(title: str, rows: list[tuple[str, str]], column: int) -> None:
    legend = any(name.endswith("…") for name, _ in rows) or any(about.endswith("]") for _, about in rows)
    console.out.print(Text.assemble((title, "bold"), (_LEGEND if title == _OWN and legend else "", "dim")))
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True, min_width=column)
    grid.add_column(overflow="fold")
    for name, about in rows:
        grid.add_row(Text(name, "cyan"), Text(about))
    console.out.print(Padding(grid, (0, 0, 0, 2)), width=_width())


def _width() -> int:
    return min(console.out.width, _WIDEST)


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
            option.check_number(parameter.opts[0], value)


def _check_apart(parameter: Any, values: dict[str, Any]) -> None:
    """What is repeatable names different things."""
    given = values.get(parameter.name)
    if isinstance(given, (list, tuple)):
        apart(parameter.opts[0], given)

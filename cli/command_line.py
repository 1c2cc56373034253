"""Commands as Typer and Click know them: options of a dataclass, groups that load a command when it runs.

`with_options` gives a command the options of dataclasses, as if they were its own parameters. Every field that is
annotated with an option becomes one. A field `typed` gets the names of what the user really wrote, a field `asked` the
values of the command's own parameters.

`CheckedCommand` and `CheckedGroup` refuse what Click takes in silence, and tell whether JSON was asked for, which an
error needs to know of a command line that cannot be read whole.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from perturbkv.cli.commands import FILE, Command, former_command
from perturbkv.cli.help_screen import CompactHelp


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Spread each parameter that is annotated with a dataclass of options over the command's own parameters."""
    groups, own = split_parameters(command)

    def call(context: typer.Context, **values: Any) -> None:
        asked = {parameter.name: values[parameter.name] for parameter in own}
        command(**made(groups, values, typed(context), asked), **asked)

    return spread(command, call, groups, own)


def split_parameters(command: Callable[..., Any]) -> tuple[dict[str, Any], list[inspect.Parameter]]:
    """Return a command's parameters that are dataclasses of options, and its own ones."""
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    groups = {name: hints[name] for name in parameters if dataclasses.is_dataclass(hints[name])}
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in parameters.items()
        if name not in groups
    ]
    return groups, own


def spread(
    command: Callable[..., Any],
    call: Callable[..., None],
    groups: Mapping[str, Any],
    own: Iterable[inspect.Parameter],
) -> Callable[..., None]:
    """Return `call` with the name and help of `command`, and a parameter for each option of the groups."""
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *own, *(one for group in groups.values() for one in _parameters(group))]
    functools.wraps(command)(call)
    del call.__wrapped__  # type: ignore[attr-defined]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def made(
    groups: Mapping[str, Any], values: Mapping[str, Any], typed: frozenset[str], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the dataclasses of options with the values of a command line."""
    return {name: _made(group, values, {"typed": typed, "asked": asked}) for name, group in groups.items()}


def showing(**defaults: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say in a command's help what its own defaults are of options that it shares with others."""
    return _changing({name: {"show_default": default} for name, default in defaults.items()})


def telling(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Show in a command's help options that are hidden elsewhere."""
    return _changing({name: {"hidden": False} for name in names})


def hiding(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Hide from a command's help the options that it shares with others and has no use for."""
    return _changing({name: {"hidden": True} for name in names})


def _changing(
    changes: Mapping[str, Mapping[str, Any]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command some options of its own, which differ from the shared ones in this."""

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
    """Return the parameters that stand on the command line; neither defaults nor the environment's values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def options(group: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass' fields that are options, by name."""
    hints = get_type_hints(group, include_extras=True)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(group)
        if get_origin(hints[field.name]) is Annotated
    }


def _made(group: Any, values: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    """Return the dataclass of its options' values, and of what else it knows of the command."""
    fields = {field.name for field in dataclasses.fields(group)}
    chosen = {name: values[name] for name in options(group)}
    return group(**chosen, **{name: value for name, value in more.items() if name in fields})


def _parameters(group: Any) -> list[inspect.Parameter]:
    defaults = {field.name: field.default for field in dataclasses.fields(group)}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
        for name, hint in options(group).items()
    ]


@dataclass
class JsonRequest:
    """The object of a Click context that learns from commands whether they were given --json."""

    as_json: bool = False


class _Checked:
    """A reader of the command line that refuses an option that is given twice, and numbers that are none."""

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Click does. Raises ConfigError where something of the line would be dropped."""
        from perturbkv.cli import option_refusals

        lenient = type(ctx)(self, parent=ctx, resilient_parsing=True, ignore_unknown_options=True)
        values, rest, order = self.make_parser(lenient).parse_args(args=list(args))
        if request := ctx.find_object(JsonRequest):
            request.as_json = self.asks_for_json(values, rest)
        if not any(getattr(given, "is_eager", False) for given in order):
            option_refusals.check_given_once(order)
        left: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        option_refusals.check_values(order, ctx.params)
        return left


class CheckedCommand(CompactHelp, _Checked, TyperCommand):
    """A command whose options are given once."""

    def asks_for_json(self, values: Mapping[str, Any], rest: list[str]) -> bool:
        """Return whether --json stands among its options, and not as the value of another."""
        return bool(values.get("as_json"))


class CheckedGroup(CompactHelp, _Checked, TyperGroup):
    """A group of commands, each of which is imported when it is needed."""

    rows: Mapping[str, Command] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = dict.fromkeys(self.rows)

    def asks_for_json(self, values: Mapping[str, Any], rest: list[str]) -> bool:
        """Return whether --json stands before any `--`: no command of that name need be there to ask."""
        return "--json" in rest[: rest.index("--") if "--" in rest else None] or bool(values.get("as_json"))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, imported."""
        return build(self.rows[cmd_name]) if cmd_name in self.rows else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command's name, itself, and its arguments. Raises ConfigError for a name that it had before."""
        name = args[0]
        if name not in self.rows:
            if FILE in self.rows and _is_path(name):
                return FILE, self.get_command(ctx, FILE), args
            former_command(ctx.command_path, name)
        return super().resolve_command(ctx, args)


def _is_path(name: str) -> bool:
    from pathlib import Path

    return "/" in name or Path(name).suffix != "" or Path(name).exists()


def group_class(rows: Iterable[Command]) -> type[CheckedGroup]:
    """Return the class of a group of these commands."""
    return type("Group", (CheckedGroup,), {"rows": {row.name: row for row in rows}})


@functools.cache
def build(row: Command) -> Any:
    """Return a command of the table as Click knows it, imported."""
    function = load(row) if row.location else _show_help
    if not row.commands:
        info = typer.models.CommandInfo(name=row.name, cls=CheckedCommand, callback=function)
        return typer.main.get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="rich")
    app = typer.Typer(
        name=row.name,
        cls=group_class(row.commands),
        invoke_without_command=True,
        add_completion=False,
        help=typer.models.Default(None) if row.location else row.summary,
    )
    app.callback()(function)
    return typer.main.get_command(app)


def load(row: Command) -> Callable[..., None]:
    """Return the function of a command, imported."""
    module, _, name = row.location.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(f"perturbkv.cli.commands.{module}"), name)
    return function


def _show_help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())

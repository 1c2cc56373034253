"""Commands as Typer and Click know them: options of a dataclass, groups that load a command when it runs.

`with_options` gives a command the options of dataclasses, as if they were its own parameters. Every field that is
annotated with an option becomes one. A field `typed_options` gets the names of the options that the user typed, a field
`own_options` the values of the command's own parameters.

`CheckedCommand` and `CheckedGroup` refuse repeated options, which Click accepts silently, and record whether JSON was
requested, so that even a command line that cannot be parsed gets its error as JSON.
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

from perturbkv.cli.commands import FILE, Command, refuse_former_command
from perturbkv.cli.help_screen import CompactHelp


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Spread each parameter that is annotated with a dataclass of options over the command's own parameters."""
    groups, own = split_parameters(command)

    def call(context: typer.Context, **values: Any) -> None:
        own_options = {parameter.name: values[parameter.name] for parameter in own}
        command(**fill_groups(groups, values, typed_options(context), own_options), **own_options)

    return copy_signature(command, call, groups, own)


def split_parameters(command: Callable[..., Any]) -> tuple[dict[str, Any], list[inspect.Parameter]]:
    """Return the parameters of a command that are dataclasses of options, and its other parameters."""
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    groups = {name: hints[name] for name in parameters if dataclasses.is_dataclass(hints[name])}
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in parameters.items()
        if name not in groups
    ]
    return groups, own


def copy_signature(
    command: Callable[..., Any],
    call: Callable[..., None],
    groups: Mapping[str, Any],
    own: Iterable[inspect.Parameter],
) -> Callable[..., None]:
    """Return `call` with the name and help of `command`, its own parameters, and one for each option of the groups."""
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *own, *(option for group in groups.values() for option in _group_parameters(group))]
    functools.wraps(command)(call)
    del call.__wrapped__  # type: ignore[attr-defined]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def fill_groups(
    groups: Mapping[str, Any], values: Mapping[str, Any], typed: frozenset[str], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the dataclasses of options, filled with the values of a command line."""
    context = {"typed_options": typed, "own_options": own}
    return {name: _fill_group(group, values, context) for name, group in groups.items()}


def show_defaults(**defaults: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives shared options other defaults in a command's help."""
    return _change_options({name: {"show_default": default} for name, default in defaults.items()})


def show_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that shows in a command's help options which are hidden elsewhere."""
    return _change_options({name: {"hidden": False} for name in names})


def hide_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that hides shared options from the help of a command that has no use for them."""
    return _change_options({name: {"hidden": True} for name in names})


def _change_options(
    changes: Mapping[str, Mapping[str, Any]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that changes attributes of a command's options, and leaves other commands as they are."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        parameters = [_change_option(one, changes.get(one.name, {})) for one in signature.parameters.values()]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _change_option(parameter: inspect.Parameter, changes: Mapping[str, Any]) -> inspect.Parameter:
    if not changes:
        return parameter
    kind, option = get_args(parameter.annotation)
    changed = copy.copy(option)
    vars(changed).update(changes)
    return parameter.replace(annotation=Annotated[kind, changed])


def typed_options(context: typer.Context) -> frozenset[str]:
    """Return the names of the parameters given on the command line, not by a default or the environment."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def option_fields(group: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a dataclass that are options, by name."""
    hints = get_type_hints(group, include_extras=True)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(group)
        if get_origin(hints[field.name]) is Annotated
    }


def _fill_group(group: Any, values: Mapping[str, Any], context: Mapping[str, Any]) -> Any:
    """Return a dataclass of options, filled with their values and with those fields of `context` that it has."""
    fields = {field.name for field in dataclasses.fields(group)}
    chosen = {name: values[name] for name in option_fields(group)}
    return group(**chosen, **{name: value for name, value in context.items() if name in fields})


def _group_parameters(group: Any) -> list[inspect.Parameter]:
    defaults = {field.name: field.default for field in dataclasses.fields(group)}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
        for name, hint in option_fields(group).items()
    ]


@dataclass
class JsonRequest:
    """An object of the Click context that records whether --json was given."""

    as_json: bool = False


class _CheckedParser:
    """A mix-in whose parser refuses options given twice, and numbers beyond all bounds."""

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Click does. Raises ConfigError where a part of the line would be dropped."""
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


class CheckedCommand(CompactHelp, _CheckedParser, TyperCommand):
    """A command that refuses options given twice."""

    def asks_for_json(self, values: Mapping[str, Any], rest: list[str]) -> bool:
        """Return whether --json is among the options, and not the value of another."""
        return bool(values.get("as_json"))


class CheckedGroup(CompactHelp, _CheckedParser, TyperGroup):
    """A group of commands, each of which is imported when it is needed."""

    rows: Mapping[str, Command] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = dict.fromkeys(self.rows)

    def asks_for_json(self, values: Mapping[str, Any], rest: list[str]) -> bool:
        """Return whether --json stands before any `--`, be its command known or not."""
        return "--json" in rest[: rest.index("--") if "--" in rest else None] or bool(values.get("as_json"))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, imported."""
        return build(self.rows[cmd_name]) if cmd_name in self.rows else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and its arguments. Raises ConfigError for the former name of a command."""
        name = args[0]
        if name not in self.rows:
            if FILE in self.rows and _is_path(name):
                return FILE, self.get_command(ctx, FILE), args
            refuse_former_command(ctx.command_path, name)
        return super().resolve_command(ctx, args)


def _is_path(name: str) -> bool:
    from pathlib import Path

    return "/" in name or Path(name).suffix != "" or Path(name).exists()


def group_class(rows: Iterable[Command]) -> type[CheckedGroup]:
    """Return the class of a group of these commands."""
    return type("Group", (CheckedGroup,), {"rows": {row.name: row for row in rows}})


@functools.cache
def build(row: Command) -> Any:
    """Return the Click command of a row of the table; imports its module."""
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
    """Return the function of a row of the table; imports its module."""
    module, _, name = row.location.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(f"perturbkv.cli.commands.{module}"), name)
    return function


def _show_help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())

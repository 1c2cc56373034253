"""Typer commands made of functions and dataclasses of options; groups that import a command when it runs.

`with_options` gives a command the options of dataclasses, as if they were its own parameters. Every field that is
annotated with an option becomes one. A field `typed_options` gets the names of the options that the user typed, a field
`own_options` the values of the command's own parameters.

`CheckedCommand` refuses repeated options and values, which Click accepts silently. The help has one line per option, in
groups, with defaults in brackets and … where an option may be repeated.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from perturbkv.cli import console
from perturbkv.cli.commands import FILE, PANELS, Command, former_message
from perturbkv.errors import ConfigError

Sections = dict[str, list[tuple[str, str]]]
"""Title of a section of the help -> name and description of each row."""
_MOST_COLUMNS = 100
_OWN, _COMMANDS, _HELP = "Options", "Commands", "help"
_NO_DEFAULT = ("", "None", "False")
_EXAMPLES = ("text", "prompts", "save")
"""Options that the line on hidden options names."""
_LEGEND = "  [default]  … repeatable"


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose parameters of a dataclass of options are replaced by one parameter per option."""
    groups, own = split_parameters(command)

    def call(context: typer.Context, **values: Any) -> None:
        own_options = {parameter.name: values[parameter.name] for parameter in own}
        command(**fill_groups(groups, values, typed_options(context), own_options), **own_options)

    return copy_signature(command, call, groups, own)


def split_parameters(command: Callable[..., Any]) -> tuple[dict[str, Any], list[inspect.Parameter]]:
    """Return the command's option-dataclass parameters, as name -> dataclass, and its remaining parameters."""
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
    """Return `call` with the name, the help and one Typer parameter per option of `command`.

    The options are those of `own`, the command's own parameters, and those of `groups`, its dataclasses of options.
    """
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *own, *(option for group in groups.values() for option in _option_parameters(group))]
    functools.wraps(command)(call)
    del call.__wrapped__  # type: ignore[attr-defined]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def fill_groups(
    groups: Mapping[str, Any], values: Mapping[str, Any], typed: frozenset[str], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return name -> dataclass of options, filled with the command line's values; `own`: the command's own options."""
    context = {"typed_options": typed, "own_options": own}
    return {name: _fill_group(group, values, context) for name, group in groups.items()}


def show_defaults(**defaults: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that changes the default values shown in a command's help, option -> text."""
    return _change_options({name: {"show_default": default} for name, default in defaults.items()})


def show_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a command's help show options that are hidden by default."""
    return _change_options({name: {"hidden": False} for name in names})


def hide_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a command's help hide options that are shown by default."""
    return _change_options({name: {"hidden": True} for name in names})


def without_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that takes shared options from a command; their dataclasses keep the defaults."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        kept = {name: one for name, one in inspect.signature(command).parameters.items() if name not in names}
        command.__signature__ = inspect.Signature(list(kept.values()))  # type: ignore[attr-defined]
        command.__annotations__ = {name: parameter.annotation for name, parameter in kept.items()}
        return command

    return decorate


def _change_options(
    changes: Mapping[str, Mapping[str, Any]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that changes attributes of a command's options: option -> attribute -> new value."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        parameters = [
            _change_option(parameter, changes.get(parameter.name, {})) for parameter in signature.parameters.values()
        ]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _change_option(parameter: inspect.Parameter, changes: Mapping[str, Any]) -> inspect.Parameter:
    """Return a parameter whose Typer option has changed attributes; the option of other commands is unaffected."""
    if not changes:
        return parameter
    kind, option = get_args(parameter.annotation)
    changed = copy.copy(option)
    vars(changed).update(changes)
    return parameter.replace(annotation=Annotated[kind, changed])


def typed_options(context: typer.Context) -> frozenset[str]:
    """Return the names of the options typed on the command line, excluding defaults and environment variables."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


@functools.cache
def option_fields(group: Any) -> Mapping[str, Any]:
    """Return field name -> annotation, for the fields of a dataclass that are options."""
    hints = get_type_hints(group, include_extras=True)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(group)
        if get_origin(hints[field.name]) is Annotated
    }


def _fill_group(group: Any, values: Mapping[str, Any], context: Mapping[str, Any]) -> Any:
    """Return a dataclass of options, filled with option values and those items of `context` that are its fields."""
    fields = {field.name for field in dataclasses.fields(group)}
    options = {name: values[name] for name in option_fields(group) if name in values}
    return group(**options, **{name: value for name, value in context.items() if name in fields})


def _option_parameters(group: Any) -> list[inspect.Parameter]:
    """Return a keyword parameter per option of a dataclass."""
    defaults = {field.name: field.default for field in dataclasses.fields(group)}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
        for name, hint in option_fields(group).items()
    ]


class CompactHelp:
    """A mix-in for commands whose help has one line per option."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        """Write usage, description, options and subcommands to the formatter."""
        with console.out.capture() as written:
            _print_text(f"Usage: {usage_line(self, ctx)}")
            for text in (self.help or "").split("\n\n"):
                _print_text(" ".join(text.split()))
                console.out.print()
            sections = {**option_sections(self, ctx), **_command_sections(self)}
            column = max((len(name) for rows in sections.values() for name, _ in rows), default=0)
            for title, rows in sections.items():
                _print_section(title, rows, column)
            hidden = {option.name for option in self.get_params(ctx) if option.hidden}
            if self.name != "trace" and "chunk_mib" in hidden:  # a command that measures; `trace` shows all
                named = ", ".join(f"--{name}" for name in _EXAMPLES if name in hidden)
                _print_text(f"More options of measuring{f' ({named}, …)' if named else ''}: perturbkv trace -h")
        formatter.write(written.get())


def usage_line(command: Any, ctx: Any) -> str:
    """Return a command's usage line: `perturbkv heads [OPTIONS] [TRACE]`."""
    arguments = [
        _parameter_name(parameter) if parameter.required else f"[{_parameter_name(parameter)}]"
        for parameter in command.get_params(ctx)
        if parameter.param_type_name == "argument"
    ]
    subcommands = [command.subcommand_metavar] if _has_commands(command) else []
    return " ".join([ctx.command_path, "[OPTIONS]", *arguments, *subcommands])


def option_sections(command: Any, ctx: Any) -> Sections:
    """Return group of options -> (name, help and [default]) of its visible options; arguments come first."""
    sections: Sections = {}
    for parameter in sorted(command.get_params(ctx), key=lambda parameter: parameter.param_type_name != "argument"):
        if not parameter.hidden and parameter.name != _HELP:
            panel, shown = getattr(parameter, "rich_help_panel", None) or _OWN, parameter.show_default
            default = str(parameter.get_default(ctx, call=False) if shown is True else shown)
            about = f"{(parameter.help or '').rstrip('.')}{'' if default in _NO_DEFAULT else f' [{default}]'}"
            sections.setdefault(panel, []).append((_parameter_name(parameter), about))
    return sections


def _command_sections(command: Any) -> Sections:
    """Return group of commands -> name and summary of each subcommand, without importing it."""
    sections: Sections = {}
    # the root's commands stand under the titles of the table of commands
    for row in command.rows.values() if _has_commands(command) else ():
        title = PANELS.get(row.name, _COMMANDS) if command.name in (None, "", "perturbkv") else _COMMANDS
        sections.setdefault(title, []).append((row.name, row.summary))
    return sections


def _has_commands(command: Any) -> bool:
    """Return whether a command is a group with commands."""
    return isinstance(getattr(command, "rows", None), Mapping)


def _parameter_name(parameter: Any) -> str:
    """Return an option's name in the help, `--model, -m NAME`, or an argument's name in capitals."""
    if parameter.param_type_name == "argument":
        return (parameter.metavar or str(parameter.name)).upper().strip("[].")
    if parameter.secondary_opts:  # --chat-template/--no-chat-template
        return str(parameter.opts[0]).replace("--", "--[no-]")
    names = ", ".join(sorted(parameter.opts, key=lambda name: not name.startswith("--")))
    value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
    return names + value + ("…" if parameter.multiple else "")


def _print_text(text: str) -> None:
    """Print a paragraph of help."""
    console.out.print(text, markup=False, highlight=False, emoji=False, width=_help_width())


def _print_section(title: str, rows: list[tuple[str, str]], column: int) -> None:
    """Print a group of names and descriptions; the names' column is at least `column` characters wide."""
    legend = any(name.endswith("…") for name, _ in rows) or any(help.endswith("]") for _, help in rows)
    console.out.print(Text.assemble((title, "bold"), (_LEGEND if title == _OWN and legend else "", "dim")))
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True, min_width=column)
    grid.add_column(overflow="fold")
    for name, help in rows:
        grid.add_row(Text(name, "cyan"), Text(help))
    console.out.print(Padding(grid, (0, 0, 0, 2)), width=_help_width())


def _help_width() -> int:
    """Return the width of the help, in characters."""
    return min(console.out.width, _MOST_COLUMNS)


class CheckedCommand(CompactHelp, TyperCommand):
    """A command that refuses repeated options and values, and whole numbers that are too large."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments as Click does; return the unparsed ones.

        Raises ConfigError for a repeated option or value.
        """
        from perturbkv.cli import option_refusals

        typed = list(args)
        remaining: list[str] = super().parse_args(ctx, args)
        option_refusals.check_typed_once(self.make_parser(ctx).parse_args(args=typed)[2])
        option_refusals.check_values(self.params, ctx.params)
        return remaining


class CommandGroup(CompactHelp, TyperGroup):
    """A group of commands that imports each command when it is run."""

    rows: Mapping[str, Command] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = dict.fromkeys(self.rows)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the Click command of this name, imported; None if the group has no such command."""
        return build(self.rows[cmd_name]) if cmd_name in self.rows else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command's name, the command and its arguments; a path selects the command on files.

        Raises ConfigError for a former command.
        """
        from pathlib import Path

        name = args[0]
        if (
            name not in self.rows
            and FILE in self.rows
            and ("/" in name or Path(name).suffix != "" or Path(name).exists())
        ):
            return FILE, self.get_command(ctx, FILE), args
        if name not in self.rows and (message := former_message(ctx.command_path.split()[1:], args)):
            raise ConfigError(message)
        return super().resolve_command(ctx, args)


def group_class(rows: Iterable[Command]) -> type[CommandGroup]:
    """Return the Click class of a group with the commands `rows`."""
    return type("Group", (CommandGroup,), {"rows": {row.name: row for row in rows}})


@functools.cache
def build(row: Command) -> Any:
    """Return the Click command of a row of the command table, importing the command's module."""
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
    """Return the function of a row of the command table, importing the command's module."""
    module, _, name = row.location.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(f"perturbkv.cli.commands.{module}"), name)
    return function


def _show_help(ctx: typer.Context) -> None:
    """Print the help of a group that was called without a command."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())

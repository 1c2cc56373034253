"""The help of a command: one line per option, in groups, with defaults in brackets and … where it may be repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from perturbkv.cli import console
from perturbkv.cli.commands import PANELS

Sections = dict[str, list[tuple[str, str]]]
_MOST_COLUMNS = 100
_OWN, _COMMANDS, _HELP = "Options", "Commands", "help"
_NO_DEFAULT = ("", "None", "False")
_MORE = "More options of measuring, rarely needed: perturbkv trace -h"
_LEGEND = "  [default]  … repeatable"


class CompactHelp:
    """A mix-in for commands whose help has one line per option."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        """Write usage, description, options and subcommands to the formatter."""
        with console.out.capture() as written:
            _print_text(f"Usage: {_usage(self, ctx)}")
            for text in (self.help or "").split("\n\n"):
                _print_text(" ".join(text.split()))
                console.out.print()
            sections = {**_option_sections(self, ctx), **_command_sections(self)}
            column = max((len(name) for rows in sections.values() for name, _ in rows), default=0)
            for title, rows in sections.items():
                _print_section(title, rows, column)
            if _hides_options(self, ctx):
                _print_text(_MORE)
        formatter.write(written.get())


def _hides_options(command: Any, ctx: Any) -> bool:
    """Return whether a command that measures has options that its help leaves out."""
    measuring = (option for option in command.get_params(ctx) if option.name == "chunk_mib")
    return command.name != "trace" and any(option.hidden for option in measuring)


def _usage(command: Any, ctx: Any) -> str:
    """Return the line on how a command is typed: `perturbkv heads [OPTIONS] [TRACE]`."""
    arguments = [
        _parameter_name(parameter) if parameter.required else f"[{_parameter_name(parameter)}]"
        for parameter in command.get_params(ctx)
        if parameter.param_type_name == "argument"
    ]
    subcommands = [command.subcommand_metavar] if _has_commands(command) else []
    return " ".join([ctx.command_path, "[OPTIONS]", *arguments, *subcommands])


def _option_sections(command: Any, ctx: Any) -> Sections:
    """Return group of options -> name and description of each visible option; arguments come first."""
    sections: Sections = {}
    for parameter in sorted(command.get_params(ctx), key=lambda parameter: parameter.param_type_name != "argument"):
        if not parameter.hidden and parameter.name != _HELP:
            panel = getattr(parameter, "rich_help_panel", None) or _OWN
            sections.setdefault(panel, []).append((_parameter_name(parameter), _description(parameter, ctx)))
    return sections


def _command_sections(command: Any) -> Sections:
    """Return group of commands -> name and summary of each subcommand, without importing it."""
    sections: Sections = {}
    for row in command.rows.values() if _has_commands(command) else ():
        title = PANELS.get(row.name, _COMMANDS) if command.name in (None, "", "perturbkv") else _COMMANDS
        sections.setdefault(title, []).append((row.name, row.summary))
    return sections


def _has_commands(command: Any) -> bool:
    """Return whether a command is a group of the table."""
    return isinstance(getattr(command, "rows", None), Mapping)


def _parameter_name(parameter: Any) -> str:
    """Return an option as the help writes it, `--model, -m NAME`, or an argument's name in capitals."""
    if parameter.param_type_name == "argument":
        return (parameter.metavar or str(parameter.name)).upper().strip("[].")
    if parameter.secondary_opts:  # --chat-template/--no-chat-template
        return str(parameter.opts[0]).replace("--", "--[no-]")
    names = ", ".join(sorted(parameter.opts, key=lambda name: not name.startswith("--")))
    value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
    return names + value + ("…" if parameter.multiple else "")


def _description(parameter: Any, ctx: Any) -> str:
    """Return the help of a parameter, with its default in brackets."""
    default = str(parameter.get_default(ctx, call=False) if parameter.show_default is True else parameter.show_default)
    return f"{(parameter.help or '').rstrip('.')}{'' if default in _NO_DEFAULT else f' [{default}]'}"


def _print_text(text: str) -> None:
    """Print a paragraph of help."""
    console.out.print(text, markup=False, highlight=False, emoji=False, width=_width())


def _print_section(title: str, rows: list[tuple[str, str]], column: int) -> None:
    """Print a group of names and descriptions; the names' column is at least `column` characters wide."""
    legend = any(name.endswith("…") for name, _ in rows) or any(help.endswith("]") for _, help in rows)
    console.out.print(Text.assemble((title, "bold"), (_LEGEND if title == _OWN and legend else "", "dim")))
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True, min_width=column)
    grid.add_column(overflow="fold")
    for name, help in rows:
        grid.add_row(Text(name, "cyan"), Text(help))
    console.out.print(Padding(grid, (0, 0, 0, 2)), width=_width())


def _width() -> int:
    """Return the width of the help, in characters."""
    return min(console.out.width, _MOST_COLUMNS)

"""A command's help: one line an option, in groups; the defaults in brackets, what may be repeated with an ellipsis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from perturbkv.cli import console

Sections = dict[str, list[tuple[str, str]]]
_WIDEST = 100
_OWN, _COMMANDS, _HELP = "Options", "Commands", "help"
_NO_DEFAULT = ("", "None", "False")
_MORE = "More options of measuring, rarely needed: perturbkv trace -h"
_LEGEND = "  [default]  … repeatable"


class CompactHelp:
    """A mix-in of commands whose help has one line an option."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        """Write usage, description, options and subcommands."""
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
    return command.name != "trace" and any(one.hidden for one in command.get_params(ctx) if one.name == "chunk_mib")


def _usage(command: Any, ctx: Any) -> str:
    arguments = [
        _name(one) if one.required else f"[{_name(one)}]"
        for one in command.get_params(ctx)
        if one.param_type_name == "argument"
    ]
    subcommands = [command.subcommand_metavar] if _has_commands(command) else []
    return " ".join([ctx.command_path, "[OPTIONS]", *arguments, *subcommands])


def _option_sections(command: Any, ctx: Any) -> Sections:
    """Return group -> names and descriptions of its options; arguments come first."""
    sections: Sections = {}
    for one in sorted(command.get_params(ctx), key=lambda one: one.param_type_name != "argument"):
        if not one.hidden and one.name != _HELP:
            panel = getattr(one, "rich_help_panel", None) or _OWN
            sections.setdefault(panel, []).append((_name(one), _description(one, ctx)))
    return sections


def _command_sections(command: Any) -> Sections:
    """Return group -> names and summaries of its subcommands, from the table: none is imported."""
    from perturbkv.cli.commands import PANELS

    sections: Sections = {}
    for row in command.rows.values() if _has_commands(command) else ():
        title = PANELS.get(row.name, _COMMANDS) if command.name in (None, "", "perturbkv") else _COMMANDS
        sections.setdefault(title, []).append((row.name, row.summary))
    return sections


def _has_commands(command: Any) -> bool:
    return isinstance(getattr(command, "rows", None), Mapping)


def _name(parameter: Any) -> str:
    """Return `--model, -m NAME`; an argument's name in capitals."""
    if parameter.param_type_name == "argument":
        return (parameter.metavar or str(parameter.name)).upper().strip("[].")
    if parameter.secondary_opts:  # --chat-template/--no-chat-template
        return str(parameter.opts[0]).replace("--", "--[no-]")
    names = ", ".join(sorted(parameter.opts, key=lambda name: not name.startswith("--")))
    value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
    return names + value + ("…" if parameter.multiple else "")


def _description(parameter: Any, ctx: Any) -> str:
    """Return the help of a parameter, and its default as its declaration words it."""
    default = str(parameter.get_default(ctx, call=False) if parameter.show_default is True else parameter.show_default)
    return f"{(parameter.help or '').rstrip('.')}{'' if default in _NO_DEFAULT else f' [{default}]'}"


def _print_text(text: str) -> None:
    console.out.print(text, markup=False, highlight=False, emoji=False, width=_width())


def _print_section(title: str, rows: list[tuple[str, str]], column: int) -> None:
    legend = any(name.endswith("…") for name, _ in rows) or any(help.endswith("]") for _, help in rows)
    console.out.print(Text.assemble((title, "bold"), (_LEGEND if title == _OWN and legend else "", "dim")))
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True, min_width=column)
    grid.add_column(overflow="fold")
    for name, help in rows:
        grid.add_row(Text(name, "cyan"), Text(help))
    console.out.print(Padding(grid, (0, 0, 0, 2)), width=_width())


def _width() -> int:
    return min(console.out.width, _WIDEST)

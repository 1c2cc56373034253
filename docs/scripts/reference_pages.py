"""The pages of the site that are made: one per command, one of the policies, and the notebooks of `examples/`.

`docs/conf.py` writes them when a build begins; they are not kept in the repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from perturbkv.cli import command_line
from perturbkv.cli.commands import COMMANDS, FILE, GROUPS, Command
from perturbkv.cli.main import app
from perturbkv.selection.policies import registry
from perturbkv.selection.policies.base import Policy

DOCS = Path(__file__).resolve().parents[1]


def write(folder: Path = DOCS) -> None:
    """Write all pages into `folder`, the site's source, and remove those of commands and notebooks that are no more."""
    pages = {**command_pages(), "reference/policies.md": policy_page(), **notebooks()}
    for path in (*folder.glob("reference/commands/*.md"), *folder.glob("tutorial/*.ipynb")):
        if path.relative_to(folder).as_posix() not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # an unchanged page is not built again
            path.write_text(text)


def notebooks() -> dict[str, str]:
    """Return path -> notebook of `examples/`, with links that lead from `docs/tutorial/`."""
    paths = sorted((DOCS.parent / "examples").glob("*.ipynb"))
    links = {"](../docs/": "](../", "](../perturbkv/storage/FORMAT.md": "](../reference/trace_format.md"}
    pages = {}
    for path in paths:
        text = path.read_text()
        for link, moved in links.items():
            text = text.replace(link, moved)
        pages[f"tutorial/{path.name}"] = text
    return pages


def command_pages() -> dict[str, str]:
    """Return path -> text: the overview of all commands, and a page per command."""
    root = typer.main.get_command(app)
    context = root.make_context("perturbkv", [], resilient_parsing=True)
    pages = {"reference/commands/index.md": _overview()}
    for row in COMMANDS:
        pages[f"reference/commands/{row.name}.md"] = "\n".join(_command(row, context, "#"))
    return pages


def policy_page() -> str:
    """Return the page of the policies: a table of all, then each with its options."""
    lines = [
        "# Policies",
        "",
        "A policy says which entries of the cache score high and how a budget is shared by layers and heads. "
        "`--policy NAME` takes one of these, `NAME(option=value)` with its options; "
        "`perturbkv list policies NAME` prints the same. Budgets are *uniform* where every head keeps equally many "
        "entries, else heads or layers share them.",
        "",
        "| policy | what | budgets |",
        "|---|---|---|",
        *(f"| [`{policy.name}`](#{policy.name}) | {policy.summary_line()} | {policy.budgets} |" for policy in _all()),
        "",
    ]
    for policy in _all():
        lines += [f"## {policy.name}", "", f"{policy.summary_line()}.", ""]
        if policy.options():
            lines += ["| option | default | what |", "|---|---|---|"]
            lines += [f"| `{name}` | `{one.default}` | {_cell(one.about)} |" for name, one in policy.options().items()]
            lines += [""]
    return "\n".join(lines)


def _all() -> list[type[Policy]]:
    return list(registry.all_policies())


def _overview() -> str:
    """Return the page of all commands, in the groups of `perturbkv -h`."""
    lines = ["# Commands", "", "Every command takes `-h`; those with numbers `--json`, those that run a model", ""]
    lines[2] += " `--dry-run`. Bad input ends in one line and exit code 2."
    for title, rows in GROUPS.items():
        lines += [f"## {title}", "", "| command | what |", "|---|---|"]
        lines += [f"| [`{row.name}`]({row.name}.md) | {row.summary} |" for row in rows] + [""]
    names = "\n".join(row.name for row in COMMANDS)
    return "\n".join([*lines, f"```{{toctree}}\n:hidden:\n\n{names}\n```", ""])


def _command(row: Command, parent: Any, heading: str) -> Iterator[str]:
    """Yield the lines of a command's section: usage, description, tables of options, then the commands inside it."""
    command = command_line.build(row)
    name = row.name if row.name != FILE else "FILE"
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    path = context.command_path
    yield from (f"{heading} {path.removeprefix('perturbkv ')}", "", f"{row.summary}.", "")
    yield from ("```text", command_line.usage_line(command, context), "```", "")
    for paragraph in (" ".join(one.split()) for one in (command.help or "").split("\n\n")):
        if paragraph != f"{row.summary}.":
            yield from (paragraph, "")
    for title, rows in command_line.option_sections(command, context).items():
        yield from (f"**{title}**", "", "| option | what |", "|---|---|")
        yield from (f"| `{option}` | {_cell(what)} |" for option, what in rows)
        yield ""
    for inner in row.commands:
        yield from _command(inner, context, f"{heading}#")


def _cell(text: str) -> str:
    """Return a text that can stand in a cell of a table."""
    for character, escaped in (("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("_", "\\_")):
        text = text.replace(character, escaped)
    return text.replace("docs/reference/json.md", "[JSON](../json.md)")

"""The `perturbkv` command: subcommands, and errors as one line with an exit code."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Annotated, Any

import typer
from typer import Option

import perturbkv
from perturbkv.cli import console, interrupting, streams
from perturbkv.cli.commands.ablation import ablation
from perturbkv.cli.commands.alpha import alpha
from perturbkv.cli.commands.assumption import assumption
from perturbkv.cli.commands.audit import audit
from perturbkv.cli.commands.bench import bench
from perturbkv.cli.commands.bounds import bound_tightness
from perturbkv.cli.commands.budget import budget
from perturbkv.cli.commands.cliff import cliff
from perturbkv.cli.commands.correlation import link
from perturbkv.cli.commands.datasets import datasets
from perturbkv.cli.commands.divergence import divergence
from perturbkv.cli.commands.doctor import doctor
from perturbkv.cli.commands.equal_bytes import bytes
from perturbkv.cli.commands.finished_traces import export
from perturbkv.cli.commands.generate import generate
from perturbkv.cli.commands.head_scores import head_scores
from perturbkv.cli.commands.heads import heads
from perturbkv.cli.commands.horizon import horizon
from perturbkv.cli.commands.info import info
from perturbkv.cli.commands.judge import judge
from perturbkv.cli.commands.layers import layers
from perturbkv.cli.commands.listings import models, policies
from perturbkv.cli.commands.merge import merge
from perturbkv.cli.commands.needle import needle
from perturbkv.cli.commands.patching import swap
from perturbkv.cli.commands.quality import quality
from perturbkv.cli.commands.questions import measures
from perturbkv.cli.commands.regret import regret
from perturbkv.cli.commands.report import report
from perturbkv.cli.commands.restriction import restriction
from perturbkv.cli.commands.savings import savings
from perturbkv.cli.commands.selfcheck import selfcheck
from perturbkv.cli.commands.split import split
from perturbkv.cli.commands.stability import stability
from perturbkv.cli.commands.tokens import tokens
from perturbkv.cli.commands.trace import trace
from perturbkv.cli.interrupting import INTERRUPTED, SAID, Ending, sigterm_as_interrupt
from perturbkv.cli.once import Asked, OnceCommand, OnceGroup
from perturbkv.errors import PerturbkvError

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=OnceGroup,
)
_UsageError: Any = typer.BadParameter.__base__
"""What Click raises for a command line that it cannot read: its own, or that of the Click inside newer Typers."""
_EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)")
"""What Click says where it finds more arguments than a command has."""
_LONGEST = 2000
"""Characters of an error on the screen: its two ends say what was expected and what to do."""
ANALYSES = (heads, layers, assumption, bound_tightness, ablation, restriction, needle, horizon)
OPEN = (measures, alpha, regret, split, swap, cliff, stability)
SCORES = (quality, link, savings, budget, bytes)
_COMMANDS = {
    "Analyses, of a finished trace or of one that they make": ANALYSES,
    "Questions that the paper left open": OPEN,
    "Scores of answers and budgets, of finished traces or of those that they make": SCORES,
    "Running a model, and its trace": (trace, merge, generate, head_scores, info, tokens, report, export),
    "Answers that generate wrote": (divergence, judge),
    "An eviction that is not ours": (audit,),
    "What there is to choose from": (models, datasets, policies),
    "This machine": (doctor, selfcheck),
}
for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(cls=OnceCommand, rich_help_panel=panel)(command)
app.add_typer(bench, name="bench", rich_help_panel="This machine")


def _say_version(asked: bool) -> None:
    if asked:
        console.say(f"perturbkv {perturbkv.__version__}")
        raise typer.Exit


@app.callback()
def about(
    ctx: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_say_version, is_eager=True, help="Print the version and leave")
    ] = False,
) -> None:
    """What KV-cache eviction does to attention outputs, per head and per layer."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Run the command line; every error that we know of is one line on stderr, with --json a document on stdout too."""
    streams.prepare()
    _quiet_libraries()
    console.show_log()
    asked = Asked()
    with sigterm_as_interrupt() as ending:
        sys.exit(streams.ended(lambda: _ran(asked, ending)))


def _ran(asked: Asked, ending: Ending) -> int:
    """The command's exit code."""
    try:
        code = int(app(prog_name="perturbkv", standalone_mode=False, obj=asked) or 0)
        if code == INTERRUPTED:  # Typer makes it of a Ctrl-C that no run explained
            return _refuse(KeyboardInterrupt(), SAID, ending.code(code), asked)
        return code
    except _UsageError as error:
        return _refuse(error, _about_usage(error.format_message(), error), error.exit_code, asked)
    except KeyboardInterrupt as error:
        return _refuse(error, SAID, ending.code(INTERRUPTED), asked)
    except PerturbkvError as error:
        if interrupting.lies_behind(error) and error.exit_code != INTERRUPTED:
            return _refuse(KeyboardInterrupt(), SAID, ending.code(INTERRUPTED), asked)
        return _refuse(error, " ".join(str(error).split()), ending.code(error.exit_code), asked)
    except BrokenPipeError:
        raise  # nobody reads what we say
    except OSError as error:
        return _refuse(error, _about_file(error), 2, asked)


def _refuse(error: BaseException, said: str, code: int, asked: Asked) -> int:
    """Say what was wrong; returns the exit code."""
    told = said if len(said) <= _LONGEST else f"{said[: _LONGEST // 2]} … {said[-_LONGEST // 2 :]}"
    console.note(f"error: {told}")
    if asked.as_json:
        console.print_json({"error": {"type": type(error).__name__, "message": said, "exit_code": code}})
    return code


def _about_usage(said: str, error: Any) -> str:
    """What Click could not read, in one line that names the help, or whose option it is that no command has."""
    line, context = " ".join(said.split()).rstrip("."), error.ctx
    if extra := _EXTRA.fullmatch(line):
        line = _about_extra(extra[1], context.command)
    if belongs := _about_owner(getattr(error, "option_name", "")):
        return f"No such option: {error.option_name}; {belongs}"
    border = "" if line.endswith("?") else ";"
    return f"{line}{border} {context.command_path} --help lists what there is" if context else line


def _about_extra(extra: str, command: Any) -> str:
    """What stands where no argument is left, and where a trace would go instead."""
    names = [str(one.name).upper() for one in command.params if one.param_type_name == "argument"]
    most = f"no argument but {' and '.join(names)}" if names else "no argument"
    too = " too" if names else ""
    return f"expected {most}, got '{extra}'{too}{_about_traces(command, bool(names))}"


def _about_traces(command: Any, takes: bool) -> str:
    """Where further traces go; of an analysis that takes none, that it measures for itself."""
    if any("--trace" in one.opts for one in command.params):
        return "; give further traces with --trace"
    measures = not takes and command.name in {one.__name__ for one in (*ANALYSES, *OPEN)}
    return "; it measures for itself and takes no finished trace" if measures else ""


def _about_owner(option: str) -> str:
    """Where an option belongs that a policy, a selection or a granularity has; empty for any other."""
    from perturbkv.selection import spread

    name = option.lstrip("-").replace("-", "_")
    if name not in spread.known():
        return ""
    return f"it belongs to {' or '.join(spread.owners(name)[:3])}: write {spread.written(name)}"


def _about_file(error: OSError) -> str:
    """What the file system refused, in one line."""
    if error.filename is None:
        return f"expected to read or write, got '{error.strerror or error}'; make room, or choose another place"
    return f"expected to read or write {error.filename}, got '{error.strerror}'; choose another place"


def _quiet_libraries() -> None:
    """Other libraries' warnings stay out of our output, and their progress bars out of files and pipes."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree"):  # which transformers imports where they are there
        logging.getLogger(name).setLevel(logging.ERROR)

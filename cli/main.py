"""The `perturbkv` command: subcommands, and errors as one line with an exit code.

Ctrl-C and SIGTERM: the same end of a command, told apart by its exit code.

Standard output as it may be: in any encoding, closed, full, or read by somebody who leaves.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

import perturbkv
from perturbkv.cli import console
from perturbkv.cli.commands.ablation import ablation, restriction
from perturbkv.cli.commands.alpha import alpha
from perturbkv.cli.commands.audit import audit
from perturbkv.cli.commands.bench import bench
from perturbkv.cli.commands.bounds import assumption, bound_tightness
from perturbkv.cli.commands.budget import budget, bytes, cliff, savings
from perturbkv.cli.commands.correlation import link
from perturbkv.cli.commands.datasets import datasets
from perturbkv.cli.commands.doctor import doctor, selfcheck
from perturbkv.cli.commands.finished_traces import export, info, merge, report
from perturbkv.cli.commands.generate import generate
from perturbkv.cli.commands.heads import heads
from perturbkv.cli.commands.horizon import horizon
from perturbkv.cli.commands.judge import divergence, judge
from perturbkv.cli.commands.layers import layers
from perturbkv.cli.commands.listings import models, policies
from perturbkv.cli.commands.needle import needle
from perturbkv.cli.commands.patching import swap
from perturbkv.cli.commands.quality import quality
from perturbkv.cli.commands.questions import measures, regret, split, stability
from perturbkv.cli.commands.tokens import tokens
from perturbkv.cli.commands.trace import head_scores, trace
from perturbkv.cli.option_routing import Asked, OnceCommand, OnceGroup
from perturbkv.errors import InterruptedRunError, PerturbkvError

INTERRUPTED = InterruptedRunError.exit_code
SAID = "interrupted; what is not whole is not written"
"""Of a Ctrl-C that no run explained."""


@dataclass
class Ending:
    """Whether a SIGTERM came, which ends what is done as Ctrl-C does."""

    terminated: bool = False

    def code(self, code: int) -> int:
        """The exit code: 128 and the signal's number where one ended the command."""
        return 128 + signal.SIGTERM if self.terminated and code == INTERRUPTED else code

    def _terminate(self, number: int, frame: FrameType | None) -> NoReturn:
        self.terminated = True
        raise KeyboardInterrupt


def interrupt_lies_behind(error: BaseException) -> bool:
    """Whether a Ctrl-C does: what it meets inside a library may make another error of it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, KeyboardInterrupt):
        found = found.__cause__ or found.__context__
    return found is not None


@contextmanager
def sigterm_as_interrupt() -> Iterator[Ending]:
    """Within the block a SIGTERM raises KeyboardInterrupt."""
    ending = Ending()
    before = signal.signal(signal.SIGTERM, ending._terminate)
    try:
        yield ending
    finally:
        signal.signal(signal.SIGTERM, before)


_GONE = 128 + 13
"""The exit code of a command that SIGPIPE ended: a shell expects it of whoever writes to a pipe that is closed."""


def prepare_streams() -> None:
    """What an encoding lacks is escaped instead of ending the command; a stream that is closed takes everything."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (until the process ends)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def ended(run: Callable[[], int]) -> int:
    """The exit code of what is run, its output written out; 141 where nobody read it to its end."""
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        _forget()
        return _GONE
    except SystemExit as end:  # which Typer makes of a pipe that breaks inside a command
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _forget()
        return _GONE
    except OSError as error:
        _forget()
        with suppress(OSError):
            console.note(f"error: expected to write to standard output, got '{error.strerror}'; choose another place")
        return 2
    return code


def _forget() -> None:
    """Whatever is left in stdout's buffer goes nowhere: Python would try once more to write it."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())


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
    prepare_streams()
    _quiet_libraries()
    console.show_log()
    asked = Asked()
    with sigterm_as_interrupt() as ending:
        sys.exit(ended(lambda: _ran(asked, ending)))


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
        if interrupt_lies_behind(error) and error.exit_code != INTERRUPTED:
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
    from perturbkv.selection import grid

    name = option.lstrip("-").replace("-", "_")
    if name not in grid.known_options():
        return ""
    return f"it belongs to {' or '.join(grid.option_owners(name)[:3])}: write {grid.written_option(name)}"


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

"""The `perturbkv` command: errors as one line with an exit code, Ctrl-C and SIGTERM, any kind of standard output."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

import perturbkv
from perturbkv.cli import console
from perturbkv.cli.command_line import group_class
from perturbkv.cli.commands import COMMANDS
from perturbkv.errors import MOST_CHARACTERS, InterruptedRunError, MissingPackageError, PerturbkvError
from perturbkv.memory import translate_allocation_errors

INTERRUPTED = InterruptedRunError.exit_code
_INTERRUPTED_MESSAGE = "interrupted; no unfinished file was written"
"""The message of a Ctrl-C outside a run, which has a message of its own."""


@dataclass
class SigtermRecord:
    """A record of whether SIGTERM interrupted the command, which then exits with 143 instead of 130."""

    terminated: bool = False

    def exit_code(self, code: int) -> int:
        """Return `code`, or 143 if `code` is 130 and SIGTERM caused the interrupt."""
        return 128 + signal.SIGTERM if self.terminated and code == INTERRUPTED else code

    def _terminate(self, number: int, frame: FrameType | None) -> NoReturn:
        """Handle SIGTERM: record it and raise KeyboardInterrupt."""
        self.terminated = True
        raise KeyboardInterrupt


def is_caused_by_interrupt(error: BaseException) -> bool:
    """Return whether an error was caused by a KeyboardInterrupt, which libraries may convert to other errors."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


_AGAIN_S = 0.1
"""Seconds until an interrupt that was swallowed comes again, when Python has left the finaliser."""


@contextmanager
def sigterm_as_interrupt() -> Iterator[SigtermRecord]:
    """Turn a SIGTERM within the block into a KeyboardInterrupt, which no finaliser swallows; yield the record of it."""
    sigterm, previous_hook = SigtermRecord(), sys.unraisablehook
    timers: list[threading.Timer] = []

    def interrupt_again(lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):  # it came while a library's __del__ ran
            number = signal.SIGTERM if sigterm.terminated else signal.SIGINT  # which a shell's background job ignores
            timers.append(threading.Timer(_AGAIN_S, _thread.interrupt_main, [number]))
            timers[-1].start()
        else:
            previous_hook(lost)

    previous, sys.unraisablehook = signal.signal(signal.SIGTERM, sigterm._terminate), interrupt_again
    try:
        yield sigterm
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGTERM, previous)
        sys.unraisablehook = previous_hook


_BROKEN_PIPE = 128 + 13
"""The exit code that a shell expects of a command which wrote to a closed pipe, as SIGPIPE would give it."""


def prepare_streams() -> None:
    """Make stdout and stderr escape characters that they cannot encode; a closed stream becomes the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (until the process ends)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def run_to_exit_code(run: Callable[[], int]) -> int:
    """Return the exit code of `run` after flushing stdout; 141 where its reader closed the pipe, 2 for other errors."""
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return _BROKEN_PIPE
    except SystemExit as exited:  # which Typer makes of a pipe that breaks inside a command
        if not isinstance(exited.__context__, BrokenPipeError):
            raise
        _drop_output()
        return _BROKEN_PIPE
    except OSError as error:
        _drop_output()
        with suppress(OSError):
            console.note(f"error: expected to write to standard output, got '{error.strerror}'; choose another place")
        return 2
    return code


def _drop_output() -> None:
    """Redirect stdout to the null device, so that Python's flush at exit does not fail."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app: typer.Typer = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=group_class(COMMANDS),
)
_UsageError: Any = typer.BadParameter.__base__
"""The error for a command line that cannot be parsed: Click's own, or that of the Click inside newer Typers."""
_TASKS = {
    "See what eviction does to each attention head": "perturbkv heads --policy snapkv --budget 128",
    "Find a budget that is safe for a model": "perturbkv budget --max-kl 0.1",
    "Compare the answers of several policies": "perturbkv quality --dataset needle --length 1000",
    "Measure now, analyse later": "perturbkv trace --dataset needle -o runs/mine",
    "Look at a finished trace in a browser": "perturbkv report runs/mine/trace.h5",
    "Check an eviction of your own": "perturbkv audit my_cache.py:evict",
}
"""Tasks in plain words -> a command to begin with."""


def _show_version(requested: bool) -> None:
    """Print the version and exit where --version was typed."""
    if requested:
        console.say(f"perturbkv {perturbkv.__version__}")
        raise typer.Exit


@app.callback()
def _start(
    ctx: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave")
    ] = False,
) -> None:
    """Measure what KV-cache eviction does to attention outputs, per head and per layer."""
    if ctx.invoked_subcommand is not None:
        return
    console.say("Run a model with its full cache and with evicted ones, and see what was lost.")
    for task, command in _TASKS.items():
        console.say("")
        console.say(task, bold=True)
        console.say(f"  {command}")
    console.say("")
    console.say("Without options a small model and prompts of its own are measured.")
    console.say("All commands: perturbkv -h. One: perturbkv heads -h. How long: add --dry-run.")


def main() -> None:
    """Run the command line and exit; errors are one line on stderr, with --json also a document on stdout.

    Other libraries give no warnings, and no progress bars where stderr is no terminal.
    """
    prepare_streams()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # transformers imports them where they are installed
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    console.show_log()
    with sigterm_as_interrupt() as sigterm:
        sys.exit(run_to_exit_code(lambda: _run(sigterm)))


def _run(sigterm: SigtermRecord) -> int:
    """Run the command line, print its error if any, and return the exit code."""
    try:
        with translate_allocation_errors():
            code = int(app(prog_name="perturbkv", standalone_mode=False) or 0)
        if code == INTERRUPTED:  # Typer makes it of a Ctrl-C outside a run
            raise KeyboardInterrupt
        return code
    except _UsageError as error:
        from perturbkv.cli.option_refusals import usage_message

        return _print_error(error, usage_message(error.format_message(), error), error.exit_code)
    except KeyboardInterrupt as error:
        return _print_error(error, _INTERRUPTED_MESSAGE, sigterm.exit_code(INTERRUPTED))
    except PerturbkvError as error:
        if is_caused_by_interrupt(error) and error.exit_code != INTERRUPTED:
            return _print_error(KeyboardInterrupt(), _INTERRUPTED_MESSAGE, sigterm.exit_code(INTERRUPTED))
        return _print_error(error, " ".join(str(error).split()), sigterm.exit_code(error.exit_code))
    except ModuleNotFoundError as error:
        missing = MissingPackageError.from_error(error)
        return _print_error(missing, str(missing), missing.exit_code)
    except BrokenPipeError:
        raise  # nobody reads the output any more
    except OSError as error:
        return _print_error(error, _file_message(error), 2)


def _print_error(error: BaseException, message: str, code: int) -> int:
    """Print an error on stderr, with --json as JSON on stdout too; return its exit code."""
    short = message
    if len(message) > MOST_CHARACTERS:
        short = f"{message[: MOST_CHARACTERS // 2]} … {message[-MOST_CHARACTERS // 2 :]}"
    console.note(f"error: {short}")
    if "--json" in sys.argv:
        console.print_json({"error": {"type": type(error).__name__, "message": message, "exit_code": code}})
    return code


def _file_message(error: OSError) -> str:
    """Return the message of a file-system error in one line."""
    if error.filename is None:
        return f"expected to read or write, got '{error.strerror or error}'; make room, or choose another place"
    return f"expected to read or write {error.filename}, got '{error.strerror}'; choose another place"

"""The entry point of the command: a Ctrl-C during the imports ends it with one line."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from perturbkv.errors import MissingPackageError

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run `cli.main.main`, with a handler for Ctrl-C during its import; a missing package is one line, exit code 2."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:  # it is ignored in a command that a shell runs in the background
        signal.signal(signal.SIGINT, _exit_interrupted)
    try:
        from perturbkv.cli.main import main as run_command_line
    except ModuleNotFoundError as error:
        missing = MissingPackageError.from_error(error)
        sys.stderr.write(f"error: {missing}\n")
        sys.exit(missing.exit_code)
    signal.signal(signal.SIGINT, previous)
    run_command_line()


def _exit_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Handle Ctrl-C: print one line and exit at once."""
    sys.stderr.write("error: interrupted; nothing was begun\n")
    sys.stderr.flush()
    os._exit(_INTERRUPTED)

"""Standard output as it may be: in any encoding, closed, full, or read by somebody who leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from perturbkv.cli import console

_GONE = 128 + 13
"""The exit code of a command that SIGPIPE ended: a shell expects it of whoever writes to a pipe that is closed."""


def prepare() -> None:
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

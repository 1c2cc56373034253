"""The command's first moment: a Ctrl-C while the rest is imported is a line too."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line, `cli.main`."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # and not ignored, as of a command in a shell's background
        signal.signal(signal.SIGINT, _leave)
    from perturbkv.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.stderr.write("error: interrupted; nothing was begun\n")
    sys.stderr.flush()
    os._exit(_INTERRUPTED)

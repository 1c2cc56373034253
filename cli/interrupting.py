"""Ctrl-C and SIGTERM: the same end of a command, told apart by its exit code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from perturbkv.errors import InterruptedRunError

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


def lies_behind(error: BaseException) -> bool:
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

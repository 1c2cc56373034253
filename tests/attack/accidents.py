"""What a process of a test does to itself: it ends as if killed, at one of the changes that it makes on disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


def killed_at_change(folder: Path, change: int) -> None:
    """From now on this process is killed just before it makes its change number `change` under the folder."""
    _on_change(folder, lambda made: os.kill(os.getpid(), signal.SIGKILL) if made == change else None)


def counting_changes(folder: Path, told: Path) -> None:
    """From now on this process notes in a file how many changes it made under the folder."""
    _on_change(folder, lambda made: told.write_text(str(made + 1)))


def _on_change(folder: Path, act: Callable[[int], object]) -> None:
    made = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal made
        if _changes(event, arguments, str(folder)):
            made, this = made + 1, made
            act(this)

    sys.addaudithook(hook)


def _changes(event: str, arguments: tuple[Any, ...], folder: str) -> bool:
    """Whether something under the folder is made, renamed or removed; `rmtree` names entries of an open folder."""
    if event == "open":
        return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and str(arguments[0]).startswith(folder)
    of_rmtree = event in ("os.remove", "os.rmdir") and arguments[1] >= 0
    return event in _CHANGES and (of_rmtree or str(arguments[0]).startswith(folder))

"""Files that are there complete or not at all, whenever the process is killed."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_TEMPORARY = ".tmp-"


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file through `write`, as `written_whole` does."""
    with written_whole(path) as beside, beside.open("wb") as stream:
        write(stream)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A new file beside `path`, which takes its place when the block has filled it without an error.

    It and its folders are made at once, so that a place that cannot be written is known before any work is done; an
    error removes them again.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}{_TEMPORARY}{os.getpid()}")
    try:
        beside.touch()
        yield beside
        with beside.open("rb+") as stream:
            os.fsync(stream.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # another process may have put something there
                folder.rmdir()
        raise
    _keep_rename(path.parent)


def clear_leftovers(path: Path) -> None:
    """Remove what killed processes left half written of `path`."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}{_TEMPORARY}*"):
        leftover.unlink(missing_ok=True)


def _keep_rename(folder: Path) -> None:
    """Bring a rename to the disk, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

"""Files that are complete or absent, even where the process is killed while it writes them."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from perturbkv.storage.output import TEMPORARY, check_kind, make_folders, real, refusals, remove_empty


def write_whole(path: Path, write: Callable[[IO[bytes]], object], folders: bool = True) -> None:
    """Write a file through `write`, as `written_whole` does."""
    with written_whole(path, folders) as beside, beside.open("wb") as stream:
        write(stream)


@contextmanager
def written_whole(path: Path, folders: bool = True) -> Iterator[Path]:
    """Yield the path of a new file beside `path`, and rename it to `path` when the block ends without an error.

    The new file and its folders are made at once, so that a path that cannot be written is known before any work is
    done; an error removes them again. Without `folders` no folder is made: one that vanished, as a network share may,
    is not replaced by another of the same name. Through a link the file that it points to is written. Raises
    OutputError for what the system refuses.
    """
    where = real(path)
    with refusals(path):
        check_kind(path)
        made = make_folders(where.parent) if folders else []
    beside = where.with_name(f"{where.name}{TEMPORARY}{os.getpid()}")
    try:
        with refusals(path):
            beside.touch()
            yield beside
            with beside.open("rb+") as stream:
                os.fsync(stream.fileno())
            beside.replace(where)
    except BaseException:
        with suppress(OSError):  # such as of a name that is too long
            beside.unlink()
        remove_empty(made)
        raise
    with refusals(path):
        _keep_rename(where.parent)


def clear_leftovers(path: Path) -> None:
    """Remove the temporary files that killed processes left beside `path`."""
    where = real(path)
    for dot in ("", "."):
        for leftover in where.parent.glob(f"{dot}{glob.escape(where.name)}{TEMPORARY}*"):
            leftover.unlink(missing_ok=True)


def _keep_rename(folder: Path) -> None:
    """Flush a folder to the disk, so that a rename in it survives a power failure."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

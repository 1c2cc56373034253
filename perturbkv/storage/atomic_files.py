"""Atomic writing: a file is complete or absent, even where the process is killed while it writes."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from perturbkv.storage.output import (
    TEMPORARY,
    check_file_path,
    make_folders,
    real_path,
    remove_empty,
    translate_os_errors,
)


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], folders: bool = True) -> None:
    """Write a file atomically: `write` gets the open temporary file. Folders and errors as in `atomic_path`."""
    with atomic_path(path, folders) as temporary, temporary.open("wb") as stream:
        write(stream)


@contextmanager
def atomic_path(path: Path, folders: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file beside `path`, which replaces `path` when the block ends without an error.

    The temporary file and its folders are made at once, so that a path that cannot be written fails before any work is
    done; an error removes them again. Without `folders` no folder is made: one that vanished, as a network share may,
    is not replaced by another of the same name. Through a link the file that it points to is written. Raises
    OutputError where the path cannot be written.
    """
    target = real_path(path)
    with translate_os_errors(path):
        check_file_path(path)
        new_folders = make_folders(target.parent) if folders else []
    temporary = target.with_name(f"{target.name}{TEMPORARY}{os.getpid()}")
    try:
        with translate_os_errors(path):
            temporary.touch()
            yield temporary
            with temporary.open("rb+") as stream:
                os.fsync(stream.fileno())
            temporary.replace(target)
    except BaseException:
        with suppress(OSError):  # such as for a name that is too long
            temporary.unlink()
        remove_empty(new_folders)
        raise
    with translate_os_errors(path):
        _flush_folder(target.parent)


def clear_leftovers(path: Path) -> None:
    """Remove the temporary files that killed processes left beside `path`."""
    target = real_path(path)
    for dot in ("", "."):  # with a dot: the probes of `check_writable`
        for leftover in target.parent.glob(f"{dot}{glob.escape(target.name)}{TEMPORARY}*"):
            leftover.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Where a result may be written: known before any work is done, and what the system refuses told in one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from perturbkv.errors import OutputError

TEMPORARY = ".tmp-"
_LONGEST_BESIDE = 64
"""Characters that the longest path beside an output, that of a journal's entry, has more than the output's own."""
_TRIES = 20
_Made = TypeVar("_Made")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_THE_DISK = (*_FULL, errno.EIO, errno.EROFS)


def real(path: Path) -> Path:
    """Where a file is written: the end of the path's links, so that two names of one place are one."""
    return Path(os.path.realpath(path))


def check_place(path: Path) -> None:
    """Raise OutputError where no file can be written at `path`; nothing is left of the attempt."""
    where = real(path)
    try:
        str(where).encode()
    except UnicodeEncodeError:
        msg = f"expected a path in UTF-8, which results can name, got {os.fsencode(where)!r}; choose another place"
        raise OutputError(msg) from None
    with refusals(path):
        check_kind(path)
        despite_others(lambda: _probe(path, where))


def _probe(path: Path, where: Path) -> None:
    made = make_folders(where.parent)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):  # the kernel looks at the length first
            os.lstat(where / ("x" * _LONGEST_BESIDE))
        probe = where.with_name(f".{where.name}{TEMPORARY}{os.getpid():010}")
        probe.touch()
        probe.unlink()
        path.parent.stat()  # through a folder that is not there and back, only `real` finds the way
    finally:
        remove_empty(made)


def despite_others(work: Callable[[], _Made]) -> _Made:
    """What `work` gives, done again where a folder was missing: processes that begin together remove theirs."""
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            return work()
    return work()


def check_kind(path: Path) -> None:
    """Raise OutputError where something lies at `path` that no file can replace."""
    where = real(path)
    if where.is_dir():
        msg = f"expected a file's path, got the folder {path}; name a file in it"
        raise OutputError(msg)
    if where.is_symlink() or (where.exists() and not where.is_file()):
        msg = f"expected a file's path, got {path}, which is a device, a pipe or a loop of links; choose another place"
        raise OutputError(msg)


def make_folders(folder: Path) -> list[Path]:
    """Make a folder with its parents; returns those that were not there, the innermost first."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        remove_empty(missing)
        raise
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of the folders, the innermost first, that are empty."""
    for folder in folders:
        with suppress(OSError):  # another process may have put something there
            folder.rmdir()


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """What the system refuses while `path` is written, or something beside it, is an OutputError that says what to do.

    Errors about files elsewhere stay what they are.
    """
    try:
        yield
    except OSError as error:
        if not _is_about(error, real(path)):
            raise
        reason = error.strerror or error
        if error.errno in _FULL:
            msg = f"expected room for {path}, got '{reason}'; make some, or choose another place"
        else:
            msg = f"expected a place for {path}, got '{reason}'; choose another place"
        raise OutputError(msg) from error


def _is_about(error: OSError, where: Path) -> bool:
    if error.filename is None:
        return error.errno in _OF_THE_DISK
    named = Path(os.path.abspath(os.fsdecode(error.filename)))
    return where.parent in (named, *named.parents) or named in where.parents

"""Output paths: checks before any work is done, locks so that one process writes at a time, and claims of folders.

A lock is a file beside the output, locked by `filelock` as long as its process lives: what a killed process leaves
holds nobody. Where a file system has no flock(2), the lock is filelock's soft one, the file itself: what a machine
that died left there is removed by hand, and the error names it.

A command calls `OutputFolder.claim` before it works, which checks that every file may be written and that no other
process writes them now.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from perturbkv.errors import ConfigError, LockedOutputError, OutputError

TEMPORARY = ".tmp-"
_LONGEST_BESIDE = 64
"""Characters by which the longest path beside an output, a journal's entry, is longer than the output's own."""
_TRIES = 20
"""Most calls of work whose folder other processes keep removing."""
_Result = TypeVar("_Result")
_FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of flock(2) on file systems without it, beside ENOSYS, which filelock knows."""
_DISK_ERRORS = (*_FULL_DISK_ERRORS, errno.EIO, errno.EROFS, errno.ESTALE, *_NO_FLOCK)


def real_path(path: Path) -> Path:
    """Return the path with symbolic links resolved, equal for all names of a file."""
    return Path(os.path.realpath(path))


def check_writable(path: Path) -> None:
    """Raise OutputError if no file can be written at `path`; the check leaves nothing behind."""
    target = real_path(path)
    try:
        str(target).encode()
    except UnicodeEncodeError:
        raise OutputError(
            f"expected a path in UTF-8, which results can name, got {os.fsencode(target)!r}; choose another place"
        ) from None
    with translate_os_errors(path):
        check_file_path(path)
        retry_missing_folder(lambda: _write_probe(path, target))


def _write_probe(path: Path, target: Path) -> None:
    """Create and remove a file, and the folders it needs, beside `target`, the real path of `path`. Raises OSError."""
    new_folders = make_folders(target.parent)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):  # the kernel checks the path's length first
            os.lstat(target / ("x" * _LONGEST_BESIDE))
        probe = target.with_name(f".{target.name}{TEMPORARY}{os.getpid():010}")
        probe.touch()
        probe.unlink()
        path.parent.stat()  # fails for missing/../folder, whose real path exists
    finally:
        remove_empty(new_folders)


def retry_missing_folder(work: Callable[[], _Result]) -> _Result:
    """Return the result of `work`, called again if a folder vanished because a concurrent process removed it."""
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            return work()
    return work()


def check_file_path(path: Path) -> None:
    """Raise OutputError if `path` is a folder, device or pipe, where no file can be written or replaced."""
    target = real_path(path)
    if target.is_dir():
        raise OutputError(f"expected a file's path, got the folder {path}; name a file in it")
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise OutputError(
            f"expected a file's path, got {path}, which is a device, a pipe or a loop of links; choose another place"
        )


def make_folders(folder: Path) -> list[Path]:
    """Create a folder with its parents; return the newly created folders, innermost first."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        remove_empty(missing)
        raise
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove every empty folder in `folders`, which lists the innermost first."""
    for folder in folders:
        with suppress(OSError):  # another process may have put something there
            folder.rmdir()


@contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about `path`, or about a file beside it, into an OutputError with advice.

    Errors about files elsewhere pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if not _concerns(error, real_path(path)):
            raise
        reason = error.strerror or error
        if error.errno in _FULL_DISK_ERRORS:
            msg = f"expected room for {path}, got '{reason}'; make some, or choose another place"
        else:
            msg = f"expected a place for {path}, got '{reason}'; choose another place"
        raise OutputError(msg) from error


def _concerns(error: OSError, path: Path) -> bool:
    """Return whether an OSError is about a file in the folder of `path`, below it, or about a parent folder.

    An error that names no file is about `path` where it is one of the disk, such as a full one.
    """
    if error.filename is None:
        return error.errno in _DISK_ERRORS
    file = Path(os.path.abspath(os.fsdecode(error.filename)))
    return path.parent in (file, *file.parents) or file in path.parents


_POLL_S, _GRACE_S = 0.5, 0.2
"""Seconds between two looks at a lock that is waited for, and until a held one is refused."""
WAIT, WAIT_ALONE = "wait with --wait", "wait until it is done"
"""Advices to wait for another process: for a command that can, and for one that cannot."""
_log = logging.getLogger(__name__)


class Lock:
    """A lock on an output: within the `with` block only this process may write it.

    Args:
        path: the output, or anything else that one process at a time may write.
        wait: whether to wait for another process that holds it instead of raising.
        advice: what to do, for the error message.

    Raises LockedOutputError where another process holds it and `wait` is False, OutputError where it cannot be written.
    """

    def __init__(self, path: Path, wait: bool = False, advice: str = WAIT) -> None:
        self.path = path
        self.wait = wait
        self.advice = advice
        self._lock: BaseFileLock = FileLock(lock_path(path))
        self._new_folders = list[Path]()

    def __enter__(self) -> Self:
        try:
            with translate_os_errors(self.path):
                self._wait_or_refuse()
        except BaseException:  # a Ctrl-C too, which a notebook's process survives
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _wait_or_refuse(self) -> None:
        """Acquire the lock. Raises LockedOutputError where another process holds it and this one does not wait."""
        try:
            retry_missing_folder(lambda: self._acquire(_GRACE_S, _GRACE_S / 4))
        except Timeout:
            if not self.wait:
                raise LockedOutputError(
                    f"expected {self.path} for this command alone, got it locked by another process "
                    f"({Path(self._lock.lock_file).name} beside it); {self.advice}, or choose another place"
                ) from None
            _log.info("waiting for the process that writes %s and holds %s", self.path, self._lock.lock_file)
            retry_missing_folder(lambda: self._acquire(-1, _POLL_S))

    def _acquire(self, timeout: float, poll_s: float) -> None:
        """Acquire the lock within `timeout` seconds, −1 for any time, with a try every `poll_s` seconds.

        Where the file system has no flock(2), the lock is a soft one. Raises Timeout, and OSError for the file.
        """
        self._new_folders += make_folders(lock_path(self.path).parent)
        try:
            self._lock.acquire(timeout, poll_s)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            self._lock = SoftFileLock(f"{lock_path(self.path)}.held")
            self._lock.acquire(timeout, poll_s)

    def _release(self) -> None:
        """Release the lock, and remove its file and the empty folders that were made for it."""
        if self._lock.is_locked:
            try:
                with suppress(OSError):
                    lock_path(self.path).unlink()  # while it is held: a waiting process looks for a new file
            finally:
                self._lock.release()
        remove_empty(self._new_folders)


def lock_path(path: Path) -> Path:
    """Return the path of the lock file of an output, beside it."""
    target = real_path(path)
    return target.with_name(f".{target.name}.lock")


def check_free(path: Path, wait: bool = False, advice: str = WAIT) -> None:
    """Raise LockedOutputError while another process holds the lock of `path`; with `wait`, wait until none does.

    Removes a lock file that a killed process left.
    """
    if lock_path(path).exists():
        with Lock(path, wait, advice):
            pass


@dataclass(frozen=True)
class OutputFile:
    """A file that a command is going to write.

    Attributes:
        path: the file.
        kind: description of the files of ours that it may replace; empty where it may replace none.
        is_ours: function that returns whether the file at a path is of that kind; it may raise a ConfigError.
    """

    path: Path
    kind: str = ""
    is_ours: Callable[[Path], bool] = lambda path: False

    def check_replaceable(self) -> None:
        """Raise ConfigError if a file of another kind exists at the path."""
        if self.path.exists() and not self.is_ours(self.path):
            expected, got = (self.kind, "another file") if self.kind else ("no file", "one")
            raise ConfigError(f"expected {expected} at {self.path}, got {got}; --overwrite replaces it")


def resumable_file(path: Path) -> OutputFile:
    """Return an output file that may exist already, as the run itself resumes or refuses it."""
    return OutputFile(path, is_ours=lambda path: True)


class OutputFolder:
    """A folder for a command's results.

    Args:
        path: the folder, which need not exist.
        overwrite: whether files of any kind may be replaced.
        wait: whether to wait for another process that writes there; None where the command cannot.
    """

    def __init__(self, path: Path, overwrite: bool = False, wait: bool | None = None) -> None:
        self.path = path
        self.overwrite = overwrite
        self.wait = wait

    def claim(self, *files: OutputFile, writer: Path | None = None) -> Claim:
        """Return a claim on `files` after checking that they can be written; its `with` block locks `writer`.

        `writer` stands for all of the files: one process at a time writes it. Raises OutputError where a file cannot
        be written or another process writes `writer`, ConfigError for a file that may not be replaced. The checks
        leave nothing behind.
        """
        return Claim(self, files, writer)


class Claim:
    """The right to write some files of a folder, checked when it is made and again when its `with` block begins.

    Raises as `OutputFolder.claim`.
    """

    def __init__(self, folder: OutputFolder, files: Iterable[OutputFile], writer: Path | None) -> None:
        self.folder = folder
        self.files: tuple[OutputFile, ...] = tuple(files)
        self.writer = writer
        self._advice = WAIT_ALONE if folder.wait is None else WAIT
        self._held = ExitStack()
        if self.writer is not None:
            check_writable(self.writer)
            if not folder.wait:
                check_free(self.writer, advice=self._advice)
        self._check_files()

    def _check_files(self) -> None:
        """Raise OutputError for a file that cannot be written, ConfigError for one that may not be replaced."""
        for file in self.files:
            check_writable(file.path)
            if not self.folder.overwrite:
                file.check_replaceable()

    def __enter__(self) -> Self:
        """Lock the writer. Raises ValueError for a claim without one."""
        if self.writer is None:
            raise ValueError("expected a claim with a writer")
        with ExitStack() as stack:
            stack.enter_context(Lock(self.writer, bool(self.folder.wait), self._advice))
            self._check_files()
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

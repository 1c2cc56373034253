"""Output paths: checks before any work is done, locks so that one process writes at a time, and claims of folders.

A lock is a file beside the output that names the process that holds it. It is read and written under flock(2), so that
one of any number of processes gets it; the holder touches it as a heartbeat. A lock whose holder is dead is taken over:
a process of this machine is looked up, one of another machine counts as dead after `SILENCE_S` without a heartbeat.

A command calls `OutputFolder.claim` before it works, which checks that every file may be written and that no other
process writes them now.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import platform
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import psutil

from perturbkv.errors import ConfigError, LockedOutputError, OutputError

TEMPORARY = ".tmp-"
_LONGEST_BESIDE = 64
"""Characters by which the longest path beside an output, a journal's entry, is longer than the output's own."""
_TRIES = 20
_Result = TypeVar("_Result")
_FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK_ERRORS = (*_FULL_DISK_ERRORS, errno.EIO, errno.EROFS, errno.ESTALE)


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
    """Create and remove a file, with its folders, beside `target`, the real path of `path`. Raises OSError."""
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
    """Return whether an OSError is about a file in the folder of `path`, or about a parent folder."""
    if error.filename is None:
        return error.errno in _DISK_ERRORS
    file = Path(os.path.abspath(os.fsdecode(error.filename)))
    return path.parent in (file, *file.parents) or file in path.parents


SILENCE_S = 300.0
"""Seconds without a heartbeat after which a holder on another machine counts as dead."""
_START_TOLERANCE = 2.0
"""Largest difference of two readings of one process's start."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host: the machine, its boot and its namespace of process ids: machines and containers of one name differ.
        pid, started: the process and its start, as process ids are reused.
        since: when it took the lock.
        token: distinguishes two locks of one process.
    """

    host: str
    pid: int
    started: float
    since: str
    token: str

    @classmethod
    def current(cls) -> Self:
        """Return this process as the holder of a lock taken now."""
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(_host_id(), os.getpid(), _process_start(os.getpid()), since, uuid.uuid4().hex)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the holder in the text of a lock; None for an empty text, left by a killed process.

        Raises ValueError for any other text.
        """
        if not text.strip("\0 \n"):
            return None
        try:
            fields = json.loads(text)
            return cls(
                str(fields["host"]), int(fields["pid"]), float(fields["started"]), fields["since"], fields["token"]
            )
        except (KeyError, TypeError) as error:
            raise ValueError(text) from error

    def is_gone(self, silence_s: float) -> bool:
        """Return whether the process is dead or, on another machine, silent for more than `silence_s` seconds."""
        if self.host != _host_id():
            return silence_s > SILENCE_S
        try:
            is_same = abs(_process_start(self.pid) - self.started) < _START_TOLERANCE
            return not is_same or psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        elsewhere = f" (another machine: taken over after {SILENCE_S:.0f} s without a sign of it)"
        return (
            f"process {self.pid} on {self.host.split()[0]}, since {self.since}{elsewhere * (self.host != _host_id())}"
        )


def _process_start(pid: int) -> float:
    """Return the start time of a process: on Linux in ticks since boot, independent of the clock."""
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return float(psutil.Process(pid).create_time())


def _host_id() -> str:
    """Return an identifier of the machine: its name, on Linux with boot id and process-id namespace."""
    try:
        return f"{platform.node() or '?'} {os.readlink('/proc/self/ns/pid')} {_BOOT.read_text().strip()}"
    except OSError:
        return platform.node() or "?"


HEARTBEAT_S = 30.0
_POLL_S = 0.5
WAIT, WAIT_ALONE = "wait with --wait", "wait until it is done"
_log = logging.getLogger(__name__)


class Lock:
    """A lock on an output: within the `with` block only this process may write it.

    Args:
        path: the output, or anything else that one process at a time may write.
        wait: whether to wait for the holder instead of raising.
        advice: what to do, for the error message.

    Raises OutputError where another process holds it and `wait` is False, and where the lock cannot be written.
    """

    def __init__(self, path: Path, wait: bool = False, advice: str = WAIT) -> None:
        self.path = path
        self.wait = wait
        self.advice = advice
        self._file, self._new_folders = lock_path(path), list[Path]()
        self._holder, self._released = Holder.current(), threading.Event()

    def __enter__(self) -> Self:
        with translate_os_errors(self.path):
            try:
                self._acquire()
            except BaseException:  # a Ctrl-C too, which a notebook's process survives
                self._release()
                raise
        threading.Thread(target=self._send_heartbeats, name=f"lock {self.path.name}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._release()

    def check(self) -> None:
        """Raise OutputError if another process took over the lock, for instance while this machine slept.

        A lock that vanished is made again. A folder that existed before the lock and vanished, as a network share may,
        is not: files written into another folder of its name would be lost when it comes back.
        """
        with translate_os_errors(self.path):
            if _read_holder(self._file) == self._holder:
                return
            self._check_folder()
            other = retry_missing_folder(self._try_to_take)
        if other is not None:
            raise LockedOutputError(_locked_message(self.path, other, self.advice))

    def _check_folder(self) -> None:
        """Raise OutputError if the innermost folder not made by the lock has vanished."""
        new = self._new_folders
        folder = min(new, key=lambda path: len(path.parts)).parent if new else self._file.parent
        if not folder.is_dir():
            raise OutputError(
                f"expected the folder {folder} to stay while {self.path} is written, got none; bring it back"
            )

    def _acquire(self) -> None:
        """Take the lock, if `wait` after its holder releases it. Raises LockedOutputError if held and not `wait`."""
        logged = False
        while (other := retry_missing_folder(self._try_to_take)) is not None:
            if not self.wait:
                raise LockedOutputError(_locked_message(self.path, other, self.advice))
            if not logged:
                _log.info("waiting for %s, which writes %s", other, self.path)
                logged = True
            time.sleep(_POLL_S)

    def _try_to_take(self) -> Holder | None:
        """Take the lock and return None, or return its current holder."""
        self._new_folders += make_folders(self._file.parent)
        with _open_exclusively(self._file) as descriptor:
            other = _parse_holder(descriptor, self._file)
            if other is not None and other != self._holder and not other.is_gone(_seconds_since_heartbeat(self._file)):
                return other
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(self._holder)).encode(), 0)
            except OSError:
                self._file.unlink()
                raise
        return None

    def _release(self) -> None:
        """Remove the lock if this process holds it, and the empty folders that were made for it."""
        with suppress(OSError, OutputError), _open_exclusively(self._file) as descriptor:
            if _parse_holder(descriptor, self._file) in (None, self._holder):
                self._file.unlink()
        remove_empty(self._new_folders)

    def _send_heartbeats(self) -> None:
        """Touch the lock's file at regular intervals until release, as a sign of life."""
        while not self._released.wait(HEARTBEAT_S):
            with suppress(OSError, OutputError):
                if _read_holder(self._file) == self._holder:
                    os.utime(self._file)


def remove_stale_lock(path: Path) -> None:
    """Remove the lock of `path` if its holder is dead."""
    file = lock_path(path)
    if file.exists():
        with suppress(OSError, OutputError), _open_exclusively(file) as descriptor:
            holder = _parse_holder(descriptor, file)
            if holder is None or holder.is_gone(_seconds_since_heartbeat(file)):
                file.unlink()


def lock_path(path: Path) -> Path:
    """Return the path of the lock file of an output, beside it."""
    target = real_path(path)
    return target.with_name(f".{target.name}.lock")


def check_free(path: Path, advice: str = WAIT) -> None:
    """Raise LockedOutputError if a living process holds the lock of `path`; the lock is not taken."""
    file = lock_path(path)
    with translate_os_errors(path):
        holder = _read_holder(file)
        if holder is not None and not holder.is_gone(_seconds_since_heartbeat(file)):
            raise LockedOutputError(_locked_message(path, holder, advice))


def wait_until_free(path: Path, wait: bool) -> None:
    """Wait until no living process locks `path`, or raise LockedOutputError unless `wait`; the lock is not taken."""
    logged = False
    while True:
        try:
            return check_free(path)
        except LockedOutputError as error:
            if not wait:
                raise
            if not logged:
                _log.info("waiting: %s", error)
                logged = True
            time.sleep(_POLL_S)


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


def resumable(path: Path) -> OutputFile:
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
        self._lock: Lock | None = None
        if self.writer is not None:
            check_writable(self.writer)
            if not folder.wait:
                check_free(self.writer, self._advice)
        self._check_files()

    def _check_files(self) -> None:
        """Raise OutputError for a file that cannot be written, ConfigError for one that may not be replaced."""
        for file in self.files:
            check_writable(file.path)
            if not self.folder.overwrite:
                file.check_replaceable()

    def __enter__(self) -> Lock:
        """Take the lock and return it. Raises ValueError for a claim without a writer."""
        if self.writer is None:
            raise ValueError("expected a claim with a writer")
        self._lock = Lock(self.writer, bool(self.folder.wait), self._advice)
        lock = self._lock.__enter__()
        try:
            self._check_files()
        except BaseException:
            lock.__exit__(None, None, None)
            raise
        return lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.__exit__(kind, error, trace)


def _locked_message(path: Path, holder: Holder, advice: str) -> str:
    """Return the error message for a path locked by another process."""
    return f"expected {path} for this command alone, got it held by {holder}; {advice}, or choose another place"


@contextmanager
def _open_exclusively(file: Path) -> Iterator[int]:
    """Open or create a file, and yield its descriptor, locked with flock if the file system supports it.

    Where it does not, as on some clusters, two processes may both take a stale lock: `Lock.check` raises in one of them
    at its next sample.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_same_file(descriptor, file):  # it was not removed while we waited
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_same_file(descriptor: int, file: Path) -> bool:
    """Return whether an open descriptor still refers to the file at the given path."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _read_holder(file: Path) -> Holder | None:
    """Return the holder in a lock file, read without locking the file; None without a file."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return _parse_holder(descriptor, file)
    finally:
        os.close(descriptor)


def _parse_holder(descriptor: int, file: Path) -> Holder | None:
    """Return the holder in an open lock file. Raises OutputError for a file that is no lock of this program."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        with suppress(ValueError):
            return Holder.parse(os.pread(descriptor, 2**16, 0).decode())
    raise OutputError(f"expected a lock of ours at {file}, got another file; move it away, or choose another place")


def _seconds_since_heartbeat(file: Path) -> float:
    """Return the seconds since a lock's last heartbeat, by the file system's own clock."""
    try:
        last = file.stat().st_mtime
    except FileNotFoundError:
        return math.inf
    try:
        with tempfile.TemporaryFile(dir=file.parent) as fresh:
            return os.fstat(fresh.fileno()).st_mtime - last
    except OSError:
        return time.time() - last

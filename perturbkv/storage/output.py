"""One writer per output: who writes is told to everybody else, and what a dead process held is taken over.

The lock is a file beside the output that says who holds it. It is read and written under flock(2), so that of any
number of processes one gets it; the holder touches it while it lives. A process of this machine is asked for directly.

Where a result may be written: known before any work is done, and what the system refuses told in one line.

Who writes an output: a process, told apart from all others, and whether it lives.

`OutputFolder.claim` is what a command asks before it works: may each of its files be written, and does no other
process write them now.
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

from perturbkv.errors import ConfigError, HeldError, OutputError

TEMPORARY = ".tmp-"
_LONGEST_BESIDE = 64
"""Characters that the longest path beside an output, that of a journal's entry, has more than the output's own."""
_TRIES = 20
_Made = TypeVar("_Made")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_THE_DISK = (*_FULL, errno.EIO, errno.EROFS, errno.ESTALE)


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


SILENCE_S = 300.0
"""After so long without a heartbeat a holder on another machine counts as dead."""
_SAME_START = 2.0
"""How far two readings of one process's start may lie apart."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Holder:
    """Who writes an output.

    Attributes:
        host: the machine since it was started, with its namespace of process ids: machines and containers of one name
            do not see each other's.
        pid, started: the process and when it started, as ids come again.
        since: when it began to write.
        token: tells two locks of one process apart.
    """

    host: str
    pid: int
    started: float
    since: str
    token: str

    @classmethod
    def here(cls) -> Self:
        """Of the process that asks, from now on."""
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(_host(), os.getpid(), _started(os.getpid()), since, uuid.uuid4().hex)

    @classmethod
    def read(cls, text: str) -> Self | None:
        """What a lock says; None where a process was killed before it said anything. Raises ValueError for others."""
        if not text.strip("\0 \n"):
            return None
        try:
            said = json.loads(text)
            return cls(str(said["host"]), int(said["pid"]), float(said["started"]), said["since"], said["token"])
        except (KeyError, TypeError) as error:
            raise ValueError(text) from error

    def is_gone(self, silence_s: float) -> bool:
        """Whether the process is dead, as this machine knows of its own, or the other's silence tells."""
        if self.host != _host():
            return silence_s > SILENCE_S
        try:
            is_same = abs(_started(self.pid) - self.started) < _SAME_START
            return not is_same or psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        elsewhere = f" (another machine: taken over after {SILENCE_S:.0f} s without a sign of it)"
        return f"process {self.pid} on {self.host.split()[0]}, since {self.since}{elsewhere * (self.host != _host())}"


def _started(pid: int) -> float:
    """When a process started: on Linux in ticks since the machine did, which setting its clock does not change."""
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return float(psutil.Process(pid).create_time())


def _host() -> str:
    """The machine, where Linux tells it with its start and the namespace of its process ids."""
    try:
        return f"{platform.node() or '?'} {os.readlink('/proc/self/ns/pid')} {_BOOT.read_text().strip()}"
    except OSError:
        return platform.node() or "?"


HEARTBEAT_S = 30.0
_POLL_S = 0.5
WAIT, WAIT_ALONE = "wait with --wait", "wait until it is done"
_log = logging.getLogger(__name__)


class Lock:
    """The right to write an output; within a `with` block it is this process's alone.

    Args:
        path: the output, or whatever else one process at a time may write.
        wait: whether to wait for a holder instead of leaving.
        advice: what the other can do, told where it leaves.

    Raises OutputError where another process holds it and `wait` is False, and where the place cannot be written.
    """

    def __init__(self, path: Path, wait: bool = False, advice: str = WAIT) -> None:
        self.path, self.wait, self.advice = path, wait, advice
        self._file, self._made = lock_path(path), list[Path]()
        self._holder, self._released = Holder.here(), threading.Event()

    def __enter__(self) -> Self:
        with refusals(self.path):
            try:
                self._acquire()
            except BaseException:  # a Ctrl-C too, which a notebook's process survives
                self._release()
                raise
        threading.Thread(target=self._beat, name=f"lock {self.path.name}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._release()

    def check(self) -> None:
        """Whether it is held still. One that vanished is made again; raises OutputError where another process has it.

        A machine that slept, or was cut off, finds its lock taken over. A folder that was there before the lock and
        vanished, as a share does, is not made again: what went into another of its name is lost when it comes back.
        """
        with refusals(self.path):
            if _peek(self._file) == self._holder:
                return
            self._check_there()
            held = despite_others(self._claim)
        if held is not None:
            raise HeldError(_taken(self.path, held, self.advice))

    def _check_there(self) -> None:
        """Raise OutputError where the innermost folder that the lock did not make is gone."""
        folder = min(self._made, key=lambda made: len(made.parts)).parent if self._made else self._file.parent
        if not folder.is_dir():
            msg = f"expected the folder {folder} to stay while {self.path} is written, got none; bring it back"
            raise OutputError(msg)

    def _acquire(self) -> None:
        told = False
        while (held := despite_others(self._claim)) is not None:
            if not self.wait:
                raise HeldError(_taken(self.path, held, self.advice))
            if not told:
                _log.info("waiting for %s, which writes %s", held, self.path)
                told = True
            time.sleep(_POLL_S)

    def _claim(self) -> Holder | None:
        """Who holds it; None where it is this process's now."""
        self._made += make_folders(self._file.parent)
        with _alone(self._file) as opened:
            held = _read(opened, self._file)
            if held is not None and held != self._holder and not held.is_gone(_silence(self._file)):
                return held
            try:
                os.ftruncate(opened, 0)
                os.pwrite(opened, json.dumps(asdict(self._holder)).encode(), 0)
            except OSError:
                self._file.unlink()
                raise
        return None

    def _release(self) -> None:
        """Remove the lock where it is this process's, and the folders that were made for it where they are empty."""
        with suppress(OSError, OutputError), _alone(self._file) as opened:
            if _read(opened, self._file) in (None, self._holder):
                self._file.unlink()
        remove_empty(self._made)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            with suppress(OSError, OutputError):
                if _peek(self._file) == self._holder:
                    os.utime(self._file)


def drop_dead(path: Path) -> None:
    """Remove the lock that a dead process left at `path`, where one did."""
    file = lock_path(path)
    if file.exists():
        with suppress(OSError, OutputError), _alone(file) as opened:
            held = _read(opened, file)
            if held is None or held.is_gone(_silence(file)):
                file.unlink()


def lock_path(path: Path) -> Path:
    """The lock's file, beside the output."""
    where = real(path)
    return where.with_name(f".{where.name}.lock")


def check_free(path: Path, wait: bool = False, advice: str = WAIT) -> None:
    """Raise OutputError where a living process writes `path` and nobody wants to wait for it; nothing is taken."""
    file = lock_path(path)
    with refusals(path):
        held = None if wait else _peek(file)
        if held is not None and not held.is_gone(_silence(file)):
            raise HeldError(_taken(path, held, advice))


def wait_until_free(path: Path, wait: bool) -> None:
    """Return when no living process writes `path`; nothing is taken. Without `wait` raise HeldError instead."""
    told = False
    while True:
        try:
            return check_free(path)
        except HeldError as error:
            if not wait:
                raise
            if not told:
                _log.info("waiting: %s", error)
                told = True
            time.sleep(_POLL_S)


@dataclass(frozen=True)
class OutputFile:
    """A file that a command is going to write.

    Attributes:
        path: the file.
        kind: a file of ours that may be replaced, in words; empty where no existing file may be.
        is_ours: whether the existing file at a path is of that kind; may refuse with a ConfigError of its own.
    """

    path: Path
    kind: str = ""
    is_ours: Callable[[Path], bool] = lambda path: False

    def check_replaceable(self) -> None:
        """Raise ConfigError where another file lies at the path that is not of this kind."""
        if self.path.exists() and not self.is_ours(self.path):
            expected, got = (self.kind, "another file") if self.kind else ("no file", "one")
            msg = f"expected {expected} at {self.path}, got {got}; --overwrite replaces it"
            raise ConfigError(msg)


def resumable(path: Path) -> OutputFile:
    """Return a file that its own run goes on with or refuses, whatever lies there."""
    return OutputFile(path, is_ours=lambda path: True)


class OutputFolder:
    """A folder for a command's results.

    Args:
        path: the folder, which need not exist.
        overwrite: whether files of any kind may be replaced.
        wait: whether to wait for another process that writes there; None where the command cannot.
    """

    def __init__(self, path: Path, overwrite: bool = False, wait: bool | None = None) -> None:
        self.path, self.overwrite, self.wait = path, overwrite, wait

    def claim(self, *files: OutputFile, writer: Path | None = None) -> Claim:
        """Check that the files may be written; entered as a context manager, the claim keeps other processes off.

        `writer` is the file that stands for all of them: one process at a time writes it. Raises OutputError where
        nothing can be written or another process writes `writer`, ConfigError for a file that may not be replaced.
        Nothing is left of the attempt.
        """
        claim = Claim(self, files, writer)
        claim.check()
        return claim


class Claim:
    """The right to write some files of a folder, checked when it was made and again when the block begins."""

    def __init__(self, folder: OutputFolder, files: Iterable[OutputFile], writer: Path | None) -> None:
        self.folder, self.files, self.writer = folder, tuple(files), writer
        self._advice = WAIT_ALONE if folder.wait is None else WAIT
        self._lock: Lock | None = None

    def check(self) -> None:
        """Raise what `OutputFolder.claim` raises."""
        if self.writer is not None:
            check_place(self.writer)
            check_free(self.writer, bool(self.folder.wait), self._advice)
        self._check_files()

    def _check_files(self) -> None:
        for file in self.files:
            check_place(file.path)
            if not self.folder.overwrite:
                file.check_replaceable()

    def __enter__(self) -> Lock:
        """Return the lock, taken. Raises ValueError for a claim without a writer."""
        if self.writer is None:
            msg = "expected a claim with a writer"
            raise ValueError(msg)
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


def _taken(path: Path, held: Holder, advice: str) -> str:
    return f"expected {path} for this command alone, got it held by {held}; {advice}, or choose another place"


@contextmanager
def _alone(file: Path) -> Iterator[int]:
    """Open the file, made where it is missing, with no other process having it so, where the file system can tell.

    Where it cannot lock, as some that clusters share, two processes may both take a stale lock: `Lock.check` tells one
    of them at its next sample.
    """
    while True:
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with suppress(OSError):
                fcntl.flock(opened, fcntl.LOCK_EX)
            if _is_at(opened, file):  # and was not removed while we waited
                yield opened
                return
        finally:
            os.close(opened)


def _is_at(opened: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), file.stat())
    except FileNotFoundError:
        return False


def _peek(file: Path) -> Holder | None:
    """Who holds a lock, as far as a look tells; None where nobody does."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return _read(opened, file)
    finally:
        os.close(opened)


def _read(opened: int, file: Path) -> Holder | None:
    """Who an open lock says holds it. Raises OutputError for a file that is no lock of ours."""
    if stat.S_ISREG(os.fstat(opened).st_mode):
        with suppress(ValueError):
            return Holder.read(os.pread(opened, 2**16, 0).decode())
    msg = f"expected a lock of ours at {file}, got another file; move it away, or choose another place"
    raise OutputError(msg)


def _silence(file: Path) -> float:
    """Seconds since a lock's last heartbeat, by the clock of the file system, which may be another machine's."""
    try:
        last = file.stat().st_mtime
    except FileNotFoundError:
        return math.inf
    try:
        with tempfile.TemporaryFile(dir=file.parent) as fresh:
            return os.fstat(fresh.fileno()).st_mtime - last
    except OSError:
        return time.time() - last

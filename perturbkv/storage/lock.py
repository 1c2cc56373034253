"""One writer per output: who writes is told to everybody else, and what a dead process held is taken over.

The lock is a file beside the output that says who holds it. It is read and written under flock(2), so that of any
number of processes one gets it; the holder touches it while it lives. A process of this machine is asked for directly.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from perturbkv.errors import OutputError
from perturbkv.storage.places import make_folders, real, refusals, remove_empty

HEARTBEAT_S = 30.0
SILENCE_S = 300.0
"""After so long without a heartbeat a holder on another machine counts as dead."""
_POLL_S = 0.5
_SAME_START_S = 2.0
"""How far two readings of one process's start may lie apart, as clocks are set."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """Who writes an output.

    Attributes:
        host: the machine, with its namespace of process ids: containers of one name do not see each other's.
        pid, started: the process and its start in seconds since 1970, as ids come again.
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
        started, since = psutil.Process().create_time(), datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(_host(), os.getpid(), started, since, uuid.uuid4().hex)

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
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started) < _SAME_START_S
            return not is_same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.split()[0]}, since {self.since}"


class Lock:
    """The right to write an output; within a `with` block it is this process's alone.

    Args:
        path: the output, or whatever else one process at a time may write.
        wait: whether to wait for a holder instead of leaving.

    Raises OutputError where another process holds it and `wait` is False, and where the place cannot be written.
    """

    def __init__(self, path: Path, wait: bool = False) -> None:
        self.path, self.wait = path, wait
        self._file, self._made = lock_path(path), list[Path]()
        self._holder, self._released = Holder.here(), threading.Event()

    def __enter__(self) -> Self:
        with refusals(self.path):
            self._made = make_folders(self._file.parent)
            try:
                self._acquire()
            except BaseException:
                remove_empty(self._made)
                raise
        threading.Thread(target=self._beat, name=f"lock {self.path.name}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        with suppress(OSError), _alone(self._file) as opened:
            held = _read(opened, self._file)
            if held is None or held.token == self._holder.token:
                self._file.unlink()
        remove_empty(self._made)

    def check(self) -> None:
        """Whether it is held still. One that vanished is made again; raises OutputError where another process has it.

        A machine that slept, or was cut off, finds its lock taken over.
        """
        with refusals(self.path):
            if _peek(self._file) == self._holder:
                return
            make_folders(self._file.parent)
            held = self._claim()
        if held is not None:
            raise OutputError(_taken(self.path, held))

    def _acquire(self) -> None:
        told = False
        while (held := self._claim()) is not None:
            if not self.wait:
                raise OutputError(_taken(self.path, held))
            if not told:
                _log.info("waiting for %s, which writes %s", held, self.path)
                told = True
            time.sleep(_POLL_S)

    def _claim(self) -> Holder | None:
        """Who holds it; None where it is this process's now."""
        with _alone(self._file) as opened:
            held = _read(opened, self._file)
            if held is not None and held != self._holder and not held.is_gone(_silence(opened, self._file.parent)):
                return held
            try:
                os.ftruncate(opened, 0)
                os.pwrite(opened, json.dumps(asdict(self._holder)).encode(), 0)
            except OSError:
                self._file.unlink()
                raise
        return None

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            with suppress(OSError, OutputError):
                if _peek(self._file) == self._holder:
                    os.utime(self._file)


def lock_path(path: Path) -> Path:
    """The lock's file, beside the output."""
    where = real(path)
    return where.with_name(f".{where.name}.lock")


def check_free(path: Path, wait: bool = False) -> None:
    """Raise OutputError where a living process writes `path` and nobody wants to wait for it; nothing is taken."""
    file = lock_path(path)
    with refusals(path):
        held = None if wait else _peek(file)
        if held is not None and not held.is_gone(time.time() - file.stat().st_mtime):
            raise OutputError(_taken(path, held))


def _taken(path: Path, held: Holder) -> str:
    return f"expected {path} for this command alone, got it held by {held}; wait with --wait, or choose another place"


def _host() -> str:
    """The machine, with the namespace of its process ids where Linux tells it."""
    try:
        return f"{platform.node() or '?'} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node() or "?"


@contextmanager
def _alone(file: Path) -> Iterator[int]:
    """The file, open and made where it is missing; no other process has it so, where the file system can tell.

    Where it cannot, two processes may both take a stale lock; `Lock.check` tells one of them at its next sample.
    """
    while True:
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with suppress(ImportError, OSError):
                import fcntl

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


def _silence(opened: int, folder: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the file system, which may be another machine's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as fresh:
            now = os.fstat(fresh.fileno()).st_mtime
    except OSError:
        now = time.time()
    return now - os.fstat(opened).st_mtime

"""One writer per output: who writes is told to everybody else, and what a dead process held is taken over.

The lock is a file beside the output that says who holds it. It is read and written under flock(2), so that of any
number of processes one gets it; the holder touches it while it lives. A process of this machine is asked for directly.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from perturbkv.errors import HeldError, OutputError
from perturbkv.storage.holder import Holder
from perturbkv.storage.places import despite_others, make_folders, real, refusals, remove_empty

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


def check_free(path: Path, wait: bool = False) -> None:
    """Raise OutputError where a living process writes `path` and nobody wants to wait for it; nothing is taken."""
    file = lock_path(path)
    with refusals(path):
        held = None if wait else _peek(file)
        if held is not None and not held.is_gone(_silence(file)):
            raise HeldError(_taken(path, held, WAIT))


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


def _taken(path: Path, held: Holder, advice: str) -> str:
    return f"expected {path} for this command alone, got it held by {held}; {advice}, or choose another place"


@contextmanager
def _alone(file: Path) -> Iterator[int]:
    """The file, open and made where it is missing; no other process has it so."""
    while True:
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
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

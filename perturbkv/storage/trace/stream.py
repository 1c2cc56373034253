"""A file that HDF5 writes through, which fails only when HDF5 has let go of it.

Where a write fails, as on a full disk, HDF5 cannot close its file: the process ends in a segmentation fault. So a
failure is kept here, what is written from then on stays in memory, and whoever writes asks for the failure in between.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


class Stream(io.RawIOBase):
    """The bytes of a file that is written and read at any place.

    Args:
        path: of the file, which is emptied.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._at, self._end = 0, 0
        self._failure: OSError | None = None
        self._unwritten: list[tuple[int, bytes]] = []

    def check(self) -> None:
        """Raise what went wrong so far, an OSError."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Let go of the file."""
        if not self.closed:
            os.close(self._file)
        super().close()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; returns it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        return self._at

    def tell(self) -> int:
        """The place."""
        return self._at

    def write(self, data: Any) -> int:
        """Write at the place; what the file does not take stays in memory."""
        held = memoryview(data).cast("B")
        self._try(lambda: self._write_all(held))
        if self._failure is not None:
            self._unwritten.append((self._at, bytes(held)))
        self._at += len(held)
        self._end = max(self._end, self._at)
        return len(held)

    def readinto(self, buffer: Any) -> int:
        """Read at the place, from the file and from memory; zeros where nothing was written."""
        held = memoryview(buffer).cast("B")
        held[:] = os.pread(self._file, len(held), self._at).ljust(len(held), b"\0")
        for begin, data in self._unwritten:
            first, last = max(begin, self._at), min(begin + len(data), self._at + len(held))
            if first < last:
                held[first - self._at : last - self._at] = data[first - begin : last - begin]
        self._at += len(held)
        return len(held)

    def truncate(self, size: int | None = None) -> int:
        """End the file at a size."""
        end = self._at if size is None else size
        self._try(lambda: os.ftruncate(self._file, end))
        self._end = end
        return end

    def _write_all(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], self._at + done)

    def _try(self, work: Callable[[], object]) -> None:
        """Do it unless something failed before; a failure is kept."""
        if self._failure is None:
            try:
                work()
            except OSError as error:
                self._failure = error


def undisturbed(work: Callable[[threading.Event], None]) -> None:
    """Do `work` in a thread of its own: a Ctrl-C would reach it in the middle of a call of HDF5, as an error there.

    It gets an event that is set when it should stop; Ctrl-C goes on when it has.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work, stop)
        try:
            done.result()
        finally:
            stop.set()

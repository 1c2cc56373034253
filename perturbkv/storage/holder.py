"""Who writes an output: a process, told apart from all others, and whether it lives."""

from __future__ import annotations

import json
import os
import platform
import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Self

import psutil

SILENCE_S = 300.0
"""After so long without a heartbeat a holder on another machine counts as dead."""
_SAME_START_S = 2.0
"""How far two readings of one process's start may lie apart, as clocks are set."""


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


def _host() -> str:
    """The machine, with the namespace of its process ids where Linux tells it."""
    try:
        return f"{platform.node() or '?'} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node() or "?"

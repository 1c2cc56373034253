"""Who writes an output: a process, told apart from all others, and whether it lives."""

from __future__ import annotations

import json
import os
import platform
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

import psutil

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

"""Which processes belong to a run besides its own, and whether they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.patience import patience

ENDED_S = 5.0
"""Within which everything of a run ends once the run does, on an idle machine."""


def with_environment(name: str, value: str) -> list[psutil.Process]:
    """Processes that were started with this variable: workers, and what they start."""
    return [one for one in _there() if _environment(one).get(name) == value]


def in_network_of(pid: int) -> list[psutil.Process]:
    """Other processes in a process' network namespace."""
    return [one for one in in_network(network(pid)) if one.pid != pid]


def in_network(space: str) -> list[psutil.Process]:
    """Processes in a network namespace."""
    return [one for one in _there() if space and network(one.pid) == space]


def network(pid: int) -> str:
    """A process' network namespace; empty where it is gone."""
    with suppress(OSError):
        return os.readlink(Path(f"/proc/{pid}/ns/net"))
    return ""


def left(found: Callable[[], list[psutil.Process]], seconds: float = ENDED_S) -> list[psutil.Process]:
    """Those that are there still after the time within which they have to end."""
    end = time.monotonic() + patience(seconds)
    while (there := found()) and time.monotonic() < end:
        time.sleep(0.05)
    return there


def end(processes: list[psutil.Process]) -> None:
    """Kill them."""
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def named(processes: list[psutil.Process]) -> str:
    """Their ids and what they run."""
    return "; ".join(f"{one.pid} {title(one)}" for one in processes)


def title(one: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(one.cmdline())[:80]
    return "?"


def _there() -> Iterator[psutil.Process]:
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE:
                yield one


def _environment(one: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error, OSError):
        return one.environ()
    return {}

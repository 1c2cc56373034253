"""Worker processes of this machine, each a Python of its own that imports nothing of the program that starts it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from perturbkv.engines.crew import Gone
from perturbkv.engines.task import Task
from perturbkv.engines.worker import Place, Reply

_BEGIN = "import sys; from perturbkv.engines.process import main; main(int(sys.argv[1]))"
_THREADS = "OMP_NUM_THREADS"
_STDERR = 2
"""What a library prints is no result."""


@dataclass(frozen=True)
class _Process:
    running: subprocess.Popen[bytes]
    pipe: Connection


class Processes:
    """A crew of processes; each ends with the process that made it.

    Args:
        places: where they compute.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self._there: dict[int, _Process] = {}

    def hire(self, place: int) -> None:
        """Start a process, in a session of its own: Ctrl-C in a terminal is the coordinator's alone."""
        ours, theirs = Pipe()
        where = self.places[place]
        running = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            env={_THREADS: str(where.threads), **os.environ},
            start_new_session=True,
        )
        theirs.close()
        self._there[place] = _Process(running, ours)
        self._send(place, sys.path)
        self._send(place, where)

    def begin(self, place: int, task: Task) -> None:
        """As `Crew.begin`."""
        self._send(place, ("begin", task))

    def do(self, place: int, item: Any) -> None:
        """As `Crew.do`."""
        self._send(place, ("do", item))

    def heard(self, seconds: float) -> list[tuple[int, Reply | Gone]]:
        """As `Crew.heard`; a process that ends closes its pipe."""
        places = {process.pipe: place for place, process in self._there.items()}
        return [(places[pipe], self._answer(places[pipe], pipe)) for pipe in wait(list(places), seconds)]  # type: ignore[index, arg-type]

    def dismiss(self, place: int) -> None:
        """Kill a process."""
        process = self._there.pop(place)
        process.running.kill()
        process.pipe.close()
        process.running.wait()

    def close(self) -> None:
        """Kill all, then wait for all."""
        for process in self._there.values():
            process.running.kill()
        for place in list(self._there):
            self.dismiss(place)

    def _send(self, place: int, order: object) -> None:
        """What cannot be sent any more is heard as the worker's end."""
        with suppress(OSError):
            self._there[place].pipe.send_bytes(pickle.dumps(order, pickle.HIGHEST_PROTOCOL))

    def _answer(self, place: int, pipe: Connection) -> Reply | Gone:
        try:
            found: Reply = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return self._ended(place)
        return found

    def _ended(self, place: int) -> Gone:
        """How a process ended whose pipe is closed; one that goes on without a pipe is killed."""
        process = self._there[place]
        with suppress(subprocess.TimeoutExpired):
            process.running.wait(1)
        code = process.running.poll()
        self.dismiss(place)
        return Gone("closing its pipe" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}")

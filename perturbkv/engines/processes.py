"""Worker processes of this machine, each a Python of its own that imports nothing of the program that starts it.

On which devices of this machine workers compute, and how many of them there can be.
"""

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

import torch

from perturbkv import memory
from perturbkv.configs.resources import EngineConfig, Shape
from perturbkv.engines.scheduler import Gone
from perturbkv.engines.worker import Place, Reply, Task
from perturbkv.errors import ConfigError
from perturbkv.pipeline.run.plan import Plan

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


_USUAL_THREADS = 4
"""Of a worker on the CPU, where nobody says how many: more threads than that gain little on one prompt."""


def worker_places(chosen: EngineConfig, planned: Plan) -> list[Place]:
    """One place per worker: the machine's GPUs, or shares of its cores.

    Raises ConfigError where there are fewer GPUs or cores than workers, NoMemoryError where their caches do not fit.
    """
    device = planned.placement.device
    count = torch.cuda.device_count() if device.type == "cuda" else cores()
    wanted = chosen.workers or (count if device.type == "cuda" else max(1, count // threads(chosen, None)))
    if wanted > count:
        what = "GPUs" if device.type == "cuda" else "cores"
        msg = f"expected at most one worker for each of this machine's {count} {what}, got --workers {wanted}"
        raise ConfigError(msg)
    if device.type != "cuda":
        _check_cores(chosen, wanted, count)
        _check_room(planned, wanted)
    names = [f"cuda:{place}" for place in range(wanted)] if device.type == "cuda" else [str(device)] * wanted
    return [Place(name, threads(chosen, wanted)) for name in names]


def _check_cores(chosen: EngineConfig, workers: int, there: int) -> None:
    """Raise ConfigError where workers want more cores than there are. OMP_NUM_THREADS, which is not ours, may."""
    if chosen.cpus_per_worker and workers * chosen.cpus_per_worker > there:
        msg = (
            f"expected workers that share this machine's {there} cores, got {workers} with --cpus-per-worker "
            f"{chosen.cpus_per_worker}; take fewer of one"
        )
        raise ConfigError(msg)


def check_device(chosen: EngineConfig, planned: Plan) -> None:
    """Raise ConfigError for a placement that is one worker's alone."""
    place = planned.placement
    if place.device_map != "none":
        msg = f"--device-map {place.device_map} takes all GPUs for one model, and each worker has its own; leave it out"
        raise ConfigError(msg)
    named = place.device.index is not None and (planned.loaded is None or place.device.index > 0)
    if named:
        msg = (
            f"--device {place.device} is one GPU, and workers take one each; say --device {place.device.type}, and in "
            "CUDA_VISIBLE_DEVICES which ones they may take"
        )
        raise ConfigError(msg)


def threads(chosen: EngineConfig, workers: int | None) -> int:
    """Of each worker: as asked for, as OMP_NUM_THREADS says, or its share of the cores."""
    if told := chosen.cpus_per_worker or told_threads():
        return told
    return _USUAL_THREADS if workers is None else max(1, cores() // workers)


def told_threads() -> int:
    """What OMP_NUM_THREADS says; 0 where it says nothing."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() else 0


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def needed_bytes(planned: Plan) -> int:
    """What one worker takes: weights and caches."""
    placement = planned.placement
    shape = Shape.of(planned.files.config, placement.dtype.itemsize, planned.files.weights_bytes(placement.dtype))
    return shape.weights_bytes + planned.caches_bytes()


def _check_room(planned: Plan, workers: int) -> None:
    what = f"{workers} workers, each with model '{planned.files.name}' and its caches, need"
    memory.check(workers * needed_bytes(planned), planned.placement.device, what, "fewer --workers take less")

"""Worker processes of this machine: starting them, their devices, and how many fit.

Each is a Python process of its own that imports nothing of the program that starts it.
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
from perturbkv.configs.resources import Shape, Workers
from perturbkv.engines.scheduler import Gone
from perturbkv.engines.worker import Place, Reply, Task
from perturbkv.errors import ConfigError
from perturbkv.pipeline.run.plan import Plan

_BEGIN = "import sys; from perturbkv.engines.process import main; main(int(sys.argv[1]))"
_THREADS = "OMP_NUM_THREADS"
_STDERR = 2
"""A library's output is no result."""


@dataclass(frozen=True)
class _Process:
    running: subprocess.Popen[bytes]
    pipe: Connection


class Processes:
    """A crew of processes, each of which ends with the process that started it.

    Args:
        places: the devices that they use.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self._there: dict[int, _Process] = {}

    def hire(self, place: int) -> None:
        """Start a process, in a session of its own, so that Ctrl-C in a terminal reaches the coordinator alone."""
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
        """Implement `Crew.begin`."""
        self._send(place, ("begin", task))

    def do(self, place: int, item: Any) -> None:
        """Implement `Crew.do`."""
        self._send(place, ("do", item))

    def poll(self, seconds: float) -> list[tuple[int, Reply | Gone]]:
        """Implement `Crew.poll`; a process that ends closes its pipe."""
        places = {process.pipe: place for place, process in self._there.items()}
        return [(places[pipe], self._answer(places[pipe], pipe)) for pipe in wait(list(places), seconds)]  # type: ignore[index, arg-type]

    def dismiss(self, place: int) -> None:
        """Kill a process."""
        process = self._there.pop(place)
        process.running.kill()
        process.pipe.close()
        process.running.wait()

    def close(self) -> None:
        """Kill all processes, then wait for all."""
        for process in self._there.values():
            process.running.kill()
        for place in list(self._there):
            self.dismiss(place)

    def _send(self, place: int, order: object) -> None:
        """Send an order; where that fails, `heard` reports the worker's end."""
        with suppress(OSError):
            self._there[place].pipe.send_bytes(pickle.dumps(order, pickle.HIGHEST_PROTOCOL))

    def _answer(self, place: int, pipe: Connection) -> Reply | Gone:
        try:
            found: Reply = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return self._end_reason(place)
        return found

    def _end_reason(self, place: int) -> Gone:
        """Return how a process ended whose pipe is closed; one that still runs is killed."""
        process = self._there[place]
        with suppress(subprocess.TimeoutExpired):
            process.running.wait(1)
        code = process.running.poll()
        self.dismiss(place)
        return Gone("closing its pipe" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}")


_USUAL_THREADS = 4
"""Threads of a worker on the CPU by default: more gain little on one prompt."""


def worker_places(chosen: Workers, planned: Plan) -> list[Place]:
    """Return the device of each worker: the machine's GPUs, or shares of its cores.

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
        _check_memory(planned, wanted)
    names = [f"cuda:{place}" for place in range(wanted)] if device.type == "cuda" else [str(device)] * wanted
    return [Place(name, threads(chosen, wanted)) for name in names]


def _check_cores(chosen: Workers, workers: int, there: int) -> None:
    """Raise ConfigError where --cpus-per-worker asks for more cores than exist.

    OMP_NUM_THREADS, which is not ours, may.
    """
    if chosen.cpus_per_worker and workers * chosen.cpus_per_worker > there:
        msg = (
            f"expected workers that share this machine's {there} cores, got {workers} with --cpus-per-worker "
            f"{chosen.cpus_per_worker}; take fewer of one"
        )
        raise ConfigError(msg)


def check_device(chosen: Workers, planned: Plan) -> None:
    """Raise ConfigError for a placement that only a single worker can have."""
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


def threads(chosen: Workers, workers: int | None) -> int:
    """Return the threads of each worker: --cpus-per-worker, else OMP_NUM_THREADS, else its share of the cores."""
    if told := chosen.cpus_per_worker or omp_threads():
        return told
    return _USUAL_THREADS if workers is None else max(1, cores() // workers)


def omp_threads() -> int:
    """Return OMP_NUM_THREADS; 0 where it is not set."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() else 0


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def needed_bytes(planned: Plan) -> int:
    """Return the bytes of one worker: weights and caches."""
    placement = planned.placement
    shape = Shape.from_config(
        planned.files.config, placement.dtype.itemsize, planned.files.weights_bytes(placement.dtype)
    )
    return shape.weights_bytes + planned.caches_bytes()


def _check_memory(planned: Plan, workers: int) -> None:
    what = f"{workers} workers, each with model '{planned.files.name}' and its caches, need"
    memory.check(workers * needed_bytes(planned), planned.placement.device, what, "fewer --workers take less")

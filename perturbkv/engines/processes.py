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
from perturbkv.configs.resources import Workers
from perturbkv.engines.scheduler import WorkerExit
from perturbkv.engines.worker import Reply, Task, WorkerDevice
from perturbkv.errors import ConfigError
from perturbkv.pipeline.run.plan import Plan

_BEGIN = "import sys; from perturbkv.engines.process import main; main(int(sys.argv[1]))"
_THREADS = "OMP_NUM_THREADS"
_STDERR = 2
"""The worker's output goes to stderr: what a library prints is no result."""


@dataclass(frozen=True)
class _Process:
    """A running worker process and the coordinator's end of its pipe."""

    running: subprocess.Popen[bytes]
    pipe: Connection


class Processes:
    """A crew of worker processes, which end with the process that started them.

    Args:
        devices: the device of each worker.
    """

    def __init__(self, devices: Sequence[WorkerDevice]) -> None:
        self.devices = devices
        self._processes: dict[int, _Process] = {}

    def hire(self, worker: int) -> None:
        """Start a worker process in its own session, so that Ctrl-C in a terminal reaches the coordinator alone."""
        ours, theirs = Pipe()
        device = self.devices[worker]
        running = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            env={_THREADS: str(device.threads), **os.environ},
            start_new_session=True,
        )
        theirs.close()
        self._processes[worker] = _Process(running, ours)
        self._send(worker, sys.path)
        self._send(worker, device)

    def begin(self, worker: int, task: Task) -> None:
        """Order a worker to prepare a task."""
        self._send(worker, ("begin", task))

    def do(self, worker: int, item: Any) -> None:
        """Order a worker to process an item of its task."""
        self._send(worker, ("do", item))

    def poll(self, seconds: float) -> list[tuple[int, Reply | WorkerExit]]:
        """Return (worker, reply or exit) for all answers within `seconds`."""
        workers = {process.pipe: worker for worker, process in self._processes.items()}
        return [(workers[pipe], self._receive(workers[pipe], pipe)) for pipe in wait(list(workers), seconds)]  # type: ignore[index, arg-type]

    def dismiss(self, worker: int) -> None:
        """Kill a worker's process."""
        process = self._processes.pop(worker)
        process.running.kill()
        process.pipe.close()
        process.running.wait()

    def close(self) -> None:
        """Kill all processes, then wait for all."""
        for process in self._processes.values():
            process.running.kill()
        for worker in list(self._processes):
            self.dismiss(worker)

    def _send(self, worker: int, order: object) -> None:
        """Send an order to a worker; if sending fails, `poll` reports the worker's exit."""
        with suppress(OSError):
            self._processes[worker].pipe.send_bytes(pickle.dumps(order, pickle.HIGHEST_PROTOCOL))

    def _receive(self, worker: int, pipe: Connection) -> Reply | WorkerExit:
        """Return a worker's reply, or its exit if the pipe is closed; the worker is removed then."""
        try:
            reply: Reply = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[worker].running
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            code = process.poll()
            self.dismiss(worker)  # which kills a process that still runs
            return WorkerExit(
                "closing its pipe" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
            )
        return reply


USUAL_THREADS = 4
"""Threads of a worker on the CPU by default: more gain little on one prompt."""


def worker_devices(chosen: Workers, planned: Plan) -> list[WorkerDevice]:
    """Return every worker's device on this machine: one GPU each, or an equal share of the CPU's cores.

    Raises ConfigError where there are fewer GPUs or cores than workers, NoMemoryError where their caches do not fit.
    """
    device = planned.placement.device
    count = torch.cuda.device_count() if device.type == "cuda" else cores()
    workers = chosen.workers or (count if device.type == "cuda" else max(1, count // threads_per_worker(chosen, None)))
    if workers > count:
        units = "GPUs" if device.type == "cuda" else "cores"
        raise ConfigError(
            f"expected at most one worker for each of this machine's {count} {units}, got --workers {workers}"
        )
    if device.type != "cuda":
        if chosen.cpus_per_worker and workers * chosen.cpus_per_worker > count:
            raise ConfigError(
                f"expected workers that share this machine's {count} cores, got {workers} with --cpus-per-worker "
                f"{chosen.cpus_per_worker}; take fewer of one"
            )
        what = f"{workers} workers, each with model '{planned.files.name}' and its caches, need"
        memory.check(workers * needed_bytes(planned), device, what, "fewer --workers take less")
    names = [f"cuda:{index}" for index in range(workers)] if device.type == "cuda" else [str(device)] * workers
    return [WorkerDevice(name, threads_per_worker(chosen, workers)) for name in names]


def check_device(planned: Plan) -> None:
    """Raise ConfigError if a plan's --device or --device-map is incompatible with a GPU of each worker's own."""
    placement, device = planned.placement, planned.placement.device
    if placement.device_map != "none":
        device_map = f"--device-map {placement.device_map}"
        raise ConfigError(f"{device_map} takes all GPUs for one model, and each worker has its own; leave it out")
    if device.index is not None and (planned.loaded is None or device.index > 0):
        raise ConfigError(
            f"--device {device} is one GPU, and workers take one each; say --device {device.type}, and in "
            "CUDA_VISIBLE_DEVICES which ones they may take"
        )


def threads_per_worker(chosen: Workers, workers: int | None) -> int:
    """Return the threads per worker: --cpus-per-worker, else OMP_NUM_THREADS, else an equal share of the cores.

    Where the number of workers is not decided, None, the share is 4.
    """
    if chosen_threads := chosen.cpus_per_worker or omp_threads():
        return chosen_threads
    return USUAL_THREADS if workers is None else max(1, cores() // workers)


def omp_threads() -> int:
    """Return OMP_NUM_THREADS; 0 where it is not set."""
    value = os.environ.get(_THREADS, "")
    return int(value) if value.isdigit() else 0


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def needed_bytes(planned: Plan) -> int:
    """Return the memory that one worker needs in bytes: the model's weights and caches."""
    return planned.shape.weights_bytes + planned.caches_bytes()

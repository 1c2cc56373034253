"""Workers as actors of a Ray cluster: connection to the cluster, placement of workers on its nodes, and their orders.

Workers are placed on nodes with free GPUs or cores that hold the model and its caches. Ray carries orders and answers,
and reports when an actor has died.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from perturbkv import memory
from perturbkv.configs.resources import Workers
from perturbkv.display import plural
from perturbkv.engines import processes
from perturbkv.engines.scheduler import WorkerExit
from perturbkv.engines.worker import Reply, Task, WorkerDevice
from perturbkv.errors import ConfigError, NoMemoryError, install_extra

_MIB = 2**20
_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Node:
    """A node of the cluster and its free resources.

    Attributes:
        key: the cluster's id of the node.
        name: the node's address, for people.
        cpus: number of free cores.
        gpus: number of free GPUs.
        memory: free bytes, as the cluster counts them.
        gpu_bytes: memory of its smallest GPU; 0 where that is unknown.
    """

    key: str
    name: str
    cpus: int
    gpus: int
    memory: int
    gpu_bytes: int = 0


@dataclass(frozen=True)
class Seat:
    """The place of one worker: its device, its node's `key`, and the cores, GPUs and bytes that it takes."""

    device: WorkerDevice
    key: str
    cpus: int
    gpus: int
    memory: int


def gpu_bytes() -> int:
    """Return the memory of this machine's smallest GPU in bytes; 0 where it is unknown."""
    try:
        output = subprocess.run(_SMI, capture_output=True, text=True, check=True, timeout=20).stdout
        return min(int(line) for line in output.split()) * _MIB
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def assign_seats(chosen: Workers, nodes: Sequence[Node], device: str, needed: int) -> list[Seat]:
    """Return one seat per worker, on the nodes with most free resources, with memory for `needed` bytes each.

    Raises ConfigError where fewer are free than requested, NoMemoryError where the bytes fit nowhere.
    """
    return _gpu_seats(chosen, nodes, needed) if device == "cuda" else _cpu_seats(chosen, nodes, needed)


def _gpu_seats(chosen: Workers, nodes: Sequence[Node], needed: int) -> list[Seat]:
    """Return one seat per worker, on one GPU each. Raises as `assign_seats`."""
    if not (free := [node for node in nodes if node.gpus]):
        raise ConfigError("expected a free GPU in the Ray cluster, got none; wait for one, or say --device cpu")
    if not (fitting := [node for node in free if not 0 < node.gpu_bytes < needed]):
        largest = max(node.gpu_bytes for node in free)
        raise NoMemoryError(
            f"the model and its caches need {memory.format_size(needed)}, and the largest free GPU of the Ray cluster "
            f"has {memory.format_size(largest)}; a smaller --max-memory or --dtype takes less"
        )
    cpus = chosen.cpus_per_worker or 1
    assigned = _assign_nodes(fitting, lambda node: min(node.gpus, node.cpus // cpus), chosen.workers, "free GPUs", cpus)
    return [Seat(WorkerDevice("cuda:0", cpus, node.name), node.key, cpus, 1, 0) for node in assigned]


def _cpu_seats(chosen: Workers, nodes: Sequence[Node], needed: int) -> list[Seat]:
    """Return one seat per worker, on CPU cores of a node. Raises as `assign_seats`."""
    if all(node.memory < needed for node in nodes):
        most = max((node.memory for node in nodes), default=0)
        raise NoMemoryError(
            f"the model and its caches need {memory.format_size(needed)}, and no node of the Ray cluster has more than "
            f"{memory.format_size(most)} free; a smaller --max-memory or --dtype takes less"
        )

    def capacity(cpus: int) -> Callable[[Node], int]:
        return lambda node: min(node.cpus // cpus, node.memory // needed)

    cpus = chosen.cpus_per_worker or _cores_per_worker(chosen, nodes, capacity)
    assigned = _assign_nodes(nodes, capacity(cpus), chosen.workers, f"free shares of {cpus} cores", cpus)
    return [Seat(WorkerDevice("cpu", cpus, node.name), node.key, cpus, 0, needed) for node in assigned]


def _cores_per_worker(chosen: Workers, nodes: Sequence[Node], capacity: Callable[[int], Callable[[Node], int]]) -> int:
    """Return the largest number of cores per worker, up to the default, at which all workers fit on the nodes.

    `capacity` of a number of cores is the function from a node to the number of workers that fit there.
    """
    usual = min(processes.omp_threads() or processes.USUAL_THREADS, max((node.cpus for node in nodes), default=1))
    for cpus in range(max(1, usual), 1, -1):
        if sum(map(capacity(cpus), nodes)) >= (chosen.workers or 1):
            return cpus
    return 1


def _assign_nodes(
    nodes: Sequence[Node], capacity: Callable[[Node], int], workers: int | None, what: str, cpus: int
) -> list[Node]:
    """Return one node per worker, always the node with most room left; `workers` None: as many workers as fit.

    `capacity` is the number of workers that fit on a node; `what` names the resource in the error, and `cpus` are the
    cores of a worker that it tells. Raises ConfigError where fewer fit.
    """
    shares = {node.key: capacity(node) for node in nodes}
    most = sum(shares.values())
    if most < (workers or 1):
        raise ConfigError(
            f"expected at most one worker for each of the Ray cluster's {most} {what} that hold the model, got "
            f"--workers {workers or 'none'} of {cpus} cores each; ask for fewer, or wait until others are done"
        )
    assigned: list[Node] = []
    for _ in range(workers or most):
        best = max(nodes, key=lambda node: shares[node.key])
        shares[best.key] -= 1
        assigned.append(best)
    return assigned


_PAUSE = 0.1


class Actor:
    """A worker as a Ray actor; its replies are pickled to bytes, which do not stay in the cluster's object store."""

    def __init__(self, device: WorkerDevice, folder: str) -> None:
        from perturbkv.engines.worker import LogBuffer, Worker

        with suppress(OSError):  # of a machine that has no such folder
            os.chdir(folder)
        self._worker = Worker(device, LogBuffer().listen())

    def hello(self) -> bytes:
        """Return an empty reply, as a sign that the actor is alive."""
        return pickle.dumps(Reply())

    def begin(self, task: Task) -> bytes:
        """Return the pickled reply of `Worker.begin`."""
        return pickle.dumps(self._worker.begin(task))

    def do(self, item: Any) -> bytes:
        """Return the pickled reply of `Worker.do`."""
        return pickle.dumps(self._worker.do(item), pickle.HIGHEST_PROTOCOL)


class Actors:
    """A crew of Ray actors, which end with the program that started them.

    Args:
        ray: the module `ray`, connected to a cluster.
        seats: the seat of each actor.
    """

    def __init__(self, ray: Any, seats: Sequence[Seat]) -> None:
        self.devices: list[WorkerDevice] = [seat.device for seat in seats]
        self._ray, self._seats = ray, seats
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}

    def hire(self, worker: int) -> None:
        """Start a worker's actor on its seat's node only."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        seat = self._seats[worker]
        actor = self._ray.remote(Actor).options(
            num_cpus=seat.cpus, num_gpus=seat.gpus, memory=seat.memory or None, max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(seat.key, soft=False),
        )  # fmt: skip
        self._actors[worker] = actor.remote(seat.device, os.getcwd())
        self._pending[self._actors[worker].hello.remote()] = worker

    def begin(self, worker: int, task: Task) -> None:
        """Order a worker to prepare a task."""
        self._pending[self._actors[worker].begin.remote(task)] = worker

    def do(self, worker: int, item: Any) -> None:
        """Order a worker to process an item of its task."""
        self._pending[self._actors[worker].do.remote(item)] = worker

    def poll(self, seconds: float) -> list[tuple[int, Reply | WorkerExit]]:
        """Return (worker, reply or exit) for all answers within `seconds`."""
        if not self._pending:
            time.sleep(min(seconds, _PAUSE))
            return []
        ready, _ = self._ray.wait(list(self._pending), timeout=seconds)
        return [(self._pending[order], self._receive(order)) for order in ready]

    def dismiss(self, worker: int) -> None:
        """Kill a worker's actor and drop its pending order."""
        self._ray.kill(self._actors.pop(worker))
        self._pending = {order: owner for order, owner in self._pending.items() if owner != worker}

    def close(self) -> None:
        """Kill all actors."""
        for worker in list(self._actors):
            self.dismiss(worker)

    def _receive(self, order: Any) -> Reply | WorkerExit:
        """Return the reply to a completed order, or the worker's exit if its actor has died."""
        worker = self._pending[order]
        try:
            reply: Reply = pickle.loads(self._ray.get(order))
        except self._ray.exceptions.RayError as error:
            self.dismiss(worker)
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            detail = next((line for line in reversed(lines) if "Error" in line or "killed" in line), "")
            why = f": {detail.partition('. Some common')[0][:200]}" if detail else ""
            return WorkerExit(f"its actor died{why}")
        del self._pending[order]
        return reply


def list_nodes(ray: Any) -> list[Node]:
    """Return the living nodes of the cluster with their free resources; GPU memory is queried on the node."""
    from ray._private.state import available_resources_per_node
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    free, nodes = available_resources_per_node(), []
    query = ray.remote(gpu_bytes)
    for node in _living_nodes(ray):
        key, resources = node["NodeID"], free.get(node["NodeID"], {})
        affinity = NodeAffinitySchedulingStrategy(key, soft=False)
        size = (
            ray.get(query.options(num_cpus=0, scheduling_strategy=affinity).remote())
            if resources.get("GPU", 0) >= 1
            else 0
        )
        nodes.append(
            Node(key, node["NodeManagerAddress"], int(resources.get("CPU", 0)), int(resources.get("GPU", 0)),
                 int(resources.get("memory", 0)), size)
        )  # fmt: skip
    return nodes


_log = logging.getLogger(__name__)
_ADDRESS = "RAY_ADDRESS"
_SECONDS = 5.0
"""Timeout for a head to accept a connection, and again to answer: Ray itself would try a dead one for two minutes."""
_LONGEST = 300
"""Characters of Ray's own message."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The beginning of an HTTP/2 connection, which Ray uses: the preface, and a frame of no settings."""
_SETTINGS = 4
"""The kind of a server's first frame, in its fourth byte."""


def import_ray() -> Any:
    """Return the module `ray` with usage reports turned off. Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"--engine ray needs Ray, which is not installed: {install_extra('ray')}")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    return ray


def ray_address(chosen: Workers) -> str:
    """Return the Ray cluster's address from option or environment; empty: a cluster is started on this machine.

    Raises ConfigError where neither an address nor a number of workers is given.
    """
    address = chosen.ray_address or os.environ.get(_ADDRESS, "")
    if not address and chosen.workers is None:
        raise ConfigError(
            "--engine ray joins the cluster at --ray-address or RAY_ADDRESS, and got neither; with --workers N it "
            "starts Ray on this machine"
        )
    return "" if address == "local" and chosen.workers else address


@contextmanager
def connect_ray(chosen: Workers, log: bool = True) -> Iterator[Any]:
    """Yield the module `ray`, connected to the chosen cluster within the block; an existing connection is kept.

    `log`: whether the cluster's description is logged. Raises ConfigError where no cluster is reached, or one of
    another version.
    """
    ray = import_ray()
    if ray.is_initialized():
        _log.info("on the Ray cluster that this program has joined: %s", _describe_cluster(ray))
        yield ray
        return
    address = ray_address(chosen)
    if address and address != "auto":
        check_address(address)
    _connect(ray, address)
    try:
        if log:
            _log.info("%s the Ray cluster %s", "joined" if address else "started", _describe_cluster(ray))
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Connect to the cluster at an address (empty: a new one), keeping the signal handlers. Raises ConfigError."""
    logging.getLogger(ray.__name__).setLevel(logging.ERROR)  # we report exits ourselves, in one line
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if main else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address or "local", include_dashboard=None if address else False, log_to_driver=False,
                     configure_logging=False)  # fmt: skip
    except (RuntimeError, ValueError, OSError, AssertionError, ray.exceptions.RayError) as error:
        message = " ".join(str(error).split())[:_LONGEST]
        raise ConfigError(
            f"expected to join the Ray cluster at {address or 'this machine'} from one of its nodes, got: {message}"
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_address(address: str) -> None:
    """Raise ConfigError for an invalid cluster address, or if no server there speaks Ray's protocol."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not (host and colon and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"--ray-address takes host:port of a cluster's head, such as 10.0.0.1:6379, or auto; got '{address}'"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _SECONDS) as link:
            link.sendall(_HELLO)
            answer = link.recv(9)
    except OSError as error:
        raise ConfigError(
            f"expected a Ray cluster at {address}, got '{error.strerror or error}'; ray status shows where it is"
        ) from None
    if answer[3:4] != bytes((_SETTINGS,)):
        raise ConfigError(f"expected a Ray cluster at {address}, got something else; ray status shows where it is")


def _living_nodes(ray: Any) -> list[dict[str, Any]]:
    """Return Ray's JSON objects of the cluster's living nodes."""
    return [node for node in ray.nodes() if node["Alive"]]


def _describe_cluster(ray: Any) -> str:
    """Return the cluster's address, number of nodes and resources in words."""
    alive = [node["Resources"] for node in _living_nodes(ray)]
    cpus, gpus = (round(sum(resources.get(kind, 0) for resources in alive)) for kind in ("CPU", "GPU"))
    where = ray.get_runtime_context().gcs_address
    return f"at {where}: {plural(len(alive), 'node')}, {cpus} CPUs, {gpus} GPUs"

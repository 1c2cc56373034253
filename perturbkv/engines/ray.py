"""Workers as actors of a Ray cluster: joining or starting the cluster, placing workers on its nodes, and their orders.

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
from dataclasses import dataclass, replace
from typing import Any

from perturbkv import memory as room
from perturbkv.configs.resources import Workers
from perturbkv.engines import processes
from perturbkv.engines.scheduler import Gone
from perturbkv.engines.worker import Place, Reply, Task
from perturbkv.errors import ConfigError, NoMemoryError

_MIB = 2**20
_USUAL_CPUS = 4
_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Node:
    """A node's free resources.

    Attributes:
        key: the cluster's id of the node.
        name: the node's address, for people.
        cpus, gpus: free ones.
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
    """One worker's node `key`, its device, and the resources that it takes."""

    place: Place
    key: str
    cpus: int
    gpus: int
    memory: int


def gpu_bytes() -> int:
    """Return the memory of this machine's smallest GPU in bytes; 0 where it is unknown."""
    try:
        said = subprocess.run(_SMI, capture_output=True, text=True, check=True, timeout=20).stdout
        return min(int(line) for line in said.split()) * _MIB
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def seats(chosen: Workers, nodes: Sequence[Node], device: str, needed: int) -> list[Seat]:
    """Return a seat for each worker, nodes with most free resources first; each holds `needed` bytes.

    Raises ConfigError where fewer are free than requested, NoMemoryError where the bytes fit nowhere.
    """
    return _on_gpus(chosen, nodes, needed) if device == "cuda" else _on_cpus(chosen, nodes, needed)


def _on_gpus(chosen: Workers, nodes: Sequence[Node], needed: int) -> list[Seat]:
    free = [node for node in nodes if node.gpus]
    if not free:
        msg = "expected a free GPU in the Ray cluster, got none; wait for one, or say --device cpu"
        raise ConfigError(msg)
    fitting = [node for node in free if not 0 < node.gpu_bytes < needed]
    if not fitting:
        largest = max(node.gpu_bytes for node in free)
        msg = (
            f"the model and its caches need {room.format_size(needed)}, and the largest free GPU of the Ray cluster "
            f"has {room.format_size(largest)}; a smaller --max-memory or --dtype takes less"
        )
        raise NoMemoryError(msg)
    cpus = chosen.cpus_per_worker or 1
    held = _assign_nodes(fitting, lambda node: min(node.gpus, node.cpus // cpus), chosen.workers, "free GPUs", cpus)
    return [Seat(Place("cuda:0", cpus, node.name), node.key, cpus, 1, 0) for node in held]


def _on_cpus(chosen: Workers, nodes: Sequence[Node], needed: int) -> list[Seat]:
    if all(node.memory < needed for node in nodes):
        most = max((node.memory for node in nodes), default=0)
        msg = (
            f"the model and its caches need {room.format_size(needed)}, and no node of the Ray cluster has more than "
            f"{room.format_size(most)} free; a smaller --max-memory or --dtype takes less"
        )
        raise NoMemoryError(msg)

    def held(cpus: int) -> Callable[[Node], int]:
        return lambda node: min(node.cpus // cpus, node.memory // needed)

    cpus = chosen.cpus_per_worker or _threads(chosen, nodes, held)
    dealt = _assign_nodes(nodes, held(cpus), chosen.workers, f"free shares of {cpus} cores", cpus)
    return [Seat(Place("cpu", cpus, node.name), node.key, cpus, 0, needed) for node in dealt]


def _threads(chosen: Workers, nodes: Sequence[Node], held: Callable[[int], Callable[[Node], int]]) -> int:
    """Return the largest number of cores per worker, up to the default, that leaves a share for each worker."""
    usual = min(processes.omp_threads() or _USUAL_CPUS, max((node.cpus for node in nodes), default=1))
    for cpus in range(max(1, usual), 1, -1):
        if sum(map(held(cpus), nodes)) >= (chosen.workers or 1):
            return cpus
    return 1


def _assign_nodes(
    nodes: Sequence[Node], held: Callable[[Node], int], workers: int | None, what: str, cpus: int
) -> list[Node]:
    """Return a node for each worker, in turn, from the one with most free shares. Raises ConfigError for too few."""
    rooms = {node.key: held(node) for node in nodes}
    most = sum(rooms.values())
    if most < (workers or 1):
        msg = (
            f"expected at most one worker for each of the Ray cluster's {most} {what} that hold the model, got "
            f"--workers {workers or 'none'} of {cpus} cores each; ask for fewer, or wait until others are done"
        )
        raise ConfigError(msg)
    found: list[Node] = []
    for _ in range(workers or most):
        best = max(nodes, key=lambda node: rooms[node.key])
        rooms[best.key] -= 1
        found.append(replace(best))
    return found


_PAUSE = 0.1


class Actor:
    """A worker as a Ray actor; every answer is one object of bytes, which does not stay in the cluster's store."""

    def __init__(self, place: Place, folder: str) -> None:
        from perturbkv.engines.worker import LogBuffer, Worker

        with suppress(OSError):  # of a machine that has no such folder
            os.chdir(folder)
        self._worker = Worker(place, LogBuffer().listen())

    def hello(self) -> bytes:
        """Answer that the actor is alive."""
        return pickle.dumps(Reply())

    def begin(self, task: Task) -> bytes:
        """Call `Worker.begin`."""
        return pickle.dumps(self._worker.begin(task))

    def do(self, item: Any) -> bytes:
        """Call `Worker.do`."""
        return pickle.dumps(self._worker.do(item), pickle.HIGHEST_PROTOCOL)


class Actors:
    """A crew of actors, which die with the program that made them.

    Args:
        ray: the module, connected.
        seats: the seat of each actor.
    """

    def __init__(self, ray: Any, seats: Sequence[Seat]) -> None:
        self.places = [seat.place for seat in seats]
        self._ray, self._seats = ray, seats
        self._there: dict[int, Any] = {}
        self._asked: dict[Any, int] = {}

    def hire(self, place: int) -> None:
        """Start an actor on the seat's node and nowhere else."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        seat = self._seats[place]
        made = self._ray.remote(Actor).options(
            num_cpus=seat.cpus, num_gpus=seat.gpus, memory=seat.memory or None, max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(seat.key, soft=False),
        )  # fmt: skip
        self._there[place] = made.remote(seat.place, os.getcwd())
        self._asked[self._there[place].hello.remote()] = place

    def begin(self, place: int, task: Task) -> None:
        """Implement `Crew.begin`."""
        self._asked[self._there[place].begin.remote(task)] = place

    def do(self, place: int, item: Any) -> None:
        """Implement `Crew.do`."""
        self._asked[self._there[place].do.remote(item)] = place

    def poll(self, seconds: float) -> list[tuple[int, Reply | Gone]]:
        """Implement `Crew.poll`."""
        if not self._asked:
            time.sleep(min(seconds, _PAUSE))
            return []
        ready, _ = self._ray.wait(list(self._asked), timeout=seconds)
        return [(self._asked[one], self._answer(one)) for one in ready]

    def dismiss(self, place: int) -> None:
        """Kill an actor and drop its pending order."""
        self._ray.kill(self._there.pop(place))
        self._asked = {one: asked for one, asked in self._asked.items() if asked != place}

    def close(self) -> None:
        """Kill all actors."""
        for place in list(self._there):
            self.dismiss(place)

    def _answer(self, one: Any) -> Reply | Gone:
        place = self._asked[one]
        try:
            found: Reply = pickle.loads(self._ray.get(one))
        except self._ray.exceptions.RayError as error:
            self.dismiss(place)
            return Gone(_end_reason(error))
        del self._asked[one]
        return found


def nodes(ray: Any) -> list[Node]:
    """Return the free resources of every node; GPU memory is queried on the node."""
    from ray._private.state import available_resources_per_node
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    free, found = available_resources_per_node(), []
    asked = ray.remote(gpu_bytes)
    for node in (one for one in ray.nodes() if one["Alive"]):
        key, own = node["NodeID"], free.get(node["NodeID"], {})
        where = NodeAffinitySchedulingStrategy(key, soft=False)
        size = ray.get(asked.options(num_cpus=0, scheduling_strategy=where).remote()) if own.get("GPU", 0) >= 1 else 0
        found.append(
            Node(key, node["NodeManagerAddress"], int(own.get("CPU", 0)), int(own.get("GPU", 0)),
                 int(own.get("memory", 0)), size)
        )  # fmt: skip
    return found


def _end_reason(error: Exception) -> str:
    """Return how an actor ended, in a few words of Ray's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    detail = next((line for line in reversed(lines) if "Error" in line or "killed" in line), "")
    return f"its actor died: {detail.partition('. Some common')[0][:200]}" if detail else "its actor died"


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
        msg = "--engine ray needs Ray, which is not installed: pip install 'perturbkv[ray]'"
        raise ConfigError(msg)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    return ray


def ray_address(chosen: Workers) -> str:
    """Return the address of the cluster to join; empty where one is to be started on this machine.

    Raises ConfigError where neither an address nor a number of workers is given.
    """
    found = chosen.ray_address or os.environ.get(_ADDRESS, "")
    if not found and chosen.workers is None:
        msg = (
            "--engine ray joins the cluster at --ray-address or RAY_ADDRESS, and got neither; with --workers N it "
            "starts Ray on this machine"
        )
        raise ConfigError(msg)
    return "" if found == "local" and chosen.workers else found


@contextmanager
def connect_ray(chosen: Workers, told: bool = True) -> Iterator[Any]:
    """Yield the module `ray`, connected inside the block; a connection that existed before stays.

    `told`: whether the cluster is logged. Raises ConfigError where no cluster is reached, or one of another version.
    """
    ray = import_ray()
    if ray.is_initialized():
        _log.info("on the Ray cluster that this program has joined: %s", _description(ray))
        yield ray
        return
    where = ray_address(chosen)
    if where and where != "auto":
        check_answers(where)
    _init(ray, where)
    try:
        if told:
            _log.info("%s the Ray cluster %s", "joined" if where else "started", _description(ray))
        yield ray
    finally:
        ray.shutdown()


def _init(ray: Any, where: str) -> None:
    """Connect to Ray and restore the signal handlers. Raises ConfigError."""
    logging.getLogger(ray.__name__).setLevel(logging.ERROR)  # what ends is told of by us, in one line
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if main else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=where or "local", include_dashboard=None if where else False, log_to_driver=False,
                     configure_logging=False)  # fmt: skip
    except (RuntimeError, ValueError, OSError, AssertionError, ray.exceptions.RayError) as error:
        said = " ".join(str(error).split())[:_LONGEST]
        msg = f"expected to join the Ray cluster at {where or 'this machine'} from one of its nodes, got: {said}"
        raise ConfigError(msg) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_answers(where: str) -> None:
    """Raise ConfigError for an invalid address, or one at which no server speaks Ray's protocol."""
    host, colon, port = where.rpartition(":")
    if "://" in where or not (host and colon and port.isdigit() and 0 < int(port) < 2**16):
        msg = f"--ray-address takes host:port of a cluster's head, such as 10.0.0.1:6379, or auto; got '{where}'"
        raise ConfigError(msg)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _SECONDS) as link:
            link.sendall(_HELLO)
            answer = link.recv(9)
    except OSError as error:
        msg = f"expected a Ray cluster at {where}, got '{error.strerror or error}'; ray status shows where it is"
        raise ConfigError(msg) from None
    if answer[3:4] != bytes((_SETTINGS,)):
        msg = f"expected a Ray cluster at {where}, got something else; ray status shows where it is"
        raise ConfigError(msg)


def _description(ray: Any) -> str:
    """Return the cluster's address and resources in words."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (round(sum(one.get(kind, 0) for one in alive)) for kind in ("CPU", "GPU"))
    where = ray.get_runtime_context().gcs_address
    return f"at {where}: {len(alive)} node{'' if len(alive) == 1 else 's'}, {cpus} CPUs, {gpus} GPUs"

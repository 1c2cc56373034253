"""Workers as actors of a Ray cluster: it carries orders to them and answers back, and knows when one has died.

On which nodes of a cluster workers compute: where GPUs or cores are free that hold the model and its caches.

Joining a Ray cluster, or starting one on this machine where that was asked for; and what is told where it fails.
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
from perturbkv.configs.resources import EngineConfig
from perturbkv.engines import processes
from perturbkv.engines.scheduler import Gone
from perturbkv.engines.worker import Place, Reply, Task
from perturbkv.errors import ConfigError, NoMemoryError

_MIB = 2**20
_USUAL_CPUS = 4
_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Node:
    """What a node has free.

    Attributes:
        key: the cluster's name of it.
        name: people's, its address.
        cpus, gpus: free ones.
        memory: free bytes, as far as the cluster counts them.
        gpu_bytes: of its smallest GPU; 0 where that is unknown.
    """

    key: str
    name: str
    cpus: int
    gpus: int
    memory: int
    gpu_bytes: int = 0


@dataclass(frozen=True)
class Seat:
    """One worker's place, on the node `key`, and what it takes there."""

    place: Place
    key: str
    cpus: int
    gpus: int
    memory: int


def gpu_bytes() -> int:
    """Of this machine's smallest GPU; 0 where nobody says."""
    try:
        said = subprocess.run(_SMI, capture_output=True, text=True, check=True, timeout=20).stdout
        return min(int(line) for line in said.split()) * _MIB
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def seats(chosen: EngineConfig, nodes: Sequence[Node], device: str, needed: int) -> list[Seat]:
    """A seat for each worker, nodes with most room first; each holds `needed` bytes.

    Raises ConfigError where fewer are free than asked for, NoMemoryError where the bytes fit nowhere.
    """
    return _on_gpus(chosen, nodes, needed) if device == "cuda" else _on_cpus(chosen, nodes, needed)


def _on_gpus(chosen: EngineConfig, nodes: Sequence[Node], needed: int) -> list[Seat]:
    free = [node for node in nodes if node.gpus]
    if not free:
        msg = "expected a free GPU in the Ray cluster, got none; wait for one, or say --device cpu"
        raise ConfigError(msg)
    fitting = [node for node in free if not 0 < node.gpu_bytes < needed]
    if not fitting:
        largest = max(node.gpu_bytes for node in free)
        msg = (
            f"the model and its caches need {room.said(needed)}, and the largest free GPU of the Ray cluster has "
            f"{room.said(largest)}; a smaller --max-memory or --dtype takes less"
        )
        raise NoMemoryError(msg)
    cpus = chosen.cpus_per_worker or 1
    held = _dealt(fitting, lambda node: min(node.gpus, node.cpus // cpus), chosen.workers, "free GPUs", cpus)
    return [Seat(Place("cuda:0", cpus, node.name), node.key, cpus, 1, 0) for node in held]


def _on_cpus(chosen: EngineConfig, nodes: Sequence[Node], needed: int) -> list[Seat]:
    if all(node.memory < needed for node in nodes):
        most = max((node.memory for node in nodes), default=0)
        msg = (
            f"the model and its caches need {room.said(needed)}, and no node of the Ray cluster has more than "
            f"{room.said(most)} free; a smaller --max-memory or --dtype takes less"
        )
        raise NoMemoryError(msg)

    def held(cpus: int) -> Callable[[Node], int]:
        return lambda node: min(node.cpus // cpus, node.memory // needed)

    cpus = chosen.cpus_per_worker or _threads(chosen, nodes, held)
    dealt = _dealt(nodes, held(cpus), chosen.workers, f"free shares of {cpus} cores", cpus)
    return [Seat(Place("cpu", cpus, node.name), node.key, cpus, 0, needed) for node in dealt]


def _threads(chosen: EngineConfig, nodes: Sequence[Node], held: Callable[[int], Callable[[Node], int]]) -> int:
    """As many of the usual cores for each worker as leave room for all of them."""
    usual = min(processes.told_threads() or _USUAL_CPUS, max((node.cpus for node in nodes), default=1))
    for cpus in range(max(1, usual), 1, -1):
        if sum(map(held(cpus), nodes)) >= (chosen.workers or 1):
            return cpus
    return 1


def _dealt(nodes: Sequence[Node], held: Callable[[Node], int], workers: int | None, what: str, cpus: int) -> list[Node]:
    """A node for each worker, one after the other from the one with most room. Raises ConfigError for too few."""
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
    """A worker as Ray holds it; every answer is one object of bytes, which nobody keeps in the cluster's store."""

    def __init__(self, place: Place, folder: str) -> None:
        from perturbkv.engines.worker import Heard, Worker

        with suppress(OSError):  # of a machine that has no such folder
            os.chdir(folder)
        self._worker = Worker(place, Heard().listen())

    def hello(self) -> bytes:
        """Answer that it is there."""
        return pickle.dumps(Reply())

    def begin(self, task: Task) -> bytes:
        """As `Worker.begin`."""
        return pickle.dumps(self._worker.begin(task))

    def do(self, item: Any) -> bytes:
        """As `Worker.do`."""
        return pickle.dumps(self._worker.do(item), pickle.HIGHEST_PROTOCOL)


class Actors:
    """A crew of actors, which die with the program that made them.

    Args:
        ray: the module, connected.
        seats: where each is.
    """

    def __init__(self, ray: Any, seats: Sequence[Seat]) -> None:
        self.places = [seat.place for seat in seats]
        self._ray, self._seats = ray, seats
        self._there: dict[int, Any] = {}
        self._asked: dict[Any, int] = {}

    def hire(self, place: int) -> None:
        """Make an actor on the seat's node and nowhere else."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        seat = self._seats[place]
        made = self._ray.remote(Actor).options(
            num_cpus=seat.cpus, num_gpus=seat.gpus, memory=seat.memory or None, max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(seat.key, soft=False),
        )  # fmt: skip
        self._there[place] = made.remote(seat.place, os.getcwd())
        self._asked[self._there[place].hello.remote()] = place

    def begin(self, place: int, task: Task) -> None:
        """As `Crew.begin`."""
        self._asked[self._there[place].begin.remote(task)] = place

    def do(self, place: int, item: Any) -> None:
        """As `Crew.do`."""
        self._asked[self._there[place].do.remote(item)] = place

    def heard(self, seconds: float) -> list[tuple[int, Reply | Gone]]:
        """As `Crew.heard`."""
        if not self._asked:
            time.sleep(min(seconds, _PAUSE))
            return []
        ready, _ = self._ray.wait(list(self._asked), timeout=seconds)
        return [(self._asked[one], self._answer(one)) for one in ready]

    def dismiss(self, place: int) -> None:
        """Kill an actor; what it was asked is forgotten."""
        self._ray.kill(self._there.pop(place))
        self._asked = {one: asked for one, asked in self._asked.items() if asked != place}

    def close(self) -> None:
        """Kill all."""
        for place in list(self._there):
            self.dismiss(place)

    def _answer(self, one: Any) -> Reply | Gone:
        place = self._asked[one]
        try:
            found: Reply = pickle.loads(self._ray.get(one))
        except self._ray.exceptions.RayError as error:
            self.dismiss(place)
            return Gone(_how(error))
        del self._asked[one]
        return found


def nodes(ray: Any) -> list[Node]:
    """What is free on every node, GPUs' memory asked there."""
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


def _how(error: Exception) -> str:
    """How an actor ended, in a few words of Ray's many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    detail = next((line for line in reversed(lines) if "Error" in line or "killed" in line), "")
    return f"its actor died: {detail.partition('. Some common')[0][:200]}" if detail else "its actor died"


_log = logging.getLogger(__name__)
_ADDRESS = "RAY_ADDRESS"
_SECONDS = 5.0
"""For a head to take a connection, and again to answer: Ray itself would ask a dead one for two minutes."""
_LONGEST = 300
"""Characters of Ray's own message."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2, in which Ray speaks, begins with: the preface, and a frame of no settings."""
_SETTINGS = 4
"""The kind of frame that a server answers with, in the fourth byte."""


def bring_ray() -> Any:
    """The module `ray`, told to report nothing to anybody. Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        msg = "--engine ray needs Ray, which is not installed: pip install 'perturbkv[ray]'"
        raise ConfigError(msg)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    return ray


def ray_address(chosen: EngineConfig) -> str:
    """Of the cluster to join; empty where one is to be started on this machine. Raises ConfigError for none of both."""
    found = chosen.ray_address or os.environ.get(_ADDRESS, "")
    if not found and chosen.workers is None:
        msg = (
            "--engine ray joins the cluster at --ray-address or RAY_ADDRESS, and got neither; with --workers N it "
            "starts Ray on this machine"
        )
        raise ConfigError(msg)
    return "" if found == "local" and chosen.workers else found


@contextmanager
def joined_ray(chosen: EngineConfig, told: bool = True) -> Iterator[Any]:
    """The module `ray`, connected inside the block, which is `told`; a connection that was there before stays.

    Raises ConfigError where no cluster is reached, or one of another version.
    """
    ray = bring_ray()
    if ray.is_initialized():
        _log.info("on the Ray cluster that this program has joined: %s", _described(ray))
        yield ray
        return
    where = ray_address(chosen)
    if where and where != "auto":
        check_answers(where)
    _init(ray, where)
    try:
        if told:
            _log.info("%s the Ray cluster %s", "joined" if where else "started", _described(ray))
        yield ray
    finally:
        ray.shutdown()


def _init(ray: Any, where: str) -> None:
    """Connect; signals go on meaning what they meant. Raises ConfigError."""
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
    """Raise ConfigError for an address that is none, or at which nobody speaks as Ray does."""
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


def _described(ray: Any) -> str:
    """Where it is and what it has."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (round(sum(one.get(kind, 0) for one in alive)) for kind in ("CPU", "GPU"))
    where = ray.get_runtime_context().gcs_address
    return f"at {where}: {len(alive)} node{'' if len(alive) == 1 else 's'}, {cpus} CPUs, {gpus} GPUs"

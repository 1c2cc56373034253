"""On which nodes of a cluster workers compute: where GPUs or cores are free that hold the model and its caches."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perturbkv import memory as room
from perturbkv.configs.engine import EngineConfig
from perturbkv.engines import devices
from perturbkv.engines.worker import Place
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
    usual = min(devices.told_threads() or _USUAL_CPUS, max((node.cpus for node in nodes), default=1))
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

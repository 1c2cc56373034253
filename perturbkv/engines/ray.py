"""Workers as actors of a Ray cluster: it carries orders to them and answers back, and knows when one has died."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from perturbkv.engines.crew import Gone
from perturbkv.engines.nodes import Node, Seat, gpu_bytes
from perturbkv.engines.task import Task
from perturbkv.engines.worker import Place, Reply

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

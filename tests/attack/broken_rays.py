"""A Ray cluster under a run: its actors, its nodes and who began it, killed. None where nothing is wrong in the end."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import psutil

from tests.attack import processes
from tests.attack.broken_workers import measuring
from tests.attack.counted import IDS
from tests.attack.life import RAY, RAY_OF_ITS_OWN, Life, Way, ended

AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
AGENTS_S = 75.0
"""Ray 2.60's agents tell a dead node of its death for a minute before they end."""


def node_killed(place: Life, draw: random.Random, rest: Way) -> str | None:
    """kill −9 of one of two nodes while it measures: the other one does the rest."""
    runs = place.begin(RAY)
    measuring(place, draw, runs)
    assert place.ray is not None
    place.ray.kill_one()
    return place.flaw_of_ended(ended(runs), (0,)) or place.flaw_of_rest(rest, set(IDS), 2)


def starter_killed(place: Life, draw: random.Random, rest: Way) -> str | None:
    """kill −9 of a run that started Ray: nothing of it stays, but for Ray's own agents, and those not for long."""
    runs = place.begin(RAY_OF_ITS_OWN)
    measuring(place, draw, runs)
    safe, network = place.kept(), processes.network(runs[0].pid)
    runs[0].send(signal.SIGKILL)
    outcomes = ended(runs)
    if flaw := _flaw_of_left(lambda: [one for one in processes.in_network(network) if not _is_agent(one)]):
        return flaw
    if flaw := _flaw_of_left(lambda: processes.in_network(network), AGENTS_S):
        return flaw
    return place.flaw_of_ended(outcomes, (0, -signal.SIGKILL)) or place.flaw_of_rest(rest, safe, 2)


def _flaw_of_left(found: Callable[[], list[psutil.Process]], seconds: float = processes.ENDED_S) -> str | None:
    if not (there := processes.left(found, seconds)):
        return None
    told = processes.named(there)
    processes.end(there)
    return f"processes are left: {told}"


def _is_agent(one: psutil.Process) -> bool:
    return processes.title(one).strip() in AGENTS

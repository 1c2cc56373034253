"""A Ray cluster under a run: its actors, its nodes and who began it, killed. None where nothing is wrong in the end."""

from __future__ import annotations

import random
import signal

from tests.attack import processes
from tests.attack.broken_workers import measuring
from tests.attack.counted import IDS
from tests.attack.life import RAY, RAY_OF_ITS_OWN, Life, Way, ended


def node_killed(place: Life, draw: random.Random, rest: Way) -> str | None:
    """kill −9 of one of two nodes while it measures: the other one does the rest."""
    runs = place.begin(RAY)
    measuring(place, draw, runs)
    assert place.ray is not None
    place.ray.kill_one()
    return place.flaw_of_ended(ended(runs), (0,)) or place.flaw_of_rest(rest, set(IDS), 2)


def starter_killed(place: Life, draw: random.Random, rest: Way) -> str | None:
    """kill −9 of a run that started Ray: nothing of it stays."""
    runs = place.begin(RAY_OF_ITS_OWN)
    measuring(place, draw, runs)
    safe, network = place.kept(), processes.network(runs[0].pid)
    runs[0].send(signal.SIGKILL)
    outcomes = ended(runs)
    if there := processes.left(lambda: processes.in_network(network)):
        told = processes.named(there)
        processes.end(there)
        return f"processes are left: {told}"
    return place.flaw_of_ended(outcomes, (0, -signal.SIGKILL)) or place.flaw_of_rest(rest, safe, 2)

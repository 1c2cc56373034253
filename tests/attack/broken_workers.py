"""Workers and who coordinates them: killed, stopped, hanging. None where nothing is wrong in the end."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from tests.attack import processes
from tests.attack.counted import IDS
from tests.attack.life import WORKERS, Life, Way, ended
from tests.attack.running import Running
from tests.support.patience import patience

HASTE = ("--timeout-per-sample", "3")
ENDS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def worker_killed(place: Life, draw: random.Random, rest: Way, way: Way = WORKERS) -> str | None:
    """kill −9 of one of two workers at a random moment of the measuring: the run does not mind."""
    runs = place.begin(way)
    measuring(place, draw, runs)
    _strike(place, draw, signal.SIGKILL)
    return place.flaw_of_ended(ended(runs), (0,)) or place.flaw_of_rest(rest, set(IDS), 2)


def workers_killed(place: Life, draw: random.Random, rest: Way, way: Way = WORKERS) -> str | None:
    """kill −9 of workers again and again: a sample may be given up after two, by name, and is measured later."""
    runs = place.begin(way)
    for _ in range(draw.randint(2, 6)):
        measuring(place, draw, runs)
        _strike(place, draw, signal.SIGKILL)
    return place.flaw_of_ended(ended(runs), (0, 1, 2)) or place.flaw_of_rest(rest, set(), 2)


def worker_killed_at_its_start(place: Life, draw: random.Random, rest: Way, way: Way = WORKERS) -> str | None:
    """kill −9 of one of two workers while it is made ready."""
    runs = place.begin(way)
    place.until(lambda: len(place.workers()) == 2, runs)
    time.sleep(draw.random() * 2)
    _strike(place, draw, signal.SIGKILL)
    return place.flaw_of_ended(ended(runs), (0,)) or place.flaw_of_rest(rest, set(IDS), 2)


def worker_hangs(place: Life, draw: random.Random, rest: Way, way: Way = WORKERS) -> str | None:
    """A worker hangs on one or two samples: over its time it is ended, and what it did is done again."""
    for sample in draw.sample(IDS, draw.randint(1, 2)):
        place.counted.hang(sample)
    return place.flaw_of_ended(ended(place.begin(way, *HASTE)), (0,)) or place.flaw_of_rest(rest, set(IDS), 2)


def worker_stopped(place: Life, draw: random.Random, rest: Way, way: Way = WORKERS) -> str | None:
    """SIGSTOP of a worker at a random moment of the measuring."""
    runs = place.begin(way, *HASTE)
    measuring(place, draw, runs)
    _strike(place, draw, signal.SIGSTOP)
    return place.flaw_of_ended(ended(runs), (0,)) or place.flaw_of_rest(rest, set(IDS), 2)


def ended_by(place: Life, draw: random.Random, rest: Way, way: Way, number: int) -> str | None:
    """A signal to every command at a random moment: all end within seconds, with their workers, and all is kept."""
    runs = place.begin(way)
    place.until(place.begun, runs)
    if draw.random() < 0.7:
        measuring(place, draw, runs)
    else:
        time.sleep(draw.random() * 3)
    safe = place.kept()
    for run in runs:
        run.send(number)
    began = time.monotonic()
    outcomes = ended(runs)
    if (seconds := time.monotonic() - began) > patience(processes.ENDED_S):
        return f"ends after {seconds:.1f} s"
    return place.flaw_of_ended(outcomes, (0, ENDS[signal.Signals(number)])) or place.flaw_of_rest(rest, safe, 2)


def measuring(place: Life, draw: random.Random, runs: Sequence[Running]) -> None:
    """Wait for a random moment while samples are measured."""
    enough = draw.randint(1, len(IDS))
    place.until(lambda: place.counted.begun() >= enough, runs)
    time.sleep(draw.random() * 0.15)


def _strike(place: Life, draw: random.Random, number: int) -> None:
    """A signal to one worker, where one is there."""
    there = place.workers()
    with suppress(psutil.NoSuchProcess):
        if there:
            draw.choice(there).send_signal(number)

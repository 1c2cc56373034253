"""Shards and what joins them, killed. Each kind returns what is wrong in the end, None where nothing is."""

from __future__ import annotations

import random
import signal
import time
from functools import partial

from tests.attack.accidents import killed_at_change
from tests.attack.life import HERE, SHARDS, Life, Way, ended

KILLED = (0, -signal.SIGKILL)


def shards_killed(place: Life, draw: random.Random, rest: Way, count: int) -> str | None:
    """kill −9 of one or two of three shards at once, at a random moment."""
    runs = place.begin(SHARDS)
    time.sleep(draw.random() * place.seconds[SHARDS.name])
    safe = place.kept()
    for run in draw.sample(runs, count):
        run.send(signal.SIGKILL)
    return place.flaw_of_ended(ended(runs), KILLED) or place.flaw_of_rest(rest, safe, 1)


def shards_killed_at_changes(place: Life, draw: random.Random, rest: Way) -> str | None:
    """kill −9 of each shard just before one of the changes that it makes on disk."""
    runs = [
        run
        for words in SHARDS.commands
        for run in place.begin(Way("shard", (words,)), before=_killed(place, draw, SHARDS.name))
    ]
    return place.flaw_of_ended(ended(runs), KILLED) or place.flaw_of_rest(rest, set(), 1)


def merge_killed(place: Life, draw: random.Random, rest: Way) -> str | None:
    """kill −9 of a merge just before one of its changes on disk, after the rename and among removals too."""
    place.all_shards()
    safe = place.kept()
    run = place.merge(_killed(place, draw, "merge"))
    if flaw := place.flaw_of_ended(ended([run]), KILLED):
        return flaw
    if lost := safe - place.kept():
        return f"lost: {sorted(lost)}"
    if flaw := place.flaw_of_ended(ended([place.merge()]), (0,)):
        return f"the second merge: {flaw}"
    return place.flaw_of_rest(rest, safe, 0)


def merge_killed_at_a_moment(place: Life, draw: random.Random, rest: Way) -> str | None:
    """kill −9 of a merge at a random moment; another way to go on finds everything there."""
    place.all_shards()
    safe = place.kept()
    run = place.merge()
    time.sleep(draw.random() * place.seconds["merge"])
    run.send(signal.SIGKILL)
    return place.flaw_of_ended(ended([run]), KILLED) or place.flaw_of_rest(rest, safe, 0)


def going_on_killed(place: Life, draw: random.Random, rest: Way) -> str | None:
    """kill −9 of a run in one process that goes on from shards which were cut off."""
    runs, enough = place.begin(SHARDS), draw.randint(2, 5)
    place.until(lambda: place.counted.begun() >= enough, runs)
    for run in runs:
        run.send(signal.SIGKILL)
    if flaw := place.flaw_of_ended(ended(runs), KILLED):
        return flaw
    safe = place.kept()
    runs = place.begin(HERE, before=_killed(place, draw, HERE.name))
    return place.flaw_of_ended(ended(runs), KILLED) or place.flaw_of_rest(rest, safe, 2)


def _killed(place: Life, draw: random.Random, name: str) -> partial[None]:
    """What kills a process at one of its changes on disk, or hardly ever at none."""
    return partial(killed_at_change, place.shared, draw.randrange(place.changes[name] + 1))

"""What befalls a run in shards, worker processes or on Ray, and how often `make chaos` tries each kind."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.attack import broken_disks, broken_rays, broken_shards, broken_workers, ray_nodes
from tests.attack.arena import can_mount
from tests.attack.life import HERE, RAY, SHARDS, WORKERS, Life, Way

Disturb = Callable[[Life, random.Random, Way], str | None]


@dataclass(frozen=True)
class Kind:
    """One kind of accident.

    Attributes:
        count: how often `make chaos` tries it.
        disturb: gets a place as before any run, what draws its moments, and how the run goes on.
        rests: in what ways it may go on.
        needs: `disk` or `ray`, which not every machine lets us have.
        in_suite: whether the suite tries it once; all of them would take minutes.
    """

    count: int
    disturb: Disturb
    rests: tuple[Way, ...] = (HERE, HERE, HERE, SHARDS)
    needs: str = ""
    in_suite: bool = False


def _with(disturb: Callable[..., str | None], **more: object) -> Disturb:
    return lambda place, draw, rest: disturb(place, draw, rest, **more)


def _ended(way: Way, number: int) -> Disturb:
    return _with(broken_workers.ended_by, way=way, number=number)


_RAY = {"rests": (HERE,), "needs": "ray"}
KINDS = {
    "kill -9 of a shard": Kind(12, _with(broken_shards.shards_killed, count=1)),
    "kill -9 of two shards at once": Kind(12, _with(broken_shards.shards_killed, count=2), in_suite=True),
    "kill -9 of shards at changes on disk": Kind(16, broken_shards.shards_killed_at_changes, in_suite=True),
    "kill -9 of a merge at a change on disk": Kind(24, broken_shards.merge_killed, in_suite=True),
    "kill -9 of a merge at a random moment": Kind(8, broken_shards.merge_killed_at_a_moment),
    "kill -9 of a run that goes on from shards": Kind(12, broken_shards.going_on_killed, in_suite=True),
    "kill -9 of a worker": Kind(8, broken_workers.worker_killed, in_suite=True),
    "kill -9 of a worker that starts": Kind(4, broken_workers.worker_killed_at_its_start),
    "kill -9 of workers again and again": Kind(6, broken_workers.workers_killed),
    "kill -9 of the workers' coordinator": Kind(8, _ended(WORKERS, signal.SIGKILL), in_suite=True),
    "a worker hangs": Kind(4, broken_workers.worker_hangs),
    "SIGSTOP of a worker": Kind(4, broken_workers.worker_stopped),
    "kill -9 of an actor": Kind(6, _with(broken_workers.worker_killed, way=RAY), **_RAY),
    "kill -9 of actors again and again": Kind(3, _with(broken_workers.workers_killed, way=RAY), **_RAY),
    "kill -9 of the actors' coordinator": Kind(5, _ended(RAY, signal.SIGKILL), **_RAY),
    "kill -9 of a run that started Ray": Kind(3, broken_rays.starter_killed, **_RAY),
    "kill -9 of a node": Kind(5, broken_rays.node_killed, **_RAY),
    "SIGINT of one process": Kind(4, _ended(HERE, signal.SIGINT)),
    "SIGINT of shards": Kind(4, _ended(SHARDS, signal.SIGINT)),
    "SIGTERM of shards": Kind(4, _ended(SHARDS, signal.SIGTERM)),
    "SIGINT of workers": Kind(4, _ended(WORKERS, signal.SIGINT)),
    "SIGTERM of workers": Kind(4, _ended(WORKERS, signal.SIGTERM)),
    "SIGINT on Ray": Kind(2, _ended(RAY, signal.SIGINT), **_RAY),
    "SIGTERM on Ray": Kind(2, _ended(RAY, signal.SIGTERM), **_RAY),
    "full disk for shards": Kind(8, _with(broken_disks.full_for, way=SHARDS), needs="disk", in_suite=True),
    "full disk for a merge": Kind(6, broken_disks.full_for_the_merge, needs="disk"),
    "full disk for workers": Kind(3, _with(broken_disks.full_for, way=WORKERS), needs="disk"),
    "the folder vanishes under shards": Kind(6, _with(broken_disks.vanishes_for, way=SHARDS), in_suite=True),
    "the folder vanishes under workers": Kind(3, _with(broken_disks.vanishes_for, way=WORKERS)),
    "a shard's journal is removed": Kind(4, _with(broken_disks.without_a_journal, way=SHARDS)),
    "begun here, gone on with by workers": Kind(2, _ended(HERE, signal.SIGKILL), (WORKERS,)),
    "begun by workers, gone on with in shards": Kind(2, _ended(WORKERS, signal.SIGKILL), (SHARDS,)),
    "begun in shards, gone on with by workers": Kind(2, _ended(SHARDS, signal.SIGKILL), (WORKERS,)),
    "begun in shards, gone on with on Ray": Kind(2, _ended(SHARDS, signal.SIGKILL), (RAY,), "ray"),
    "begun on Ray, gone on with in shards": Kind(2, _ended(RAY, signal.SIGKILL), (SHARDS,), "ray"),
}
"""Kinds by name."""


@dataclass(frozen=True)
class Accident:
    """One accident of a kind, whose moments its seed draws."""

    kind: str
    seed: int

    def flaw(self, place: Life) -> str | None:
        """What it leaves wrong, in a place as before any run."""
        draw, kind = random.Random(self.seed), KINDS[self.kind]
        place.clear()
        return kind.disturb(place, draw, draw.choice(kind.rests))


def accidents(seed: int, counts: dict[str, int]) -> Iterator[Accident]:
    """So many of each kind, one of each after the other as long as there are some, alike for one seed."""
    draw = random.Random(seed)
    for turn in range(max(counts.values(), default=0)):
        yield from (Accident(kind, draw.getrandbits(32)) for kind, count in counts.items() if turn < count)


def possible(kind: str) -> bool:
    """Whether this machine lets us have what a kind needs."""
    return {"": True, "disk": can_mount(), "ray": ray_nodes.possible()}[KINDS[kind].needs]

"""What befalls a run in shards, worker processes or on Ray, and how often `make chaos` tries each kind."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.attack import broken_disks, broken_shards, broken_workers
from tests.attack.life import HERE, SHARDS, WORKERS, Life, Way

Disturb = Callable[[Life, random.Random, Way], str | None]


@dataclass(frozen=True)
class Kind:
    """One kind of accident.

    Attributes:
        count: how often `make chaos` tries it.
        disturb: gets a place as before any run, what draws its moments, and how the run goes on.
        rests: in what ways it may go on.
        needs: `disk` or `ray`, which not every machine lets us have.
    """

    count: int
    disturb: Disturb
    rests: tuple[Way, ...] = (HERE, HERE, HERE, SHARDS)
    needs: str = ""


def _with(disturb: Callable[..., str | None], **more: object) -> Disturb:
    return lambda place, draw, rest: disturb(place, draw, rest, **more)


KINDS = {
    "kill -9 of a shard": Kind(12, _with(broken_shards.shards_killed, count=1)),
    "kill -9 of two shards at once": Kind(12, _with(broken_shards.shards_killed, count=2)),
    "kill -9 of shards at a change on disk": Kind(20, broken_shards.shards_killed_at_changes),
    "kill -9 of a merge at a change on disk": Kind(30, broken_shards.merge_killed),
    "kill -9 of a merge at a random moment": Kind(10, broken_shards.merge_killed_at_a_moment, (HERE, SHARDS)),
    "kill -9 of a run that goes on from shards": Kind(14, broken_shards.going_on_killed),
    "kill -9 of a worker": Kind(8, broken_workers.worker_killed),
    "kill -9 of a worker that starts": Kind(4, broken_workers.worker_killed_at_its_start),
    "kill -9 of workers again and again": Kind(6, broken_workers.workers_killed),
    "kill -9 of the coordinator": Kind(8, _with(broken_workers.ended_by, way=WORKERS, number=signal.SIGKILL)),
    "a worker hangs": Kind(4, broken_workers.worker_hangs),
    "SIGSTOP of a worker": Kind(4, broken_workers.worker_stopped),
    "SIGINT of workers": Kind(4, _with(broken_workers.ended_by, way=WORKERS, number=signal.SIGINT)),
    "SIGTERM of workers": Kind(4, _with(broken_workers.ended_by, way=WORKERS, number=signal.SIGTERM)),
    "SIGINT of shards": Kind(5, _with(broken_workers.ended_by, way=SHARDS, number=signal.SIGINT)),
    "SIGTERM of shards": Kind(5, _with(broken_workers.ended_by, way=SHARDS, number=signal.SIGTERM)),
    "full disk for shards": Kind(8, _with(broken_disks.full_for, way=SHARDS), needs="disk"),
    "full disk for a merge": Kind(6, broken_disks.full_for_the_merge, needs="disk"),
    "full disk for workers": Kind(3, _with(broken_disks.full_for, way=WORKERS), needs="disk"),
    "the shared folder vanishes under shards": Kind(8, _with(broken_disks.vanishes_for, way=SHARDS)),
    "the shared folder vanishes under workers": Kind(3, _with(broken_disks.vanishes_for, way=WORKERS)),
    "a journal is removed": Kind(4, _with(broken_disks.without_a_journal, way=SHARDS)),
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

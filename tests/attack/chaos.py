"""`make chaos`: a run is killed, stopped, starved and crowded; the same command then leaves the undisturbed run's file.

First one in a single process, then those in shards, in worker processes and on Ray (`cluster_chaos`).

No finished sample is lost or measured twice: the command, run again, says how many samples are there already, and its
file equals the one that nothing disturbed.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.attack import disturbances
from tests.attack.arena import SAMPLES, Arena, arena, can_mount
from tests.attack.cluster_chaos import KINDS, accidents, possible
from tests.attack.undisturbed import life

COUNTS = {
    "kill -9 at a random moment": 44,
    "kill -9 in the final write": 8,
    "SIGINT": 6,
    "SIGTERM": 6,
    "journal removed": 4,
    "two writers at once": 4,
    "two that take over": 4,
    "full disk": 10,
    "no room in files": 2,
}
"""How often `make chaos` tries each."""


@dataclass(frozen=True)
class Try:
    """One disturbance."""

    kind: str
    disturb: Callable[[Arena], str | None]


def tries(seed: int, counts: dict[str, int]) -> Iterator[Try]:
    """So many of each kind, alike for one seed."""
    draw = random.Random(seed)
    kinds: dict[str, Callable[[], Callable[[Arena], str | None]]] = {
        "kill -9 at a random moment": lambda: partial(disturbances.killed_after, share=draw.random()),
        "kill -9 in the final write": lambda: partial(disturbances.killed_in_the_final_write, share=draw.random() / 2),
        "SIGINT": lambda: partial(disturbances.stopped_by, signal.SIGINT, samples=draw.randint(1, SAMPLES)),
        "SIGTERM": lambda: partial(disturbances.stopped_by, signal.SIGTERM, samples=draw.randint(1, SAMPLES)),
        "journal removed": lambda: partial(disturbances.without_a_journal, samples=draw.randint(1, SAMPLES - 1)),
        "two writers at once": lambda: disturbances.two_at_once,
        "two that take over": lambda: partial(disturbances.two_take_over, samples=draw.randint(1, SAMPLES - 1)),
        "full disk": lambda: partial(disturbances.on_a_full_disk, share=draw.uniform(0, 2)),
        "no room in files": lambda: disturbances.in_small_files,
    }
    for kind, count in counts.items():
        yield from (Try(kind, kinds[kind]()) for _ in range(count))


def flaw(one: Try, place: Arena) -> str | None:
    """What the disturbance leaves wrong, in a place as before any run."""
    place.clear()
    return one.disturb(place)


def main() -> int:
    """Try everything and say per kind how often it held; 1 where something did not."""
    options = argparse.ArgumentParser(prog="python -m tests.attack.chaos")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="kinds in whose name this regular expression is found")
    asked, start = options.parse_args(), time.monotonic()
    held: dict[str, list[bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, wrong in _tried(asked.seed, asked.only, Path(folder)):
            held.setdefault(name, []).append(wrong is None)
            print(f"  {name}: {wrong or 'held'}, {time.monotonic() - start:.0f} s", flush=True)
    for name, of_kind in held.items():
        print(f"{name}: {sum(of_kind)} of {len(of_kind)} held", flush=True)
    everything = [one for of_kind in held.values() for one in of_kind]
    print(f"chaos: {sum(everything)} of {len(everything)} held, {time.monotonic() - start:.0f} s", flush=True)
    return int(not all(everything))


def _tried(seed: int, only: str, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Every kind that is asked for and can be had here, and what each of its tries leaves wrong."""
    counts = {kind: count for kind, count in COUNTS.items() if re.search(only, kind)}
    if not can_mount():
        counts.pop("full disk", None)
    if counts:
        with arena(folder / "one") as place:
            yield from ((one.kind, flaw(one, place)) for one in tries(seed, counts))
    kinds = {kind: one.count for kind, one in KINDS.items() if re.search(only, kind) and possible(kind)}
    if kinds:
        with life(folder / "many", any(KINDS[kind].needs == "ray" for kind in kinds)) as many:
            yield from ((one.kind, one.flaw(many)) for one in accidents(seed, kinds))


if __name__ == "__main__":
    sys.exit(main())

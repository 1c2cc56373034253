"""`make chaos`: a run is killed, stopped, starved and crowded; the same command then leaves the undisturbed run's file.

No finished sample is lost or measured twice: the command, run again, says how many samples are there already, and its
file equals the one that nothing disturbed.
"""

from __future__ import annotations

import argparse
import random
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
    start, held = time.monotonic(), {kind: 0 for kind in COUNTS}
    counts = COUNTS if can_mount() else {**COUNTS, "full disk": 0}
    with tempfile.TemporaryDirectory() as folder, arena(Path(folder)) as place:
        for one in tries(options.parse_args().seed, counts):
            wrong = flaw(one, place)
            held[one.kind] += wrong is None
            if wrong:
                print(f"  {one.kind}: {wrong}", flush=True)
    for kind, count in counts.items():
        print(f"{kind}: {held[kind]} of {count} held", flush=True)
    print(f"chaos: {sum(held.values())} of {sum(counts.values())} held, {time.monotonic() - start:.0f} s", flush=True)
    return int(held != counts)


if __name__ == "__main__":
    sys.exit(main())

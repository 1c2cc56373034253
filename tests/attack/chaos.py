"""`make chaos`: runs are killed, stopped, starved and crowded; the same command then leaves the undisturbed file."""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from perturbkv.storage.run.journal import SUFFIX
from tests.attack import ray_cluster
from tests.attack.case import Outcome, Running
from tests.attack.disturbed_run import (
    END_S,
    HERE,
    IDS,
    LENGTHS,
    LONGEST_S,
    MERGE,
    OWN_RAY,
    RAY,
    SHARDS,
    WORKERS,
    DisturbedRun,
    Way,
    flaw_of_outcome,
    flaw_of_processes,
    kill_at_change,
)  # fmt: skip
from tests.attack.outputs import without_space
from tests.support.dying import MOMENTS, SENT
from tests.support.patience import patience

KILLED = (0, -signal.SIGKILL)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
AGENTS_S = 75.0
"""Ray 2.60's agents tell a dead node of its death for a minute before they end."""
Disturb = Callable[[DisturbedRun, random.Random, Way], str | None]
"""Disturbs a run and has the rest measured in a way; returns what is wrong in the end, None where nothing is."""


def killed(run: DisturbedRun, draw: random.Random, rest: Way, way: Way, count: int = 1) -> str | None:
    """Kill so many of a way's processes at once, at a random moment."""
    seconds, _ = run.undisturbed(way)
    runs = run.begin(way)
    time.sleep(draw.random() * seconds)
    safe = run.kept()
    for one in draw.sample(runs, count):
        one.send(signal.SIGKILL)
    return run.check(runs, KILLED, rest, safe, int(way is not MERGE))


def killed_at_a_change(run: DisturbedRun, draw: random.Random, rest: Way, way: Way) -> str | None:
    """Kill each process of a way just before one of the changes that it makes on disk."""
    _, changes = run.undisturbed(way)
    run.prepare(way)
    safe = run.kept()
    runs = [
        one
        for words in way.commands
        for one in run.begin(Way("", (words,)), before=partial(kill_at_change, run.shared, draw.randrange(changes + 1)))
    ]
    return run.check(runs, KILLED, rest, safe, int(way is not MERGE))


def killed_in_the_final_write(run: DisturbedRun, draw: random.Random, rest: Way) -> str | None:
    """Kill a run while its final file is written, some of its bytes on the disk."""
    least = draw.random() / 2 * run.expected.stat().st_size

    def half_written() -> bool:
        with suppress(FileNotFoundError):
            return any(path.stat().st_size >= least for path in run.shared.glob("t.h5.tmp-*"))
        return True  # it was there a moment ago

    for _ in range(20):
        run.clear()
        runs = run.begin(HERE)
        run.until(half_written, runs)
        runs[0].send(signal.SIGKILL)
        runs[0].outcome(LONGEST_S)
        if any(run.shared.glob("t.h5.tmp-*")):
            return run.check(runs, KILLED, rest, set(IDS), 1)
    return "the final write was never met"


def killed_while_going_on(run: DisturbedRun, draw: random.Random, rest: Way) -> str | None:
    """Kill shards, then a run in one process that goes on from them at a change on disk."""
    _, changes = run.undisturbed(HERE)
    runs, enough = run.begin(SHARDS), draw.randint(2, 5)
    run.until(lambda: run.begun() >= enough, runs)
    for one in runs:
        one.send(signal.SIGKILL)
    if flaw := run.flaw_of_end(runs, KILLED):
        return flaw
    safe = run.kept()
    runs = run.begin(HERE, before=partial(kill_at_change, run.shared, draw.randrange(changes + 1)))
    return run.check(runs, KILLED, rest, safe, 2)


def signalled(run: DisturbedRun, draw: random.Random, rest: Way, way: Way, number: signal.Signals) -> str | None:
    """Send a signal to every command at a random moment: all end within seconds, with their workers."""
    runs = run.begin(way)
    run.until(lambda: any(run.shared.glob(".*.lock")), runs)
    if draw.random() < 0.7:
        wait_for_measuring(run, draw, runs)
    else:
        time.sleep(draw.random() * 3)
    safe = run.kept()
    for one in runs:
        one.send(number)
    begin = time.monotonic()
    for one in runs:
        while one.lives():
            if (seconds := time.monotonic() - begin) > patience(END_S):
                return f"still there after {seconds:.1f} s"
            time.sleep(0.01)
    return run.check(runs, (0, CODES[number]), rest, safe, 2)


def wait_for_measuring(run: DisturbedRun, draw: random.Random, runs: Sequence[Running]) -> None:
    """Wait for a random moment while samples are measured."""
    enough = draw.randint(1, len(IDS))
    run.until(lambda: run.begun() >= enough, runs)
    time.sleep(draw.random() * 0.15)


def worker_struck(
    run: DisturbedRun,
    draw: random.Random,
    rest: Way,
    way: Way = WORKERS,
    number: int = signal.SIGKILL,
    options: tuple[str, ...] = (),
    again: bool = False,
) -> str | None:
    """Send a signal to a worker that measures: the run does not mind; `again` and again, samples may be given up."""
    runs = run.begin(way, *options)
    for _ in range(draw.randint(2, 6) if again else 1):
        wait_for_measuring(run, draw, runs)
        _strike(run, draw, number)
    return run.check(runs, (0, 1, 2) if again else (0,), rest, set() if again else set(IDS), 2)


def worker_killed(run: DisturbedRun, draw: random.Random, rest: Way, moment: str) -> str | None:
    """Kill a worker that has begun a sample, or sent half of it or all: what did not arrive is measured again."""
    (request := run.notes / f"{moment}-{draw.choice(LENGTHS)}").touch()
    if flaw := run.flaw_of_end(run.begin(WORKERS), (0,)):
        return flaw
    if request.exists():
        return f"no worker was killed with a sample {moment}"
    return run.flaw_of_rest(rest, set(IDS), 1 if moment == SENT else 2)


def worker_killed_at_its_start(run: DisturbedRun, draw: random.Random, rest: Way) -> str | None:
    """Kill one of two workers while it loads the model."""
    runs = run.begin(WORKERS)
    run.until(lambda: len(run.workers()) == 2, runs)
    time.sleep(draw.random() * 2)
    _strike(run, draw, signal.SIGKILL)
    return run.check(runs, (0,), rest, set(IDS), 2)


def _strike(run: DisturbedRun, draw: random.Random, number: int) -> None:
    with suppress(psutil.NoSuchProcess, IndexError):
        draw.choice(run.workers()).send_signal(number)


def worker_hangs(run: DisturbedRun, draw: random.Random, rest: Way) -> str | None:
    """Let a worker hang on one or two samples: over its time it is ended, and what it did is done again."""
    for sample in draw.sample(IDS, draw.randint(1, 2)):
        (run.notes / f"hang-{sample[1:]}").touch()
    return run.check(run.begin(WORKERS, "--timeout-per-sample", "3"), (0,), rest, set(IDS), 2)


def node_killed(run: DisturbedRun, draw: random.Random, rest: Way) -> str | None:
    """Kill one of two Ray nodes while it measures: the other one does the rest."""
    runs = run.begin(RAY)
    wait_for_measuring(run, draw, runs)
    assert run.cluster is not None
    run.cluster.kill_node()
    return run.check(runs, (0,), rest, set(IDS), 2)


def ray_starter_killed(run: DisturbedRun, draw: random.Random, rest: Way) -> str | None:
    """Kill a run that started Ray: nothing of it stays, but for Ray's own agents, and those not for long."""
    runs = run.begin(OWN_RAY)
    wait_for_measuring(run, draw, runs)
    safe, space = run.kept(), ray_cluster.network(runs[0].pid)
    runs[0].send(signal.SIGKILL)
    runs[0].outcome(LONGEST_S)
    agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    others = [lambda: [one for one in ray_cluster.in_network(space) if ray_cluster.title(one).strip() not in agents]]
    if flaw := flaw_of_processes(others[0]) or flaw_of_processes(lambda: ray_cluster.in_network(space), AGENTS_S):
        return flaw
    return run.check(runs, KILLED, rest, safe, 2)


@contextmanager
def disk(folder: Path, size: int) -> Iterator[None]:
    """Mount a disk of so many bytes at a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def full_disk(run: DisturbedRun, draw: random.Random, rest: Way, way: Way) -> str | None:
    """Have a disk that takes no more than a share of what a run needs, then more."""
    needed = run.expected.stat().st_size
    with disk(run.shared, needed * 10):
        run.prepare(way)
        safe, filler = run.kept(), run.shared / "filler"
        space = draw.uniform(0, 1 if way is MERGE else 2.5) * needed
        filler.write_bytes(bytes(int(shutil.disk_usage(run.shared).free - space)))
        if flaw := run.flaw_of_end(run.begin(way), (0, 1, 2)):
            return flaw
        filler.unlink()
        return run.flaw_of_rest(rest, safe, 0 if way is MERGE else 2)


def no_space_in_files(run: DisturbedRun, draw: random.Random, rest: Way) -> str | None:
    """Let no file grow: the limit of a shell, or of a file system."""
    return run.check(run.begin(HERE, before=without_space), (2,), rest, set(), 2)


def folder_vanishes(run: DisturbedRun, draw: random.Random, rest: Way, way: Way) -> str | None:
    """Take the shared folder away for a while; it comes back as it was when it went."""
    runs, away, enough = run.begin(way), run.folder / "away", draw.randint(1, 5)
    run.until(lambda: run.begun() >= enough and len([*run.shared.glob(f"*{SUFFIX}")]) >= len(runs), runs)
    run.shared.rename(away)  # of a run that begins while it is away, the folder is the user's to make
    time.sleep(draw.uniform(0.05, 1.5))
    if made_anew := run.shared.exists():
        shutil.rmtree(run.shared)
    away.rename(run.shared)
    flaw = run.check(runs, (0, 1, 2), rest, run.kept(), 2, tidy=False)  # what was away could not be tidied up
    return "the shared folder was made anew" if made_anew else flaw


def journal_removed(run: DisturbedRun, draw: random.Random, rest: Way, way: Way) -> str | None:
    """Remove a journal while it is written: what comes after it survives, the rest is measured again."""
    runs = run.begin(way)
    run.until(lambda: any(run.shared.glob(f"*{SUFFIX}/*.npz")), runs)
    shutil.rmtree(draw.choice([*run.shared.glob(f"*{SUFFIX}"), run.shared / "none"]), ignore_errors=True)
    return run.check(runs, (0, 1, 2), rest, set(), 2)


def two_writers(run: DisturbedRun, draw: random.Random, rest: Way) -> str | None:
    """Start a second run, which is told of it, and a third one, which waits for the first."""
    (first,) = run.begin(HERE)
    run.until(lambda: any(run.shared.glob(".*.lock")), [first])
    second = run.begin(HERE)[0].outcome(LONGEST_S)
    runs = [first, *run.begin(HERE, "--wait")]
    return _flaw_of_second(second) or run.check(runs, (0,), rest, set(IDS), 1)


def two_take_over(run: DisturbedRun, draw: random.Random, rest: Way) -> str | None:
    """Let two processes find what a killed one held: one of them goes on."""
    (first,), enough = run.begin(HERE), draw.randint(1, len(IDS) - 1)
    run.until(lambda: len(run.kept()) >= enough, [first])
    first.send(signal.SIGKILL)
    first.outcome(LONGEST_S)
    runs = [*run.begin(HERE), *run.begin(HERE)]
    outcomes = sorted((one.outcome(LONGEST_S) for one in runs), key=lambda outcome: (outcome.code, -len(outcome.err)))
    if outcomes[0].code:
        return f"none of the two went on: {outcomes[0].last}"
    return (_flaw_of_second(outcomes[1]) if outcomes[1].code else None) or run.flaw_of_rest(rest, set(IDS), 2)


def _flaw_of_second(outcome: Outcome) -> str | None:
    """Return what is wrong with the run that came second: it is told of the other, or finds all finished."""
    if outcome.code == 0:
        return None if f"{len(IDS)} of {len(IDS)} samples are there" in outcome.err else "two runs measured at once"
    return flaw_of_outcome(outcome, (2,)) or (
        None if "for this command alone" in outcome.err else f"not told of the other: {outcome.last}"
    )


@dataclass(frozen=True)
class Kind:
    """One kind of disturbance: how often it is tried, what happens, how the run may go on, and what it needs."""

    count: int
    disturb: Disturb
    rests: tuple[Way, ...] = (HERE, HERE, HERE, SHARDS)
    needs: str = ""


def _do(disturb: Callable[..., str | None], **more: object) -> Disturb:
    return partial(disturb, **more)


_INT, _TERM, _KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
_MERGES, _HASTE = (HERE, SHARDS, MERGE, MERGE), ("--timeout-per-sample", "3")
KINDS = {
    "kill -9 of one process": Kind(44, _do(killed, way=HERE), (HERE,)),
    "kill -9 of one process at a change on disk": Kind(8, _do(killed_at_a_change, way=HERE), (HERE,)),
    "kill -9 of a shard": Kind(12, _do(killed, way=SHARDS)),
    "kill -9 of two shards at once": Kind(12, _do(killed, way=SHARDS, count=2)),
    "kill -9 of a merge": Kind(8, _do(killed, way=MERGE), _MERGES),
    "kill -9 of shards at changes on disk": Kind(16, _do(killed_at_a_change, way=SHARDS)),
    "kill -9 of a merge at a change on disk": Kind(24, _do(killed_at_a_change, way=MERGE), _MERGES),
    "kill -9 in the final write": Kind(8, killed_in_the_final_write, (HERE,)),
    "kill -9 of a run that goes on from shards": Kind(12, killed_while_going_on),
    **{f"kill -9 of a worker, its sample {moment}": Kind(4, _do(worker_killed, moment=moment)) for moment in MOMENTS},
    "kill -9 of a worker that starts": Kind(4, worker_killed_at_its_start),
    "kill -9 of workers again and again": Kind(6, _do(worker_struck, again=True)),
    "kill -9 of the workers' coordinator": Kind(8, _do(signalled, way=WORKERS, number=_KILL)),
    "a worker hangs": Kind(4, worker_hangs),
    "SIGSTOP of a worker": Kind(4, _do(worker_struck, number=signal.SIGSTOP, options=_HASTE)),
    "kill -9 of an actor": Kind(6, _do(worker_struck, way=RAY), (HERE,), "ray"),
    "kill -9 of actors again and again": Kind(3, _do(worker_struck, way=RAY, again=True), (HERE,), "ray"),
    "kill -9 of the actors' coordinator": Kind(5, _do(signalled, way=RAY, number=_KILL), (HERE,), "ray"),
    "kill -9 of a run that started Ray": Kind(3, ray_starter_killed, (HERE,), "ray"),
    "kill -9 of a node": Kind(5, node_killed, (HERE,), "ray"),
    "SIGINT of one process": Kind(10, _do(signalled, way=HERE, number=_INT)),
    "SIGTERM of one process": Kind(6, _do(signalled, way=HERE, number=_TERM)),
    "SIGINT of shards": Kind(4, _do(signalled, way=SHARDS, number=_INT)),
    "SIGTERM of shards": Kind(4, _do(signalled, way=SHARDS, number=_TERM)),
    "SIGINT of workers": Kind(4, _do(signalled, way=WORKERS, number=_INT)),
    "SIGTERM of workers": Kind(4, _do(signalled, way=WORKERS, number=_TERM)),
    "SIGINT on Ray": Kind(2, _do(signalled, way=RAY, number=_INT), (HERE,), "ray"),
    "SIGTERM on Ray": Kind(2, _do(signalled, way=RAY, number=_TERM), (HERE,), "ray"),
    "two writers at once": Kind(4, two_writers, (HERE,)),
    "two that take over": Kind(4, two_take_over, (HERE,)),
    "no space in files": Kind(2, no_space_in_files, (HERE,)),
    "full disk for one process": Kind(10, _do(full_disk, way=HERE), (HERE,), "disk"),
    "full disk for shards": Kind(8, _do(full_disk, way=SHARDS), needs="disk"),
    "full disk for a merge": Kind(6, _do(full_disk, way=MERGE), _MERGES, "disk"),
    "full disk for workers": Kind(3, _do(full_disk, way=WORKERS), needs="disk"),
    "the folder vanishes under shards": Kind(6, _do(folder_vanishes, way=SHARDS)),
    "the folder vanishes under workers": Kind(3, _do(folder_vanishes, way=WORKERS)),
    "a journal is removed": Kind(4, _do(journal_removed, way=HERE), (HERE,)),
    "a shard's journal is removed": Kind(4, _do(journal_removed, way=SHARDS)),
    "begun in one process, gone on with by workers": Kind(2, _do(signalled, way=HERE, number=_KILL), (WORKERS,)),
    "begun by workers, gone on with in shards": Kind(2, _do(signalled, way=WORKERS, number=_KILL), (SHARDS,)),
    "begun in shards, gone on with by workers": Kind(2, _do(signalled, way=SHARDS, number=_KILL), (WORKERS,)),
    "begun in shards, gone on with on Ray": Kind(2, _do(signalled, way=SHARDS, number=_KILL), (RAY,), "ray"),
    "begun on Ray, gone on with in shards": Kind(2, _do(signalled, way=RAY, number=_KILL), (SHARDS,), "ray"),
}
"""Kinds by name."""


def disturb(name: str, seed: int, run: DisturbedRun) -> str | None:
    """Return what one disturbance leaves wrong, in a run as before it begins; the seed draws its moments."""
    draw, kind = random.Random(seed), KINDS[name]
    run.clear()
    return kind.disturb(run, draw, draw.choice(kind.rests))


def can_have(needs: str) -> bool:
    """Return whether this machine has what a kind needs."""
    if needs == "disk":
        with (
            tempfile.TemporaryDirectory() as folder,
            suppress(subprocess.CalledProcessError),
            disk(Path(folder), 2**20),
        ):
            return True
        return False
    return needs == "" or ray_cluster.possible()


def main() -> int:
    """Try every kind, one of each in turn, and say how often each held; 1 where something did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack.chaos")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds in whose name this regular expression is found")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="the most tries of a kind")
    options, begin, passed = parser.parse_args(), time.monotonic(), dict[str, list[bool]]()
    kinds = {name: kind for name, kind in KINDS.items() if re.search(options.only, name) and can_have(kind.needs)}
    draw = random.Random(options.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster and the folder go in the end
    on_ray = any(kind.needs == "ray" for kind in kinds.values())
    with tempfile.TemporaryDirectory() as folder, ray_cluster.ray_cluster() if on_ray else nullcontext() as cluster:
        run = DisturbedRun(Path(folder, "run"), cluster)
        for turn in range(min(options.count, max(kind.count for kind in kinds.values()))):
            for name in (name for name, kind in kinds.items() if turn < kind.count):
                flaw = disturb(name, draw.getrandbits(32), run)
                passed.setdefault(name, []).append(flaw is None)
                print(f"  {name}: {flaw or 'held'}, {time.monotonic() - begin:.0f} s", flush=True)
    for name, results in {**passed, "chaos": sum(passed.values(), [])}.items():
        print(f"{name}: {sum(results)} of {len(results)} held", flush=True)
    return int(not all(map(all, passed.values())))


if __name__ == "__main__":
    sys.exit(main())

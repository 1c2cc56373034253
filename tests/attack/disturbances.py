"""What happens to a run from outside: kills, signals, full disks, folders that go, other writers.

Each disturbs one run, then runs the same command again; it returns what is wrong with what that leaves, None where
nothing is.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable

from perturbkv.storage.output import lock_path
from perturbkv.storage.run.journal import journal_path
from tests.attack.arena import LONG_S, RUN, SAMPLES, Arena, small_disk
from tests.attack.rights import without_room
from tests.attack.running import Outcome, Running


def killed_after(place: Arena, share: float) -> str | None:
    """kill −9 after a share of the time that a run takes."""
    run = Running(RUN, place.folder)
    time.sleep(share * place.seconds)
    run.send(signal.SIGKILL)
    run.outcome(LONG_S)
    return place.flaw_of_rerun()


def killed_in_the_final_write(place: Arena, share: float) -> str | None:
    """kill −9 when the final file is being written, some of its bytes on the disk."""
    for _ in range(20):
        place.clear()
        run = Running(RUN, place.folder)
        _until(lambda: _half_written(place, share), run)
        run.send(signal.SIGKILL)
        run.outcome(LONG_S)
        if any(place.folder.glob("t.h5.tmp-*")):
            return place.flaw_of_rerun()
    return "the final write was never met"


def _half_written(place: Arena, share: float) -> bool:
    """Whether the final file has this share of its bytes."""
    whole = place.expected.stat().st_size
    return any(path.stat().st_size >= share * whole for path in place.folder.glob("t.h5.tmp-*"))


def _until(met: Callable[[], bool], run: Running) -> None:
    """Look all the time."""
    while run.lives():
        time.sleep(0.001)
        try:
            if met():
                return
        except FileNotFoundError:  # it was there a moment ago
            return


def stopped_by(number: int, place: Arena, samples: int) -> str | None:
    """A signal that asks a run to end, once so many samples are finished."""
    run = Running(RUN, place.folder)
    _until(lambda: place.finished() >= samples, run)
    run.send(number)
    outcome = run.outcome(LONG_S)
    if outcome.code not in (0, 128 + number):
        return f"exit code {outcome.code}: {outcome.err.strip()[-300:]}"
    if outcome.code and not outcome.err.strip().splitlines()[-1].startswith("error: interrupted"):
        return f"no line that says so: {outcome.err.strip()[-300:]!r}"
    return place.flaw_of_rerun()


def without_a_journal(place: Arena, samples: int) -> str | None:
    """The journal is removed in the middle of a run: what comes after it survives, the rest is measured again."""
    run = Running(RUN, place.folder)
    _until(lambda: place.finished() >= samples, run)
    shutil.rmtree(journal_path(place.trace), ignore_errors=True)
    outcome = run.outcome(LONG_S)
    return _flaw_of_line(outcome, (0, 2)) or place.flaw_of_rerun()


def two_at_once(place: Arena) -> str | None:
    """Another process comes while one runs: it leaves and says who does; a third one waits for it."""
    first = Running(RUN, place.folder)
    _until(lambda: lock_path(place.trace).exists(), first)
    second = Running(RUN, place.folder).outcome(LONG_S)
    waiting = Running((*RUN, "--wait"), place.folder)
    outcome, waited = first.outcome(LONG_S), waiting.outcome(LONG_S)
    if outcome.code or waited.code:
        return f"exit codes {outcome.code} and {waited.code}: {(outcome.err + waited.err).strip()[-300:]}"
    return _flaw_of_second(second) or place.flaw_of_rerun()


def two_take_over(place: Arena, samples: int) -> str | None:
    """Two processes find what a killed one held, and one of them goes on."""
    run = Running(RUN, place.folder)
    _until(lambda: place.finished() >= samples, run)
    run.send(signal.SIGKILL)
    run.outcome(LONG_S)
    two = [Running(RUN, place.folder), Running(RUN, place.folder)]
    best, other = sorted((one.outcome(LONG_S) for one in two), key=lambda outcome: (outcome.code, place.told(outcome)))
    if best.code:
        return f"none of the two went on: {best.err.strip()[-300:]}"
    return _flaw_of_second(other) or place.flaw_of_rerun()


def on_a_full_disk(place: Arena, share: float) -> str | None:
    """A disk that takes no more than a share of what a run needs, then more."""
    needed = place.expected.stat().st_size
    with small_disk(place, needed * 8) as small:
        filler = small.folder / "filler"
        room = shutil.disk_usage(small.folder).free
        filler.write_bytes(b"\0" * int(room - share * needed))
        outcome = Running(RUN, small.folder).outcome(LONG_S)
        if flaw := _flaw_of_line(outcome, (0, 2)):
            return flaw
        filler.unlink()
        return small.flaw_of_rerun()


def _flaw_of_second(outcome: Outcome) -> str | None:
    """What is wrong with the run that came second: it is told who holds the output, or finds everything finished."""
    if outcome.code == 0:
        return None if Arena.told(outcome) == SAMPLES else "two runs measured at once"
    if "held by process" not in outcome.err:
        return f"it is not told who holds the output: {outcome.err.strip()[-300:]}"
    return _flaw_of_line(outcome, (2,))


def _flaw_of_line(outcome: Outcome, codes: tuple[int, ...]) -> str | None:
    """What is wrong with a run that ends early: anything but one line and one of these exit codes."""
    lines = outcome.err.strip().splitlines()
    if outcome.code not in codes or "Traceback" in outcome.err:
        return f"exit code {outcome.code}: {lines[-1] if lines else 'silent'}"
    return None if outcome.code == 0 or lines[-1].startswith("error: ") else f"no line: {lines[-1]}"


def in_small_files(place: Arena) -> str | None:
    """No file may grow: the limit of a shell, or of a file system."""
    outcome = Running(RUN, place.folder, before=without_room).outcome(LONG_S)
    return _flaw_of_line(outcome, (2,)) or place.flaw_of_rerun()

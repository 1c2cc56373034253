"""The disk under a run in many processes: full, vanished for a while, without a journal. None where nothing is lost."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from perturbkv.storage.run.journal import SUFFIX
from tests.attack.arena import disk
from tests.attack.life import Life, Way, ended


def full_for(place: Life, draw: random.Random, rest: Way, way: Way) -> str | None:
    """A disk that takes no more than a share of what a run needs, then more."""
    needed = place.expected.stat().st_size
    with disk(place.shared, needed * 10):
        filler = _filled(place.shared, draw.uniform(0, 2.5) * needed)
        if flaw := place.flaw_of_ended(ended(place.begin(way)), (0, 1, 2)):
            return flaw
        filler.unlink()
        return place.flaw_of_rest(rest, set(), 2)


def full_for_the_merge(place: Life, draw: random.Random, rest: Way) -> str | None:
    """All shards are there, and no room for what they are joined into."""
    place.all_shards()
    held, needed = place.folder / "held", place.expected.stat().st_size
    place.shared.rename(held)
    place.shared.mkdir()
    with disk(place.shared, needed * 10):
        shutil.copytree(held, place.shared, dirs_exist_ok=True)
        shutil.rmtree(held)
        safe, filler = place.kept(), _filled(place.shared, draw.uniform(0, 1) * needed)
        if flaw := place.flaw_of_ended(ended([place.merge()]), (0, 2)):
            return flaw
        filler.unlink()
        return place.flaw_of_rest(rest, safe, 0)


def vanishes_for(place: Life, draw: random.Random, rest: Way, way: Way) -> str | None:
    """The shared folder is away for a while and comes back, as it was when it went."""
    runs = place.begin(way)
    enough = draw.randint(1, 5)
    place.until(lambda: place.counted.begun() >= enough and _journals(place) >= len(runs), runs)
    place.shared.rename(place.away)  # of a run that begins while it is away, the folder is the user's to make
    time.sleep(draw.uniform(0.05, 1.5))
    made_anew = place.shared.exists()
    if made_anew:
        shutil.rmtree(place.shared)
    place.away.rename(place.shared)
    safe = place.kept()
    if flaw := place.flaw_of_ended(ended(runs), (0, 1, 2), tidy=False):  # what was away could not be tidied up
        return flaw
    return "the shared folder was made anew" if made_anew else place.flaw_of_rest(rest, safe, 2)


def _journals(place: Life) -> int:
    return len(list(place.shared.glob(f"*{SUFFIX}")))


def without_a_journal(place: Life, draw: random.Random, rest: Way, way: Way) -> str | None:
    """A journal is removed while it is written: what comes after it survives, the rest is measured again."""
    runs = place.begin(way)
    place.until(lambda: any(place.shared.glob(f"*{SUFFIX}/*.npz")), runs)
    shutil.rmtree(draw.choice([*place.shared.glob(f"*{SUFFIX}"), place.shared / "none"]), ignore_errors=True)
    return place.flaw_of_ended(ended(runs), (0, 1, 2)) or place.flaw_of_rest(rest, set(), 2)


def _filled(folder: Path, left: float) -> Path:
    """A file that leaves so many bytes of a disk."""
    filler = folder / "filler"
    filler.write_bytes(b"\0" * int(shutil.disk_usage(folder).free - left))
    return filler

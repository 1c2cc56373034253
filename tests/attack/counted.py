"""A score that notes each sample that is measured, takes its time over it, and hangs where it is asked to."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

LENGTHS = (90, 120, 150, 180, 210, 240)
"""Tokens of the prompts, which tell them apart."""
IDS = tuple(f"p{length}" for length in LENGTHS)
LAYERS = 2
PACE_S = 0.1
"""Seconds that a sample takes at least: without them no kill would find one in flight."""
SCORE = "counted.py:Counted"
_SOURCE = '''
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import perturbkv as pk

NOTES = Path({notes!r})
LAYERS = Counter()


@dataclass(frozen=True)
class Counted(pk.Score):
    """The largest attention of the window's queries."""

    needs = ("attention",)

    def score(self, layer):
        tokens = layer.attention.shape[-1]
        if LAYERS[tokens] % {layers} == 0:
            _note(tokens)
        LAYERS[tokens] += 1
        return layer.attention[..., : layer.prefix].amax(dim=1)


def _note(tokens):
    file = os.open(NOTES / str(tokens), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b".")
    os.close(file)
    time.sleep({pace})
    hang = NOTES / f"hang-{{tokens}}"
    if hang.exists():
        hang.unlink()
        time.sleep(600)
'''


class Counted:
    """The score's file in `folder`, and its notes, which lie outside of what is disturbed."""

    def __init__(self, folder: Path, notes: Path) -> None:
        self._notes = notes
        notes.mkdir()
        text = _SOURCE.format(notes=str(notes), layers=LAYERS, pace=PACE_S)
        (folder / SCORE.partition(":")[0]).write_text(text)

    def taken(self) -> Counter[str]:
        """How often each sample was measured, or begun, since this was last asked."""
        found = {name: self._notes / name.removeprefix("p") for name in IDS}
        sizes = Counter({name: file.stat().st_size for name, file in found.items() if file.exists()})
        self.clear()
        return sizes

    def begun(self) -> int:
        """How many samples were begun so far."""
        return sum(1 for file in self._notes.iterdir() if file.name.isdigit())

    def hang(self, sample: str) -> None:
        """Whoever measures the sample next hangs."""
        (self._notes / f"hang-{sample.removeprefix('p')}").touch()

    def clear(self) -> None:
        """As before the first run."""
        shutil.rmtree(self._notes)
        self._notes.mkdir()

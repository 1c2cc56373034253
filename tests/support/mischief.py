"""A score that harms its process on prompts of chosen lengths: killed or hanging, once or always.

A worker is killed as it begins the sample, or once its reply is half or wholly sent (`dying.MOMENTS`).
"""

from __future__ import annotations

from pathlib import Path

_SOURCE = '''
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import perturbkv as pk

FOLDER = Path({folder!r})


def _harm(tokens):
    told = FOLDER / str(tokens)
    if not told.exists():
        return
    how = told.read_text()
    if "once" in how:
        told.unlink()
    (FOLDER / f"met-{{tokens}}-{{os.getpid()}}").touch()
    if moment := how.partition("kill once ")[2]:
        from tests.support.dying import die_at

        return die_at(moment)
    if "kill" in how:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@dataclass(frozen=True)
class Mischief(pk.Score):
    """The largest attention of the window's queries, and harm where a file asks for it."""

    needs = ("attention",)

    def score(self, layer):
        _harm(layer.attention.shape[-1])
        return layer.attention[..., : layer.prefix].amax(dim=1)
'''


class Mischief:
    """The score's file and the harm that it is to do.

    Args:
        folder: where both are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "mischief.py"
        self.file.write_text(_SOURCE.format(folder=str(folder)))

    @property
    def policy(self) -> str:
        return f"{self.file}:Mischief"

    def on(self, tokens: int, harm: str) -> None:
        """Harm whoever measures a prompt of so many tokens: `kill`, `kill once`, `kill once sent`, `hang once`, …"""
        (self.folder / str(tokens)).write_text(harm)

    def off(self) -> None:
        for told in self.folder.iterdir():
            if told.name.isdigit():
                told.unlink()

    def met(self, tokens: int) -> list[int]:
        """The processes that met a prompt of so many tokens while it was harmful."""
        return [int(one.name.rpartition("-")[2]) for one in self.folder.glob(f"met-{tokens}-*")]

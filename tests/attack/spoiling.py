"""One way to spoil a tiny model, and what must become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Spoiled:
    """What is done to a model.

    Attributes:
        name: of the case.
        spoil: changes the model at a path; may return what to give to --model instead of that path.
        never: whether it can only be refused; otherwise finite numbers are right too.
        gguf: whether it is a GGUF file, not a folder.
        copied: whether a whole folder lies at the path before.
        words: of which a refusal holds one; by default the model's name.
    """

    name: str
    spoil: Callable[[Path], object]
    never: bool = True
    gguf: bool = False
    copied: bool = True
    words: tuple[str, ...] = ()

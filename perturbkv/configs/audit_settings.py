"""What a user of an audit chooses: its options, and what the text or path that names the audited thing denotes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.user_files import MIB, FileKind, is_path

SITUATIONS: Mapping[str, str] = {
    "single": "a single prompt, decoded step by step",
    "block": "a block of 8 tokens after it, then step by step",
    "batch": "a left-padded batch of it and of a shorter one",
}
"""Situation -> its description, in the order in which they are tested."""
ENGINE_SITUATIONS: Mapping[str, str] = {
    "plain": "one request",
    "prefix": "a request that takes the blocks of another one's prefix",
    "interleaved": "requests that begin and end at different times",
    "chunked": "a prompt that is read in parts of 64 tokens",
    "preempted": "a request that loses its blocks, and is computed again in others",
    "fp8": "one request, in a cache of 8 bits",
}
"""Situation of an engine -> its meaning, in the order in which they are run."""
AUTO, ORIGINAL, IN_CACHE = "auto", "original", "in-cache"
POSITIONS: Mapping[str, str] = {
    AUTO: "whichever of both fits the keys better",
    ORIGINAL: "keys as they were cached, new tokens at n, n + 1, …",
    IN_CACHE: "keys rotated to 0, 1, …, new tokens after them",
}
"""Convention of positions -> its meaning."""
LOSSY, UNKNOWN, IDLE, PLAIN_USE = "lossy", "unknown", "idle", "plain-use"
ALLOWED: Mapping[str, str] = {
    LOSSY: "entries that are rounded",
    UNKNOWN: "entries that match none, and are decoded rightly",
    IDLE: "prompts of which nothing is evicted",
    PLAIN_USE: "plain calls that put new tokens at wrong positions",
}
"""What a user may allow -> its meaning."""
KEPT_SUFFIXES = (".npz", ".json")
KEPT_FILE = FileKind("a file of kept positions", ConfigError, 1024 * MIB, "choose another path")
"""What another program kept, as a file with one of these suffixes."""
DUMP_HEADER = "dump.json"
"""The file in a dump's folder that describes it."""
SLOT_MAGIC = b"qsgg"
"""How a session file of llama.cpp begins."""


@dataclass(frozen=True)
class AuditSettings:
    """The options of an audit.

    Attributes:
        steps: number of forward passes after the eviction.
        situations: keys of `SITUATIONS`.
        losses: whether the loss is measured, and that of controls.
        allow: keys of `ALLOWED`, which then make no exit code 1.
        positions: a key of `POSITIONS`.
        plain_use: whether plain calls of the model with the cache are tried.
        expect: kept sets that it should have: a file, or a policy with its budget; empty: they are not compared.

    Raises ConfigError or UnknownNameError for invalid values.
    """

    steps: int = 4
    situations: tuple[str, ...] = tuple(SITUATIONS)
    losses: bool = True
    allow: tuple[str, ...] = ()
    positions: str = AUTO
    plain_use: bool = True
    expect: str | EvictionConfig = ""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"expected at least 1 step, got {self.steps}")
        if not self.situations:
            raise ConfigError(f"expected at least one situation of {', '.join(SITUATIONS)}, got none")
        for name in self.situations:
            if name not in SITUATIONS:
                raise UnknownNameError(name, "situation", SITUATIONS)
        if self.positions not in POSITIONS:
            raise UnknownNameError(self.positions, "convention of positions", POSITIONS)
        for name in self.allow:
            if name not in ALLOWED:
                raise UnknownNameError(name, "verdict to allow", ALLOWED)


def is_dump(path: Path) -> bool:
    """Return whether a path is a dump's folder or its header, or a slot file of llama.cpp."""
    if path.name == DUMP_HEADER:
        return True
    return is_path(path / DUMP_HEADER) and ((path / DUMP_HEADER).is_file() or is_slot(path))


def is_slot(path: Path) -> bool:
    """Return whether a file begins like a session file of llama.cpp."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            return stream.read(len(SLOT_MAGIC)) == SLOT_MAGIC
    except OSError:
        return False

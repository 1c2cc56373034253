"""A file of kept positions, as another program leaves it: docs/audit.md has the layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.errors import ConfigError, UnreadableError

SUFFIXES = (".npz", ".json")
_KEPT = re.compile(r"layer_(\d+)_head_(\d+)")
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KeptFile:
    """Kept positions of one prompt, and what the foreign run decoded, where the file says it.

    Attributes:
        name: the path.
        kept: per layer and kept set, positions.
        token_ids: of the prompt; empty where the file leaves it to the data set.
        tokens: fed one after the other after the prompt; empty: the full run's greedy ones.
        logits: (step, vocab) after each of them; None where nothing was decoded.
    """

    name: str
    kept: tuple[tuple[Integers, ...], ...]
    token_ids: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    logits: NDArray[np.float64] | None = None

    def check(self, layers: int, heads: Sequence[int], tokens: int, vocab: int) -> None:
        """Raise UnreadableError where the positions cannot be of this model and a prompt of `tokens` entries."""
        if len(self.kept) != layers:
            self._refuse(f"it has {len(self.kept)} layers, the model {layers}")
        for layer, sets in enumerate(self.kept):
            if len(sets) not in heads:
                self._refuse(f"layer {layer} has {len(sets)} heads, expected {' or '.join(map(str, heads))}")
            for head, kept in enumerate(sets):
                self._check_set(kept, tokens, f"layer {layer}, head {head}")
        if self.logits is not None and self.logits.shape[1] != vocab:
            self._refuse(f"its logits have {self.logits.shape[1]} tokens, the model's {vocab}")

    def _check_set(self, kept: Integers, tokens: int, where: str) -> None:
        if len(kept) > tokens:
            self._refuse(f"{where} keeps {len(kept)} entries, more than the {tokens} that there were")
        if len(kept) and not 0 <= kept.min() <= kept.max() < tokens:
            self._refuse(f"{where} keeps position {kept.max()} or {kept.min()} of a prompt of {tokens}")

    def _refuse(self, reason: str) -> None:
        msg = f"{self.name}: {reason}"
        raise UnreadableError(msg)


def read(path: Path) -> KeptFile:
    """The file. Raises ConfigError where it is not there, UnreadableError where it is not as docs/audit.md says."""
    if not path.is_file():
        msg = f"expected a file of kept positions at {path}, got none; choose another path"
        raise ConfigError(msg)
    try:
        held = _json(path) if path.suffix == ".json" else _npz(path)
        logits = held.get("logits")
        return KeptFile(
            name=str(path),
            kept=held["kept"],
            token_ids=_numbers(held.get("token_ids", ())),
            tokens=_numbers(held.get("tokens", ())),
            logits=None if logits is None else np.asarray(logits, dtype=np.float64).reshape(len(logits), -1),
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        msg = f"{path} does not hold kept positions as docs/audit.md lays them out: {type(error).__name__}: {error}"
        raise UnreadableError(msg) from None


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _json(path: Path) -> Mapping[str, Any]:
    held = json.loads(path.read_text(encoding="utf-8"))
    return {**held, "kept": tuple(tuple(map(_positions, sets)) for sets in held["kept"])}


def _npz(path: Path) -> Mapping[str, Any]:
    """Arrays `layer_{l}_head_{h}`, every layer and head from 0 on."""
    with np.load(path, allow_pickle=False) as held:
        arrays = {name: held[name] for name in held.files}
    places = {tuple(map(int, found.groups())): name for name in arrays if (found := _KEPT.fullmatch(name))}
    layers = 1 + max(layer for layer, _ in places)
    kept = []
    for layer in range(layers):
        heads = 1 + max((head for place, head in places if place == layer), default=-1)
        kept.append(tuple(_positions(arrays[places[layer, head]]) for head in range(heads)))
    return {**arrays, "kept": tuple(kept)}


def _positions(values: Any) -> Integers:
    """Positions, ascending. Raises ValueError for what is no row of whole numbers, or names one twice."""
    found = np.asarray(values)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        msg = f"expected a row of whole numbers per head, got an array of shape {found.shape} and type {found.dtype}"
        raise ValueError(msg)
    if len(np.unique(found)) != len(found):
        msg = "a head keeps a position twice"
        raise ValueError(msg)
    return np.sort(found).astype(np.int64)

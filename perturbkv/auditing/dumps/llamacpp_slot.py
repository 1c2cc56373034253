"""Slot files of llama.cpp's server, `POST /slots/ID?action=save`, read as dumps (METHOD: Engines' caches).

The format is llama.cpp's own and promises nothing: version 4 of a session file is read, any other is refused. A file
has the tokens, the cells' positions, the keys of all layers, then the values of all layers. What a layer needs is read
when it is asked for. How numbers are stored: `llamacpp_types`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.audit_trace import SLOT_MAGIC, is_slot
from perturbkv.auditing.dumps import llamacpp_types
from perturbkv.auditing.dumps.dump_file import Dump, LayerDump, Request, read_dump
from perturbkv.auditing.dumps.llamacpp_types import Stored
from perturbkv.cache.external_cache import Layers
from perturbkv.configs.resources import Shape
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter

_VERSION = 4
_REQUEST = "slot"
_PAIRED = frozenset({"llama", "mistral", "mixtral", "granite"})
"""model_type of families whose GGUF files have keys in pairs: there 2i and 2i + 1 are components i and i + d/2."""


@dataclass(frozen=True)
class _Part:
    """Keys or values of a layer in the file.

    Attributes:
        offset, nbytes: where they are.
        stored: how they are stored.
        transposed: whether they are stored (component, cell) instead of (cell, component).
    """

    offset: int
    nbytes: int
    stored: Stored
    transposed: bool = False


@dataclass(frozen=True)
class Slot(Dump):
    """A slot file, as a dump of one request in rows.

    Attributes:
        parts: per layer, its keys and its values.
        positions: of every cell.
        flash: whether the engine attends with flash attention, which rounds keys, values and sums to float16.
    """

    parts: tuple[tuple[_Part, _Part], ...] = ()
    positions: tuple[int, ...] = ()
    flash: bool = False

    def layer(self, index: int) -> LayerDump:
        """Return one layer, as the model has it: read, dequantised, rotated back, unpaired."""
        positions = torch.tensor(self.positions)
        order = positions.argsort(stable=True)
        keys, values = (self._read(part)[:, order] for part in self.parts[index])
        grids = [part.stored.coarser_grid(rows) for part, rows in zip(self.parts[index], (keys, values), strict=True)]
        rounded_before = tuple(
            f"{name} {grid}'s numbers in {part.stored.name}"
            for name, grid, part in zip(("keys", "values"), grids, self.parts[index], strict=True)
            if grid
        )
        return LayerDump(
            (), (torch.ones(()), torch.ones(())), torch.zeros(0, dtype=torch.int64),
            {_REQUEST: (keys, values, positions[order].expand(self.kv_heads, -1))}, rounded_before,
        )  # fmt: skip

    def rounded(self, adapter: Adapter, token_ids: Sequence[int]) -> Iterator[Layers]:
        """Yield the plain model's entries of tokens, rounded as this engine does, in several ways."""
        stored = [(keys.stored, values.stored) for keys, values in self.parts]
        return llamacpp_types.rounded_entries(adapter, token_ids, stored, self.flash)

    def _read(self, part: _Part) -> Float[Tensor, "kv_head entry d_head"]:
        """Return the keys or values of one part of the file. Raises UnreadableCacheError where it ends too early."""
        with self.path.open("rb") as stream:
            stream.seek(part.offset)
            content = stream.read(part.nbytes)
        if len(content) < part.nbytes:
            _refuse(self.path, "it ends within a layer")
        cells = len(self.positions)
        numbers = np.frombuffer(content, np.uint8)
        if part.transposed:
            numbers = np.ascontiguousarray(numbers.reshape(self.kv_heads * self.head_size, cells, -1).swapaxes(0, 1))
        rows = part.stored.dequantise(numbers.reshape(cells, -1))
        return part.stored.from_stored(torch.unflatten(torch.from_numpy(rows), -1, (self.kv_heads, -1)).transpose(0, 1))


def open_dump(path: Path, config: Any) -> Dump:
    """Return a dump or a slot file, recognised by its content; `config` is transformers' configuration of the model.

    Raises ConfigError or UnreadableCacheError for an invalid one.
    """
    return read_slot(path, config) if is_slot(path) else read_dump(path)


def read_slot(path: Path, config: Any) -> Slot:
    """Return a slot file; `config` is transformers' configuration of the model.

    Raises UnreadableCacheError for another version, for what is not read, for another model's width, and where the
    file's end is not where it should be.
    """
    shape = Shape.from_config(config, 4, 0)
    with path.open("rb") as stream:
        return _Reader(path, stream, shape, config.model_type in _PAIRED).read()


def _refuse(path: Path, found: str) -> NoReturn:
    """Raise UnreadableCacheError for a slot file."""
    raise UnreadableCacheError(f"{path}: cannot read this slot file of llama.cpp: {found}")


@dataclass
class _Reader:
    """The reader of a slot file's structure; entries are skipped."""

    path: Path
    stream: BinaryIO
    shape: Shape
    paired: bool
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.path.stat().st_size

    def read(self) -> Slot:
        """Return the slot. Raises UnreadableCacheError for anything that is not as expected."""
        self.stream.seek(len(SLOT_MAGIC))
        version, words = self._numbers("II")
        if version != _VERSION:
            _refuse(self.path, f"expected version {_VERSION}, got {version}")
        tokens = self._tokens(words)
        positions = self._cells(len(tokens))
        transposed, layers, *rotations = self._numbers("IIII")
        keys = [self._part(len(positions), rotations[0], "keys", paired=self.paired) for _ in range(layers)]
        values = [
            self._part(len(positions), rotations[1], "values", transposed=bool(transposed)) for _ in range(layers)
        ]
        if rest := self.size - self.stream.tell():
            _refuse(self.path, f"{rest:,} bytes follow the values, as of a cache of another kind")
        parts = tuple(zip(keys, values, strict=True))
        names = {f"{part.stored.name} {name}" for name, kind in (("keys", keys), ("values", values)) for part in kind}
        return Slot(
            self.path, layers, self.shape.kv_heads, self.shape.d_head, (Request(_REQUEST, tokens),),
            dtype=", ".join(sorted(names)), engine="llama.cpp", parts=parts, positions=positions, flash=not transposed,
        )  # fmt: skip

    def _numbers(self, kinds: str) -> tuple[int, ...]:
        """Return integers of these `struct` format characters."""
        return struct.unpack(f"<{kinds}", self._bytes(struct.calcsize(f"<{kinds}")))

    def _bytes(self, count: int) -> bytes:
        """Return the next bytes. Raises UnreadableCacheError where the file ends before them."""
        self._check_rest(count)
        return self.stream.read(count)

    def _check_rest(self, count: int) -> None:
        """Raise UnreadableCacheError where the file ends within the next bytes."""
        if count > self.size - self.stream.tell():
            _refuse(self.path, f"it ends after {self.size:,} bytes, where more should follow")

    def _tokens(self, words: int) -> tuple[int, ...]:
        """Return the token ids: as they are, or as the server writes them, −1, 1, their number, they, 0."""
        found = np.frombuffer(self._bytes(4 * words), "<i4").tolist()
        if found and found[0] == -1:
            if found[1:2] != [1] or found[-1] != 0 or found[2] != len(found) - 4:
                _refuse(self.path, "its tokens are coded in an unknown way, or stand beside images or sound")
            found = found[3:-1]
        if not found or min(found) < 0:
            _refuse(self.path, f"token {min(found)}" if found else "no tokens")
        return tuple(found)

    def _cells(self, tokens: int) -> tuple[int, ...]:
        """Return the positions of the cells of the one stream that has some; the others are empty."""
        (streams,) = self._numbers("I")
        self._check_rest(4 * streams)
        for _ in range(streams):
            (cells,) = self._numbers("I")
            if cells:
                break
        else:
            _refuse(self.path, "no entries")
        self._check_rest(8 * cells)
        positions = []
        for _ in range(cells):
            position, sequences = self._numbers("iI")
            self._bytes(4 * sequences)
            positions.append(position)
        if wrong := [position for position in positions if not 0 <= position < tokens]:
            _refuse(self.path, f"an entry at position {wrong[0]:,} of {tokens:,} tokens")
        return tuple(positions)

    def _part(self, cells: int, rotation: int, what: str, paired: bool = False, transposed: bool = False) -> _Part:
        """Return the keys or values of the next layer, and skip them."""
        kind, *sizes = self._numbers("iII" if transposed else "iQ")
        stored = Stored(kind, rotation, paired)
        width = self.shape.kv_heads * self.shape.d_head
        if kind not in llamacpp_types.TYPES:
            known = ", ".join(llamacpp_types.TYPES.values())
            _refuse(self.path, f"{what} of ggml's type {kind}; those read: {known}")
        if rotation and (rotation & (rotation - 1) or self.shape.d_head % rotation):
            _refuse(self.path, f"{what} rotated in parts of {rotation}, and a head has {self.shape.d_head} components")
        expected = [stored.row_bytes(1), width] if transposed else [stored.row_bytes(width)]
        if sizes != expected:
            found = sizes[-1] if transposed else stored.row_width(sizes[0])
            _refuse(self.path, f"its model has {found:,} numbers a token in {what}, this one {width:,}")
        part = _Part(self.stream.tell(), cells * stored.row_bytes(width), stored, transposed)
        self._check_rest(part.nbytes)
        self.stream.seek(part.nbytes, 1)
        return part

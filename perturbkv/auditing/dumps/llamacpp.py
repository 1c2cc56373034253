"""Slot files of llama.cpp's server, `POST /slots/ID?action=save`, read as dumps (METHOD: Engines' caches).

The format is llama.cpp's own and promises nothing: version 4 of a session file is read, any other is refused. A file
has the tokens, the cells' positions, the keys of all layers, then the values of all layers. What a layer needs is read
when it is asked for.

An engine that keeps keys in few bits computes later layers from them, and multiplies quantised weights by activations
in 8 bits. So entries are expected at a distance, which is measured: the plain model reads the tokens with the engine's
rounding, several times, each with other factors before it. Of the engine's file only the types and whether it used
flash attention enter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import gguf
import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.linalg import hadamard
from torch import Tensor, nn
from transformers import DynamicCache

from perturbkv.auditing.dumps.dump_file import Dump, LayerDump, Request, read_dump
from perturbkv.auditing.dumps.plain_entries import RoundedProducts
from perturbkv.cache.external_cache import Layers
from perturbkv.configs.audit_settings import SLOT_MAGIC, is_slot
from perturbkv.configs.resources import Shape
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.models.interface import AttentionFunction
from perturbkv.pipeline.sample.capture import intercept_attention

_VERSION = 4
_REQUEST = "slot"
_PAIRED = frozenset({"llama", "mistral", "mixtral", "granite"})
"""model_type of families whose GGUF files have keys in pairs: there 2i and 2i + 1 are components i and i + d/2."""
TYPES: Mapping[int, str] = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 30: "bf16",
}  # fmt: skip
"""ggml's code of a type of entries that is read -> its name."""
_FLOATS = {"f32": 1e-3, "f16": 1e-3, "bf16": 3e-3}
"""Floating-point type -> largest distance of its numbers from a grid of fewer bits on which they are, but for its ε."""
_SUMMED_IN_HALF = ("f32", "f16")
"""Types of values that flash attention sums in float16."""
_ROTATION = 64
"""Components that quantised entries are rotated by, where a head has a multiple of them."""
_FACTORS = (1.0, 0.93, 1.07)
"""Factors by which the readings multiply numbers before they round them, and divide them afterwards."""
_TRIED = 64
"""Entries of a layer whose grid is looked for."""


@dataclass(frozen=True)
class StorageForm:
    """Form in which keys or values of a layer are stored.

    Attributes:
        kind: ggml's type, a key of `TYPES`.
        rotation: components of an orthonormal Hadamard matrix that they are multiplied by; 0: none.
        paired: whether components i and i + d/2 of the model are 2i and 2i + 1.
    """

    kind: int
    rotation: int = 0
    paired: bool = False

    @property
    def name(self) -> str:
        """Name of the type."""
        return TYPES[self.kind]

    @property
    def block(self) -> tuple[int, int]:
        """Numbers in a block, and its bytes."""
        numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self.kind)]
        return int(numbers), int(nbytes)

    def row_bytes(self, width: int) -> int:
        """Return how many bytes a row of `width` numbers has; those of a part of a block are rounded down."""
        numbers, nbytes = self.block
        return width * nbytes // numbers

    def dequantise(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the numbers (row, width) of rows of bytes (row, byte), in float32."""
        numbers: NDArray[np.float32] = gguf.dequantize(rows, gguf.GGMLQuantizationType(self.kind))
        return np.array(numbers, dtype=np.float32)

    def to_stored(self, entries: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Return the model's entries in the order and the basis in which they are stored."""
        half = entries.shape[-1] // 2
        return self._rotate(torch.unflatten(entries, -1, (2, half)).mT.flatten(-2) if self.paired else entries)

    def from_stored(self, entries: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Return stored entries as the model has them: the inverse of `to_stored`."""
        rotated = self._rotate(entries)
        return torch.unflatten(rotated, -1, (-1, 2)).mT.flatten(-2) if self.paired else rotated

    def round(
        self, entries: Float[Tensor, "*batch kv_head token width"], factor: float = 1.0
    ) -> Float[Tensor, "*batch kv_head token width"]:
        """Return the model's entries rounded to this type; multiplied by `factor` before, and divided by it after."""
        if self.name == "f32":
            return entries
        stored = (self.to_stored(entries.float()) * factor).transpose(-2, -3)  # a row has a token's heads
        rows = stored.flatten(-2)
        kind = gguf.GGMLQuantizationType(self.kind)
        quantised = gguf.quantize(rows.flatten(0, -2).cpu().numpy(), kind)
        rounded = torch.from_numpy(self.dequantise(quantised)).to(entries.device)
        return self.from_stored(rounded.view(stored.shape).transpose(-2, -3) / factor).to(entries.dtype)

    def coarser_type(self, entries: Float[Tensor, "kv_head entry width"]) -> str:
        """Return the type of fewer bits that floating-point numbers went through; empty where none is found.

        They went through a type if rounding to it once more leaves them as they are, up to `_FLOATS`.
        """
        heads, count, size = entries.shape
        some = entries[:, torch.linspace(0, count - 1, min(_TRIED, count)).long()]
        some = some[:, some.isfinite().all(dim=-1).all(dim=0) & some.any(dim=-1).all(dim=0)]
        if self.name not in _FLOATS or not some.numel():
            return ""
        for kind, name in TYPES.items():
            if name in _FLOATS or heads * size % StorageForm(kind).block[0]:
                continue
            for rotation in (0, _ROTATION) if size % _ROTATION == 0 else (0,):
                rounded = StorageForm(kind, rotation, self.paired).round(some)
                change = torch.linalg.vector_norm(rounded - some, dim=-1) / torch.linalg.vector_norm(some, dim=-1)
                if float(change.median()) < _FLOATS[self.name]:
                    return name
        return ""

    def _rotate(self, entries: Tensor) -> Tensor:
        """Return entries multiplied by the Hadamard matrix, which is its own inverse; unchanged without a rotation."""
        if not self.rotation:
            return entries
        parts = torch.unflatten(entries, -1, (-1, self.rotation))
        matrix = torch.from_numpy(hadamard(self.rotation, dtype=np.float32)) / math.sqrt(self.rotation)
        return torch.matmul(parts, matrix.to(entries)).flatten(-2)


@dataclass(frozen=True)
class _Part:
    """Keys or values of a layer in the file.

    Attributes:
        offset, nbytes: where they are, in bytes.
        stored: how they are stored.
        transposed: whether they are stored (component, cell) instead of (cell, component).
    """

    offset: int
    nbytes: int
    stored: StorageForm
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
        earlier_rounding = tuple(
            f"{name} {grid}'s numbers in {part.stored.name}"
            for name, part, rows in zip(("keys", "values"), self.parts[index], (keys, values), strict=True)
            if (grid := part.stored.coarser_type(rows))
        )
        return LayerDump(
            (), (torch.ones(()), torch.ones(())), torch.zeros(0, dtype=torch.int64),
            {_REQUEST: (keys, values, positions[order].expand(self.kv_heads, -1))}, earlier_rounding,
        )  # fmt: skip

    def rounded_entries(self, adapter: Adapter, token_ids: Sequence[int]) -> Iterator[Layers]:
        """Yield the plain model's entries of tokens, read with this engine's rounding, each time with another factor.

        How the weights are stored says how products are rounded, flash attention how sums are.
        """
        ids = torch.tensor([list(token_ids)], device=adapter.device)
        stored = [(keys.stored, values.stored) for keys, values in self.parts]
        for seed, factor in enumerate(_FACTORS):
            cache = _RoundingCache(stored, factor, self.flash)
            noise = torch.Generator().manual_seed(seed)
            attend = partial(_attend_with_noise, adapter, stored, noise if self.flash else None)
            with RoundedProducts(partial(_round_factor, adapter, factor)), intercept_attention(adapter, attend):
                run_with_cache(adapter.base, ids, cache)
            yield [(layer.keys, layer.values) for layer in cache.layers]

    def _read(self, part: _Part) -> Float[Tensor, "kv_head entry width"]:
        """Return the keys or values of one part of the file, as the model has them.

        Raises UnreadableCacheError where it ends too early.
        """
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

    Raises UnreadableCacheError for another version or type of entries, another model's widths, and a file that is
    truncated or longer.
    """
    shape = Shape.from_config(config, itemsize=4, weights_bytes=0)  # only heads and components are used
    with path.open("rb") as stream:
        return _Reader(path, stream, shape, config.model_type in _PAIRED, path.stat().st_size).read()


def _refuse(path: Path, found: str) -> NoReturn:
    """Raise UnreadableCacheError for a slot file."""
    raise UnreadableCacheError(f"{path}: cannot read this slot file of llama.cpp: {found}")


@dataclass
class _Reader:
    """The reader of a slot file's structure; entries are skipped.

    Attributes:
        path, stream: the file.
        shape: of the model.
        paired: whether the file has keys in pairs, as in `StorageForm`.
        size: of the file, in bytes.
    """

    path: Path
    stream: BinaryIO
    shape: Shape
    paired: bool
    size: int

    def read(self) -> Slot:
        """Return the slot. Raises UnreadableCacheError for anything that is not as expected."""
        self.stream.seek(len(SLOT_MAGIC))
        version, words = self._read_integers("II")
        if version != _VERSION:
            _refuse(self.path, f"expected version {_VERSION}, got {version}")
        tokens = self._read_tokens(words)
        positions = self._read_positions(len(tokens))
        transposed, layers, key_rotation, value_rotation = self._read_integers("IIII")
        keys = [
            self._read_part(len(positions), key_rotation, "keys", self.shape.d_key, paired=self.paired)
            for _ in range(layers)
        ]
        values = [
            self._read_part(len(positions), value_rotation, "values", self.shape.d_value, transposed=bool(transposed))
            for _ in range(layers)
        ]
        if rest := self.size - self.stream.tell():
            _refuse(self.path, f"{rest:,} bytes follow the values, as of a cache of another kind")
        parts = tuple(zip(keys, values, strict=True))
        names = {f"{part.stored.name} {name}" for name, kind in (("keys", keys), ("values", values)) for part in kind}
        return Slot(
            self.path, layers, self.shape.kv_heads, self.shape.d_key, (Request(_REQUEST, tokens),),
            dtype=", ".join(sorted(names)), engine="llama.cpp", parts=parts, positions=positions, flash=not transposed,
        )  # fmt: skip

    def _read_integers(self, kinds: str) -> tuple[int, ...]:
        """Return the next integers, of these `struct` format characters. Raises UnreadableCacheError at the end."""
        count = struct.calcsize(f"<{kinds}")
        self._check_rest(count)
        return struct.unpack(f"<{kinds}", self.stream.read(count))

    def _check_rest(self, count: int) -> None:
        """Raise UnreadableCacheError where the file ends within the next bytes."""
        if count > self.size - self.stream.tell():
            _refuse(self.path, f"it ends after {self.size:,} bytes, where more should follow")

    def _read_tokens(self, words: int) -> tuple[int, ...]:
        """Return the token ids, from so many words of 4 bytes. Raises UnreadableCacheError for anything else.

        They stand there as they are, or as the server writes them: −1, 1, their number, they, 0.
        """
        ids = self._read_integers(f"{words}i")
        if ids and ids[0] == -1:
            if ids[1:2] != (1,) or ids[-1] != 0 or ids[2] != len(ids) - 4:
                _refuse(self.path, "its tokens are coded in an unknown way, or stand beside images or sound")
            ids = ids[3:-1]
        if not ids or min(ids) < 0:
            _refuse(self.path, f"token {min(ids)}" if ids else "no tokens")
        return ids

    def _read_positions(self, tokens: int) -> tuple[int, ...]:
        """Return the positions of the cells in the first stream that has some; streams before it are empty.

        Raises UnreadableCacheError without cells, and for a position outside of the `tokens` tokens.
        """
        (streams,) = self._read_integers("I")
        for _ in range(streams):
            (cells,) = self._read_integers("I")
            if cells:
                break
        else:
            _refuse(self.path, "no entries")
        positions = []
        for _ in range(cells):
            position, sequences = self._read_integers("iI")
            self._read_integers(f"{sequences}I")  # the sequences' ids
            positions.append(position)
        if wrong := [position for position in positions if not 0 <= position < tokens]:
            _refuse(self.path, f"an entry at position {wrong[0]:,} of {tokens:,} tokens")
        return tuple(positions)

    def _read_part(
        self, cells: int, rotation: int, what: str, size: int, paired: bool = False, transposed: bool = False
    ) -> _Part:
        """Return where and how the keys or values of the next layer are stored in so many cells, and skip them.

        `what` names them in messages, `size` is a head's number of them; the others are as in `StorageForm` and
        `_Part`. Raises UnreadableCacheError for a type or a rotation that is not read, and for another model's width.
        """
        kind, *sizes = self._read_integers("iII" if transposed else "iQ")
        stored = StorageForm(kind, rotation, paired)
        width = self.shape.kv_heads * size
        if kind not in TYPES:
            known = ", ".join(TYPES.values())
            _refuse(self.path, f"{what} of ggml's type {kind}; those read: {known}")
        if rotation and (rotation & (rotation - 1) or size % rotation):
            _refuse(self.path, f"{what} rotated in parts of {rotation}, and a head has {size} components")
        expected = [stored.row_bytes(1), width] if transposed else [stored.row_bytes(width)]
        if sizes != expected:
            numbers, nbytes = stored.block
            found = sizes[-1] if transposed else sizes[0] * numbers // nbytes
            _refuse(self.path, f"its model has {found:,} numbers a token in {what}, this one {width:,}")
        part = _Part(self.stream.tell(), cells * stored.row_bytes(width), stored, transposed)
        self._check_rest(part.nbytes)
        self.stream.seek(part.nbytes, 1)
        return part


class _RoundingCache(DynamicCache):  # type: ignore[misc]
    """A cache that keeps entries as the engine stores them.

    Attributes:
        stored: how each layer's keys, and its values, are stored.
        factor: by which numbers are multiplied before they are rounded, and divided afterwards.
        flash: whether attention reads them in float16.
    """

    def __init__(self, stored: Sequence[tuple[StorageForm, StorageForm]], factor: float, flash: bool) -> None:
        super().__init__()
        self.stored, self.factor, self.flash = stored, factor, flash

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add entries, rounded, and return all of the layer as attention reads them."""
        kinds = self.stored[layer_idx]
        new = [kind.round(part, self.factor) for kind, part in zip(kinds, (key_states, value_states), strict=True)]
        whole = super().update(new[0], new[1], layer_idx, *args, **kwargs)
        if not self.flash:
            return whole[0], whole[1]
        keys, values = ((part * self.factor).half().to(part) / self.factor for part in whole)
        return keys, values


def _round_factor(adapter: Adapter, factor: float, given: Tensor) -> Tensor:
    """Return what a matrix is multiplied by, rounded as the engine does: to the weights' type, as it is if in float32.

    By quantised weights numbers are multiplied in 8 bits, in blocks along the last axis, each with a scale in float16;
    where the axis is no multiple of a block, as they are. They are multiplied by `factor` before and divided by it
    afterwards, so that another factor rounds them otherwise.
    """
    kind = adapter.stored.kind
    if not adapter.stored.quantised:
        floating = getattr(torch, kind, torch.float32)
        return given if floating == torch.float32 else (given * factor).to(floating).to(given) / factor
    block = 256 if kind.endswith("_K") else 32
    if given.shape[-1] % block:
        return given
    blocks = torch.unflatten(given, -1, (-1, block)) * factor
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    rounded: Tensor = ((blocks / scale).round() * scale.half().to(scale) / factor).flatten(-2)
    return rounded


def _attend_with_noise(
    adapter: Adapter, stored: Sequence[tuple[StorageForm, StorageForm]], noise: torch.Generator | None,
    stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any,
) -> Any:  # fmt: skip
    """Return heads' outputs (row, token, head, d_value) with what rounding of every sum to float16 adds to them.

    Of n additions each rounds to a relative ε/√12, in independent directions: √n of it, over the output's root mean
    square. As they are without `noise`.
    """
    heads, *others = stock(module, *args, **kwargs)
    if noise is None or stored[adapter.layer_of(module)][1].name not in _SUMMED_IN_HALF:
        return heads, *others
    added = torch.arange(1, heads.shape[1] + 1).sqrt().view(1, -1, 1, 1).to(heads)
    size = heads.square().mean(dim=-1, keepdim=True).sqrt() * added * torch.finfo(torch.float16).eps / math.sqrt(12)
    return heads + size * torch.randn(heads.shape, generator=noise).to(heads), *others

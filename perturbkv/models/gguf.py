"""Which tensors a GGUF file holds, of what storage types, and whether it is all there. No torch here.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only the header is read.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perturbkv.errors import ModelError

_MAGIC = b"GGUF"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a metadata value -> its bytes; strings and arrays have none of their own."""
_UINT32, _STRING, _ARRAY, _ALIGNMENT = 4, 8, 9, "general.alignment"
_VERSIONS = (2, 3)
_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the file describes it: `offset` is in bytes from where the tensors begin."""

    name: str
    values: int
    kind: int
    offset: int

    @property
    def type_name(self) -> str:
        """For example Q4_1."""
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(self.kind).name)

    @property
    def end(self) -> int:
        """The first byte after it, from where the tensors begin."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        return self.offset + self.values // int(values) * int(size)

    @property
    def part(self) -> str:
        """matrices, embeddings or norms (biases count among them: one row)."""
        if re.match(r"token_embd|output\.weight", self.name):
            return "embeddings"
        return "norms" if "norm" in self.name or self.name.endswith("bias") else "matrices"


class _CutError(Exception):
    """A header that goes on where its file has ended."""


class _Reader:
    """Walks through a file's header. Raises _CutError where it leads out of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.alignment = data, 0, 32

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise _CutError

    def number(self, kind: str) -> int:
        self.skip(struct.calcsize(kind))
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at - struct.calcsize(kind))
        return int(value)

    def text(self) -> str:
        size = self.number("Q")
        self.skip(size)
        return self.data[self.at - size : self.at].decode(errors="replace")

    def skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self.skip(self.number("Q"))
        elif kind == _ARRAY:
            inside, count = self.number("I"), self.number("Q")
            if inside in _SIZES:
                self.skip(_SIZES[inside] * count)
            elif inside == _STRING:
                for _ in range(count):
                    self.skip_value(inside)
            else:
                raise _CutError  # arrays in arrays: no file has them, and a damaged one would nest them without end
        elif kind in _SIZES:
            self.skip(_SIZES[kind])
        else:
            raise _CutError

    def skip_pair(self) -> None:
        name, kind = self.text(), self.number("I")
        self.skip_value(kind)
        if name == _ALIGNMENT and kind == _UINT32:
            (self.alignment,) = struct.unpack_from("<I", self.data, self.at - 4)
            if self.alignment == 0:
                raise _CutError

    def tensor(self) -> StoredTensor:
        name = self.text()
        shape = [self.number("Q") for _ in range(self.number("I"))]
        return StoredTensor(name, math.prod(shape), self.number("I"), self.number("Q"))


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a GGUF file. Raises ModelError for another kind of file, or one that was cut short."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            msg = f"expected a GGUF file, got {path}, which does not begin with 'GGUF'"
            raise ModelError(msg)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check_version(path, data)
            try:
                tensors, start = _walk(_Reader(data))
            except _CutError:
                msg = f"{path} is cut or damaged: its header does not end within its {size:,} bytes"
                raise ModelError(msg) from None
    _check_tensors(path, tensors, start, size)
    return tensors


def _walk(reader: _Reader) -> tuple[list[StoredTensor], int]:
    """All tensors, and the byte where they begin."""
    reader.at = len(_MAGIC) + 4  # magic and version
    count, pairs = reader.number("Q"), reader.number("Q")
    for _ in range(pairs):
        reader.skip_pair()
    tensors = [reader.tensor() for _ in range(count)]
    return tensors, -(-reader.at // reader.alignment) * reader.alignment


def _check_version(path: Path, data: mmap.mmap) -> None:
    """Raise ModelError for a version that the header's layout is not known of, and for the other byte order."""
    version = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 4], "little")
    if version not in _VERSIONS:
        msg = f"expected a GGUF file of version {' or '.join(map(str, _VERSIONS))}, got {path} of version {version}"
        raise ModelError(msg)


def _check_tensors(path: Path, tensors: Sequence[StoredTensor], start: int, size: int) -> None:
    """Raise ModelError for a tensor of no known type, and one that is not all there."""
    from gguf import GGMLQuantizationType

    known = {int(kind) for kind in GGMLQuantizationType}
    for tensor in tensors:
        if tensor.kind not in known:
            msg = f"{path} is damaged, or too new: tensor '{tensor.name}' is of type {tensor.kind}, which is not known"
            raise ModelError(msg)
        if start + tensor.end > size:
            msg = f"{path} is cut: tensor '{tensor.name}' ends at byte {start + tensor.end:,} of {size:,}"
            raise ModelError(msg)


def check_complete(tensors: Sequence[StoredTensor], layers: int, expected: int, name: str) -> None:
    """Raise ModelError where the file holds tensors that the model has no place for: transformers drops them silently.

    `expected` is how many the model has, tied ones counted once.
    """
    places = re.compile(r"(token_embd|output_norm|output)\.weight|blk\.(\d+)\..*")
    found = {tensor.name: places.fullmatch(tensor.name) for tensor in tensors}
    extra = [tensor for tensor, place in found.items() if place is None or int(place[2] or 0) >= layers]
    if extra or len(tensors) != expected:
        which = f", not '{extra[0]}'" if extra else ""
        msg = (
            f"model '{name}' is not whole: of the {len(tensors)} tensors in its GGUF file transformers would use "
            f"{expected}{which}; use the model's safetensors"
        )
        raise ModelError(msg)


def storage(tensors: Sequence[StoredTensor]) -> tuple[str, str]:
    """The storage type of most weights outside the embeddings, and all in words.

    For example `Q4_1` and `Q4_1 matrices, Q8_0 embeddings, F32 norms`.
    """
    parts: dict[str, Counter[str]] = {part: Counter() for part in ("matrices", "embeddings", "norms")}
    for tensor in tensors:
        parts[tensor.part][tensor.type_name] += tensor.values
    named = [f"{'/'.join(kind for kind, _ in kinds.most_common())} {part}" for part, kinds in parts.items() if kinds]
    main = parts["matrices"] or sum(parts.values(), Counter())
    return main.most_common(1)[0][0], ", ".join(named)


def is_quantised(kind: str) -> bool:
    """True for a storage type that rounds weights to fewer levels than floating-point numbers have."""
    return kind not in _FLOATS

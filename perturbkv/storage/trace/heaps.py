"""The heaps in which HDF5 keeps texts and lists, walked before HDF5 does: one that leads nowhere it reads for ever.

They alone carry no sum in any version of HDF5. The layout is that of "Disk Format: Level 1E - Global Heap" in the HDF5
file format specification: a header, then objects, each with its index and size; index 0 is what is left free.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from perturbkv.errors import TraceError

_HEADER = b"GCOL\x01\0\0\0"
_BLOCK = 2**26
_OBJECT = struct.Struct("<HH4xQ")
"""Index, references, size; objects begin at multiples of 8 behind the header and their heap's size."""


def check_heaps(path: Path) -> None:
    """Raise TraceError where the objects of a heap do not fill it one behind the other.

    A file is read through once, and again when it has changed.
    """
    found = path.stat()
    _check(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=64)
def _check(path: Path, stamp: tuple[int, ...]) -> None:
    """`stamp` tells the file as it is from the file as it was, and is remembered with it."""
    with path.open("rb") as stream:
        for place in list(_places(stream)):
            if not _is_filled(stream, place):
                msg = (
                    f"expected texts and lists that HDF5 can read in {path}, got a damaged heap at byte {place}; the "
                    "file is damaged or was changed since it was made; make it again"
                )
                raise TraceError(msg)


def _places(stream: BinaryIO) -> Iterator[int]:
    """Where heaps begin."""
    begin, kept = 0, b""
    while block := stream.read(_BLOCK):
        block = kept + block
        found = block.find(_HEADER)
        while found >= 0:
            yield begin + found
            found = block.find(_HEADER, found + 1)
        kept = block[-len(_HEADER) + 1 :]
        begin += len(block) - len(kept)


def _is_filled(stream: BinaryIO, place: int) -> bool:
    stream.seek(place + len(_HEADER))
    raw = stream.read(8)
    size = int.from_bytes(raw, "little") - len(_HEADER) - 8
    if len(raw) < 8 or not 0 <= size <= 2**32:
        return False
    objects = stream.read(size)
    at = 0
    while at + _OBJECT.size <= len(objects):
        index, _, length = _OBJECT.unpack_from(objects, at)
        at += _OBJECT.size + -(-length // 8) * 8 if index else length
        if not index and length < _OBJECT.size:
            return False
    return at <= len(objects) == size

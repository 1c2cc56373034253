"""What is worth keeping between runs: folders in the user's cache, each there whole or not at all.

An entry is filled beside its place and renamed into it; a list of its files' sizes and CRC-32 lies in it and is held
against them whenever it is used. No torch here.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

VARIABLE = "PERTURBKV_CACHE"
_PLATFORM = {"darwin": "Library/Caches", "win32": "AppData/Local"}
_LISTING = "listing.json"
_TEMPORARY = ".tmp-"
_CHUNK = 2**24


class NotKeptError(Exception):
    """Something cannot be kept in the cache; the message says why. The work itself can go on without it."""


def place() -> Path:
    """`PERTURBKV_CACHE`, or `perturbkv` in XDG_CACHE_HOME or in the platform's folder of caches."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / _PLATFORM.get(sys.platform, ".cache")
    return Path(caches) / "perturbkv"


def used() -> tuple[int, int]:
    """How many entries there are, and the bytes of all files, those that killed processes left included."""
    entries = list(place().glob(f"*/{_LISTING}"))
    sizes = [file.stat().st_size for file in place().rglob("*") if file.is_file()]
    return sum(not entry.parent.name.startswith(_TEMPORARY) for entry in entries), sum(sizes)


def kept(name: str, fill: Callable[[Path], object]) -> Path:
    """The folder of an entry; where it is missing or damaged `fill` writes its files into a new one.

    Any number of processes may ask at once: each that finds nothing fills its own, and the first to be done wins.
    Raises NotKeptError where the cache cannot be written, and what `fill` raises; nothing is left then.
    """
    entry = place() / name
    if is_whole(entry):
        return entry
    with writing():
        beside = _temporary()
    try:
        with writing():
            _clear_way(entry, beside)
        fill(beside)
        with writing():
            (beside / _LISTING).write_text(json.dumps(_listing(beside), indent=1), encoding="utf-8")
            _publish(beside, entry)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return entry


@contextmanager
def writing() -> Iterator[None]:
    """Around whatever writes into the cache: what the system refuses there is a NotKeptError."""
    try:
        yield
    except OSError as error:
        msg = f"the cache {place()} cannot be written ({error.strerror or error})"
        raise NotKeptError(msg) from error


def is_whole(entry: Path) -> bool:
    """True where an entry's files are those that were written, byte for byte as far as CRC-32 tells."""
    try:
        listing = json.loads((entry / _LISTING).read_text(encoding="utf-8"))
        return bool(listing == _listing(entry))
    except (OSError, ValueError):
        return False


def _listing(folder: Path) -> dict[str, list[int]]:
    """File name -> size in bytes and CRC-32."""
    files = sorted(file for file in folder.iterdir() if file.name != _LISTING)
    return {file.name: [file.stat().st_size, _crc32(file)] for file in files}


def _crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _publish(beside: Path, entry: Path) -> None:
    """Rename into place; where another process was first, its entry stays."""
    try:
        beside.rename(entry)
    except OSError:
        if not is_whole(entry):
            raise


def _temporary() -> Path:
    place().mkdir(parents=True, exist_ok=True)
    _clear_leftovers()
    return Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{platform.node()}-{os.getpid()}-", dir=place()))


def _clear_way(entry: Path, beside: Path) -> None:
    """Take a damaged entry away before the work, not after: another process may put a whole one there meanwhile."""
    if entry.exists():
        entry.rename(beside / "damaged")
        shutil.rmtree(beside / "damaged")


def _clear_leftovers() -> None:
    """Remove what killed processes of this machine left half filled."""
    for leftover in place().glob(f"{_TEMPORARY}{platform.node()}-*"):
        with suppress(ValueError):
            if not psutil.pid_exists(int(leftover.name.split("-")[-2])):
                shutil.rmtree(leftover, ignore_errors=True)

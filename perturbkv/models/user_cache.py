"""Entries of the user's cache: folders that are kept between runs, each complete or absent. No torch here.

An entry is filled under a temporary name and renamed. A list of its files' sizes and CRC-32 is stored in it and
verified whenever the entry is used.
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


class NotCachedError(Exception):
    """A failure to cache something; the message says why. The work itself can continue without the cache."""


def cache_folder() -> Path:
    """Return the cache folder: `PERTURBKV_CACHE`, or `perturbkv` in XDG_CACHE_HOME or the platform's cache folder."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / _PLATFORM.get(sys.platform, ".cache")
    return Path(caches) / "perturbkv"


def usage() -> tuple[int, int]:
    """Return the cache's number of entries and its bytes, which include leftovers of killed processes."""
    entries = list(cache_folder().glob(f"*/{_LISTING}"))
    sizes = [file.stat().st_size for file in cache_folder().rglob("*") if file.is_file()]
    return sum(not entry.parent.name.startswith(_TEMPORARY) for entry in entries), sum(sizes)


def cached_folder(name: str, fill: Callable[[Path], object]) -> Path:
    """Return the folder of a cache entry; `fill` writes its files if the entry is missing or damaged.

    Several processes may call this at once: each that finds no entry fills its own, and the first to finish wins.
    Raises NotCachedError where the cache is not writable, and whatever `fill` raises; no files are left then.
    """
    entry = cache_folder() / name
    if is_whole(entry):
        return entry
    with explain_write_errors():
        temporary = _make_temporary_folder()
    try:
        with explain_write_errors():
            if entry.exists():  # a damaged one
                entry.rename(temporary / "damaged")
                shutil.rmtree(temporary / "damaged")
        fill(temporary)
        with explain_write_errors():
            (temporary / _LISTING).write_text(json.dumps(_listing(temporary), indent=1), encoding="utf-8")
            _publish(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return entry


@contextmanager
def explain_write_errors() -> Iterator[None]:
    """Turn an OSError in the block, which writes into the cache, into a NotCachedError."""
    try:
        yield
    except OSError as error:
        raise NotCachedError(f"the cache {cache_folder()} cannot be written ({error.strerror or error})") from error


def is_whole(entry: Path) -> bool:
    """Return whether a cache entry's files match the sizes and CRC-32 in its listing."""
    try:
        return bool(json.loads((entry / _LISTING).read_text(encoding="utf-8")) == _listing(entry))
    except (OSError, ValueError):
        return False


def _listing(folder: Path) -> dict[str, list[int]]:
    """Return file name -> [bytes, CRC-32] of every file in a folder except the listing file."""
    listing = {}
    for file in sorted(file for file in folder.iterdir() if file.name != _LISTING):
        value = 0
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                value = zlib.crc32(chunk, value)
        listing[file.name] = [file.stat().st_size, value]
    return listing


def _publish(temporary: Path, entry: Path) -> None:
    """Rename a filled folder to its entry's name, or keep the entry that another process has published first."""
    try:
        temporary.rename(entry)
    except OSError:
        if not is_whole(entry):
            raise


def _make_temporary_folder() -> Path:
    """Return a new temporary cache folder, named after this machine and process; those of ended ones are removed."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    prefix = f"{_TEMPORARY}{platform.node()}-"
    for leftover in cache_folder().glob(f"{prefix}*"):
        with suppress(ValueError):
            if not psutil.pid_exists(int(leftover.name.split("-")[-2])):
                shutil.rmtree(leftover, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=cache_folder()))

"""A file of the hub, gone on with where a cut download ended.

The hub's own client throws what came away, and asks a dead connection for a minute. Here a download that is cut without
having brought anything to speak of is tried once more, then named; what came stays beside its place, and is a file only
when all is there. No torch here.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session

from perturbkv.memory import said
from perturbkv.models import hub_part
from perturbkv.models.hub_part import HubError

RETRIES, PAUSE = 1, 1.0
"""How often a download is tried again that brought less than `_MUCH`, and seconds before."""
_MUCH = 2**20
_SHA256 = 64
"""Characters of an etag that is the content's SHA-256: large files'. Others' is git's SHA-1 of size and content."""
_CHUNK = 2**24


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository at one commit; `etag` names its content and is its place in the hub's cache."""

    name: str
    size: int
    etag: str


class _CutError(Exception):
    """A download that ended before its file did."""


def bring(file: RemoteFile, url: str, place: Path, lock: Path) -> None:
    """Bring a file to its place in the cache, where no other process is doing so.

    Raises HubError, which says how much came and what to do.
    """
    partial = place.with_name(f"{place.name}.perturbkv-partial")
    with writing(place, file, partial):
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if not place.is_file():
                _download(file, url, partial)
                _check(file, partial)
                partial.replace(place)


@contextmanager
def writing(place: Path, file: RemoteFile, partial: Path | None = None) -> Iterator[None]:
    """Around what writes into the hub's cache: what the system refuses there is a HubError."""
    try:
        yield
    except OSError as error:
        came = f" at {said(_size(partial))} of {said(file.size)}, which are kept" if partial else ""
        msg = (
            f"{file.name} cannot be written to {place.parent} ({error.strerror or error}){came}; make room there, or "
            "set HF_HOME to another place"
        )
        raise HubError(msg) from error


def _download(file: RemoteFile, url: str, partial: Path) -> None:
    """Fill the partial file. Raises HubError."""
    failures = 0
    while True:
        before = _size(partial)
        try:
            _append(file, url, partial)
        except hub_part.connection_errors(_CutError) as error:
            failures = failures + 1 if _size(partial) - before < _MUCH else 0
            if failures > RETRIES:
                msg = (
                    f"the download of {file.name} was cut at {said(_size(partial))} of {said(file.size)} "
                    f"({str(error) or type(error).__name__}); what came is kept, the same command goes on there"
                )
                raise HubError(msg) from error
            time.sleep(PAUSE)
        else:
            return


def _append(file: RemoteFile, url: str, partial: Path) -> None:
    """Ask for what is missing and write it behind what is there. Raises _CutError, HubError, or the client's errors."""
    start = _size(partial)
    if start >= file.size > 0:
        return
    headers = {**build_hf_headers(), "Range": f"bytes={start}-", "Accept-Encoding": "identity"}
    timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    with get_session().stream("GET", url, headers=headers if start else _whole(headers), timeout=timeout) as response:
        if response.status_code >= 500:
            msg = f"HTTP {response.status_code}"
            raise _CutError(msg)
        if response.status_code >= 400:
            raise HubError(hub_part.refusal(response, file.name))
        with partial.open("ab" if response.status_code == 206 else "wb") as stream:
            for chunk in response.iter_bytes():
                stream.write(chunk)
    if _size(partial) < file.size:
        msg = "the connection was closed"
        raise _CutError(msg)


def _whole(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name != "Range"}


def _check(file: RemoteFile, partial: Path) -> None:
    """Raise HubError, and throw what came away, unless it is what the hub says the file is."""
    if partial.stat().st_size == file.size and _digest(file, partial) == file.etag:
        return
    partial.unlink()
    msg = f"what came of {file.name} is not what the hub says it is (size or checksum), and was thrown away; try again"
    raise HubError(msg)


def _digest(file: RemoteFile, path: Path) -> str:
    digest = hashlib.sha256() if len(file.etag) == _SHA256 else hashlib.sha1(b"blob %d\0" % file.size)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _size(partial: Path) -> int:
    return partial.stat().st_size if partial.exists() else 0

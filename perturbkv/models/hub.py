"""A repository of the hub at one commit, in the hub's cache on disk as its own client lays it out. No torch here.

Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.

A file of the hub, gone on with where a cut download ended.

The hub's own client throws what came away, and asks a dead connection for a minute. Here a download that is cut without
having brought anything to speak of is tried once more, then named; what came stays beside its place, and is a file only
when all is there. No torch here.

Whether the model hub can be asked at all, and what its refusals mean. No torch here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import socket
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session, get_token

from perturbkv.memory import said

_PATIENCE = 5.0
"""Seconds for a host to take a connection; without this check each missing file would cost half a minute."""
_PORTS = {"http": 80, "https": 443}


class HubError(Exception):
    """The hub does not give what it was asked for; the message says why and, where it is known, what to do."""


@cache
def unreachable() -> str:
    """Why the hub cannot be asked, so that its cache on disk is all there is; empty where it can.

    Behind a proxy, which looks names up itself, the hub is taken to be there.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    endpoint = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().get(endpoint.scheme):
        return ""
    try:
        place = (endpoint.hostname or "", endpoint.port or _PORTS.get(endpoint.scheme, 443))
        socket.create_connection(place, _PATIENCE).close()
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached: {error.strerror or error}"
    return ""


def connection_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What the hub's client raises where a connection is refused, cut, too slow, or no HTTP; and `more`.

    Its library is httpx, under whichever name this version of the client imports it.
    """
    library = sys.modules[type(get_session()).__module__.partition(".")[0]]
    return (library.RequestError, *more)


def refusal(response: Any, what: str) -> str:
    """What an answer of the hub means that is none of 200, for `what` was asked for."""
    status, code = int(response.status_code), response.headers.get("X-Error-Code", "")
    login = "with a token that may read it" if get_token() else "after `hf auth login`, or with HF_TOKEN"
    if code == "GatedRepo" or status == 403:
        return f"{what} is gated: ask for access on its page at {constants.ENDPOINT}, then try again {login}"
    if code == "RevisionNotFound":
        return f"{what} is no branch, tag or commit that the hub has; leave out --revision for the newest"
    if status in (401, 404) and code != "EntryNotFound":
        return f"{what} is not there, or private: check its name, and read a private one {login} (HTTP {status})"
    if status == 429:
        return "it answers no more for now (HTTP 429, too many requests); wait some minutes, or log in"
    return f"it answers HTTP {status} for {what}"


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
        except connection_errors(_CutError) as error:
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
            raise HubError(refusal(response, file.name))
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


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPEAK_OF = 2**20
"""Bytes of a download that is announced."""
_log = logging.getLogger(__name__)


class _SilentError(Exception):
    """The hub is there and cannot answer."""


@dataclass(frozen=True)
class Repository:
    """Where a repository's files are, on the hub and on disk.

    Attributes:
        id: owner/name.
        kind: model or dataset.
        commit: which state of it.
        held: what the hub holds at that commit, by name; empty where the hub could not be asked.
        silence: why it could not be asked.
    """

    id: str
    kind: str
    commit: str
    held: Mapping[str, RemoteFile]
    silence: str = ""

    @property
    def folder(self) -> Path:
        """The snapshot: every file that was brought, under its own name."""
        return _home(self.id, self.kind) / "snapshots" / self.commit

    def names(self) -> set[str]:
        """Every file that there is: on the hub, or on disk where the hub could not be asked."""
        there = {file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*") if file.is_file()}
        return set(self.held) or there

    def bring(self, names: Iterable[str]) -> None:
        """Have these files in the snapshot, those missing from the hub. Raises HubError."""
        missing = sorted({name for name in names if not (self.folder / name).is_file()})
        for name in missing:
            if name not in self.held:
                why = f": {self.silence}" if self.silence else ""
                msg = f"{name} is not in {'the cache of it on disk' if why else 'the repository'}{why}"
                raise HubError(msg)
        files = [self.held[name] for name in missing]
        self._check_room(files)
        for file in files:
            self._bring(file)

    def _bring(self, file: RemoteFile) -> None:
        home = _home(self.id, self.kind)
        place = home / "blobs" / file.etag
        lock = Path(constants.HF_HUB_CACHE, ".locks", home.name, f"{file.etag}.lock")
        if file.size >= _SPEAK_OF:
            _log.info("downloading %s of %s (%s), once, into %s", file.name, self.id, said(file.size), home)
        bring(file, hf_hub_url(self.id, file.name, repo_type=self.kind, revision=self.commit), place, lock)
        with writing(place, file):
            _point(self.folder / file.name, place)

    def _check_room(self, files: Iterable[RemoteFile]) -> None:
        """Raise HubError where the disk is too full for these files."""
        cache = Path(constants.HF_HUB_CACHE)
        there = next(folder for folder in (cache, *cache.parents) if folder.exists())
        needed, free = sum(file.size for file in files), shutil.disk_usage(there).free
        if needed > free:
            msg = (
                f"it takes {said(needed)} and {said(free)} are free in {there}; make room there, or set HF_HOME to "
                "another place"
            )
            raise HubError(msg)


def find(name: str, revision: str = "", kind: str = "model") -> Repository:
    """A repository at a branch, tag or commit, the newest of its main branch without one.

    Where the hub does not answer, or refuses, what its cache on disk knows by that name. Raises HubError.
    """
    silence = unreachable()
    if not silence:
        try:
            return _asked(name, revision, kind)
        except connection_errors(_SilentError) as error:
            silence = f"{constants.ENDPOINT} does not answer: {str(error) or type(error).__name__}"
        except HubError as error:
            silence = str(error)
    commit = _known(name, revision, kind)
    if not commit:
        raise HubError(silence)
    return Repository(name, kind, commit, {}, silence)


def _asked(name: str, revision: str, kind: str) -> Repository:
    """What the hub says. Raises HubError for its refusals, and the client's errors where it says nothing."""
    what = f"revision '{revision}' of {name}" if revision else name
    try:
        info = _info(name, revision, kind)
    except HfHubHTTPError as error:
        if error.response.status_code >= 500:
            msg = f"HTTP {error.response.status_code}"
            raise _SilentError(msg) from error
        raise HubError(refusal(error.response, what)) from error
    except HFValidationError as error:
        raise HubError(" ".join(str(error).split())) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{constants.ENDPOINT} answers what no hub would; check HF_ENDPOINT, or the network's login page"
        raise HubError(msg) from error
    held = {one.rfilename: _file(one) for one in info.siblings or () if _is_inside(one.rfilename)}
    found = Repository(name, kind, str(info.sha), held)
    if not _COMMIT.fullmatch(revision):
        _note(_home(name, kind) / "refs" / (revision or "main"), found.commit)
    return found


def _info(name: str, revision: str, kind: str) -> Any:
    """One question and, where its connection is cut, as many more as a download gets."""
    for left in reversed(range(RETRIES + 1)):
        try:
            return HfApi().repo_info(
                name,
                repo_type=kind,
                revision=revision or None,
                files_metadata=True,
                timeout=float(constants.HF_HUB_ETAG_TIMEOUT),
            )
        except connection_errors():
            if not left:
                raise
            time.sleep(PAUSE)
    raise AssertionError


def _file(one: Any) -> RemoteFile:
    """A file as the hub lists it."""
    large = one.lfs
    digest = large.sha256 if large is not None else one.blob_id
    return RemoteFile(one.rfilename, int(one.size or 0), str(digest))


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _known(name: str, revision: str, kind: str) -> str:
    """The commit that the cache on disk knows a revision as; empty where it knows none."""
    home = _home(name, kind)
    with suppress(OSError, ValueError):
        revision = (home / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    return revision if _COMMIT.fullmatch(revision) and (home / "snapshots" / revision).is_dir() else ""


def _home(name: str, kind: str) -> Path:
    return Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}")


def _note(ref: Path, commit: str) -> None:
    """Write down which commit a branch or tag is; a cache that cannot be written goes without."""
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit, encoding="utf-8")


def _point(name: Path, place: Path) -> None:
    """Give a file of the cache its name in the snapshot: a link, a copy where there are none."""
    name.parent.mkdir(parents=True, exist_ok=True)
    if name.is_symlink() and not name.exists():
        name.unlink()
    try:
        name.symlink_to(os.path.relpath(place, name.parent))
    except FileExistsError:
        return
    except OSError:
        shutil.copyfile(place, name)

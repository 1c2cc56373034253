"""Repositories of the model hub at one commit, in the hub's own cache on disk; downloads are resumed. No torch here.

Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache. The hub's own client discards a partial
download and retries a dead connection for a minute. Here an interrupted download that brought nothing is tried once
more and then reported; partial downloads are kept next to the final file, which appears only when it is complete.
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

from perturbkv.memory import format_size

_CONNECT_TIMEOUT = 5.0
"""Seconds for a host to accept a connection; without this check each missing file would cost half a minute."""
_PORTS = {"http": 80, "https": 443}


class HubError(Exception):
    """A failure to get something from the hub; the message says why and, where known, what to do."""


@cache
def unreachable() -> str:
    """Return the reason why the hub cannot be reached; empty if it can.

    With a proxy, which resolves names itself, the hub is assumed to be reachable.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    endpoint = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().get(endpoint.scheme):
        return ""
    try:
        address = (endpoint.hostname or "", endpoint.port or _PORTS.get(endpoint.scheme, 443))
        socket.create_connection(address, _CONNECT_TIMEOUT).close()
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached: {error.strerror or error}"
    return ""


def connection_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the hub client's exceptions for failed connections and invalid HTTP, followed by `more`.

    The client's library is httpx, under whichever name this version imports it.
    """
    library = sys.modules[type(get_session()).__module__.partition(".")[0]]
    return (library.RequestError, *more)


def refusal_reason(response: Any, what: str) -> str:
    """Return the reason why the hub refused a request for `what`, from its error response."""
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
"""Number of retries of a download that brought less than `_MIN_PROGRESS`, and seconds before each."""
_MIN_PROGRESS = 2**20
_SHA256 = 64
"""Characters of an etag that is the content's SHA-256, as for large files; others have git's SHA-1 of size and
content.
"""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository at one commit; `etag` identifies its content and is its file name in the hub's cache."""

    name: str
    size: int
    etag: str


class _CutError(Exception):
    """A download that ended before the file did."""


def download(file: RemoteFile, url: str, path: Path, lock: Path) -> None:
    """Download a file to its path in the cache, unless another process does so at the same time.

    Raises HubError, which says how much was downloaded and what to do.
    """
    partial = path.with_name(f"{path.name}.perturbkv-partial")
    with explain_write_errors(path, file, partial):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if not path.is_file():
                _download(file, url, partial)
                _check_download(file, partial)
                partial.replace(path)


@contextmanager
def explain_write_errors(path: Path, file: RemoteFile, partial: Path | None = None) -> Iterator[None]:
    """Turn an OSError in the block, which writes `file` into the hub's cache, into a HubError.

    `partial` is the partial download, whose size the message says.
    """
    try:
        yield
    except OSError as error:
        progress = f" at {_progress(file, partial)}, which are kept" if partial else ""
        raise HubError(
            f"{file.name} cannot be written to {path.parent} ({error.strerror or error}){progress}; make room there, "
            "or set HF_HOME to another place"
        ) from error


def _download(file: RemoteFile, url: str, partial: Path) -> None:
    """Download the bytes that the partial file lacks, with retries. Raises HubError."""
    failures = 0
    while True:
        before = _partial_size(partial)
        try:
            _append_missing(file, url, partial)
        except connection_errors(_CutError) as error:
            failures = failures + 1 if _partial_size(partial) - before < _MIN_PROGRESS else 0
            if failures > RETRIES:
                raise HubError(
                    f"the download of {file.name} was cut at {_progress(file, partial)} "
                    f"({str(error) or type(error).__name__}); what came is kept, the same command goes on there"
                ) from error
            time.sleep(PAUSE)
        else:
            return


def _append_missing(file: RemoteFile, url: str, partial: Path) -> None:
    """Request the bytes that the partial file lacks, in one request, and append them.

    Raises _CutError, HubError, or one of `connection_errors`.
    """
    start = _partial_size(partial)
    if start >= file.size > 0:
        return
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
        if response.status_code >= 500:
            raise _CutError(f"HTTP {response.status_code}")
        if response.status_code >= 400:
            raise HubError(refusal_reason(response, file.name))
        with partial.open("ab" if response.status_code == 206 else "wb") as stream:
            for chunk in response.iter_bytes():
                stream.write(chunk)
    if _partial_size(partial) < file.size:
        raise _CutError("the connection was closed")


def _check_download(file: RemoteFile, partial: Path) -> None:
    """Raise HubError and delete the download if its size or checksum differs from the hub's."""
    if partial.stat().st_size == file.size and _digest(file, partial) == file.etag:
        return
    partial.unlink()
    raise HubError(
        f"what came of {file.name} is not what the hub says it is (size or checksum), and was thrown away; try again"
    )


def _digest(file: RemoteFile, path: Path) -> str:
    """Return a local copy's checksum, of the same kind as the file's etag."""
    digest = hashlib.sha256() if len(file.etag) == _SHA256 else hashlib.sha1(b"blob %d\0" % file.size)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: digest).hexdigest()


def _progress(file: RemoteFile, partial: Path) -> str:
    """Return downloaded and total size of a file as text, such as `3.1 MiB of 97.6 MiB`."""
    return f"{format_size(_partial_size(partial))} of {format_size(file.size)}"


def _partial_size(partial: Path) -> int:
    """Return the bytes of a partial download; 0 before it has begun."""
    return partial.stat().st_size if partial.exists() else 0


_COMMIT = re.compile(r"[0-9a-f]{40}")
_ANNOUNCED_SIZE = 2**20
"""Size in bytes from which a download is announced."""
_log = logging.getLogger(__name__)


class _SilentError(Exception):
    """A server error of the hub: it is reachable and cannot answer."""


@dataclass(frozen=True)
class Repository:
    """The files of a repository, on the hub and on disk.

    Attributes:
        id: owner/name.
        kind: model or dataset.
        commit: commit of the repository.
        files: files on the hub at that commit, by name; empty where the hub could not be reached.
        offline_reason: reason why it could not be reached.
    """

    id: str
    kind: str
    commit: str
    files: Mapping[str, RemoteFile]
    offline_reason: str = ""

    @property
    def folder(self) -> Path:
        """The snapshot folder, in which every downloaded file has its own name."""
        return _repository_folder(self.id, self.kind) / "snapshots" / self.commit

    def names(self) -> set[str]:
        """Return the names of all files on the hub, or of the files on disk if the hub could not be reached."""
        on_disk = {file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*") if file.is_file()}
        return set(self.files) or on_disk

    def download(self, names: Iterable[str]) -> None:
        """Download the named files that are not on disk yet. Raises HubError."""
        missing = sorted({name for name in names if not (self.folder / name).is_file()})
        for name in missing:
            if name not in self.files:
                why = f": {self.offline_reason}" if self.offline_reason else ""
                raise HubError(f"{name} is not in {'the cache of it on disk' if why else 'the repository'}{why}")
        files = [self.files[name] for name in missing]
        self._check_disk_space(files)
        for file in files:
            self._download_file(file)

    def _download_file(self, file: RemoteFile) -> None:
        """Download one file into the hub's cache and link it into the snapshot."""
        home = _repository_folder(self.id, self.kind)
        path = home / "blobs" / file.etag
        lock = Path(constants.HF_HUB_CACHE, ".locks", home.name, f"{file.etag}.lock")
        if file.size >= _ANNOUNCED_SIZE:
            _log.info("downloading %s of %s (%s), once, into %s", file.name, self.id, format_size(file.size), home)
        download(file, hf_hub_url(self.id, file.name, repo_type=self.kind, revision=self.commit), path, lock)
        with explain_write_errors(path, file):
            _link(self.folder / file.name, path)

    def _check_disk_space(self, files: Iterable[RemoteFile]) -> None:
        """Raise HubError if the cache's disk has too little space to download these files."""
        cache = Path(constants.HF_HUB_CACHE)
        folder = next(folder for folder in (cache, *cache.parents) if folder.exists())
        needed, free = sum(file.size for file in files), shutil.disk_usage(folder).free
        if needed > free:
            raise HubError(
                f"it takes {format_size(needed)} and {format_size(free)} are free in {folder}; make room there, or "
                "set HF_HOME to another place"
            )


def find(name: str, revision: str = "", kind: str = "model") -> Repository:
    """Return a repository at a branch, tag or commit, by default the newest commit of its main branch.

    Where the hub does not answer, or refuses, return the commit in its cache on disk. Raises HubError where there is
    none.
    """
    reason = unreachable()
    if not reason:
        try:
            return _request_repository(name, revision, kind)
        except connection_errors(_SilentError) as error:
            reason = f"{constants.ENDPOINT} does not answer: {str(error) or type(error).__name__}"
        except HubError as error:
            reason = str(error)
    commit = _cached_commit(name, revision, kind)
    if not commit:
        raise HubError(reason)
    return Repository(name, kind, commit, {}, reason)


def check_available(name: str, revision: str = "", kind: str = "model") -> None:
    """Raise HubError where the hub cannot be reached and its cache on disk does not hold the repository."""
    if (reason := unreachable()) and not _cached_commit(name, revision, kind):
        raise HubError(reason)


def _request_repository(name: str, revision: str, kind: str) -> Repository:
    """Return a repository with its files, as listed by the hub.

    Raises HubError for its refusals, and the client's errors without an answer.
    """
    what = f"revision '{revision}' of {name}" if revision else name
    try:
        info = _request_info(name, revision, kind)
    except HfHubHTTPError as error:
        if error.response.status_code >= 500:
            raise _SilentError(f"HTTP {error.response.status_code}") from error
        raise HubError(refusal_reason(error.response, what)) from error
    except HFValidationError as error:
        raise HubError(" ".join(str(error).split())) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(
            f"{constants.ENDPOINT} answers what no hub would; check HF_ENDPOINT, or the network's login page"
        ) from error
    listing = [entry for entry in info.siblings or () if _is_inside(entry.rfilename)]
    files = {entry.rfilename: _remote_file(entry) for entry in listing}
    repository = Repository(name, kind, str(info.sha), files)
    if not _COMMIT.fullmatch(revision):
        _write_ref(_repository_folder(name, kind) / "refs" / (revision or "main"), repository.commit)
    return repository


def _request_info(name: str, revision: str, kind: str) -> Any:
    """Return the hub's description of a repository, retrying after a cut connection."""
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


def _remote_file(entry: Any) -> RemoteFile:
    """Return the `RemoteFile` of an entry of the hub's listing."""
    digest = entry.blob_id if entry.lfs is None else entry.lfs.sha256
    return RemoteFile(entry.rfilename, int(entry.size or 0), str(digest))


def _is_inside(name: str) -> bool:
    """Return whether a file name of the hub's listing stays inside the repository's folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _cached_commit(name: str, revision: str, kind: str) -> str:
    """Return the commit cached on disk for a branch, tag or commit; empty without a cached commit."""
    home = _repository_folder(name, kind)
    with suppress(OSError, ValueError):
        revision = (home / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    return revision if _COMMIT.fullmatch(revision) and (home / "snapshots" / revision).is_dir() else ""


def _repository_folder(name: str, kind: str) -> Path:
    """Return a repository's folder in the hub's cache."""
    return Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}")


def _write_ref(ref: Path, commit: str) -> None:
    """Write the commit of a branch or tag into the cache; do nothing where the cache is not writable."""
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit, encoding="utf-8")


def _link(link: Path, path: Path) -> None:
    """Create a relative link to a cached file, or copy it if links are not supported."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() and not link.exists():
        link.unlink()
    try:
        link.symlink_to(os.path.relpath(path, link.parent))
    except FileExistsError:
        return
    except OSError:
        shutil.copyfile(path, link)

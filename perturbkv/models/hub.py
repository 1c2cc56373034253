"""Files of the model hub, by its own client: cache, login, endpoint and offline mode are its own. No torch here.

The client's environment variables hold, such as HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Where the hub does
not answer, or refuses, the commit in the cache on disk is taken.
"""

from __future__ import annotations

import json
import logging
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, get_token, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

_log = logging.getLogger(__name__)
_CONNECT_S = 5.0
"""Seconds in which a hub that can be reached answers."""


class HubError(Exception):
    """A failure to get something from the hub; the message says why and, where known, what to do."""


class UnreachableHubError(HubError):
    """A hub that is offline or unreachable, where the cache on disk lacks the file."""


def download_file(repository: str, name: str, revision: str = "", kind: str = "model") -> Path:
    """Return the path of a repository's file in the hub's cache, downloaded if it is not there. Raises HubError."""
    with _one_line_errors(repository, name):
        cached = try_to_load_from_cache(repository, name, revision=revision or None, repo_type=kind)
        if cached is None and not constants.HF_HUB_OFFLINE:
            _log.info("downloading %s of %s, once, into %s", name, repository, constants.HF_HUB_CACHE)
        return Path(hf_hub_download(repository, name, revision=revision or None, repo_type=kind))


def download_folder(repository: str, patterns: Sequence[str], revision: str = "") -> Path:
    """Return the folder of a model's repository at one commit, which is its name, with the files of these patterns.

    Files in its subfolders are left out. Raises HubError.
    """
    with _one_line_errors(repository, "its configuration"):
        folder = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
        return Path(folder)


def check_available(repository: str) -> None:
    """Raise HubError at once where the hub cannot be reached and its cache on disk knows nothing of the repository.

    With a proxy, which resolves names itself, the hub is taken to be reachable.
    """
    with _one_line_errors(repository, "its configuration"):
        known = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model")).is_dir()
        endpoint = urlsplit(constants.ENDPOINT)
        if known or urllib.request.getproxies().get(endpoint.scheme):
            return
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled
        port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
        try:
            socket.create_connection((endpoint.hostname or "", port), _CONNECT_S).close()
        except OSError as error:
            raise ConnectionError(f"{constants.ENDPOINT} cannot be reached: {error.strerror or error}") from error


@contextmanager
def _one_line_errors(repository: str, name: str) -> Iterator[None]:
    """Turn any error in the block, which gets the file `name` of a repository, into a HubError."""
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise UnreachableHubError(
            f"{name} is not in the cache on disk, and {_reason(error.__cause__ or error, repository, name)}"
        ) from error
    except Exception as error:  # the client lets through whatever its transport raises
        raise HubError(_reason(error, repository, name)) from error


def _reason(error: BaseException, repository: str, name: str) -> str:
    """Return why the hub's client failed, in one line, with what to do where that is known."""
    login = "with a token that may read it" if get_token() else "after `hf auth login`, or with HF_TOKEN"
    text = " ".join(str(error).split()) or type(error).__name__
    match error:
        case GatedRepoError():
            return f"{repository} is gated: ask for access on its page at {constants.ENDPOINT}, then try again {login}"
        case RevisionNotFoundError():
            return f"{repository} has no such branch, tag or commit; leave out --revision for the newest"
        case RepositoryNotFoundError():
            return f"{repository} is not there, or private: check its name, and read a private one {login}"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set"
        case EntryNotFoundError():
            return f"{name} is not in the repository"
        case HTTPError():
            return f"{constants.ENDPOINT} does not answer: {text}"
        case json.JSONDecodeError():
            return f"{constants.ENDPOINT} answers what no hub would; check HF_ENDPOINT, or the network's login page"
        case ConnectionError():
            return text
        case OSError(errno=int()):
            return (
                f"{name} cannot be written to {constants.HF_HUB_CACHE} ({error.strerror}); make room there, or set "
                "HF_HOME to another place"
            )
    return text

"""Whether the model hub can be asked at all, and what its refusals mean. No torch here."""

from __future__ import annotations

import socket
import sys
import urllib.request
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.utils import get_session, get_token

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

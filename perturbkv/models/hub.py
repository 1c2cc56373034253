"""Whether the model hub can be asked at all: without this check, each missing file would cost half a minute."""

from __future__ import annotations

import os
import socket
import urllib.request
from functools import cache
from urllib.parse import urlsplit

_DEFAULT_ENDPOINT = "https://huggingface.co"


@cache
def local_only() -> bool:
    """True where the hub's host has no address; its cache on disk is then all there is.

    Behind a proxy, which looks names up itself, the hub is taken to be there.
    """
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", _DEFAULT_ENDPOINT))
    if urllib.request.getproxies().get(endpoint.scheme):
        return False
    try:
        socket.getaddrinfo(endpoint.hostname, endpoint.port)
    except OSError:
        return True
    return False

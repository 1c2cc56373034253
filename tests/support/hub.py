"""A stand-in of the model hub on this machine's loopback: repositories, revisions, logins, and what goes wrong."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".zip")
"""Stored as the hub stores large files: known by their SHA-256."""


@dataclass
class Held:
    """A repository: its files at each commit, and what each branch or tag is. `login`: a token that may read it."""

    commits: dict[str, dict[str, bytes]]
    names: dict[str, str]
    login: str = ""
    gated: bool = False


@dataclass
class Trouble:
    """What goes wrong with a file, or with the API: it is cut behind so many bytes, or another status comes."""

    cut: int | None = None
    status: int = 200


@dataclass
class Hub:
    """What the stand-in holds and what it was asked."""

    address: str = ""
    held: dict[str, Held] = field(default_factory=dict)
    troubles: dict[str, Trouble] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Path of every GET."""

    def add(self, name: str, folder: Path, kind: str = "model", revision: str = "main", **more: Any) -> str:
        """Put a folder's files there as another commit of a repository. Returns the commit."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        held = self.held.setdefault(f"{kind}s/{name}", Held({}, {}, **more))
        held.commits[commit], held.names[revision] = files, commit
        return commit

    def downloads(self, name: str) -> int:
        """How often a file was asked for."""
        return sum(path.endswith(f"/{name}") for path in self.asked)


def etag(name: str, content: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    large = {"lfs": {"size": len(content), "oid": etag(name, content), "pointerSize": 130}}
    blob = hashlib.sha1(b"pointer" + content).hexdigest() if name.endswith(LARGE) else etag(name, content)
    return {"type": "file", "path": name, "size": len(content), "oid": blob, **(large if name.endswith(LARGE) else {})}


class _Answers(BaseHTTPRequestHandler):
    """The hub's answers to what its client asks."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *about: object) -> None:
        """Silence."""

    def do_HEAD(self) -> None:  # noqa: N802
        self.do_GET()

    def do_GET(self) -> None:  # noqa: N802
        path = unquote(urlsplit(self.path).path)
        if self.command == "GET":
            self.hub.asked.append(path)
        trouble = self.hub.troubles.get("api" if path.startswith("/api/") else path.rpartition("/")[2], Trouble())
        if trouble.status != 200:
            self._send(trouble.status, b"{}")
        elif path.startswith(("/api/models/", "/api/datasets/")):
            kind, owner, name, *rest = path.removeprefix("/api/").split("/", 4)
            self._about(f"{kind}/{owner}/{name}", rest[-1] if rest else "main", rest[:1] == ["tree"])
        elif path.startswith("/api/"):
            self._send(404, b"{}")
        else:
            where, _, rest = path.strip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            self._file(where if where.startswith("datasets/") else f"models/{where}", revision, name)

    def _commit(self, where: str, revision: str) -> str | None:
        """The commit that is asked for, if it may be read; else the refusal is sent."""
        held = self.hub.held.get(where)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if held is None or (held.login and given != held.login):
            gated = held is not None and held.gated
            code = "GatedRepo" if gated else "RepoNotFound"
            self._send(403 if gated and given else 401, b"{}", {"X-Error-Code": code})
            return None
        commit = held.names.get(revision, revision)
        if commit not in held.commits:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit

    def _about(self, where: str, revision: str, tree: bool) -> None:
        if not (commit := self._commit(where, revision)):
            return
        name = where.partition("/")[2]
        about = {"id": name, "modelId": name, "sha": commit, "siblings": [], "tags": [], "private": False}
        files = [_entry(*one) for one in self.hub.held[where].commits[commit].items()]
        self._send(200, json.dumps(files if tree else {**about, "downloads": 0, "likes": 0}).encode())

    def _file(self, where: str, revision: str, name: str) -> None:
        if not (commit := self._commit(where, revision)):
            return
        content = self.hub.held[where].commits[commit].get(name)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        about = {"ETag": f'"{etag(name, content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").rstrip("-") or 0)
        trouble = self.hub.troubles.get(name, Trouble())
        self._send(206 if asked else 200, content[start:], about, trouble.cut)

    def _send(self, status: int, content: bytes, headers: dict[str, str] = {}, cut: int | None = None) -> None:  # noqa: B006
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
            self.close_connection = cut is not None


@contextmanager
def serving() -> Iterator[Hub]:
    """The stand-in, answering until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

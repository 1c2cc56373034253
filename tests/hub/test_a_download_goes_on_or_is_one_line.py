"""What fails on the way from the hub is one line that names it, and the next try goes on."""

from __future__ import annotations

import errno
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from tests.support.hub import Hub, Trouble
from tests.support.hub_models import ID, WEIGHTS, point, refused, same


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_download_that_is_cut_is_one_line_and_whole_the_next_time(name: str, hub: Hub, folder: Path) -> None:
    hub.add(ID, folder)
    hub.troubles[name] = Trouble(cut=100)
    assert "does not answer: " in refused()
    hub.troubles.clear()
    assert same(pk.load_model(ID, device="cpu"), pk.load_model(str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("status", "words"), [(429, "429 Too Many Requests"), (500, "500 Internal Server Error"), (418, "418")]
)
def test_another_answer_is_named(status: int, words: str, hub: Hub, folder: Path) -> None:
    hub.add(ID, folder)
    hub.troubles["api"] = Trouble(status=status)
    said = refused()
    assert f"not in the cache on disk, and {hub.address} does not answer: " in said and words in said
    hub.troubles.clear()
    commit = pk.load_model(ID, device="cpu").revision
    hub.troubles["api"] = Trouble(status=status)
    assert pk.load_model(ID, device="cpu").revision == commit, "of the cache"


def test_an_answer_that_is_no_hubs_is_named(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, folder)
    monkeypatch.setattr("tests.support.hub.json.dumps", lambda document: "<html>please log in</html>")
    assert "answers what no hub would; check HF_ENDPOINT" in refused()


def test_a_refused_connection_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    point(monkeypatch, address, tmp_path)
    began = time.monotonic()
    said = refused()
    assert f"{address} does not answer: " in said and "Connection refused" in said
    assert time.monotonic() - began < 2


def test_a_full_disk_says_where_to_make_room(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*asked: Any, **more: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.add(ID, folder)
    monkeypatch.setattr("perturbkv.models.hub.hf_hub_download", full)
    assert f"{WEIGHTS} cannot be written to " in (said := refused())
    assert "(No space left on device); make room there, or set HF_HOME" in said

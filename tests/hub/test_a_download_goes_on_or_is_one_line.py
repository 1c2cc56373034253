"""What fails on the way from the hub: one line that names it, and what came is kept for the next try."""

from __future__ import annotations

import errno
import socket
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.models import hub as hub_download
from perturbkv.models import hub as hub_repository
from tests.support.hub import Hub, Trouble
from tests.support.hub_models import ID, WEIGHTS, partials, point, refused, same


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_download_that_is_cut_is_named_after_one_retry_and_goes_on_there(
    name: str, hub: Hub, folder: Path, tmp_path: Path
) -> None:
    hub.add(ID, folder)
    size = (folder / name).stat().st_size
    hub.troubles[name] = Trouble(cut=size // 2)
    began = time.monotonic()
    said = refused()
    assert time.monotonic() - began < 5
    assert f"the download of {name} was cut at" in said
    assert "what came is kept, the same command goes on there" in said
    assert hub.downloads(name) == ["", f"bytes={size // 2}-"]
    (partial,) = partials(tmp_path)
    assert partial.read_bytes() == (folder / name).read_bytes()[: size // 2]
    hub.troubles.clear()
    assert same(pk.load_model(ID, device="cpu"), pk.load_model(str(folder), device="cpu"))
    assert hub.downloads(name)[2:] == [f"bytes={size // 2}-"]
    assert partials(tmp_path) == []


def test_a_connection_that_is_cut_once_is_not_told(hub: Hub, folder: Path) -> None:
    hub.add(ID, folder)
    hub.troubles[WEIGHTS] = Trouble(cut=1000, times=1)
    assert pk.load_model(ID, device="cpu").layers
    assert hub.downloads(WEIGHTS) == ["", "bytes=1000-"]


def test_a_download_that_comes_on_is_asked_for_until_it_is_there(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection brings something to speak of before it is cut."""
    hub.add(ID, folder)
    monkeypatch.setattr(hub_download, "_MIN_PROGRESS", 1000)
    size = (folder / WEIGHTS).stat().st_size
    sent = iter(range(size // 8, 2 * size, size // 8))

    class Growing(Trouble):
        """Cut a little later every time."""

        def __getattribute__(self, name: str) -> Any:
            return next(sent) if name == "cut" else super().__getattribute__(name)

    hub.troubles[WEIGHTS] = Growing()
    assert pk.load_model(ID, device="cpu").layers
    assert len(hub.downloads(WEIGHTS)) > 5


@pytest.mark.slow
def test_a_hub_that_stalls_is_named(hub: Hub, folder: Path) -> None:
    hub.add(ID, folder)
    hub.troubles[WEIGHTS] = Trouble(cut=1000, stall=1.6)
    began = time.monotonic()
    assert f"the download of {WEIGHTS} was cut at 1000 bytes of" in refused()
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_hub_that_says_nothing_is_named(hub: Hub, folder: Path) -> None:
    hub.add(ID, folder)
    hub.troubles["api"] = Trouble(stall=1.6)
    assert f"{hub.address} does not answer" in refused()
    hub.troubles.clear()
    commit = pk.load_model(ID, device="cpu").revision
    hub.troubles["api"] = Trouble(status=503)
    assert pk.load_model(ID, device="cpu").revision == commit


@pytest.mark.parametrize(
    ("status", "words"), [(429, "too many requests"), (500, "does not answer: HTTP 500"), (418, "answers HTTP 418")]
)
def test_another_answer_is_named(status: int, words: str, hub: Hub, folder: Path) -> None:
    hub.add(ID, folder)
    hub.troubles["api"] = Trouble(status=status)
    assert words in refused()


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
    assert f"{address} cannot be reached: Connection refused" in refused()
    assert time.monotonic() - began < 2


def test_bytes_that_are_not_the_files_are_thrown_away(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add(ID, folder)
    hub.troubles[WEIGHTS] = Trouble(spoiled=True, times=1)
    assert f"what came of {WEIGHTS} is not what the hub says it is" in refused()
    assert partials(tmp_path) == []
    assert pk.load_model(ID, device="cpu").layers


def test_half_a_file_of_another_try_is_never_taken_as_whole(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """Whatever lies where a download left off: the checksum is of the whole."""
    hub.add(ID, folder)
    hub.troubles[WEIGHTS] = Trouble(cut=1000)
    refused()
    (partial,) = partials(tmp_path)
    partial.write_bytes(b"x" * 1000)
    hub.troubles.clear()
    assert "is not what the hub says it is" in refused()
    assert same(pk.load_model(ID, device="cpu"), pk.load_model(str(folder), device="cpu"))


def test_a_full_disk_is_named_before_and_while_it_fills(
    hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(ID, folder)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(hub_repository.shutil, "disk_usage", lambda place: usage(10, 9, 1))
        assert "it takes" in refused()
    assert hub.downloads(WEIGHTS) == []
    monkeypatch.setattr(Path, "open", filling(Path.open, ".perturbkv-partial", 2048))
    said = refused()
    assert "(No space left on device) at 2.0 KiB of" in said and "make room there, or set HF_HOME" in said
    monkeypatch.undo()


def filling(opens: Callable[..., Any], name: str, most: int) -> Callable[..., Any]:
    """Path.open as on a disk that takes so many bytes of each file of that name."""

    def opened(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
        stream = opens(path, mode, *more, **named)
        if not path.name.endswith(name) or "r" in mode:
            return stream
        write = stream.write

        class Full:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *about: object) -> None:
                stream.close()

            def write(self, chunk: bytes) -> None:
                room = most - stream.tell()
                write(chunk[:room])
                if len(chunk) > room:
                    raise OSError(errno.ENOSPC, "No space left on device")

        return Full()

    return opened

"""A model of the hub, from a stand-in on the loopback: whole and at its revision, or one line and what came is kept."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import close_session, constants

import perturbkv as pk
from perturbkv.datasets.hub_data import hub_file
from perturbkv.errors import DatasetError, ModelError
from perturbkv.models import hub as ours
from perturbkv.models import hub_download, hub_repository
from tests.support.folders import model_folder
from tests.support.gguf_files import gguf_file
from tests.support.hub import Hub, Trouble, serving
from tests.support.models import MIXED, tiny_model

ID, WEIGHTS = "owner/tiny", "model.safetensors"
TOKEN = "hf_not-to-be-shown"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        point(monkeypatch, found.address, tmp_path)
        yield found
    close_session()


def point(monkeypatch: pytest.MonkeyPatch, address: str, home: Path) -> None:
    """The hub's client and ours ask there, into an empty cache, without a login."""
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(home / "cache"), "HF_TOKEN_PATH": str(home / "token"), "HF_HUB_ETAG_TIMEOUT": 1,
        "HF_HUB_DOWNLOAD_TIMEOUT": 1,
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("PERTURBKV_CACHE", str(home / "converted"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub_download, "PAUSE", 0.01)
    monkeypatch.setattr(hub_repository, "PAUSE", 0.01)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    ours.unreachable.cache_clear()


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    yield
    ours.unreachable.cache_clear()


def sharded(folder: Path, beside: Path) -> Path:
    """The model in shards, the index among them."""
    shutil.copytree(folder, beside)
    (beside / WEIGHTS).unlink()
    tiny_model().save_pretrained(beside, max_shard_size="20kB")
    assert len(list(beside.glob("*.safetensors"))) > 2
    return beside


def same(found: Any, expected: Any) -> bool:
    ids = torch.arange(40).unsqueeze(0)
    with torch.inference_mode():
        return torch.equal(found.model(ids).logits, expected.model(ids).logits)


def refused(name: str = ID, **more: Any) -> str:
    with pytest.raises(ModelError) as raised:
        pk.load_model(name, device="cpu", **more)
    said = str(raised.value)
    assert "\n" not in said and TOKEN not in said and ";" in said
    assert said.startswith(f"model '{name}' needs {name.partition(':')[0]} and the hub did not give it: ")
    return said.partition("did not give it: ")[2]


def partials(home: Path) -> list[Path]:
    return sorted((home / "cache").rglob("*.perturbkv-partial"))


def test_a_single_file_and_shards_are_the_folder(hub: Hub, folder: Path, tmp_path: Path) -> None:
    expected = pk.load_model(str(folder), device="cpu")
    commit = hub.add(ID, folder)
    hub.add("owner/shards", sharded(folder, tmp_path / "shards"))
    found = pk.load_model(ID, device="cpu")
    assert same(found, expected)
    assert same(pk.load_model("owner/shards", device="cpu"), expected)
    assert (found.name, found.revision, found.weights) == (ID, commit, "float32")


def test_what_was_brought_is_not_asked_for_again(hub: Hub, folder: Path) -> None:
    hub.add(ID, folder)
    pk.load_model(ID, device="cpu")
    hub.asked.clear()
    pk.load_model(ID, device="cpu")
    assert [path for path, _ in hub.asked] == [f"/api/models/{ID}"]


def test_the_hubs_own_client_finds_what_we_brought(hub: Hub, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    commit = hub.add(ID, folder)
    pk.load_model(ID, device="cpu")
    found = Path(snapshot_download(ID, local_files_only=True))
    assert found.name == commit
    assert (found / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_a_branch_a_tag_and_a_commit_are_told_apart(hub: Hub, folder: Path, tmp_path: Path) -> None:
    other = model_folder(tmp_path / "other", seed=5)
    old, new = hub.add(ID, folder, revision="v1"), hub.add(ID, other)
    found = {name: pk.load_model(ID, device="cpu", revision=name) for name in ("v1", old, "main", None)}
    assert [one.revision for one in found.values()] == [old, old, new, new]
    assert same(found["v1"], found[old]) and not same(found["v1"], found["main"])


@pytest.mark.parametrize("family", MIXED)
def test_a_model_that_is_measured_in_some_layers_is_pinned_too(family: str, hub: Hub, tmp_path: Path) -> None:
    folder, other = model_folder(tmp_path / "mixed", family), model_folder(tmp_path / "other", family, seed=5)
    old, _ = hub.add(ID, folder, revision="v1"), hub.add(ID, other)
    found = pk.load_model(ID, device="cpu", revision="v1")
    assert (found.revision, found.layer_indices) == (old, (1, 3))
    assert same(found, pk.load_model(str(folder), device="cpu"))
    assert not same(found, pk.load_model(ID, device="cpu"))


def test_a_revision_that_is_none_is_refused(hub: Hub, folder: Path) -> None:
    hub.add(ID, folder)
    assert "revision 'v9' of owner/tiny is no branch, tag or commit" in refused(revision="v9")


@pytest.mark.parametrize("name", ["random:mistral-7b", "smollm2-135m-q4_1", "folder", "file"])
def test_a_revision_of_what_is_not_the_hubs_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    places = {"folder": str(folder), "file": str(gguf_file(tmp_path / "tiny.gguf"))}
    with pytest.raises(ModelError, match="^a revision pins a model of the hub, .*leave out --revision$"):
        pk.load_model(places.get(name, name), revision="main")


def test_without_the_hub_its_cache_is_taken_at_every_revision_it_knows(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(ID, folder, revision="v1")
    hub.add(ID, folder)
    for name in ("v1", None):
        pk.load_model(ID, device="cpu", revision=name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ours.unreachable.cache_clear()
    hub.asked.clear()
    assert [pk.load_model(ID, device="cpu", revision=name).revision for name in ("v1", commit, None)] == [commit] * 3
    assert hub.asked == []
    assert "HF_HUB_OFFLINE is set" in refused(revision="v2")


def test_a_cache_that_lacks_a_file_says_which(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, folder)
    pk.load_model(ID, device="cpu")
    next((Path(constants.HF_HUB_CACHE)).glob(f"models--owner--tiny/snapshots/*/{WEIGHTS}")).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ours.unreachable.cache_clear()
    assert "neither model.safetensors nor model.safetensors.index.json" in refused()


@pytest.mark.parametrize("where", ["HF_TOKEN", "file"])
def test_a_private_model_is_read_with_the_hubs_own_login(
    where: str, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(ID, folder, login=TOKEN)
    said = refused()
    assert (
        "not there, or private: check its name, and read a private one after `hf auth login`, or with HF_TOKEN" in said
    )
    if where == "HF_TOKEN":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        assert "with a token that may read it" in refused()
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    else:
        Path(constants.HF_TOKEN_PATH).write_text(TOKEN)
    assert pk.load_model(ID, device="cpu").layers


def test_a_gated_model_says_where_to_ask(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, folder, login=TOKEN, gated=True)
    assert "owner/tiny is gated: ask for access" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_of-somebody-else")
    assert "owner/tiny is gated: ask for access" in refused()


def test_what_a_login_has_brought_is_there_without_it(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add(ID, folder, login=TOKEN, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    pk.load_model(ID, device="cpu")
    monkeypatch.delenv("HF_TOKEN")
    assert pk.load_model(ID, device="cpu").revision == commit


def test_a_name_that_the_hub_does_not_know_is_refused(hub: Hub) -> None:
    assert "owner/tiny is not there, or private: check its name" in refused()


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
    monkeypatch.setattr(hub_download, "_MUCH", 1000)
    size = (folder / WEIGHTS).stat().st_size
    sent = iter(range(size // 8, 2 * size, size // 8))

    class Growing(Trouble):
        """Cut a little later every time."""

        def __getattribute__(self, name: str) -> Any:
            return next(sent) if name == "cut" else super().__getattribute__(name)

    hub.troubles[WEIGHTS] = Growing()
    assert pk.load_model(ID, device="cpu").layers
    assert len(hub.downloads(WEIGHTS)) > 5


def test_a_hub_that_stalls_is_named(hub: Hub, folder: Path) -> None:
    hub.add(ID, folder)
    hub.troubles[WEIGHTS] = Trouble(cut=1000, stall=1.6)
    began = time.monotonic()
    assert f"the download of {WEIGHTS} was cut at 1000 bytes of" in refused()
    assert time.monotonic() - began < 5


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


def test_a_gguf_file_of_the_hub_is_the_file(hub: Hub, tmp_path: Path) -> None:
    gguf = gguf_file(tmp_path / "files" / "tiny.Q4_1.gguf")
    hub.add(ID, gguf.parent)
    found = pk.load_model(f"{ID}:tiny.Q4_1.gguf", device="cpu")
    expected = pk.load_model(str(gguf), device="cpu")
    assert same(found, expected)
    assert (found.weights, found.revision) == ("Q4_1 → float32", expected.revision)
    assert "other.gguf is not in the repository" in refused(f"{ID}:other.gguf")


def test_a_part_of_a_gguf_file_says_how_to_merge(tmp_path: Path) -> None:
    part = gguf_file(tmp_path / "tiny-00001-of-00003.gguf")
    for name in (str(part), f"{ID}:tiny-00001-of-00003.gguf"):
        with pytest.raises(ModelError, match="is one of 3 parts of a GGUF file, .*llama-gguf-split --merge"):
            pk.load_model(name)


def test_a_repository_without_safetensors_is_named(hub: Hub, folder: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    (bare / WEIGHTS).unlink()
    hub.add(ID, bare)
    assert "holds neither model.safetensors nor" in refused()


def test_an_index_that_names_what_is_not_there_is_refused(hub: Hub, folder: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(folder, tmp_path / "bad"))
    (bad / WEIGHTS).unlink()
    (bad / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "../../elsewhere"}}))
    hub.add(ID, bad)
    assert "../../elsewhere is not in the repository" in refused()


def test_a_data_sets_file_goes_the_same_way(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.zip").write_bytes(b"zip" * 1000)
    hub.add("owner/data", tmp_path / "data", "dataset")
    hub.troubles["data.zip"] = Trouble(cut=700)
    with pytest.raises(DatasetError, match="the hub did not give owner/data/data.zip .*was cut at 700 bytes"):
        hub_file("qasper", "qasper.jsonl", "owner/data", "data.zip")
    hub.troubles.clear()
    assert Path(hub_file("qasper", "qasper.jsonl", "owner/data", "data.zip")).read_bytes() == b"zip" * 1000
    assert hub.downloads("data.zip") == ["", "bytes=700-", "bytes=700-"]

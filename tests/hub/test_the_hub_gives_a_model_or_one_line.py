"""The hub gives a model or one line; a download goes on."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import perturbkv as pk
from perturbkv.datasets.data_files import hub_file
from perturbkv.errors import DatasetError, ModelError
from tests.support.folders import model_folder
from tests.support.gguf_files import gguf_file
from tests.support.hub import Hub, Trouble
from tests.support.hub_models import ID, TOKEN, WEIGHTS, point, refused, same, sharded
from tests.support.models import MIXED


@pytest.mark.slow
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
    assert hub.asked == [f"/api/models/{ID}/revision/main"]


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
    assert "owner/tiny has no such branch, tag or commit; leave out --revision" in refused(revision="v9")


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
    hub.asked.clear()
    assert [pk.load_model(ID, device="cpu", revision=name).revision for name in ("v1", commit, None)] == [commit] * 3
    assert hub.asked == []
    assert "HF_HUB_OFFLINE is set" in refused(revision="v2")


def test_a_cache_that_lacks_a_file_says_which(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, folder)
    pk.load_model(ID, device="cpu")
    next((Path(constants.HF_HUB_CACHE)).glob(f"models--owner--tiny/snapshots/*/{WEIGHTS}")).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "model.safetensors is not in the cache on disk, and HF_HUB_OFFLINE is set" in refused()


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
    assert "model.safetensors is not in the repository" in refused()


@pytest.mark.parametrize(
    ("name", "words"),
    [("a.safetensors", "a.safetensors is not in the repository"), ("../../elsewhere", "'../../elsewhere'")],
)
def test_an_index_that_names_what_is_not_there_is_refused(
    name: str, words: str, hub: Hub, folder: Path, tmp_path: Path
) -> None:
    bad = Path(shutil.copytree(folder, tmp_path / "bad"))
    (bad / WEIGHTS).unlink()
    (bad / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    hub.add(ID, bad)
    assert words in refused()


def test_a_data_sets_file_goes_the_same_way(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.zip").write_bytes(b"zip" * 1000)
    hub.add("owner/data", tmp_path / "data", "dataset")
    hub.troubles["data.zip"] = Trouble(status=404)
    with pytest.raises(DatasetError, match="the hub did not give owner/data/data.zip "):
        hub_file("qasper", "qasper.jsonl", "owner/data", "data.zip")
    hub.troubles.clear()
    assert hub_file("qasper", "qasper.jsonl", "owner/data", "data.zip").read_bytes() == b"zip" * 1000
    assert hub.downloads("data.zip") == 1


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

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perturbkv.errors import OutputError
from perturbkv.storage.atomic_files import atomic_path, clear_leftovers, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_file_appears_when_it_is_complete_and_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done = tmp_path / "new" / "folder" / "a.txt", []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda opened: (done.append("fsync"), fsync(opened)))
    monkeypatch.setattr(os, "replace", lambda one, other: (done.append("rename"), replace(one, other)))
    with atomic_path(path) as beside:
        beside.write_text("all")
        assert not path.exists()
        assert beside.parent == path.parent
    assert done == ["fsync", "rename", "fsync"]  # the contents, then the folder
    assert path.read_text() == "all"
    write_atomically(path, lambda stream: stream.write(b"more"))
    assert path.read_bytes() == b"more"
    assert names(path.parent) == ["a.txt"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("precious")
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as beside:
        beside.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "precious"
    assert names(tmp_path) == ["a.txt"]


def test_an_error_removes_the_folders_that_were_made(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "there" / "new" / "er" / "a.txt"):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["there"]
    assert names(tmp_path / "there") == []
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "new" / "er" / "a.txt"):
        (tmp_path / "new" / "another.txt").touch()
        raise KeyboardInterrupt
    assert names(tmp_path / "new") == ["another.txt"]


def test_a_place_that_cannot_be_written_is_known_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    worked = []
    for path in (tmp_path / "file" / "a.txt", tmp_path / ("n" * 255)):
        with pytest.raises(OutputError, match="expected a place for"), atomic_path(path):
            worked.append(path)
    assert worked == []


def test_leftovers_of_one_file_alone_are_cleared(tmp_path: Path) -> None:
    left = ["a[1].h5.tmp-1", "a[1].h5.tmp-23"]
    others = ["a1.h5.tmp-1", "a[1].h5", "a[1].h5.tmpl", "b.h5.tmp-1"]
    for name in (*left, *others):
        (tmp_path / name).touch()
    clear_leftovers(tmp_path / "a[1].h5")
    assert names(tmp_path) == sorted(others)

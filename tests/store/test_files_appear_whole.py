"""Files appear whole or not at all, at places that are known before any work; a spreadsheet computes nothing."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from perturbkv.errors import OutputError
from perturbkv.storage.atomic_files import atomic_path, clear_leftovers, write_atomically
from perturbkv.storage.output import check_writable
from perturbkv.storage.run.journal import journal_path
from perturbkv.storage.trace.export import tokens_path, write, write_tokens
from tests.support import prompts
from tests.support.growing import OLD, opened


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


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "er" / "t.h5")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "t.h5").write_text("there")
    check_writable(tmp_path / "t.h5")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("t.h5", "there")]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("/proc/nowhere/t.h5")
    os.mkfifo(tmp_path / "pipe")
    places = {
        "file/t.h5": "expected a place for",
        "file/a/b/t.h5": "expected a place for",
        "folder": "got the folder",
        "loop": "a loop of links",
        "loop/t.h5": "expected a place for",
        "nowhere": "expected a place for",
        "pipe": "a device, a pipe or a loop",
        "n" * 300: "File name too long",
        f"{'n' * 250}.h5": "File name too long",  # there is no room for the names beside it
        f"new/{'n' * 300}/t.h5": "File name too long",
        "/".join(["n" * 99] * 50): "File name too long",
        os.fsdecode(b"\xff.h5"): r"a path in UTF-8.*\\xff",
    }
    for name, words in places.items():
        with pytest.raises(OutputError, match=words):
            check_writable(tmp_path / name)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["file", "folder", "loop", "nowhere", "pipe"]


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/full")
    for name in ("pipe", "device"):
        with pytest.raises(OutputError, match="a device, a pipe or a loop"):
            write_atomically(tmp_path / name, lambda stream: stream.write(b"whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "pipe"]


def test_through_a_link_the_file_that_it_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "far" / "t.txt")
    write_atomically(tmp_path / "link", lambda stream: stream.write(b"whole"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "t.txt").read_bytes() == b"whole"
    assert journal_path(tmp_path / "link") == tmp_path / "far" / "t.txt.journal"


@pytest.mark.parametrize("inside", [True, False], ids=["a folder", "a file"])
def test_somebody_elses_journal_is_left_alone(tmp_path: Path, inside: bool) -> None:
    journal = journal_path(tmp_path / "t.h5")
    notes = journal / "notes.txt" if inside else journal
    notes.parent.mkdir(exist_ok=True)
    notes.write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"expected a run's journal at .*t\.h5\.journal, got .*; move it away"):
            opened(tmp_path / "t.h5", OLD, overwrite=overwrite)
    assert notes.read_text() == "precious"


@pytest.mark.parametrize("name", [".nfs0000a1b", ".DS_Store"])
def test_what_a_file_system_leaves_in_a_journal_is_nobodys(tmp_path: Path, name: str) -> None:
    journal = journal_path(tmp_path / "t.h5")
    journal.mkdir()
    (journal / name).write_bytes(b"left")
    assert opened(tmp_path / "t.h5", OLD).missing()


WORDS = ["=cmd|' /C calc'!A0", "+1+cmd", "-2+3", "@SUM(1)", "\tx", "\rx", "-1\n=2"]


def cells(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("word", WORDS)
def test_a_formula_in_an_id_or_a_prompt_is_text(tmp_path: Path, word: str) -> None:
    trace = prompts.made(prompts.sample(word, ("The", word, "", "é", "-", "12", " sat", ".", " Who?")))
    table, tokens = tmp_path / "t.csv", tokens_path(tmp_path / "t.csv")
    write(trace, table)
    write_tokens(trace, tokens)
    assert {row["sample"] for row in cells(table) + cells(tokens)} == {f"'{word}"}
    assert [row["text"] for row in cells(tokens)][:6] == ["The", f"'{word}", "", "é", "-", "12"]


@pytest.mark.parametrize("word", ["-1.5", "+3e5", "plain", "'quoted", "a=b", "−1"])
def test_numbers_and_plain_names_stay_as_they_are(tmp_path: Path, word: str) -> None:
    trace = prompts.made(prompts.sample(word))
    write(trace, tmp_path / "t.csv")
    rows = cells(tmp_path / "t.csv")
    assert {row["sample"] for row in rows} == {word}
    assert all(float(row["perturbation_isolated"]) > 0 for row in rows)


def test_parquet_holds_the_text_itself(tmp_path: Path) -> None:
    write(prompts.made(prompts.sample(WORDS[0])), tmp_path / "t.parquet")
    assert set(pq.read_table(tmp_path / "t.parquet")["sample"].to_pylist()) == {WORDS[0]}

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perturbkv.errors import OutputError
from perturbkv.storage.atomic_files import write_atomically
from perturbkv.storage.output import check_writable
from perturbkv.storage.run.journal import journal_path
from tests.support.growing import OLD, opened


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

"""A claim says before any work whether files may be written, and keeps other processes off while it is held."""

from __future__ import annotations

from pathlib import Path

import pytest

from perturbkv.errors import ConfigError, LockedOutputError, OutputError
from perturbkv.storage.output import Lock, OutputFile, OutputFolder, lock_path, resumable


def ours(path: Path) -> OutputFile:
    return OutputFile(path, "notes of ours", lambda path: path.read_bytes().startswith(b"ours"))


def test_nothing_is_left_of_a_claim(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    OutputFolder(folder).claim(OutputFile(folder / "a"), resumable(folder / "b"), writer=folder / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_others_is_refused_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content, kind in ((b"mine", ours(path)), (b"ours too", OutputFile(path))):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"at {path}, got .*; --overwrite replaces it"):
            OutputFolder(tmp_path).claim(kind)
        OutputFolder(tmp_path, overwrite=True).claim(kind)
        assert path.read_bytes() == content
    OutputFolder(tmp_path).claim(ours(path), resumable(path))


def test_a_place_that_no_file_can_have_is_refused_whatever_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "a", tmp_path / "file" / "b"):
        with pytest.raises(OutputError, match=str(tmp_path)):
            OutputFolder(tmp_path, overwrite=True).claim(OutputFile(path))


@pytest.mark.parametrize(("wait", "advice"), [(None, "wait until it is done"), (False, "wait with --wait")])
def test_another_writer_is_known_before_and_while_the_claim_is_held(
    tmp_path: Path, wait: bool | None, advice: str
) -> None:
    path, folder = tmp_path / "a", OutputFolder(tmp_path, wait=wait)
    claim = folder.claim(OutputFile(path), writer=path)
    with Lock(path), pytest.raises(LockedOutputError, match=advice):
        folder.claim(OutputFile(path), writer=path)
    with claim:
        assert lock_path(path).exists()
        with pytest.raises(LockedOutputError):
            folder.claim(writer=path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_came_between_check_and_lock_is_refused_and_the_lock_goes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    claim = OutputFolder(tmp_path).claim(OutputFile(path), writer=path)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="got one"), claim:
        pytest.fail("entered")
    assert [one.name for one in tmp_path.iterdir()] == ["a"]

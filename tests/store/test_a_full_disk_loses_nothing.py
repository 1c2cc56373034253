from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from perturbkv.errors import OutputError, TraceError
from perturbkv.storage.run import journal
from perturbkv.storage.run.journal import Entry, Journal, journal_path, write_entry
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace import trace_writing
from perturbkv.storage.trace.trace_writing import Stream
from tests.support.growing import CONFIGS, assert_same_file, fill, measured, opened
from tests.support.traces import run_config, sample_trace

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def measured_run(tmp_path: Path) -> TraceWriter:
    """Every sample in the journal, no file yet."""
    writer = opened(tmp_path / "t.h5", CONFIGS)
    for name in writer.sample_ids:
        writer.append(measured(name, CONFIGS), CONFIGS)
    return writer


@contextmanager
def full_after(room: int) -> Iterator[None]:
    """A disk that takes so many bytes more of files that are written at places, and some of them only in part."""
    before, left = os.pwrite, [room]

    def pwrite(file: int, data: Any, place: int) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = before(file, bytes(data)[: left[0]], place)
        left[0] -= written
        return written

    os.pwrite = pwrite
    try:
        yield
    finally:
        os.pwrite = before


@pytest.mark.slow
def test_wherever_the_final_write_fails_the_journal_stays_and_the_file_is_made_later(
    tmp_path: Path, measured_run: TraceWriter
) -> None:
    expected = fill(opened(tmp_path / "expected.h5", CONFIGS))
    whole = expected.stat().st_size
    for room in [0, 1, 100, *range(2000, whole * 9 // 10, whole // 40)]:
        with full_after(room), pytest.raises(OutputError, match=r"room for .*t\.h5, got 'No space left on device'"):
            measured_run.finish()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["expected.h5", "t.h5.journal"]
    assert_same_file(measured_run.finish(), expected)


LIMITED = """
import resource, sys
from pathlib import Path
from perturbkv.errors import OutputError
from tests.support.growing import CONFIGS, measured, opened

writer = opened(Path(sys.argv[1]), CONFIGS)
for name in writer.sample_ids:
    writer.append(measured(name, CONFIGS), CONFIGS)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    writer.finish()
except OutputError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.chaos
def test_a_write_that_the_system_refuses_ends_in_an_error_and_not_in_a_crash(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "t.h5")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "t.h5, got 'File too large'; make some, or choose another place" in done.stdout
    again = opened(tmp_path / "t.h5", CONFIGS)
    assert again.missing() == {}
    assert_same_file(again.finish(), fill(opened(tmp_path / "expected.h5", CONFIGS)))


def test_too_little_room_is_known_before_the_file_is_begun(
    measured_run: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_writing.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))  # type: ignore[attr-defined]
    monkeypatch.setattr(trace_writing, "Stream", None)
    with pytest.raises(OutputError, match=r"expected room for .*, got '[\d,]+ bytes needed, 1,000 free'"):
        measured_run.finish()


def test_what_is_asked_for_at_least_is_no_more_than_the_file_takes(
    measured_run: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(trace_writing, "_check_free_space", lambda folder, needed: asked.append(needed))
    tokens = sum(len(measured(name, CONFIGS).arrays["prompt_token"]) for name in measured_run.sample_ids)
    assert measured_run.finish().stat().st_size >= asked[0] >= 8 * tokens


def test_a_full_disk_while_a_sample_is_kept_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = opened(tmp_path / "t.h5", CONFIGS)
    writer.append(measured("s0", CONFIGS), CONFIGS)

    def full(archive: zipfile.ZipFile, name: str, parts: Any) -> None:
        archive.writestr(name, b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write_bytes", full)
        with pytest.raises(OutputError, match="expected room for"):
            writer.append(measured("s1", CONFIGS), CONFIGS)
    assert len(list(journal_path(tmp_path / "t.h5").iterdir())) == 2, "the run and its first sample"
    again = opened(tmp_path / "t.h5", CONFIGS)
    assert list(again.missing()) == ["s1", "s2"]
    assert_same_file(fill(again), fill(opened(tmp_path / "expected.h5", CONFIGS)))


@pytest.mark.slow
def test_ctrl_c_in_the_final_write_ends_it_between_samples(
    tmp_path: Path, measured_run: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = list[int](), trace_writing._write_sample_or_failure

    def interrupted(file: Any, where: int, *more: Any) -> None:
        write(file, where, *more)
        written.append(where)
        if len(written) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(trace_writing, "_write_sample_or_failure", interrupted)
            measured_run.finish()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in tmp_path.iterdir()] == ["t.h5.journal"]
    assert_same_file(measured_run.finish(), fill(opened(tmp_path / "expected.h5", CONFIGS)))


def test_a_stream_is_a_file_that_remembers_what_did_not_fit(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    expected = bytearray(500)
    with full_after(2000), Stream(tmp_path / "held") as stream:
        for _ in range(100):
            place, data = int(draw.integers(0, 400)), draw.bytes(int(draw.integers(1, 100)))
            stream.seek(place)
            assert stream.write(data) == len(data)
            expected[place : place + len(data)] = data
            stream.seek(0)
            found = bytearray(500)
            stream.readinto(found)
            assert found == expected
        with pytest.raises(OSError, match="No space left"):
            stream.check()


def test_hdf5_writes_the_same_through_a_stream(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 50, 50))
    with Stream(tmp_path / "s.h5") as stream:
        with h5py.File(stream, "w") as file:
            file.create_dataset("a", data=values, chunks=(1, 50, 50), compression="gzip")
            file["a"].attrs["units"] = "1"
        stream.check()
    with h5py.File(tmp_path / "s.h5") as file:
        np.testing.assert_array_equal(file["a"][()], values)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_samples_that_are_measured_after_the_journal_vanished_survive(tmp_path: Path, kept: int) -> None:
    path, names = tmp_path / "t.h5", ["s0", "s1", "s2"]
    writer = opened(path, CONFIGS)
    for place, name in enumerate(names):
        if place == kept:
            shutil.rmtree(journal_path(path), ignore_errors=True)
        writer.append(measured(name, CONFIGS), CONFIGS)
    assert list(writer.missing()) == names[:kept]
    if kept:
        with pytest.raises(TraceError, match=f"{kept} are not, such as 's0'; run the same command again"):
            writer.finish()
    again = opened(path, CONFIGS)
    assert list(again.missing()) == names[:kept]
    assert_same_file(fill(again), fill(opened(tmp_path / "expected.h5", CONFIGS)))


@pytest.mark.parametrize("kept", [0, 1])
def test_a_folder_that_vanished_is_not_made_anew_by_what_is_written(tmp_path: Path, kept: int) -> None:
    """A share that is away: what went into another folder of its name would be lost when it comes back."""
    shared = tmp_path / "shared"
    shared.mkdir()
    writer, away = opened(shared / "t.h5", CONFIGS), shared.rename(tmp_path / "away")
    if kept:
        away.rename(shared)
        writer.append(measured("s0", CONFIGS), CONFIGS)
        shared.rename(away)
    with pytest.raises(OutputError, match=r"t\.h5.*No such file"):
        writer.append(measured("s1", CONFIGS), CONFIGS)
    with pytest.raises(OutputError, match=r"t\.h5.*No such file"):
        write_entry(Entry(journal_path(shared / "t.h5"), "s1.npz", "s1", (), "failed"), {})
    assert not shared.exists()
    away.rename(shared)
    assert list(opened(shared / "t.h5", CONFIGS).missing()) == ["s0", "s1", "s2"][kept:]


def test_a_journal_in_which_no_sample_found_room_is_not_left(tmp_path: Path) -> None:
    for kept in (False, True):
        writer = TraceWriter(tmp_path / "t.h5", run_config(2), ["s0", "s1"], {})
        if kept:
            writer.append(sample_trace("s0"))
        else:
            Journal(journal_path(tmp_path / "t.h5")).begin(run_config(2))
        writer.abandon()
        assert journal_path(tmp_path / "t.h5").exists() == kept

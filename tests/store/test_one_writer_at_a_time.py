"""An output has one writer: who else comes is told, locks of the dead do not stay, a file in use is not damaged."""

from __future__ import annotations

import errno
import fcntl
import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from perturbkv.configs.run import Shard
from perturbkv.errors import ConfigError, LockedOutputError, OutputError, TraceUnavailableError
from perturbkv.storage.output import Lock, OutputFile, OutputFolder, check_free, lock_path, resumable_file
from perturbkv.storage.run.shard_merging import merge_shards, resumable_shards
from perturbkv.storage.run.shards import ShardJournal, remove_stale_files
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.trace_file import read_trace
from tests.support.growing import CONFIGS, fill, opened
from tests.support.traces import run_config

ROOT = Path(__file__).resolve().parents[2]
HOLDING = """
import sys, time
from pathlib import Path
from perturbkv.storage.output import Lock
with Lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def is_free(path: Path) -> bool:
    try:
        with Lock(path):
            return True
    except OutputError:
        return False


def test_the_second_writer_is_told_and_nothing_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.h5"
    with Lock(path):
        for attempt in (lambda: Lock(path).__enter__(), lambda: check_free(path)):
            with pytest.raises(LockedOutputError, match="t.h5 for this command alone, got it locked by another proces"):
                attempt()
        assert lock_path(path).exists(), "an attempt leaves the holder's file"
    assert list(tmp_path.iterdir()) == []
    assert is_free(path)


def test_what_a_killed_process_held_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    process = subprocess.Popen([sys.executable, "-c", HOLDING, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert not is_free(path)
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    process.wait()
    assert lock_path(path).exists()
    check_free(path)
    assert list(tmp_path.iterdir()) == []
    assert is_free(path)


def test_an_interrupted_taking_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Lock(tmp_path / "new" / "t.h5").__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_room_for_a_lock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OutputError, match="expected room for .*t.h5, got 'No space"):
        Lock(tmp_path / "new" / "t.h5").__enter__()


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_flock_has_one_writer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(number, "no flock")

    monkeypatch.setattr(fcntl, "flock", refused)
    path = tmp_path / "t.h5"
    with Lock(path):
        assert not is_free(path)
    assert is_free(path)
    assert list(tmp_path.iterdir()) == []


def test_who_waits_is_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, order = tmp_path / "t.h5", []

    def next_one() -> None:
        with Lock(path, wait=True):
            order.append("second")

    with caplog.at_level(logging.INFO), Lock(path):
        waiting = threading.Thread(target=next_one)
        waiting.start()
        until = time.monotonic() + 10
        while not caplog.messages and time.monotonic() < until:
            time.sleep(0.01)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
    assert caplog.messages == [f"waiting for the process that writes {path} and holds {lock_path(path)}"]
    assert list(tmp_path.iterdir()) == []


def test_of_many_at_once_one_gets_the_lock(tmp_path: Path) -> None:
    path, together, got, leave = tmp_path / "t.h5", threading.Barrier(12), list[bool](), threading.Event()
    for _ in range(5):
        lock_path(path).touch()  # what a killed process left
        got.clear()
        leave.clear()

        def take() -> None:
            together.wait()
            try:
                with Lock(path):
                    got.append(True)
                    leave.wait(10)
            except OutputError:
                got.append(False)
            if len(got) == together.parties:
                leave.set()

        threads = [threading.Thread(target=take) for _ in range(together.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(got) == 1


def test_two_names_of_one_place_are_one(tmp_path: Path) -> None:
    (tmp_path / "link.h5").symlink_to("t.h5")
    with Lock(tmp_path / "t.h5"):
        assert not is_free(tmp_path / "link.h5")


def test_a_place_that_takes_no_lock_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="expected a place for .*; choose another place"), Lock(tmp_path / "file/t"):
        pass


def ours(path: Path) -> OutputFile:
    return OutputFile(path, "notes of ours", lambda path: path.read_bytes().startswith(b"ours"))


def test_nothing_is_left_of_a_claim(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    OutputFolder(folder).claim(OutputFile(folder / "a"), resumable_file(folder / "b"), writer=folder / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_others_is_refused_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content, kind in ((b"mine", ours(path)), (b"ours too", OutputFile(path))):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"at {path}, got .*; --overwrite replaces it"):
            OutputFolder(tmp_path).claim(kind)
        OutputFolder(tmp_path, overwrite=True).claim(kind)
        assert path.read_bytes() == content
    OutputFolder(tmp_path).claim(ours(path), resumable_file(path))


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


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A finished trace, beside it what two shards left that were killed at their very beginning."""
    path = fill(opened(tmp_path / "t.h5", CONFIGS))
    lock_path(ShardJournal(path, Shard(1, 3)).path).touch()
    (tmp_path / ".t.h5.shard-2-of-3.tmp-0000000007").touch()
    return path


def test_a_merge_killed_at_its_end_leaves_nothing_to_the_next(trace: Path) -> None:
    lock_path(trace).touch()
    assert merge_shards(trace) == 0
    assert list(trace.parent.iterdir()) == [trace]


def test_a_run_without_shards_removes_the_locks_of_killed_ones(trace: Path) -> None:
    assert resumable_shards(trace, run_config(3, configs=CONFIGS), overwrite=False, wait=False) == []
    assert list(trace.parent.iterdir()) == [trace]


def test_the_lock_of_a_living_shard_stays(trace: Path) -> None:
    with Lock(ShardJournal(trace, Shard(2, 3)).path) as held:
        remove_stale_files(trace)
        assert set(trace.parent.iterdir()) == {trace, lock_path(held.path)}


def test_a_run_removes_what_a_killed_one_tried_its_place_with(tmp_path: Path) -> None:
    (tmp_path / ".t.h5.tmp-0000000007").touch()
    path = fill(opened(tmp_path / "t.h5", CONFIGS))
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_being_written_is_not_called_damaged(path: Path) -> None:
    holds = "import h5py, sys; f = h5py.File(sys.argv[1], 'r+'); print(1, flush=True); input()"
    held = subprocess.Popen(
        [sys.executable, "-c", holds, path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with held:
        assert held.stdout is not None
        held.stdout.readline()
        for read in (read_trace, lambda path: TraceWriter(path, run_config(1), ["s0"], {}, overwrite=True)):
            with pytest.raises(TraceUnavailableError, match="another program has open for writing; close it there"):
                read(path)
        held.communicate("\n")


def test_a_file_whose_writer_was_killed_is_not_called_damaged(path: Path) -> None:
    killed = "import h5py, os, sys; held = h5py.File(sys.argv[1], 'r+'); os._exit(9)"
    subprocess.run([sys.executable, "-c", killed, path], check=False)
    for read in (read_trace, lambda path: TraceWriter(path, run_config(1), ["s0"], {}, overwrite=True)):
        with pytest.raises(TraceUnavailableError, match=f"marked as open for writing; .* 'h5clear -s {path}'"):
            read(path)

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

from perturbkv.errors import LockedOutputError, OutputError
from perturbkv.storage.output import Lock, lock_path, wait_until_free

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
        for attempt in (lambda: Lock(path).__enter__(), lambda: wait_until_free(path)):
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
    wait_until_free(path)
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

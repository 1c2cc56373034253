from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from perturbkv.errors import OutputError
from perturbkv.storage import output
from perturbkv.storage.output import SILENCE_S, Holder, Lock, check_free, lock_path, remove_stale_lock

ROOT = Path(__file__).resolve().parents[2]
HOLDING = """
import sys, time
from pathlib import Path
from perturbkv.storage.output import Lock
with Lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def held_by(path: Path, holder: Holder, silent_s: float = 0.0) -> Path:
    """A lock as another process left it, its last heartbeat so long ago."""
    file = lock_path(path)
    file.write_text(json.dumps(asdict(holder)))
    os.utime(file, (time.time() - silent_s,) * 2)
    return file


def elsewhere() -> Holder:
    return replace(Holder.current(), host="another machine", token="theirs")


def is_free(path: Path) -> bool:
    try:
        with Lock(path):
            return True
    except OutputError:
        return False


def test_the_second_writer_is_told_who_writes_and_since_when(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.h5"
    with Lock(path):
        said = json.loads(lock_path(path).read_text())
        started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        assert (said["pid"], said["started"]) == (os.getpid(), started)
        for attempt in (lambda: Lock(path).__enter__(), lambda: check_free(path)):
            with pytest.raises(OutputError, match=f"held by process {os.getpid()} on .*, since {said['since'][:10]}"):
                attempt()
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
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert is_free(path), "though nobody has asked yet how it ended"
    process.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_has_a_dead_ones_number_holds_nothing(tmp_path: Path) -> None:
    held_by(tmp_path / "t.h5", replace(Holder.current(), started=Holder.current().started - 100, token="theirs"))
    assert is_free(tmp_path / "t.h5")


def test_another_machine_is_believed_until_it_is_silent(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    held_by(path, elsewhere(), SILENCE_S - 20)
    assert not is_free(path)
    held_by(path, elsewhere(), SILENCE_S + 20)
    assert is_free(path)


def test_a_machine_of_the_same_name_is_another_one(tmp_path: Path) -> None:
    """Its processes are not here, and yet they live."""
    name, namespace, _ = Holder.current().host.split()
    held_by(
        tmp_path / "t.h5", replace(Holder.current(), host=f"{name} {namespace} another-start", pid=2**22, token="a")
    )
    assert not is_free(tmp_path / "t.h5")


def test_a_clock_that_is_set_kills_no_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_by(tmp_path / "t.h5", replace(Holder.current(), token="another lock of this process"))
    created = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created(process) + 3600)
    assert not is_free(tmp_path / "t.h5")


def test_a_holder_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "HEARTBEAT_S", 0.01)
    with Lock(tmp_path / "t.h5"):
        file = lock_path(tmp_path / "t.h5")
        os.utime(file, (0, 0))
        until = time.monotonic() + 10
        while file.stat().st_mtime == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert file.stat().st_mtime > 0


def test_an_interrupted_taking_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite

    def interrupted(*given: Any) -> int:
        write(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Lock(tmp_path / "new" / "t.h5").__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match=r"expected room for .*t\.h5, got 'No space left on device'"):
        Lock(tmp_path / "new" / "t.h5").__enter__()
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
    assert f"waiting for process {os.getpid()} on" in caplog.messages[0]


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    path, together, got, leave = tmp_path / "t.h5", threading.Barrier(12), list[bool](), threading.Event()
    for _ in range(5):
        held_by(path, elsewhere(), SILENCE_S + 1)
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


def test_a_lock_that_was_begun_and_says_nothing_is_free(tmp_path: Path) -> None:
    for content in (b"", b"\0" * 100):
        lock_path(tmp_path / "t.h5").write_bytes(content)
        assert is_free(tmp_path / "t.h5")


@pytest.mark.parametrize("content", ["notes", "{}", "[1]", '{"host": 1}'])
def test_somebody_elses_file_is_no_lock(tmp_path: Path, content: str) -> None:
    file = lock_path(tmp_path / "t.h5")
    file.write_text(content)
    for attempt in (lambda: Lock(tmp_path / "t.h5").__enter__(), lambda: check_free(tmp_path / "t.h5")):
        with pytest.raises(OutputError, match="expected a lock of ours at .*, got another file; move it away"):
            attempt()
    assert file.read_text() == content


def test_a_lock_that_vanished_is_made_again(tmp_path: Path) -> None:
    with Lock(tmp_path / "new" / "t.h5") as held:
        lock_path(held.path).unlink()
        (tmp_path / "new").rmdir()
        held.check()
        assert not is_free(held.path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_vanished_is_told_and_not_made_again(tmp_path: Path) -> None:
    """It may come back, and would hide what was written into another one of its name."""
    (tmp_path / "shared").mkdir()
    with Lock(tmp_path / "shared" / "new" / "t.h5") as held:
        (tmp_path / "shared").rename(tmp_path / "away")
        with pytest.raises(OutputError, match="expected the folder .*shared to stay while .*, got none; bring it back"):
            held.check()
        assert not (tmp_path / "shared").exists()
        (tmp_path / "away").rename(tmp_path / "shared")
        held.check()
    assert list((tmp_path / "shared").iterdir()) == []


def test_the_lock_of_a_dead_process_alone_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    remove_stale_lock(path)
    with Lock(path) as held:
        remove_stale_lock(path)
        held.check()
        assert not is_free(path)
    held_by(path, elsewhere())
    remove_stale_lock(path)
    assert lock_path(path).exists()
    lock_path(path).write_text("")
    remove_stale_lock(path)
    assert list(tmp_path.iterdir()) == []


def test_a_holder_whose_lock_was_taken_over_hears_of_it_and_leaves_it(tmp_path: Path) -> None:
    with Lock(tmp_path / "t.h5") as held:
        held.check()
        file = held_by(held.path, elsewhere())
        with pytest.raises(OutputError, match="held by process .* on another"):
            held.check()
    assert json.loads(file.read_text())["token"] == "theirs"


def test_two_names_of_one_place_are_one(tmp_path: Path) -> None:
    (tmp_path / "link.h5").symlink_to("t.h5")
    with Lock(tmp_path / "t.h5"):
        assert not is_free(tmp_path / "link.h5")


def test_a_place_that_takes_no_lock_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="expected a place for .*; choose another place"), Lock(tmp_path / "file/t"):
        pass


def test_a_file_system_that_cannot_lock_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(output.fcntl, "flock", refused)
    path = tmp_path / "t.h5"
    with Lock(path), pytest.raises(OutputError, match="for this command alone"), Lock(path):
        pass
    assert not lock_path(path).exists()

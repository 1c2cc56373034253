from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from perturbkv.errors import TraceError
from perturbkv.storage.run.journal import Journal, journal_path
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import FailedSample, SampleTrace, Trace
from tests.support.changed import changing
from tests.support.traces import run_config, sample_trace

ROOT = Path(__file__).resolve().parents[2]
NAMES = [f"s{i}" for i in range(4)]


def opened(path: Path, samples: int = 4, overwrite: bool = False, **run: object) -> TraceWriter:
    return TraceWriter(path, run_config(samples, **run), NAMES[:samples], {"model": "m"}, overwrite)


def made(name: str) -> SampleTrace:
    return sample_trace(name, seed=NAMES.index(name), layers=4, heads=4)


def fill(writer: TraceWriter) -> Path:
    done = writer.done()
    for name in writer.sample_ids:
        if name not in done:
            writer.append(made(name))
    return writer.finish()


def assert_same(found: Trace, expected: Trace) -> None:
    assert found.sample_ids == expected.sample_ids
    assert dict(found.failures) == dict(expected.failures)
    assert found.run == expected.run
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


@pytest.fixture
def uninterrupted(tmp_path: Path) -> Trace:
    return read_trace(fill(opened(tmp_path / "uninterrupted.h5")))


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import h5py, numpy as np
from tests.support.dying import dying
from tests.support.changed import changing
from tests.support.traces import run_config, sample_trace
from perturbkv.storage.run import journal
from perturbkv.storage.run.writer import TraceWriter

path, point, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

if point == "rename":
    Path.replace = dying(Path.replace, count)
elif point == "fsync":
    os.fsync = dying(os.fsync, count)
elif point == "entry":
    journal._write_bytes = dying(journal._write_bytes, count)
elif point == "hdf5":
    h5py.Dataset.__setitem__ = dying(h5py.Dataset.__setitem__, count)
elif point == "discard":
    journal.shutil.rmtree = dying(journal.shutil.rmtree, count)

names = [f"s{i}" for i in range(4)]
writer = TraceWriter(path, run_config(4), names, {"model": "m"})
done = writer.done()
for name in names:
    if name not in done:
        if point == "sleep":
            print(name, flush=True)
            time.sleep(0.05)
        writer.append(sample_trace(name, seed=names.index(name), layers=4, heads=4))
writer.finish()
"""


def run_script(path: Path, point: str, count: int) -> int:
    command = [sys.executable, "-c", SCRIPT, str(path), point, str(count)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


POINTS = [("entry", 5), ("fsync", 1), ("fsync", 4), ("rename", 3), ("rename", 6), ("hdf5", 20), ("hdf5", 30),
          ("discard", 2)]  # fmt: skip


@pytest.mark.chaos
@pytest.mark.parametrize(("point", "count"), POINTS, ids=[f"{point}-{count}" for point, count in POINTS])
def test_a_killed_run_goes_on_to_the_same_trace(tmp_path: Path, uninterrupted: Trace, point: str, count: int) -> None:
    path = tmp_path / "killed.h5"
    assert run_script(path, point, count) == -signal.SIGKILL
    if path.exists():
        assert_same(read_trace(path), uninterrupted)
    before = len(opened(path).done())
    assert run_script(path, "none", 0) == 0
    assert_same(read_trace(path), uninterrupted)
    assert not journal_path(path).exists()
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []
    assert before >= {"entry": 2, "fsync": 0, "rename": 1, "hdf5": 4, "discard": 4}[point]


@pytest.mark.chaos
def test_a_run_killed_from_outside_loses_at_most_the_sample_in_flight(tmp_path: Path, uninterrupted: Trace) -> None:
    path = tmp_path / "killed.h5"
    command = [sys.executable, "-c", SCRIPT, str(path), "sleep", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3):
        in_flight = process.stdout.readline().strip()
    time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdout.close()
    assert in_flight == "s2"
    assert opened(path).done() >= {"s0", "s1"}
    assert run_script(path, "none", 0) == 0
    assert_same(read_trace(path), uninterrupted)


@pytest.mark.slow
def test_an_older_trace_survives_a_kill_while_it_is_extended(tmp_path: Path, uninterrupted: Trace) -> None:
    path = tmp_path / "t.h5"
    fill(opened(path, samples=2))
    assert run_script(path, "hdf5", 20) == -signal.SIGKILL
    assert read_trace(path).sample_ids == ("s0", "s1")
    fill(opened(path))
    assert_same(read_trace(path), uninterrupted)


def test_more_samples_extend_a_trace(tmp_path: Path, uninterrupted: Trace) -> None:
    path = tmp_path / "t.h5"
    fill(opened(path, samples=2))
    writer = opened(path)
    assert writer.done() == {"s0", "s1"}
    fill(writer)
    assert_same(read_trace(path), uninterrupted)


def test_another_runs_trace_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    fill(opened(path))
    content = path.read_bytes()
    with pytest.raises(TraceError, match=r"differs in seed \(0, not 1\); use another --output, or --over"):
        opened(path, seed=1)
    with pytest.raises(TraceError, match=r"differs in samples \(\d+, not 2\)"):
        opened(path, samples=2)
    assert path.read_bytes() == content
    fill(opened(path, overwrite=True, seed=1))
    assert read_trace(path).run.seed == 1


def test_another_runs_journal_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    opened(path).append(made("s0"))
    with pytest.raises(TraceError, match="differs in model"):
        opened(path, model="other")
    assert opened(path).done() == {"s0"}
    assert opened(path, overwrite=True, model="other").done() == set()


@pytest.mark.slow
def test_another_runs_trace_stays_until_the_one_that_replaces_it_is_whole(tmp_path: Path) -> None:
    path = fill(opened(tmp_path / "t.h5"))
    content = path.read_bytes()
    opened(path, overwrite=True, seed=1).append(made("s0"))  # and no more: killed
    assert path.read_bytes() == content
    for seed in (0, 1):  # a file of one run and a journal of the other: neither goes on unasked
        with pytest.raises(TraceError, match=r"differs in seed \([01], not [01]\); use another --output, or --over"):
            opened(path, seed=seed)
    again = opened(path, overwrite=True, seed=1)
    assert again.done() == {"s0"}
    fill(again)
    assert read_trace(path).run.seed == 1
    assert not journal_path(path).exists()


def test_a_run_that_is_not_replaced_in_the_end_has_lost_nothing(tmp_path: Path) -> None:
    path = fill(opened(tmp_path / "t.h5", samples=2))
    opened(path, overwrite=True, seed=1).append(made("s2"))
    writer = opened(path, overwrite=True)
    assert writer.done() == {"s0", "s1"}, "of the trace, and nothing of the other run's journal"
    fill(writer)
    assert (read_trace(path).run.seed, len(read_trace(path).sample_ids)) == (0, 4)


def test_overwrite_keeps_what_is_of_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    opened(path).append(made("s0"))
    assert opened(path, overwrite=True).done() == {"s0"}


def test_a_file_that_is_no_trace_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    path.write_text("precious notes")
    with pytest.raises(TraceError, match="no HDF5"):
        opened(path)
    assert path.read_text() == "precious notes"
    writer = opened(path, overwrite=True)
    assert path.read_text() == "precious notes"
    fill(writer)
    assert read_trace(path).sample_ids == tuple(NAMES)


def test_a_trace_that_lost_a_variable_is_not_taken_for_finished(tmp_path: Path, uninterrupted: Trace) -> None:
    path = fill(opened(tmp_path / "t.h5"))
    with changing(path) as file:
        del file["theta"]
    content = path.read_bytes()
    with pytest.raises(TraceError, match="got one without theta; use another --output, or --overwrite"):
        opened(path)
    assert path.read_bytes() == content
    assert_same(read_trace(fill(opened(path, overwrite=True))), uninterrupted)


def test_a_finished_trace_is_left_alone(tmp_path: Path) -> None:
    path = fill(opened(tmp_path / "t.h5"))
    before = path.stat().st_mtime_ns
    writer = opened(path)
    assert writer.done() == set(NAMES)
    writer.finish()
    assert path.stat().st_mtime_ns == before


@pytest.mark.slow
def test_failed_samples_are_tried_again_the_others_carried_over(tmp_path: Path, uninterrupted: Trace) -> None:
    path = tmp_path / "t.h5"
    writer = opened(path)
    for name in NAMES:
        writer.append(FailedSample(name, "broke") if name == "s1" else made(name))
    assert writer.done() == set(NAMES)
    assert dict(read_trace(writer.finish()).failures) == {"s1": "broke"}
    again = opened(path)
    assert again.done() == {"s0", "s2", "s3"}
    fill(again)
    assert_same(read_trace(path), uninterrupted)


def test_a_damaged_journal_entry_is_measured_again(tmp_path: Path, uninterrupted: Trace) -> None:
    path = tmp_path / "t.h5"
    writer = opened(path)
    writer.append(made("s0"))
    writer.append(made("s1"))
    entry = next(journal_path(path).glob("*.npz"))
    entry.write_bytes(entry.read_bytes()[:200])
    again = opened(path)
    assert len(again.done()) == 1
    fill(again)
    assert_same(read_trace(path), uninterrupted)


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    opened(path).append(made("s0"))
    with pytest.raises(TraceError, match="unfinished, 1 samples are kept; run the same command again"):
        read_trace(path)


def test_finishing_too_early_is_refused(tmp_path: Path) -> None:
    writer = opened(tmp_path / "t.h5")
    writer.append(made("s0"))
    with pytest.raises(TraceError, match="3 are not, such as 's1'"):
        writer.finish()
    with pytest.raises(TraceError, match="got 'stranger'"):
        writer.append(sample_trace("stranger"))


def test_the_journal_holds_no_pickles(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.begin(run_config())
    journal.append(made("s0"), run_config().labels())
    assert json.loads((tmp_path / "j" / "run.json").read_text())["model"] == "m"
    (path,) = (tmp_path / "j").glob("*.npz")
    with np.load(path, allow_pickle=False) as held:
        assert json.loads(held["head"].tobytes())["configs"] == run_config().labels()
        begin = 0
        for name, dtype, shape in json.loads(held["head"].tobytes())["arrays"]:
            expected = np.asarray(made("s0").arrays[name])
            own = held["data"][begin : begin + expected.nbytes].view(dtype).reshape(shape)
            np.testing.assert_array_equal(own, expected, err_msg=name)
            begin += expected.nbytes

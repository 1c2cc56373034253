from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perturbkv.errors import TraceError
from perturbkv.storage.run import writer
from perturbkv.storage.run.shard_merging import merge
from perturbkv.storage.run.shards import find_shards
from tests.store.test_growing_survives_kills import KilledError, killed_at, left_on_disk
from tests.support.sharded import FEW, assert_same_trace, in_one_process, measure_shard

pytestmark = pytest.mark.chaos
ROOT = Path(__file__).resolve().parents[2]
COUNT, STEP = 2, 2
"""Shards, and how many operations on files lie between two kills."""
ALL = [f"{number}/{COUNT}" for number in range(1, COUNT + 1)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_one_process(tmp_path_factory.mktemp("one") / "one.h5", **FEW)


def assert_merged(path: Path, expected: Path) -> None:
    merge(path)
    assert_same_trace(path, expected)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_merge_killed_at_its_operations_goes_on(
    tmp_path: Path, expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start").mkdir()
    for shard in ALL:
        measure_shard(tmp_path / "start" / "t.h5", shard, **FEW)
    number, states, written = 0, set(), list[str]()
    write = writer.write_trace
    monkeypatch.setattr(writer, "write_trace", lambda *asked: written.append("once") or write(*asked))
    while True:
        path = tmp_path / str(number) / "t.h5"
        shutil.copytree(tmp_path / "start", path.parent)
        with killed_at(number):
            try:
                merge(path)
                break
            except KilledError:
                pass
        number, renamed = number + STEP, path.exists()
        if (state := left_on_disk(path.parent)) not in states:
            states.add(state)
            written.clear()
            assert_merged(path, expected)
            assert written == ([] if renamed else ["once"]), "after the rename the shards are only removed"
        shutil.rmtree(path.parent)
    assert len(states) > 8
    assert_merged(path, expected)


def test_a_shard_killed_at_its_operations_goes_on_with_the_same_command(tmp_path: Path, expected: Path) -> None:
    (tmp_path / "start").mkdir()
    for shard in ALL[1:]:
        measure_shard(tmp_path / "start" / "t.h5", shard, **FEW)
    number, states = 0, set()
    while True:
        path = tmp_path / str(number) / "t.h5"
        shutil.copytree(tmp_path / "start", path.parent)
        with killed_at(number):
            try:
                measure_shard(path, ALL[0], **FEW)
                break
            except KilledError:
                pass
        number += STEP
        if (state := left_on_disk(path.parent)) not in states:
            states.add(state)
            if not all(one.is_done() for one in find_shards(path)) or len(find_shards(path)) < COUNT:
                with pytest.raises(TraceError, match="got 1: 1/2 is missing; the same command with --shard 1/2"):
                    merge(path)
            measure_shard(path, ALL[0], **FEW)
            assert_merged(path, expected)
        shutil.rmtree(path.parent)
    assert len(states) > 4


SCRIPT = """
import os, signal, sys
from pathlib import Path
import h5py, numpy as np
from perturbkv.storage.run.shard_merging import merge
from tests.support.dying import dying
from tests.support.sharded import FEW, measure_shard

path, point, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

if point == "shard":
    os.replace = dying(os.replace, count)
    measure_shard(path, sys.argv[4], **FEW)
elif point == "writing":
    h5py.Dataset.__setitem__ = dying(h5py.Dataset.__setitem__, count)
    merge(path)
elif point == "removing":
    os.unlink = dying(os.unlink, count)
    merge(path)
"""


@pytest.mark.parametrize("seed", [1])
def test_shards_and_merges_survive_real_kills(tmp_path: Path, expected: Path, seed: int) -> None:
    draw, path = random.Random(seed), tmp_path / "t.h5"
    killed = draw.choice(ALL)
    for shard in ALL:
        if shard == killed:
            _run_killed(path, "shard", draw.randint(2, 4), shard)
        measure_shard(path, shard, **FEW)
    _run_killed(path, "writing", draw.randint(1, 60))
    assert not path.exists()
    _run_killed(path, "removing", draw.randint(2, 6))
    assert_merged(path, expected)


def _run_killed(path: Path, *asked: object) -> None:
    command = [sys.executable, "-c", SCRIPT, str(path), *map(str, asked)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()

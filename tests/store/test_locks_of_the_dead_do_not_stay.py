"""Whoever joins shards, or goes on with them, tidies up what killed ones left; what living ones hold stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from perturbkv.configs.run import Shard
from perturbkv.storage.output import Lock, lock_path
from perturbkv.storage.run.shard_merging import merge_shards, resumable_shards
from perturbkv.storage.run.shards import ShardJournal, remove_stale_files
from tests.support.growing import CONFIGS, fill, opened
from tests.support.traces import run_config


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

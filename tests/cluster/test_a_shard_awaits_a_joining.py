"""A shard that begins again while all are joined has nothing to fear, nor have the others: the last one joins all."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from perturbkv.configs.run import Shard
from perturbkv.errors import LockedOutputError
from perturbkv.pipeline.run import sharding
from perturbkv.storage.output import Lock
from perturbkv.storage.run.shard_merging import ShardWriter
from perturbkv.storage.run.shards import ShardJournal, ShardRecord
from tests.support.growing import CONFIGS, measured
from tests.support.traces import run_config


def begun(folder: Path, joining: bool) -> bool:
    """Begin a shard while its trace is held, for a moment more where somebody joins; whether the trace is free then."""
    trace, held, ended = folder / "t.h5", threading.Event(), threading.Event()

    def hold() -> None:
        with Lock(trace):
            held.set()
            time.sleep(0.5)
            ended.set()

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    try:
        with sharding._lock_shard(trace, folder / "t.h5.shard-1-of-2", wait=False, all_done=lambda: joining):
            return ended.is_set()
    finally:
        other.join()


def test_a_shard_waits_for_who_joins_all_of_them(tmp_path: Path) -> None:
    assert begun(tmp_path, joining=True)


def test_of_any_other_writer_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(LockedOutputError, match="locked by another"):
        begun(tmp_path, joining=False)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_begins_again_while_another_joins_joins_all_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, merge_shards = tmp_path / "t.h5", sharding.merge_shards
    of = [
        ShardRecord(Shard(number, 2), run_config(2, configs=CONFIGS), ("s0", "s1"), {"model": "m"}, False)
        for number in (1, 2)
    ]
    for record in of:
        writer = ShardWriter(path, record, {})
        for name, configs in writer.missing().items():
            writer.append(measured(name, configs), configs)
        writer.finish()
    second = ShardJournal(path, of[1].shard)

    def beginning_again(*asked: Any, **more: Any) -> int:
        second.begin(of[1])
        return merge_shards(*asked, **more)

    monkeypatch.setattr(sharding, "texts_of", lambda planned: {})
    monkeypatch.setattr(sharding, "merge_shards", beginning_again)
    assert not sharding._join_if_complete(None, path, of[0], False)  # type: ignore[arg-type]
    monkeypatch.setattr(sharding, "merge_shards", merge_shards)
    second.finish()
    assert sharding._join_if_complete(None, path, of[1], False)  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["t.h5"]

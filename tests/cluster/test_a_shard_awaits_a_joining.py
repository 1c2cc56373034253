"""A shard that is asked for again while all are joined has nothing to fear: it waits, and finds the trace."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from perturbkv.errors import HeldError
from perturbkv.pipeline import sharding
from perturbkv.storage.lock import Lock, lock_path


def begun(folder: Path, joining: bool) -> bool:
    """Begin a shard while its trace is held, for a moment more where somebody joins; whether the trace is free then."""
    trace, ended = folder / "t.h5", threading.Event()
    with Lock(trace):
        if joining:
            threading.Timer(0.2, lambda: (lock_path(trace).unlink(), ended.set())).start()
        with sharding._alone(trace, folder / "t.h5.shard-1-of-2", wait=False, joining=lambda: joining):
            return ended.is_set()


def test_a_shard_waits_for_who_joins_all_of_them(tmp_path: Path) -> None:
    assert begun(tmp_path, joining=True)


def test_of_any_other_writer_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(HeldError, match="held by process"):
        begun(tmp_path, joining=False)
    assert list(tmp_path.iterdir()) == []

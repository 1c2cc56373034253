"""Trace files that somebody changes through HDF5."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from perturbkv.errors import TraceError
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import FailedSample, Trace
from tests.support.traces import sample_trace, write

Change = Callable[[h5py.File], object]


def whole_file(path: Path) -> Path:
    """A trace of two samples that hold every variable, and one that failed."""
    samples = [
        sample_trace(name, steps=2, layers=3, heads=2, seed=place, optional=True, keys=4 + place)
        for place, name in enumerate(("a", "b"))
    ]
    return write(path, *samples, FailedSample("c", "it broke"), steps=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a `whole_file`."""
    return whole_file(tmp_path_factory.mktemp("whole") / "t.h5").read_bytes()


@pytest.fixture
def path(whole: bytes, tmp_path: Path) -> Path:
    """A file of these bytes, to be changed."""
    made = tmp_path / "t.h5"
    made.write_bytes(whole)
    return made


def everything(trace: Trace) -> dict[str, Any]:
    """Every array, those that are read when they are asked for too."""
    return {name: np.asarray(trace.arrays[name]).tolist() for name in trace.arrays}


def refusal(path: Path) -> str:
    """What is said of a file that reading the whole of it refuses."""
    with pytest.raises(TraceError) as told:
        everything(read_trace(path))
    said = str(told.value)
    assert str(path) in said
    assert "\n" not in said
    return said.replace(f" in {path}", "")


@contextmanager
def changing(path: Path) -> Iterator[h5py.File]:
    """The file, open for changes."""
    with h5py.File(path, "r+") as file:
        yield file

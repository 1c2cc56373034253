"""A trace whose axes are not what its run and its variables say is refused: read, it would turn results around."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from perturbkv.errors import TraceError
from perturbkv.storage.run.journal import Journal, journal_path
from perturbkv.storage.run.writer import ExistingTrace
from perturbkv.storage.trace.trace_file import describe, read_trace
from tests.support.changed import changing
from tests.support.traces import run_config, sample_trace, write

FIRST, SECOND = run_config().labels()


def relabelled(axis: str, values: list[str]) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file[axis][...] = values

    return change


def turned_run(file: h5py.File) -> None:
    """The run's configurations in another order, the coordinate as it was."""
    run = json.loads(file.attrs["run"])
    run["configs"].reverse()
    file.attrs["run"] = json.dumps(run)


def fewer_in_run(file: h5py.File) -> None:
    run = json.loads(file.attrs["run"])
    del run["configs"][1]
    file.attrs["run"] = json.dumps(run)


def shifted(axis: str) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file[axis][...] = np.asarray(file[axis]) + 1

    return change


def cut_variable(file: h5py.File) -> None:
    attrs, kept = dict(file["theta"].attrs), file["theta"][:, :, :, :1]
    del file["theta"]
    file["theta"] = kept
    file["theta"].attrs["units"], file["theta"].attrs["long_name"] = attrs["units"], attrs["long_name"]
    for dim, axis in zip(file["theta"].dims, ("sample", "config", "step", "layer", "head"), strict=True):
        dim.attach_scale(file[axis])


def changed(name: str, value: int) -> Callable[[h5py.File], None]:
    """The variable's last number in the second sample."""

    def change(file: h5py.File) -> None:
        held = file[name][()]
        held[1].flat[-1] = value
        file[name][...] = held

    return change


def measured_of(value: int) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file["steps_measured"][1] = value

    return change


def failed(file: h5py.File) -> None:
    """The second sample as one that failed, with its steps as they were."""
    file["complete"][1] = 0


SPOILT = [
    (relabelled("config", [SECOND, FIRST]), f"expected '{FIRST}', as the run says, at place 0 .* got '{SECOND}'"),
    (relabelled("config", [FIRST, FIRST]), f"expected '{SECOND}', as the run says, at place 1 .* got '{FIRST}'"),
    (relabelled("config", [FIRST, "other"]), f"expected '{SECOND}', as the run says, at place 1 .* got 'other'"),
    (turned_run, f"expected '{SECOND}', as the run says, at place 0 .* got '{FIRST}'"),
    (fewer_in_run, "expected the 1 configurations of the run along 'config' in .*, got 2"),
    (relabelled("sample", ["s1", "s1"]), "expected every sample id once along 'sample' in .*, got 's1' twice"),
    (shifted("step"), r"expected the places 0 … 1 along 'step' in .*, got \[1, 2\]"),
    (shifted("layer"), "expected the places 0 … 2 along 'layer'"),
    (shifted("head"), "expected the places 0 … 1 along 'head'"),
    (
        cut_variable,
        r"expected theta of the shape \(2, 2, 2, 3, 2\) along sample config step layer head in .*, got \(2, ",
    ),
    (measured_of(99), "expected steps_measured of 1 … 2 for sample 1 in .*, got 99"),
    (measured_of(0), "expected steps_measured of 1 … 2 for sample 1 in .*, got 0"),
    (failed, "expected steps_measured of 0, as the sample failed, for sample 1 in .*, got 2"),
    (changed("kept_offset", -1), r"within the 72 places along 'kept_byte' in .*, got -1 and 3 at \(1, 1, 2, 1\)"),
    (changed("kept_offset", 70), r"within the 72 places along 'kept_byte' in .*, got 70 and 3 at"),
    (changed("kept_length", -1), r"within the 72 places along 'kept_byte' in .*, got 69 and -1 at"),
    (changed("kept_length", 2**62), "within the 72 places along 'kept_byte'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "words"), SPOILT)
@pytest.mark.parametrize("read", [read_trace, describe, ExistingTrace])
def test_a_file_whose_axes_are_not_its_runs_is_refused(
    tmp_path: Path, read: Callable[[Path], object], spoil: Callable[[h5py.File], None], words: str
) -> None:
    path = write(
        tmp_path / "t.h5", *(sample_trace(name, steps=2, layers=3, optional=True) for name in ("s0", "s1")), steps=2
    )
    read(path)
    with changing(path) as file:
        spoil(file)
    words = words.replace("[", r"\[") if "snapkv" in words else words
    with pytest.raises(TraceError, match=words) as told:
        read(path)
    assert "\n" not in str(told.value)


def test_a_journal_file_that_names_a_configuration_twice_is_damaged(tmp_path: Path) -> None:
    journal = Journal(journal_path(tmp_path / "t.h5"))
    journal.begin(run_config())
    journal.append(sample_trace("whole"), [FIRST, SECOND])
    journal.append(sample_trace("twice"), [FIRST, FIRST])
    assert journal.sample_ids() == ["whole"]

"""A trace file that leads elsewhere, or claims more than it holds, is refused before anything is read for it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from perturbkv.errors import TraceError, TraceUnavailableError
from perturbkv.storage.run.writer import ExistingTrace, TraceWriter
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import SampleTrace
from tests.support.changed import AXES, Change, changing, refusal
from tests.support.traces import encode_positions, run_config, sample_trace, write


def linked(link: Any) -> Change:
    def change(file: h5py.File) -> None:
        del file["theta"]
        file["theta"] = link

    return change


def another_name(file: h5py.File) -> None:
    del file["theta"]
    file["theta"] = file["theta_hat"]


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(file["theta"].shape, "f8")
    layout[...] = h5py.VirtualSource(".", "theta_hat", file["theta"].shape)
    del file["theta"]
    file.create_virtual_dataset("theta", layout)


def unpacked_by_others(file: h5py.File) -> None:
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((1, 2, 2, 3, 2))
    plan.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))
    space = h5py.h5s.create_simple(file["theta"].shape)
    del file["theta"]
    h5py.h5d.create(file.id, b"theta", h5py.h5t.IEEE_F64LE, space, plan)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (linked(h5py.SoftLink("/theta_hat")), "'theta' in the file itself, got a link that leads elsewhere"),
        (linked(h5py.SoftLink("/theta")), "'theta' in the file itself, got a link that leads elsewhere"),
        (
            linked(h5py.ExternalLink("other.h5", "/theta")),
            "'theta' in the file itself, got a link that leads elsewhere",
        ),
        (lambda file: file.__setitem__("mine", h5py.ExternalLink("other.h5", "/")), "'mine' in the file itself"),
        (another_name, "one name for the numbers of theta, got several hard links"),
        (virtual, "the numbers of theta in the file itself, got numbers that lie elsewhere"),
        (unpacked_by_others, "theta under deflate, shuffle and Fletcher32 alone, got the filters [32015]"),
        (
            lambda file: (file.__delitem__("theta"), file.create_group("theta")),
            "the variable theta, got something else",
        ),
    ],
)
def test_what_does_not_lie_in_the_file_is_refused(path: Path, change: Change, words: str) -> None:
    with changing(path) as file:
        change(file)
    assert words in refusal(path)
    for read in (describe, ExistingTrace):
        with pytest.raises(TraceError):
            read(path)


def test_another_file_is_not_read_as_numbers(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(256)) * 8)
    with changing(path) as file:
        shape = file["theta"].shape
        del file["theta"]
        made = file.create_dataset("theta", shape, "f8", external=[(str(secret), 0, h5py.h5f.UNLIMITED)])
        made.attrs["units"], made.attrs["long_name"] = "L1", "bound"
        for dim, axis in zip(made.dims, AXES, strict=True):
            dim.attach_scale(file[axis])
        assert file["theta"][()].any(), "HDF5 itself reads it"
    assert "the numbers of theta in the file itself, got numbers that lie elsewhere" in refusal(path)


def test_a_heap_that_leads_nowhere_is_refused_instead_of_read_for_ever(whole: bytes, path: Path) -> None:
    heap = whole.index(b"GCOL")
    for begin in (heap + 16, heap + 1000, heap + 2000):
        path.write_bytes(whole[:begin] + bytes(1500) + whole[begin + 1500 :])
        assert "got a damaged heap at byte" in refusal(path)


@pytest.mark.slow
def test_more_kept_entries_than_a_shape_may_have_unstored_are_read(tmp_path: Path) -> None:
    whole = sample_trace("s0", configs=2, layers=200, heads=250)
    count, shape = 200, (2, 200, 250)
    told = {"kept_count": np.full(shape, count), "prompt_tokens": np.asarray(8 * count)}
    code, _ = encode_positions(np.arange(count), np.array([count]), 8 * count)
    rows = {"kept_offset": np.arange(math.prod(shape)).reshape(shape) * count, "kept_length": np.full(shape, count)}
    code = np.tile(code, math.prod(shape))
    path = write(tmp_path / "t.h5", SampleTrace("s0", {**whole.arrays, **told, **rows, "kept_code": code}))
    trace = read_trace(path)
    assert trace.arrays["kept_code"].nbytes > 16 * 2**20
    assert trace.kept(0, 1, 199, 249).tolist() == list(range(count))


@pytest.mark.parametrize("name", ["theta", "prompt_tokens", "sample"])
def test_a_shape_that_nothing_stands_for_is_refused_before_memory_is_asked_for(path: Path, name: str) -> None:
    with changing(path) as file:
        kind = file[name].dtype
        shape = (10**12, *file[name].shape[1:])
        del file[name]
        file.create_dataset(name, shape, h5py.string_dtype() if name == "sample" else kind, chunks=(1, *shape[1:]))
    assert f"expected the numbers of {name}" in refusal(path)


def test_a_chunk_that_is_larger_than_its_variable_is_refused(path: Path) -> None:
    with changing(path) as file:
        del file["prompt_tokens"]
        file.create_dataset("prompt_tokens", (3,), "i8", chunks=(2**28,), maxshape=(None,), compression="gzip")
    assert "prompt_tokens in chunks no larger than itself" in refusal(path)


def test_a_second_name_within_the_file_is_passed_over(path: Path) -> None:
    with changing(path) as file:
        file["mine"] = h5py.SoftLink("/theta")
    assert "mine" not in describe(path).variables
    assert "theta" in read_trace(path).arrays


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

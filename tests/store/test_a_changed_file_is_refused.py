"""A file whose names, dims, numbers or counts are not a trace's is refused, in a line that names what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from perturbkv.schema import ANSWER_TEXT
from perturbkv.storage.run.writer import ExistingTrace, TraceWriter
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import FailedSample
from tests.support.changed import Change, changing, everything, refusal
from tests.support.traces import run_config

FIRST, SECOND = run_config().labels()


def test_numbers_lie_in_chunks_with_sums_and_headers_have_their_own(path: Path) -> None:
    assert path.read_bytes()[8] == 3, "superblock of HDF5 1.10"
    with h5py.File(path) as file:
        unsummed = {name for name in file if not file[name].fletcher32}
    texts = {"sample", "config", "failure", "prompt_text", "token_text", *ANSWER_TEXT}
    assert unsummed == {"kept_byte", "prompt_entry", *texts}, "no numbers of ours"


@pytest.mark.parametrize("name", ["theta", "prompt_tokens", "kept_code"])
def test_a_byte_of_the_numbers_that_changed_is_found(whole: bytes, path: Path, name: str) -> None:
    with h5py.File(path) as file:
        chunk = file[name].id.get_chunk_info(0)
    changed = bytearray(whole)
    changed[chunk.byte_offset + chunk.size // 2] ^= 4
    path.write_bytes(changed)
    assert f"expected the numbers of {name}, got what HDF5 cannot read" in refusal(path)


def set_number(name: str, value: float) -> Change:
    """The last number of the second sample."""

    def change(file: h5py.File) -> None:
        held = file[name][()]
        held[1:2].flat[-1] = value
        file[name][...] = held

    return change


def unknown_theta(file: h5py.File) -> None:
    """In a configuration of kept sets; of other entries it may be unknown."""
    file["own_entries"][...] = 0
    set_number("theta", np.nan)(file)


def set_attribute(key: str, value: Any) -> Change:
    return lambda file: file.attrs.__setitem__(key, value)


def remade(name: str, data: Any, axes: tuple[str, ...] | None = None) -> Change:
    """The variable with other data, units and axes as they were."""

    def change(file: h5py.File) -> None:
        attrs = dict(file[name].attrs)
        held = data(file[name][()])
        along = axes if axes is not None else tuple(dim[0].name for dim in file[name].dims)
        del file[name]
        made = file.create_dataset(name, data=held)
        made.attrs["units"], made.attrs["long_name"] = attrs["units"], attrs["long_name"]
        for dim, axis in zip(made.dims, along, strict=False):
            dim.attach_scale(file[axis])

    return change


def fewer_in_run(file: h5py.File) -> None:
    run = json.loads(file.attrs["run"])
    del run["configs"][1]
    file.attrs["run"] = json.dumps(run)


def group_instead(file: h5py.File) -> None:
    del file["theta"]
    file.create_group("theta")


def failed(file: h5py.File) -> None:
    """The second sample as one that failed, with its steps as they were."""
    file["complete"][1] = 0


DIMS = [
    (
        remade("theta", lambda held: held[:, :, :, :1]),
        "theta of the shape (3, 2, 2, 3, 2) along sample config step layer",
    ),
    (
        remade("theta", lambda held: np.swapaxes(held, 3, 4), ("sample", "config", "step", "head", "layer")),
        "theta along sample config step layer head, got sample config step head layer",
    ),
    (remade("theta", lambda held: held, ()), "got none none none none none"),
    (remade("theta", lambda held: held[0, 0, 0, 0, 0]), "theta along sample config step layer head, got no axis"),
    (group_instead, "the variable theta, got something else of this name"),
    (lambda file: file.__delitem__("complete"), "expected 'complete', got none"),
    (lambda file: file.__delitem__("sample"), "expected 'sample', got none"),
    (lambda file: file["config"].__setitem__(0, "other"), "along 'config', got ['other', "),
    (lambda file: file["config"].__setitem__(..., [SECOND, FIRST]), f"along 'config', got ['{SECOND}', '{FIRST}']"),
    (fewer_in_run, f"the run's configurations ['{FIRST}'] along 'config'"),
    (
        set_attribute("measured_layers", "1 5 of 6"),
        "the attribute measured_layers '', as along 'layer', got '1 5 of 6'",
    ),
    (set_attribute("measured_layers", "all"), "the attribute measured_layers '', as along 'layer', got 'all'"),
    (set_number("layer", 7), "the attribute measured_layers '0 7 2 of 3', as along 'layer', got ''"),
    (set_attribute("format_version", "three"), "the format_version 5"),
    (set_attribute("format_version", 0), "the format_version 5"),
    (set_attribute("format_version", 3), "got format 3; measure it again"),
    (set_attribute("run", "[" * 100_000), "expected the run as JSON"),
    (set_attribute("run", 7), "the run as JSON"),
    (set_number("steps_measured", 99), "steps_measured of 1 … 2 for sample 1, got 99"),
    (set_number("steps_measured", 0), "steps_measured of 1 … 2 for sample 1, got 0"),
    (failed, "steps_measured of 0, as the sample failed, for sample 1, got 2"),
]
NUMBERS = [
    (set_number("prompt_tokens", 0), "prompt_tokens from 1 to 2147483647"),
    (set_number("prompt_tokens", 2), "kept_count from 0 to 2"),
    (lambda file: file["kept_count"].__setitem__((0, 0, 0, 0), 70), "kept_count from 0 to 64"),
    (set_number("stage1_count", 4), "stage1_count from 0 to 3"),
    (set_number("stage1_count", -1), "stage1_count from 0 to 3"),
    (unknown_theta, "a number everywhere in theta where a step was measured"),
    (set_number("final_norm", np.nan), "a number everywhere in final_norm"),
]


@pytest.mark.parametrize(("change", "words"), DIMS)
def test_names_and_dims_are_checked_by_every_reader(path: Path, change: Change, words: str) -> None:
    with changing(path) as file:
        change(file)
    assert words in refusal(path)
    for read in (describe, ExistingTrace):
        with pytest.raises(Exception, match="t.h5"):
            read(path)


@pytest.mark.parametrize(("change", "words"), NUMBERS)
def test_numbers_that_no_run_measures_are_refused(path: Path, change: Change, words: str) -> None:
    with changing(path) as file:
        change(file)
    assert words in refusal(path)


def test_what_a_failed_sample_holds_need_make_no_sense(path: Path) -> None:
    with changing(path) as file:
        file["prompt_tokens"][2], file["theta"][2] = 0, np.nan
    assert read_trace(path).failures == {"c": "it broke"}


def test_what_a_reader_does_not_know_is_passed_over(path: Path) -> None:
    expected = str(everything(read_trace(path)))
    told = describe(path)
    with h5py.File(path, "r+") as file:
        group = file.create_group("mine")
        group["loop"] = group
        file["its_type"] = np.dtype("f8")
        file.create_dataset("numbers", data=np.arange(3))
        file["theta"].attrs["note"], file.attrs["also"] = "mine", np.arange(3)
    assert str(everything(read_trace(path))) == expected
    assert describe(path) == told


def test_sums_of_earlier_writers_are_passed_over(path: Path) -> None:
    told = describe(path)
    with h5py.File(path, "r+") as file:
        file.attrs["crc32"], file["theta"].attrs["crc32"] = "{}", np.array([1, 2, 3], dtype=np.uint32)
    assert describe(path) == told
    assert "crc32" not in read_trace(path).attrs


def test_texts_that_are_no_unicode_are_written_as_one_can_read_them(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.h5", run_config(1), ["a"], {"model": "folder\udcff"})
    writer.append(FailedSample("a", "no \udcff here"))
    trace = read_trace(writer.finish())
    assert (trace.attrs["model"], trace.failures["a"]) == ("folder\\udcff", "no \\udcff here")

"""A trace file in which anything was changed is refused, in a line that names what."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from perturbkv.errors import TraceError
from perturbkv.schema import ANSWER_TEXT, VARIABLES
from perturbkv.storage.run.writer import ExistingTrace, TraceWriter
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import FailedSample
from tests.support.changed import Change, changing, everything, refusal, without_sums
from tests.support.traces import run_config


def test_numbers_lie_in_chunks_with_sums_and_headers_have_their_own(path: Path) -> None:
    assert path.read_bytes()[8] == 3, "superblock of HDF5 1.10"
    with h5py.File(path) as file:
        unsummed = {name for name in file if not file[name].fletcher32}
    texts = {"sample", "config", "failure", "prompt_text", *ANSWER_TEXT}
    assert unsummed == {"kept_byte", "prompt_entry", *texts}, "no numbers of ours"


def test_sums_are_those_of_the_format(path: Path) -> None:
    with h5py.File(path) as file:
        for name, variable in file.items():
            if name in ("kept_byte", "prompt_entry"):
                assert "crc32" not in variable.attrs
                continue
            held = variable.asstr()[()] if variable.dtype == object else variable[()]
            by_sample = name in ("failure", "complete") or (name in VARIABLES and VARIABLES[name].axes[0] == "sample")
            blocks = [held[place : place + 1] for place in range(len(held))] if by_sample else [held]
            raw = [b"".join(f"{text}\0".encode() for text in one.flat) if held.dtype == object else one.tobytes()
                   for one in blocks]  # fmt: skip
            assert variable.attrs["crc32"].tolist() == [zlib.crc32(one) for one in raw], name
        told = json.loads(file.attrs["crc32"])
        assert told["attributes"]["run"] == zlib.crc32(file.attrs["run"].encode())
        assert told["variables"]["theta"] == zlib.crc32(b"L1\0bound of Theorem 2")
        assert told["variables"].keys() == set(file)


def test_a_file_without_sums_is_read_as_one_with_them(path: Path) -> None:
    expected = everything(read_trace(path))
    with changing(path):
        pass
    assert str(everything(read_trace(path))) == str(expected)  # NaN is not itself
    assert describe(path).with_text == ("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.chaos)])
def test_no_byte_can_change_what_is_read(whole: bytes, path: Path, count: int) -> None:
    expected = str((everything(read_trace(path)), describe(path).variables))
    draw = np.random.default_rng(0)
    refused = 0
    for place in draw.integers(len(whole), size=count).tolist():
        changed = bytearray(whole)
        changed[place] ^= 1 << int(draw.integers(8))
        path.write_bytes(changed)
        try:
            assert str((everything(read_trace(path)), describe(path).variables)) == expected, place
        except TraceError:
            refused += 1
    assert refused > count / 3


def test_two_chunks_in_each_others_place_are_found(whole: bytes, path: Path) -> None:
    with h5py.File(path) as file:
        held = file["steps_measured"]
        first, second = (file[name].id.get_chunk_info(0) for name in ("prompt_tokens", "steps_measured"))
    assert first.size == second.size
    changed = bytearray(whole)
    one, two = (slice(chunk.byte_offset, chunk.byte_offset + chunk.size) for chunk in (first, second))
    changed[one], changed[two] = whole[two], whole[one]
    path.write_bytes(changed)
    assert held is not None
    assert "expected the numbers of steps_measured as they were written" in refusal(path)


def set_number(name: str, value: float) -> Change:
    """The last number of the second sample."""

    def change(file: h5py.File) -> None:
        held = file[name][()]
        held[1:2].flat[-1] = value
        file[name][...] = held

    return change


def set_attribute(name: str, key: str, value: str) -> Change:
    return lambda file: (file[name] if name else file).attrs.__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_number("theta", 3.5), "the numbers of theta as they were written"),
        (set_number("prompt_tokens", 65), "the numbers of prompt_tokens as they were written"),
        (lambda file: file["kept_code"].__setitem__(2, 9), "of kept_code as"),
        (lambda file: file["prompt_text"].__setitem__(0, "another"), "the numbers of prompt_text as"),
        (lambda file: file["failure"].__setitem__(2, "for another reason"), "the numbers of failure as"),
        (lambda file: file["sample"].__setitem__(0, "z"), "the numbers of sample as"),
        (set_attribute("", "model", "another"), "'model' as it was written"),
        (set_attribute("theta", "long_name", "something else"), "'theta' as it was written"),
        (set_attribute("", "crc32", "{}"), "'crc32' as it was written"),
        (lambda file: file.__delitem__("theta"), "'theta' as it was written, got another or none|expected 'theta'"),
        (lambda file: file["theta"].attrs.__delitem__("crc32"), "the sums of theta"),
        (lambda file: file.move("theta", "other"), "'theta' as it was written"),
    ],
)
def test_what_differs_from_its_sum_is_refused_by_name(path: Path, change: Change, words: str) -> None:
    with h5py.File(path, "r+") as file:
        change(file)
    said = refusal(path)
    assert any(one in said for one in words.split("|")), said


def remade(name: str, data: Any, axes: tuple[str, ...] | None = None, **options: Any) -> Change:
    """The variable with other data, units and axes as they were."""

    def change(file: h5py.File) -> None:
        attrs = dict(file[name].attrs)
        held = data(file[name][()]) if callable(data) else data
        along = axes if axes is not None else tuple(dim[0].name for dim in file[name].dims)
        del file[name]
        made = file.create_dataset(name, data=held, **options)
        made.attrs["units"], made.attrs["long_name"] = attrs["units"], attrs["long_name"]
        for dim, axis in zip(made.dims, along, strict=False):
            dim.attach_scale(file[axis])

    return change


TEXTS = h5py.string_dtype()
TURNED = ("sample", "config", "step", "head", "layer")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remade("theta", lambda held: held.astype("f4")), "theta of the type float64, got another"),
        (remade("theta", lambda held: held.astype(">f8")), "theta of the type float64, got another"),
        (remade("theta", lambda held: held.astype("c16")), "theta of the type float64"),
        (remade("token_id", lambda held: held.astype("u8")), "token_id of the type int64"),
        (remade("complete", lambda held: held.astype(bool)), "complete of the type uint8"),
        (remade("prompt_text", lambda held: held.astype("S8")), "prompt_text of the type str"),
        (remade("answer", lambda held: held.astype("S8")), "answer of the type str"),
        (remade("answer", lambda held: held[:, 0], dtype=TEXTS), "answer along sample config, got sample"),
        (remade("answer", lambda held: held[:, :1], dtype=TEXTS), "answer of the shape (3, 2) along sample config"),
        (remade("answer", np.full((3, 2), b"\xff", dtype=object), dtype=TEXTS), "the numbers of answer"),
        (remade("expected_answers", ["[7]", "[]", ""], dtype=TEXTS), "expected_answers as a JSON list of texts"),
        (remade("expected_answers", ["[" * 99_999, "[]", ""], dtype=TEXTS), "as a JSON list of texts, got '[[[["),
        (remade("theta", lambda held: np.swapaxes(held, 3, 4), TURNED), "theta along sample config step layer head"),
        (remade("theta", lambda held: held, ()), "got none none none none none"),
        (remade("theta", lambda held: held[0, 0, 0, 0, 0]), "theta along sample config step layer head"),
        (remade("theta", h5py.Empty("f8")), "the variable theta, got something else of this name"),
        (set_attribute("theta", "units", "L2"), "theta in the unit L1, got L2"),
        (lambda file: file["theta"].attrs.__delitem__("units"), "a text as 'units' of theta"),
        (lambda file: file["theta"].attrs.__setitem__("units", np.arange(3)), "a text as 'units' of theta"),
        (lambda file: file["theta"].attrs.__setitem__("DIMENSION_LIST", 7), "got none none none none none"),
        (lambda file: file.__delitem__("complete"), "expected 'complete'"),
        (lambda file: file.__delitem__("sample"), "expected 'sample'"),
        (lambda file: file.attrs.__setitem__("format_version", "three"), "the format_version 4"),
        (lambda file: file.attrs.__setitem__("format_version", 0), "the format_version 4"),
        (lambda file: file.attrs.__setitem__("run", "[" * 100_000), "expected the run as JSON"),
        (lambda file: file.attrs.__setitem__("run", 7), "the run as JSON, got none"),
        (lambda file: file.attrs.__setitem__("format_version", 3), "got format 3; measure it again"),
    ],
)
def test_what_is_not_built_as_the_format_says_is_refused(path: Path, change: Change, words: str) -> None:
    with changing(path) as file:
        change(file)
    assert words in refusal(path)


def coded(code: list[int], count: int = 3) -> Change:
    """Another code of the first head of the second sample, behind all others."""

    def change(file: h5py.File) -> None:
        where, begin = (1, 0, 0, 0), len(file["kept_code"])
        for name, value in (("offset", begin), ("length", len(code)), ("count", count)):
            file[f"kept_{name}"][where] = value
        held = np.append(file["kept_code"][()], np.array(code, dtype=np.uint8))
        replaced(file, "kept_code", held)

    return change


def replaced(file: h5py.File, name: str, held: np.ndarray) -> None:  # type: ignore[type-arg]
    """A variable in a row and its axis, of another length."""
    axis, said = file[name].dims[0][0].name, dict(file[name].attrs)
    del file[name], file[axis]
    file.create_dataset(axis, shape=held.shape, dtype=">f4").make_scale()
    file[axis].attrs.update({"units": "1", "long_name": "place"})
    made = file.create_dataset(name, data=held)
    made.attrs.update({key: said[key] for key in ("units", "long_name")})
    made.dims[0].attach_scale(file[axis])


WHOLE = [0b1110_0000, *[0] * 7]
"""Entries 0, 1 and 2 of 64 as a mask, which gaps would say in three bytes."""
DENSE = [0xFF, *[0] * 6, 1]
NONE_OF_ITS_SET = "expected kept_code of as many positions within the prompt as kept_count says"
CODES = [
    coded([1, 0, 2]),  # twice the same
    coded([1, 2]),  # fewer than counted
    coded([0, 1, 1, 1]),  # more
    coded([0, 1, 63]),  # past the end
    coded([0, 0x80, 1]),  # one of them cut short, or in more bytes than it needs
    coded([0, 1, 0x81, 0]),
    coded([0, 1, 0x81]),  # which does not end
    coded([0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01], 1),
    coded(WHOLE),  # a mask where gaps are shorter
    coded([*DENSE, 0], 9),  # longer than a mask
    coded([0xFF, *[0] * 7], 9),
]
"""Codes that no writer makes."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_number("prompt_tokens", 0), "prompt_tokens from 1 to 2147483647"),
        (set_number("prompt_tokens", 2), "kept_count from 0 to 2"),
        (lambda file: file["kept_count"].__setitem__((0, 0, 0, 0), 70), "kept_count from 0 to 64"),
        (set_number("stage1_count", 4), "stage1_count from 0 to 3"),
        (set_number("stage1_count", -1), "stage1_count from 0 to 3"),
        (set_number("lost_position", 64), "lost_position from -1 to 63"),
        (set_number("prompt_count", 63), "prompt_count of the prompt's tokens and its question's"),
        (set_number("theta", np.nan), "a number everywhere in theta where a step was measured"),
        (set_number("final_norm", np.nan), "a number everywhere in final_norm"),
        (set_number("evicted", 2), "evicted of 0 or 1"),
        *((change, NONE_OF_ITS_SET) for change in CODES),
        (lambda file: file["prompt_start"].__setitem__(3, -1), "prompt_start ascending from 0"),
        (lambda file: file["prompt_start"].__setitem__(63, 10**6), "prompt_start ascending from 0"),
        (lambda file: file["complete"].__setitem__(0, 7), "sample 0 complete, or failed for a reason"),
        (lambda file: file["failure"].__setitem__(2, ""), "sample 2 complete, or failed for a reason"),
        (lambda file: file["failure"].__setitem__(0, "but why"), "sample 0 complete, or failed for a reason"),
        (lambda file: file["failure"].__setitem__(0, b"\xff"), "the numbers of failure, got what HDF5 cannot read"),
    ],
)
def test_numbers_that_no_run_measures_are_refused_without_any_sum(path: Path, change: Change, words: str) -> None:
    with changing(path) as file:
        change(file)
    assert words in refusal(path)


def test_a_mask_is_read_where_it_is_no_longer_than_gaps(path: Path) -> None:
    with changing(path) as file:
        coded(DENSE, 9)(file)
    assert read_trace(path).kept(1, 0, 0, 0).tolist() == [*range(8), 63]


def test_what_a_failed_sample_holds_need_make_no_sense(path: Path) -> None:
    with changing(path) as file:
        file["prompt_tokens"][2], file["theta"][2] = 0, np.nan
    assert read_trace(path).failures == {"c": "it broke"}


def test_a_sample_that_is_read_alone_has_its_own_sum(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["theta"][1, 0, 0, 0, 0] = 3.5
    old = ExistingTrace(path)
    assert old.part("a").arrays(["theta"])["theta"].shape == (2, 2, 3, 2)  # type: ignore[union-attr]
    with pytest.raises(TraceError, match="the numbers of theta as they were written"):
        old.part("b").arrays(["theta"])  # type: ignore[union-attr]


def test_kept_positions_of_a_sample_that_is_carried_over_are_held_against_its_prompt(path: Path) -> None:
    with changing(path) as file:
        CODES[0](file)
    old = ExistingTrace(path)
    assert old.part("a").arrays()["kept_count"].max() == 3  # type: ignore[union-attr]
    with pytest.raises(TraceError, match=NONE_OF_ITS_SET):
        old.part("b").arrays()  # type: ignore[union-attr]


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


def test_texts_that_are_no_unicode_are_written_as_one_can_read_them(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.h5", run_config(1), ["a"], {"model": "folder\udcff"})
    writer.append(FailedSample("a", "no \udcff here"))
    trace = read_trace(writer.finish())
    assert (trace.attrs["model"], trace.failures["a"]) == ("folder\\udcff", "no \\udcff here")


def test_sums_are_taken_away_by_the_helper_of_these_tests(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        without_sums(file)
        assert not [name for name in file if "crc32" in file[name].attrs]

"""The answers' text in a trace: decoded from the tokens that it holds, whoever wrote it and whatever it says."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray as xr

from perturbkv.schema import ANSWER_TEXT, TEXT
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.export import columns
from perturbkv.storage.trace.texts import Texts
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import FailedSample, SampleTrace, Trace
from tests.support.growing import CONFIGS, NEW, OLD, assert_same_file, measured
from tests.support.traces import run_config, sample_trace, spoken, told

RUN, NAMES = run_config(3), ["a", "failed", "b"]
HOSTILE = [
    "",
    "\0nul\0in\0it\0",
    "half \udc80 of \ud83d a pair",
    "\x1b[31mred\x1b[0m\r\n\t\x07",
    "=1+1",
    "\u2028\u202e\ufeff😀é",
    "x" * 1_000_000,
]


def answered(name: str, full: list[int], *evicted: list[int], **more: Any) -> SampleTrace:
    """A sample whose answers have these tokens, without any text."""
    arrays = dict(sample_trace(name, configs=len(evicted), **more).arrays)
    most = max(map(len, (full, *evicted)))
    rows = np.array([[*row, *[-1] * (most - len(row))] for row in (full, *evicted)])
    return SampleTrace(name, {**arrays, "generated_full": rows[0], "generated": rows[1:]})


SAMPLES = [answered("a", [3, 1], [3], []), FailedSample("failed", "broke"), answered("b", [2, 2], [2, 2], [2, 5])]


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


TEXTS: Texts = {"a": told("one", letters, ["d", "é"]), "b": told("two", letters)}


def written(path: Path, texts: Texts | None) -> Path:
    writer = TraceWriter(path, RUN, NAMES, {"model": "m"}, texts=texts)
    for sample in SAMPLES:
        if sample.sample_id in writer.missing():
            writer.append(sample)
    return writer.finish()


def said(trace: Trace) -> list[list[Any]]:
    return [trace.arrays[name].tolist() for name in ANSWER_TEXT]


EXPECTED = [["db", "", "cc"], [["d", ""], ["", ""], ["cc", "cf"]], ['["d", "é"]', "", "[]"]]


def test_answers_are_read_as_their_tokens_say_failed_samples_beside_them(tmp_path: Path) -> None:
    path = written(tmp_path / "t.h5", TEXTS)
    assert said(read_trace(path)) == EXPECTED
    found = describe(path)
    assert found.with_answers == ("a", "b")
    assert found.variables["answer"].shape == (3, 2)
    assert found.variables["answer"].nbytes == sum(len(one) for row in EXPECTED[1] for one in row)


@pytest.mark.slow
def test_xarray_and_copies_in_memory_hold_the_same(tmp_path: Path) -> None:
    path = written(tmp_path / "t.h5", TEXTS)
    trace = read_trace(path)
    with xr.open_dataset(path, engine="h5netcdf") as data:
        assert data["answer"].dims == ("sample", "config")
        assert [data[name].values.tolist() for name in ANSWER_TEXT] == EXPECTED
    assert [trace.to_xarray()[name].values.tolist() for name in ANSWER_TEXT] == EXPECTED
    assert said(read_trace(trace.save(tmp_path / "copy.h5"))) == EXPECTED
    part = trace.sel(sample=["b", "a"], selection="two-stage")
    assert said(part) == [["cc", "db"], [["cf"], [""]], ["[]", '["d", "é"]']]
    assert said(read_trace(part.save(tmp_path / "part.h5"))) == said(part)


def test_h5py_alone_reads_an_answer(tmp_path: Path) -> None:
    with h5py.File(written(tmp_path / "t.h5", TEXTS)) as file:
        assert file["answer"][2, 1] == b"cf"
        assert [dim[0].name for dim in file["answer"].dims] == ["/sample", "/config"]
        assert json.loads(file["expected_answers"].asstr()[0]) == ["d", "é"]


def test_what_generated_nothing_has_none(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.h5", run_config(1), ["a"], {}, texts=TEXTS)
    writer.append(sample_trace("a"))
    path = writer.finish()
    assert set(read_trace(path).arrays).isdisjoint(ANSWER_TEXT)


@pytest.mark.parametrize("through_a_file", [True, False], ids=["file", "memory"])
def test_hostile_answers_survive_a_round_trip(tmp_path: Path, through_a_file: bool) -> None:
    """A NUL is shown by its sign, half a character by its number, in a file as in memory."""
    configs = tuple(replace(CONFIGS[0], window=place + 1) for place in range(len(HOSTILE)))
    run = run_config(1, configs=configs)
    sample = answered("a", [5], *([place] for place in range(len(HOSTILE))))
    text = told("one", lambda tokens: HOSTILE[tokens[0]], HOSTILE)
    shown = [one.replace("\0", "\u2400") for one in HOSTILE]
    shown[2] = "half \\udc80 of \\ud83d a pair"
    if through_a_file:
        writer = TraceWriter(tmp_path / "t.h5", run, ["a"], {}, texts={"a": text})
        writer.append(sample)
        trace = read_trace(writer.finish())
    else:
        held = {**sample.arrays, **text.prompt, **text.answers(sample.arrays)}
        trace = Trace.from_samples(run, [SampleTrace("a", held)], {})
    assert trace.arrays["answer"].tolist() == [shown]
    assert trace.arrays["answer_full"].tolist() == [shown[5]]
    assert json.loads(str(trace.arrays["expected_answers"][0])) == HOSTILE
    again = read_trace(trace.save(tmp_path / "again.h5"))
    assert said(again) == said(trace)


def test_a_journal_carries_answers_and_configurations_join_with_theirs(tmp_path: Path) -> None:
    run = run_config(1, configs=CONFIGS)
    writer = TraceWriter(tmp_path / "t.h5", run, ["s0"], {"model": "m"})
    for configs in (NEW, OLD):
        writer.append(measured("s0", configs), configs)
    resumed = TraceWriter(tmp_path / "t.h5", run, ["s0"], {"model": "m"})
    trace = read_trace(resumed.finish())
    assert said(trace) == [["of s0"], [[f"{place} é\n of s0" for place in range(len(CONFIGS))]], ['["é"]']]


@pytest.mark.slow
def test_a_sample_without_answers_text_lies_among_others_with_it(tmp_path: Path) -> None:
    samples = [answered("a", [1], [2], [3]), answered("b", [1], [2], [3])]
    samples[1] = SampleTrace("b", {**samples[1].arrays, **spoken("f", ["x", "y"])})
    run = run_config(2)
    writer = TraceWriter(tmp_path / "t.h5", run, ["a", "b"], {})
    for sample in samples:
        writer.append(sample)
    path = writer.finish()
    trace = read_trace(path)
    assert said(trace) == [["", "f"], [["", ""], ["x", "y"]], ["", "[]"]]
    assert set(trace.sample("a").arrays).isdisjoint(ANSWER_TEXT)  # type: ignore[union-attr]
    assert describe(path).with_answers == ("b",)
    assert_same_file(TraceWriter(path, run, ["a", "b"], {}).finish(), path)


def test_the_table_holds_numbers_and_no_answer(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t.h5", TEXTS))
    assert set(columns(trace)).isdisjoint((*TEXT, *ANSWER_TEXT))
    assert "db" not in trace.to_frame().to_csv()


@pytest.mark.slow
def test_large_answers_of_many_samples_are_written_one_sample_at_a_time(tmp_path: Path) -> None:
    names, size = [f"s{place}" for place in range(12)], 500_000
    run = run_config(len(names))
    writer = TraceWriter(
        tmp_path / "t.h5", run, names, {}, texts={name: told("one", lambda tokens: "y" * size) for name in names}
    )
    for name in names:
        writer.append(answered(name, [1], [2], [3]))
    tracemalloc.start()
    path = writer.finish()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12 * size, f"{most:,} bytes of {3 * len(names) * size:,}"
    assert describe(path).variables["answer"].nbytes == 2 * len(names) * size

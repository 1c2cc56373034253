"""The prompts' text in a trace: where it lies, and who carries it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray as xr

from perturbkv.schema import TEXT
from perturbkv.storage.run.writer import ExistingTrace, TraceWriter
from perturbkv.storage.trace.texts import Texts
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import FailedSample, SampleTrace, Trace
from tests.support.changed import changing
from tests.support.growing import CONFIGS, measured, opened
from tests.support.traces import TOKENS, run_config, sample_trace, text, told

SAID = {"a": "The cat\n😀 sat.", "b": "é", "c": "third\u2400\ufffd"}
RUN = run_config(4)
NAMES = ["a", "failed", "b", "c"]


def samples(*without: str) -> list[SampleTrace | FailedSample]:
    made: list[SampleTrace | FailedSample] = [FailedSample("failed", "broke")]
    for seed, (name, said) in enumerate(SAID.items()):
        own = {} if name in without else text(said)
        made.append(SampleTrace(name, {**sample_trace(name, seed=seed).arrays, **own}))
    return sorted(made, key=lambda one: NAMES.index(one.sample_id))


def written(path: Path, *without: str, **more: Any) -> Path:
    writer = TraceWriter(path, RUN, NAMES, {"model": "m"}, **more)
    for sample in samples(*without):
        if sample.sample_id in writer.missing():
            writer.append(sample)
    return writer.finish()


def texts_of(trace: Trace) -> dict[str, str]:
    """Sample -> its pieces, as FORMAT.md says that they are found."""
    found = {}
    for place, name in enumerate(trace.sample_ids):
        begin, count = (int(trace.arrays[f"prompt_{told}"][place]) for told in ("offset", "count"))
        starts = trace.arrays["prompt_start"][begin : begin + count].tolist()
        whole = str(trace.arrays["prompt_text"][place])
        ends = [*starts[1:], len(whole)][:count]
        found[name] = "|".join(whole[first:last] for first, last in zip(starts, ends, strict=True))
    return found


def pieces(said: str) -> str:
    return "|".join(said[2 * place : 2 * place + 2] for place in range(TOKENS))


def test_text_is_read_as_it_was_written_failed_samples_beside_it(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t.h5"))
    assert texts_of(trace) == {**{name: pieces(said) for name, said in SAID.items()}, "failed": ""}
    assert trace.arrays["prompt_token"].dtype == np.int32
    found = describe(tmp_path / "t.h5")
    assert found.with_text == ("a", "b", "c")
    assert found.variables["prompt_text"].nbytes == sum(len(said.encode()) for said in SAID.values())


def test_a_sample_without_text_lies_among_others_with_it(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t.h5", "a"))
    assert texts_of(trace) == {"a": "", "failed": "", "b": pieces("é"), "c": pieces(SAID["c"])}
    assert describe(tmp_path / "t.h5").with_text == ("b", "c")
    assert set(trace.sample("a").arrays).isdisjoint(TEXT)  # type: ignore[union-attr]


def test_a_trace_without_text_has_none_of_its_variables(tmp_path: Path) -> None:
    path = written(tmp_path / "t.h5", *SAID)
    assert describe(path).with_text == ()
    assert set(read_trace(path).arrays).isdisjoint(TEXT)
    with h5py.File(path) as file:
        assert not [name for name in file if name.startswith("prompt_") and name != "prompt_tokens"]


@pytest.mark.slow
def test_xarray_opens_it_and_its_dataset_is_the_same(tmp_path: Path) -> None:
    path = written(tmp_path / "t.h5")
    with xr.open_dataset(path, engine="h5netcdf") as data:
        assert str(data["prompt_text"].sel(sample="a").item()) == SAID["a"]
        assert data["prompt_token"].dims == ("prompt_entry",)
        held = read_trace(path).to_xarray()
        for name in TEXT:
            assert data[name].dims == held[name].dims
            assert data[name].values.tolist() == held[name].values.tolist()


def test_parts_of_a_trace_and_copies_in_memory_carry_it(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t.h5"))
    part = trace.sel(sample=["c", "a"], selection="two-stage")
    assert texts_of(part) == {name: pieces(SAID[name]) for name in ("c", "a")}
    assert texts_of(read_trace(part.save(tmp_path / "part.h5"))) == texts_of(part)
    assert texts_of(Trace.from_samples(RUN, samples(), {})) == texts_of(trace)


def test_a_journal_and_configurations_that_join_carry_it(tmp_path: Path) -> None:
    writer = opened(tmp_path / "t.h5", CONFIGS, samples=1)
    for configs in (CONFIGS[:2], CONFIGS[2:]):
        writer.append(measured("s0", configs), configs)
    resumed = opened(tmp_path / "t.h5", CONFIGS, samples=1)
    trace = read_trace(resumed.finish())
    assert texts_of(trace) == {"s0": pieces("Prompt of s0:\nçé 0")}


def test_a_finished_file_is_left_as_it_is_whatever_text_is_asked_for(tmp_path: Path) -> None:
    run, names = run_config(1), ["a"]
    writer = TraceWriter(tmp_path / "t.h5", run, names, {}, texts={"a": told("one two")})
    writer.append(sample_trace("a"))
    path = writer.finish()
    stamp = path.stat().st_mtime_ns
    TraceWriter(path, run, names, {}, texts={"a": told("one two")}).finish()
    TraceWriter(path, run, names, {}).finish()
    assert path.stat().st_mtime_ns == stamp
    assert describe(path).with_text == ("a",)


def read_again(name: str, *tokens: int, steps: int = 3) -> SampleTrace:
    """A sample of a run that compresses caches again, whose text has these tokens."""
    more = {
        "missed_attention": np.zeros((2, steps)),
        "token_id": np.array([*tokens, *[-1] * (steps - len(tokens))]),
        "steps_measured": np.array(len(tokens)),
    }
    return SampleTrace(name, {**sample_trace(name, steps=steps).arrays, **more})


def test_the_text_of_decoded_tokens_is_stored_with_that_of_prompts(tmp_path: Path) -> None:
    """One text ends early, one sample has no text, and one failed."""
    run, path = run_config(4, steps=3), tmp_path / "t.h5"
    texts: Texts = {"a": told("one"), "b": told("two")}
    writer = TraceWriter(path, run, NAMES, {}, texts=texts)
    for sample in (
        read_again("a", 4, 7),
        FailedSample("failed", "broke"),
        read_again("b", 1, 2, 3),
        read_again("c", 5),
    ):
        writer.append(sample)
    trace = read_trace(writer.finish())
    nothing = ["", "", ""]
    assert trace.arrays["token_text"].tolist() == [[" 4", " 7", ""], nothing, [" 1", " 2", " 3"], nothing]
    assert "token_text" not in trace.sample("c").arrays  # type: ignore[union-attr]
    part = trace.sel(sample=["b", "a"], selection="two-stage")
    assert read_trace(part.save(tmp_path / "part.h5")).arrays["token_text"].tolist() == [
        [" 1", " 2", " 3"],
        [" 4", " 7", ""],
    ]
    with xr.open_dataset(path, engine="h5netcdf") as data:
        assert data["token_text"].dims == ("sample", "step")
        assert data["token_text"].values.tolist() == trace.to_xarray()["token_text"].values.tolist()


def test_a_variable_and_an_axis_of_a_later_writer_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path / "t.h5")
    with changing(path) as file:
        scale = file.create_dataset("later_axis", data=np.arange(3))
        scale.make_scale("later_axis")
        made = file.create_dataset("later", shape=(4, 3), dtype="f8")
        made.attrs["units"], made.attrs["long_name"] = "1", "of a later version"
        for dimension, axis in zip(made.dims, ("sample", "later_axis"), strict=True):
            dimension.attach_scale(file[axis])
    assert describe(path).variables["later"].dims == ("sample", "later_axis")
    assert "later" not in read_trace(path).arrays
    assert ExistingTrace(path).sample_ids == ("a", "failed", "b", "c")

"""A trace without kept positions: what it still tells, what it refuses, what joins it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perturbkv.errors import TraceError
from perturbkv.schema import DIGEST, KEPT, VARIABLES
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import SampleTrace, Trace
from tests.store.test_equal_kept_sets_are_found import alike_in_places, expected
from tests.support.growing import CONFIGS, measured, opened
from tests.support.traces import ragged, run_config, sample_trace


def samples() -> list[SampleTrace]:
    return [alike_in_places(ragged(sample_trace(f"s{seed}", layers=3, heads=4), seed), seed) for seed in range(2)]


def written(path: Path, kept: bool, *more: SampleTrace) -> Path:
    made = [*samples(), *more]
    writer = TraceWriter(path, run_config(len(made)), [one.sample_id for one in made], {}, kept=kept)
    for sample in made:
        if sample.sample_id in writer.missing():
            writer.append(sample)
    return writer.finish()


def test_everything_but_the_positions_stays_and_equal_sets_are_known(tmp_path: Path) -> None:
    whole, without = read_trace(written(tmp_path / "a.h5", True)), read_trace(written(tmp_path / "b.h5", False))
    assert set(without.arrays) == set(whole.arrays) - set(KEPT) | {DIGEST}
    for name in set(whole.arrays) - set(KEPT):
        np.testing.assert_array_equal(without.arrays[name], whole.arrays[name], err_msg=name)
    assert without.same_kept(0, 1).tolist() == expected(whole, 0, 1)
    assert describe(tmp_path / "a.h5").with_kept == ("s0", "s1")
    assert describe(tmp_path / "b.h5").with_kept == ()


@pytest.mark.parametrize("ask", [lambda trace: trace.kept(0, 0, 0, 0), lambda trace: trace.kept_masks(0, 0)])
def test_who_needs_positions_says_how_to_measure_them(tmp_path: Path, ask) -> None:  # type: ignore[no-untyped-def]
    trace = read_trace(written(tmp_path / "t.h5", False))
    said = r"^expected kept positions in .*t\.h5, .*--no-kept.*perturbkv trace --model m --dataset d -o trace\.h5$"
    with pytest.raises(TraceError, match=said):
        ask(trace)


def test_a_trace_loses_them_and_its_numbers_stay(tmp_path: Path) -> None:
    path = written(tmp_path / "t.h5", True)
    whole = read_trace(path)
    theta, same = np.array(whole.arrays["theta"]), whole.same_kept(0, 1)
    writer = TraceWriter(path, run_config(2), ["s0", "s1"], {}, kept=False)
    assert (writer.count_kept_changes(), dict(writer.missing())) == ((2, 0), {})
    trace = read_trace(writer.finish())
    np.testing.assert_array_equal(trace.arrays["theta"], theta)
    np.testing.assert_array_equal(trace.same_kept(0, 1), same)
    assert set(KEPT).isdisjoint(trace.arrays)


@pytest.mark.slow
def test_positions_cannot_be_added_and_new_samples_have_them(tmp_path: Path) -> None:
    path = written(tmp_path / "t.h5", False)
    writer = TraceWriter(path, run_config(3), ["s0", "s1", "new"], {})
    assert writer.count_kept_changes() == (0, 2)
    writer.append(SampleTrace("new", samples()[0].arrays))
    trace = read_trace(writer.finish())
    assert describe(path).with_kept == ("new",)
    known = read_trace(written(tmp_path / "whole.h5", True))
    assert trace.kept(2, 0, 0, 0).tolist() == known.kept(0, 0, 0, 0).tolist()
    with pytest.raises(TraceError, match="expected kept positions"):
        trace.kept(0, 0, 0, 0)
    same = known.same_kept(0, 1)
    np.testing.assert_array_equal(trace.same_kept(0, 1), same[[0, 1, 0]])
    finished = TraceWriter(path, run_config(3), ["s0", "s1", "new"], {})
    before = path.read_bytes()
    finished.finish()
    assert path.read_bytes() == before


@pytest.mark.slow
def test_configurations_with_and_without_them_join(tmp_path: Path) -> None:
    """Those that are there first have none; both know which of their sets are equal."""
    path, configs = tmp_path / "t.h5", CONFIGS
    first = TraceWriter(path, run_config(1, configs=configs), ["s0"], {}, kept=False)
    first.append(measured("s0", configs[:2]), configs[:2])
    second = opened(path, configs, samples=1)
    second.append(measured("s0", configs[2:]), configs[2:])
    trace = read_trace(second.finish())
    whole = opened(tmp_path / "whole.h5", configs, samples=1)
    whole.append(measured("s0", configs))
    known = read_trace(whole.finish())
    assert trace.kept(0, 3, 0, 0).tolist() == known.kept(0, 3, 0, 0).tolist()
    with pytest.raises(TraceError, match="expected kept positions"):
        trace.kept(0, 1, 0, 0)
    for other in range(1, len(configs)):
        np.testing.assert_array_equal(trace.same_kept(0, other), known.same_kept(0, other))
    assert describe(path).with_kept == ()


def test_a_part_in_memory_goes_without_them_too(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t.h5", False))
    part = trace.sel(sample="s1")
    assert isinstance(part, Trace)
    assert set(KEPT).isdisjoint(part.arrays)
    again = read_trace(part.save(tmp_path / "part.h5"))
    np.testing.assert_array_equal(again.arrays[DIGEST], part.arrays[DIGEST])
    assert set(VARIABLES) > set(again.arrays)

"""Kept positions: small, left out where nobody wants them, found equal where they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perturbkv
from perturbkv import kept_codec
from perturbkv.errors import TraceError
from perturbkv.schema import DIGEST, KEPT, VARIABLES
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import SampleTrace, Trace
from tests.support.growing import CONFIGS, measured, opened
from tests.support.traces import (
    decoded,
    encode_positions,
    kept_of,
    ragged,
    rekept,
    run_config,
    sample_trace,
    trace,
    write,
)

FORMAT = (Path(perturbkv.__file__).parent / "storage" / "FORMAT.md").read_text()
GOLDEN = Path(__file__).parent / "golden"


def gaps(positions: list[int]) -> bytes:
    """Unsigned LEB128 of each gap, number by number."""
    found = bytearray()
    for before, place in zip([0, *positions], positions, strict=False):
        left = place - before
        while left >= 128:
            found.append(128 | left % 128)
            left //= 128
        found.append(left)
    return bytes(found)


def shortest(positions: list[int], tokens: int) -> list[int]:
    mask = sum(1 << tokens - 1 - place for place in positions) << -tokens % 8
    return list(min(mask.to_bytes(-(-tokens // 8), "big"), gaps(positions), key=len))


@st.composite
def kept_sets(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Sets of entries of one prompt: none, all, a few far apart, or many."""
    tokens = draw(st.sampled_from([1, 7, 8, 9, 64, 300, 40_000]))
    some = st.sets(st.integers(0, tokens - 1), max_size=40)
    run = st.tuples(st.integers(0, tokens - 1), st.integers(1, 300)).map(
        lambda ends: set(range(ends[0], min(tokens, sum(ends))))
    )
    held = st.one_of(some, run, st.tuples(some, run).map(lambda both: both[0] | both[1]))
    return tokens, [sorted(one) for one in draw(st.lists(held, min_size=1, max_size=6))]


@settings(max_examples=60, deadline=None)
@given(kept_sets())
def test_every_set_is_its_shortest_code_and_comes_back(held: tuple[int, list[list[int]]]) -> None:
    tokens, sets = held
    counts = np.array([len(one) for one in sets])
    code, lengths = encode_positions(np.array(sum(sets, []), dtype=np.int32), counts, tokens)
    offsets = np.cumsum(lengths) - lengths
    own = [code[begin : begin + length] for begin, length in zip(offsets, lengths, strict=True)]
    assert [one.tolist() for one in own] == [shortest(one, tokens) for one in sets]
    assert [decoded(one.tolist(), tokens) for one in own] == sets
    assert [kept_codec.decode_positions(one, tokens).tolist() for one in own] == sets
    masks = kept_codec.decode_masks(code, offsets, lengths, tokens)
    assert masks.shape == (len(sets), tokens)
    assert [np.flatnonzero(mask).tolist() for mask in masks] == sets


def test_steps_of_the_work_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    sets = [np.sort(draw.choice(2000, count, replace=False)) for count in draw.integers(0, 400, 40)]
    counts = np.array([len(one) for one in sets])
    whole = encode_positions(np.concatenate(sets), counts, 2000)
    monkeypatch.setattr(kept_codec, "_STEP_BYTES", 2000)
    for found, expected in zip(encode_positions(np.concatenate(sets), counts, 2000), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("share", [0.02, 0.2, 0.6])
def test_a_position_takes_at_most_a_fifth_of_four_bytes_where_many_stay(share: float) -> None:
    """Of random positions, which nothing makes smaller; the fewer stay, the nearer a byte for each gap."""
    draw, tokens = np.random.default_rng(0), 32_768
    masks = np.packbits(draw.random((16, tokens)) < share, axis=1)
    counts = np.bitwise_count(masks).sum(axis=1).astype(np.int64)
    code, _ = kept_codec.encode_masks(masks, counts)
    each = len(code) / counts.sum()
    assert each <= (0.8 if share >= 0.2 else 1.1)


@pytest.mark.slow
def test_the_example_of_the_format_reads_every_head(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(import h5py\n.*?)```", FORMAT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)  # noqa: S102
    trace = read_trace(GOLDEN / "measured-v5.h5")
    with h5py.File(GOLDEN / "measured-v5.h5") as file:
        for where in np.ndindex(*trace.arrays["kept_count"].shape):
            assert names["kept"](file, *where).tolist() == trace.kept(*where).tolist()
    empty = sample_trace("s0")
    none = {"kept_count": np.zeros_like(empty.arrays["kept_count"]), "kept_code": np.zeros(0, dtype=np.uint8)}
    none["kept_length"] = none["kept_offset"] = none["kept_count"]
    path = write(tmp_path / "t.h5", SampleTrace("s0", {**empty.arrays, **none, "stage1_count": none["kept_count"]}))
    with h5py.File(path) as file:
        assert names["kept"](file, 0, 0, 0, 0).tolist() == read_trace(path).kept(0, 0, 0, 0).tolist() == []


def test_all_heads_at_once_are_each_head_alone() -> None:
    trace = read_trace(GOLDEN / "measured-v5.h5")
    for config in range(len(trace.run.configs)):
        masks = trace.kept_masks(1, config)
        assert masks.shape == (2, 4, 301)
        for where in np.ndindex(2, 4):
            assert np.flatnonzero(masks[where]).tolist() == trace.kept(1, config, *where).tolist()


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
    message = r"^expected kept positions in .*t\.h5, .*--no-kept.*perturbkv trace --model m --dataset d -o trace\.h5$"
    with pytest.raises(TraceError, match=message):
        ask(trace)


@pytest.mark.slow
def test_positions_cannot_be_added_and_new_samples_have_them(tmp_path: Path) -> None:
    path = written(tmp_path / "t.h5", False)
    writer = TraceWriter(path, run_config(3), ["s0", "s1", "new"], {})
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


def alike_in_places(sample: SampleTrace, seed: int) -> SampleTrace:
    """Configuration 1 keeps what 0 does in some heads: at the same place, at another one, or all but one position."""
    arrays: dict[str, Any] = {name: np.array(array) for name, array in sample.arrays.items()}
    kinds = np.random.default_rng(seed).integers(4, size=arrays["kept_offset"].shape[1:])

    def change(where: tuple[int, ...], held: list[int]) -> list[int]:
        if where[0] == 0 or kinds[where[1:]] not in (1, 2):
            return held
        first = kept_of(sample.arrays, 0, *where[1:])
        return first[:-1] + [first[-1] + int(kinds[where[1:]]) - 1]

    rekept(arrays, change)
    for where in zip(*np.nonzero(kinds == 0), strict=True):
        for name in ("kept_offset", "kept_length", "kept_count"):
            arrays[name][(1, *where)] = arrays[name][(0, *where)]
    return SampleTrace(sample.sample_id, arrays)


def expected(made: Trace, first: int, second: int) -> list[Any]:
    return [
        [
            [made.kept(sample, first, layer, head).tolist() == made.kept(sample, second, layer, head).tolist()
             for head in range(made.arrays["kept_count"].shape[3])]
            for layer in range(made.arrays["kept_count"].shape[2])
        ]
        for sample in np.flatnonzero(made.ok)
    ]  # fmt: skip


@pytest.mark.parametrize("sharing", [1, 2])
def test_equal_kept_sets_are_those_whose_positions_are_equal(sharing: int) -> None:
    samples = [
        alike_in_places(ragged(sample_trace(f"s{seed}", layers=3, heads=4), seed, sharing), seed) for seed in range(4)
    ]
    made = trace(*samples, failures={"broken": "planted"})
    found = made.same_kept(0, 1)
    assert found.shape == (4, 3, 4)
    assert found.dtype == bool
    assert found.tolist() == expected(made, 0, 1)
    assert 0 < found.sum() < found.size
    assert made.same_kept(1, 0).tolist() == found.tolist()
    assert made.same_kept(0, 0).all()


def test_empty_kept_sets_are_equal_and_a_trace_without_complete_samples_has_none() -> None:
    sample = sample_trace()
    nothing = np.zeros_like(sample.arrays["kept_count"])
    none = {"kept_count": nothing, "kept_length": nothing, "kept_code": np.zeros(0, dtype=np.uint8)}
    empty = SampleTrace("s0", {**sample.arrays, **none})
    assert trace(empty).same_kept(0, 1).all()
    made = trace(sample)
    failed = Trace(made.run, made.sample_ids, made.arrays, {"s0": "planted"})
    assert failed.same_kept(0, 1).shape == (0, 2, 2)

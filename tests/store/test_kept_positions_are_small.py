"""Kept positions take few bytes in memory, journal and file."""

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
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import SampleTrace
from tests.support.traces import decoded, encode_positions, sample_trace, write

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
    trace = read_trace(GOLDEN / "measured-v4.h5")
    with h5py.File(GOLDEN / "measured-v4.h5") as file:
        for where in np.ndindex(*trace.arrays["kept_count"].shape):
            assert names["kept"](file, *where).tolist() == trace.kept(*where).tolist()
    empty = sample_trace("s0")
    none = {"kept_count": np.zeros_like(empty.arrays["kept_count"]), "kept_code": np.zeros(0, dtype=np.uint8)}
    none["kept_length"] = none["kept_offset"] = none["kept_count"]
    path = write(tmp_path / "t.h5", SampleTrace("s0", {**empty.arrays, **none, "stage1_count": none["kept_count"]}))
    with h5py.File(path) as file:
        assert names["kept"](file, 0, 0, 0, 0).tolist() == read_trace(path).kept(0, 0, 0, 0).tolist() == []


def test_all_heads_at_once_are_each_head_alone() -> None:
    trace = read_trace(GOLDEN / "measured-v4.h5")
    for config in range(len(trace.run.configs)):
        masks = trace.kept_masks(1, config)
        assert masks.shape == (2, 4, 301)
        for where in np.ndindex(2, 4):
            assert np.flatnonzero(masks[where]).tolist() == trace.kept(1, config, *where).tolist()

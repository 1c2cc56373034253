from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perturbkv.trace import SampleTrace, Trace
from tests.support.traces import ragged, sample_trace, trace


def alike_in_places(sample: SampleTrace, seed: int) -> SampleTrace:
    """Configuration 1 keeps what 0 does in some heads: at the same place, at another one, or all but one position."""
    arrays: dict[str, Any] = {name: np.array(array) for name, array in sample.arrays.items()}
    offset, count, draw = arrays["kept_offset"], arrays["kept_count"], np.random.default_rng(seed)
    for where in np.ndindex(offset.shape[1:]):
        first, second = (0, *where), (1, *where)
        kind, own = draw.integers(4), slice(offset[first], offset[first] + count[first])
        if kind == 0:
            offset[second], count[second] = offset[first], count[first]
        elif kind in (1, 2):
            positions = arrays["kept_position"][own].copy()
            positions[-1] += kind - 1
            offset[second], count[second] = len(arrays["kept_position"]), count[first]
            arrays["kept_position"] = np.concatenate([arrays["kept_position"], positions])
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
    starts = np.cumsum([0, *(len(sample.arrays["kept_position"]) for sample in samples)])
    moved = [
        SampleTrace(sample.sample_id, {**sample.arrays, "kept_offset": sample.arrays["kept_offset"] + start})
        for sample, start in zip(samples, starts[:-1], strict=True)
    ]
    made = trace(*moved, failures={"broken": "planted"})
    found = made.same_kept(0, 1)
    assert found.shape == (4, 3, 4)
    assert found.dtype == bool
    assert found.tolist() == expected(made, 0, 1)
    assert 0 < found.sum() < found.size
    assert made.same_kept(1, 0).tolist() == found.tolist()
    assert made.same_kept(0, 0).all()


def test_empty_kept_sets_are_equal_and_a_trace_without_complete_samples_has_none() -> None:
    sample = sample_trace()
    nothing = {"kept_count": np.zeros_like(sample.arrays["kept_count"]), "kept_position": np.zeros(0, dtype=np.int32)}
    empty = SampleTrace("s0", {**sample.arrays, **nothing})
    assert trace(empty).same_kept(0, 1).all()
    made = trace(sample)
    failed = Trace(made.run, made.sample_ids, made.arrays, {"s0": "planted"})
    assert failed.same_kept(0, 1).shape == (0, 2, 2)

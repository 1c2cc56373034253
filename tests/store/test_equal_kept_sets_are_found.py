from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perturbkv.trace import SampleTrace, Trace
from tests.support.traces import kept_of, ragged, rekept, sample_trace, trace


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

"""Two traces, dataset for dataset, but for what they say of how they were made.

Where equal kept sets lie is a file's own business: positions are compared place by place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from perturbkv.schema import KEPT
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace


def differing(one: Trace | Path, other: Trace | Path) -> list[str]:
    """What is not the same, bit for bit: run, samples, failures and every variable."""
    first, second = (read_trace(trace) if isinstance(trace, Path) else trace for trace in (one, other))
    found = [name for name in ("run", "sample_ids", "failures") if getattr(first, name) != getattr(second, name)]
    left, right = _arrays(first), _arrays(second)
    if left.keys() != right.keys():
        return [*found, "variables"]
    return found + [name for name in left if not _same(left[name], right[name])]


def assert_close_where_rounded(found: Any, expected: Any, name: str) -> None:
    """Equal, and floats up to the rounding of sums that are taken for other configurations together."""
    if np.issubdtype(np.asarray(expected).dtype, np.floating):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6, err_msg=name)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=name)


def _arrays(trace: Trace) -> dict[str, Any]:
    """The variables, of kept entries the positions of every place instead of where they lie."""
    found = {name: array for name, array in trace.arrays.items() if name not in KEPT}
    places = [(sample, config) for sample in np.flatnonzero(trace.ok) for config in range(len(trace.run.configs))]
    return {**found, "kept": np.concatenate([trace.kept_masks(*place).ravel() for place in places])}


def _same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")

"""Scores of answers, as analyses take them."""

from __future__ import annotations

import numpy as np
import pytest

from perturbkv.analyses.measurements import scores
from perturbkv.errors import TraceError
from perturbkv.trace import SampleTrace, Trace
from tests.support.traces import sample_trace, trace


def graded(full: list[float], evicted: list[list[float]]) -> Trace:
    """A trace of these scores: (sample,) and (sample, config)."""
    samples = [
        SampleTrace(
            f"s{place}",
            {**sample_trace(f"s{place}", seed=place).arrays, "score_full": np.float64(one), "score": np.array(row)},
        )
        for place, (one, row) in enumerate(zip(full, evicted, strict=True))
    ]
    return trace(*samples, failures={"lost": "NaN"}, generate=8)


def test_what_eviction_cost_is_told_sample_by_sample() -> None:
    found = scores(graded([1.0, 0.25], [[0.5, 1.0], [0.5, 0.0]]), "quality")
    assert found.full.tolist() == [1.0, 0.25]
    assert found.drop.tolist() == [[0.5, 0.0], [-0.25, 0.25]]


def test_answers_that_no_metric_graded_are_refused() -> None:
    with pytest.raises(TraceError, match="quality needs graded answers, got none in 1 of 2 samples"):
        scores(graded([1.0, np.nan], [[0.5, 1.0], [np.nan, np.nan]]), "quality")

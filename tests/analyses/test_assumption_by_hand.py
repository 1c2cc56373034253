from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from perturbkv.analyses.bounds.assumption import READINGS
from perturbkv.analyses.bounds.assumption import assumption as summarise
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.errors import TraceError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

CONFIGS = [config("attention"), config("two-stage", 128), config("two-stage", 64), config("two-stage", 64, alpha=0.5)]


def made(samples: int = 2) -> Trace:
    """Two layers of two heads; b = 64, α = 0.25 is configuration 2: its heads are worked out below."""
    first = np.full((samples, 4, 2, 2), 0.9)
    first[:, 2] = [[[0.5, 0.6], [0.8, 0.8]], [[0.3, 0.2], [0.8, 0.8]]][:samples]
    return hand_made(
        CONFIGS,
        {"sigma_stage1": first, "sigma_topk": np.full_like(first, 0.7), "retained_mass": np.full_like(first, 0.4)},
        layers=2,
        heads=2,
    )


def test_shares_and_heads_below() -> None:
    reading = summarise(made()).configs[0].readings["sigma_stage1"]
    np.testing.assert_allclose(reading.mean, [[0.4, 0.4], [0.8, 0.8]])
    assert reading.below.tolist() == [[2, 1], [0, 0]]  # exactly 0.5 is below: Theorem 3 needs more
    assert reading.is_weak.tolist() == [[True, True], [False, False]]
    assert reading.share == 5 / 8
    assert reading.layer_share.tolist() == [0.25, 1.0]
    assert reading.share_interval == Interval(0.5, 0.75, "range")  # of two samples: 3/4 and 2/4
    listed = replace(reading, layers=(5, 11)).to_dict()["heads_at_most_half"]
    assert [(head["layer"], head["head"]) for head in listed] == [(5, 0), (5, 1)]  # under the layer's own index


def test_three_readings_stand_side_by_side_under_their_names() -> None:
    result = summarise(made())
    found = result.configs[0].readings
    assert list(found) == list(READINGS) == ["sigma_topk", "sigma_stage1", "retained_mass"]
    assert found["sigma_topk"].share == 1
    assert not found["sigma_topk"].is_weak.any()
    np.testing.assert_allclose(found["retained_mass"].mean, np.full((2, 2), 0.4))  # S, of the whole kept set
    assert found["retained_mass"].share == 0
    assert result.to_dict()["configurations"][0]["retained_mass"]["share_above_half"] == 0


def test_configurations_come_by_alpha_then_budget() -> None:
    result = summarise(made())
    assert [(one.config.selection["alpha"], one.config.budget.value) for one in result.configs] == [
        (0.25, 64),
        (0.25, 128),
        (0.5, 64),
    ]
    json.dumps(result.to_dict(), allow_nan=False)


def test_one_sample_has_no_interval() -> None:
    assert summarise(made(1)).configs[0].readings["sigma_stage1"].share_interval is None


def test_a_selection_that_is_not_there_is_refused() -> None:
    with pytest.raises(TraceError, match="expected configurations of 'value', got a trace of snapkv:attention"):
        summarise(made(), "value")

"""Evicting against storing in few bits: what is held against what, ratios and differences of whole numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.selection.grid import configuration
from perturbkv.trace import Trace
from tests.support.measured import hand_made
from tests.support.scripts import study

SAMPLES = 6


def config(budget: float, precision: str = "full", selection: str = "attention") -> EvictionConfig:
    return configuration(budget, precision=precision, selection=selection, granularity="kv")


FILLING = {bits: f"quantise(bits={bits}, fill=64)" for bits in (8, 4, 2)}
CONFIGS = (
    config(0.4, FILLING[2]),
    config(0.2),
    config(0.2, FILLING[4]),
    config(0.2, FILLING[2]),
    config(0.4),
    config(1.0, "quantise(bits=4)"),
    config(0.2, "quantise(bits=8)"),
    config(0.2, FILLING[4], "two-stage"),
)
MOVED = (9.0, 4.0, 2.0, 8.0, 1.0, 3.0, 5.0, 6.0)
SCORES = (0.0, 0.5, 0.7, 0.3, 0.9, 0.8, 0.6, 0.4)
BYTES = (0.4, 0.2, 0.2, 0.2, 0.4, 0.3, 0.1, 0.2)


def made(samples: int = SAMPLES, configs: tuple[EvictionConfig, ...] = CONFIGS) -> Trace:
    """Two layers; the last one's heads perturb sample i by (i + 1) × MOVED, of norms of 10 × 2 heads."""
    places = [CONFIGS.index(one) for one in configs]
    each = (1.0 + np.arange(samples))[:, None] * np.array(MOVED)[places]
    tilted = np.linspace(-0.1, 0.1, samples)[:, None] * np.array([1, 1, 2, 0.5, -1, 1, 1, 1])[places]
    arrays = {
        "perturbation_propagated": np.stack([100 * each, each], axis=-1)[..., None] * np.array([0.25, 0.75]),
        "logit_kl": each / 10,
        "evicted": np.tile([one.budget.value != 1 for one in configs], (samples, 1)),
        "held_bytes": np.tile(1000 * np.array(BYTES)[places], (samples, 1)),
        "full_bytes": np.full(samples, 1000.0),
        "held_share": np.full((samples, len(configs)), 0.5),
        "score": np.array(SCORES)[places] + tilted,
        "score_full": np.ones(samples),
    }
    return hand_made(list(configs), arrays, layers=2, heads=2)


def said_of(trace: Trace, folder: Path, code: int = 0) -> str:
    """What the study says of a trace."""
    return study("equal_bytes", trace.save(folder / "trace.h5"), "-o", folder, code=code)


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    said_of(made(), tmp_path)
    return dict(json.loads((tmp_path / "equal_bytes.json").read_text()))


def test_what_is_alike_but_for_bits_is_held_against_evicting_alone(found: dict[str, Any]) -> None:
    labels = [[row["config"]["label"] for row in rows] for rows in (*found["settings"], found["everything"])]
    places = ((1, 2, 3), (4, 0), (5,))
    assert labels == [[CONFIGS[place].label() for place in row] for row in places]
    assert found["left_out"] == [CONFIGS[6].label(), CONFIGS[7].label()], "few bits of fewer bytes, or of no 16 bits"
    rows = [row for rows in found["settings"] for row in rows]
    assert [(row["bits"], row["kind"]) for row in rows] == [
        (16, "evicted"), (4, "both"), (2, "both"), (16, "evicted"), (2, "both"),
    ]  # fmt: skip
    assert [row["bytes"] for row in rows] == pytest.approx([0.2, 0.2, 0.2, 0.4, 0.4])


def test_the_last_layers_perturbation_is_over_evicting_alones(found: dict[str, Any]) -> None:
    first, second = found["settings"]
    assert [row["over"] for row in first] == pytest.approx([1, 0.5, 2])
    assert [row["over"] for row in second] == pytest.approx([1, 9])
    assert [row["moved"] for row in first] == pytest.approx([3.5 * moved / 20 for moved in (4, 2, 8)])
    assert "over" not in found["everything"][0]
    assert first[1]["over_interval"]["low"] == pytest.approx(0.5)
    assert [row["kl_median"] for row in first] == pytest.approx([0.35 * moved for moved in (4, 2, 8)])


def test_scores_are_compared_sample_by_sample(found: dict[str, Any]) -> None:
    (_, four, two), (_, low) = found["settings"]
    assert [four["score"], four["gain"], two["gain"]] == pytest.approx([0.7, 0.2, -0.2])
    ends = [(row["gain_interval"]["low"], row["gain_interval"]["high"]) for row in (four, two, low)]
    assert [round(sum(both) / 2, 6) for both in ends[:2]] == [0.2, -0.2]
    assert 0 < ends[0][0] < 0.2 and ends[1][1] < 0 and ends[2][0] < -0.9 < ends[2][1]
    assert ends[1][1] - ends[1][0] == pytest.approx((ends[0][1] - ends[0][0]) / 2), "half of the differences' spread"
    assert found["full_score"] == 1


def test_it_says_what_is_decided_and_of_few_samples_nothing(tmp_path: Path) -> None:
    said = said_of(made(), tmp_path)
    assert "4 bits move less than evicting alone in 1 of 1, more in 0; score higher in 1, lower in 0." in said
    assert "2 bits move less than evicting alone in 0 of 2, more in 2; score higher in 0, lower in 2." in said
    few = said_of(made(3), tmp_path)
    assert "4 bits move less than evicting alone in 0 of 1, more in 0" in few
    assert "0.50 (0.50, 0.50)" in few


def test_a_trace_without_equal_bytes_is_refused_in_a_line(tmp_path: Path) -> None:
    said = said_of(made(configs=(CONFIGS[1], CONFIGS[5], CONFIGS[6])), tmp_path, code=2)
    assert "needs a configuration in 16 bits that evicts" in said

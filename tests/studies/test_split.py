"""L = (1 − S) · D with every number worked out by hand: three heads, and one of which nothing goes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from tests.support.measured import config, hand_made
from tests.support.scripts import STUDIES, functions

split = SimpleNamespace(**functions("split", STUDIES))
BASELINE, TREATMENT = config("attention"), config("two-stage")
CORRECTED = [config("attention", correction=one) for one in ("corrected-oracle", "corrected", "corrected(mass=linear)")]
ORACLE = CORRECTED[0]
LEFT = {"corrected-oracle": 0.25, "corrected(mass=stored)": 0.75, "corrected(mass=linear)": 0.5}
"""What corrections leave of every L and of KL."""
MASS = np.array([0.1, 0.2, 0.4])
ODD, EVEN = np.array([8.0, 4.0, 1.0]), np.ones(3)
"""D of the samples 0, 2, 4 and of the others."""
FEWER, LIKER = np.array([0.5, 2.0, 1.0]), np.array([1.0, 0.25, 0.5])
"""The treatment's 1 − S and D over the baseline's, in the samples 0, 2, 4; in the others nothing differs."""


def made(samples: int = 6, configs: Sequence[pk.EvictionConfig] = (BASELINE, TREATMENT, *CORRECTED)) -> pk.Trace:
    """Odd samples differ from even ones; the fourth head keeps all but rounding, and its L is noise."""
    found: dict[str, list[Any]] = {"retained_mass": [], "perturbation_isolated": [], "logit_kl": []}
    for place in range(samples):
        turned = place % 2 == 0
        rows = [_row(one, ODD if turned else EVEN, turned, 1 + place) for one in configs]
        for name in found:
            found[name].append([row[name] for row in rows])
    arrays: dict[str, Any] = {name: np.array(rows) for name, rows in found.items()}
    arrays["perturbation_propagated"] = 2 * arrays["perturbation_isolated"]
    arrays["hidden_drift_l1"] = arrays["logit_kl"][:, :, None]
    arrays |= {name: np.full((samples, 1, 4), 1e-9) for name in ("noise_floor", "noise_floor_isolated")}
    arrays["sigma_stage1"] = np.full((samples, len(configs), 1, 4), 0.9)
    arrays["logit_kl_noise_floor"] = np.array([1.0, *[1e-9] * (samples - 1)])
    return hand_made(list(configs), arrays, heads=4)


def _row(one: pk.EvictionConfig, distance: np.ndarray, turned: bool, scale: float) -> dict[str, Any]:
    fewer, liker = (FEWER, LIKER) if turned and one.selection.name == "two-stage" else (1.0, 1.0)
    mass, left = MASS * fewer, LEFT.get(str(one.correction), 1.0)
    loss = left * scale * mass * distance * liker
    return {
        "retained_mass": [[*(1 - mass), 1 - 1e-14]],
        "perturbation_isolated": [[*loss, 1e-12]],
        "logit_kl": left * scale / 100,
    }


def logs(trace: pk.Trace) -> dict[str, Any]:
    return {one.label(): split.logs_of(trace, one, 0) for one in trace.run.configs if one.only_evicts}


def test_the_parts_of_the_variance() -> None:
    """In units of log 2: log(1 − S) is 0, 1, 2, and log D 3, 2, 0 in even samples, 0 in odd ones; log L 3, 3, 2."""
    one = split.log_variance_parts(logs(made())[BASELINE.label()])
    assert one["mass"] == pytest.approx((3 + 1) / 2)  # 2/3 over 2/9, and 2/3 over 2/3
    assert one["difference"] == pytest.approx((7 + 0) / 2)  # 14/9 over 2/9
    assert one["both"] == pytest.approx((-9 + 0) / 2)
    assert one["by_mass"] == pytest.approx((-1.5 + 1) / 2)
    assert one["correlation"] == pytest.approx(-1 / math.sqrt(28 / 27))  # of the samples in which D differs
    assert one["deviation"] == pytest.approx(math.log(2) * (math.sqrt(2 / 9) + math.sqrt(2 / 3)) / 2)
    assert (one["heads"], one["left_out"]) == (18, 6)


def test_a_contest_s_two_factors() -> None:
    """1 − S × (1/2 · 2 · 1)^(1/3) = 1, D × (1 · 1/4 · 1/2)^(1/3) = 1/2 in half of the samples, 1 in the others."""
    found = made()
    ((first, second),) = split.pairs_of(split.sides_of(found, ["attention", "two-stage"]))
    assert (first, second) == (BASELINE, TREATMENT)
    one = split.treatment_ratios(found, first, second, logs(found))
    assert one["mass"] == pytest.approx(1)
    assert one["difference"] == pytest.approx(math.sqrt(0.5))
    assert one["loss"] == pytest.approx(one["mass"] * one["difference"])
    assert (one["mass_falls"], one["difference_falls"]) == pytest.approx((1 / 6, 2 / 6))
    assert (one["heads"], one["left_out"]) == (18, 6)
    assert one["difference_interval"].low < math.sqrt(0.5) < one["difference_interval"].high


def test_heads_that_keep_the_same_entries_count_as_one() -> None:
    found = made()
    same = {name: found.arrays[name].copy() for name in ("kept_offset", "kept_length", "kept_count")}
    for array in same.values():
        array[:, 1] = array[:, 0]
    one = split.treatment_ratios(
        dataclasses.replace(found, arrays={**found.arrays, **same}), BASELINE, TREATMENT, logs(found)
    )
    assert (one["loss"], one["mass"], one["difference"], one["mass_falls"]) == (1, 1, 1, 0)


@pytest.mark.parametrize("corrected", CORRECTED)
def test_what_corrections_leave(corrected: pk.EvictionConfig) -> None:
    row = split.correction_row(made(), BASELINE, corrected, ORACLE, 0)
    left = LEFT[row["name"]]
    for kind in ("isolated", "propagated"):
        assert row[kind]["sum_ratio"] == pytest.approx(left, rel=1e-6)
        assert row[kind]["better_share"] == pytest.approx(3 / 4), "the head of noise is a tie"
        assert row["over_oracle"][kind] == pytest.approx(left / 0.25, rel=1e-6)
    assert row["kl_ratio"] == pytest.approx(left) and row["drift_ratio"] == pytest.approx(left)
    assert row["kl_falls"] == (5 / 6), "of the first sample it differs by less than two floors"
    assert row["kl_median"] == pytest.approx(left * 3.5 / 100)
    assert row["drift_ratio_by_layer"] == pytest.approx([left])


def test_of_a_cache_that_loses_nothing_a_correction_changes_nothing() -> None:
    found = made()
    whole = {**found.arrays, "evicted": np.zeros_like(found.arrays["evicted"])}
    row = split.correction_row(dataclasses.replace(found, arrays=whole), BASELINE, CORRECTED[1], None, 0)
    assert (row["isolated"]["sum_ratio"], row["propagated"]["tied"], row["drift_ratio"]) == (1, 4, 1)
    assert "over_oracle" not in row


def test_a_row_per_head_of_what_is_uncorrected() -> None:
    rows = split.head_means(logs(made(2))[BASELINE.label()], made(2))
    assert rows[0]["mass"] == pytest.approx(0.1)
    assert rows[0]["difference"] == pytest.approx(math.sqrt(8 * (1 * 2)))  # D 8 in one, 1 in the other, scaled
    assert rows[0]["loss"] == pytest.approx(0.1 * math.sqrt(8 * 2))
    assert (rows[3]["samples"], rows[3]["loss"]) == (0, None)


def test_sides_are_chosen_and_the_first_is_held_against() -> None:
    found = made()
    ((first, second),) = split.pairs_of(split.sides_of(found, ["two-stage", "snapkv:attention"]))
    assert split.treatment_ratios(found, first, second, logs(found))["difference"] == pytest.approx(math.sqrt(2))
    assert split.pairs_of(split.sides_of(found, ["two-stage"])) == []
    for trace, name in ((found, "value"), (made(6, CORRECTED), "attention")):
        with pytest.raises(pk.PerturbkvError, match=f"expected uncorrected configurations of '{name}', got snapkv"):
            split.sides_of(trace, [name])


def test_where_nothing_goes_there_is_no_number() -> None:
    found = made()
    whole = {**found.arrays, "retained_mass": np.ones_like(found.arrays["retained_mass"])}
    own = logs(dataclasses.replace(found, arrays=whole))
    assert math.isnan(split.log_variance_parts(own[BASELINE.label()])["by_mass"])
    assert math.isnan(split.treatment_ratios(found, BASELINE, TREATMENT, own)["loss"])

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.ablation import ingredients
from perturbkv.analyses.ablation.ablation import ablation
from perturbkv.analyses.ablation.methods import control
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.selection.policies.registry import normalise
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace
from tests.support.measured import MEASURED, config, hand_made

CHAIN = [config("attention"), config("attention-unpooled"), config("two-stage-uniform"), config("two-stage"),
         config("hindsight")]  # fmt: skip
L1 = [10, 8, 6, 3, 1]


def made(configs: list[EvictionConfig], perturbation: list[float], samples: int = 2) -> Trace:
    """One layer, one head; every sample alike, the propagated perturbation twice the isolated one."""
    values = np.tile(np.asarray(perturbation, dtype=float)[:, None, None], (samples, 1, 1, 1))
    floor = np.full((samples, 1, 1), 1e-9)
    arrays: dict[str, Any] = {
        "perturbation_isolated": values,
        "perturbation_propagated": 2 * values,
        "noise_floor": floor,
        "noise_floor_isolated": floor,
        "sigma_stage1": np.full_like(values, 0.9),
        "retained_mass": np.full_like(values, 0.9),
    }
    return hand_made(configs, arrays)


def isolated(rows: tuple[ingredients.Row, ...]) -> dict[str, float]:
    return {row.title: row.isolated.sum_ratio for row in rows}


def test_rows_are_relative_to_the_baseline_and_steps_to_the_row_before() -> None:
    (found,) = ingredients.settings(made(CHAIN, L1))
    ratios = isolated(found.rows)
    assert ratios == pytest.approx(
        {"attention-unpooled": 0.8, "two-stage-uniform α=0.25": 0.6, "two-stage α=0.25": 0.3, "hindsight": 0.1}
    )
    assert {row.title: row.propagated.sum_ratio for row in found.rows} == pytest.approx(ratios)
    brings = isolated(found.brings)
    assert brings == pytest.approx(
        {"un-pooling α=0.25": 0.6, "the value norms ν α=0.25": 0.5, "knowing the query α=0.25": 1 / 3}
    )
    assert found.rows[2].isolated.sum_ratio_interval == Interval(pytest.approx(0.3), pytest.approx(0.3), "range")
    json.dumps(found.to_dict(), allow_nan=False)


def test_what_a_trace_lacks_is_named_and_a_query_heads_group_is_not_missed() -> None:
    (found,) = ingredients.settings(made(CHAIN, L1))
    assert found.absent == ("value", "random", "hindsight-attention")
    grouped = [config("attention", granularity="kv"), config("two-stage", granularity="kv")]
    (found,) = ingredients.settings(made(grouped, [2, 1]))
    assert "mean-of-products" in found.absent


def test_the_groups_products_are_rows_of_one_table() -> None:
    configs = [
        config("attention", granularity="kv"),
        config("two-stage", granularity="kv"),
        config("two-stage", granularity="kv", product="mean-of-products"),
    ]
    (found,) = ingredients.settings(made(configs, [4, 2, 1]))
    assert isolated(found.rows) == pytest.approx({"two-stage α=0.25": 0.5, "mean-of-products α=0.25": 0.25})
    assert isolated(found.brings) == pytest.approx({"mean of products α=0.25": 0.5})


def test_rows_without_stages_stand_once_and_serve_every_alpha() -> None:
    names = ("attention", "two-stage", "hindsight")
    configs = [config(name, alpha=alpha) for alpha in (0.0, 0.5) for name in names]
    (found,) = ingredients.settings(made(configs, [4, 2, 1, 4, 1, 1]))
    assert isolated(found.rows) == pytest.approx({"two-stage α=0": 0.5, "two-stage α=0.5": 0.25, "hindsight": 0.25})
    assert isolated(found.brings) == pytest.approx({"knowing the query α=0": 0.5, "knowing the query α=0.5": 1})
    assert found.baseline == configs[0]


def test_settings_stay_apart() -> None:
    configs = [config(name, budget) for budget in (64, 128) for name in ("attention", "value")]
    found = ingredients.settings(made(configs, [4, 2, 4, 1]))
    assert [result.setting for result in found] == ["b=64 w=32 max7 query", "b=128 w=32 max7 query"]
    assert [result.rows[0].isolated.sum_ratio for result in found] == pytest.approx([0.5, 0.25])


def test_controls_protect_what_the_methods_protect() -> None:
    protected = {"protect_first": 4, "protect_recent": 40}
    configs = [config(name, **more) for more in ({}, protected) for name in ("attention", "two-stage", "random")]
    bare, kept = ingredients.settings(made(configs, [4, 2, 9, 3, 1, 6]))
    assert bare.controls == (configs[0], configs[2])
    assert kept.controls == (configs[3], configs[5])
    assert isolated(kept.rows) == pytest.approx({"two-stage α=0.25": 1 / 3, "random": 2})


METHODS = [config("h2o:attention"), config("tova:attention")]
OTHERS = [normalise(control(CHAIN[0], one, name)) for one in METHODS for name in ("attention", "random")]


def test_controls_of_other_methods_are_no_settings_and_the_result_names_what_it_leaves_out() -> None:
    chain = [config(name) for name in ("attention", "two-stage", "random")]
    result = ablation(made([*chain, *METHODS, *OTHERS], [4, 2, 9, 5, 6, 7, 8, 7, 8]))
    (found,) = result.settings
    assert isolated(found.rows) == pytest.approx({"two-stage α=0.25": 0.5, "random": 2.25})
    assert result.left_out == (*METHODS, *OTHERS)
    assert set(result.identity.configs) == set(chain)
    assert "Left out: 6 configurations" in result.notes()
    assert any(
        "h2o:attention, tova:attention, 2 × snapkv:attention, 2 × snapkv" in str(one) for one in result.details()
    )
    assert "Left out" not in ablation(made(chain, [4, 2, 9])).notes()


def test_controls_beside_rows_of_their_own_stay() -> None:
    """SnapKV's, though another method has its window; and those of another window, which is no other method's alone."""
    usual = [config(name) for name in ("attention", "random", "caote:attention")]
    wide = [config(name, window=40) for name in ("attention", "random")]
    staged = [config(name, window=1) for name in ("attention", "two-stage", "random")]
    result = ablation(made([*usual, *wide, *staged, METHODS[1]], [4, 2, 3, 2, 1, 5, 2, 6, 7]))
    assert [one.baseline.window for one in result.settings] == [32, 40, 1]
    assert result.left_out == (usual[2], METHODS[1])


def test_knowing_the_query_is_told_with_and_without_the_norms() -> None:
    names = ("attention", "two-stage", "hindsight-attention", "hindsight")
    (found,) = ingredients.settings(made([config(name) for name in names], [4, 3, 2, 1]))
    assert isolated(found.brings) == pytest.approx({"knowing the query α=0.25": 1 / 3, "ν, knowing the query": 0.5})
    assert isolated(found.rows)["hindsight-attention"] == 0.5


def test_one_sample_has_no_intervals() -> None:
    (found,) = ingredients.settings(made(CHAIN, L1, samples=1))
    assert found.rows[0].isolated.sum_ratio_interval is None


@pytest.mark.parametrize("configs", [CHAIN[:1], CHAIN[1:]], ids=["nothing beside it", "no baseline"])
def test_a_trace_without_a_comparison_is_refused(configs: list[EvictionConfig]) -> None:
    with pytest.raises(TraceError, match="ablation needs the selection 'attention' and another one"):
        ingredients.settings(made(configs, L1[: len(configs)]))


def test_a_measured_trace_gives_every_row() -> None:
    small, large = ingredients.settings(read_trace(MEASURED))
    missing = ("attention", "hindsight-attention")  # the baseline, and what the golden trace did not measure
    assert [row.name for row in small.rows] == [name for name in ingredients.INGREDIENTS if name not in missing]
    assert small.absent == ("hindsight-attention",)
    assert large.absent == ("mean-of-products", "hindsight-attention")
    assert [(one.policy.name, one.selection.name) for one in small.controls] == [
        ("snapkv", "attention"),
        ("snapkv", "random"),
    ]


def test_a_table_of_alpha_is_a_row_of_its_own() -> None:
    """By its name; where it stands is its mean."""
    table = AlphaTable("mine.json", "layer", ((0.4,),), (0,))
    configs = [config("attention", 128), config("two-stage", 128), config(Choice("two-stage", {"alpha": table}), 128)]
    result = ablation(made(configs, [10.0, 8.0, 6.0]))
    rows = result.settings[0].rows
    assert [(row.name, row.alpha_text) for row in rows] == [("two-stage", "0.25"), ("two-stage", str(table))]
    assert [row.isolated.sum_ratio for row in rows] == pytest.approx([0.8, 0.6])
    assert rows[1].title == f"two-stage α={table}"
    assert [case.name for case in result.cases("two-stage")] == ["α=0.25", f"α={table}"]
    assert max(map(len, repr(result).splitlines())) <= 80
    json.dumps(result.to_dict(), allow_nan=False)

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from perturbkv.analyses.ablation.restriction import restriction, settings
from perturbkv.analyses.names import common_text
from perturbkv.analyses.sides import group_by_selection, pairs
from perturbkv.analyses.verdicts import MORE
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace
from tests.support.measured import config, one_head
from tests.support.traces import run_config

ASKED = ("query", "layer(block=16)", "kv", "layer", "kv(block=32)", "kv(block=16, block_score=max)", "kv(block=16)")
CONFIGS = [config("two-stage", 128, granularity=name) for name in ASKED]
OTHER = config("attention", 128, granularity="kv")
L1 = dict(zip([*CONFIGS, OTHER], [2.0, 15.0, 10.0, 12.0, 14.0, 11.0, 13.0, 20.0], strict=True))
HELD = dict(zip([*CONFIGS, OTHER], [0.5, 0.2, 0.25, 0.25, 0.2, 0.2, 0.2, 0.25], strict=True))


def made(configs: Sequence[EvictionConfig] = CONFIGS, samples: int = 6) -> Trace:
    return one_head({one: L1[one] for one in configs}, samples, [HELD[one] for one in configs])


def test_every_restriction_is_held_against_single_entries_per_key_value_head() -> None:
    (found,) = settings(made())
    assert found.baseline == CONFIGS[2]
    assert [row.name for row in found.rows] == [
        "kv(block=16)", "kv(block=16, block_score=max)", "kv(block=32)", "layer", "layer(block=16)", "query",
    ]  # fmt: skip
    expected = [1.3, 1.1, 1.4, 1.2, 1.5, 0.2]
    assert [row.isolated.sum_ratio for row in found.rows] == pytest.approx(expected)
    assert [row.propagated.sum_ratio for row in found.rows] == pytest.approx(expected)
    assert [row.drift_ratio for row in found.rows] == pytest.approx([ratio**2 for ratio in expected])
    assert [row.kl_median for row in found.rows] == pytest.approx([0.35 * ratio for ratio in expected])
    assert found.kl_median == pytest.approx(0.35)
    assert [row.cache_shares[1] for row in found.rows] == pytest.approx([0.2, 0.2, 0.2, 0.25, 0.2, 0.5])
    json.dumps(found.to_dict(), allow_nan=False)


def test_sets_of_layers_and_unions_stand_beside_the_baselines_own_way_to_combine_scores() -> None:
    names = ("kv", "kv(reduce=max)", "kv(reduce=union)", "model(reduce=union)", "model", "head", "layer(reduce=max)")
    each = [config("two-stage", 128, granularity=name) for name in names]
    trace = one_head(dict(zip(each, [10.0, 20.0, 11.0, 14.0, 13.0, 12.0, 30.0], strict=True)), 6, [0.25] * len(each))
    mean, largest = settings(trace)
    assert [row.name for row in mean.rows] == ["kv(reduce=union)", "head", "model", "model(reduce=union)"]
    assert [row.isolated.sum_ratio for row in mean.rows] == pytest.approx([1.1, 1.2, 1.3, 1.4])
    assert largest.baseline == each[1]
    assert [row.name for row in largest.rows] == ["kv(reduce=union)", "layer", "model(reduce=union)"]
    assert [row.isolated.sum_ratio for row in largest.rows] == pytest.approx([0.55, 1.5, 0.7])
    with pytest.raises(TraceError, match="needs the granularity 'kv' of single entries and another one"):
        settings(one_head(dict.fromkeys(each[2:4], 10.0), 6, [0.25] * 2))


def test_the_conclusion_is_of_restrictions_alone() -> None:
    result = restriction(made())
    assert {case.verdict for case in result.claims()[0].cases} == {MORE}
    assert "query" not in {case.name for case in result.claims()[0].cases}
    assert result.conclusion() == (
        "A restricted kept set perturbs more than one of single entries per kv head in all 5 cases: 10 % [10, 10] more "
        "at kv(block=16, block_score=max) to 50 % [50, 50] more at layer(block=16) (propagated, all heads, equal "
        "budgets; n = 6 samples)."
    )
    assert restriction(made([CONFIGS[0], CONFIGS[2]])).claims()[0].cases == []


def test_tables_fit_80_columns_and_show_what_each_cache_holds() -> None:
    for samples in (1, 3, 6):
        result = restriction(made(samples=samples))
        assert max(map(len, repr(result).splitlines())) <= 80
        assert [row[1] for row in result.table().rows] == ["0.25", "0.20", "0.20", "0.20", "0.25", "0.20", "0.50"]


def test_settings_do_not_mix_what_else_differs() -> None:
    (found,) = settings(made([*CONFIGS, OTHER]))
    assert OTHER not in found.identity.configs


def test_other_analyses_pair_blocks_with_blocks_of_the_same_size() -> None:
    granularities = ("kv", "kv(block=16)", "kv(block=32)", "layer", "layer(block=16)")
    run = run_config(configs=tuple(
        config(name, 128, granularity=one) for one in granularities for name in ("attention", "two-stage")
    ))  # fmt: skip
    found = pairs(run, "attention", "two-stage")
    assert [(first.granularity.name, first.block) for first, _ in found] == [
        (second.granularity.name, second.block) for _, second in found
    ]
    assert len(found) == len(group_by_selection(run)) == 5
    assert "block" not in common_text(run.configs)
    assert "block=16" in common_text([one for one in run.configs if one.block == 16])


@pytest.mark.parametrize("asked", [("query", "layer"), ("kv",), ("kv(block=16)", "layer")])
def test_a_trace_without_a_pair_is_refused(asked: tuple[str, ...]) -> None:
    configs = [one for one in CONFIGS if str(one.granularity) in asked]
    with pytest.raises(TraceError, match="restriction needs the granularity 'kv' of single entries and another one"):
        restriction(made(configs))


def test_a_row_per_restriction_kind_and_head() -> None:
    rows = restriction(made()).records()
    assert len(rows) == 6 * 2
    first = next(row for row in rows if row["name"] == "layer" and row["kind"] == "propagated")
    assert first["treatment_mean"] == pytest.approx(2 * 12 * 3.5)
    assert (first["verdict"], first["held"]) == (-1, 0.25)


def test_the_figure_shows_the_rows_in_order() -> None:
    result = restriction(made())
    for width in (84, 174):
        figure = result.plot(width)
        (axes,) = (axes for axes in figure.axes if axes.get_visible())
        boxes = [box for box in axes.containers if box.lines[0].get_gid() == "propagated"]
        drawn = [float(box.lines[0].get_xdata()[0]) for box in boxes]
        assert drawn == pytest.approx([row.propagated.sum_ratio for row in result.settings[0].rows])
        drifts = [box for box in axes.containers if box.lines[0].get_gid() == "drift"]
        assert [float(box.lines[0].get_xdata()[0]) for box in drifts] == pytest.approx(
            [row.drift_ratio for row in result.settings[0].rows]
        )
        assert "layer(block=16), held 0.20" in [label.get_text() for label in axes.get_yticklabels()]

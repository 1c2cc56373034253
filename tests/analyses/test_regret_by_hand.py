from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from perturbkv.analyses.questions.regret.regret import Regret, regret_of
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.optimum.search import SearchResults
from tests.support.measured import config
from tests.support.traces import run_config

METHODS = (
    "attention", "two-stage", "random", "attention-unpooled", "two-stage(alpha=0)", "hindsight-attention", "hindsight",
)  # fmt: skip
CONFIGS = [config(name, 128) for name in METHODS]
ASKED = {"heads": 2, "proven": 1, "seconds": 1.0, "prefix": 64, "budget": 16, "window": 4, "seed": 0}


def head(part: str, best: float, values: list[float], **more: Any) -> dict[str, Any]:
    told = {"entries": 300, "kept": 129, "improved": best, "settled": True, "lower": None, "closed": False}
    budget = "128" if part == "prompt" else "16"
    places = {"part": part, "budget": budget, "layer": 0, "head": 0, "positions": [1]}
    return {**places, **told, "perturbation": values, "best": best, **more}


def found(samples: int = 6, configs: list[EvictionConfig] = CONFIGS) -> SearchResults:
    """Two heads a prompt: attention 8 and 2 times the best, its hindsight 2 and 1 times; and a proven prefix."""
    rows = [
        {
            "sample": f"s{place}",
            "heads": [
                head("prompt", 1.0, [8.0, 4.0, 20.0, 4.0, 3.0, 2.0, 1.0]),
                head("prompt", 10.0, [20.0, 10.0, 80.0, 20.0, 12.0, 10.0, 10.0], settled=False),
                head("prompt", 0.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
                head("prefix", 2.0, [6.0, 4.0, 8.0, 5.0, 3.0, 3.0, 2.0], lower=2.0, closed=True, improved=2.5),
                head("prefix", 2.0, [4.0] * 7, lower=1.5),
            ],
        }
        for place in range(samples)
    ]
    return SearchResults(run_config(configs=tuple(configs)), rows, ASKED, {"perturbkv_version": "0"})


def regret(samples: int = 6) -> Regret:
    return regret_of(found(samples))


def test_ratios_and_factors_are_those_worked_out_by_hand() -> None:
    prompt, prefix = regret().parts
    attention, staged, random, *_, hindsight = prompt.methods
    assert attention.sum_ratio == pytest.approx(28 / 11)
    assert attention.median_ratio == pytest.approx((8 + 2) / 2)
    assert attention.factor.value == pytest.approx((8 * 2) ** 0.5)
    assert attention.form.value == pytest.approx((2 * 1) ** 0.5)
    assert attention.query.value == pytest.approx((2 * 2) ** 0.5)
    assert attention.criterion.value == pytest.approx((2 * 1) ** 0.5)
    parts = [getattr(attention, name).value for name in ("form", "query", "criterion")]
    assert attention.factor.value == pytest.approx(parts[0] * parts[1] * parts[2])
    assert staged.form.value == pytest.approx((4 / 3 * 10 / 12) ** 0.5)
    assert (staged.query.value, staged.criterion.value) == pytest.approx(((3 * 1.2) ** 0.5, 1.0))
    assert random.query.value != random.query.value
    assert (hindsight.form.value, hindsight.query.value, hindsight.factor.value) == pytest.approx((1.0, 1.0, 1.0))
    assert attention.half == pytest.approx(5 / 12)
    assert [one.sum_ratio for one in prefix.methods] == pytest.approx([10 / 4, 2, 3, 9 / 4, 7 / 4, 7 / 4, 6 / 4])


def test_the_first_layer_is_told_apart() -> None:
    asked = found()
    rows = [
        {**row, "heads": [*row["heads"], head("prompt", 1.0, [9.0, 6.0, 8.0, 3.0, 6.0, 3.0, 2.0], layer=4)]}
        for row in asked.rows
    ]
    prompt, prefix = regret_of(replace(asked, rows=rows)).parts
    assert [one.sum_ratio for one in prompt.first_layer] == [one.sum_ratio for one in regret().parts[0].methods]
    assert (prompt.other_layers[1].query.value, prompt.other_layers[1].criterion.value) == pytest.approx((3.0, 2.0))
    assert prefix.other_layers == ()
    assert [(one.heads, one.samples) for one in (prompt.methods[0], prompt.first_layer[0], prompt.other_layers[0])] == [
        (18, 6), (12, 6), (6, 6)
    ]  # fmt: skip
    (table,) = [
        part
        for part in regret_of(replace(asked, rows=rows)).details()
        if isinstance(part, Table) and "layer" in part.title
    ]
    names = [row[0] for row in table.rows]
    assert names == ["layer 0: 12 heads", "attention", "two-stage", "other layers: 6 heads", "attention", "two-stage"]


def test_a_row_of_one_prompts_heads_says_so() -> None:
    """The other layers were drawn in the first of three prompts alone: one head, and no range."""
    asked = found(3)
    asked.rows[0]["heads"].append(head("prompt", 1.0, [9.0, 6.0, 8.0, 3.0, 6.0, 3.0, 2.0], layer=4))
    other = regret_of(asked).parts[0].other_layers[1]
    assert (other.heads, other.samples, other.factor.interval) == (1, 1, None)
    values = [getattr(other, name).value for name in ("factor", "form", "query", "criterion")]
    assert values == pytest.approx([6, 1, 3, 2])


@pytest.mark.parametrize("samples", [1, 3, 6])
def test_headings_stay_whole_words(samples: int) -> None:
    """Columns as wide as their longest words: none is broken, and no sign stands alone."""
    lines = repr(regret(samples)).splitlines()
    (rule,) = [row for row, line in enumerate(lines) if set(line) == {"─"}]
    words = {word for line in lines[rule - 2 : rule] for word in line.split()}
    assert words == {"method", "mean", "factor", "pooling,", "stages", "query", "unknown", "criterion"}


def test_methods_without_parts_are_told_too() -> None:
    """random, and what is a part of another's chain, by themselves: it was said that no head loses anything."""
    places = {"random": [METHODS.index("random")], "attention-unpooled": [METHODS.index("attention-unpooled")]}
    asked = found()
    for name, (place,) in places.items():
        rows = [
            {**row, "heads": [{**one, "perturbation": [one["perturbation"][place]]} for one in row["heads"]]}
            for row in asked.rows
        ]
        run = run_config(configs=(CONFIGS[place],))
        said = regret_of(replace(asked, run=run, rows=rows)).conclusion()
        assert said.startswith(f"{name} perturbs") and "best known set" in said and "criterion" not in said


def test_heads_are_counted_and_unproven_ones_never_called_optimal() -> None:
    prompt, prefix = regret().parts
    assert (prompt.heads, prompt.left_out, prompt.settled, prompt.tried) == (18, 6, 12, 0)
    assert (prefix.heads, prefix.tried, prefix.closed, prefix.at_optimum) == (12, 12, 6, 0)
    assert prefix.gap == pytest.approx(0.25)


def test_a_result_shows_itself_in_80_columns() -> None:
    for samples in (1, 3, 6):
        text = repr(regret(samples))
        assert max(map(len, text.splitlines())) <= 80
        json.dumps(regret(samples).to_dict(), allow_nan=False)
    rows = regret(2).records()
    assert len(rows) == 2 * 5 * 7
    assert {row["part"] for row in rows} == {"prompt", "prefix"}


@pytest.mark.parametrize("width", [84, 174])
def test_each_panel_says_of_how_many_heads_it_is(width: int) -> None:
    """Of the prompts' 18 heads 6 lose nothing but rounding and are not drawn."""
    panels = [axes for axes in regret().plot(width).axes if axes.lines]
    assert [axes.get_title("left") for axes in panels] == [
        "prompts, b=128: n = 12 heads",
        "prefixes, b=16: n = 12 heads",
    ]
    assert {len(line.get_xdata()) - 1 for axes in panels for line in axes.lines} == {12}


def test_budgets_are_told_apart() -> None:
    configs = [*CONFIGS, *(replace(one, budget=config("attention", 64).budget) for one in CONFIGS)]
    asked = found(configs=configs)
    rows = [
        {**row, "heads": [*row["heads"], head("prompt", 1.0, [3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0], budget="64")]}
        for row in asked.rows
    ]
    parts = regret_of(replace(asked, rows=rows)).parts
    assert [str(part.configs[0].budget) for part in parts] == ["128", "64", "16"]
    assert parts[1].methods[0].sum_ratio == pytest.approx(3)


def test_nothing_to_tell_is_told() -> None:
    asked = found()
    rows = [{"sample": "s", "heads": [head("prompt", 0.0, [0.0] * 7)]}]
    result = regret_of(replace(asked, rows=rows))
    assert "No head loses more than rounding" in result.conclusion()
    assert result.plot() is not None

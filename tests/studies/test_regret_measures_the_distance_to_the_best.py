"""`studies/regret.py` on searches made up by hand, against loops over heads in float64."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

import perturbkv as pk
from tests.support.measured import config
from tests.support.scripts import STUDIES, functions, study
from tests.support.traces import run_config

METHODS = (
    "attention", "two-stage", "random", "attention-unpooled", "two-stage(alpha=0)", "hindsight-attention", "hindsight",
)  # fmt: skip
CONFIGS = tuple(config(name, 128) for name in METHODS)
ASKED = {"heads": 2, "proven": 1, "seconds": 1.0, "prefix": 64, "budget": 16, "window": 4, "seed": 0}
regret = functions("regret", STUDIES)


def head(part: str, best: float, values: list[float], **more: Any) -> dict[str, Any]:
    budget = "128" if part == "prompt" else "16"
    told = {"entries": 300, "kept": 129, "improved": best, "settled": True, "lower": None, "closed": False}
    return {"part": part, "budget": budget, "layer": 0, "head": 0, "positions": [1], **told, "perturbation": values,
            "best": best, **more}  # fmt: skip


FIRST = head("prompt", 1.0, [8.0, 4.0, 20.0, 4.0, 3.0, 2.0, 1.0])
SECOND = head("prompt", 10.0, [20.0, 10.0, 80.0, 20.0, 12.0, 10.0, 10.0], settled=False)
HEADS = [
    FIRST,
    SECOND,
    head("prompt", 0.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
    head("prefix", 2.0, [6.0, 4.0, 8.0, 5.0, 3.0, 3.0, 2.0], lower=2.0, closed=True, improved=2.5),
    head("prefix", 2.0, [4.0] * 7, lower=1.5),
]
"""Attention 8 and 2 times the best, its hindsight 2 and 1 times; a head that loses nothing; and prefixes."""


def parts(*samples: list[dict[str, Any]], configs: tuple[pk.EvictionConfig, ...] = CONFIGS) -> list[dict[str, Any]]:
    rows = [{"sample": f"s{index}", "heads": heads} for index, heads in enumerate(samples)]
    found: list[dict[str, Any]] = regret["searched_parts"](regret["Searches"](configs, rows, ASKED))
    return found


def geometric(values: list[float]) -> float:
    return math.exp(fmean(map(math.log, values)))


def test_ratios_and_factors_are_those_of_loops() -> None:
    """Two prompts' heads differ: geometric means are over heads, then over samples."""
    other = [head("prompt", 2.0, [7.0, 6.0, 9.0, 5.0, 4.0, 3.0, 2.5])]
    samples = [[FIRST, SECOND], other]
    (prompt,) = parts(*samples)
    chains = {0: (0, 3, 5), 1: (1, 4, 6), 3: (3, 3, 5), 4: (4, 4, 6), 5: (5, 5, 5), 6: (6, 6, 6)}
    for index, one in enumerate(prompt["methods"]):
        values = [[row["perturbation"][index] for row in rows] for rows in samples]
        best = [[row["best"] for row in rows] for rows in samples]
        assert one["sum_ratio"] == pytest.approx(sum(map(sum, values)) / sum(map(sum, best)))
        by_sample = [[a / b for a, b in zip(*each, strict=True)] for each in zip(values, best, strict=True)]
        assert one["median_ratio"] == pytest.approx(median(map(median, by_sample)))
        assert one["factor"]["value"] == pytest.approx(geometric([geometric(each) for each in by_sample]))
        if index not in chains:
            assert math.isnan(one["query"]["value"])
            continue
        links = [lambda row, place=place: row["perturbation"][place] for place in chains[index]]
        links.append(lambda row: row["best"])
        for name, above, below in zip(("form", "query", "criterion"), links[:-1], links[1:], strict=True):
            expected = geometric([geometric([above(row) / below(row) for row in rows]) for rows in samples])
            assert one[name]["value"] == pytest.approx(expected)
        product = math.prod(one[name]["value"] for name in ("form", "query", "criterion"))
        assert one["factor"]["value"] == pytest.approx(product)


def test_heads_are_counted_and_unproven_ones_never_called_optimal() -> None:
    prompt, prefix = parts(*[HEADS] * 6)
    names = ("heads", "left_out", "settled", "tried")
    assert [prompt[name] for name in names] == [18, 6, 12, 0]
    assert [prefix[name] for name in ("heads", "tried", "closed", "at_optimum", "gap")] == [12, 12, 6, 0, 0.25]
    assert [one["sum_ratio"] for one in prefix["methods"]] == pytest.approx([10 / 4, 2, 3, 9 / 4, 7 / 4, 7 / 4, 6 / 4])
    assert str(prefix["methods"][0]["config"].budget) == "16"
    assert prompt["methods"][0]["half"] == pytest.approx(5 / 12)
    assert prompt["methods"][0]["factor"]["interval"].low >= 1


def test_the_first_layer_is_told_apart() -> None:
    """The other layers were drawn in the first of three prompts alone: one head, and no range."""
    later = head("prompt", 1.0, [9.0, 6.0, 8.0, 3.0, 6.0, 3.0, 2.0], layer=4)
    prompt, _ = parts([*HEADS, later], HEADS, HEADS)
    counts = [
        (prompt[key][0]["heads"], prompt[key][0]["samples"]) for key in ("methods", "first_layer", "other_layers")
    ]
    assert counts == [(7, 3), (6, 3), (1, 1)]
    one = prompt["other_layers"][1]
    assert [one[name]["value"] for name in ("factor", "form", "query", "criterion")] == pytest.approx([6, 1, 3, 2])
    assert one["factor"]["interval"] is None


def test_budgets_are_told_apart_and_nothing_to_tell_is_no_method() -> None:
    configs = (*CONFIGS, *(replace(one, budget=pk.Budget(64)) for one in CONFIGS))
    small = head("prompt", 1.0, [3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0], budget="64")
    found = parts([*HEADS, small], configs=configs)
    assert [part["budget"] for part in found] == ["128", "64", "16"]
    assert found[1]["methods"][0]["sum_ratio"] == pytest.approx(3)
    (nothing,) = parts([head("prompt", 0.0, [0.0] * 7)])
    assert nothing["methods"] == []


@pytest.mark.parametrize(
    ("asked", "plainly", "known"),
    [
        ("attention", "attention-unpooled", "hindsight-attention"),
        ("two-stage-uniform", "attention-unpooled", "hindsight-attention"),
        ("two-stage", "two-stage(alpha=0)", "hindsight"),
        ("two-stage(alpha=0.5, norm=l2)", "two-stage(alpha=0, norm=l2)", "hindsight(norm=l2)"),
        ("hindsight", "hindsight", "hindsight"),
        ("random", None, None),
        ("value", None, None),
    ],
)
def test_a_chain_changes_one_thing_at_a_time(asked: str, plainly: str | None, known: str | None) -> None:
    (one,) = pk.grid(32, selection=asked, window=4, protect_first=3)
    for found, told in ((regret["unpooled_config"](one), plainly), (regret["known_query_config"](one), known)):
        assert found == (None if told is None else pk.grid(32, selection=told, window=4, protect_first=3)[0])


def test_references_stand_behind_the_methods_of_their_budget_and_other_scores_have_none() -> None:
    found = regret["add_references"](pk.grid([32, 64], selection=["two-stage", "attention"], window=4))
    names = ["two-stage", "attention", "two-stage(alpha=0.0)", "attention-unpooled", "hindsight", "hindsight-attention"]
    told = [(one.budget.value, str(one.selection)) for one in found]
    assert told == [(budget, name) for budget in (32, 64) for name in names]
    for policy in ("knorm", "expected-attention", "h2o"):
        (one,) = pk.grid(32, policy=policy, selection="attention", window=4)
        assert regret["unpooled_config"](one) is None and regret["known_query_config"](one) is None


def test_the_script_reads_finished_searches(tmp_path: Path) -> None:
    header = {"run": json.loads(run_config(configs=CONFIGS).to_json()), "searches": ASKED}
    rows = [{"sample": f"s{index}", "heads": HEADS} for index in range(6)]
    path = tmp_path / "regret.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)))
    said = study("regret", path, "--output", tmp_path)
    assert "attention 4.00 [4.00, 4.00]" in said and "proven in 6 of 12" in said
    document = json.loads((tmp_path / "regret.json").read_text())
    assert (document["samples"], document["searches"]) == ([row["sample"] for row in rows], ASKED)
    assert (tmp_path / "regret.png").exists()
    path.write_text("{}\n")
    with pytest.raises(pk.PerturbkvError, match="expected a regret.jsonl of finished searches"):
        regret["read"](path)

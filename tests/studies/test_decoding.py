"""The study of decode-time eviction: its ratios, its verdicts and what it leaves out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from tests.support.scripts import STUDIES, functions

own = functions("decoding", STUDIES)
METHODS, KEPT = own["METHODS"], own["KEPT"]


def rows(prompts: int = 6, factor: float = 2.0, spread: float = 0.0) -> list[dict[str, Any]]:
    """Random is `factor` times as bad as every score, in some prompts more; prompt p's level is p + 1."""
    made = []
    for place in range(prompts):
        for method in METHODS:
            for keep in ("", KEPT):
                level = (place + 1) * (factor * math.exp(spread * (-1) ** place) if method == "random" else 1.0)
                made.append({
                    "prompt": f"p{place}", "method": method + keep, "steps": 300 + place, "compressions": 2,
                    "propagated": level, "kl": level / 10, "perplexity": level, "added": 0.1, "gone": 0.2, "draft": 0.9,
                })  # fmt: skip
    return made


def test_ratios_are_geometric_means_over_prompts() -> None:
    found = own["compare"](rows(spread=0.1), f"random{KEPT}", f"snapkv{KEPT}")
    logs = [math.log(2) + 0.1 * (-1) ** place for place in range(6)]
    for number in own["NUMBERS"]:
        assert found[number] == pytest.approx(math.exp(np.mean(logs)))
        assert found[f"{number}_interval"].low < found[number] < found[f"{number}_interval"].high


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "enough"), (1.5, "not enough"), (1.08, "enough")])
def test_random_is_enough_where_it_is_worse_by_less_than_the_margin(factor: float, verdict: str) -> None:
    found = own["compare"](rows(factor=factor, spread=0.001), f"random{KEPT}", f"tova{KEPT}")
    assert own["is_enough"](found["kl_interval"]) == verdict


def test_few_prompts_and_wide_intervals_decide_nothing() -> None:
    few = own["compare"](rows(prompts=3), f"random{KEPT}", f"tova{KEPT}")
    assert own["is_enough"](few["kl_interval"]) == "undecided"
    assert own["is_enough"](None) == "undecided"
    wide = own["compare"](rows(factor=1.05, spread=0.5), f"random{KEPT}", f"tova{KEPT}")
    assert own["is_enough"](wide["kl_interval"]) == "undecided"


def test_texts_that_no_compression_reaches_are_left_out_and_counted() -> None:
    early = [{**row, "prompt": "early", "compressions": 0, "kl": 0.0} for row in rows(1)]
    tables = list(own["tables"]([*rows(), *early]))
    assert "1 prompts left out" in tables[0][0]
    assert "n = 6" in tables[1][0]
    assert all("2.00" in line[1] for line in tables[1][2])
    with pytest.raises(pk.PerturbkvError, match="got none"):
        own["reached"](early)


def test_methods_are_ten_and_hold_the_same() -> None:
    found = own["configurations"](200, 0)
    assert len(found) == 10
    assert {config.budget.value for config in found.values()} == {200}
    assert {config.window for config in found.values()} == {own["WINDOW"]}
    assert sum("keep=prompt" in config.label() for config in found.values()) == 5

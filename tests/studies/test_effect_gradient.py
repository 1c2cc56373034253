"""studies/effect_gradient.py: shares and their differences by hand, from made-up traces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.scripts import STUDIES, functions


@pytest.fixture(scope="module")
def study() -> dict[str, Any]:
    return functions("effect_gradient", STUDIES)


def test_only_prompts_count_that_the_full_cache_answers_and_that_decide(study: dict[str, Any]) -> None:
    """Of one step and head: p0's lost caches lose 3 and 1, its kept ones 2; p1 finds all; p2's full cache nothing."""
    run = study["Run"](study["SMOLLM2"], 7, 3)
    keys = list(study["compared"](run))
    assert {key[1:] for key in keys} == {(0.2, 7), (0.4, 7)} and len(keys) == 12
    labels = [study["compared"](run)[key].label() for key in keys]
    losses = {0.2: [3.0, 1, 2, 2, 2, 2], 0.4: [0, 0, 0, 0, 0, 0]}
    found = {0.2: [0, 0, 1, 1, 1, 1], 0.4: [1, 1, 1, 1, 1, 0]}

    def laid_out(numbers: dict[float, list[Any]]) -> np.ndarray:
        taken = {budget: iter(each) for budget, each in numbers.items()}
        return np.array([next(taken[key[1]]) for key in keys], dtype=float)

    effect = np.tile(-laid_out(losses)[:, None, None, None], (3, 1, 2, 1, 1))
    effect[:, :, 1] = np.nan  # steps after the text's end
    score = np.array([laid_out(found), np.ones(12), laid_out(found)])
    full, mean = (
        SimpleNamespace(sample_ids=["p0", "p1", "p2"], config_index=labels.index,
                        arrays={"effect_isolated": sign * effect, "score": score, "score_full": np.array([1.0, 1, 0])})
        for sign in (1, -1)
    )  # fmt: skip
    told = {(row["budget"], row["form"]): row for row in study["rows"](run, full, mean)}
    assert {row["sample"] for row in told.values()} == {"p0"}
    assert [told[0.2, form]["full"] for form in study["FORMS"]] == [0.5, 0.5]  # 3 above all four, 1 above none
    assert told[0.4, "size"]["full"] == 0.5  # ties
    assert {row["pairs"] for row in told.values()} == {8, 5}
    assert [told[0.2, form]["mean"] for form in study["FORMS"]] == [0.5, 0.5]
    full.arrays["effect_isolated"] = np.where(effect == -1, -9, effect)  # the other lost cache of p0 loses most, too
    again = {(row["budget"], row["form"]): row for row in study["rows"](run, full, mean)}
    assert [again[0.2, form]["full"] for form in study["FORMS"]] == [1, 1]
    assert [again[0.2, form]["mean"] for form in study["FORMS"]] == [0.5, 0.5]


def test_the_difference_is_paired_over_prompts(study: dict[str, Any]) -> None:
    full, mean = np.linspace(0, 1, 12), np.full(12, 0.5)
    frame = pd.DataFrame({"model": "m", "budget": 0.2, "form": "size", "full": full, "mean": mean})
    ((_, budget, form, prompts, *shares, difference),) = study["table"](frame)[2]
    assert (budget, form, prompts, shares) == ("0.2", "size", "12", ["50 %", "50 %"])
    assert difference.startswith(("0.0 [", "−0.0 ["))

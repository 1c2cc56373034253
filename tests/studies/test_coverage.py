"""studies/coverage.py on a small trace: every statistic has a row, and ours is the widest where a mean is skewed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from perturbkv.analyses.stats.intervals import StatisticKind
from tests.support.scripts import STUDIES, functions
from tests.support.traces import run_config, sample_trace, trace

TOOL = functions("coverage", STUDIES)
MADE = trace(*(sample_trace(f"s{place}", steps=3, seed=place) for place in range(12)), steps=3)


def told(*arguments: Any, **named: Any) -> tuple[list[str], dict[tuple[str, str], list[float]]]:
    """The table's heads, and the median coverage at each n, by statistic and method."""
    _, heads, rows = TOOL["table"](MADE, *arguments, **named)
    assert {len(row) for row in rows} == {len(heads)}
    return heads, {(row[0], row[1]): [float(cell.split(" %")[1].strip(", ")) for cell in row[3:]] for row in rows}


@pytest.mark.slow
def test_every_statistic_and_method_is_told_with_its_coverage() -> None:
    assert MADE.run.configs == run_config().configs
    head, covered = told(30, (8,), bootstrap=True)
    assert head == ["statistic", "method", "configurations", "n = 8: worst, median; width"]
    names = {name for name, _ in covered}
    assert {"share of heads better, propagated", "ratio of ΣL, isolated", "median head's ratio, isolated",
            "ratio of drift", "mean of KL", "median of KL", "growth over the steps"} <= names  # fmt: skip
    assert covered["mean of KL", "ours"] >= covered["mean of KL", "percentile bootstrap"]
    assert covered["mean of KL", "ours"][0] >= 92


def test_every_n_of_the_tables_has_its_column() -> None:
    assert TOOL["SAMPLES"] == (8, 16, 36, 40)
    head, covered = told(20, (8, 16))
    assert head[3:] == ["n = 8: worst, median; width", "n = 16: worst, median; width"]
    assert {len(each) for each in covered.values()} == {2}
    assert {method for _, method in covered} == {"Student's t", "t, log", "ours"}


def test_larger_samples_are_as_many_draws_of_as_many_prompts() -> None:
    """The mean of 0 and 1 prompts has an exact coverage at every n, by enumerating how many ones are drawn."""
    each = np.array([0.0] * 6 + [1.0] * 6)
    kind = StatisticKind(3 / 8)
    one = TOOL["mean_statistic"]("ones", kind, each)
    for samples in (8, 16):
        drawn = np.random.default_rng(0).integers(0, 12, size=(4000, samples))
        held = 0.0
        for ones in range(samples + 1):
            share = ones / samples
            reach = student.ppf(0.975, 3 / 8 * samples) * math.sqrt(share * (1 - share) / (samples - 1))
            held += math.comb(samples, ones) / 2**samples * (abs(share - 0.5) <= reach + 1e-12)
        assert TOOL["coverage"](one, drawn)["ours"][0] == pytest.approx(held, abs=0.02)


def test_an_interval_that_always_holds_the_truth_covers_it_in_every_draw() -> None:
    told = TOOL["_coverage_and_width"](1.0, np.array([0.0, 0.5, 1.1]), np.array([2.0, 1.0, 3.0]))
    assert told == (2 / 3, 1.9)

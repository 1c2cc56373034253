"""coverage.py on a small trace: every statistic has a row, and ours is the widest where a mean is skewed."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

from tests.support.traces import run_config, sample_trace, trace

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "scripts" / "coverage.py"))


def test_every_statistic_and_method_is_told_with_its_coverage() -> None:
    made = trace(*(sample_trace(f"s{place}", steps=3, seed=place) for place in range(12)), steps=3)
    assert made.run.configs == run_config().configs
    head, _, *rows = TOOL["table"](made, 60)
    assert head == "| statistic | method | configurations | worst | median | width |"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    names = {row[0] for row in cells}
    assert {"share of heads better, propagated", "ratio of ΣL, isolated", "median head's ratio, isolated",
            "ratio of drift", "mean of KL", "median of KL", "growth over the steps"} <= names  # fmt: skip
    by_row = {(row[0], row[1]): float(row[4].removesuffix(" %")) for row in cells}
    assert by_row["mean of KL", "ours"] >= by_row["mean of KL", "percentile bootstrap"]
    assert by_row["mean of KL", "ours"] >= 92


def test_an_interval_that_always_holds_the_truth_covers_it_in_every_draw() -> None:
    told = TOOL["_told"](1.0, np.array([0.0, 0.5, 1.1]), np.array([2.0, 1.0, 3.0]))
    assert told == (2 / 3, 1.9)

"""bytes.md: needles are right or wrong, so better and worse prompts decide; the counts are those of its table."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.stats import binomtest

from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import DIFFERENCE
from tests.support.scripts import DOCS

PROMPTS = 24
PAGE = (DOCS / "results" / "bytes.md").read_text()


def _rows(part: str) -> Iterator[list[str]]:
    for line in part.splitlines():
        if line.startswith("| attention |") or line.startswith("| two-stage |"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def _needle() -> str:
    return PAGE[PAGE.index("### needle") : PAGE.index("### multi_news")]


def _counted() -> dict[tuple[str, str, str], tuple[int, int, float]]:
    """(selection, budget, bits) -> prompts better, worse, p."""
    found = {}
    for row in _rows(_needle()):
        if len(row) == 5:
            for bits, cell in zip("842", row[2:], strict=True):
                better, worse, p = re.findall(r"[\d.]+", cell)
                found[row[0], row[1], bits] = int(better), int(worse), float(p)
    return found


def test_counts_give_the_means_and_intervals_that_were_measured() -> None:
    counted = _counted()
    told = [row for row in _rows(_needle()) if len(row) == 10 and row[9]]
    assert len(told) == len(counted) == 18
    for row in told:
        better, worse, _ = counted[row[0], row[1], row[2]]
        differences = np.repeat([1.0, -1.0, 0.0], [better, worse, PROMPTS - better - worse])
        ends = intervals.of_mean(differences, DIFFERENCE)
        assert ends is not None
        numbers = (100 * end for end in (differences.mean(), ends.low, ends.high))
        value, low, high = (f"{number:z.1f}".replace("-", "−") for number in numbers)
        assert row[9] == f"{value} [{low}, {high}]", row


def test_p_is_the_exact_sign_tests() -> None:
    for better, worse, p in _counted().values():
        exact = binomtest(better, better + worse).pvalue if better + worse else 1.0
        assert p == pytest.approx(exact, rel=0.06)


def test_what_is_called_decided_is() -> None:
    counted = _counted()
    decided = {key for key, (_, _, p) in counted.items() if p <= 0.05}
    assert {key[1] for key in decided if key[2] == "4"} == {"0.2", "0.4"}
    assert decided - {key for key in decided if key[2] == "4"} == {("two-stage", "0.4", "8")}
    ordered = sorted((p, key) for key, (_, _, p) in counted.items())
    holm = {key for place, (p, key) in enumerate(ordered) if p * (len(ordered) - place) <= 0.05}
    assert holm == {("two-stage", "0.2", "4"), ("attention", "0.4", "4"), ("two-stage", "0.4", "4")}
    assert "three of four" not in PAGE

"""Simulations of intervals and verdicts: every population has its row, and what is drawn is what is meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.scripts import STUDIES, functions, study, tables


def test_rare_losses_shows_every_population_and_how_it_is_covered(tmp_path: Path) -> None:
    ((heads, *rows),) = tables(study("rare_losses", 200, "-o", tmp_path)).values()
    assert len(heads) == 6
    assert "10 % lose Beta(1, 3)" in [row[0] for row in rows]
    assert all(" ×" in cell and " → " in cell for row in rows for cell in row[1:])


def test_equivalence_shows_what_verdicts_err_and_what_n_is_told(tmp_path: Path) -> None:
    verdicts, needed = tables(study("equivalence", 200, "-o", tmp_path)).values()
    assert (len(verdicts), len(verdicts[0])) == (11, 5)
    assert verdicts[1][0] == "0.02"
    assert (len(needed), len(needed[0])) == (5, 5)


def test_rare_prompts_shows_every_population_with_both_ratios_and_their_worst_and_median(tmp_path: Path) -> None:
    ((heads, *cells),) = tables(study("rare_prompts", 40, "-o", tmp_path)).values()
    assert len(heads) == 9
    assert [row[0] for row in cells][0::14] == ["none", "median of these"]
    assert len(cells) == 1 + 12 + 2
    shares = np.array([[float(cell.removesuffix(" %")) for cell in row[3:]] for row in cells])
    assert (shares[0] > 85).all()  # where no prompt is rare
    np.testing.assert_allclose(shares[-2], shares[1:13].min(axis=0))
    np.testing.assert_allclose(shares[-1], np.median(shares[1:13], axis=0), atol=1)


@pytest.mark.slow
def test_what_rare_prompts_hold_is_what_very_many_of_them_show() -> None:
    tool = functions("rare_prompts", STUDIES)
    for heads in (50, 5):
        population = tool["Population"](10, 1.6, heads)
        top, bottom, source = np.zeros(50), np.zeros(50), np.random.default_rng(2)
        for _ in range(40):
            baseline, treatment = population.draw(source, 50, 100)
            top, bottom = top + treatment.sum(axis=(0, 1)), bottom + baseline.sum(axis=(0, 1))
        truth = tool["ratios"](*population.sums())
        assert top.sum() / bottom.sum() == pytest.approx(float(truth[0]), rel=0.02)
        assert sorted(top / bottom)[24:26] == pytest.approx([float(truth[1])] * 2, rel=0.04)

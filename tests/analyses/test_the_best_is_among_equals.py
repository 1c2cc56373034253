"""Which scores are called best: among caches of equal budget, granularity and protection, and in what words."""

from __future__ import annotations

import numpy as np
import pytest

from perturbkv.analyses.quality.quality import quality
from perturbkv.errors import TraceError
from tests.support.graded import graded
from tests.support.measured import config


def test_the_best_is_found_among_caches_of_equal_budget_and_granularity() -> None:
    configs = [config(side, 0.4, granularity=heads) for heads in ("kv", "query") for side in ("attention", "two-stage")]
    rows = [[0.3, 0.2, 0.8, 0.9], [0.4, 0.2, 0.7, 0.9], [0.3, 0.1, 0.8, 0.8], [0.2, 0.2, 0.8, 0.9], [0.3, 0.2, 0.7, 1]]
    result = quality(graded("qasper", [1] * 5, rows, configs, held=[0.4, 0.4, 1.2, 1.2]))
    assert [one.best for one in result.average.methods] == [True, False, False, True]
    assert [row[2].partition("\n")[0] for row in result.table().rows] == ["100.0", "*30.0", "18.0", "76.0", "*90.0"]
    assert [row[1] for row in result.table().rows] == ["1.00", "0.40", "0.40", "1.20", "1.20"]
    assert [row.group for row in result.layouts()[0].rows] == ["", "0.4 kv", "0.4 kv", "0.4 query", "0.4 query"]
    assert result.to_latex().count(r"\midrule") == 1 + 2


def test_protection_is_compared_with_its_own_and_a_budget_of_entries_tells_what_it_holds() -> None:
    configs = [config(side, 64, protect_first=first) for first in (0, 4) for side in ("attention", "random")]
    result = quality(graded("qasper", [1] * 3, [[0.1, 0.2, 0.6, 0.5]] * 3, configs, held=[0.3] * 4))
    assert [one.best for one in result.average.methods] == [False, True, True, False]
    assert [row[2].partition("\n")[0] for row in result.table().rows] == ["100.0", "10.0", "*20.0", "*60.0", "50.0"]


def test_all_that_are_best_are_marked_in_whatever_order_they_stand() -> None:
    for order in ((0, 1, 2), (2, 1, 0)):
        rows = np.array([[0.5, 0.5, 0.1]] * 6)[:, order]
        configs = [[config(side, 0.4) for side in ("attention", "two-stage", "random")][place] for place in order]
        result = quality(graded("qasper", [1] * 6, rows, configs))
        assert [one.best for one in result.average.methods] == [place < 2 for place in order]


def test_caches_of_whole_blocks_are_no_rivals_of_those_of_single_entries() -> None:
    configs = [config("attention", 0.4, granularity=kind) for kind in ("kv", "kv(block=16)")]
    result = quality(graded("qasper", [1] * 6, [[0.5, 0.3]] * 6, configs, held=[0.4, 0.33]))
    assert [one.best for one in result.average.methods] == [False, False]


def test_a_score_that_is_no_number_is_refused_whichever_cache_it_is_of() -> None:
    with pytest.raises(TraceError, match="got none in 1 of 6 samples"):
        quality(graded("qasper", [1] * 6, [*[[0.5, 0.3, 0.1]] * 5, [0.5, np.nan, 0.1]]))

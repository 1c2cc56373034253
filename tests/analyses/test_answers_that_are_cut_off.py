"""Answers that end at the largest number of tokens are told before a full cache that gets nothing right is believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.result import Result
from perturbkv.errors import TraceError
from perturbkv.trace import Trace
from tests.analyses.test_needle_and_horizon_by_hand import made
from tests.support.linked import answered, methods

LIMIT = 8
SCORES = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 0]], dtype=float)


def of_lengths(trace: Trace, lengths: Sequence[int], limit: int = LIMIT) -> Trace:
    """The trace with answers from the full cache of so many tokens."""
    tokens = np.where(np.arange(limit) < np.array(lengths)[:, None], 5, -1)
    run = replace(trace.run, generate=limit)
    return replace(trace, run=run, arrays={**trace.arrays, "generated_full": tokens})


def graded(full: float, lengths: Sequence[int]) -> Trace:
    return of_lengths(answered(methods(3), SCORES, [full] * 3, {"propagated": SCORES + 1}), lengths)


def hidden(full: float, lengths: Sequence[int]) -> Trace:
    return of_lengths(made(SCORES[:, :2], [full] * 3, np.ones((3, 2))), lengths)


CASES: dict[str, tuple[Callable[[Trace], Result], Callable[[float, Sequence[int]], Trace]]] = {
    "quality": (pk.quality, graded),
    "correlation": (pk.correlation, graded),
    "needle": (pk.needle, hidden),
}
LOSES_NOTHING = "nothing that eviction can lose"


@pytest.mark.parametrize("command", CASES)
def test_where_the_full_cache_scores_0_answers_that_were_cut_off_come_first(command: str) -> None:
    analyse, make = CASES[command]
    said = analyse(make(0, [LIMIT] * 3)).conclusion()
    assert said.startswith("3 of 3 answers of the full cache were cut off at 8 tokens; ")
    assert "--max-new-tokens allows longer answers" in said
    assert LOSES_NOTHING not in said
    assert analyse(make(0, [LIMIT, 3, 7])).conclusion().startswith("1 of 3 answers of the full cache was cut off at 8")


@pytest.mark.parametrize("command", CASES)
def test_answers_that_ended_leave_nothing_to_lose(command: str) -> None:
    analyse, make = CASES[command]
    said = analyse(make(0, [LIMIT - 1, 3, 0])).conclusion()
    assert LOSES_NOTHING in said
    assert "cut off" not in said


def test_a_limit_on_the_drop_says_it_too() -> None:
    with pytest.raises(TraceError, match="^2 of 3 answers of the full cache were cut off at 8 tokens, and it answers"):
        pk.safe_budget(graded(0, [LIMIT, LIMIT, 2]), max_drop=5)
    with pytest.raises(TraceError, match=f"^the full cache answers none of the 3 .*{LOSES_NOTHING}"):
        pk.safe_budget(graded(0, [2, 2, 2]), max_drop=5)


def test_where_the_full_cache_scores_they_are_counted() -> None:
    found = pk.quality(graded(1, [LIMIT, LIMIT, 2]))
    assert "2 of 3 answers of the full cache were cut off at 8 tokens." in found.notes()
    assert [one["cut_off"] for one in found.to_dict()["datasets"]] == [2]
    assert found.conclusion().startswith("The full cache scores 100")
    assert "cut off" not in pk.quality(graded(1, [2, 2, 2])).notes()


def test_data_sets_with_limits_of_their_own_tell_the_least_and_the_largest() -> None:
    first = graded(0, [LIMIT] * 3)
    other = answered(methods(3), SCORES, np.zeros(3), {"propagated": SCORES + 1}, dataset="e")
    said = pk.quality([first, of_lengths(other, [20] * 3, 20)])
    assert said.conclusion().startswith("6 of 6 answers of the full cache were cut off at 8 tokens to 20 tokens; ")

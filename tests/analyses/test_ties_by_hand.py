"""Verdicts of one prompt in two precisions: which agree, which are left out, what both rules say."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.heads.half_precision import compare
from perturbkv.errors import TraceError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

CONFIGS = (config("attention"), config("two-stage"))


def made(
    baseline: list[list[float]], treatment: list[list[float]], floor: float, token: list[int] | None = None
) -> Trace:
    """(sample, head) perturbations of one layer, both kinds alike; no kept set equals another."""
    both = np.stack([baseline, treatment], axis=1)[:, :, None]
    floors = np.full((len(baseline), 1, len(baseline[0])), floor)
    arrays: dict[str, Any] = {
        "perturbation_isolated": both,
        "perturbation_propagated": both,
        "noise_floor_isolated": floors,
        "noise_floor": floors,
    }
    trace = hand_made(CONFIGS, arrays, heads=len(baseline[0]))
    tokens = np.array(token or [7] * len(baseline))[:, None]
    return dataclasses.replace(trace, arrays={**trace.arrays, "token_id": tokens})


EXACT = made([[5, 5, 5, 5], [5, 5, 5, 5]], [[4, 6, 5, 4], [4, 6, 5, 4]], 1e-9)


def test_decided_heads_agree_oppose_or_are_tied_in_the_exact_trace() -> None:
    rounded = made([[5, 5, 5, 5], [5, 5, 5, 5]], [[4, 4, 4, 4.9], [4, 6, 5, 4]], 0.1)
    isolated, propagated = compare(EXACT, rounded, "attention", "two-stage")
    assert [(one.kind, one.distance) for one in (isolated, propagated)] == [("isolated", "l1"), ("propagated", "l1")]
    found = isolated.by_difference
    assert (found.decided, found.agreeing, found.opposite, found.tied) == (6, 4, 1, 1)
    assert found.share == 4 / 6
    assert (isolated.samples, isolated.left_out, isolated.heads) == (2, 0, 8)
    assert isolated.to_dict()["by_difference"]["share"] == 4 / 6


def test_noise_acts_on_the_difference_and_the_old_rule_looks_at_each_value_alone() -> None:
    rounded = made([[5, 5, 5, 5], [5, 5, 5, 5]], [[5.15, 6, 5, 4], [4, 6, 5, 4]], 0.1)
    ties = compare(EXACT, rounded, "attention", "two-stage")[0]
    assert (ties.by_difference.decided, ties.by_difference.opposite) == (5, 0)
    assert (ties.alone.decided, ties.alone.opposite) == (6, 1)


def test_a_sample_that_decodes_another_token_is_counted_and_left_out() -> None:
    rounded = made([[5, 5, 5, 5], [5, 5, 5, 5]], [[6, 4, 4, 6], [4, 6, 5, 4]], 0.1, [8, 7])
    ties = compare(EXACT, rounded, "attention", "two-stage")[0]
    assert (ties.samples, ties.left_out, ties.heads) == (1, 1, 4)
    assert ties.by_difference.share == 1
    neither = made([[5.0] * 4] * 2, [[4.0] * 4] * 2, 0.1, [8, 8])
    with pytest.raises(TraceError, match="got none"):
        compare(EXACT, neither, "attention", "two-stage")


def test_equal_kept_sets_tie_whatever_rounding_says() -> None:
    rounded = made([[5, 5, 5, 5], [5, 5, 5, 5]], [[4, 4, 4, 4], [4, 4, 4, 4]], 0.1)
    places = np.array(rounded.arrays["kept_offset"])
    places[0, 1, 0, 2:] = places[0, 0, 0, 2:]
    same = dataclasses.replace(rounded, arrays={**rounded.arrays, "kept_offset": places})
    assert [ties.by_difference.decided for ties in compare(EXACT, same, "attention", "two-stage")] == [6, 6]


def test_traces_of_other_prompts_are_refused() -> None:
    other = dataclasses.replace(EXACT, sample_ids=("a", "b"))
    with pytest.raises(TraceError, match="expected one run's samples"):
        compare(EXACT, other, "attention", "two-stage")

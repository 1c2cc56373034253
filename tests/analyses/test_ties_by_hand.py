"""Ties by hand: of heads, and of pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.heads.half_precision import compare
from perturbkv.analyses.heads.heads import compare_heads
from perturbkv.analyses.identity import identity
from perturbkv.analyses.verdicts import equal_isolated, equal_propagated, equal_whole
from perturbkv.errors import TraceError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made
from tests.support.traces import sample_trace, trace

CONFIGS = (config("attention"), config("two-stage"))


def tied(
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


EXACT = tied([[5, 5, 5, 5], [5, 5, 5, 5]], [[4, 6, 5, 4], [4, 6, 5, 4]], 1e-9)


def test_decided_heads_agree_oppose_or_are_tied_in_the_exact_trace() -> None:
    rounded = tied([[5, 5, 5, 5], [5, 5, 5, 5]], [[4, 4, 4, 4.9], [4, 6, 5, 4]], 0.1)
    isolated, propagated = compare(EXACT, rounded, "attention", "two-stage")
    assert [(one.kind, one.distance) for one in (isolated, propagated)] == [("isolated", "l1"), ("propagated", "l1")]
    found = isolated.by_difference
    assert (found.decided, found.agreeing, found.opposite, found.tied) == (6, 4, 1, 1)
    assert found.share == 4 / 6
    assert (isolated.samples, isolated.left_out, isolated.heads) == (2, 0, 8)
    assert isolated.to_dict()["by_difference"]["share"] == 4 / 6


def test_noise_acts_on_the_difference_and_the_old_rule_looks_at_each_value_alone() -> None:
    rounded = tied([[5, 5, 5, 5], [5, 5, 5, 5]], [[5.15, 6, 5, 4], [4, 6, 5, 4]], 0.1)
    ties = compare(EXACT, rounded, "attention", "two-stage")[0]
    assert (ties.by_difference.decided, ties.by_difference.opposite) == (5, 0)
    assert (ties.alone.decided, ties.alone.opposite) == (6, 1)


def test_a_sample_that_decodes_another_token_is_counted_and_left_out() -> None:
    rounded = tied([[5, 5, 5, 5], [5, 5, 5, 5]], [[6, 4, 4, 6], [4, 6, 5, 4]], 0.1, [8, 7])
    ties = compare(EXACT, rounded, "attention", "two-stage")[0]
    assert (ties.samples, ties.left_out, ties.heads) == (1, 1, 4)
    assert ties.by_difference.share == 1
    neither = tied([[5.0] * 4] * 2, [[4.0] * 4] * 2, 0.1, [8, 8])
    with pytest.raises(TraceError, match="got none"):
        compare(EXACT, neither, "attention", "two-stage")


def test_later_steps_which_may_read_other_tokens_are_not_compared() -> None:
    samples = [sample_trace(f"s{place}", steps=2, seed=place) for place in range(6)]
    exact = trace(*samples, steps=2)
    later = {name: array.copy() for name, array in exact.arrays.items()}
    later["token_id"][:, 1] += 1
    later["perturbation_isolated"][:, :, 1] = later["perturbation_isolated"][:, ::-1, 1] * 9
    rounded = dataclasses.replace(exact, arrays=later)
    for ties in compare(exact, rounded, "attention", "two-stage"):
        assert ties.by_difference.agreeing == ties.by_difference.decided > 0


def test_equal_kept_sets_tie_whatever_rounding_says() -> None:
    rounded = tied([[5, 5, 5, 5], [5, 5, 5, 5]], [[4, 4, 4, 4], [4, 4, 4, 4]], 0.1)
    places = np.array(rounded.arrays["kept_offset"])
    places[0, 1, 0, 2:] = places[0, 0, 0, 2:]
    same = dataclasses.replace(rounded, arrays={**rounded.arrays, "kept_offset": places})
    assert [ties.by_difference.decided for ties in compare(EXACT, same, "attention", "two-stage")] == [6, 6]


def test_traces_of_other_prompts_are_refused() -> None:
    other = dataclasses.replace(EXACT, sample_ids=("a", "b"))
    with pytest.raises(TraceError, match="expected one run's samples"):
        compare(EXACT, other, "attention", "two-stage")


EVICTING = (config("attention"), config("two-stage"))
READING = (config("attention", policy="quest"), config("two-stage", policy="quest"))
SAID = "quest: nothing is evicted; the cache share is what each head reads at a step, and all stays in memory."


def made(configs: tuple[object, ...], evicted: int = 1) -> Trace:
    """Six samples of one head: equal kept sets, and the treatment at half of the baseline's perturbation."""
    both = np.tile(np.array([4.0, 2.0])[:, None, None], (6, 1, 1, 1))
    floor = np.full((6, 1, 1), 1e-9)
    arrays = {"perturbation_isolated": both, "perturbation_propagated": both, "noise_floor": floor,
              "noise_floor_isolated": floor}  # fmt: skip
    trace = hand_made(configs, arrays)  # type: ignore[arg-type]
    places = np.array(trace.arrays["kept_offset"])
    places[:, 1] = places[:, 0]
    held = {**trace.arrays, "kept_offset": places, "evicted": np.full((6, 2), evicted, dtype=np.uint8)}
    return dataclasses.replace(trace, arrays=held)


@pytest.mark.parametrize("kind", [equal_isolated, equal_propagated])
def test_equal_sets_tie_where_entries_went_and_not_where_pages_are_read(kind: object) -> None:
    assert kind(made(EVICTING), 0, 1).all()  # type: ignore[operator]
    assert not kind(made(READING), 0, 1).any()  # type: ignore[operator]
    assert not kind(made((EVICTING[0], READING[1])), 0, 1).any()  # type: ignore[operator]


def test_what_reads_everything_ties_with_what_keeps_everything() -> None:
    for configs in (READING, (EVICTING[0], READING[1])):
        trace = made(configs, evicted=0)
        assert equal_isolated(trace, 0, 1).all() and equal_whole(trace, 0, 1).all()


def test_verdicts_of_pages_are_told_from_what_was_measured() -> None:
    tied, decided = (compare_heads(made(configs), "attention", "two-stage") for configs in (EVICTING, READING))
    shares = [[one.isolated.better_share, one.propagated.better_share] for one in (*tied, *decided)]
    assert shares == [[0.0, 0.0], [1.0, 1.0]]
    assert SAID in " ".join(repr(decided).split()) and "quest" not in repr(tied)


def test_a_run_s_identity_says_what_held_means() -> None:
    trace = made(READING)
    assert identity(trace, READING).lines()[-1] == SAID == identity(trace, READING[:1]).no_eviction_note()
    assert identity(made(EVICTING), EVICTING).no_eviction_note() == ""

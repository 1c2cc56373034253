"""Pages that are read: equal stored sets, which are of one step of one run, settle nothing; what is read is said."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from perturbkv.analyses.heads.heads import compare_heads
from perturbkv.analyses.identity import identity
from perturbkv.analyses.verdicts import equal_isolated, equal_propagated, equal_whole
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

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

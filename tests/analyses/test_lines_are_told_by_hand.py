"""A prefill along lines: stored sets, which are of one query, settle nothing; what it looks at and takes is said."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from perturbkv.analyses.heads.heads import compare_heads
from perturbkv.analyses.identity import identity
from perturbkv.analyses.verdicts import equal_isolated, equal_propagated
from perturbkv.trace import Trace
from tests.analyses.test_ties_by_hand import EVICTING, made
from tests.support.measured import config

LINED = (config("attention", policy="vertical-slash"), config("two-stage", policy="vertical-slash"))
SAID = (
    "vertical-slash: nothing is evicted; the cache share is that of the pairs of query and entry that its own prefill "
    "looks at; isolated is a mean over 32 queries of the prompt."
)
TOOK = "Prefill, mean over samples, masks dense: attention 2.00 s, two-stage 3.50 s; the full one 1.00 s."


def timed(configs: tuple[object, ...], own: tuple[float, float]) -> Trace:
    """Prefills of 1 s less and 1 s more than these, turn by turn, beside a full one of 0.5 and 1.5 s."""
    trace, turns = made(configs), np.array([-1.0, 1.0] * 3)
    took = {"prefill_seconds": np.array(own) + turns[:, None], "prefill_seconds_full": 1.0 + turns / 2}
    return dataclasses.replace(trace, arrays={**trace.arrays, **took, "held_share": np.tile([0.25, 0.5], (6, 1))})


@pytest.mark.parametrize("kind", [equal_isolated, equal_propagated])
def test_equal_sets_of_the_last_query_tie_nothing(kind: object) -> None:
    assert not kind(made(LINED), 0, 1).any()  # type: ignore[operator]
    assert not kind(made((EVICTING[0], LINED[1])), 0, 1).any()  # type: ignore[operator]
    assert kind(made(LINED, evicted=0), 0, 1).all()  # type: ignore[operator]


def test_what_prefills_took_stands_in_notes_and_numbers() -> None:
    found = compare_heads(timed(LINED, (2.0, 3.5)), "attention", "two-stage")
    assert TOOK in found.details() and SAID in " ".join(repr(found).split())
    told = found.to_dict()["comparisons"][0]
    assert (told["prefill_seconds_baseline"], told["prefill_seconds_treatment"]) == (2.0, 3.5)
    assert (told["prefill_seconds_full"], told["held_over_full_treatment"]) == (1.0, 0.5)


def test_what_has_no_prefill_of_its_own_tells_no_time() -> None:
    beside = compare_heads(
        timed((EVICTING[0], LINED[1]), (math.nan, 3.5)), "snapkv:attention", "vertical-slash:two-stage"
    )
    assert any("vertical-slash:two-stage 3.50 s; the full one" in part for part in beside.details())
    assert beside.to_dict()["comparisons"][0]["prefill_seconds_baseline"] is None
    alone = compare_heads(made(EVICTING), "attention", "two-stage")
    assert (
        not any("Prefill" in part for part in alone.details())
        and alone.to_dict()["comparisons"][0]["prefill_seconds_full"] is None
    )


def test_a_run_s_identity_says_what_held_means() -> None:
    assert identity(made(LINED), LINED).lines()[-1] == SAID

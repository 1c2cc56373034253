"""Caches that evict while decoding, and close the gaps at every step: right ones are exact, faults are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perturbkv.auditing.forward_passes import make_situation
from tests.audit import moving_keys
from tests.audit.test_planted_faults_are_told_apart import audited

ALONE = ["single", "block"]
IN_CACHE = "keys stand at their places in the cache, new tokens after them"
FAULTS = {
    "UnrotatedWithAnotherBase": ("positions", 0, "no rotation explains the keys of new tokens"),
    "UnrotatedEarly": ("positions", 0, "new tokens stand 1 position too early"),
    "RollingWithAnotherBase": (
        "rotation",
        0,
        "keys moved to their places inside the cache with base 500,000, the model's is 10,000",
    ),
    "RollingEarly": ("positions", 0, "new tokens stand 1 position too early"),
    "shifting_early": ("positions", 0, "new tokens stand 1 position too early"),
    "sliding_early": ("positions", 0, "new tokens stand 1 position too early"),
    "RollingThenStill": ("positions", 1, "too early"),
}
"""Name -> kind, first step that shows it, words."""


@pytest.mark.parametrize("name", ["llama", "bfloat16"])
@pytest.mark.parametrize("eviction", ["Unrotated", "Rolling", "shifting"])
def test_keys_that_move_at_every_step_are_exact(eviction: str, name: str) -> None:
    result = audited(name, getattr(moving_keys, eviction), situations=ALONE, plain_use=False)
    assert result.verdict == "exact", result.conclusion()
    assert IN_CACHE in result.conclusion()
    assert all(run.positions == "in-cache" and run.steps for run in result.runs)


@pytest.mark.slow
def test_tokens_decoded_before_move_too_and_go_in_turn() -> None:
    for eviction in (moving_keys.Unrotated, moving_keys.Rolling):
        result = audited("llama", eviction, situations=["single"], steps=moving_keys.RECENT + 2)
        assert result.verdict == "exact", result.conclusion()


def test_a_batch_whose_keys_move_is_exact() -> None:
    assert audited("llama", moving_keys.shifting, situations=["batch"]).verdict == "exact"


@pytest.mark.parametrize("eviction", ["Streaming", "OwnPositions"])
def test_a_window_that_slides_at_the_prompts_own_positions_is_exact(eviction: str) -> None:
    result = audited("llama", getattr(moving_keys, eviction), situations=ALONE)
    assert result.verdict == "exact", result.conclusion()
    assert {run.positions for run in result.runs} == {"original"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_keys_that_move_is_named(fault: str) -> None:
    kind, step, words = FAULTS[fault]
    result = audited("llama", getattr(moving_keys, fault), situations=ALONE, steps=2, plain_use=False)
    assert result.verdict == "differs"
    assert {one.situation for one in result.faults} == set(ALONE)
    assert {(one.kind, one.layer, one.step) for one in result.faults} == {(kind, 0, step)}
    assert all(words in one.what for one in result.faults)


def test_keys_that_follow_the_new_tokens_are_not_judged() -> None:
    result = audited("llama", moving_keys.Relative, situations=ALONE)
    assert (result.verdict, result.exit_code) == ("unreadable", 2)
    assert "they stand at 48 … 59, as these stand at 60, which an audit does not judge" in result.conclusion()


def test_positions_in_a_cache_are_counted_from_the_last_known_length() -> None:
    ids, tokens = torch.arange(20), torch.arange(11)
    block = make_situation("block", ids, tokens, 4)
    once, again = (replace(block, cached=cached) for cached in ((12,), (12, 10)))
    assert [once.positions(chunk)[0, 0].item() for chunk in range(4)] == [12, 20, 21, 22]
    assert [again.positions(chunk)[0, 0].item() for chunk in range(4)] == [12, 10, 11, 12]

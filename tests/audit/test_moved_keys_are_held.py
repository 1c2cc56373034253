"""Keys at their places in the cache, keys that move at every step, moved keys of a dump."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import perturbkv as pk
from perturbkv.auditing.forward_passes import make_situation
from perturbkv.auditing.positions import describe_wrong_rotation
from tests.audit import planted
from tests.audit.test_alterations_are_named import FREQUENCIES, PLACES, entries, turned
from tests.audit.test_planted_faults_are_told_apart import MODELS, audited


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_without_gaps_is_exact_by_its_own_positions(name: str) -> None:
    for positions in ("auto", "in-cache"):
        result = audited(name, planted.moved, positions=positions)
        assert result.verdict == "exact", result.conclusion()
        assert "keys stand at their places in the cache, new tokens after them" in result.conclusion()
        assert {run.positions for run in result.runs} == {"in-cache"}
    original = audited(name, planted.moved, positions="original", situations=["single"])
    assert (original.faults[0].kind, original.faults[0].layer) == ("rotation", 0)


def test_the_next_tokens_place_is_after_the_kept_entries() -> None:
    result = audited("llama", planted.moved, situations=["single"])
    assert result.plain_use is not None
    assert (result.plain_use.position, result.plain_use.expected) == (planted.KEPT, planted.KEPT)


@pytest.mark.slow
def test_keys_at_their_own_positions_stay_original() -> None:
    for eviction in (planted.right, planted.shuffled, planted.rounded, planted.with_padding):
        assert {run.positions for run in audited("llama", eviction).runs} == {"original"}
    forced = audited("llama", planted.right, positions="in-cache", situations=["single"])
    assert forced.faults[0].kind == "rotation"


def test_new_tokens_at_n_behind_moved_keys_stand_wrong() -> None:
    result = audited("llama", planted.moved_but_decoded_at_n)
    assert (result.faults[0].kind, result.faults[0].what) == ("positions", "new tokens stand 40 positions too late")


@pytest.mark.slow
def test_a_round_trip_and_a_wrong_base_are_told_apart() -> None:
    rounded = audited("llama", planted.moved_and_rounded)
    assert (rounded.faults[0].kind, rounded.faults[0].what) == ("rounded", "keys rounded to bfloat16")
    wrong = audited("llama", planted.moved_with_another_base)
    assert wrong.faults[0].kind == "rotation"
    words = "keys moved to their places inside the cache with base 500,000, the model's is 10,000"
    assert wrong.faults[0].what == words


def test_other_frequencies_are_named() -> None:
    keys, index = entries(), torch.arange(6)
    moved = turned(keys, index - PLACES)
    assert describe_wrong_rotation(moved, keys, PLACES, index, FREQUENCIES, 0.02) == ""
    partial = FREQUENCIES[:4] ** 2  # of a model that rotates half of the components, with the same base
    assert "in all components" in describe_wrong_rotation(moved, keys, PLACES, index, partial, 0.02)
    scaled = torch.where(FREQUENCIES < 0.1, FREQUENCIES / 8, FREQUENCIES)
    words = describe_wrong_rotation(moved, keys, PLACES, index, scaled, 0.02)
    assert words == "moved to their places inside the cache without the model's scaling of long contexts"


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(pk.PerturbkvError, match="unknown convention of positions 'cache'"):
        audited("llama", planted.right, positions="cache")


ALONE = ["single", "block"]
IN_CACHE = "keys stand at their places in the cache, new tokens after them"
FAULTS = {
    "UnrotatedWithAnotherBase": ("positions", 0, "keys of new tokens are not rotated to their positions"),
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
    result = audited(name, getattr(planted, eviction), situations=ALONE, plain_use=False)
    assert result.verdict == "exact", result.conclusion()
    assert IN_CACHE in result.conclusion()
    assert all(run.positions == "in-cache" and run.steps for run in result.runs)


@pytest.mark.slow
def test_tokens_decoded_before_move_too_and_go_in_turn() -> None:
    for eviction in (planted.Unrotated, planted.Rolling):
        result = audited("llama", eviction, situations=["single"], steps=planted.RECENT + 2)
        assert result.verdict == "exact", result.conclusion()


def test_a_batch_whose_keys_move_is_exact() -> None:
    assert audited("llama", planted.shifting, situations=["batch"]).verdict == "exact"


@pytest.mark.parametrize("eviction", ["Streaming", "OwnPositions"])
def test_a_window_that_slides_at_the_prompts_own_positions_is_exact(eviction: str) -> None:
    result = audited("llama", getattr(planted, eviction), situations=ALONE)
    assert result.verdict == "exact", result.conclusion()
    assert {run.positions for run in result.runs} == {"original"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_keys_that_move_is_named(fault: str) -> None:
    kind, step, words = FAULTS[fault]
    result = audited("llama", getattr(planted, fault), situations=ALONE, steps=2, plain_use=False)
    assert result.verdict == "differs"
    assert {one.situation for one in result.faults} == set(ALONE)
    assert {(one.kind, one.layer, one.step) for one in result.faults} == {(kind, 0, step)}
    assert all(words in one.what for one in result.faults)


def test_keys_that_follow_the_new_tokens_are_not_judged() -> None:
    result = audited("llama", planted.Relative, situations=ALONE)
    assert (result.verdict, result.exit_code) == ("unreadable", 2)
    assert "they stand at 48 … 59, as these stand at 60, which an audit does not judge" in result.conclusion()


def test_positions_in_a_cache_are_counted_from_the_last_known_length() -> None:
    ids, tokens = torch.arange(20), torch.arange(11)
    block = make_situation("block", ids, tokens, 4)
    once, again = (replace(block, cached=cached) for cached in ((12,), (12, 10)))
    assert [once.positions(chunk)[0, 0].item() for chunk in range(4)] == [12, 20, 21, 22]
    assert [again.positions(chunk)[0, 0].item() for chunk in range(4)] == [12, 10, 11, 12]

"""Keys that were rotated to 0, 1, … are right where new tokens follow them, and wrong rotations have their names."""

from __future__ import annotations

import pytest
import torch

import perturbkv as pk
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
    assert rounded.runs[0].entries is not None
    first = rounded.runs[0].entries.altered[0]
    assert (rounded.verdict, first.kind, first.what) == ("lossy", "rounded", "keys rounded to bfloat16")
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

"""Keys that were rotated to 0, 1, … are right where new tokens follow them, and wrong rotations have their names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import perturbkv as pk
from perturbkv.auditing.positions import describe_wrong_rotation
from perturbkv.models.adapter import Adapter
from tests.audit import planted
from tests.audit.test_alterations_are_named import FREQUENCIES, PLACES, entries, turned
from tests.audit.test_planted_faults_are_told_apart import MODELS, audited
from tests.support.models import tiny_adapter, token_ids


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
    result = audited("llama", planted.moved, situations=["single"], plain_use=True)
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
    rounded = audited("llama", planted.moved_with_another_base_and_rounded)
    assert (rounded.verdict, rounded.faults[0].what) == ("differs", f"{words}, and rounded")
    assert "most recent" not in rounded.conclusion()


def test_of_changed_keys_only_equal_rows_are_repeats() -> None:
    """The prompt's tokens are of two kinds alone, so that the first layer's values are, too."""

    def eviction(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return planted.moved_with_another_base(model, input_ids, attention_mask)

    prompt = pk.Prompt("two tokens", [5, 9] * 20, 0)
    result = pk.audit(tiny_adapter("llama"), prompt, eviction, situations=["single"], losses=False, progress=False)
    assert result.verdict == "differs"
    assert "duplicate" not in {fault.kind for fault in result.faults}


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


SCALED = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}


@functools.cache
def scaled_model(kind: str) -> Adapter:
    rotations = {"rope_type": kind, "rope_theta": 1e4, **SCALED[kind]}
    return tiny_adapter(layers=2, rope_parameters=rotations)


def moved_by(frequencies: str) -> Any:
    """The first four and the last sixteen entries, at 0, 1, …, by the model's frequencies or others."""

    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        cache, rotary = planted.full(loaded, input_ids, attention_mask), loaded.model.rotary_emb
        half, tokens = len(rotary.inv_freq), input_ids.shape[1]
        plain = 1e4 ** (-torch.arange(half) / half)
        kept = torch.cat([torch.arange(4), torch.arange(tokens - 16, tokens)])
        angle = (torch.arange(20) - kept).unsqueeze(-1) * (plain if frequencies == "plain" else rotary.inv_freq)
        factor = rotary.attention_scaling if frequencies == "scaled twice" else 1.0
        for layer in cache.layers:
            first, second = layer.keys[:, :, kept].chunk(2, dim=-1)
            turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
            layer.keys, layer.values = factor * torch.cat(turned, dim=-1), layer.values[:, :, kept]
        return cache

    return evict


@pytest.mark.parametrize("kind", SCALED)
def test_a_models_scaling_is_known_and_no_base_guessed(kind: str) -> None:
    asked = {"situations": ["single"], "losses": False, "plain_use": False, "progress": False, "steps": 2}
    verdicts = {
        how: pk.audit(scaled_model(kind), pk.Prompt("p", token_ids(60), 0), moved_by(how), **asked)
        for how in ("its own", "plain", "scaled twice")
    }
    assert verdicts["its own"].verdict == "exact"
    words = "keys moved to their places inside the cache without the model's scaling of long contexts"
    assert verdicts["plain"].faults[0].what == words
    again = "keys multiplied by 1.139"
    assert [fault.what for fault in verdicts["scaled twice"].faults] == [again] * (kind == "yarn")

"""Small evictions that are right, only lossy or wrong: each gets its verdict and its words."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer

import perturbkv as pk
from perturbkv.analyses.audit.audit import Audit
from perturbkv.models.adapter import Adapter
from tests.audit import planted
from tests.support.models import tiny_adapter, token_ids

MODELS = {
    "llama": {"family": "llama"},
    "qwen3": {"family": "qwen3"},
    "phi3": {"family": "phi3"},
    "bfloat16": {"family": "llama", "dtype": torch.bfloat16},
    "float16": {"family": "qwen3", "dtype": torch.float16},
}
ALL = {"single", "block", "batch"}
LOSSY = {
    "right": "",
    "without_sinks": "the first entry, a sink, goes in 6 of 6 kept sets",
    "without_window": "the most recent entry goes in 6 of 6 kept sets",
}


@functools.cache
def model(name: str) -> Adapter:
    return tiny_adapter(layers=3, **MODELS[name])


def audited(name: str, eviction: Any, **more: Any) -> Audit:
    prompt = pk.Prompt("p", token_ids(60), 0)
    asked = {"steps": 3, "losses": False, "plain_use": False, "progress": False, **more}
    return pk.audit(model(name), prompt, eviction, **asked)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("eviction", LOSSY)
def test_what_is_only_lossy_is_exact_and_what_went_is_said(name: str, eviction: str) -> None:
    result = audited(name, getattr(planted, eviction))
    assert (result.verdict, result.exit_code, result.faults) == ("exact", 0, ())
    assert result.conclusion().startswith("exact: it loses what its kept sets imply")
    assert result.conclusion().partition("; ")[2] == LOSSY[eviction]


def test_eight_bits_are_rounding_in_half_precision() -> None:
    result = audited("bfloat16", planted.quantised)
    assert result.verdict == "exact"
    assert any(run.entries.distances[0].max() > 0 for run in result.runs if run.entries is not None)


def test_padding_shows_in_the_shorter_row_alone() -> None:
    result = audited("llama", planted.with_padding)
    assert [(fault.situation, fault.row) for fault in result.faults] == [("batch", 1)]
    assert result.faults[0].floors > 1000  # the reference attends to none
    (shorter,) = (run for run in result.runs if run.row == 1)
    assert shorter.padding == 7
    assert shorter.entries is not None
    assert shorter.entries.padded.tolist() == [[5, 5]] * 3  # four sinks, and position 4 or 5


def test_only_the_head_whose_values_were_taken_is_named() -> None:
    result = audited("llama", planted.swapped_values, situations=["single"])
    (run,) = result.runs
    assert run.entries is not None
    (changed,) = run.entries.altered
    assert (changed.kind, changed.what, changed.entry) == ("head", "values of head 1", 0)
    assert (changed.layer, changed.head) == (1, 0)


@pytest.mark.slow
def test_a_fault_in_another_layer_is_found_there() -> None:
    for layer in (0, 2):
        for fault in (planted.rotated_again, planted.swapped_values):
            result = audited("llama", functools.partial(fault, layer=layer), situations=["single"])
            assert result.faults[0].layer == layer


def test_a_window_that_slides_is_right_and_its_changes_are_told() -> None:
    result = audited("llama", planted.Streaming, situations=["single", "block"])
    assert result.verdict == "exact"
    for run in result.runs:
        assert run.entries is not None
        assert run.entries.changed == (1, 2)
        assert [list(one) for one in run.entries.kept_sets[0]] == [[0, 1, 2, 3, *range(52, 60)]] * 2


def test_a_cache_class_that_knows_no_padding_attends_to_it() -> None:
    result = audited("llama", planted.Streaming, situations=["batch"])
    assert [(fault.row, fault.what) for fault in result.faults] == [(1, "4 entries of padding attended to")]


def test_a_cache_that_evicts_while_the_prompt_is_read_is_held_against_the_same_reading() -> None:
    result = audited("llama", planted.truncating, situations=["single"])
    assert (result.verdict, result.faults) == ("exact", ()), result.conclusion()
    assert "the prompt is read in 60 parts, with what is left of the earlier ones" in result.conclusion()


def test_a_cache_class_that_wants_the_models_configuration_gets_it(tmp_path: Path) -> None:
    file = tmp_path / "of_the_model.py"
    file.write_text("from tests.audit.planted import OfTheModel\n")
    result = audited("llama", f"{file}:OfTheModel(recent=6)", situations=["single"])
    assert result.verdict == "exact", result.conclusion()
    with pytest.raises(pk.PerturbkvError, match="missing a required argument: 'recent'"):
        audited("llama", f"{file}:OfTheModel", situations=["single"])


def test_entries_kept_twice_and_in_another_order_are_told() -> None:
    twice = audited("llama", planted.twice, situations=["single"])
    assert (twice.verdict, twice.faults[0].what) == ("differs", "1 entry kept twice")
    shuffled = audited("llama", planted.shuffled, situations=["single"])
    assert shuffled.verdict == "exact"
    (run,) = shuffled.runs
    assert run.entries is not None
    assert run.entries.unordered == (0, 1, 2)
    assert run.entries.oddities == "in another order"


@pytest.mark.slow
def test_a_cache_read_in_parts_is_right_to_rounding() -> None:
    for name in ("llama", "bfloat16"):
        result = audited(name, planted.read_in_parts)
        assert result.verdict == "exact", result.conclusion()


def test_positions_counted_from_the_padding_on_are_no_fault() -> None:
    result = audited("llama", planted.counts_padding)
    assert result.verdict == "exact", result.conclusion()


def test_kept_sets_of_their_own_per_query_head_are_no_repetition() -> None:
    result = audited("llama", planted.per_query_head, situations=["single"])
    assert result.verdict == "exact", result.conclusion()
    (run,) = result.runs
    assert run.entries is not None
    assert (len(run.entries.kept_sets[0]), run.entries.repeated) == (4, ())


class ZeroedOnce(DynamicLayer):
    """Values become zero when the second token is decoded."""

    updates = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        self.updates += 1
        if self.updates == 3 and self.values is not None:
            self.values = torch.zeros_like(self.values)
        return super().update(key_states, value_states, *more, **named)


def test_entries_that_change_while_it_decodes_are_named_before_plain_use() -> None:
    def evict(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        cache = planted.quantised_values(model, input_ids, attention_mask)
        other = ZeroedOnce()
        other.update(cache.layers[1].keys, cache.layers[1].values)
        cache.layers[1] = other
        return cache

    result = audited("llama", evict, situations=["single"], plain_use=True, allow=["lossy"])
    assert result.misplaces_new_tokens
    assert result.conclusion().startswith("differs: layer 1, step 1: entries change while it decodes")
    assert "without position_ids" in result.conclusion()


@pytest.mark.parametrize(("change", "verdict"), [(1.0, "lossy"), (-1.0, "unknown"), (3.0, "unknown")])
def test_one_changed_entry_of_sixty_among_quantised_ones_is_no_rounding(change: float, verdict: str) -> None:
    def changed(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        cache = planted.full(model, input_ids, attention_mask)
        for layer in cache.layers:
            step = layer.values.abs().amax(dim=-1, keepdim=True) / 7
            layer.values = (layer.values / step).round() * step
            layer.values[:, :, 5] *= change
        return cache

    assert audited("llama", changed, situations=["single"]).verdict == verdict


def test_sets_per_query_head_in_the_wrong_order_are_of_another_key_value_head_and_counted() -> None:
    def flipped(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        cache = planted.per_query_head(model, input_ids, attention_mask)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.flip(1), layer.values.flip(1)
        return cache

    (right,) = audited("llama", planted.per_query_head, situations=["single"]).runs
    result = audited("llama", flipped, situations=["single"])
    assert (result.verdict, result.faults[0].kind) == ("differs", "head")
    assert result.faults[0].what == "keys of key/value head 1"
    (run,) = result.runs
    assert run.entries is not None and right.entries is not None
    assert run.entries.cache_share == right.entries.cache_share


def test_keys_at_their_places_inside_the_cache_are_named() -> None:
    result = audited("llama", planted.moved, situations=["single"], positions="original")
    assert (result.verdict, result.faults[0].layer) == ("differs", 0)
    assert result.faults[0].what == "keys moved to their places inside the cache"

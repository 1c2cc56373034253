"""What an eviction keeps is held against what it was meant to keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.errors import ConfigError, UnreadableCacheError
from tests.audit import planted
from tests.audit.test_planted_faults_are_told_apart import audited, model
from tests.support.models import token_ids

Sets = list[list[list[int]]]
N, LAYERS, HEADS = 60, 3, 2


def keeping(sets: Sets) -> Callable[..., DynamicCache]:
    """An eviction that keeps exactly these positions."""

    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> DynamicCache:
        cache = planted.full(loaded, input_ids, attention_mask)
        for layer, kept in zip(cache.layers, sets, strict=True):
            places = torch.tensor(kept)[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
            layer.keys, layer.values = layer.keys.gather(2, places), layer.values.gather(2, places)
        return cache

    return evict


def meant() -> Sets:
    """Sinks, the last eight, and eight entries between that differ by layer and head."""
    return [
        [[*range(4), *range(5 + layer + 3 * head, 45 + layer + 3 * head, 5), *range(N - 8, N)] for head in range(HEADS)]
        for layer in range(LAYERS)
    ]


def held_against(sets: Sets, path: Path, **content: Any) -> Any:
    path.write_text(json.dumps({"kept": meant(), **content}))
    return audited("llama", keeping(sets), situations=["single"], expect=path)


def swapped(sets: Sets) -> Sets:
    return [[sets[0][1], sets[0][1]], *sets[1:]]


def without_sinks(sets: Sets) -> Sets:
    return [sets[0], [[50, *kept[1:]] for kept in sets[1]], sets[2]]


def of_another_layer(sets: Sets) -> Sets:
    return [sets[0], sets[1], sets[1]]


def test_what_was_meant_is_exact_and_said(tmp_path: Path) -> None:
    path = tmp_path / "meant.json"
    result = held_against(meant(), path)
    assert (result.verdict, result.exit_code) == ("exact", 0)
    assert f"its kept sets, those of {path}, imply" in result.conclusion()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swapped, "head 0, entry 5, step 0: it lacks"),
        (without_sinks, "layer 1, head 0, entry 0, step 0: it lacks 1 entry that should stay and keeps 1 other"),
        (of_another_layer, "layer 2, head 0, entry 6, step 0: it lacks"),
    ],
)  # fmt: skip
def test_another_set_is_a_fault_with_its_place(change: Callable[[Sets], Sets], words: str, tmp_path: Path) -> None:
    result = held_against(change(meant()), tmp_path / "meant.json")
    assert (result.verdict, result.exit_code, result.faults[0].kind) == ("differs", 1, "unexpected")
    assert words in result.conclusion()
    unasked = audited("llama", keeping(change(meant())), situations=["single"])
    assert unasked.verdict == "exact"


@pytest.mark.parametrize(
    "asked", ["snapkv(b=24, w=8)", "adakv(b=24, w=8)", "streaming-llm(b=24, w=8, selection=position)"]
)
def test_a_policy_keeps_what_it_is_traced_with(asked: str) -> None:
    name, _, rest = asked.partition("(")
    selection = "position" if "position" in rest else "attention"
    prompt = pk.Prompt("p", token_ids(N), 0)
    config = pk.EvictionConfig(24, name, selection, 8, "kv")
    trace = pk.measure(model("llama"), [prompt], [config], settings=pk.Settings(steps=1), progress=False)
    masks = trace.kept_masks(0, 0)[:, ::2]
    lengths = {int(mask.sum()) for layer in masks for mask in layer}
    if len(lengths) > 1:  # such sets do not fit into one tensor
        masks = masks.copy()
        masks[:] = masks[0, 0]
    sets = [[mask.nonzero()[0].tolist() for mask in layer] for layer in masks]
    verdict = audited("llama", keeping(sets), situations=["single"], expect=asked).verdict
    assert verdict == ("exact" if len(lengths) == 1 else "differs")
    assert audited("llama", keeping(sets), situations=["single"], expect=config).verdict == verdict


@pytest.mark.parametrize(
    ("expect", "error", "words"),
    [
        ("snapkv", ConfigError, "a policy with a budget, snapkv\\(b=128\\), got 'snapkv'"),
        ("snapkv(b=8, k=1)", ConfigError, "k"),
        ("nothing.json", ConfigError, "nothing.json"),
        ("snapkv(b=24, w=8, granularity=query)", ConfigError, "expected 2 kept sets per layer, as the cache has"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_line(expect: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        audited("llama", keeping(meant()), situations=["single"], expect=expect)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_shape_or_prompt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meant.json"
    path.write_text(json.dumps({"kept": meant()[:2]}))
    with pytest.raises(UnreadableCacheError, match="it has 2 layers, the model 3"):
        audited("llama", keeping(meant()), situations=["single"], expect=path)
    with pytest.raises(ConfigError, match="expected no prompt to be audited but that of"):
        held_against(meant(), path, token_ids=[5, 6, 7])


def test_an_equal_token_is_as_good_where_keys_stand_at_their_places(tmp_path: Path) -> None:
    """At the start of a cache all keys of one token are equal in the first layer."""
    sets = [[[*range(N - 8, N)]] * HEADS, [[0, 1, 2, 3, *range(N - 4, N)]] * HEADS, [[*range(N - 8, N)]] * HEADS]

    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> DynamicCache:
        cache, half = keeping(sets)(loaded, input_ids, attention_mask), 4
        frequencies = 1e4 ** (-torch.arange(half) / half)
        for layer, kept in zip(cache.layers, sets, strict=True):
            angle = (torch.arange(8) - torch.tensor(kept[0])).unsqueeze(-1) * frequencies
            first, second = layer.keys.chunk(2, dim=-1)
            turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
            layer.keys = torch.cat(turned, dim=-1)
        return cache

    path = tmp_path / "meant.json"
    path.write_text(json.dumps({"kept": sets}))
    asked = {"steps": 2, "losses": False, "plain_use": False, "progress": False, "situations": ["single"]}
    result = pk.audit(model("llama"), pk.Prompt("p", token_ids(N, vocab=6), 0), evict, expect=path, **asked)
    assert result.verdict == "exact", result.conclusion()
    assert {run.positions for run in result.runs} == {"in-cache"}

"""Under preset `kvpress`, what seven systems keep is what kvpress 0.5.5 keeps, entry by entry.

Run by `make test-kvpress` in an environment of its own, as kvpress needs an older transformers than the toolkit.
Prompts have 512 or 1024 tokens, so that a compression ratio is its budget exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
from kvpress import (
    AdaKVPress,
    CriticalAdaKVPress,
    CriticalKVPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from torch import Tensor
from transformers import DynamicCache

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.needle import sentences
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ByteTokenizer, load_model
from perturbkv.selection.grid import configuration
from tests.support.models import tiny_model, token_ids
from tests.support.resolved import prefill, ranking_groups

SYSTEMS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "SnapKV": (SnapKVPress, "snapkv", "attention"),
    "CriticalKV": (lambda ratio: CriticalKVPress(SnapKVPress(ratio)), "snapkv", "two-stage"),
    "AdaKV": (lambda ratio, **more: AdaKVPress(SnapKVPress(ratio), **more), "adakv", "attention"),
    "CriticalAdaKV": (lambda ratio, **more: CriticalAdaKVPress(SnapKVPress(ratio), **more), "adakv", "two-stage"),
    "PyramidKV": (PyramidKVPress, "pyramidkv", "attention"),
    "TOVA": (TOVAPress, "tova", "attention"),
    "StreamingLLM": (StreamingLLMPress, "streaming-llm", "position"),
}
HEADS = {"MHA": (4, 4), "GQA": (6, 2)}
LAYERS, D_HEAD = 5, 16


@cache
def tiny(heads: int, kv_heads: int) -> Adapter:
    """Heads unlike each other, so that they compete: the later ones look around ever more evenly."""
    model = tiny_model("llama", heads, kv_heads, layers=LAYERS, d_head=D_HEAD, positions=1100)
    with torch.no_grad():
        for layer in model.model.layers:
            sharpness = torch.linspace(1, 0.02, heads).repeat_interleave(D_HEAD)
            layer.self_attn.q_proj.weight.mul_(sharpness.unsqueeze(-1))
    return Adapter(model, ByteTokenizer(), "tiny", "", True)


def keys(adapter: Adapter, ids: Sequence[int], press: Any = None) -> list[Tensor]:
    """(kv_head, key, d_head) per layer: those in the cache after reading the prompt."""
    held = DynamicCache()
    with torch.no_grad(), nullcontext() if press is None else press(adapter.model):
        adapter.model.model(input_ids=torch.tensor([ids]), past_key_values=held)
    return [layer.keys[0] for layer in held.layers]


def press_keeps(adapter: Adapter, press: Any, ids: Sequence[int], full: Sequence[Tensor]) -> list[Tensor]:
    """(kv_head, key) per layer: what the press leaves of the full cache, or what it does not mask."""
    cut = keys(adapter, ids, press)  # before the masks are read: this is what sets them
    return [_kept(*found) for found in zip(adapter.attentions, full, cut, strict=True)]


def _kept(attention: Any, full: Tensor, cut: Tensor) -> Tensor:
    masked, attention.masked_key_indices = getattr(attention, "masked_key_indices", None), None
    if masked is not None:
        kept = torch.ones(full.shape[:2], dtype=torch.bool)
        kept[masked[1], masked[2]] = False
        return kept
    same = torch.stack([(keys.unsqueeze(1) == left).all(dim=-1) for keys, left in zip(full, cut, strict=True)])
    assert (same.sum(dim=1) == 1).all(), "every key that is left is found once"
    return same.any(dim=-1)


def we_keep(adapter: Adapter, configs: Sequence[EvictionConfig], ids: Sequence[int]) -> list[list[Tensor]]:
    """(kv_head, key) per configuration and layer."""
    read = prefill(adapter, ids, configs, Resources(), "s").statistics
    found: list[list[Tensor]] = [[] for _ in configs]
    for layer in range(len(adapter.layers)):
        for group in ranking_groups(configs, read.scorer(layer), len(ids)):
            for place, kept in zip(group.config_indices, group.kept_sets().kept, strict=True):
                found[place].append(kept)
    return found


def check(
    adapter: Adapter,
    budget: int,
    ids: Sequence[int],
    names: Sequence[str] = tuple(SYSTEMS),
    press: dict[str, Any] = MappingProxyType({}),  # type: ignore[assignment]
    **choices: Any,
) -> dict[str, Tensor]:
    """Equal to the entry, for all of these systems; what is kept, (layer, kv_head, key)."""
    configs = [
        configuration(budget, preset="kvpress", policy=policy, selection=selection, **choices)
        for _, policy, selection in (SYSTEMS[name] for name in names)
    ]
    found, full = {}, keys(adapter, ids)
    for name, ours in zip(names, we_keep(adapter, configs, ids), strict=True):
        theirs = torch.stack(press_keeps(adapter, SYSTEMS[name][0](1 - budget / len(ids), **press), ids, full))
        found[name] = torch.stack(ours)
        assert torch.equal(found[name], theirs), f"{name}: {(found[name] != theirs).sum()} entries differ"
        assert int(theirs.sum()) == len(adapter.layers) * adapter.kv_heads * budget
    return found


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("tokens", "budget"), [(512, 96), (512, 128), (512, 480), (1024, 160), (1024, 600)])
def test_every_system_keeps_what_kvpress_keeps(tokens: int, budget: int, heads: tuple[int, int]) -> None:
    found = check(tiny(*heads), budget, token_ids(tokens, seed=tokens))
    for name, critical in (("SnapKV", "CriticalKV"), ("AdaKV", "CriticalAdaKV")):
        assert not torch.equal(found[name], found[critical]), "the second stage chooses otherwise"


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9, 1.0])
def test_the_guarantee_is_kvpress_guarantee(share: float) -> None:
    names, adapter, ids = ("AdaKV", "CriticalAdaKV"), tiny(4, 4), token_ids(1024, seed=1024)
    found = check(adapter, 384, ids, names, press={"alpha_safeguard": share}, floor=share)
    lowest = int(found["AdaKV"].sum(dim=-1).min())
    assert lowest == int(384 * share) if share >= 0.9 else lowest < 345, "0.9 raises what some head would keep"


def test_the_pyramid_falls_back_where_kvpress_does() -> None:
    adapter, ids = tiny(4, 4), token_ids(1024, seed=1024)
    level, line = (check(adapter, budget, ids, ("PyramidKV",))["PyramidKV"].sum(dim=-1)[:, 0] for budget in (384, 600))
    assert level.tolist() == [384] * LAYERS, "on a line the last layer would keep fewer than its window"
    assert line.tolist() == [960, 780, 600, 420, 240]


@pytest.mark.real_model
def test_the_embedded_model_keeps_what_kvpress_keeps() -> None:
    adapter = load_model("smollm2-135m-q4_1", device="cpu", dtype="float32")
    ids = adapter.tokenizer(" ".join(sentences()[:200]), add_special_tokens=False)["input_ids"][:512]
    check(adapter, 384, ids)


@pytest.mark.parametrize(("name", "choice"), [("AdaKV", {"safeguard": "mixture"}), ("PyramidKV", {"line": "prefix"})])
def test_the_other_choice_does_not_keep_what_kvpress_keeps(name: str, choice: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="entries differ"):
        check(tiny(4, 4), 384, token_ids(1024, seed=1024), (name,), **choice)

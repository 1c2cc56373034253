"""Every name that kvpress 0.5.5 exports: what docs/how-to/kvpress.md says of it is what happens."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import pytest
import torch
from kvpress.presses.expected_attention_with_stats import ExpectedAttentionStats
from kvpress.presses.fastkvzip_press import FastKVzipGate
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from transformers import DynamicCache

from perturbkv.configs.resources import Resources
from perturbkv.errors import ConfigError, PerturbkvError
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import load_model
from perturbkv.pipeline.variants.external_caches import ExternalCache, read_plain_caches
from perturbkv.selection.grid import configuration
from perturbkv.selection.policies import kvpress as presses
from perturbkv.selection.resolved_config import resolve
from tests.support.folders import model_folder
from tests.support.models import tiny_adapter, token_ids
from tests.support.resolved import prefill

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "kvpress.md"
ROW = re.compile(r"^\| `(\w+)` \| ([\w, ]+) \|(.*)\|$", re.MULTILINE)
TOLD = {name: (verdict, note) for name, verdict, note in ROW.findall(PAGE.read_text())}
LAYERS, HEADS, KV_HEADS, D_HEAD, N, B = 3, 4, 2, 16, 256, 96
INNER = "(SnapKVPress(window_size=32))"
WRITTEN = {
    **dict.fromkeys(("AdaKVPress", "CriticalAdaKVPress", "CriticalKVPress", "ChunkKVPress"), INNER),
    **dict.fromkeys(("PrefillDecodingPress", "EntropyGatedChunkKVPress", "KeyRerotationPress", "MergingPress"), INNER),
    **dict.fromkeys(("DecodingPress", "CAMPress", "CompressionRatioDecodingPress"), INNER),
    "SnapKVPress": "(window_size=32)",
    "PyramidKVPress": "(window_size=16)",
    "BlockPress": "(KnormPress())",
    "ChunkPress": "(SnapKVPress(window_size=32), chunk_length=100)",
    "DMSPress": "(KnormPress(), threshold=-9)",
    "PerLayerCompressionPress": '(SnapKVPress(window_size=32), compression_ratios="0.5, 0.25, 0.75")',
    "SimLayerKVPress": "(lazy_threshold=0.0, n_recent=64)",
    "ThinKPress": "(key_channel_compression_ratio=0.5)",
    "KVzipPress": "(chunk_size=100)",
    "DuoAttentionPress": "(head_compression_ratio=0.5)",
}  # fmt: skip
OTHERWISE = {
    "ChunkKVPress": 76 * 6,  # ⌊13 · 96/256⌋ = 4 of 13 chunks of 20, one of them the last, of 16
    "ChunkPress": (2 * 37 + 21) * 6,  # ⌊100 · 3/8⌋ twice, ⌊56 · 3/8⌋
    "PerLayerCompressionPress": (128 + 192 + 64) * 2,
    "SimLayerKVPress": (4 + 63) * 6,
    "DuoAttentionPress": 3 * (N + 8 + 32),
}
"""Entries over all layers and heads, by hand, of presses that do not keep b."""


@pytest.fixture
def adapter() -> Adapter:
    return tiny_adapter("llama", HEADS, KV_HEADS, layers=LAYERS, d_head=D_HEAD, positions=1100)


def full_cache(adapter: Adapter, ids: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cache = DynamicCache()
    with torch.inference_mode():
        adapter.model(torch.tensor([ids]), past_key_values=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def kept(adapter: Adapter, written: str, ids: tuple[int, ...] = token_ids(N, seed=1), budget: int = B) -> torch.Tensor:
    """(layer, kv_head, key): as the pipeline gets it."""
    cache = read(adapter, written, ids, budget)
    assert cache.is_kept_set, "it holds the full cache's entries"
    return torch.stack([cache.kept_set(layer, *entries) for layer, entries in enumerate(full_cache(adapter, ids))])


def read(adapter: Adapter, written: str, ids: tuple[int, ...] = token_ids(N, seed=1), budget: int = B) -> ExternalCache:
    config = resolve(configuration(budget, policy=f"kvpress:{written}"))
    (cache,) = read_plain_caches(adapter, [config], ids, prefill(adapter, ids, [config], Resources(), "s")).values()
    return cache


def test_the_page_has_every_name_that_kvpress_exports() -> None:
    assert kvpress.__all__ and set(TOLD) == set(kvpress.__all__)
    assert {name for name, (verdict, _) in TOLD.items() if verdict == "refused"} == set(presses.REFUSED)


@pytest.mark.parametrize("name", [name for name, (verdict, _) in TOLD.items() if verdict in ("works", "masks")])
def test_a_press_that_works_keeps_what_it_says(name: str, adapter: Adapter) -> None:
    found = kept(adapter, name + WRITTEN.get(name, ""))
    if name == "DMSPress":  # by its threshold: norms of keys below 9, but for the last 128
        norms = torch.stack([keys.norm(dim=-1) for keys, _ in full_cache(adapter, token_ids(N, seed=1))])
        wanted = (norms <= 9) | (torch.arange(N) >= N - 128)
        assert torch.equal(found, wanted) and 0 < int(found.sum()) < found.numel()
    elif name == "KVComposePress":  # one count for all heads of a layer, b on the average, the first layer rounded up
        assert (found.sum(dim=-1)[:, 0] == found.sum(dim=-1)[:, 1]).all()
        assert abs(int(found.sum()) - LAYERS * KV_HEADS * B) <= LAYERS * KV_HEADS
    else:
        assert int(found.sum()) == OTHERWISE.get(name, LAYERS * KV_HEADS * B)


@pytest.mark.parametrize("name", presses.REFUSED)
def test_a_press_that_is_refused_says_why_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^press '{name}' cannot be measured: it .* \(docs/how-to/kvpress.md\)$"):
        configuration(B, policy=f"kvpress:{name}{WRITTEN.get(name, '')}")


@pytest.mark.parametrize("name", [name for name, (verdict, _) in TOLD.items() if verdict == "entries of its own"])
def test_a_press_that_changes_keys_or_values_has_entries_of_its_own(name: str, adapter: Adapter) -> None:
    cache = read(adapter, name + WRITTEN[name])
    assert not cache.is_kept_set and not cache.is_called and cache.reads_plainly
    assert all(keys.shape[1] == (N if name == "ThinKPress" else B) for keys, _ in cache.layers)


def test_what_decodes_otherwise_is_refused_where_it_is_a_parameter(adapter: Adapter) -> None:
    with pytest.raises(ConfigError, match="compresses again while it decodes"):
        kept(adapter, "DMSPress(KnormPress(), threshold=-9, decoding=true)")
    with pytest.raises(ConfigError, match="press 'DecodingPress' cannot be measured"):
        kept(adapter, "PrefillDecodingPress(SnapKVPress(), decoding_press=DecodingPress(KnormPress()))")


def test_a_replay_that_stays_in_the_cache_is_unreadable(adapter: Adapter) -> None:
    with pytest.raises(ConfigError, match=r"KVComposePress\(.*\)': .*layer 0 keeps 512 entries, more than the 256"):
        kept(adapter, "KVComposePress(structured=false)")


@pytest.mark.parametrize("name", [name for name, (verdict, _) in TOLD.items() if verdict.startswith("by name")])
def test_a_press_that_finds_nothing_by_the_models_name_says_so_in_one_line(name: str, adapter: Adapter) -> None:
    with pytest.raises(PerturbkvError, match=rf"^policy 'kvpress:{name}.*': reading the prompt raises ") as caught:
        kept(adapter, name + WRITTEN.get(name, ""))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 450


def random_gates(self: Any, model: Any) -> None:
    torch.manual_seed(0)
    self.gates = [
        FastKVzipGate(index, HEADS * D_HEAD, KV_HEADS, HEADS // KV_HEADS, torch.float32) for index in range(LAYERS)
    ]
    for parameter in (parameter for gate in self.gates for parameter in gate.parameters()):
        torch.nn.init.normal_(parameter)


def random_surrogate(name: str) -> KVzapModel:
    torch.manual_seed(0)
    return KVzapModel(KVzapConfig(input_dim=HEADS * D_HEAD, output_dim=KV_HEADS, n_modules=LAYERS))


PUBLISHED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "QFilterPress": (kvpress.QFilterPress, "load_q_filters", lambda name: torch.randn(LAYERS, KV_HEADS, D_HEAD)),
    "DuoAttentionPress": (
        kvpress.DuoAttentionPress, "load_attention_pattern",
        lambda model: (8, 32, np.arange(LAYERS * KV_HEADS).reshape(LAYERS, KV_HEADS)[:, ::-1] % 2),
    ),
    "LUKVPress": (
        kvpress.LUKVPress, "_load_budget_curves",
        lambda self, model: np.full((99, LAYERS, KV_HEADS), 1 - B / N) + np.array([0.1, -0.1]),
    ),
    "KVzapPress": (KVzapModel, "from_pretrained", random_surrogate),
    "FastKVzipPress": (kvpress.FastKVzipPress, "post_init_from_model", random_gates),
}  # fmt: skip
"""What kvpress would load by the model's name, drawn at random: press -> who loads it, by which name, instead."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_press_that_finds_what_it_needs_works(name: str, adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, loader, instead = PUBLISHED[name]
    loads = instead if loader in ("_load_budget_curves", "post_init_from_model") else staticmethod(instead)
    monkeypatch.setattr(owner, loader, loads)
    found = kept(adapter, name + WRITTEN.get(name, ""))
    assert int(found.sum()) == OTHERWISE.get(name, LAYERS * KV_HEADS * B)


@pytest.mark.parametrize("name", ["KVzipPress", "KVgradPress"])
def test_a_press_that_replays_the_prompt_works_on_a_models_folder(name: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", heads=HEADS, kv_heads=KV_HEADS, layers=LAYERS, d_head=D_HEAD, positions=1100)
    found = kept(load_model(str(folder), device="cpu", dtype="float32"), name)
    assert int(found.sum()) == LAYERS * KV_HEADS * B
    assert found[..., :4].all(), "sinks stay"


def test_statistics_of_a_folder_are_read(adapter: Adapter, tmp_path: Path) -> None:
    held = ExpectedAttentionStats(LAYERS, HEADS, D_HEAD, "d", "m", 1, 1, 4)
    torch.nn.init.normal_(held.query_mean)
    held.save_pretrained(tmp_path)
    found = kept(adapter, f'ExpectedAttentionStatsPress(stats_folder="{tmp_path}")')
    assert int(found.sum()) == LAYERS * KV_HEADS * B


def traces_of(adapter: Adapter) -> list[Any]:
    """Everything that a press could have left on a model."""
    for attention in adapter.attentions:
        vars(attention).pop("masked_key_indices", None)  # set by every prefill since kvpress was imported
    modules = dict(adapter.model.named_modules())
    return [
        sorted(modules),
        {name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in modules.items()},
        {name: {key for key in vars(module) if not key.startswith("_")} for name, module in modules.items()},
        adapter.config._attn_implementation,
        [name for name, parameter in adapter.model.named_parameters() if parameter.requires_grad],
        {name: value.clone() for name, value in adapter.model.state_dict().items()},
    ]


@pytest.mark.parametrize(
    "name", ["SnapKVPress", "AdaKVPress", "KVComposePress", "DMSPress", "KVzipPress", "KVgradPress"]
)
def test_the_model_is_left_as_it_was(name: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", heads=HEADS, kv_heads=KV_HEADS, layers=LAYERS, d_head=D_HEAD, positions=1100)
    adapter = load_model(str(folder), device="cpu", dtype="float32")
    ids = token_ids(N, seed=1)
    full_cache(adapter, ids)
    before = copy.copy(traces_of(adapter))
    read(adapter, name + WRITTEN.get(name, ""))
    *after, weights = traces_of(adapter)
    assert after == before[:-1]
    assert all(torch.equal(weights[name], value) for name, value in before[-1].items())
    with pytest.raises(ConfigError):
        read(adapter, "SnapKVPress", ids[:10], 8)  # fails while it runs
    assert traces_of(adapter)[:-1] == before[:-1]


def test_random_presses_are_repeatable_and_leave_others_numbers_alone(adapter: Adapter) -> None:
    torch.manual_seed(3)
    first, number = kept(adapter, "RandomPress"), torch.rand(1)
    second = kept(adapter, "RandomPress")
    assert torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(number, torch.rand(1))
    assert not torch.equal(first, kept(adapter, "RandomPress", ids=token_ids(N, seed=2)))


def test_the_ratio_means_the_budget_to_the_entry() -> None:
    for tokens in (7, 100, 182, 1000, 4099):
        for budget in range(1, tokens + 1, max(1, tokens // 97)):
            press = kvpress.KnormPress()
            assert presses.set_ratio(press, tokens, budget)
            assert int(tokens * (1 - press.compression_ratio)) == budget and 0 <= press.compression_ratio < 1
            assert press.compression_ratio == pytest.approx(1 - budget / tokens, abs=1e-12)


def test_every_budget_is_kept_to_the_entry(adapter: Adapter) -> None:
    """1 − b / n alone would lose an entry here: ⌊182 · (1 − (1 − 49 / 182))⌋ = 48."""
    assert int(182 * (1 - (1 - 49 / 182))) == 48
    assert int(kept(adapter, "KnormPress", ids=token_ids(182), budget=49).sum()) == 49 * LAYERS * KV_HEADS

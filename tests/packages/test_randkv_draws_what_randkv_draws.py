"""The policy `randkv` keeps the entries that randkv 0.1.0 keeps, of one cache and of one that a model decodes into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from randkv import RandKVConfig, RandomEvictionPolicy

import perturbkv as pk
from perturbkv.pipeline.answers import compression
from perturbkv.scoring.compute import layer_scores
from perturbkv.selection.layer_statistics import LayerStatistics
from tests.packages.conftest import tiny
from tests.support.layers import layer_view
from tests.support.models import token_ids
from tests.support.resolved import answer, asked, select


def config(prompt: int, budget: int, buffer: int, seed: int = 0) -> pk.EvictionConfig:
    policy = f"randkv(prompt={prompt}, seed={seed})"
    (chosen,) = pk.grid(budget + buffer, policy=policy, selection="attention", granularity="kv", window=buffer)
    return chosen


def ours(chosen: pk.EvictionConfig, heads: int, entries: int, sample: str, layer: int) -> list[tuple[int, ...]]:
    seen = layer_view(heads, heads, entries, 0, window=chosen.window, layer=layer, sample=sample)
    score = asked(chosen).score
    prefix = entries - chosen.window
    statistics = LayerStatistics(layer_scores(seen, [score], 1)[score], seen.norms[:, :prefix], heads, layer, 9, sample)
    return [tuple(row.nonzero().flatten().tolist()) for row in select(chosen, statistics, entries).kept]


@pytest.mark.parametrize("seed", [0, 42])
@pytest.mark.parametrize("buffer", [1, 8, 64])
@pytest.mark.parametrize(("prompt", "budget"), [(0, 40), (7, 40), (7, 64), (30, 64), (64, 64), (5, 300)])
def test_of_one_cache_it_keeps_what_randkv_keeps(prompt: int, budget: int, buffer: int, seed: int) -> None:
    theirs = RandomEvictionPolicy(RandKVConfig(budget=budget, buffer_size=buffer, seed=seed))
    chosen = config(prompt, budget, buffer, seed)
    for entries in (budget + buffer + 1, budget + 2 * buffer, budget + 3 * buffer + 5):
        for layer in range(3):
            expected = theirs.select_heads(
                range(entries), prompt_length=prompt, num_kv_heads=4, layer=layer, request_id="p/3"
            )
            assert ours(chosen, 4, entries, "p/3", layer) == list(expected)


def test_of_few_among_very_many_it_keeps_others_by_the_same_law() -> None:
    """Python draws these without a pool; each entry stays as often."""
    entries, runs, budget = 201, 400, 20
    theirs = RandomEvictionPolicy(RandKVConfig(budget=budget, buffer_size=1))
    chosen, counts = config(0, budget, 1), torch.zeros(2, entries)
    for run in range(runs):
        expected = theirs.select_heads(range(entries), prompt_length=0, num_kv_heads=4, request_id=f"p/{run}")
        for side, sets in enumerate((ours(chosen, 4, entries, f"p/{run}", 0), expected)):
            for kept in sets:
                counts[side, list(kept)] += 1
    draws, share = 4 * runs, budget / (entries - 1)
    spread = (draws * share * (1 - share)) ** 0.5
    assert (counts[:, :-1].sum(dim=1) == budget * draws).all()
    assert (counts[:, :-1] - draws * share).abs().max() < 4.5 * spread
    assert not torch.equal(*counts)


def test_while_a_model_decodes_it_keeps_what_randkv_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every compression is randkv's of the positions that the one before left."""
    prompt, budget, buffer, tokens = 20, 26, 6, 60
    masks: list[Any] = []
    plain = compression.select

    def watched(*given: Any) -> Any:
        found = plain(*given)
        masks.append(found.kept)
        return found

    monkeypatch.setattr(compression, "select", watched)
    monkeypatch.setattr("perturbkv.pipeline.answers.generation.end_tokens", lambda adapter: set())
    adapter, chosen = tiny(), config(prompt, budget, buffer)
    found = answer(adapter, pk.Prompt("p", token_ids(prompt), 0), [chosen], tokens, compress_over=budget + 2 * buffer)
    layers = len(adapter.layers)
    assert len(found.compressions) >= 4
    assert len(masks) == layers * len(found.compressions)
    theirs = RandomEvictionPolicy(RandKVConfig(budget=budget, buffer_size=buffer))
    held = {(layer, head): tuple(range(prompt)) for layer in range(layers) for head in range(adapter.kv_heads)}
    seen = 0
    for place, one in enumerate(found.compressions):
        for (layer, head), positions in held.items():
            last = max(positions)
            grown = (*positions, *range(last + 1, last + 1 + len(masks[layers * place][0]) - len(positions)))
            expected = theirs.select(
                grown, prompt_length=prompt, layer=layer, kv_head=head, request_id=f"p/{one.generated}/0"
            )
            kept = masks[layers * place + layer][head].nonzero().flatten().tolist()
            held[layer, head] = tuple(grown[entry] for entry in kept)
            assert held[layer, head] == expected
            seen += 1
    assert seen >= 4 * layers * adapter.kv_heads

"""Scores of all queries, and of centres from a file, where caches are compressed again: against naive runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample import one_sample
from perturbkv.selection import compatibility
from tests.oracle import selection
from tests.oracle.scores import rotated
from tests.pipeline.test_caches_are_compressed_while_decoding import Followed, N, given, run
from tests.pipeline.test_long_generation_is_compressed import BUDGET, LIMIT, PROMPT, TOKENS, WINDOW, config
from tests.support.models import exact_adapter, token_ids
from tests.support.resolved import answer, trace_sample

STEPS, EVERY, FARTHEST = 30, 7, 64


class Summed(Followed):
    """Adds up what each query gave each entry that was held then; what an entry had goes with it."""

    def __init__(self, adapter: Adapter, chosen: EvictionConfig) -> None:
        super().__init__(adapter, chosen)
        self.had: list[list[dict[int, float]]] = [[{} for _ in layer] for layer in self.held]

    def _step(self, token: int) -> np.ndarray:
        now = self.decoder.position
        logits = super()._step(token)
        for layer, heads in enumerate(self.held):
            for head, held in enumerate(heads):
                seen = [place for place in held if place <= now]
                kept_keys = self.decoder.keys[layer][head * self.decoder.kv_heads // self.decoder.heads]
                keys = [kept_keys[place] for place in seen]
                weights = self._softmax(layer, head, self.queries[layer][-1][head], keys)
                before = self.had[layer][head]
                self.had[layer][head] = {
                    place: before.get(place, 0.0) + weight for place, weight in zip(seen, weights, strict=False)
                }
        return logits

    def _votes(self, layer: int) -> tuple[np.ndarray, np.ndarray, int]:
        _, norms, longest = super()._votes(layer)
        votes = np.zeros_like(norms)
        for row, had, held in zip(votes, self.had[layer], self.held[layer], strict=True):
            row[longest - len(held) :] = [had[place] / self.decoder.position for place in held[:-WINDOW]]
        return votes, norms, longest

    def _budgets(self, pooled: list[list[float]], longest: int) -> list[int]:
        even = [BUDGET - WINDOW] * len(pooled)
        return even if self.config.policy.name == "h2o" else super()._budgets(pooled, longest)


class Centred(Followed):
    """Scores what is held by each head's centre, seen from later positions."""

    centres: dict[str, Any]
    frequencies: np.ndarray

    def _take_all(self, layer: int, votes: np.ndarray, norms: np.ndarray, longest: int) -> list[float]:
        return [self._moved(layer, head, self._best(layer, head)) for head in range(self.decoder.heads)]

    def _best(self, layer: int, head: int) -> list[int]:
        held, pairs = self.held[layer][head], len(self.frequencies)
        mean, size = (np.array(self.centres[f"{layer}-{head}"][part]) for part in ("mean", "size"))
        row = []
        for key in self._entries(layer, head)[0][:-WINDOW]:
            turns = [2**power for power in range(FARTHEST.bit_length())]
            ahead = [rotated(mean, self.decoder.position + turn, self.frequencies, 1.0) @ key for turn in turns]
            strayed = [
                (size[f] - abs(complex(mean[f], mean[f + pairs]))) * abs(complex(key[f], key[f + pairs]))
                for f in range(pairs)
            ]
            row.append(float(np.mean(ahead)) + sum(strayed))
        kept = selection.top(dict(enumerate(row)), BUDGET - WINDOW)
        return sorted([*(held[place] for place in kept), *held[-WINDOW:]])


def kept_by(adapter: Adapter, chosen: EvictionConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tokens read -> per layer the masks (kept_set, key) of what is held after the compression then."""
    seen: list[Any] = []
    original = one_sample.measure_layer

    def watched(sample: Any, index: int, groups: Any, later: Any, finite: Any) -> Any:
        seen[:] = [later]
        return original(sample, index, groups, later, finite)

    monkeypatch.setattr(one_sample, "measure_layer", watched)
    trace_sample(adapter, given(STEPS), run(chosen, steps=STEPS, text="given", compress_every=EVERY))
    return {read: [one.kept for one in rows[0]] for read, rows in seen[0].items()}


def assert_sets_equal(naive: Followed, found: dict[int, Any]) -> None:
    notes = naive.follow(token_ids(STEPS + 1, seed=3)[:STEPS], EVERY)
    assert sorted(found) == [7, 14, 21, 28]
    for read, layers in found.items():
        for layer, masks in enumerate(layers):
            for head, mask in enumerate(masks):
                assert np.flatnonzero(mask.numpy()).tolist() == notes[read]["held"][layer][head], (read, layer, head)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize(("policy", "recent"), [("h2o", BUDGET // 2), ("h2o(recent=0)", 0)])
def test_h2o_goes_on_with_its_sums(family: str, policy: str, recent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, chosen = exact_adapter(family, 4, 2, seed=1), config(policy)
    found = kept_by(adapter, chosen, monkeypatch)
    assert_sets_equal(Summed(adapter, replace(chosen, protect_recent=recent)), found)


def test_sums_go_on_where_heads_keep_unequal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = exact_adapter("llama", 4, 2, seed=1)
    found = kept_by(adapter, config("adakv(by=h2o())"), monkeypatch)
    assert len({int(mask.sum()) for mask in found[28][0]}) > 1
    assert_sets_equal(Summed(adapter, config("adakv(pool=none)")), found)


def test_an_answer_goes_on_with_the_sums_of_its_prompt() -> None:
    adapter, chosen = exact_adapter("llama", 4, 2, seed=1), config("h2o(recent=0)")
    naive = Summed(adapter, chosen)
    expected = naive.generate()
    beside = config("snapkv")  # compressed at the same tokens, by its window alone
    found = answer(adapter, PROMPT, (beside, chosen), TOKENS, compress_over=LIMIT)
    assert found.evicted[1] == expected[: len(found.evicted[1])]
    own = [one for one in found.compressions if one.config == 1]
    assert len(own) >= 2
    for one, (generated, before, moved) in zip(own, naive.compressions, strict=False):
        assert (one.generated, one.before) == (generated, before)
        np.testing.assert_allclose(one.perturbation.numpy(), moved, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_triattention_goes_on_with_the_centres_of_a_file(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, draw = exact_adapter(family, 4, 2, seed=1), np.random.default_rng(2)
    pairs = len(adapter.frequencies)
    centres = {
        f"{layer}-{head}": {"mean": draw.normal(size=2 * pairs).tolist(), "size": draw.uniform(2, 4, pairs).tolist()}
        for layer in range(len(adapter.layers))
        for head in range(adapter.heads)
    }
    (tmp_path / "centres.json").write_text(json.dumps(centres))
    policy = f"triattention(file={tmp_path / 'centres.json'}, farthest={FARTHEST})"
    chosen = config(policy, selection="attention")
    naive = Centred(adapter, chosen)
    naive.centres, naive.frequencies = centres, np.asarray(adapter.frequencies, dtype=np.float64)
    assert_sets_equal(naive, kept_by(adapter, chosen, monkeypatch))


def test_without_a_file_the_centres_are_the_prompts_own() -> None:
    with pytest.raises(ConfigError, match="'triattention' looks at what decoding forgets"):
        compatibility.check_compressible(config("triattention", selection="attention"))


def test_the_prompt_is_what_it_is() -> None:
    assert len(given(STEPS).token_ids) == N

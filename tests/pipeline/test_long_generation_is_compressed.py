"""Compressing a growing cache again, step by step against a naive run that masks what was evicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.selections import UNION, reduction, shares_layers
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers import generation
from perturbkv.pipeline.answers.compression import mean_entries
from perturbkv.scoring.score import Score
from perturbkv.scoring.scores.snapkv import SnapKV
from perturbkv.selection import compatibility
from perturbkv.selection.grid import configuration
from perturbkv.selection.policies import registry
from perturbkv.selection.policies.base import Policy
from tests.oracle import policies, selection, shared, theory
from tests.oracle.decoder import Decoder
from tests.support.configs import flat
from tests.support.models import GATED, MIXED, exact_adapter, tiny_adapter, token_ids, wide_adapter
from tests.support.resolved import answer, prefill_and_evict

PROMPT = Prompt("s", token_ids(14, seed=4), 0)
BUDGET, LIMIT, WINDOW, TOKENS = 12, 24, 4, 40


def config(policy: str, **fields: object) -> EvictionConfig:
    return configuration(BUDGET, policy=policy, **{"window": WINDOW, "kernel": 3, **fields})


class Naive:
    """Lists of held positions per layer and query head; every kept set is a query head's."""

    def __init__(self, adapter: Adapter, chosen: EvictionConfig) -> None:
        self.decoder, self.config = Decoder(adapter.model), chosen
        self.held = [[list(range(len(PROMPT.token_ids))) for _ in range(adapter.heads)] for _ in adapter.layers]
        self.queries: list[list[np.ndarray]] = [[] for _ in adapter.layers]
        self.gates: list[list[np.ndarray]] = [[] for _ in adapter.layers]
        self.compressions: list[tuple[int, float, np.ndarray]] = []
        self.scale = self.decoder.scale

    def generate(self) -> list[int]:
        for token in PROMPT.token_ids:
            logits = self._step(token)
        made = [int(np.argmax(logits))]
        while len(made) < TOKENS:
            lengths = [len(held) for layer in self.held for held in layer]
            if sum(lengths) / len(lengths) > LIMIT:
                self.compressions.append((len(made), sum(lengths) / len(lengths), np.array(self._compress())))
            logits = self._step(made[-1])
            made.append(int(np.argmax(logits)))
        return made

    def _step(self, token: int) -> np.ndarray:
        now = self.decoder.position
        masks = [np.array([[place in held for place in range(now)] for held in layer]) for layer in self.held]
        record = self.decoder.step(token, masks)
        for layer, query in enumerate(record.query):
            self.queries[layer].append(query)
            self.gates[layer].append(record.gates[layer].reshape(-1))
        if now >= len(PROMPT.token_ids):
            for layer in self.held:
                for held in layer:
                    held.append(now)
        return record.logits

    def _compress(self) -> list[list[float]]:
        """Select for every head among what it holds; returns each layer's and head's isolated perturbation."""
        return [self._take_all(layer, *self._votes(layer)) for layer in range(len(self.held))]

    def _votes(self, layer: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Each head's votes and norms of what it holds before the window, and how many entries the longest holds."""
        decoder = self.decoder
        longest = max(len(held) for held in self.held[layer])
        prefix = longest - WINDOW
        votes, norms = np.zeros((decoder.heads, prefix)), np.zeros((decoder.heads, prefix))
        for head, held in enumerate(self.held[layer]):
            keys, values = self._entries(layer, head)
            first = longest - len(held)
            queries = [self.queries[layer][position][head] for position in held[-WINDOW:]]
            for query, position in zip(queries, held[-WINDOW:], strict=True):
                seen = [place for place in held if place <= position]
                weights = self._softmax(layer, head, query, keys[: len(seen)])
                for place, weight in enumerate(weights[: len(seen)]):
                    if first + place < prefix:
                        votes[head, first + place] += weight / WINDOW
            ungated = self.config.selection.options.get("gate") == "none"
            mean = 1.0 if ungated else np.mean(np.abs(self.gates[layer][-WINDOW:]), axis=0)
            columns = theory.head_slice(decoder.w_o(layer) * mean, head, decoder.d_value)
            for place, value in enumerate(values[:-WINDOW]):
                length = theory.l2 if flat(self.config).norm == "l2" else theory.l1
                norms[head, first + place] = length(value @ columns)
        return votes, norms, longest

    def _take_all(self, layer: int, votes: np.ndarray, norms: np.ndarray, longest: int) -> list[float]:
        return [self._take(layer, head, votes, norms, longest) for head in range(self.decoder.heads)]

    def _take(self, layer: int, head: int, votes: np.ndarray, norms: np.ndarray, longest: int) -> float:
        held, prefix = self.held[layer][head], longest - WINDOW
        first = longest - len(held)
        pooled = [theory.pool(list(row), flat(self.config).pool, flat(self.config).kernel) for row in votes]
        lengths = self._lengths if head else [len(one) for one in self.held[layer]]
        self._lengths = lengths
        real = [
            [score if place >= longest - lengths[other] else -np.inf for place, score in enumerate(row)]
            for other, row in enumerate(pooled)
        ]
        budget = min(self._budgets(real, longest)[head], len(held) - WINDOW)
        ends = (first + self.config.protect_first, longest - self.config.protect_recent)
        forced = [place for place in range(first, prefix) if place < ends[0] or place >= ends[1]]
        places, budget = [place for place in range(first, prefix) if place not in forced], budget - len(forced)
        count = int(flat(self.config).alpha * budget + 1e-9)
        stage1 = selection.top({place: pooled[head][place] for place in places}, count)
        rest = {place: votes[head][place] * norms[head][place] for place in places if place not in stage1}
        kept = sorted([*forced, *stage1, *selection.top(rest, budget - count), *range(prefix, longest)])
        return self._moved(layer, head, [held[place - first] for place in kept])

    def _moved(self, layer: int, head: int, positions: list[int]) -> float:
        held = self.held[layer][head]
        keys, values = self._entries(layer, head)
        query = self.queries[layer][-1][head]
        weights = self._softmax(layer, head, query, keys)
        columns = theory.head_slice(self.decoder.w_o(layer) * self.gates[layer][-1], head, self.decoder.d_value)
        stays = [place in positions for place in held]
        if len(weights) > len(held):  # the sink: an entry that always stays, without a value
            stays, values = [*stays, True], [*values, np.zeros(self.decoder.d_value)]
        moved = theory.perturbation(weights, stays, values, columns)
        self.held[layer][head] = positions
        return moved

    def _softmax(self, layer: int, head: int, query: np.ndarray, keys: list[np.ndarray]) -> list[float]:
        """Of entries and, behind them, of the head's sink where there is one."""
        sinks = self.decoder.sinks(layer)
        beside = [] if sinks is None else [float(sinks[head])]
        return theory.softmax([*(self.scale * float(query @ key) for key in keys), *beside])

    def _budgets(self, pooled: list[list[float]], longest: int) -> list[int]:
        if self.config.policy.name == "snapkv":
            return [BUDGET - WINDOW] * len(pooled)
        counts = policies.budgets(flat(self.config), pooled, longest, 0, 1, None)
        assert sum(counts) == (BUDGET - WINDOW) * len(pooled)
        return counts

    def _entries(self, layer: int, head: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        kv_head = head * self.decoder.kv_heads // self.decoder.heads
        held = self.held[layer][head]
        keys, values = self.decoder.keys[layer][kv_head], self.decoder.values[layer][kv_head]
        return [keys[place] for place in held], [values[place] for place in held]


class NaiveBlocks(Naive):
    """Whole blocks of what is held: what was kept of the prompt are whole blocks, and what came after lies behind."""

    def _take_all(self, layer: int, votes: np.ndarray, norms: np.ndarray, longest: int) -> list[float]:
        held = self.held[layer]
        sets = selection.select(self.config, votes, norms, norms, longest, self.decoder.kv_heads, euclidean=norms)
        return [self._moved(layer, head, [held[head][place] for place in kept]) for head, (kept, _) in enumerate(sets)]


class NaiveShared(Naive):
    """Sets that heads and layers share: all layers' votes first."""

    def _compress(self) -> list[list[float]]:
        votes = [self._votes(layer) for layer in range(len(self.held))]
        rows = [shared.Layer(each, norms, norms) for each, norms, _ in votes]
        sets = shared.select(self.config, rows, votes[0][2], self.decoder.kv_heads)
        kept = [[sets[layer, head][0] for head in range(self.decoder.heads)] for layer in range(len(votes))]
        return [
            [self._moved(layer, head, [self.held[layer][head][i] for i in own]) for head, own in enumerate(each)]
            for layer, each in enumerate(kept)
        ]


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize(
    "granularity",
    ["layer", "layer(block=4)", "kv(block=4)", "query(block=4, block_score=max)", "kv(reduce=union)",
     "layer(reduce=union, block=4)", "head", "head(reduce=max)", "model(block=4)", "model(reduce=union)"],
)  # fmt: skip
def test_whole_blocks_and_shared_sets_are_compressed_as_the_naive_run_does(granularity: str, norm: str) -> None:
    adapter, chosen = exact_adapter("llama", 4, 2, seed=1), config("snapkv", granularity=granularity, norm=norm)
    of_layers = shares_layers(chosen.granularity) or reduction(chosen.granularity) == UNION
    naive = (NaiveShared if of_layers else NaiveBlocks)(adapter, chosen)
    expected = naive.generate()
    found = answer(adapter, PROMPT, (chosen,), TOKENS, compress_over=LIMIT)
    assert found.evicted[0] == expected[: len(found.evicted[0])]
    assert len(found.compressions) >= 2
    for one, (generated, before, moved) in zip(found.compressions, naive.compressions, strict=False):
        assert (one.generated, one.before) == (generated, before)
        assert one.after == chosen.kept_entries(int(before)) <= BUDGET
        np.testing.assert_allclose(one.perturbation.numpy(), moved, rtol=1e-5)


def test_uneven_sets_of_whole_blocks_stay_in_whole_blocks() -> None:
    adapter = exact_adapter("llama", 4, 2, seed=1)
    for policy in ("adakv", "pyramidkv"):
        chosen = config(policy, granularity="kv(block=3)")
        found = answer(adapter, PROMPT, (chosen,), TOKENS, compress_over=LIMIT)
        assert len(found.compressions) >= 2
        assert all(one.after <= BUDGET for one in found.compressions)


CASES = (
    ("snapkv", {}),
    ("adakv", {}),
    ("snapkv", {"protect_first": 2, "protect_recent": 7}),
    ("adakv", {"selection": "two-stage(norm=l2)"}),
)


@pytest.mark.parametrize(
    ("family", "policy", "fields"),
    [*(pytest.param(family, *case, marks=[pytest.mark.slow] if family in MIXED and case != CASES[0] else [])
       for family in ("llama", "wide", *MIXED, GATED) for case in CASES),
     (GATED, "snapkv", {"selection": "two-stage(gate=none)"})],
)  # fmt: skip
def test_compressions_equal_the_naive_runs(family: str, policy: str, fields: dict[str, object]) -> None:
    adapter = wide_adapter(seed=1) if family == "wide" else exact_adapter(family, 4, 2, seed=1)
    chosen = config(policy, **fields)
    naive = Naive(adapter, chosen)
    expected = naive.generate()
    found = answer(adapter, PROMPT, (chosen,), TOKENS, compress_over=LIMIT)
    assert found.evicted[0] == expected[: len(found.evicted[0])]
    assert len(found.evicted[0]) > 30
    assert len(found.compressions) >= 2
    for one, (generated, before, moved) in zip(found.compressions, naive.compressions, strict=False):
        assert (one.config, one.generated, one.before) == (0, generated, before)
        np.testing.assert_allclose(one.perturbation.numpy(), moved, rtol=1e-5)


@pytest.mark.slow
def test_a_row_never_holds_more_than_the_limit_and_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[list[float]] = []
    original = generation._next_tokens

    def watched(adapter, cache, ids, check):  # type: ignore[no-untyped-def]
        following = original(adapter, cache, ids, check)
        held.append([mean_entries(cache, row) for row in range(cache.layers[0].batch)])
        return following

    monkeypatch.setattr(generation, "_next_tokens", watched)
    by_score = tuple(config(policy) for policy in ("snapkv", "pyramidkv", "adakv", "tova", "random"))
    configs = (*by_score, config("streaming-llm", selection="position"))
    adapter = tiny_adapter()
    monkeypatch.setattr(generation, "end_tokens", lambda adapter: set())
    found = answer(adapter, PROMPT, configs, 60, compress_over=LIMIT)
    rows = np.array(held)
    assert rows[-1, 0] == len(PROMPT.token_ids) + 59  # the full cache grows on
    assert rows[:, 1:].max() <= LIMIT + 1
    assert {one.config for one in found.compressions} == set(range(len(configs)))
    for one in found.compressions:
        assert one.before > LIMIT
        assert one.after == BUDGET
        assert ((one.retained_mass > 0) & (one.retained_mass <= 1 + 1e-12)).all()
        assert torch.isfinite(one.perturbation).all()


def test_every_value_norm_is_computed_as_the_run_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a compression too: with another kernel or another bound of memory they would be other numbers."""
    from perturbkv.pipeline.sample import prefill

    asked: list[tuple[int, str]] = []
    original = prefill.projected_value_norms

    def noted(value, w_o, chunk_bytes, kernel):  # type: ignore[no-untyped-def]
        asked.append((chunk_bytes, kernel))
        return original(value, w_o, chunk_bytes, kernel)

    monkeypatch.setattr(prefill, "projected_value_norms", noted)
    monkeypatch.setattr(generation, "end_tokens", lambda adapter: set())
    adapter = tiny_adapter()
    resources = Resources(chunk_bytes=4096, norm_kernel="chunked")
    found = answer(adapter, PROMPT, (config("snapkv"),), TOKENS, compress_over=LIMIT, resources=resources)
    assert len(asked) == len(adapter.layers) * (1 + len(found.compressions)) > len(adapter.layers)
    assert set(asked) == {(4096, "chunked")}


def test_a_long_prompt_is_compressed_while_it_is_read() -> None:
    adapter = tiny_adapter()
    read = prefill_and_evict(adapter, token_ids(30), (config("snapkv"),), "s", compress_over=LIMIT)
    assert mean_entries(read.cache, 0) == BUDGET
    whole = prefill_and_evict(adapter, token_ids(20), (config("snapkv"),), "s", compress_over=LIMIT)
    assert mean_entries(whole.cache, 0) == 20


@dataclass(frozen=True)
class Staged(Policy):
    """A policy of a user with a stage 1 of its own."""

    name = "staged"
    summary = "staged"

    @property
    def first_stage(self) -> Score:
        return SnapKV(pool="none")


def test_a_policy_with_a_stage_1_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._POLICIES.registered, "staged", Staged)
    with pytest.raises(ConfigError, match="'staged' .*has a stage 1 of its own; caches are compressed again by snapkv"):
        compatibility.check_compressible(config("staged"))


def test_policies_that_count_what_decoding_forgets_are_refused() -> None:
    for policy in ("scissorhands", "triattention"):
        with pytest.raises(ConfigError, match="caches are compressed again by snapkv"):
            compatibility.check_compressible(config(policy))
    for policy in ("snapkv", "pyramidkv", "adakv", "tova", "random", "h2o"):
        compatibility.check_compressible(config(policy))
    with pytest.raises(ConfigError, match="compares all heads of a layer, whose entries differ"):
        compatibility.check_compressible(config("adakv(by=tova)"))
    for name in ("hindsight", "hindsight-attention"):
        with pytest.raises(ConfigError, match=f"'{name}' looks at the next query"):
            compatibility.check_generation(config("snapkv", selection=name))

"""Pages are bounded rightly, chosen by every query anew, and what is not read is not seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from perturbkv import theory
from perturbkv.cache.compact import CompactLayer
from perturbkv.cache.entries import borrow
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import BudgetError, ConfigError
from perturbkv.pipeline.answers.generation import check_answer_options
from perturbkv.pipeline.run import searching
from perturbkv.selection import compatibility, page_selection
from perturbkv.selection.grid import configuration
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.page_selection import PagedLayer, PageGroup, PageReader, page_groups
from perturbkv.selection.resolved_config import ResolvedConfig, resolve
from tests.oracle.sample import QUESTION, Reference
from tests.support.models import HEADS, exact_adapter, token_ids
from tests.support.resolved import answer, trace_sample
from tests.support.traces import kept_of

HEAD, KV, D, N, WINDOW = 4, 2, 8, 41, 5
PLAIN = theory.Softmax(0.4)
STEPS = 3
PROMPT = Prompt("s", token_ids(40, seed=4), 0, question_tokens=QUESTION)
SELECTIONS = ("attention", "two-stage", "two-stage(alpha=0)", "value", "random", "hindsight", "hindsight-attention")


def config(selection: str = "attention", budget: float = 17, page: int = 4, **more: object) -> ResolvedConfig:
    return resolve(
        configuration(budget, policy=f"quest(page={page})", selection=selection, **{"window": WINDOW, **more})
    )


class World:
    """Random keys and queries of one layer, of any size, some of them far from the origin."""

    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.keys, self.values = (torch.randn(KV, N, D, generator=made, dtype=torch.float64) for _ in range(2))
        self.keys += 3 * torch.randn(KV, 1, D, generator=made, dtype=torch.float64)
        self.query = torch.randn(HEAD, D, generator=made, dtype=torch.float64)
        self.norms = torch.rand(HEAD, N - WINDOW, generator=made, dtype=torch.float64)

    def paged(self, size: int) -> PagedLayer:
        statistics = LayerStatistics(torch.zeros_like(self.norms), self.norms, KV, 0, 1, "s")
        return PagedLayer.from_keys(statistics, self.keys, PLAIN, size)

    def logits(self) -> Tensor:
        return theory.decode_logits(self.query, self.keys, PLAIN)

    def read(self, chosen: ResolvedConfig) -> Tensor:
        """(head, key) of its query."""
        return PageReader(chosen, self.paged(chosen.block), N)(self.query.unsqueeze(1))[:, 0]


@pytest.mark.parametrize("size", [1, 3, 8, 36, 40])
@pytest.mark.parametrize("seed", range(5))
def test_no_logit_exceeds_the_bound_of_its_page(size: int, seed: int) -> None:
    world = World(seed)
    bounds, count = world.paged(size).bounds(world.query), (N - WINDOW) // size
    assert bounds.shape == (HEAD, count)
    largest = world.logits()[:, : count * size].view(HEAD, count, size).amax(dim=-1)
    assert (bounds >= largest - 1e-12).all()
    if size == 1:
        torch.testing.assert_close(bounds, largest)
    elif count:
        assert (bounds > largest + 1e-6).any(), "a bound, no maximum"


@pytest.mark.parametrize("seed", range(5))
def test_pages_of_one_entry_are_the_entries_with_the_largest_logits(seed: int) -> None:
    world, budget = World(seed), 17
    before = world.logits()[:, : N - WINDOW]
    expected = torch.zeros(HEAD, N, dtype=torch.bool)
    expected[:, N - WINDOW :] = True
    expected.scatter_(1, before.topk(budget - WINDOW, dim=-1).indices, True)
    assert torch.equal(world.read(config(budget=budget, page=1)), expected)
    assert torch.equal(world.read(config("hindsight-attention", budget, 1)), expected)


@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_as_many_entries_are_read_as_whole_pages_and_the_tail_make(granularity: str) -> None:
    for budget in range(14, N + 1):
        chosen = config(budget=budget, granularity=granularity)
        counts = World(0).read(chosen).sum(dim=-1)
        tail = N - (N - WINDOW) // 4 * 4
        assert (counts == tail + (budget - tail) // 4 * 4).all() and chosen.kept_entries(N) == counts[0] <= budget


@pytest.fixture(scope="module")
def everything() -> CompactLayer:
    """Rows that hold everything: one that reads it, one that chooses to, and one that reads some."""
    world = World(1)
    whole = borrow(world.keys, world.values)
    readers = (lambda query: torch.ones(*query.shape[:2], N, dtype=torch.bool), PageReader(config(), world.paged(4), N))
    layer = CompactLayer([whole, *(replace(whole, reader=one) for one in readers)], HEAD, N)
    layer.attached = True
    layer.append(*(torch.ones(3, KV, 1, D, dtype=torch.float64) for _ in range(2)))
    return layer


def decoded(layer: CompactLayer, queries: Tensor) -> Tensor:
    """(row, query, head, d_head) of queries (head, query, d_head)."""
    return layer.attend(queries.unsqueeze(0).expand(layer.batch, -1, -1, -1), PLAIN)


def test_what_reads_everything_equals_what_keeps_everything_bit_for_bit(everything: CompactLayer) -> None:
    rows = decoded(everything, World(1).query.unsqueeze(1))
    assert torch.equal(rows[0], rows[1])
    assert (rows[0] - rows[2]).abs().amax() > 1e-3


def test_each_query_of_a_pass_chooses_for_itself(everything: CompactLayer) -> None:
    world, decoded_too = World(1), torch.ones(KV, 1, D, dtype=torch.float64)
    keys, values = torch.cat([world.keys, decoded_too], dim=1), torch.cat([world.values, decoded_too], dim=1)
    attention = theory.decode_attention(world.query, keys, PLAIN)
    both = torch.stack([world.query, -world.query], dim=1)
    one = PageReader(config(), world.paged(4), N)
    together = one(both)
    assert torch.equal(together[:, 0], one(both[:, :1])[:, 0]) and torch.equal(together[:, 1], one(both[:, 1:])[:, 0])
    assert not torch.equal(together[:, 0], together[:, 1])
    read = attention * torch.nn.functional.pad(together[:, 0], (0, 1), value=True)
    mean = theory.weighted_sums((read / read.sum(dim=-1, keepdim=True)).unsqueeze(0), values)[0]
    torch.testing.assert_close(decoded(everything, both[:, :1])[2, 0], mean)


def test_a_covering_budget_is_the_full_run_bit_for_bit() -> None:
    """Its row is that of the run which keeps everything: no reader, no copy."""
    adapter = exact_adapter("llama", *HEADS["GQA"])
    configs = (config(budget=1.0), config("random", 1.0), config())
    run = RunConfig("m", "d", configs, steps=STEPS, save=("outputs",))
    found = trace_sample(adapter, PROMPT, run).arrays
    alone = trace_sample(adapter, PROMPT, replace(run, configs=(configs[0],))).arrays
    assert np.array_equal(found["hidden"][0], found["hidden"][1]) and not np.array_equal(
        found["hidden"][0], found["hidden"][2]
    )
    assert found["evicted"].tolist() == [0, 0, 1] and found["held_share"][0] == HEAD / KV
    assert found["held_bytes"][0] == found["full_bytes"] < found["held_bytes"][2] < 1.3 * found["full_bytes"]
    for made in (found, alone):
        assert (made["perturbation_isolated"][0] <= made["noise_floor_isolated"]).all()
        for name, floor in (("perturbation_propagated", "noise_floor"), ("hidden_drift_l1", "hidden_noise_floor")):
            # some machines round a batch's rows by their place in it, so that two rows of full caches differ
            assert (made[name][0] <= made[floor] + made[floor].max()).all()


@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_knowing_every_logit_reads_the_most_attention(granularity: str) -> None:
    configs = tuple(config(one, granularity=granularity) for one in SELECTIONS)
    adapter = exact_adapter("llama", *HEADS["GQA"])
    mass = trace_sample(adapter, PROMPT, RunConfig("m", "d", configs, steps=STEPS)).arrays["retained_mass"]
    groups = mass.reshape(*mass.shape[:-1], -1, HEAD // KV if granularity == "kv" else 1).sum(axis=-1)
    assert (groups[-1] >= groups - 1e-12).all() and (groups[-1] > groups[0] + 1e-6).any()


def read_at(adapter: object, chosen: EvictionConfig, step: int) -> np.ndarray:
    """(layer, head) attention that the chosen pages hold at a step, by the naive decoder."""
    reference = Reference(adapter.model, PROMPT.token_ids, RunConfig("m", "d", (chosen,), steps=STEPS))  # type: ignore[attr-defined]
    found = np.zeros((reference.decoder.layers, HEAD))
    for layer, head in np.ndindex(*found.shape):
        held = reference.layer(layer, step)
        logits = held["key"][head // (HEAD // KV)] @ held["query"][head] * reference.decoder.scale
        weights = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        seen = [*reference.kept(layer, chosen, step)[head][0], *range(reference.n, len(weights))]
        found[layer, head] = weights[seen].sum()
    return found


def off(chosen: EvictionConfig) -> float:
    """The largest difference of what is read at any step, of a run and of the naive decoder."""
    adapter = exact_adapter("llama", *HEADS["GQA"])
    mass = trace_sample(adapter, PROMPT, RunConfig("m", "d", (chosen,), steps=STEPS)).arrays["retained_mass"][0]
    return float(np.abs(mass - np.stack([read_at(adapter, chosen, step) for step in range(STEPS)])).max())


def swapped(layer: PagedLayer, query: Tensor) -> Tensor:
    return _bounds(replace(layer, low=layer.high, high=layer.low), query)


def middle(layer: PagedLayer, query: Tensor) -> Tensor:
    mean = (layer.low + layer.high) / 2
    return _bounds(replace(layer, low=mean, high=mean), query)


def unscaled(layer: PagedLayer, query: Tensor) -> Tensor:
    return 5 * _bounds(layer, query)


def first_step(configs: list[ResolvedConfig], layer: object, queries: list[Tensor], tokens: int) -> list[PageGroup]:
    return page_groups(configs, layer, [queries[0]] * len(queries), tokens)  # type: ignore[arg-type]


_bounds = PagedLayer.bounds


def test_what_is_read_is_what_the_naive_decoder_reads() -> None:
    assert off(config("two-stage(alpha=0)", granularity="kv")) < 1e-9


@pytest.mark.parametrize(("wrong", "page"), [(swapped, 4), (middle, 4), (unscaled, 1)])
def test_a_wrong_bound_is_found(wrong: object, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedLayer, "bounds", wrong)
    assert off(config("two-stage(alpha=0)", page=page, granularity="kv")) > 1e-3


def test_pages_of_the_first_step_for_all_steps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perturbkv.pipeline.variants.readers.page_groups", first_step)
    assert page_selection.page_groups is page_groups
    assert off(config()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_answers_read_pages_as_they_are_written(scenario: str) -> None:
    """Token by token those of the naive decoder, whose every query chooses; and those of the trace."""
    adapter, tokens = exact_adapter("llama", *HEADS["GQA"]), 6
    chosen = [config(), config("two-stage(alpha=0)"), config("hindsight")]
    configs = (*chosen, config(budget=1.0), configuration(17, window=WINDOW))
    made = answer(adapter, PROMPT, configs, tokens, scenario=scenario, divergence=True)
    run = RunConfig("m", "d", configs, scenario=scenario, generate=tokens)
    traced = trace_sample(adapter, PROMPT, run).arrays
    assert [[token for token in row if token >= 0] for row in traced["generated"].tolist()] == made.evicted
    assert made.held == pytest.approx(traced["held_share"].tolist())
    assert made.evicted[3] == made.full
    for one, found in zip(chosen, made.evicted, strict=False):
        assert found == written(adapter, one, scenario, made.full[0], len(found))
    assert made.divergence is not None and (made.divergence.kl[:3] > made.divergence.noise_floor).any()


def written(adapter: object, chosen: EvictionConfig, scenario: str, first: int, count: int) -> list[int]:
    """What the naive decoder writes greedily while it reads pages."""
    run = RunConfig("m", "d", (chosen,), steps=1, scenario=scenario)
    reference = Reference(adapter.model, PROMPT.token_ids, run)  # type: ignore[attr-defined]
    found = [] if scenario == "context-only" else [first]
    while len(found) < count:
        reference.tokens, reference.run = found, replace(run, steps=max(len(found), 1))
        found.append(int(np.argmax(reference.decoded(chosen)[-1].logits)))
    return found


def test_rows_of_everything_take_no_bytes() -> None:
    run = RunConfig("m", "d", tuple(map(config, SELECTIONS)))
    found = trace_sample(exact_adapter("llama", *HEADS["GQA"]), PROMPT, run).arrays
    assert found["cache_bytes"] == found["cache_padding_bytes"] == 0


@pytest.mark.slow
def test_a_batch_of_its_own_reads_what_a_batch_of_many_reads() -> None:
    adapter, chosen = exact_adapter("llama", *HEADS["GQA"]), tuple(map(config, SELECTIONS))
    beside = RunConfig("m", "d", (*chosen, configuration(17, window=WINDOW)), steps=STEPS)
    many = trace_sample(adapter, PROMPT, beside).arrays
    for place, one in enumerate(chosen):
        alone = trace_sample(adapter, PROMPT, RunConfig("m", "d", (one,), steps=STEPS)).arrays
        assert kept_of(alone, 0, 1, 2) == kept_of(many, place, 1, 2)
        for name in ("perturbation_isolated", "perturbation_propagated"):
            np.testing.assert_allclose(alone[name][0], many[name][place], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(("asked", "said"), [
    ({"granularity": "layer"}, "chooses pages by head; granularity 'layer' has one set for several heads: choose"),
    ({"granularity": "query(block=8)"}, "block of granularity 'query' has no effect here: it needs a policy"),
    ({"precision": "quantise"}, "reads pages of the model's own cache: expected precision full, got quantise"),
    ({"correction": "corrected"}, "expected correction none, got corrected"),
    ({"protect_first": 4}, "expected protect_first 0, got 4; leave it out"),
    ({"protect_recent": 0.5}, "expected protect_recent 0, got 0.5; leave it out"),
    ({"selection": "attention-unpooled"}, "does not combine with selection 'attention-unpooled'"),
    ({"selection": "two-stage(epsilon=0.1)"}, "epsilon of selection 'two-stage' has no effect here"),
    ({"selection": "two-stage(score=pooled)"}, "score of selection 'two-stage' has no effect here"),
    ({"policy": "quest(page=0)"}, "page of policy 'quest' must be a whole number of at least 1, got 0"),
    ({"policy": "quest(page=some)"}, "page of policy 'quest' must be a whole number of at least 1, got some"),
    ({"policy": "quest(kernel=3)"}, "kernel"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(asked: dict[str, object], said: str) -> None:
    from perturbkv.selection import grid

    with pytest.raises(ConfigError) as refused:
        grid.grid(128, **{"policy": "quest", "selection": "attention", **asked})
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_budget_that_buys_no_page_is_refused() -> None:
    with pytest.raises(BudgetError, match="too few for a page of 16 beside those that always stay"):
        configuration(40, policy="quest", selection="attention")


def test_pages_and_what_forgets_or_searches_go_not_together() -> None:
    with pytest.raises(ConfigError, match="policy 'quest' evicts nothing, so that nothing is compressed again: leave"):
        compatibility.check_compressible(config(budget=17))
    check_answer_options([config("hindsight")], 5)
    with pytest.raises(ConfigError, match="got policy quest, which evicts nothing"):
        searching.check_search([config(page=1)], searching.SearchSettings())

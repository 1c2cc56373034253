"""Evicting while reading, both scenarios, and greedy generation, against the plain model and the naive decoder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from perturbkv.cache.compact import CompactCache
from perturbkv.configs.choice import parse
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import DatasetError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers import generation
from perturbkv.pipeline.answers.generation import generate
from perturbkv.pipeline.run.plan import plan_prompt_batches
from perturbkv.pipeline.sample.capture import decode_from
from perturbkv.selection.grid import configuration
from tests.oracle.decoder import Decoder
from tests.oracle.sample import Reference
from tests.support.models import FAMILIES, HEADS, exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import answer, prefill_and_evict, resolved_run, trace_sample
from tests.support.traces import kept_of

LENGTH, QUESTION = 40, 9
PROMPT = Prompt("s", token_ids(LENGTH, seed=4), 0, question_tokens=QUESTION)


def config(policy: str = "adakv", budget: int | float = 16, **fields: object) -> EvictionConfig:
    return configuration(budget, policy=policy, **{"window": 5, "kernel": 3, **fields})


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_everything_kept_logits_are_the_plain_models(family: str, scenario: str) -> None:
    """Over a question of several tokens and 16 decode steps: positions and masks are right."""
    adapter, tokens = tiny_adapter(family), list(token_ids(16, seed=6))
    with torch.inference_mode():
        plain = adapter.model(torch.tensor([[*PROMPT.token_ids, *tokens]])).logits[0]
    context, question = PROMPT.parts(scenario)
    read = prefill_and_evict(adapter, context, [config(budget=1.0)], "s", with_full=True)
    found = [read.logits.expand(2, 1, -1)]
    with torch.inference_mode(), decode_from(adapter, read.cache):
        for piece in ([list(question)] if question else []) + [[token] for token in tokens]:
            found.append(adapter.model(torch.tensor([piece] * 2), past_key_values=read.cache).logits)
    logits = torch.cat(found, dim=1)
    expected = plain[len(context) - 1 :]
    for row in logits:
        assert float((row - expected).abs().max() / expected.abs().max()) < 1e-5


def test_evicting_while_reading_keeps_what_evicting_afterwards_keeps() -> None:
    adapter = tiny_adapter()
    configs = tuple(config(policy) for policy in ("snapkv", "pyramidkv", "adakv", "h2o", "tova", "scissorhands"))
    arrays = trace_sample(adapter, PROMPT, RunConfig("m", "d", configs, scenario="context-only")).arrays
    context, _ = PROMPT.parts("context-only")
    read = prefill_and_evict(adapter, context, configs, "s")
    cache = DynamicCache()
    with torch.inference_mode():
        adapter.model(torch.tensor([context]), past_key_values=cache)
    for row in range(len(configs)):
        for layer, held in enumerate(read.cache.layers):
            sets = held.entries(row).sets()
            for head in range(adapter.heads):
                kept = torch.tensor(kept_of(arrays, row, layer, head))
                torch.testing.assert_close(sets[head][0], cache.layers[layer].keys[0, head // 2, kept])


def test_no_full_cache_is_left_of_a_prompt_that_was_evicted_while_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a layer starts, the layers before it hold nothing but what they kept."""
    from perturbkv.pipeline.sample import prefill

    made: list[DynamicCache] = []
    held: list[int] = []
    monkeypatch.setattr(prefill, "full_cache", lambda adapter: made.append(DynamicCache()) or made[-1])
    adapter = tiny_adapter(layers=4)

    def look(*given: object) -> None:
        held.append(sum(layer.keys.numel() for layer in made[0].layers if layer.is_initialized))

    hooks = [layer.register_forward_pre_hook(look) for layer in adapter.layers]
    prefill_and_evict(adapter, PROMPT.token_ids, [config()], "s")
    for hook in hooks:
        hook.remove()
    assert held == [0, 0, 0, 0]
    assert sum(layer.keys.numel() for layer in made[0].layers) == 0


class Naive:
    """Greedy generation by the naive decoder, evicted entries masked; compressed again above a limit, if any."""

    def __init__(self, adapter: Adapter, run: RunConfig, chosen: EvictionConfig) -> None:
        self.reference = Reference(adapter.model, PROMPT.token_ids, run)
        self.reference.n = len(PROMPT.parts(run.scenario)[0])
        self.decoder, self.config, self.run = Decoder(adapter.model), chosen, run

    def answer(self, most: int) -> list[int]:
        n = self.reference.n
        for token in PROMPT.token_ids[:n]:
            last = self.decoder.step(token)
        sets = [self.reference.kept(layer, self.config) for layer in range(self.decoder.layers)]
        made: list[int] = []
        for token in PROMPT.token_ids[n:]:
            last = self.decoder.step(token, self._masks(sets))
        while len(made) < most:
            made.append(int(np.argmax(last.logits)))
            last = self.decoder.step(made[-1], self._masks(sets))
        return made

    def _masks(self, sets: list[list[tuple[list[int], list[int]]]]) -> list[np.ndarray]:
        n, now = self.reference.n, self.decoder.position
        return [
            np.array([[place >= n or place in kept for place in range(now)] for kept, _ in layer]) for layer in sets
        ]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["regular", "context-only"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_generation_equals_the_naive_decoders(heads: tuple[int, int], scenario: str) -> None:
    adapter = exact_adapter("llama", *heads)
    shared = (config("snapkv", granularity=name) for name in ("head", "model(block=4)", "model(reduce=union)"))
    configs = (config("snapkv"), config("adakv"), config("pyramidkv", selection="attention"), *shared)
    found = answer(adapter, PROMPT, configs, 12, scenario=scenario)
    run = RunConfig("m", "d", configs, scenario=scenario)
    for chosen, tokens in zip(configs, found.evicted, strict=True):
        expected = Naive(adapter, run, chosen).answer(12)
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == 12 or expected[len(tokens)] == 2  # the tiny model's end token
    everything = config("snapkv", 1.0)
    assert found.full == Naive(adapter, replace(run, configs=(everything,)), everything).answer(12)[: len(found.full)]


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_an_answer_says_what_its_cache_held(scenario: str) -> None:
    """Four query heads of two key/value heads: a set per query head stores twice as much as one per key/value head."""
    adapter = exact_adapter("llama", *HEADS["GQA"])
    configs = (config("snapkv"), config("snapkv", granularity="kv"), config("adakv"), config("snapkv", 1.0))
    n, budget = len(PROMPT.parts(scenario)[0]), configs[0].budget.value
    found = answer(adapter, PROMPT, configs, 3, scenario=scenario)
    group = HEADS["GQA"][0] // HEADS["GQA"][1]
    assert found.held == pytest.approx([group * budget / n, budget / n, group * budget / n, group])
    later = answer(adapter, PROMPT, configs[:1], 3, scenario=scenario, compress_over=n)
    assert later.held == [1]


def test_every_row_stops_at_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's answer is cut before the first end token, and longer rows go on."""
    adapter, configs = tiny_adapter(), (config("snapkv"), config("random"), config("adakv", 30))
    context, _ = PROMPT.parts("regular")

    def rows(ends: set[int]) -> list[list[int]]:
        read = prefill_and_evict(adapter, context, configs, "s")
        monkeypatch.setattr(generation, "end_tokens", lambda adapter: ends)
        return generate(adapter, read, (), 20)

    free = rows(set())
    assert all(len(row) == 20 for row in free)
    end = next(token for token in free[0][5:] if any(token not in row for row in free[1:]))
    for stopped, whole in zip(rows({end}), free, strict=True):
        assert stopped == whole[: whole.index(end) if end in whole else 20]
    assert len({len(row) for row in rows({end})}) > 1
    assert rows({free[0][0]}) == [[], [], []]


def test_rows_that_ended_are_decoded_no_longer_than_half_of_them_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are those of a run that decodes all rows to the end, and no step holds twice as many rows as go on."""
    adapter = tiny_adapter()
    configs = tuple(config("random", 8 + 2 * place) for place in range(7))
    context, _ = PROMPT.parts("regular")
    decoded: list[int] = []
    original = generation._next_tokens

    def watched(adapter: Adapter, cache: CompactCache, ids: torch.Tensor, *more: object) -> torch.Tensor:
        assert ids.shape[0] == cache.layers[0].batch
        decoded.append(ids.shape[0])
        return original(adapter, cache, ids, *more)

    monkeypatch.setattr(generation, "_next_tokens", watched)

    def rows(ends: set[int]) -> list[list[int]]:
        decoded.clear()
        read = prefill_and_evict(adapter, context, configs, "s", with_full=True)
        monkeypatch.setattr(generation, "end_tokens", lambda adapter: ends)
        return generate(adapter, read, (), 24)

    free = rows(set())
    assert decoded == [8] * 23
    end = max(range(260), key=lambda token: len({row.index(token) for row in free if token in row}))
    lengths = [row.index(end) if end in row else 24 for row in free]
    assert rows({end}) == [row[:length] for row, length in zip(free, lengths, strict=True)]
    assert decoded[-1] < 8
    for step, held in enumerate(decoded):
        going_on = sum(length > step for length in lengths)
        assert going_on <= held < max(2 * going_on, 2)


def test_one_batch_generates_what_each_configuration_does_alone() -> None:
    adapter = tiny_adapter("qwen3")
    configs = tuple(config(policy) for policy in ("snapkv", "adakv", "tova"))
    together = answer(adapter, PROMPT, configs, 16)
    for chosen, tokens in zip(configs, together.evicted, strict=True):
        assert answer(adapter, PROMPT, (chosen,), 16).evicted == [tokens]
    assert answer(adapter, PROMPT, (configs[0],), 16).full == together.full


@pytest.mark.parametrize("few_bits", [False, True], ids=["compressed again", "in few bits"])
def test_several_batches_answer_as_one(few_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over compressions and divergence too, in the run's order; of caches in few bits, which one batch alone has."""
    monkeypatch.setattr(generation, "end_tokens", lambda adapter: set())
    budgets: tuple[int | float, ...] = (20, 18, 10, 8)
    configs = [config("snapkv", budget) for budget in budgets]
    options: dict[str, object] = {"compress_over": 24, "divergence": True}
    if few_bits:
        configs, options = [*configs, replace(config(budget=12), precision=parse("quantise(group=8)"))], {}
    adapter = exact_adapter("llama", 4, 2)
    prompt = Prompt("s", token_ids(LENGTH, seed=4), 0)
    one = answer(adapter, prompt, configs, 12, **options)
    run = resolved_run(configs, generate=12)
    sizes = [adapter.shape.row_bytes(each, LENGTH, 12, 1) for each in run.configs]
    bounded = Resources(max_bytes=max(sizes) + min(sizes))
    batches = plan_prompt_batches(prompt, run, adapter.shape, bounded).indices
    assert len(batches) > 1
    assert [index for batch in batches for index in batch] != list(range(len(configs)))
    several = answer(adapter, prompt, configs, 12, bounded, **options)
    for name in ("full", "evicted", "held", "stored"):
        assert getattr(several, name) == getattr(one, name), name
    assert len(one.stored) == len(configs) * few_bits
    assert bool(one.compressions) != few_bits
    for field in ("config", "generated", "before", "after"):
        assert [getattr(each, field) for each in several.compressions] == [
            getattr(each, field) for each in one.compressions
        ]
    if not few_bits:
        torch.testing.assert_close(several.divergence.kl, one.divergence.kl, rtol=1e-6, atol=1e-12)
        assert torch.equal(several.divergence.top1, one.divergence.top1)


def test_a_prompt_without_a_question_of_its_own_is_refused() -> None:
    with pytest.raises(DatasetError, match="no question of its own"):
        replace(PROMPT, question_tokens=0).parts("context-only")
    with pytest.raises(DatasetError, match="no context of its own"):
        replace(PROMPT, question_tokens=LENGTH).parts("context-only")

"""KL and top-1 agreement over the full cache's answer, held against naive float64 decoders that mask what is gone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from perturbkv.api.measuring import measure
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import Settings
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers import generation, teacher_forcing
from perturbkv.selection.grid import configuration
from tests.oracle.decoder import Decoder
from tests.pipeline.test_long_generation_is_compressed import LIMIT, PROMPT, TOKENS, Naive, NaiveBlocks, config
from tests.support.models import exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import answer


@pytest.fixture(autouse=True)
def _endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers end where they are long enough, not at a token."""
    monkeypatch.setattr(generation, "end_tokens", lambda adapter: set())


def kl(full: np.ndarray, evicted: np.ndarray) -> float:
    """Σ p (log p − log q) of two rows of logits, summed one by one."""

    def logs(row: np.ndarray) -> list[float]:
        top = max(row)
        total = math.log(sum(math.exp(value - top) for value in row)) + top
        return [value - total for value in row]

    pairs = zip(logs(full), logs(evicted), strict=True)
    return sum(math.exp(first) * (first - second) for first, second in pairs)


def teacher_force(naive: Naive, tokens: list[int]) -> list[np.ndarray]:
    """The naive run's logits after each token of a given text, compressed where it holds too much."""
    for token in PROMPT.token_ids:
        naive._step(token)
    found = []
    for token in tokens:
        lengths = [len(held) for layer in naive.held for held in layer]
        if sum(lengths) / len(lengths) > LIMIT:
            naive._compress()
        found.append(naive._step(token))
    return found


def plain(adapter: Adapter, tokens: list[int]) -> list[np.ndarray]:
    decoder = Decoder(adapter.model)
    return [decoder.step(token).logits for token in [*PROMPT.token_ids, *tokens]][len(PROMPT.token_ids) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("naive", "chosen"),
    [
        (Naive, config("snapkv")),
        (Naive, config("adakv", alpha=0.5)),
        (NaiveBlocks, config("snapkv", granularity="kv")),
    ],
    ids=["snapkv", "adakv", "kv"],
)
def test_every_step_is_that_of_a_naive_run_that_is_compressed_alike(naive: type[Naive], chosen: EvictionConfig) -> None:
    adapter = exact_adapter("llama", 4, 2, seed=1)
    made = answer(adapter, PROMPT, (chosen,), TOKENS, compress_over=LIMIT, divergence=True)
    found = made.divergence
    assert found is not None
    full, evicted = plain(adapter, made.full), teacher_force(naive(adapter, chosen), made.full)
    expected = [kl(first, second) for first, second in zip(full, evicted, strict=True)]
    np.testing.assert_allclose(found.kl[0].numpy(), expected, rtol=1e-6, atol=1e-12)
    same = [int(np.argmax(first) == np.argmax(second)) for first, second in zip(full, evicted, strict=True)]
    assert found.top1[0].int().tolist() == same
    assert max(expected) > 1e-3  # a divergence there is
    assert float(found.noise_floor.max()) < 1e-12


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_without_compressions_it_is_the_kl_that_a_trace_holds(scenario: str) -> None:
    adapter, steps = tiny_adapter(seed=1), 8
    prompt = Prompt("s", token_ids(40, seed=4), 0, question_tokens=5)
    configs = tuple(configuration(12, window=4, kernel=3, selection=name) for name in ("attention", "two-stage"))
    trace = measure(adapter, [prompt], configs, settings=Settings(steps=steps, scenario=scenario), progress=False)
    made = answer(adapter, prompt, configs, steps, scenario=scenario, divergence=True)
    assert made.divergence is not None
    assert int(trace.get("steps_measured", "this")[0]) == steps
    np.testing.assert_allclose(made.divergence.kl.numpy(), trace.get("logit_kl", "this")[0], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_how_many_tokens_are_read_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = exact_adapter("llama", 4, 2, seed=1)
    configs = (config("snapkv"), config("random"), config("streaming-llm(positions=in-cache)", selection="position"))
    at_once = answer(adapter, PROMPT, configs, TOKENS, compress_over=LIMIT, divergence=True).divergence
    monkeypatch.setattr(teacher_forcing, "_TOKENS_PER_PASS", 1)
    single = answer(adapter, PROMPT, configs, TOKENS, compress_over=LIMIT, divergence=True).divergence
    assert at_once is not None
    assert single is not None
    np.testing.assert_allclose(at_once.kl.numpy(), single.kl.numpy(), rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_the_free_answers_are_what_they_are_without_it() -> None:
    adapter, configs = tiny_adapter(), (config("snapkv"), config("adakv"))
    asked = answer(adapter, PROMPT, configs, TOKENS, compress_over=LIMIT, divergence=True)
    alone = answer(adapter, PROMPT, configs, TOKENS, compress_over=LIMIT)
    assert (asked.full, asked.evicted, asked.held) == (alone.full, alone.evicted, alone.held)
    assert [one.generated for one in asked.compressions] == [one.generated for one in alone.compressions]
    assert alone.divergence is None
    assert asked.divergence is not None
    floor = asked.divergence.noise_floor.numpy()
    assert 0 <= floor.max() < 1e-4 * asked.divergence.kl.numpy().max()


def test_an_answer_without_tokens_has_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "end_tokens", lambda adapter: set(range(300)))
    made = answer(tiny_adapter(), PROMPT, (config("snapkv"),), 5, divergence=True)
    assert made.divergence is not None
    assert (made.full, made.divergence.kl.shape, made.divergence.noise_floor.shape) == ([], (1, 0), (0,))

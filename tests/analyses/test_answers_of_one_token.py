"""In the regular scenario all caches begin an answer alike; what that means for short answers is told with scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.result import Result
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.selection.grid import configuration
from perturbkv.trace import Trace
from tests.support.linked import answered, methods
from tests.support.models import tiny_adapter, token_ids
from tests.support.resolved import trace_sample

MOVED = np.random.default_rng(0).lognormal(size=(6, 3))
SCORES = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1]], dtype=float)
TOLD: dict[str, Callable[[Trace], Result]] = {
    "correlation": pk.correlation,
    "quality": pk.quality,
    "budget": lambda trace: pk.safe_budget(trace, max_drop=50),
}


def of_lengths(lengths: list[int], **run: str) -> Trace:
    """Answers from the full cache of so many tokens."""
    made = answered(methods(3), SCORES, np.ones(6), {"propagated": MOVED}, **run)
    tokens = np.where(np.arange(8) < np.array(lengths)[:, None], 5, -1)
    return replace(made, arrays={**made.arrays, "generated_full": tokens})


def notes(result: Result) -> str:
    return " ".join(result.notes().split())


@pytest.mark.parametrize("command", TOLD)
def test_answers_that_end_with_the_token_that_all_caches_share_are_counted(command: str) -> None:
    said = notes(TOLD[command](of_lengths([1, 0, 4, 1, 2, 8])))
    assert "In 3 of 6 samples the full cache's answer is one token or none" in said


@pytest.mark.parametrize("command", TOLD)
def test_longer_answers_and_those_to_a_question_behind_the_cache_are_not(command: str) -> None:
    assert "one token or none" not in notes(TOLD[command](of_lengths([2, 3, 4, 5, 6, 7])))
    assert "one token or none" not in notes(TOLD[command](of_lengths([1] * 6, scenario="context-only")))


def test_a_limit_of_kl_says_nothing_of_answers() -> None:
    assert "one token or none" not in notes(pk.safe_budget(of_lengths([1] * 6), max_kl=100))


@pytest.mark.slow
def test_the_first_token_is_alike_in_the_regular_scenario_alone() -> None:
    adapter = tiny_adapter("llama", 8, 2, layers=4, d_head=32)
    configs = tuple(configuration(12, selection=name, window=8) for name in ("attention", "random"))
    differ = {"regular": 0, "context-only": 0}
    for seed in range(4):
        prompt = Prompt(f"p{seed}", token_ids(200, seed=seed), 0, 20, ("a",))
        for scenario in differ:
            run = RunConfig("m", "d", configs, generate=1, scenario=scenario)
            arrays = trace_sample(adapter, prompt, run).arrays
            differ[scenario] += int((arrays["generated"] != arrays["generated_full"]).sum())
    assert differ["regular"] == 0
    assert differ["context-only"] > 0

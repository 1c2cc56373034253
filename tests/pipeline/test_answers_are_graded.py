"""What a trace stores of generated answers: their tokens, and scores by the data set's metric or a chosen one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.measurements import scores
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.prompts import metrics_of
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.answer_rows import answer_row
from perturbkv.schema import ANSWER_TEXT
from perturbkv.trace import Trace
from tests.pipeline.test_scenarios_and_generation import PROMPT, config
from tests.support.models import tiny_adapter
from tests.support.resolved import answer, trace_sample

CONFIGS = (config("snapkv"), config("adakv"))
WORDS = ("red", "green", "blue", "one", "two")


def said(tokens: list[int], skip_special_tokens: bool = False) -> str:
    """A tokenizer of five words, some tokens of which are special."""
    return " ".join(
        "<special>" if token % 7 == 0 else WORDS[token % 5] for token in tokens if token % 7 or not skip_special_tokens
    )


def speaking() -> Adapter:
    adapter = tiny_adapter()
    adapter.tokenizer.decode = said  # type: ignore[method-assign]
    return adapter


def graded(prompt: Prompt, scenario: str = "regular", configs: tuple[EvictionConfig, ...] = CONFIGS) -> dict[str, Any]:
    run = RunConfig("m", "d", configs, scenario=scenario, generate=8)
    return dict(trace_sample(speaking(), prompt, run).arrays)


def texts(arrays: dict[str, Any]) -> list[str]:
    """The full cache's answer, then each configuration's, without special tokens."""
    return [
        said([int(token) for token in row if token >= 0], True)
        for row in (arrays["generated_full"], *arrays["generated"])
    ]


def overlap(text: str, expected: str) -> float:
    found, wanted = text.split(), expected.split()
    common = sum(min(found.count(word), wanted.count(word)) for word in set(found))
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_every_answer_gets_the_metrics_score_without_special_tokens(scenario: str) -> None:
    free = texts(graded(PROMPT, scenario))
    assert len(set(free)) > 1
    accepted = ("nothing", free[1])
    arrays = graded(replace(PROMPT, answers=accepted), scenario)
    assert texts(arrays) == free
    expected = [max(overlap(text, one) for one in accepted) for text in free]
    assert [float(arrays["score_full"]), *arrays["score"]] == pytest.approx(expected)
    assert arrays["score"][0] == 1
    assert 0 < arrays["score_full"] < 1


def test_places_behind_an_answers_end_hold_minus_one() -> None:
    adapter, run = speaking(), RunConfig("m", "d", CONFIGS, generate=8)
    tokens = trace_sample(adapter, PROMPT, run).arrays["generated_full"].tolist()
    adapter.model.generation_config.eos_token_id = tokens[3]
    ended = trace_sample(adapter, PROMPT, run).arrays["generated_full"].tolist()
    end = tokens.index(tokens[3]) + 1
    assert [token for token in ended if token >= 0] in (tokens[: end - 1], tokens[:end])
    assert set(ended[end:]) == {-1}


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_a_traces_answers_and_scores_are_those_of_generate(scenario: str) -> None:
    prompt = replace(PROMPT, answers=("red green two",))
    made = answer(speaking(), prompt, CONFIGS, 8, scenario=scenario)
    shown = answer_row(prompt, made, ["first", "second"], said, metrics_of([prompt]))
    arrays = graded(prompt, scenario)
    stored = [[int(token) for token in row if token >= 0] for row in arrays["generated"]]
    assert stored == made.evicted == [one["tokens"] for one in shown["evicted"].values()]
    assert arrays["score"].tolist() == [one["score"] for one in shown["evicted"].values()]
    assert arrays["score_full"] == shown["full"]["score"]
    assert shown["metric"] == "f1"


@pytest.mark.parametrize("through_a_file", [True, False], ids=["file", "memory"])
def test_a_trace_holds_the_texts_that_were_graded(tmp_path: Path, through_a_file: bool) -> None:
    prompts = [replace(PROMPT, sample_id=f"p{place}", answers=("red", 'a "b" é')[place:]) for place in range(2)]
    path = tmp_path / "t.h5" if through_a_file else None
    arrays = pk.measure(
        speaking(), prompts, CONFIGS, settings=pk.Settings(generate=8), path=path, progress=False
    ).arrays
    for place in range(2):
        own = {name: arrays[name][place] for name in ("generated_full", "generated")}
        assert [arrays["answer_full"][place], *arrays["answer"][place]] == texts(own)
    assert arrays["expected_answers"].tolist() == ['["red", "a \\"b\\" é"]', '["a \\"b\\" é"]']


@pytest.mark.parametrize("text", [True, False])
def test_a_trace_of_prompts_without_answers_or_without_text_has_no_texts_of_answers(text: bool) -> None:
    generate = 0 if text else 4
    prompt = replace(PROMPT, answers=("red",))
    arrays = pk.measure(
        speaking(), [prompt], CONFIGS, settings=pk.Settings(generate=generate, prompts=text), progress=False
    ).arrays
    assert ("generated" in arrays) == (not text)
    assert set(arrays).isdisjoint(ANSWER_TEXT)


@pytest.mark.parametrize(
    ("fields", "answers", "name"),
    [
        ({"task": "qasper"}, ("red",), "qa_f1"),
        ({"task": "gov_report"}, ("red green. blue one",), "rouge"),
        ({"task": "trec", "classes": WORDS}, ("red",), "classification"),
        ({"task": "passage_count"}, ("3",), "count"),
        ({"task": "lcc"}, ("red green",), "code_sim"),
        ({"task": "needle"}, ("123",), "exact-number"),
        ({"task": "qasper", "metric": "exact-match"}, ("red",), "exact-match"),
        ({"metric": "rouge-l"}, ("red green two",), "rouge-l"),
        ({}, ("red",), "f1"),
    ],
)
def test_a_score_is_of_the_data_sets_metric_or_of_the_one_chosen(
    fields: dict[str, Any], answers: tuple[str, ...], name: str
) -> None:
    prompt = replace(PROMPT, answers=answers, **fields)
    metrics = metrics_of([prompt])
    assert [metric.name for metric in metrics.values()] == [name]
    arrays = graded(prompt)
    expected = [metric.grade(text, answers, prompt.classes) for metric in metrics.values() for text in texts(arrays)]
    assert [float(arrays["score_full"]), *arrays["score"].tolist()] == expected


def test_digits_stay_for_answers_that_are_numbers() -> None:
    adapter = tiny_adapter()

    def decode(tokens: list[int], skip_special_tokens: bool = False) -> str:
        return f"It is 12{sum(tokens)}."

    adapter.tokenizer.decode = decode  # type: ignore[method-assign]
    prompt = replace(PROMPT, answers=("1200",), metric="exact-number")
    run = RunConfig("m", "d", CONFIGS, generate=4)
    arrays = trace_sample(adapter, prompt, run).arrays
    sums = [sum(int(token) for token in row if token >= 0) for row in arrays["generated"]]
    begun = [len(str(total)) - len(str(total).lstrip("0")) for total in sums]
    assert arrays["score"].tolist() == [0, 0]
    assert arrays["digits"].tolist() == [(2 + alike) / 4 for alike in begun]
    numbers = graded(replace(PROMPT, answers=("7", "red")))
    assert arrays["digits_full"] >= 0.5
    assert not np.isnan(numbers["digits"]).any()


@pytest.mark.parametrize(("answers", "score"), [(("Paris",), 0.0), ((), np.nan)])
def test_without_accepted_answers_nothing_is_graded(answers: tuple[str, ...], score: float) -> None:
    arrays = graded(replace(PROMPT, answers=answers))
    for name in ("score", "score_full"):
        np.testing.assert_array_equal(arrays[name], np.full_like(arrays[name], score))
    for name in ("digits", "digits_full"):
        assert np.isnan(arrays[name]).all(), name


def test_analyses_take_the_scores_of_a_trace() -> None:
    prompts = [replace(PROMPT, sample_id=name, answers=("red", "green two")) for name in ("a", "b")]
    run = RunConfig("m", "d", CONFIGS, generate=8, samples=2)
    made = Trace.from_samples(run, [trace_sample(speaking(), prompt, run) for prompt in prompts], {})
    found = scores(made, "quality")
    np.testing.assert_array_equal(found.evicted, made.arrays["score"])
    np.testing.assert_array_equal(found.full, made.arrays["score_full"])

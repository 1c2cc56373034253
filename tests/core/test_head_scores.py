"""Measured scores against a naive loop, and the JSON file that carries them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from perturbkv.datasets import needle
from perturbkv.datasets.dataset_registry import DatasetOptions
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.needle import add_distraction
from perturbkv.errors import ConfigError, DatasetError
from perturbkv.models.loading import ByteTokenizer
from perturbkv.pipeline.answers import answer_heads
from perturbkv.pipeline.answers.answer_heads import Evidence
from perturbkv.scoring import head_scores as files
from tests.oracle import theory
from tests.oracle.decoder import Decoder
from tests.support.models import HEADS, exact_adapter

SENTENCE = "It is 4711 here."


def prompt(text: str = "Well. It is 4711 here. So it is", answer: str = "4711") -> Prompt:
    return Prompt("s", tuple(text.encode()), 0, answers=(answer,))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_scores_equal_the_naive_loop_over_the_models_own_answer(family: str, heads: tuple[int, int]) -> None:
    adapter = exact_adapter(family, *heads)
    place, steps = range(5, 22), 5  # " It is 4711 here.", and the bytes of " 4711"
    decoder = Decoder(adapter.model)
    records = [decoder.step(token) for token in prompt().token_ids]
    made = [int(records[-1].logits.argmax())]
    while len(made) < steps and made[-1] != 10:
        records.append(decoder.step(made[-1]))
        made.append(int(records[-1].logits.argmax()))
    expected = np.zeros((decoder.layers, decoder.heads))
    for layer in range(decoder.layers):
        for head in range(decoder.heads):
            keys = decoder.keys[layer][head * decoder.kv_heads // decoder.heads]
            for step in range(len(prompt().token_ids) - 1, len(records)):
                query = records[step].query[layer][head]
                logits = [float(query @ key) * decoder.scale for key in keys[: step + 1]]
                sinks = decoder.sinks(layer)
                weights = theory.softmax(logits + ([] if sinks is None else [float(sinks[head])]))[: step + 1]
                largest = sorted(range(len(weights)), key=lambda entry: -weights[entry])[: len(place)]
                inside = sum(weights[entry] for entry in largest if entry in place)
                expected[layer, head] += inside / (len(place) * steps)
    found, text = answer_heads.score_prompt(adapter, Evidence(prompt(), SENTENCE))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-15)
    assert expected.any()
    assert text == adapter.tokenizer.decode(made)


def test_only_prompts_that_were_answered_right_count(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = exact_adapter("llama", 4, 2)
    asked = [Evidence(prompt(f"{word} It is 4711 here. So it is"), SENTENCE) for word in ("Well.", "No.", "So.")]
    texts = [answer_heads.score_prompt(adapter, one)[1] for one in asked]
    alone = [answer_heads.score_prompt(adapter, one)[0] for one in asked]
    with pytest.raises(DatasetError, match="one of 3 prompts at least, got none"):
        answer_heads.head_scores(adapter, asked)
    verdicts = iter([True, False, True])
    seen: list[str] = []
    monkeypatch.setattr(answer_heads, "is_right", lambda text, answers: seen.append(text) or next(verdicts))
    scores, right_answers = answer_heads.head_scores(adapter, asked)
    assert (right_answers, seen) == (2, texts)
    np.testing.assert_allclose(scores.numpy(), (alone[0] + alone[2]).numpy() / 2, rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [(" 4711.", True), ("The 4711!", True), ("4711 it", True), ("it is 4711", False), ("4712", False), ("", False)],
)
def test_an_answer_is_right_where_more_than_half_of_its_words_agree(text: str, verdict: bool) -> None:
    """F1 of one word among k is 2 / (k + 1): 1, 0.67, and 0.5 of three, which is not more than a half."""
    assert answer_heads.is_right(text, ("4711",)) is verdict


def test_the_sentence_is_found_where_it_stands() -> None:
    assert answer_heads.locate_sentence(Evidence(prompt(), SENTENCE), ByteTokenizer()) == range(5, 22)
    assert answer_heads.locate_sentence(Evidence(prompt("(It is 4711 here.)"), SENTENCE), ByteTokenizer()) == range(
        1, 17
    )
    with pytest.raises(DatasetError, match="to hold 'It is 4712 here.', got a prompt without"):
        answer_heads.locate_sentence(Evidence(prompt(), "It is 4712 here."), ByteTokenizer())


def test_a_distractor_says_the_same_of_another_city() -> None:
    options = DatasetOptions(6, 1, haystack="noise", lengths=(300,), depths=(0.5,))
    for sample in needle.load("needle", options, ByteTokenizer()).samples:
        asked, sentence = add_distraction(sample, 1)
        city = next(city for city in needle.CITIES if city in sample.question)
        assert sentence == f"The magic number of {city} is {sample.answers[0]}."
        before, after = asked.context.split(sentence)
        other, number = re.match(r" The magic number of (\w+) is (\d{7})\.", after).groups()  # type: ignore[union-attr]
        assert other in needle.CITIES and other != city and number != sample.answers[0]
        assert (asked.question, asked.answers) == (sample.question, sample.answers)
        assert len(asked.context) == len(sample.context) + len(f" The magic number of {other} is {number}.")
        assert before and add_distraction(sample, 1)[0] == asked
    with pytest.raises(DatasetError, match="to hold needle's fact"):
        add_distraction(replace(sample, answers=("12",)), 1)


def model(layers: int = 2, heads: int = 2) -> SimpleNamespace:
    return SimpleNamespace(num_hidden_layers=layers, num_attention_heads=heads)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    path.write_text(files.as_json([[0.5, 0.0], [1.0, 2.0]], (0, 1)))
    assert files.read_required(path, model(), "headkv", "what works: snapkv") == ((0.5, 0.0), (1.0, 2.0))
    assert files.read_required(path, model(), None, "") == ()
    path.write_text(json.dumps({"0-0": [1, 2], "0-1": [3], "1-0": 0, "1-1": 1}))  # HeadKV's own files hold lists
    assert files.read_required(path, model(), "headkv", "what works: snapkv") == ((1.5, 3.0), (0.0, 1.0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{broken", "got text that is no JSON"),
        ("[1]", "got list"),
        ('{"0-0": 1, "0-1": 1, "1-0": 1}', "2 layers × 2 heads in .*, got 3 and none for '1-1'"),
        ('{"0-0": 1, "0-1": 1, "1-0": 1, "1-1": 1, "2-0": 1}', "got 5 and '2-0', which the model lacks"),
        ('{"0-0": 1, "0-1": 1, "1-0": 1, "1-1": 1, "0-0": 2}', "no JSON .the key '0-0' is there twice"),
        ('{"0-0": 1, "0-1": 1, "1-0": 1, "1-01": 1}', "got 4 and '1-01', which the model lacks"),
        ('{"0-0": 1, "0-1": 1, "1-0": 1, "1-1": 1, "note": 1}', "got 5 and 'note', which the model lacks"),
        ('{"0-0": -1, "0-1": 1, "1-0": 1, "1-1": 1}', "'0-0': expected a number of at least 0"),
        ('{"0-0": "x", "0-1": 1, "1-0": 1, "1-1": 1}', "'0-0': expected a number"),
        ('{"0-0": NaN, "0-1": 1, "1-0": 1, "1-1": 1}', "got text that is no JSON .NaN is no number"),
        ('{"0-0": true, "0-1": 1, "1-0": 1, "1-1": 1}', "'0-0': expected a number"),
        ('{"0-0": [1e308, 1e308], "0-1": 1, "1-0": 1, "1-1": 1}', "'0-0': expected a number"),
        ('{"0-0": [], "0-1": 1, "1-0": 1, "1-1": 1}', "'0-0': expected a number"),
        ('{"0-0": 0, "0-1": 0, "1-0": 0, "1-1": 0}', "a score above 0"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "scores.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        files.read_required(path, model(), "headkv", "what works: snapkv")


def test_no_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="perturbkv trace --head-scores .*what works: snapkv"):
        files.read_required(None, model(), "headkv", "what works: snapkv")
    with pytest.raises(
        ConfigError, match="got nothing; perturbkv trace --head-scores measures them; what works: snapkv"
    ):
        files.read_required(tmp_path / "none.json", model(), "headkv", "what works: snapkv")

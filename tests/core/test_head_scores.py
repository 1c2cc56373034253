"""Measured scores against a naive loop, and the JSON file that carries them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from perturbkv import head_scores as files
from perturbkv import retrieval
from perturbkv.datasets.encode import EncodedPrompt
from perturbkv.errors import ConfigError, DatasetError
from perturbkv.tokenization import ByteTokenizer
from tests.oracle import theory
from tests.oracle.decoder import Decoder
from tests.support.models import HEADS, exact_adapter


def prompt(text: str = "It is 4711 here. So it is", answer: str = "4711") -> EncodedPrompt:
    return EncodedPrompt("s", tuple(text.encode()), 0, answers=(answer,))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_scores_equal_the_naive_loop(heads: tuple[int, int]) -> None:
    adapter = exact_adapter("llama", *heads)
    given = prompt()
    answer, place = b" 4711", range(5, 10)
    decoder = Decoder(adapter.model)
    records = [decoder.step(token) for token in (*given.token_ids, *answer[:-1])]
    expected = np.zeros((decoder.layers, decoder.heads))
    for layer in range(decoder.layers):
        for head in range(decoder.heads):
            keys = decoder.keys[layer][head * decoder.kv_heads // decoder.heads]
            for step in range(len(given.token_ids) - 1, len(records)):
                query = records[step].query[layer][head]
                weights = theory.softmax([float(query @ key) / decoder.d_head**0.5 for key in keys[: step + 1]])
                largest = sorted(range(len(weights)), key=lambda entry: -weights[entry])[: len(place)]
                expected[layer, head] += sum(weights[entry] for entry in largest if entry in place) / len(answer)
    np.testing.assert_allclose(retrieval.head_scores(adapter, [given]).numpy(), expected, rtol=1e-9, atol=1e-15)
    assert expected.any()


def test_the_answer_is_found_where_it_stands() -> None:
    assert retrieval.locate_answer(prompt(), ByteTokenizer()) == (range(5, 10), list(b" 4711"))
    assert retrieval.locate_answer(prompt("(4711)"), ByteTokenizer()) == (range(1, 5), list(b"4711"))
    with pytest.raises(DatasetError, match="to hold its answer \\(4712\\)"):
        retrieval.locate_answer(prompt(answer="4712"), ByteTokenizer())


def model(layers: int = 2, heads: int = 2) -> SimpleNamespace:
    return SimpleNamespace(num_hidden_layers=layers, num_attention_heads=heads)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    path.write_text(files.as_json([[0.5, 0.0], [1.0, 2.0]]))
    assert files.given(path, model(), "headkv", "what works: snapkv") == ((0.5, 0.0), (1.0, 2.0))
    assert files.given(path, model(), None, "") == ()
    path.write_text(json.dumps({"0-0": [1, 2], "0-1": [3], "1-0": 0, "1-1": 1}))  # HeadKV's own files hold lists
    assert files.given(path, model(), "headkv", "what works: snapkv") == ((1.5, 3.0), (0.0, 1.0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{broken", "cannot be read"),
        ("[1]", "got list"),
        ('{"0-0": 1, "0-1": 1, "1-0": 1}', "2 layers × 2 heads in .*, got 3 and none for '1-1'"),
        ('{"0-0": 1, "0-1": 1, "1-0": 1, "1-1": 1, "2-0": 1}', "got 5 and '2-0', which the model lacks"),
        ('{"0-0": -1, "0-1": 1, "1-0": 1, "1-1": 1}', "'0-0': expected a number of at least 0"),
        ('{"0-0": "x", "0-1": 1, "1-0": 1, "1-1": 1}', "'0-0': expected a number"),
        ('{"0-0": NaN, "0-1": 1, "1-0": 1, "1-1": 1}', "'0-0': expected a number"),
        ('{"0-0": [], "0-1": 1, "1-0": 1, "1-1": 1}', "'0-0': expected a number"),
        ('{"0-0": 0, "0-1": 0, "1-0": 0, "1-1": 0}', "a score above 0"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "scores.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        files.given(path, model(), "headkv", "what works: snapkv")


def test_no_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="perturbkv head-scores .*what works: snapkv"):
        files.given(None, model(), "headkv", "what works: snapkv")
    with pytest.raises(ConfigError, match="does not exist; what works: snapkv"):
        files.given(tmp_path / "none.json", model(), "headkv", "what works: snapkv")

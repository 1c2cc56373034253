"""Kinds of decoded tokens: texts token by token, whatever the tokenizer, and what a measured sample stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.decoded_tokens import token_kinds
from perturbkv.datasets.encode import Prompt
from perturbkv.models.loading import ByteTokenizer
from perturbkv.schema import TOKEN_KINDS
from tests.datasets.test_ids_and_texts_can_be_stored import metaspace
from tests.support.models import tiny_adapter, token_ids
from tests.support.resolved import trace_sample

END = "<|end|>"


@dataclass(frozen=True)
class Pieces:
    """A tokenizer whose tokens are the places of these texts, of which END is special."""

    texts: Sequence[str]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        told = (self.texts[token] for token in tokens)
        return "".join(text for text in told if not (skip_special_tokens and text == END))


def kinds(before: Sequence[str], pieces: Sequence[str]) -> list[str]:
    """The kinds of pieces decoded after those of a prompt."""
    every = [*before, *pieces]
    ids = list(range(len(every)))
    return [TOKEN_KINDS[kind] for kind in token_kinds(ids[: len(before)], ids[len(before) :], Pieces(every).decode)]


CASES = {
    "an answer": (["Answer", ":"], {
        "\n": "formatting", "The": "word", " city": "word", " is": "word", " S": "name", "ão": "name", " Paulo": "name",
        ",": "formatting", " not": "word", " Mc": "name", "Donald": "name", "'s": "word", " i": "word", "Phone": "word",
        ".": "formatting", " Next": "word", " ": "formatting", END: "special",
    }),
    "numbers": (["paid"], {
        " ": "formatting", "1": "number", ",": "formatting", "234": "number", ".5": "number", "th": "word",
        " A4": "number", " x²": "number", " $": "formatting",
    }),
    "sentences": (["He said", " \""], {
        "No": "name", "!\" ": "formatting", "She": "word", "…\n\n": "formatting", "- ": "formatting", "It": "word",
        " (": "formatting", "U": "name", ".": "formatting", "S": "name", ".)": "formatting",
    }),
    "a piece that ends a sentence and begins the next": (["so"], {". Then": "word", "? Did Anna": "name"}),
    "after a turn": (["Hello Bob", END], {"Sure": "word", " Bob": "name", END: "special", "Übrigens": "word"}),
    "the text's beginning": ([], {"\"": "formatting", "Il": "word", " Étna": "name"}),
    "other scripts": (["东京"], {"。": "formatting", "是": "word", " Ελλάδα": "name", " 😀": "formatting"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_piece_has_its_kind(case: str) -> None:
    before, expected = CASES[case]
    assert dict(zip(expected, kinds(before, list(expected)), strict=True)) == expected


def test_a_character_of_several_tokens_has_its_kind_at_the_last() -> None:
    found = token_kinds(list(b"by "), list("Éa 😀".encode()), ByteTokenizer().decode)
    assert [TOKEN_KINDS[kind] for kind in found] == [
        "unknown", "name", "name", "formatting", "unknown", "unknown", "unknown", "formatting",
    ]  # fmt: skip


def test_pieces_of_sentencepiece_and_its_special_tokens() -> None:
    found = token_kinds([0, 1], [2, 3, 8, 4, 5, 6, 7, 0], metaspace().decode)
    assert [TOKEN_KINDS[kind] for kind in found] == [
        "word", "word", "formatting", "unknown", "unknown", "unknown", "formatting", "special",
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40), st.binary(min_size=2, max_size=12), st.data())
def test_a_kind_depends_on_no_later_token(prompt: bytes, decoded: bytes, data: st.DataObject) -> None:
    end = data.draw(st.integers(1, len(decoded)))
    whole = token_kinds(list(prompt), list(decoded), ByteTokenizer().decode)
    assert token_kinds(list(prompt), list(decoded[:end]), ByteTokenizer().decode) == whole[:end]


def test_a_sample_stores_the_kinds_of_its_tokens() -> None:
    adapter, prompt = tiny_adapter(), Prompt("s", token_ids(50), 0)
    run = RunConfig(model="m", dataset="d", configs=(EvictionConfig(budget=Budget(16), window=6),), steps=5)
    arrays = trace_sample(adapter, prompt, run).arrays
    tokens, stored = arrays["token_id"].tolist(), arrays["token_kind"].tolist()
    assert len(tokens) == 5
    assert stored == token_kinds(prompt.token_ids, tokens, adapter.tokenizer.decode)

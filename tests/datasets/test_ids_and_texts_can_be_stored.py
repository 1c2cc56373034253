"""Ids and texts of samples can be stored, and the texts of tokens are the text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import perturbkv as pk
from perturbkv.datasets import jsonl, longbench
from perturbkv.datasets.dataset_registry import DatasetOptions
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.prompts import token_texts
from perturbkv.datasets.sample import Sample
from perturbkv.errors import DatasetError
from perturbkv.models.loading import ByteTokenizer
from tests.support.models import tiny_adapter


def loaded(path: Path) -> Any:
    return jsonl.load(str(path), DatasetOptions(9, at_most=True), ByteTokenizer()).samples


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "a", "id": "a\\u0000b"}', "an id without NUL characters"),
        ('{"context": "a", "_id": "\\u0000"}', "an id without NUL characters"),
        ('{"prompt": "a", "id": "\\udfff"}', "half of a surrogate pair"),
        (json.dumps({"prompt": "a", "id": "x" * 1001}), "at most 1,000 characters, got 1,001"),
        ('{"prompt": "a", "id": ' + "9" * 5_000 + "}", "Exceeds the limit"),
        ('{"prompt": "a", "id": NaN}', "expected `id` to be text or a whole number"),
        ('{"context": "a", "_id": {}}', "expected `_id` to be text or a whole number"),
        ('{"prompt": "a", "more": ' + "[" * 10_000, "too deep"),
    ],
)
def test_a_row_that_cannot_be_stored_is_told_with_its_line(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n' + row)
    with pytest.raises(DatasetError, match=f"^{path}, line 2: ") as raised:
        loaded(path)
    assert said in str(raised.value)


def test_numbers_that_nobody_reads_may_be_what_python_writes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "length": NaN, "language": [-Infinity, 1e400]}')
    assert [sample.prompt for sample in loaded(path)] == ["a"]


@pytest.mark.parametrize("name", ["a\tb", "\x1b[2J", "\u202eb", "7" * 900, "=1+1", "🙂"])
def test_an_id_that_only_looks_odd_is_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "id": name}))
    assert loaded(path)[0].id == name


def test_a_mark_before_the_first_row_and_old_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r{"prompt": "b"}\r\n\n{"prompt": "c"}')
    assert [sample.prompt for sample in loaded(path)] == ["a", "b", "c"]


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "trec.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DatasetError, match="got a named pipe, not a regular file"):
        loaded(tmp_path / "rows.jsonl")
    with pytest.raises(DatasetError, match="got a named pipe, not a regular file"):
        longbench.load("trec", DatasetOptions(1, data_dir=tmp_path), ByteTokenizer())


def test_a_script_is_told_as_well() -> None:
    model = tiny_adapter()
    for made in (
        lambda: pk.Prompt.from_text("a", model, id="a\0b"),
        lambda: Prompt("\0", (1, 2), 0),
        lambda: pk.Prompt.from_text("\ud83d", model),
        lambda: Sample("a", "b", answers=("\udc00",)),
    ):
        with pytest.raises(DatasetError, match="NUL characters|half of a surrogate pair"):
            made()


TEXT = "naïve 日本 😀\n\n[bold]x[/] <|end|>\tend"


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_characters="\0\ufffd", exclude_categories=["Cs"]), min_size=1))
def test_pieces_of_bytes_are_the_text(text: str) -> None:
    found = token_texts(list(text.encode()), ByteTokenizer().decode)
    assert "".join(found) == text
    assert len(found) == len(text.encode())


def test_the_last_of_a_characters_tokens_has_it() -> None:
    assert token_texts(list("aé😀b".encode()), ByteTokenizer().decode) == ["a", "", "é", "", "", "", "😀", "b"]


def test_a_character_that_is_cut_off_is_shown_as_one() -> None:
    euro = list("€".encode())
    assert "".join(token_texts([*b"ab", *euro[:2]], ByteTokenizer().decode)) == "ab\ufffd"
    assert "".join(token_texts([*euro[:2], *b"cut"], ByteTokenizer().decode)) == "\ufffdcut"


def test_what_no_string_of_a_file_can_hold_has_a_sign() -> None:
    assert token_texts([97, 0, 98], ByteTokenizer().decode) == ["a", "\u2400", "b"]


def test_many_signs_for_no_character_hold_nothing_up() -> None:
    found = token_texts([255] * 40 + [97], ByteTokenizer().decode)
    assert found[-1].endswith("a")
    assert max(map(len, found)) <= 5


def metaspace() -> PreTrainedTokenizerFast:
    """As SentencePiece's: a word's space stands before it, and decoding drops the text's first one."""
    words = ["<s>", "\u2581the", "\u2581cat", "s", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "\u2581"]
    made = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    made.add_special_tokens([AddedToken("<s>")])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_a_leading_space_belongs_to_its_word() -> None:
    tokenizer = metaspace()
    found = token_texts([1, 2, 3, 8, 4, 5, 6, 7, 1], tokenizer.decode)
    assert found == ["the", " cat", "s", " ", "", "", "", "😀", " the"]
    assert "".join(found) == tokenizer.decode([1, 2, 3, 8, 4, 5, 6, 7, 1])


def test_special_tokens_are_shown() -> None:
    assert token_texts([0, 1], metaspace().decode)[0] == "<s>"


def test_pieces_of_a_byte_level_tokenizer_are_the_text() -> None:
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert "".join(token_texts(tokenizer(TEXT)["input_ids"], tokenizer.decode)) == TEXT

"""A prompt's tokens as pieces of its text, against the text that was encoded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from perturbkv.datasets.prompts import token_texts
from perturbkv.models.loading import ByteTokenizer

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

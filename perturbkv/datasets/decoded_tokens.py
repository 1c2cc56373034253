"""Decoded tokens: their texts, and kinds: special, formatting, number, name or word (METHOD: kinds of tokens)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from perturbkv.datasets.prompts import INCOMPLETE, Decode, token_texts
from perturbkv.schema import TOKEN_KINDS

_CONTEXT = 64
"""Tokens of the prompt's end with which decoded tokens are decoded, and in which the word before one is looked for."""
_WORD = re.compile(r"[^\W_]+")
_SENTENCE_END = re.compile(r"[\n\r\u2028\u2029。！？]|[.!?…][^\w\s]*\s")
"""Between two words: a line break, or a full stop, question or exclamation mark before a space, quotes in between."""


def decoded_texts(prompt_ids: Sequence[int], token_ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of every token decoded after a prompt, as `token_texts` gives it of one behind the other."""
    texts = token_texts([*prompt_ids[-_CONTEXT:], *token_ids], decode)
    return texts[len(texts) - len(token_ids) :]


def token_kinds(prompt_ids: Sequence[int], token_ids: Sequence[int], decode: Decode) -> list[int]:
    """Return the kind of every token decoded after a prompt, as its place in `TOKEN_KINDS`.

    A special token is one that `decode` skips; it ends a sentence. A kind depends on no later token: one that ends
    within a character is unknown, and the one that ends the character has its kind.
    """
    ids = [*prompt_ids[-_CONTEXT:], *token_ids]
    special = [bool(decode([token])) and not decode([token], skip_special_tokens=True) for token in ids]
    texts = ["\n" if skipped else text for skipped, text in zip(special, token_texts(ids, decode), strict=True)]
    kinds = [
        "special" if special[place] else text_kind("".join(texts[:place]), texts[place])
        for place in range(len(ids) - len(token_ids), len(ids))
    ]
    return [TOKEN_KINDS.index(kind) for kind in kinds]


def text_kind(before: str, text: str) -> str:
    """Return the kind of a token that is not special, by its text and the text before it.

    Formatting has no letter or digit, a number has a digit. A name has a letter of a word, a run of letters and digits
    that may begin in the text before, whose first letter is a capital and which begins no sentence.
    """
    if not text or text.endswith(INCOMPLETE):
        return "unknown"
    if any(letter.isdigit() for letter in text):
        return "number"
    if not any(letter.isalpha() for letter in text):
        return "formatting"
    whole, end = before + text, 0
    for word in _WORD.finditer(whole):
        begins_sentence = not end or _SENTENCE_END.search(whole, end, word.start()) is not None
        end = word.end()
        if end > len(before) and word[0][0].istitle() and not begins_sentence:
            return "name"
    return "word"

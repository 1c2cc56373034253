"""How far an answer's words are those that were expected: exact match and F1, as SQuAD's evaluation has them.

Rajpurkar et al., 2016, https://arxiv.org/abs/1606.05250, section 6.1. Both look at lower-case words without punctuation
and without articles. An accepted answer of which nothing is left so, such as the "A" of a multiple choice or "+", is
looked at with its articles, or with its punctuation too: SQuAD's own evaluation gives such an answer 0, and silence 1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(text: str, answers: Sequence[str]) -> float:
    """1 where the words are those of an accepted answer, in its order, else 0."""
    return float(any(found == expected for found, expected in _words(text, answers)))


def f1(text: str, answers: Sequence[str]) -> float:
    """Harmonic mean of the shares of both texts' words that they have in common, in [0, 1]; of the best answer."""
    return max((_f1(found, expected) for found, expected in _words(text, answers)), default=0.0)


def _f1(found: list[str], expected: list[str]) -> float:
    common = (Counter(found) & Counter(expected)).total()
    return 2 * common / (len(found) + len(expected)) if common else 0.0


def _words(text: str, answers: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """The text's words and each answer's, both as bare as leaves the answer any."""
    for answer in answers:
        bare = next((bare for bare in _BARE if bare(answer)), str.split)
        yield bare(text), bare(answer)


def _content(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _spoken(text: str) -> list[str]:
    return text.lower().translate(_PUNCTUATION).split()


def _typed(text: str) -> list[str]:
    return text.lower().split()


_BARE = (_content, _spoken, _typed)
"""Ways to see a text as words, the barest first."""

"""ROUGE-L of two texts: how much of one stands in the other in the same order (Lin, 2004, section 3)."""

from __future__ import annotations

import re

_WORDS = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
"""Letters and digits that stand together; of scripts that part no words, each sign."""


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, in lower case and without punctuation, in [0, 1].

    Of two texts without words 1 where both are the same, else 0.
    """
    found, wanted = (_WORDS.findall(one.lower()) for one in (text, reference))
    if not found or not wanted:
        return float(text.strip() == reference.strip())
    return 2 * _longest_common(found, wanted) / (len(found) + len(wanted))


def _longest_common(first: list[str], second: list[str]) -> int:
    """Length of the longest common subsequence, 64 words and more at once: a bit per word of `first` (Hyyrö, 2004)."""
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    whole = (1 << len(first)) - 1
    row = whole
    for word in second:
        matched = row & places.get(word, 0)
        row = (row + matched) | (row - matched)
    return len(first) - (row & whole).bit_count()

"""What each token of a prompt adds to its text, for people: the pieces, one behind the other, are the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\ufffd"
"""What a tokenizer shows in place of a character that is not whole yet."""
_LONGEST = 4
"""Tokens that a character is split over at most: UTF-8 has no longer ones."""
_NUL, _SHOWN_NUL = "\0", "\u2400"
"""U+0000, which no string of HDF5 holds, and the sign that stands for it."""


def pieces(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Every token's part of the text, as the tokenizer decodes it behind the token before.

    A character that several tokens make is the last one's; the others add nothing. What never becomes a character, and
    was cut off in the middle, stays what the tokenizer shows for it.
    """
    found: list[str] = []
    begin = done = 0  # the context that a token is decoded behind: a leading space counts only there
    for end in range(1, len(token_ids) + 1):
        whole = decode(list(token_ids[begin:end]))
        if whole.endswith(_HALF) and end < len(token_ids) and end - done < _LONGEST:
            found.append("")
            continue
        before = decode(list(token_ids[begin:done])) if done > begin else ""
        found.append(whole[len(before) :].replace(_NUL, _SHOWN_NUL))
        begin, done = done, end
    return found

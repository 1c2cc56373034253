"""Optional contents of samples: their text, and kept positions.

No other variable depends on text. The text of answers and of decoded tokens is decoded from the tokens that a sample
stores. Removing kept positions leaves digests, which show which sets are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.errors import TraceError
from perturbkv.schema import ANSWER_TEXT, DIGEST, KEPT, TEXT
from perturbkv.storage.run.sample_parts import Arrays, kept_digests
from perturbkv.trace import FailedSample, SampleTrace

_GENERATED = ("generated_full", "generated")
_OF_COMPRESSIONS = "missed_attention"
"""A variable of samples whose caches were compressed again: the text of decoded tokens is stored beside it."""
_NUL, _SHOWN_NUL = "\0", "\u2400"
"""U+0000, which no string of HDF5 holds, and the character that replaces it."""


@dataclass(frozen=True)
class SampleText:
    """The text to store in a sample.

    Attributes:
        prompt: the variables `TEXT`.
        decode: decodes an answer's tokens to the text that is graded.
        pieces: returns the text of each of the tokens decoded after the prompt.
        expected: accepted answers.
    """

    prompt: Arrays
    decode: Callable[[list[int]], str]
    pieces: Callable[[list[int]], list[str]]
    expected: Sequence[str] = ()

    def answers(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the `ANSWER_TEXT` variables of a sample, decoded from its arrays; empty without generation."""
        if not arrays.keys() >= set(_GENERATED):
            return {}
        decoded: dict[tuple[int, ...], str] = {}  # most caches give the same answer as others
        rows = [tuple(row[row >= 0].tolist()) for row in (arrays["generated_full"], *arrays["generated"])]
        for tokens in rows:
            if tokens not in decoded:
                decoded[tokens] = storable_text(self.decode(list(tokens)))
        full, *evicted = (decoded[tokens] for tokens in rows)
        expected = storable_text(json.dumps(list(self.expected), ensure_ascii=False))
        values = (full, evicted, expected)
        return {name: np.array(value, dtype=object) for name, value in zip(ANSWER_TEXT, values, strict=True)}

    def tokens(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the text of a sample's decoded tokens; empty where its caches were not compressed again."""
        if _OF_COMPRESSIONS not in arrays:
            return {}
        ids = arrays["token_id"]
        pieces = np.full(ids.shape, "", dtype=object)
        pieces[ids >= 0] = [storable_text(piece) for piece in self.pieces(ids[ids >= 0].tolist())]
        return {"token_text": pieces}


Texts = Mapping[str, SampleText]
"""Sample id -> its text."""


def storable_text(text: str) -> str:
    """Return a text in a form that HDF5 can store: U+0000 replaced, lone surrogates escaped as in JSON."""
    return text.replace(_NUL, _SHOWN_NUL).encode(errors="backslashreplace").decode()


def token_texts(arrays: Arrays, sample_id: str) -> list[str]:
    """Return the text of each token of a sample's prompt, from its arrays; empty for a sample stored without text.

    Raises TraceError where the tokens' starts do not ascend within the text.
    """
    if not set(TEXT) <= set(arrays):
        return []
    text, starts = str(arrays["prompt_text"]), np.asarray(arrays["prompt_start"]).tolist()
    ends = [*starts[1:], len(text)]
    if starts[:1] != [0] or any(first > last for first, last in zip(starts, ends, strict=True)):
        raise TraceError(
            f"expected prompt_start to ascend from 0 within the text of '{sample_id}', got other places; the "
            "trace was changed since it was made; make it again"
        )
    return [text[first:last] for first, last in zip(starts, ends, strict=True)]


def with_text(sample: SampleTrace | FailedSample, texts: Texts) -> SampleTrace | FailedSample:
    """Return the sample with its text; unchanged where `texts` has none of it, and where the sample failed."""
    text = texts.get(sample.sample_id)
    if text is None or isinstance(sample, FailedSample):
        return sample
    arrays = sample.arrays
    return SampleTrace(sample.sample_id, {**arrays, **text.prompt, **text.tokens(arrays), **text.answers(arrays)})


def without_kept(sample: SampleTrace | FailedSample) -> SampleTrace | FailedSample:
    """Return the sample with kept positions replaced by digests; unchanged without kept positions."""
    if isinstance(sample, FailedSample) or "kept_code" not in sample.arrays:
        return sample
    others = {name: array for name, array in sample.arrays.items() if name not in KEPT}
    return SampleTrace(sample.sample_id, {**others, DIGEST: kept_digests(sample.arrays)})

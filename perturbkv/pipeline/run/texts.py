"""The text of a run's prompts and answers as a trace stores it, made from their tokens: it needs no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.pieces import pieces
from perturbkv.datasets.prompts import Prompts
from perturbkv.pipeline.answers import grading
from perturbkv.pipeline.answers.grading import Decode
from perturbkv.schema import VARIABLES
from perturbkv.storage.trace.lazy import LazyArrays
from perturbkv.storage.trace.texts import SampleText

Arrays = Mapping[str, NDArray[Any]]
_DECODED = ("prompt_start", "prompt_text")


def text_arrays(prompt: Prompt, decode: Callable[[list[int]], str]) -> Arrays:
    """A prompt's tokens, its text, and where in it each token begins; what `decode` tells is made when it is read."""
    held: dict[str, Any] = {
        "prompt_count": len(prompt.token_ids),
        "prompt_offset": 0,
        "prompt_token": prompt.token_ids,
    }
    text: dict[str, NDArray[Any]] = {}

    def read(name: str) -> NDArray[Any]:
        if not text:
            text.update(_decoded(prompt, decode))
        return text[name]

    return LazyArrays({name: _stored(name, value) for name, value in held.items()}, _DECODED, read)


def _decoded(prompt: Prompt, decode: Callable[[list[int]], str]) -> dict[str, NDArray[Any]]:
    found = pieces(prompt.token_ids, decode)
    ends = np.cumsum([len(piece) for piece in found])
    values = ([0, *ends[:-1]], "".join(found))
    return {name: _stored(name, value) for name, value in zip(_DECODED, values, strict=True)}


def _stored(name: str, value: Any) -> NDArray[Any]:
    return np.asarray(value).astype(VARIABLES[name].dtype)


class PromptTexts(Mapping[str, SampleText]):
    """Sample id -> text of its prompt and answers, made whenever it is asked for: nothing grows with the samples."""

    def __init__(self, prompts: Prompts, decode: Decode) -> None:
        self._named = {prompt.sample_id: prompt for prompt in prompts}
        self._decode = decode

    def __getitem__(self, sample_id: str) -> SampleText:
        prompt = self._named[sample_id]
        said = partial(grading.text_of, decode=self._decode)
        return SampleText(text_arrays(prompt, self._decode), said, prompt.answers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

"""The text of a run's prompts as a trace stores it, made from their tokens: it needs no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.pieces import pieces
from perturbkv.datasets.prompts import Prompts
from perturbkv.schema import VARIABLES

Arrays = dict[str, NDArray[Any]]


def text_arrays(prompt: Prompt, decode: Callable[[list[int]], str]) -> Arrays:
    """A prompt's tokens, its text, and where in it each token begins."""
    found = pieces(prompt.token_ids, decode)
    ends = np.cumsum([len(piece) for piece in found])
    values: dict[str, Any] = {
        "prompt_count": len(found),
        "prompt_offset": 0,
        "prompt_token": prompt.token_ids,
        "prompt_start": [0, *ends[:-1]],
        "prompt_text": "".join(found),
    }
    return {name: np.asarray(value).astype(VARIABLES[name].dtype) for name, value in values.items()}


class PromptTexts(Mapping[str, Arrays]):
    """Sample id -> `text_arrays` of its prompt, made when they are first asked for."""

    def __init__(self, prompts: Prompts, decode: Callable[[list[int]], str]) -> None:
        self._named = {prompt.sample_id: prompt for prompt in prompts}
        self._decode, self._made = decode, dict[str, Arrays]()

    def __getitem__(self, sample_id: str) -> Arrays:
        if sample_id not in self._made:
            self._made[sample_id] = text_arrays(self._named[sample_id], self._decode)
        return self._made[sample_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

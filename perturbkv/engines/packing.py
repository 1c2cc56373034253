"""A prompt as it travels to a worker: its ids as the bytes of an array, which are many times smaller than a tuple."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.datasets.encode import Prompt

_IDS = "token_ids"


@dataclass(frozen=True)
class Packed:
    """A prompt, its token ids as int32 bytes."""

    ids: bytes
    others: dict[str, Any]

    @classmethod
    def of(cls, prompt: Prompt) -> Packed:
        """From the prompt."""
        names = (field.name for field in dataclasses.fields(prompt) if field.name != _IDS)
        ids = np.asarray(prompt.token_ids, dtype=np.int32).tobytes()
        return cls(ids, {name: getattr(prompt, name) for name in names})

    def prompt(self) -> Prompt:
        """The prompt that it was made of."""
        return Prompt(**{_IDS: tuple(np.frombuffer(self.ids, dtype=np.int32).tolist()), **self.others})

"""Right caches that hide what they hold, round coarsely, or hold equal tokens: nothing is said that is not so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from perturbkv.analyses.audit.audit import Audit
from tests.audit.test_faults_under_rounding_are_found import rounded
from tests.audit.test_planted_faults_are_told_apart import audited


def on_write(bits: int) -> type[Cache]:
    """A cache class that rounds whatever is written to so many bits."""

    class Layer(DynamicLayer):
        def update(self, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
            return super().update(rounded(keys, bits, False), rounded(values, bits, False), *more, **named)

    class Rounds(Cache):
        def __init__(self) -> None:
            super().__init__(layer_class_to_replicate=Layer)

    return Rounds


class CodedLayer(DynamicLayer):
    """A layer that keeps codes of its own, and shows no keys but the newest."""

    def update(self, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        codes = [one.bfloat16() for one in (keys, values)]
        before = getattr(self, "codes", [one[:, :, :0] for one in codes])
        self.codes = [torch.cat(both, dim=2) for both in zip(before, codes, strict=True)]
        self.is_initialized, self.keys, self.values = True, keys[:, :, -1:], values[:, :, -1:]
        return tuple(one.to(keys.dtype) for one in self.codes)  # type: ignore[return-value]

    def get_seq_length(self) -> int:
        return self.codes[0].shape[2] if hasattr(self, "codes") else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class Coded(Cache):
    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=CodedLayer)


def evicted(result: Audit) -> list[int]:
    return [run.entries.evicted for run in result.runs if run.entries]


@pytest.mark.parametrize("situation", ["single", "block", "batch"])
def test_padding_of_a_cache_of_codes_is_hidden_from_plain_calls(situation: str) -> None:
    result = audited("llama", Coded, situations=[situation])
    assert (result.verdict, sum(evicted(result))) == ("lossy", 0), result.conclusion()


@pytest.mark.parametrize("situation", ["single", "batch"])
def test_tokens_that_come_again_are_not_those_of_the_prompt(situation: str) -> None:
    result = audited("llama", on_write(3), situations=[situation], steps=6)
    assert (result.verdict, sum(evicted(result))) == ("lossy", 0), result.conclusion()
    assert "places in the cache" not in result.conclusion()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_entries_that_match_none_are_not_gone(name: str) -> None:
    result = audited(name, on_write(2), situations=["single"])
    assert result.verdict in ("lossy", "unknown"), result.conclusion()
    assert evicted(result) == [0]
    assert "goes" not in result.conclusion()

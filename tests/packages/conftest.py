"""The audit of a name in `evictions.py` on a tiny model, by the text that a user writes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import perturbkv as pk
from perturbkv.analyses.audit.audit import Audit
from perturbkv.models.adapter import Adapter
from tests.support.models import tiny_adapter, token_ids

TOKENS, STEPS = 80, 6


@functools.cache
def tiny(dtype: torch.dtype = torch.float32) -> Adapter:
    return tiny_adapter(layers=3, d_head=32, dtype=dtype)


@pytest.fixture
def audited() -> Callable[..., Audit]:
    def run(eviction: str, *situations: str, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> Audit:
        source = f"{Path(__file__).with_name('evictions.py')}:{eviction}"
        asked = {"situations": situations} if situations else {}
        prompt = pk.Prompt("p", token_ids(tokens), 0)
        return pk.audit(tiny(dtype), prompt, source, steps=STEPS, losses=False, progress=False, **asked)

    return run


@pytest.fixture
def ids() -> torch.Tensor:
    """The prompt of `audited`."""
    return torch.tensor([token_ids(TOKENS)])

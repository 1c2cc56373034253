"""Dumps and evictions by which the audit's false alarms are counted are right themselves, and are still audited."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from perturbkv.analyses.audit.cache_entries import FLOORS
from perturbkv.auditing.dumps.vllm_engine import EngineRequest
from tests.support.models import tiny_adapter

FOLDER = Path(__file__).resolve().parents[2] / "docs/audit-threshold"


@cache
def script(name: str = "dumps") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"audit_threshold_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("store", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_entries_of_decoded_tokens_fit_their_type(store: torch.dtype) -> None:
    """Scales are those of the prompt, here of one token. In e4m3 torch cuts off without a word."""
    with torch.inference_mode():
        for seed in range(6):
            request = EngineRequest("a", (seed,), 20)
            _, _, stored = script().compute(tiny_adapter("llama"), request, store, random.Random(seed))
            largest = [float(part.float().abs().max()) for both in stored.kept for part in both]
            assert max(largest) < torch.finfo(store).max


@pytest.mark.parametrize("index", range(3))
def test_a_clean_situation_lies_below_the_threshold(index: int) -> None:
    situations = script("situations")
    setting = next(itertools.islice(situations.settings("judged", 1000), index, None))
    found = situations.measure(setting, situations.models(setting, {}))
    assert set(found) == set(situations.DISTANCES)
    assert 0 <= max(found.values()) <= FLOORS

"""Dumps by which the audit's false alarms are counted are right themselves: none of their numbers is cut off."""

from __future__ import annotations

import importlib.util
import random
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from perturbkv.auditing.dumps.vllm_engine import EngineRequest
from tests.support.models import tiny_adapter

SCRIPT = Path(__file__).resolve().parents[2] / "docs/audit-threshold/dumps.py"


@cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_threshold_dumps", SCRIPT)
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

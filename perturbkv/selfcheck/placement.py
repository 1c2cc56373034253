"""A model whose layers lie over all GPUs against the same model on one device."""

from __future__ import annotations

import numpy as np
import torch

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import load_model
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.selfcheck.checks import Check
from perturbkv.trace import SampleTrace

_MEASURED = ("theta", "perturbation_isolated", "retained_mass", "hidden_drift_l1", "kept_count")
_RULE = "largest difference over the largest value, in float32"


def check(model: str, device: torch.device, tokens: int) -> list[Check]:
    """A prompt of `tokens` random tokens, with --device-map auto and without; `model` is `random:<alias>`."""
    spread = load_model(model, "float32", device_map="auto")
    plain = load_model(model, "float32", "cpu")  # spread weights are drawn on the CPU too
    one = Adapter(plain.model.to(device), plain.tokenizer, plain.name, plain.revision, True)
    found, expected = (_measured(adapter, tokens).arrays for adapter in (spread, one))
    places = len({parameter.device for parameter in spread.model.parameters()})
    return [
        Check(f"--device-map auto over {places}: {name}", _far(found[name], expected[name]), 1e-4, _RULE)
        for name in _MEASURED
    ]


def _measured(adapter: Adapter, tokens: int) -> SampleTrace:
    ids = np.random.default_rng(0).integers(0, 256, tokens).tolist()
    prompt = Prompt("selfcheck", tuple(ids), 0)
    configs = tuple(EvictionConfig(tokens // 4, selection=name) for name in ("attention", "two-stage"))
    return trace_sample(adapter, prompt, RunConfig(model=adapter.name, dataset="random tokens", configs=configs))


def _far(found: np.ndarray, expected: np.ndarray) -> float:
    first, second = found.astype(np.float64), expected.astype(np.float64)
    return float(np.abs(first - second).max() / np.abs(second).max())

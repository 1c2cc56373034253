"""Hand-made traces: arrays given by the test, everything else filled with harmless numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.schema import VARIABLES
from perturbkv.selection.grid import configuration
from perturbkv.trace import SampleTrace, Trace
from tests.support.traces import sample_trace, trace

MEASURED = Path(__file__).resolve().parents[1] / "store" / "golden" / "measured-v1.h5"


def config(selection: str, budget: float = 64, **more: Any) -> EvictionConfig:
    return configuration(budget, selection=selection, **more)


def hand_made(
    configs: Sequence[EvictionConfig],
    arrays: dict[str, Any],
    layers: int = 1,
    heads: int = 1,
    failures: dict[str, str] | None = None,
) -> Trace:
    """A trace of one step. `arrays`: variable -> (sample, …) without the step's axis; all samples evict something."""
    count = len(next(iter(arrays.values())))
    samples = []
    for place in range(count):
        made = dict(sample_trace(f"s{place}", configs=len(configs), layers=layers, heads=heads, seed=place).arrays)
        made["evicted"] = np.ones(len(configs), dtype=np.uint8)
        made["prompt_tokens"] = np.asarray(100)
        made["output_norm"] = np.full((1, layers, heads), 10.0)
        for name, values in arrays.items():
            made[name] = _with_step(name, np.asarray(values[place], dtype=VARIABLES[name].dtype))
        samples.append(SampleTrace(f"s{place}", made))
    return trace(*samples, failures=failures, configs=tuple(configs))


def _with_step(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    dims = VARIABLES[name].dims
    return np.expand_dims(values, dims.index("step")) if "step" in dims else values

"""Sample traces of any size with random numbers, for tests of what comes after the pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np

from perturbkv.config import Budget, EvictionConfig, RunConfig
from perturbkv.trace import VARIABLES, SampleTrace, Trace

KEPT = 3


def run_config(samples: int = 2, steps: int = 1, **more: Any) -> RunConfig:
    configs = tuple(EvictionConfig(budget=Budget(64), selection=name) for name in ("attention", "two-stage"))
    return RunConfig(**{"model": "m", "dataset": "d", "configs": configs, "samples": samples, "steps": steps, **more})


def sample_trace(
    name: str = "s0",
    *,
    configs: int = 2,
    steps: int = 1,
    layers: int = 2,
    heads: int = 2,
    seed: int = 0,
    optional: bool = False,
    keys: int = 5,
) -> SampleTrace:
    """Floats are lognormal, kept positions 0 … KEPT − 1 for every head."""
    draw = np.random.default_rng(seed)
    sizes = {"config": configs, "step": steps, "layer": layers, "head": heads, "d_head": 3, "d_model": 4, "key": keys}
    sizes["answer_token"] = 4
    arrays: dict[str, Any] = {}
    for variable, spec in VARIABLES.items():
        if spec.optional and not optional or variable == "kept_position":
            continue
        shape = tuple(sizes[axis] for axis in spec.dims)
        kind = np.dtype(spec.dtype)
        arrays[variable] = np.asarray(
            draw.lognormal(size=shape) if kind.kind == "f" else draw.integers(0, 2, shape)
        ).astype(kind)
    rows = configs * layers * heads
    arrays["kept_count"] = np.full((configs, layers, heads), KEPT)
    arrays["kept_offset"] = (np.arange(rows) * KEPT).reshape(configs, layers, heads)
    arrays["kept_position"] = np.tile(np.arange(KEPT, dtype=np.int32), rows)
    return SampleTrace(name, arrays)


def trace(*samples: SampleTrace, failures: dict[str, str] | None = None, **run: Any) -> Trace:
    """Samples joined in memory, failed ones behind them as NaN."""
    failures = failures or {}
    names = [sample.sample_id for sample in samples] + list(failures)
    arrays = {}
    for variable in samples[0].arrays:
        if variable == "kept_position":
            arrays[variable] = np.concatenate([sample.arrays[variable] for sample in samples])
            continue
        stacked = np.stack([sample.arrays[variable] for sample in samples])
        blank = np.zeros_like(stacked[:1]) if stacked.dtype.kind in "iu" else np.full_like(stacked[:1], np.nan)
        arrays[variable] = np.concatenate([stacked, *[blank] * len(failures)])
    steps = samples[0].sizes()["step"]
    config = run_config(samples=len(names), **{"steps": steps, **run})
    return Trace(config, tuple(names), arrays, failures, {}, "made.h5", "0123456789ab")

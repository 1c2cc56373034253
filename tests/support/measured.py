"""Hand-made traces: arrays given by the test, everything else filled with harmless numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv.analyses.identity import identity
from perturbkv.analyses.layers.drift import LastLayer, compare_samples
from perturbkv.analyses.measurements import Measurements
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.schema import VARIABLES
from perturbkv.selection.grid import configuration
from perturbkv.trace import SampleTrace, Trace
from tests.support.traces import sample_trace, trace

MEASURED = Path(__file__).resolve().parents[1] / "store" / "golden" / "selections-v5.h5"
"""A real run of a tiny random model without what MAY be absent: three prompts of 96 tokens and a failed one, seven
selections at budgets 16 and 80 in a window of 8, α = 0.75, granularity `kv`, and two-stage with the group's other
product."""


def config(selection: Choice | str, budget: float = 64, **more: Any) -> EvictionConfig:
    return configuration(budget, selection=selection, **more)


def last_layer(trace: Trace, baseline: EvictionConfig, treatment: EvictionConfig, distance: str = "l1") -> LastLayer:
    """The drift of every sample of a trace after the last layer, of two configurations."""
    return compare_samples(Measurements(trace, "layers"), identity(trace, (baseline, treatment)), distance)


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


def one_head(perturbs: Mapping[EvictionConfig, float], samples: int = 6, held: Sequence[float] = ()) -> Trace:
    """One head; sample i perturbs i + 1 times as much as the first, drifts as much squared, KL is a hundredth.

    `held`: of each configuration, entries over the full cache's; some where nothing is said.
    """
    each = (1 + np.arange(samples))[:, None] * np.array(list(perturbs.values()))
    floor = np.full((samples, 1, 1), 1e-9)
    arrays = {
        "perturbation_isolated": each[:, :, None, None],
        "perturbation_propagated": 2 * each[:, :, None, None],
        "noise_floor": floor,
        "noise_floor_isolated": floor,
        "hidden_drift_l1": each[:, :, None] ** 2,
        "hidden_noise_floor": np.full((samples, 1), 1e-9),
        "logit_kl": each / 100,
        "sigma_stage1": np.full((samples, len(perturbs), 1, 1), 0.9),
    }
    return hand_made(list(perturbs), arrays | ({"held_share": np.tile(held, (samples, 1))} if held else {}))


def _with_step(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    dims = VARIABLES[name].dims
    return np.expand_dims(values, dims.index("step")) if "step" in dims else values

"""Traces of answers whose first-step measures and scores the test gives, for the link between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import SampleTrace, Trace
from tests.support.measured import config
from tests.support.traces import sample_trace, trace

NAMES = ("attention", "two-stage", "random", "value", "two-stage-uniform", "attention-unpooled")


def methods(count: int, budget: float = 64, **more: Any) -> list[EvictionConfig]:
    return [config(name, budget, **more) for name in NAMES[:count]]


def answered(
    configs: Sequence[EvictionConfig],
    scores: Any,
    full: Any,
    measured: Mapping[str, Any],
    *,
    sigma: Any = None,
    theta_hat: Any = None,
    dataset: str = "d",
    **run: Any,
) -> Trace:
    """`scores` (sample, config), `full` (sample,); `measured`: measure -> (sample, config), relative to the norms.

    Measures that are not given are those of `propagated`. Two layers of two heads, each with a quarter of the norm;
    `sigma` and `theta_hat` (sample, config, layer, head), θ̂ in the unit of a head's norm of 10.
    """
    samples = []
    for place, (row, whole) in enumerate(zip(scores, full, strict=True)):
        name = f"{dataset}{place}"
        arrays: dict[str, Any] = dict(sample_trace(name, configs=len(configs), seed=place).arrays)
        usual = np.asarray(measured["propagated"])[place]
        level = {one: np.asarray(measured.get(one, [usual] * (place + 1))[place], dtype=float) for one in _OF}
        shape = (len(configs), 1, 2, 2)
        for one, variable in _OF.items():
            arrays[variable] = np.broadcast_to(level[one][:, None, None, None], shape) * 10
        arrays["retained_mass"] = 1 - arrays["retained_mass"] / 10
        arrays["output_norm"], arrays["hidden_norm"] = np.full((1, 2, 2), 10.0), np.full((1, 2), 5.0)
        drift, kl = (np.asarray(measured.get(one, [usual] * (place + 1))[place], float) for one in ("drift", "kl"))
        arrays["hidden_drift_l1"] = np.broadcast_to(drift[:, None, None] * 5, (len(configs), 1, 2))
        arrays["logit_kl"] = kl[:, None]
        arrays["sigma_stage1"] = np.full(shape, 0.9) if sigma is None else np.asarray(sigma[place])[:, None]
        arrays["theta_hat"] = arrays["theta"] if theta_hat is None else np.asarray(theta_hat[place])[:, None]
        arrays |= {"score": np.asarray(row, dtype=float), "score_full": np.float64(whole)}
        samples.append(SampleTrace(name, arrays))
    return trace(*samples, dataset=dataset, generate=8, configs=tuple(configs), **run)


_OF = {
    "isolated": "perturbation_isolated",
    "propagated": "perturbation_propagated",
    "theta": "theta",
    "lost": "retained_mass",
}

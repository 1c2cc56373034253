"""Hand-made traces of graded answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

CONFIGS = tuple(config(selection, 0.2) for selection in ("attention", "two-stage", "random"))


def graded(
    dataset: str,
    full: Sequence[float],
    evicted: Sequence[Sequence[float]],
    configs: Sequence[EvictionConfig] = CONFIGS,
    *,
    held: Sequence[float] = (),
    moved: Any = None,
    kl: Any = None,
    failures: dict[str, str] | None = None,
    **run: Any,
) -> Trace:
    """Scores (sample,) and (sample, config) of a data set; heads have norm 10, `moved` is L1 over it."""
    count = (len(full), len(configs))
    arrays: dict[str, Any] = {
        "score_full": np.asarray(full, dtype=float),
        "score": np.asarray(evicted, dtype=float),
        "perturbation_propagated": 10 * np.reshape(np.full(count, 0.1) if moved is None else moved, (*count, 1, 1)),
        "logit_kl": np.full(count, 0.01) if kl is None else np.asarray(kl),
    }
    if len(held):
        arrays["held_share"] = np.tile(held, (len(full), 1))
    made = hand_made(configs, arrays, failures=failures)
    return replace(made, run=replace(made.run, dataset=dataset, generate=8, **run), source=f"{dataset}/trace.h5")

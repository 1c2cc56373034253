"""Traces of any size for pages: those that the benchmark makes, without positions or with attention where asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.report_pages import sweep, synthetic_trace
from perturbkv.schema import PLACES
from perturbkv.trace import Trace


def configs(sides: int = 8, budgets: tuple[float, ...] = (0.1, 0.2, 0.4)) -> tuple[Any, ...]:
    """As `sides` × `budgets`: two policies, each with up to four selections."""
    return sweep(sides, budgets)


def paged(
    samples: int = 8,
    of: tuple[Any, ...] | None = None,
    layers: int = 30,
    heads: int = 9,
    tokens: int = 1500,
    *,
    steps: int = 1,
    seed: int = 0,
    kept: bool = True,
    attention: bool = False,
) -> Trace:
    """A trace of this size; `kept`: with positions, else with their digests alone."""
    made = synthetic_trace(samples, layers, heads, tokens, configs=of or (), steps=steps, kept=kept, seed=seed)
    if not attention:
        return made
    seen = np.random.default_rng(seed).lognormal(size=(samples, steps, layers, heads, tokens + 1))
    attended = (seen / seen.sum(axis=-1, keepdims=True)).astype(np.float32)
    return replace(made, arrays={**made.arrays, "attention_full": attended})


def compressed_again(made: Trace, seed: int = 0) -> Trace:
    """The trace as of a run that compresses caches before every other step; the last text is a step shorter."""
    draw, shape = np.random.default_rng(seed), made.arrays["perturbation_isolated"].shape
    samples, configs, steps = shape[:3]
    carried = np.full(shape, np.nan)
    carried[:, :, ::2, :, 0] = 1.0
    tokens = np.arange(samples * steps).reshape(samples, steps)
    arrays: dict[str, Any] = {
        "missed_attention": draw.lognormal(-3, 1, (samples, configs, steps)),
        "held_entries": draw.integers(40, 60, shape).astype(np.int32),
        "perturbation_carried": carried,
        "gone_attention": draw.uniform(0, 0.2, (*shape, len(PLACES))).astype(np.float32),
        "token_id": tokens,
        "token_text": np.array([[f" word{token}" for token in row] for row in tokens], dtype=object),
        "steps_measured": np.array([steps] * (samples - 1) + [steps - 1]),
    }
    arrays["missed_attention"][-1, :, -1], arrays["token_text"][-1, -1] = np.nan, ""
    return replace(made, arrays={**made.arrays, **arrays})

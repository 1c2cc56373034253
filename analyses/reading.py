"""A trace's numbers as every analysis takes them: complete samples alone, float64, checked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import VARIABLES, Trace

Floats = NDArray[np.float64]
EVIDENCE = 0.5
"""Theorem 3 speaks only of heads whose σ exceeds this."""


def check(trace: Trace, analysis: str, step: int) -> None:
    """Raise TraceError where no sample is complete, ConfigError where the trace has no such decode step."""
    if not trace.ok.any():
        msg = f"{analysis} needs at least one complete sample, {trace.source or 'this trace'} has none"
        raise TraceError(msg)
    if not 0 <= step < trace.run.steps:
        msg = f"expected a step from 0 to {trace.run.steps - 1}, got {step}"
        raise ConfigError(msg)


def values(trace: Trace, name: str, analysis: str, step: int | None = None) -> Floats:
    """A variable over the complete samples, at one decode step where it has steps: (sample, config?, layer?, head?).

    Raises TraceError where the trace lacks the variable, or a complete sample holds NaN.
    """
    array = np.asarray(trace.get(name, analysis), dtype=np.float64)
    if np.isnan(array).any():
        msg = f"expected numbers in every complete sample of {trace.source}, got NaN in '{name}'"
        raise TraceError(msg)
    dims = VARIABLES[name].dims
    return array if "step" not in dims else np.asarray(array.take(step or 0, axis=1 + dims.index("step")))


def kept_share(trace: Trace, config: int, analysis: str) -> float:
    """Mean share of the prompt's entries that a configuration keeps, over samples, layers and heads; in (0, 1]."""
    kept = values(trace, "kept_count", analysis)[:, config]
    tokens = values(trace, "prompt_tokens", analysis)
    return float((kept.mean(axis=(1, 2)) / tokens).mean())

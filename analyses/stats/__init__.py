"""Intervals, tests and correlations over samples, with NumPy and SciPy only: nothing here knows a trace."""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = ("arithmetic", "equivalence", "intervals", "permutation", "rank_correlation")


def __getattr__(name: str) -> ModuleType:
    """Import a module of this folder when it is first used, as `pk.stats.intervals`."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

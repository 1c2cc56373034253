"""Intervals, tests and correlations over samples, with NumPy and SciPy only: nothing here knows a trace."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perturbkv.analyses.stats import arithmetic as arithmetic
    from perturbkv.analyses.stats import equivalence as equivalence
    from perturbkv.analyses.stats import intervals as intervals
    from perturbkv.analyses.stats import permutation as permutation
    from perturbkv.analyses.stats import rank_correlation as rank_correlation

__all__ = ["arithmetic", "equivalence", "intervals", "permutation", "rank_correlation"]


def __getattr__(name: str) -> ModuleType:
    """Import a module of this folder when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

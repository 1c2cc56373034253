"""Result in, matplotlib Figure out: nothing here computes a quantity or saves a file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.result import Result

FIGURES = {
    "Ablation": "ablation",
    "Alpha": "alpha",
    "Assumption": "assumption",
    "AuditResult": "audit",
    "BoundTightness": "bounds",
    "BoundTightness.plot_heads": "bounds:draw_heads",
    "BudgetCurves": "budgets",
    "Cliffs": "cliff",
    "Divergence": "divergence",
    "DriftSeries": "layers",
    "EqualBytes": "equal_bytes",
    "HeadComparisons": "head_panels",
    "Horizon": "horizon",
    "Horizon.plot_heads": "horizon:draw_heads",
    "Judged": "judged",
    "Link": "correlation",
    "Measures": "measures",
    "MethodRanking": "methods",
    "Needle": "needle",
    "Needle.plot_correlation": "retrieval",
    "Needle.plot_depths": "needle_depths",
    "Needle.plot_digits": "needle:draw_digits",
    "PairSavings": "budget",
    "Preferences": "judged:draw_pairs",
    "Quality": "quality",
    "RegretResult": "regret",
    "Restriction": "restriction",
    "SafeBudgets": "safe_budget",
    "SampleSeries": "last_layer",
    "Split": "split",
    "Stability": "stability",
    "Swap": "patching",
    "Tokens": "tokens",
}
"""Class of a result, or its method where it has several figures -> the module that draws it, and its function, by
default `draw`."""


def draw(name: str, result: Result, width_mm: float) -> Figure:
    """Draw a result as the figure of a name in `FIGURES`, whose module is imported only now, and matplotlib with it."""
    module, _, function = FIGURES[name].partition(":")
    drawn: Figure = getattr(importlib.import_module(f"{__name__}.{module}"), function or "draw")(result, width_mm)
    return drawn

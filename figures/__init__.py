"""Figures: each draws a result as a matplotlib Figure; no module computes a quantity or saves a file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from perturbkv.errors import UnknownNameError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.result import Result

FIGURES = {
    "Ablation": "ablation:draw_ablation",
    "Alpha": "alpha",
    "Assumption": "bounds:draw_assumption",
    "Audit": "audit",
    "BoundTightness": "bounds:draw_bound_tightness",
    "BoundTightness.plot_heads": "bounds:draw_heads",
    "BudgetCurves": "layers:draw_budget_curves",
    "Cliffs": "budget:draw_cliff",
    "Divergence": "quality:draw_divergence",
    "DriftSeries": "layers:draw_layers",
    "EqualBytes": "budget:draw_equal_bytes",
    "HeadComparisons": "heads:draw_panels",
    "Horizon": "horizon",
    "Horizon.plot_heads": "horizon:draw_heads",
    "JudgeScores": "quality:draw_judged",
    "Correlation": "correlation",
    "Measures": "measures",
    "MethodRanking": "ablation:draw_methods",
    "Needle": "needle:draw_needle",
    "Needle.plot_correlation": "needle:draw_retrieval",
    "Needle.plot_depths": "needle:draw_needle_depths",
    "Needle.plot_digits": "needle:draw_digits",
    "PairSavings": "budget:draw_savings",
    "Patching": "patching",
    "Preferences": "quality:draw_preferred",
    "Quality": "quality:draw_quality",
    "Regret": "regret",
    "Restriction": "ablation:draw_restriction",
    "SafeBudgets": "budget:draw_safe_budget",
    "SampleSeries": "layers:draw_last_layer",
    "Split": "split",
    "Stability": "stability",
    "Tokens": "tokens",
}
"""Class of a result, or "Class.method" for its further figures -> module that draws it, ":" and function (default:
`draw`)."""


def draw(name: str, result: Result, width_mm: float) -> Figure:
    """Return a result's figure; `name` is a key of `FIGURES`, whose module, and matplotlib with it, is imported here.

    Raises UnknownNameError for a result that has no figure.
    """
    if name not in FIGURES:
        raise UnknownNameError(name, "figure of a result", FIGURES)
    module, _, function = FIGURES[name].partition(":")
    figure: Figure = getattr(importlib.import_module(f"{__name__}.{module}"), function or "draw")(result, width_mm)
    return figure

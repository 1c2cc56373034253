"""Figures: each draws a result as a matplotlib Figure, in a style that `draw` opens; none computes or saves a file."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from perturbkv.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result
    from perturbkv.captions import CaptionedFigure

FIGURES = {
    "Ablation": ("ablation:draw_ablation", "What each ingredient of a selection brings"),
    "Assumption": ("bounds:draw_assumption", "Assumption 1 by head"),
    "Audit": ("audit", "An eviction against the masked reference"),
    "BoundTightness": ("bounds:draw_bound_tightness", "How tight the bounds on the perturbation are"),
    "BoundTightness.plot_heads": ("bounds:draw_heads", "Tightness of Theorem 2 by head"),
    "BudgetCurves": ("layers:draw_budget_curves", "Drift and next token over the cache share"),
    "Cliffs": ("budget:draw_cliff", "Next token's KL over budgets"),
    "DumpAudit": ("audit:draw_dump", "An engine's cache against the plain model"),
    "Divergence": ("quality:draw_divergence", "Where answers leave the full cache's"),
    "DriftSeries": ("layers:draw_layers", "Drift of the residual stream by layer"),
    "HeadComparisons": ("heads:draw_panels", "Perturbation per head, one selection against another"),
    "EqualBytes": ("ablation:draw_equal_bytes", "Loss of evicted and rounded caches over their bytes"),
    "Horizon": ("horizon", "Perturbation over the decode steps"),
    "Horizon.plot_steps": ("horizon:draw_steps", "Perturbation along the text by layer"),
    "Horizon.plot_heads": ("horizon:draw_heads", "Growth of the perturbation by head"),
    "Correlation": ("correlation", "Does perturbation tell which answers are lost?"),
    "MethodRanking": ("ablation:draw_methods", "Propagated perturbation by method"),
    "MethodRanking.plot_budgets": ("ablation:draw_methods_over_budgets", "Propagated perturbation over the budgets"),
    "Needle": ("needle:draw_needle", "Numbers found by length and depth"),
    "Needle.plot_correlation": ("needle:draw_retrieval", "Correlation of the first step's measures with retrieval"),
    "Needle.plot_depths": ("needle:draw_needle_depths", "Numbers found by depth"),
    "Needle.plot_digits": ("needle:draw_digits", "Leading digits found by length and depth"),
    "Patching": ("patching", "Layers and heads that decide the output"),
    "Perplexity": ("quality:draw_perplexity", "Perplexity of a text, evicted over full cache"),
    "Quality": ("quality:draw_quality", "Scores of answers over the cache share"),
    "Restriction": ("ablation:draw_restriction", "What restrictions on kept sets cost"),
    "SafeBudgets": ("budget:draw_safe_budget", "The smallest safe budget"),
    "SampleSeries": ("layers:draw_last_layer", "Drift after the last layer by sample"),
    "Tokens": ("tokens", "Which tokens of a prompt are kept"),
}
"""Class of a result, or "Class.method" for its further figures -> module that draws it, ":" and function (default:
`draw`); and the figure's headline, a slide's title, and the beginning of its caption where
the result has no short conclusion."""


STYLE_NAMES = ("screen", "paper", "talk")
"""Styles of figures; `perturbkv.figures.style.STYLES` has them."""


def check_backend() -> None:
    """Raise ConfigError where the environment's MPLBACKEND names no backend of matplotlib, which is imported here."""
    try:
        importlib.import_module("matplotlib")
    except ValueError:
        backend = os.environ.get("MPLBACKEND", "")
        raise ConfigError(
            f"expected MPLBACKEND to name a backend of matplotlib, such as agg, got '{backend}'; unset it"
        ) from None


def draw(name: str, result: Result, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
    """Return a result's figure; its module, and matplotlib with it, is imported here.

    Args:
        name: a key of `FIGURES`.
        result: what is drawn.
        width_mm: printed width; None: 174, of two columns of a journal.
        style: a name of `perturbkv.figures.style.STYLES`.

    Raises:
        UnknownNameError: a result that has no figure, or an unknown style.
        ConfigError: a width that is too small for the style, or, NarrowFigureError, for this figure.
    """
    if name not in FIGURES:
        raise UnknownNameError(name, "figure of a result", FIGURES)
    check_backend()
    place, headline = FIGURES[name]
    module, _, function = place.partition(":")
    styles = importlib.import_module(f"{__name__}.style")
    chosen, width_mm = styles.check_style(style, width_mm)
    with styles.use(chosen):
        draw_result = getattr(importlib.import_module(f"{__name__}.{module}"), function or "draw")
        figure: CaptionedFigure = draw_result(result, width_mm)
        figure.headline = headline
        if "." not in name:
            figure.conclusion = result.conclusion()
        if not chosen.notes:
            importlib.import_module(f"{__name__}.finishing").finish(figure, width_mm)
    return figure

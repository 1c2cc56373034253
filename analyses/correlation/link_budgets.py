"""Across the budgets of one method: a smaller cache perturbs more and answers worse for many reasons.

Shown apart, beside the budget's own correlation: where perturbation correlates no more than that, it tells nothing that
the budget did not.
"""

from __future__ import annotations

from dataclasses import dataclass

from perturbkv.analyses.correlation.link_data import Pooled
from perturbkv.analyses.correlation.link_prompts import NAMES, known
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import sweeps
from perturbkv.analyses.ranked_together import LEAST_CONFIGS
from perturbkv.analyses.stats.estimates import Estimate, mean_of, over_prompts
from perturbkv.analyses.stats.intervals import CORRELATION
from perturbkv.analyses.stats.rank_correlation import spearman

EVICTED = "evicted"
"""What the budget itself is called among the measures: the share of the prompt's entries that go."""


@dataclass(frozen=True)
class AcrossBudgets:
    """ρ between a measure and the score over the budgets of one method, mean over methods, then over prompts.

    Attributes:
        measure: a key of `NAMES`, or `evicted`: the budget's own correlation.
        rho: over prompts.
    """

    measure: str
    rho: Estimate


def across_budgets(found: Pooled) -> tuple[AcrossBudgets, ...]:
    """One per measure, the budget itself first; nothing where no method has three budgets."""
    ranked = [places for places in sweeps(found.run, None) if len(places) >= LEAST_CONFIGS]
    if not ranked:
        return ()
    return tuple(
        AcrossBudgets(name, over_prompts(mean_of([_rho(found, name, places) for places in ranked]), CORRELATION))
        for name in (EVICTED, *NAMES)
    )


def _rho(found: Pooled, measure: str, places: list[int]) -> Floats:
    measured = _measured(found, measure, places)
    return known(measured, lambda held, rows: spearman(held.T, found.evicted[rows][:, places].T))


def _measured(found: Pooled, measure: str, places: list[int]) -> Floats:
    if measure == EVICTED:
        return 1 - found.kept[:, places]
    return found.bound(places)[0] if measure == "theta_hat" else found.measured[measure][:, places]

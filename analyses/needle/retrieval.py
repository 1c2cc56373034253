"""Does perturbation tell whether the needle is still found? Rank correlation between the two. (No paper tested it.).

Only the first decode step counts, between the configurations of one prompt that share budget, granularity and
protection: a longer prompt or a smaller cache perturbs more and answers less for many reasons. KL, drift and propagated
perturbation on the answer's own teacher-forced tokens nearly are the score; they are told apart, as `circular` (METHOD:
the protocol, 7). Only samples that the full cache answers count: where it fails, eviction has nothing to lose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses import first_step
from perturbkv.analyses.first_step import MEASURES
from perturbkv.analyses.measurements import Floats, held_shares, measured_steps, values
from perturbkv.analyses.needle.needle_grid import ANALYSIS, OUTCOMES
from perturbkv.analyses.ranked_together import LEAST_CONFIGS, ranked_together
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain, ratio
from perturbkv.analyses.stats.intervals import CORRELATION, Scalar
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

CIRCULAR = {
    **first_step.CIRCULAR,
    "kl_all": "KL, nat, all steps",
    "drift_all": "drift, all steps",
    "propagated_all": "propagated L1, all steps",
}
"""Of the answer's own tokens: nearly the score itself. The first two are of the first step, which gives the first."""


@dataclass(frozen=True)
class Correlation:
    """Spearman's ρ between a measure and an outcome across the configurations of one prompt and one `BudgetLink`.

    Negative: the more perturbed a configuration, the less of the number it finds.

    Attributes:
        measure: a key of `MEASURES` or `CIRCULAR`.
        outcome: `score` (exactly right) or `digits` (share of leading digits).
        rho: mean over prompts; NaN where no prompt decides.
        interval: of that mean.
        deciding: prompts in which configurations differ in outcome and in the measure; only these have ranks.
    """

    measure: str
    outcome: str
    rho: float
    interval: Scalar
    deciding: int


@dataclass(frozen=True)
class BudgetLink:
    """Configurations of one budget, one granularity and one protection.

    Attributes:
        name: the budget as the user gave it, and behind it the granularity and the protection where the run has
            several.
        configs: its configurations.
        held: (config,) entries that each cache holds over those of the full cache; NaN where the trace does not tell.
        correlations: one per measure and outcome; `circular` those that nearly are the score.
        score, digits: (sample, config) the outcomes.
        measured: measure -> (sample, config), relative to the full run's own norms (KL in nat, 1 − S as it is).
    """

    name: str
    configs: tuple[EvictionConfig, ...]
    held: Floats
    correlations: tuple[Correlation, ...]
    circular: tuple[Correlation, ...]
    score: Floats
    digits: Floats
    measured: dict[str, Floats]

    @property
    def held_ends(self) -> tuple[float, float]:
        """The least and the largest of `held`."""
        return float(self.held.min()), float(self.held.max())

    def of(self, outcome: str) -> list[Correlation]:
        """The correlations with one outcome, those that nearly are the score behind the others."""
        return [one for one in (*self.correlations, *self.circular) if one.outcome == outcome]


@dataclass(frozen=True)
class Retrieval:
    """The link between perturbation and retrieval.

    Attributes:
        samples: that the full cache answers; `left_out`: the others.
        steps: decode steps that the circular measures are the mean of.
        budgets: one entry per budget, granularity and protection of three configurations or more; `too_few`: the
            names of the others.
    """

    samples: int
    left_out: int
    steps: int
    budgets: tuple[BudgetLink, ...]
    too_few: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; the measures beside each score."""
        links = [{"budget": link.configs[0].budget, **vars(link)} for link in self.budgets]
        found: dict[str, Any] = plain({**vars(self), "budgets": links})
        return found


def correlate(trace: Trace, measured: dict[str, Floats]) -> Retrieval:
    """Correlations of the `measures` of a run that generated answers. Raises TraceError where it lacks these."""
    answered = values(trace, "score_full", ANALYSIS) == 1
    outcomes = {name: values(trace, name, ANALYSIS)[answered] for name in OUTCOMES}
    measured = {name: array[answered] for name, array in measured.items()}
    budgets = ranked_together(trace.run.configs)
    return Retrieval(
        samples=int(answered.sum()),
        left_out=int((~answered).sum()),
        steps=trace.run.steps,
        budgets=tuple(
            _link(trace, name, places, measured, outcomes)
            for name, places in budgets.items()
            if len(places) >= LEAST_CONFIGS
        ),
        too_few=tuple(name for name, places in budgets.items() if len(places) < LEAST_CONFIGS),
    )


def check_scored(trace: Trace) -> None:
    """Raise TraceError unless numbers were expected, each of which was found or was not: scores of 0 and 1."""
    names = ("score_full", "score", "digits_full")
    full, evicted, digits = (np.asarray(trace.get(name, ANALYSIS), dtype=np.float64) for name in names)
    unscored = np.isnan(full) | np.isnan(digits)
    if unscored.any():
        msg = (
            f"{ANALYSIS} needs answers that are numbers, got others or none in {unscored.sum()} of {len(unscored)} "
            f"samples of {trace.source or 'this trace'}; give prompts whose accepted answers are numbers"
        )
        raise TraceError(msg)
    partly = [score for score in (*full, *evicted.ravel()) if score not in (0, 1)]
    if partly:
        msg = (
            f"{ANALYSIS} needs scores of 0 or 1, a number found or not, got {partly[0]:.3f} in "
            f"{trace.source or 'this trace'}; grade answers by exact-number, which the data set needle does by itself"
        )
        raise TraceError(msg)


def measures(trace: Trace) -> dict[str, Floats]:
    """(sample, config) of each measure, equal where all kept sets are, relative to the full run's norms."""
    steps = np.arange(trace.run.steps) < measured_steps(trace)[:, None]
    heads = values(trace, "output_norm", ANALYSIS).sum(axis=(2, 3))[:, None]
    moved = values(trace, "perturbation_propagated", ANALYSIS).sum(axis=(3, 4)) / heads
    drift = values(trace, "hidden_drift_l1", ANALYSIS)[..., -1] / values(trace, "hidden_norm", ANALYSIS)[:, None, :, -1]
    later = {
        "kl_all": _mean(values(trace, "logit_kl", ANALYSIS), steps),
        "drift_all": _mean(drift, steps),
        "propagated_all": _mean(moved, steps),
    }
    return {**first_step.measures(trace, ANALYSIS), **first_step.alike(trace, later)}


def _mean(array: Floats, steps: np.ndarray) -> Floats:
    """(sample, config) mean over the steps that each sample has."""
    held = steps[:, None]
    return np.asarray(np.where(held, array, 0).sum(axis=-1) / held.sum(axis=-1))


def _link(
    trace: Trace, name: str, places: list[int], measured: dict[str, Floats], outcomes: dict[str, Floats]
) -> BudgetLink:
    here = {name: array[:, places] for name, array in measured.items()}
    scored = {name: array[:, places] for name, array in outcomes.items()}
    first, circular = (
        tuple(_correlation(one, outcome, here[one], scored[outcome]) for outcome in OUTCOMES for one in names)
        for names in (MEASURES, CIRCULAR)
    )
    return BudgetLink(
        name=name,
        configs=tuple(trace.run.configs[place] for place in places),
        held=held_shares(trace, ANALYSIS)[places],
        correlations=first,
        circular=circular,
        score=scored["score"],
        digits=scored["digits"],
        measured=here,
    )


def _correlation(measure: str, outcome: str, measured: Floats, found: Floats) -> Correlation:
    within = spearman(measured.T, found.T) if len(found) else np.empty(0)
    held = within[~np.isnan(within)]
    return Correlation(
        measure=measure,
        outcome=outcome,
        rho=float(ratio(held.sum(), len(held))),
        interval=intervals.of_mean(held, CORRELATION),
        deciding=len(held),
    )

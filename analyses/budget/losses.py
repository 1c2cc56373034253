"""What a configuration loses, sample by sample, in the measures that budgets are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perturbkv.analyses.budget.budget_axis import Axis
from perturbkv.analyses.budget.budget_equivalence import Reached, reached, reached_by_half
from perturbkv.analyses.measurements import Floats, values
from perturbkv.analyses.scores import scores
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import DIFFERENCE, POSITIVE, RATIO, Scalar, share_of
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.trace import Trace

MEASURES = {
    "score": "score × 100",
    "propagated": "propagated L1 / ‖o‖₁",
    "kl": "KL, nat, median",
}
"""Name -> what it is called above numbers: mean score of answers, mean propagated perturbation of all heads over the
norms of their full outputs, and KL(full ‖ evicted), whose mean a single prompt can make."""


@dataclass(frozen=True)
class Loss:
    """One measure of a trace, as what is lost: the less the better.

    Attributes:
        name: a key of `MEASURES`.
        each: (sample, config) 1 − score; relative L1; nat.
        full: mean score of the full cache's answers; NaN of other measures.
    """

    name: str
    each: Floats
    full: float

    def level(self, place: int) -> tuple[float, Scalar]:
        """What stands in tables of one configuration: the score in [0, 1], the mean L1, the median KL."""
        each = self.each[:, place]
        if self.name == "kl":
            band = intervals.of_medians(each[:, None])
            return float(np.median(each)), None if band is None else band.at(0)
        if self.name == "score":
            return float(1 - each.mean()), intervals.of_mean(1 - each, share_of(0))
        return float(each.mean()), intervals.of_mean(each, POSITIVE)

    def reached(self, baseline: Axis, treatment: Axis) -> list[Reached]:
        """The budgets at which the baseline loses no more than the treatment does at each of its own."""
        falling, levels = (self.each[:, list(one.places)] for one in (baseline, treatment))
        if self.name == "kl":
            return reached_by_half(baseline.at, falling, treatment.at, levels)
        return reached(baseline.at, falling, treatment.at, levels, DIFFERENCE if self.name == "score" else RATIO)


def losses(trace: Trace, by: Sequence[str] | None, step: int, analysis: str) -> list[Loss]:
    """The measures asked for, or with None all that the trace has; scores are of whole answers, whatever the step.

    Raises TraceError where the trace lacks one, UnknownNameError for an unknown one, ConfigError for none at all.
    """
    return [_loss(trace, name, step, analysis) for name in (_held(trace) if by is None else checked(by))]


def checked(by: Sequence[str]) -> list[str]:
    """Names of measures, or one, each once. Raises UnknownNameError, or ConfigError where there is none."""
    names = [by] if isinstance(by, str) else list(by)
    for name in names:
        if name not in MEASURES:
            raise UnknownNameError(name, "measure", MEASURES)
    if not names:
        msg = f"expected a measure ({', '.join(MEASURES)}), got none"
        raise ConfigError(msg)
    return list(dict.fromkeys(names))


def _held(trace: Trace) -> list[str]:
    """The measures of a trace: all of them, without scores where some answer has none."""
    graded = "score_full" in trace.arrays and not np.isnan(np.asarray(trace.arrays["score_full"])[trace.ok]).any()
    return [name for name in MEASURES if graded or name != "score"]


def _loss(trace: Trace, name: str, step: int, analysis: str) -> Loss:
    if name == "score":
        found = scores(trace, analysis)
        return Loss(name, 1 - found.evicted, float(found.full.mean()))
    if name == "kl":
        return Loss(name, values(trace, "logit_kl", analysis, step), float("nan"))
    moved = values(trace, "perturbation_propagated", analysis, step).sum(axis=(2, 3))
    whole = values(trace, "output_norm", analysis, step).sum(axis=(1, 2))
    return Loss(name, moved / whole[:, None], float("nan"))

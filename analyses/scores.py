"""How good the answers of the full and of the evicted caches are, sample by sample, as the data set's metric says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perturbkv.analyses.measurements import Floats
from perturbkv.errors import TraceError
from perturbkv.trace import Trace


@dataclass(frozen=True)
class Scores:
    """Scores in [0, 1] of the complete samples.

    Attributes:
        full: (sample,) of the full cache's answers.
        evicted: (sample, config) of each configuration's.
    """

    full: Floats
    evicted: Floats

    @property
    def drop(self) -> Floats:
        """(sample, config) what eviction cost; negative where the evicted cache answers better."""
        return self.full[:, None] - self.evicted


def scores(trace: Trace, analysis: str) -> Scores:
    """The scores of a trace; `analysis` is who asks.

    Raises TraceError where no answers were generated, or where no metric graded one of them.
    """
    if "score_full" not in trace.arrays:
        msg = (
            f"{analysis} needs graded answers, {trace.source or 'this trace'} has none; make a trace that has them: "
            f"perturbkv quality --model {trace.run.model} --dataset {trace.run.dataset}"
        )
        raise TraceError(msg)
    full, evicted = (np.asarray(trace.get(name, analysis), dtype=np.float64) for name in ("score_full", "score"))
    if ungraded := int((np.isnan(full) | np.isnan(evicted).any(axis=1)).sum()):
        msg = (
            f"{analysis} needs graded answers, got none in {ungraded} of {len(full)} samples of "
            f"{trace.source or 'this trace'}; measure prompts that have accepted answers"
        )
        raise TraceError(msg)
    return Scores(full, evicted)

"""What eviction does to the first decode step, as one number per prompt and configuration.

The step reads the answer's first token and gives its second: it is known before the second is there (METHOD: the
protocol, 7). Sums of all heads, relative to the full run's own norms, so that prompts can stand beside each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import kept_sets
from perturbkv.analyses.measurements import Floats, values
from perturbkv.trace import Trace

MEASURES = {
    "isolated": "isolated L1",
    "theta": "θ",
    "propagated": "propagated L1",
    "lost": "1 − S",
}
CIRCULAR = {"kl": "KL, nat", "drift": "last layer's drift"}
"""Of what the step gives, the answer's second token: nearly the score itself."""


def measures(trace: Trace, analysis: str) -> dict[str, Floats]:
    """(sample, config) of each measure, equal where all kept sets are. Raises TraceError as `reading.values`."""
    heads = values(trace, "output_norm", analysis, 0).sum(axis=(1, 2))[:, None]
    total = {
        name: values(trace, name, analysis, 0).sum(axis=(2, 3)) / heads
        for name in ("perturbation_isolated", "theta", "perturbation_propagated")
    }
    drift, norm = (values(trace, name, analysis, 0)[..., -1] for name in ("hidden_drift_l1", "hidden_norm"))
    found = {
        "isolated": total["perturbation_isolated"],
        "theta": total["theta"],
        "propagated": total["perturbation_propagated"],
        "lost": 1 - values(trace, "retained_mass", analysis, 0).mean(axis=(2, 3)),
        "kl": values(trace, "logit_kl", analysis, 0),
        "drift": drift / norm[:, None],
    }
    return alike(trace, found)


def alike(trace: Trace, found: dict[str, Floats]) -> dict[str, Floats]:
    """The (sample, config) arrays with equal values where all kept sets are equal: what differs there is rounding."""
    first = _first_alike(trace)
    return {name: np.take_along_axis(array, first, axis=1) for name, array in found.items()}


def _first_alike(trace: Trace) -> NDArray[np.int64]:
    """(sample, config) the first configuration that keeps the same sets everywhere."""
    count, samples = len(trace.run.configs), int(trace.ok.sum())
    first = np.tile(np.arange(count), (samples, 1))
    for later in range(count):
        for earlier in reversed(range(later)):
            same = kept_sets.whole(trace, earlier, later)
            first[same, later] = first[same, earlier]
    return first

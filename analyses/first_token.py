"""Answers that eviction can hardly touch: their only token is every cache's alike (METHOD: Generation).

In the regular scenario an answer's first token comes from the prefill, which saw the whole prompt; what is evicted
shows from the second token on. In context-only the question is read over the evicted cache, and no token is alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.naming import counted
from perturbkv.trace import Trace


def only_alike(trace: Trace) -> NDArray[np.bool_]:
    """(sample,) of the complete samples: True where the full cache's answer has no token but one that all share."""
    if trace.run.scenario != "regular" or "generated_full" not in trace.arrays:
        return np.zeros(int(trace.ok.sum()), dtype=bool)
    tokens = np.asarray(trace.arrays["generated_full"][trace.ok], dtype=np.int64)
    return np.asarray((tokens >= 0).sum(axis=1) <= 1)


def about(alike: int, samples: int) -> str:
    """What a note says of so many of so many samples; empty of none."""
    if not alike:
        return ""
    return (
        f"In {alike} of {counted(samples, 'sample')} the full cache's answer is one token or none: in the regular "
        "scenario that token comes from the prefill, alike for all caches. Such an answer cannot be lost but by what "
        "is added to it, at whatever budget; context-only has no such token."
    )

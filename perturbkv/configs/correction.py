"""By what an evicted output is corrected for the entries that went, and how many numbers are stored for it.

METHOD, the split of an evicted output: `o − ô = (1 − S)(μ_gone − μ_kept)`, so that `ô + (1 − Ŝ)(μ̂_gone − ô)` with a
stored mean and a predicted mass wins back what these two tell. It is attention with one entry more per query head.
"""

from __future__ import annotations

from collections.abc import Mapping

from perturbkv.configs.choice import Choice
from perturbkv.configs.option import Option
from perturbkv.configs.precision import FULL_BITS

NONE, CORRECTED, ORACLE = "none", "corrected", "corrected-oracle"
STORED, LINEAR = "stored", "linear"
CORRECTIONS = {
    NONE: "the output of what is kept, as it is",
    CORRECTED: "one entry per query head stands in for what went: its mean value under the window's mean query",
    ORACLE: "the same mean with the true mass of what went, known by the keys that went: a control, no method",
}
CORRECTION_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    NONE: {},
    CORRECTED: {
        "mass": Option(
            STORED, "of what went: stored under the mean query, or linear in the query at hand", known=(STORED, LINEAR)
        ),
    },
    ORACLE: {},
}


def correction_bits(correction: Choice, gone: int, heads: int, d_head: int) -> int:
    """Bits that stand in for `gone` entries of a kept set that `heads` query heads read; none where nothing went.

    Per head a mean value and a log-mass, with `linear` a mean key too; the oracle's keys are counted, once for all.
    """
    if correction.name == NONE or not gone:
        return 0
    if correction.name == ORACLE:
        return FULL_BITS * d_head * (heads + gone)
    vectors = 2 if correction["mass"] == LINEAR else 1
    return FULL_BITS * heads * (vectors * d_head + 1)

"""Precision of stored entries and correction for evicted ones: their options, and the bits that they take.

A cache in full precision has 16 bits a number, whatever dtype a run computes in: all byte counts use that unit. The
correction follows METHOD, the split of an evicted output: `o − ô = (1 − S)(μ_gone − μ_kept)`, so that `ô + (1 −
Ŝ)(μ̂_gone − ô)`, with a stored mean and a predicted mass, recovers part of the loss. It amounts to attention with one
more entry per query head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from perturbkv.configs.choice import Choice
from perturbkv.configs.option import Option
from perturbkv.errors import ConfigError

FULL, QUANTISE = "full", "quantise"
PRECISIONS = {
    FULL: "16 bits a number, as the model's own cache",
    QUANTISE: "what is kept before the window in few bits: keys per channel, values per entry (KIVI)",
}
PRECISION_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    FULL: {},
    QUANTISE: {
        "bits": Option(4, "of a stored number: 8, 4 or 2", allowed=(8, 4, 2)),
        "group": Option(32, "numbers that share a scale and a minimum", low=1),
        "fill": Option(0, "head size d_h of a model, for which b counts bytes: as many entries as b of 16 bits take"),
    },
}
FULL_BITS = 16
_MASS_BITS = 32
"""Bits of a log-mass."""
_GROUP_BITS = 2 * 16
"""Bits of a group's scale and minimum."""


def number_bits(precision: Choice) -> int:
    """Return the bits per stored number at this precision."""
    return int(precision.options.get("bits", FULL_BITS))


def stored_bits(precision: Choice, kept: int, window: int, d_key: int, d_value: int) -> int:
    """Return the bits of a kept set's keys and values, including scales and minima.

    `window` of the `kept` entries are stored in 16 bits in any precision.
    """
    quantised = max(0, kept - window) if precision.name == QUANTISE else 0
    full_bits = FULL_BITS * (d_key + d_value) * (kept - quantised)
    if not quantised:
        return full_bits
    group = int(precision["group"])
    groups = math.ceil(quantised / group) * d_key + quantised * math.ceil(d_value / group)  # of keys, of values
    return full_bits + number_bits(precision) * (d_key + d_value) * quantised + _GROUP_BITS * groups


def entries_in_bytes(precision: Choice, budget: int, window: int, most: int) -> int:
    """Return the number of entries, at most `most`, that fit into the bytes of `budget` 16-bit entries.

    For a precision without `fill` it is the budget itself, or `most`. `window` of the entries are stored in 16 bits in
    any precision.
    """
    d_head = int(precision.options.get("fill", 0))
    if not d_head:
        return min(budget, most)
    available = stored_bits(Choice(FULL), budget, window, d_head, d_head)
    low, high = min(budget, window), most  # of the search by halves: `low` entries fit
    while low < high:
        middle = (low + high + 1) // 2
        fits = stored_bits(precision, middle, window, d_head, d_head) <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def check_fill(precisions: Iterable[Choice], d_key: int, d_value: int, model: str) -> None:
    """Raise ConfigError for a precision whose option `fill` is neither 0 nor the one size of the model's heads."""
    for precision in precisions:
        fill = precision.options.get("fill", 0)
        if fill and d_key != d_value:
            raise ConfigError(
                f"fill of precision '{precision}' is one size of keys and values, and model '{model}' has keys of "
                f"{d_key} and values of {d_value} components; use 0, where b counts entries"
            )
        if fill not in (0, d_key):
            raise ConfigError(
                f"fill of precision '{precision}' must be the size of a head, {d_key} in model '{model}', or 0, where "
                f"b counts entries; got {fill}"
            )


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


def needs_plain_logits(correction: Choice) -> bool:
    """Return whether a correction holds only where logits are linear in the query, without a soft cap."""
    return correction.options.get("mass") == LINEAR


def correction_bits(correction: Choice, evicted: int, heads: int, d_key: int, d_value: int) -> int:
    """Return the bits of a correction for a kept set with `evicted` evicted entries and `heads` query heads.

    0 where nothing was evicted. Per head a mean value and a log-mass of 32 bits, with `linear` a mean key too; for the
    oracle a mean value per head, and the evicted keys once for all heads.
    """
    if correction.name == NONE or not evicted:
        return 0
    if correction.name == ORACLE:
        return FULL_BITS * (d_value * heads + d_key * evicted)
    components = d_value + d_key if correction["mass"] == LINEAR else d_value
    return heads * (FULL_BITS * components + _MASS_BITS)

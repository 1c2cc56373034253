"""Verdicts of two configurations, better, tied or worse, and the distances they use (METHOD: the protocol, 4).

Rounding is not perturbation: a difference of a few noise floors is a tie. Equal kept sets have equal isolated
perturbation, whatever rounding shows; equal propagated perturbation needs the entries at the same positions, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.stats.intervals import OptionalInterval
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.trace import Trace


@dataclass(frozen=True)
class Distance:
    """A distance between the evicted run's vectors and the full run's. It is printed as its unit.

    Attributes:
        unit: as axes and titles write it.
        suffix: end of the names of its variables.
        angular: whether it depends on directions alone, so is relative, and grows with the square of the angle.
        of_text: whether it is what the text's log p changes by, so that no norm of outputs is its scale.
    """

    unit: str
    suffix: str
    angular: bool = False
    of_text: bool = False

    def __str__(self) -> str:
        return self.unit


DISTANCES = {
    "l1": Distance("L1", ""),
    "l2": Distance("L2", "_l2"),
    "cosine": Distance("cosine distance", "_cosine", angular=True),
}
HEAD_DISTANCES = {**DISTANCES, "effect": Distance("|Δ log p|", "", of_text=True)}
"""Distances of heads: those of vectors, and the size of what a head's loss changes the text's log p by."""


def distance_of(name: str, known: Mapping[str, Distance] = HEAD_DISTANCES) -> Distance:
    """Return the distance of a name. Raises UnknownNameError for one that is not `known`."""
    if name not in known:
        raise UnknownNameError(name, "distance", known)
    return known[name]


def distance_terms(distance: str) -> list[str]:
    """Return the distance as text, as a list; empty for L1, the default."""
    return [] if distance == "l1" else [str(distance_of(distance))]


LESS, MORE, ALIKE, EQUIVALENT, UNDECIDED, FEW = "less", "more", "alike", "equivalent", "undecided", "few"
"""Verdicts on a number over its samples: its interval lies below or above the number of no effect; it ties, up to
rounding; it is as good as equal, within a margin; its interval holds both sides; too few samples give no interval."""


def interval_side(interval: OptionalInterval, at: float) -> int | None:
    """Return 1 for an interval above `at`, −1 for below, 0 if it contains `at`; None for a range or no interval."""
    if interval is None or interval.kind == "range":
        return None
    return int(interval.low > at) - int(interval.high < at)


def verdict_at(interval: OptionalInterval, at: float) -> str:
    """Return MORE for an interval above `at`, LESS for below, UNDECIDED if it contains `at`.

    FEW for a range of too few samples, or without interval.
    """
    side = interval_side(interval, at)
    return FEW if side is None else {0: UNDECIDED, 1: MORE, -1: LESS}[side]


def ratio_verdict(ratio: float, interval: OptionalInterval, tied: bool = False) -> str:
    """Return the verdict on a ratio: ALIKE where both sides are equal in every sample, else `verdict_at` 1.

    ALIKE also where it is `tied`: rounding explains the difference.
    """
    equal = ratio == 1 and (interval is None or interval.low == interval.high)
    return ALIKE if tied or equal else verdict_at(interval, 1)


TIE_FLOORS = 2
"""Two perturbations tie where they differ by at most this many noise floors (METHOD: the protocol, 4)."""

MARGIN = 0.05
"""δ where none is given: two sums of which one is within 5 % of the other are equivalent (METHOD: the protocol, 13)."""


def check_margin(margin: float, name: str = "margin") -> None:
    """Raise ConfigError, which names δ `name`, for a number that is not between 0 and 1."""
    if not 0 < margin < 1:
        raise ConfigError(
            f"expected {name} between 0 and 1, the difference that counts as none, got {margin:g}; 0.05 is 5 %"
        )


def verdicts(
    baseline: NDArray[np.float64],
    treatment: NDArray[np.float64],
    floor: NDArray[np.float64],
    distance: str = "l1",
) -> NDArray[np.int8]:
    """Return the verdict on each element: 1 where the treatment perturbs less, −1 where it perturbs more, 0 for ties.

    Perturbations and their noise `floor` have one shape. Where kept sets are equal the treatment is given with the
    baseline's numbers (`head_comparison.compared_perturbation`), so that it ties. For 1 − cos the square roots are
    compared: it grows with the square of the angle, and noise adds to the angle.
    """
    sides = (baseline, treatment, floor)
    first, second, noise = (np.sqrt(side) for side in sides) if distance_of(distance).angular else sides
    under_noise = np.abs(first - second) <= TIE_FLOORS * noise
    sign: NDArray[np.int8] = np.sign(np.nan_to_num(baseline - treatment)).astype(np.int8)  # of unknown ones 0
    return np.where(under_noise, np.int8(0), sign)


Mask = NDArray[np.bool_]


def equal_isolated(trace: Trace, first: int, second: int) -> Mask:
    """Return (sample, layer, head) True where the head's kept sets, and so its isolated perturbation, are equal.

    `first` and `second` are indices of configurations. False where these differ in precision, in positions or in their
    correction. False for page selection and sparse prefill, too: a trace holds only the pages of the full run's first
    step, and only the lines of the prompt's last query; and where caches are compressed again, which may part sets that
    were equal at the prompt's end.
    """
    if trace.run.compresses:
        return np.zeros(trace.arrays["kept_count"][trace.ok][:, first].shape, dtype=bool)
    # equal sets make equal caches: of one precision, and where something is evicted, of one correction and positions
    one, other = trace.run.configs[first], trace.run.configs[second]
    complete = trace.arrays["evicted"][trace.ok][:, first] == 0
    alike_evicted = one.evicts and other.evicts and one.correction == other.correction
    own = trace.arrays.get("own_entries")
    kept = np.ones_like(complete) if own is None else (own[trace.ok][:, [first, second]] == 0).all(axis=1)
    same_positions = complete | (one.in_cache == other.in_cache)  # a cache that keeps everything has no other positions
    alike = kept & (complete | alike_evicted) & same_positions & (one.precision == other.precision)
    return np.asarray(trace.same_kept(first, second) & alike[:, None, None])


def equal_propagated(trace: Trace, first: int, second: int) -> Mask:
    """Return (sample, layer, head) True where the head's sets and all sets of earlier layers are equal."""
    same = equal_isolated(trace, first, second)
    before = np.ones((len(same), 1), dtype=bool)
    return np.asarray(same & np.concatenate([before, _up_to_layer(same)[:, :-1]], axis=1)[:, :, None])


def equal_layers(trace: Trace, first: int, second: int) -> Mask:
    """Return (sample, decoder_layer) True where all sets up to the layer, and so the stream after it, are equal."""
    same = equal_isolated(trace, first, second)
    every = np.ones((len(same), trace.decoder_layers, same.shape[2]), dtype=bool)
    every[:, trace.layers] = same  # nothing is evicted in the others
    return _up_to_layer(every)


def equal_whole(trace: Trace, first: int, second: int) -> Mask:
    """Return (sample,) True where all sets are equal, and so the final norm, the logits and every later token."""
    return np.asarray(equal_layers(trace, first, second)[:, -1])


def _up_to_layer(same: Mask) -> Mask:
    """Return (sample, layer) True where `same`, (sample, layer, head), holds in all heads up to the layer."""
    return np.asarray(np.logical_and.accumulate(same.all(axis=2), axis=1))

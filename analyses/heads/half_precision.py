"""Agreement of heads' verdicts in half precision with those in float32, of the same prompts measured twice.

Where the first decoded token differs, the two runs decode different texts: such samples are counted and left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.heads.head_comparison import compared_perturbation
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.sides import Pair, pairs
from perturbkv.analyses.stats.intervals import OptionalInterval, of_mean, share_kind
from perturbkv.analyses.verdicts import DISTANCES, verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "ties"
ALONE_FLOORS = 3
"""Noise floors under which both values tie by the other rule, which looks at each value alone."""

Verdicts = NDArray[np.int8]


@record
class Agreement(Record, section="verdicts kept"):
    """Counts of the heads that one rule decides in the rounded trace, by their verdict in float32."""

    decided: int = column("heads that the rule decides in the rounded trace")
    agreeing: int = column("of them those with float32's verdict")
    opposite: int = column("with the other one")
    tied: int = column("that are tied in float32")

    @derived(unit="share")
    def share(self) -> float:
        """Decided heads with float32's verdict, a share of them; null where none is decided."""
        return self.agreeing / self.decided if self.decided else float("nan")


@record
class Ties(Record):
    """Agreement of verdicts between two traces, for one measure and one pair of configurations."""

    kind: str = column("isolated or propagated")
    distance: str = column("l1, l2 or cosine")
    baseline: EvictionConfig = column("what is compared with")
    treatment: EvictionConfig = column("what is compared")
    samples: int = column("samples whose first decoded token is the same in both types")
    left_out: int = column("samples whose first decoded token differs")
    heads: int = column("heads of all compared samples")
    by_difference: Agreement = column("by METHOD's rule: a tie is a difference of at most two noise floors")
    alone: Agreement = column("by each value alone: a tie is where both lie under three noise floors")
    share_interval: OptionalInterval = column("of the share by METHOD's rule, over samples")


def compare(exact: Trace, rounded: Trace, baseline: str, treatment: str) -> tuple[Ties, ...]:
    """Compare the heads' verdicts in float32 (`exact`) with those of a `rounded` trace, for every pair and measure.

    Raises TraceError where the traces are not of the same prompts and configurations, or no sample can be compared.
    """
    first, second = (list(np.array(trace.sample_ids)[trace.ok]) for trace in (exact, rounded))
    if first != second or exact.run.configs != rounded.run.configs:
        raise TraceError(
            f"expected one run's samples and configurations in {exact.source} and {rounded.source}, got others"
        )
    same = _first_tokens(exact) == _first_tokens(rounded)
    if not same.any():
        raise TraceError(
            f"expected samples of {rounded.source} that decode the token of {exact.source} first, got none"
        )
    measures = [
        (kind, distance)
        for kind in ("isolated", "propagated")
        for distance in DISTANCES
        if all(f"perturbation_{kind}{DISTANCES[distance].suffix}" in trace.arrays for trace in (exact, rounded))
    ]
    traces = Measurements(exact, ANALYSIS, 0), Measurements(rounded, ANALYSIS, 0)  # later ones may read other tokens
    return tuple(
        _compare(*traces, same, *measure, pair)
        for pair in pairs(exact.run, baseline, treatment)
        for measure in measures
    )


def _first_tokens(trace: Trace) -> NDArray[np.int64]:
    """Return the first decoded token id of each complete sample, (sample,)."""
    return np.asarray(trace.get("token_id", ANALYSIS), dtype=np.int64)[:, 0]


def _compare(
    exact: Measurements, rounded: Measurements, same: NDArray[np.bool_], kind: str, distance: str, pair: Pair
) -> Ties:
    """Return the agreement of two traces for one measure and pair, over the samples selected by `same` (sample,)."""
    baseline, treatment = pair
    expected, _ = (verdict[same] for verdict in _verdicts_by_rule(exact, kind, distance, pair))
    by_difference, alone = (verdict[same] for verdict in _verdicts_by_rule(rounded, kind, distance, pair))
    samples = zip(expected, by_difference, strict=True)
    shares = np.array([_agreement(reference, decided).share for reference, decided in samples])
    return Ties(
        kind=kind,
        distance=distance,
        baseline=baseline,
        treatment=treatment,
        samples=int(same.sum()),
        left_out=int((~same).sum()),
        heads=expected.size,
        by_difference=_agreement(expected, by_difference),
        alone=_agreement(expected, alone),
        share_interval=of_mean(shares, share_kind(expected[0].size)),
    )


def _verdicts_by_rule(measured: Measurements, kind: str, distance: str, pair: Pair) -> tuple[Verdicts, Verdicts]:
    """Return the verdicts at step 0, (sample, layer, head), under two rules: by difference, and by value alone."""
    first, second = map(measured.index, pair)
    (baseline, treatment), floor = compared_perturbation(measured, kind, distance, (first, second))
    sign = np.sign(baseline - treatment).astype(np.int8)
    alone = np.where(np.maximum(baseline, treatment) < ALONE_FLOORS * floor, np.int8(0), sign)
    return verdicts(baseline, treatment, floor, distance), alone


def _agreement(expected: Verdicts, rounded: Verdicts) -> Agreement:
    """Return counts of the heads decided in `rounded`: agreeing with, opposite to, or tied in `expected`."""
    decided = rounded != 0
    return Agreement(
        decided=int(decided.sum()),
        agreeing=int((decided & (rounded == expected)).sum()),
        opposite=int((decided & (rounded == -expected) & (expected != 0)).sum()),
        tied=int((decided & (expected == 0)).sum()),
    )

"""Whether verdicts survive rounding: heads decided in half precision, against the same heads in float32.

One prompt measured twice gives two verdicts for every head. Where the first token that is decoded differs, the two runs
decode different texts, and the sample is no comparison: it is counted and left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.heads.head_comparison import perturbed
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.pairing import Pair, pairs
from perturbkv.analyses.stats.intervals import Scalar, of_mean, share_of
from perturbkv.analyses.verdicts import DISTANCES, distance_of, verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "ties"
KINDS = ("isolated", "propagated")
ALONE_FLOORS = 3
"""A rule of comparison, by each value alone: a tie is where both lie under so many floors."""

Verdicts = NDArray[np.int8]


@record
class Agreement(Record):
    """What becomes of the heads that one rule decides in the rounded trace, of all samples."""

    SECTION = "verdicts kept"

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
    """One measure of two configurations, over the samples of two traces."""

    kind: str = column("isolated or propagated")
    distance: str = column("l1, l2 or cosine")
    baseline: EvictionConfig = column("what is compared with")
    treatment: EvictionConfig = column("what is compared")
    samples: int = column("samples whose first decoded token is the same in both types")
    left_out: int = column("samples whose first decoded token differs")
    heads: int = column("heads of all compared samples")
    by_difference: Agreement = column("by METHOD's rule: a tie is a difference of at most two noise floors")
    alone: Agreement = column("by each value alone: a tie is where both lie under three noise floors")
    share_interval: Scalar = column("of the share by METHOD's rule, over samples")


def compare(exact: Trace, rounded: Trace, baseline: str, treatment: str) -> tuple[Ties, ...]:
    """Compare each measure that both traces hold, for every pair of configurations that the two sides make.

    Raises TraceError where the traces are not of the same prompts and configurations, or no sample can be compared.
    """
    _check_alike(exact, rounded)
    same = _first_tokens(exact) == _first_tokens(rounded)
    if not same.any():
        msg = f"expected samples of {rounded.source} that decode the token of {exact.source} first, got none"
        raise TraceError(msg)
    measures = [
        (kind, distance) for kind in KINDS for distance in DISTANCES if _holds((exact, rounded), kind, distance)
    ]
    traces = Measurements(exact, ANALYSIS), Measurements(rounded, ANALYSIS)
    return tuple(
        _compare(*traces, same, *measure, pair)
        for pair in pairs(exact.run, baseline, treatment)
        for measure in measures
    )


def _holds(traces: tuple[Trace, Trace], kind: str, distance: str) -> bool:
    return all(f"perturbation_{kind}{distance_of(distance).suffix}" in trace.arrays for trace in traces)


def _check_alike(exact: Trace, rounded: Trace) -> None:
    first, second = (list(np.array(trace.sample_ids)[trace.ok]) for trace in (exact, rounded))
    if first != second or exact.run.configs != rounded.run.configs:
        msg = f"expected one run's samples and configurations in {exact.source} and {rounded.source}, got others"
        raise TraceError(msg)


def _first_tokens(trace: Trace) -> NDArray[np.int64]:
    return np.asarray(trace.get("token_id", ANALYSIS), dtype=np.int64)[:, 0]


def _compare(
    exact: Measurements, rounded: Measurements, same: NDArray[np.bool_], kind: str, distance: str, pair: Pair
) -> Ties:
    expected, _ = (rule[same] for rule in _both_rules(exact, kind, distance, pair))
    by_difference, alone = (rule[same] for rule in _both_rules(rounded, kind, distance, pair))
    each = zip(expected, by_difference, strict=True)
    shares = np.array([_agreement(own, decided).share for own, decided in each])
    return Ties(
        kind=kind,
        distance=distance,
        baseline=pair[0],
        treatment=pair[1],
        samples=int(same.sum()),
        left_out=int((~same).sum()),
        heads=expected.size,
        by_difference=_agreement(expected, by_difference),
        alone=_agreement(expected, alone),
        share_interval=of_mean(shares, share_of(expected[0].size)),
    )


def _both_rules(measured: Measurements, kind: str, distance: str, pair: Pair) -> tuple[Verdicts, Verdicts]:
    """Return (sample, layer, head) verdicts of step 0: by the difference, ties by identity; and by each value alone."""
    sides = measured.index(pair[0]), measured.index(pair[1])
    both, floor = perturbed(measured, kind, distance, sides)
    sign = np.sign(both[0] - both[1]).astype(np.int8)
    alone = np.where(np.maximum(*both) < ALONE_FLOORS * floor, np.int8(0), sign)
    return verdicts(*both, floor, distance), alone


def _agreement(expected: Verdicts, rounded: Verdicts) -> Agreement:
    decided = rounded != 0
    return Agreement(
        decided=int(decided.sum()),
        agreeing=int((decided & (rounded == expected)).sum()),
        opposite=int((decided & (rounded == -expected) & (expected != 0)).sum()),
        tied=int((decided & (expected == 0)).sum()),
    )

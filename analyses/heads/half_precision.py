"""Do verdicts survive rounding? Heads that are decided in half precision, against the same heads in float32.

One prompt measured twice gives two verdicts for every head. Where the first token that is decoded differs, the two runs
decode different texts, and the sample is no comparison: it is counted and left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.heads.head_comparison import perturbed
from perturbkv.analyses.pairing import Pair, pairs
from perturbkv.analyses.stats.arithmetic import plain
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


@dataclass(frozen=True)
class Agreement:
    """What became of the heads that one rule decides in the rounded trace, of all samples.

    Attributes:
        decided: how many there are.
        agreeing, opposite, tied: how many of them have the exact trace's verdict, the other one, none there.
    """

    decided: int
    agreeing: int
    opposite: int
    tied: int

    @property
    def share(self) -> float:
        """Of the decided heads those with the same verdict, in [0, 1]; NaN where none is decided."""
        return self.agreeing / self.decided if self.decided else float("nan")


@dataclass(frozen=True)
class Ties:
    """One measure of two configurations, over the samples of two traces.

    Attributes:
        kind, distance: isolated or propagated, in a key of `DISTANCES`.
        baseline, treatment: the configurations.
        samples, left_out: those compared, and those whose first decoded token differs.
        heads: heads of all samples compared.
        by_difference: METHOD's rule; `alone` the rule of comparison.
        share_interval: of the first one's share, mean over samples.
    """

    kind: str
    distance: str
    baseline: EvictionConfig
    treatment: EvictionConfig
    samples: int
    left_out: int
    heads: int
    by_difference: Agreement
    alone: Agreement
    share_interval: Scalar

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able numbers."""
        rules = {name: getattr(self, name) for name in ("by_difference", "alone")}
        told = {name: {**vars(rule), "share": rule.share} for name, rule in rules.items()}
        numbers: dict[str, Any] = plain({**vars(self), **told})
        return numbers


def compare(exact: Trace, rounded: Trace, baseline: str, treatment: str) -> tuple[Ties, ...]:
    """Every measure that both traces hold, for every pair of configurations that the two sides make.

    Raises TraceError where the traces are not of the same prompts and configurations, or no sample can be compared.
    """
    _check_alike(exact, rounded)
    alike = _first_tokens(exact) == _first_tokens(rounded)
    if not alike.any():
        msg = f"expected samples of {rounded.source} that decode the token of {exact.source} first, got none"
        raise TraceError(msg)
    measures = [
        (kind, distance) for kind in KINDS for distance in DISTANCES if _holds((exact, rounded), kind, distance)
    ]
    sides = pairs(exact.run, baseline, treatment)
    return tuple(_compare(exact, rounded, alike, *measure, pair) for pair in sides for measure in measures)


def _holds(traces: tuple[Trace, Trace], kind: str, distance: str) -> bool:
    return all(f"perturbation_{kind}{distance_of(distance).suffix}" in trace.arrays for trace in traces)


def _check_alike(exact: Trace, rounded: Trace) -> None:
    first, second = (list(np.array(trace.sample_ids)[trace.ok]) for trace in (exact, rounded))
    if first != second or exact.run.configs != rounded.run.configs:
        msg = f"expected one run's samples and configurations in {exact.source} and {rounded.source}, got others"
        raise TraceError(msg)


def _first_tokens(trace: Trace) -> NDArray[np.int64]:
    return np.asarray(trace.get("token_id", ANALYSIS), dtype=np.int64)[:, 0]


def _compare(exact: Trace, rounded: Trace, alike: NDArray[np.bool_], kind: str, distance: str, pair: Pair) -> Ties:
    expected, _ = (rule[alike] for rule in _both_rules(exact, kind, distance, pair))
    by_difference, alone = (rule[alike] for rule in _both_rules(rounded, kind, distance, pair))
    shares = np.array([_agreement(one, other).share for one, other in zip(expected, by_difference, strict=True)])
    return Ties(
        kind=kind,
        distance=distance,
        baseline=pair[0],
        treatment=pair[1],
        samples=int(alike.sum()),
        left_out=int((~alike).sum()),
        heads=expected.size,
        by_difference=_agreement(expected, by_difference),
        alone=_agreement(expected, alone),
        share_interval=of_mean(shares, share_of(expected[0].size)),
    )


def _both_rules(trace: Trace, kind: str, distance: str, pair: Pair) -> tuple[Verdicts, Verdicts]:
    """(sample, layer, head) verdicts of step 0: by the difference, with ties by identity; and by each value alone."""
    sides = trace.config_index(pair[0].label()), trace.config_index(pair[1].label())
    both, floor = perturbed(trace, kind, distance, sides, 0)
    sign = np.sign(both[0] - both[1]).astype(np.int8)
    alone = np.where(np.maximum(*both) < ALONE_FLOORS * floor, np.int8(0), sign)
    return verdicts(*both, floor, distance), alone


def _agreement(expected: Verdicts, found: Verdicts) -> Agreement:
    decided = found != 0
    return Agreement(
        decided=int(decided.sum()),
        agreeing=int((decided & (found == expected)).sum()),
        opposite=int((decided & (found == -expected) & (expected != 0)).sum()),
        tied=int((decided & (expected == 0)).sum()),
    )

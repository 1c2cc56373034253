"""Do verdicts survive rounding? Heads that are decided in half precision, against the same heads in float32.

One prompt measured twice gives two verdicts for every head. Where the first token that is decoded differs, the two runs
decode different texts, and the sample is no comparison: it is counted and left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.bootstrap import mean_interval
from perturbkv.analyses.pairing import pairs
from perturbkv.analyses.verdicts import verdicts
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "ties"
MEASURES = {
    "isolated L1": ("perturbation_isolated", "noise_floor_isolated", "output_norm"),
    "isolated L2": ("perturbation_isolated_l2", "noise_floor_isolated_l2", "output_norm_l2"),
    "isolated cosine": ("perturbation_isolated_cosine", "noise_floor_isolated_cosine", ""),
    "propagated L1": ("perturbation_propagated", "noise_floor", "output_norm"),
    "propagated L2": ("perturbation_propagated_l2", "noise_floor_l2", "output_norm_l2"),
    "propagated cosine": ("perturbation_propagated_cosine", "noise_floor_cosine", ""),
}
"""Measure -> the trace's variables of the perturbation, its noise floor and its scale; a cosine's is 1."""
EPSILON = float(np.finfo(np.float32).eps)
"""The measures are computed in float32 or better: no floor is lower than its epsilon times the scale."""
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
        measure: a key of `MEASURES`.
        baseline, treatment: configuration labels.
        samples, left_out: those compared, and those whose first decoded token differs.
        heads: heads of all samples compared.
        by_difference: METHOD's rule; `alone` the rule of comparison.
        share_interval: of the first one's share, mean over samples.
    """

    measure: str
    baseline: str
    treatment: str
    samples: int
    left_out: int
    heads: int
    by_difference: Agreement
    alone: Agreement
    share_interval: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able numbers."""
        rules = {name: getattr(self, name) for name in ("by_difference", "alone")}
        plain = {name: value for name, value in vars(self).items() if name not in rules}
        told = {name: {**vars(rule), "share": rule.share if rule.decided else None} for name, rule in rules.items()}
        return {**plain, **told}


def compare(exact: Trace, rounded: Trace, baseline: str, treatment: str) -> tuple[Ties, ...]:
    """Every measure that both traces hold, for every pair of configurations that the two sides make.

    Raises TraceError where the traces are not of the same prompts and configurations, or no sample can be compared.
    """
    _check_alike(exact, rounded)
    alike = _first_tokens(exact) == _first_tokens(rounded)
    if not alike.any():
        msg = f"expected samples of {rounded.source} that decode the token of {exact.source} first, got none"
        raise TraceError(msg)
    held = [name for name, (array, *_) in MEASURES.items() if array in exact.arrays and array in rounded.arrays]
    sides = pairs(exact.run, baseline, treatment)
    return tuple(_compare(exact, rounded, alike, name, *pair) for pair in sides for name in held)


def _check_alike(exact: Trace, rounded: Trace) -> None:
    first, second = (list(np.array(trace.sample_ids)[trace.ok]) for trace in (exact, rounded))
    if first != second or exact.run.labels() != rounded.run.labels():
        msg = f"expected one run's samples and configurations in {exact.source} and {rounded.source}, got others"
        raise TraceError(msg)


def _first_tokens(trace: Trace) -> NDArray[np.int64]:
    return np.asarray(trace.get("token_id", ANALYSIS), dtype=np.int64)[:, 0]


def _compare(exact: Trace, rounded: Trace, alike: NDArray[np.bool_], name: str, first: str, second: str) -> Ties:
    expected, _ = _both_rules(exact, name, first, second)
    found = [rule[alike] for rule in _both_rules(rounded, name, first, second)]
    expected = expected[alike]
    shares = np.array([_agreement(one, other).share for one, other in zip(expected, found[0], strict=True)])
    return Ties(
        measure=name,
        baseline=first,
        treatment=second,
        samples=int(alike.sum()),
        left_out=int((~alike).sum()),
        heads=expected.size,
        by_difference=_agreement(expected, found[0]),
        alone=_agreement(expected, found[1]),
        share_interval=mean_interval(shares),
    )


def _both_rules(trace: Trace, name: str, first: str, second: str) -> tuple[Verdicts, Verdicts]:
    """(sample, layer, head) verdicts of step 0: by the difference, with ties by identity; and by each value alone."""
    perturbed, floored, scaled = MEASURES[name]
    sides = trace.config_index(first), trace.config_index(second)
    both = np.asarray(trace.get(perturbed, ANALYSIS), dtype=np.float64)[:, list(sides), 0]
    floor = np.asarray(trace.get(floored, ANALYSIS), dtype=np.float64)[:, 0]
    scale = np.asarray(trace.get(scaled, ANALYSIS), dtype=np.float64)[:, 0] if scaled else 1.0
    same = _same(trace, sides, reached=name.startswith("propagated"))
    treatment = np.where(same, both[:, 0], both[:, 1])
    by_difference = verdicts(both[:, 0], treatment, np.maximum(floor, EPSILON * scale))
    alone = np.where(both.max(axis=1) < ALONE_FLOORS * floor, 0, np.sign(both[:, 0] - both[:, 1])).astype(np.int8)
    return by_difference, alone


def _same(trace: Trace, sides: tuple[int, int], reached: bool) -> NDArray[np.bool_]:
    """(sample, layer, head) where the kept sets are equal, and with `reached` those of all earlier layers too."""
    same = trace.same_kept(*sides)
    if not reached:
        return same
    before = np.ones((len(same), 1), dtype=bool)
    earlier = np.concatenate([before, np.logical_and.accumulate(same.all(axis=2), axis=1)[:, :-1]], axis=1)
    return np.asarray(same & earlier[:, :, None])


def _agreement(expected: Verdicts, found: Verdicts) -> Agreement:
    decided = found != 0
    return Agreement(
        decided=int(decided.sum()),
        agreeing=int((decided & (found == expected)).sum()),
        opposite=int((decided & (found == -expected) & (expected != 0)).sum()),
        tied=int((decided & (expected == 0)).sum()),
    )

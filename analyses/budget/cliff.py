"""Where does each method fall off its cliff? The budget at which KL of the next token passes 0.1 nat, and 1 nat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses import naming
from perturbkv.analyses.budget import cliff_told
from perturbkv.analyses.budget.budget_axis import Axis, axis
from perturbkv.analyses.budget.criteria import Criterion
from perturbkv.analyses.budget.method_cliff import ANALYSIS, Cliff, method_cliff
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import at_step, values
from perturbkv.analyses.pairing import Sides, checked, sweeps
from perturbkv.analyses.result import Result
from perturbkv.analyses.several import Sequenced
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.configs.numbers import check
from perturbkv.display import Table
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

THRESHOLDS = (0.1, 1.0)
"""Nat."""
LEAST_BUDGETS = 3


@dataclass(frozen=True, repr=False)
class Cliffs(Sequenced[Cliff], Result):
    """Every method of a run; the first is what the others are held against.

    Attributes:
        members: one per method and setting.
        thresholds: nat, rising.
        kl_floor: median KL with everything kept, nat: rounding.
        steps: decode steps over which each sample's KL is the mean.
        identity: of the run.
    """

    members: tuple[Cliff, ...]
    thresholds: tuple[float, ...]
    kl_floor: float
    steps: int
    identity: RunIdentity

    def conclusion(self) -> str:
        """Per threshold the budgets at which the methods pass it."""
        return cliff_told.conclusion(self.members, self.thresholds, self.identity.samples)

    def tables(self) -> Sequence[Table | str]:
        """Per threshold the crossings and how they compare; then all curves."""
        return cliff_told.tables(self.members, self.thresholds)

    def notes(self) -> str:
        """What a crossing, its interval and a comparison are."""
        return cliff_told.notes(self.members, self.identity.samples, self.steps, self.kl_floor)

    def records(self) -> list[dict[str, Any]]:
        """A row per method and budget: KL of the next token in nat, median and mean over samples, and what is held."""
        return [
            {"method": one.name, **columns_of(config), "held": float(one.held[place]),
             "bytes": float(one.held_bytes[place]), "median_kl": float(one.median[place]),
             "mean_kl": float(one.mean[place])}
            for one in self.members for place, config in enumerate(one.configs)
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain(
            {
                "thresholds": self.thresholds,
                "steps": self.steps,
                "kl_noise_floor": self.kl_floor,
                "methods": [one.to_dict() for one in self.members],
            }
        )
        return document


def cliff(trace: Trace, *, sides: Sides | None = None, kl: Sequence[float] = THRESHOLDS) -> Cliffs:
    """Where does each method fall off its cliff? The budget from which on the next token's KL stays below a threshold.

    KL(full ‖ evicted) is each sample's mean over its measured steps; the curve is the median over samples, joined by
    lines on both logarithms. Where it passes a threshold more than once the largest budget counts; beyond the budgets
    measured nothing is told but on which side. Methods are compared prompt by prompt: the median of each one's ratio.

    Args:
        trace: from `measure` or `read_trace`: three budgets or more, all entries or all shares.
        sides: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`), or several, the first of which
            the others are held against; by default all that the trace holds.
        kl: thresholds in nat.

    Returns the methods as one result. Arrays of a `Cliff` are (budget,).

    Raises ConfigError for thresholds that are none, and for budgets of both kinds; TraceError where the trace has no
    complete sample, no such side, or fewer than three budgets of one.

    Example, of a `trace` of 5 budgets:
        >>> import perturbkv as pk
        >>> found = pk.cliff(trace)
        >>> [one.name for one in found], found[0].median.shape
        (['attention', 'two-stage'], (5,))
    """
    wanted = checked_thresholds(kl)
    named = checked(trace, "", "" if sides is None else sides)
    held = at_step(trace, ANALYSIS, 0)
    found = dict.fromkeys(tuple(places) for side in ([None] if sides is None else named)
                          for places in sweeps(held.run, side))  # fmt: skip
    axes = [axis(held, places, ANALYSIS) for places in found]
    _check_budgets(axes)
    each = Criterion("kl", wanted[0]).each(held)
    names = naming.curves([one.configs[0] for one in axes])
    members = tuple(method_cliff(held, name, one, axes[0], each, wanted) for name, one in zip(names, axes, strict=True))
    shown = [config for one in axes for config in one.configs]
    floor = float(np.median(values(held, "logit_kl_noise_floor", ANALYSIS)))
    return Cliffs(members, wanted, floor, held.run.steps, identity(held, shown))


def checked_thresholds(kl: Sequence[float]) -> tuple[float, ...]:
    """Thresholds in nat, rising. Raises ConfigError for none, and for one that is not positive or there twice."""
    for one in kl:
        check("--kl", one)
    if not kl or min(kl) <= 0 or len({*kl}) < len(kl):
        msg = f"--kl takes different numbers above 0, in nat, such as 0.1,1; got {', '.join(map(str, kl)) or 'none'}"
        raise ConfigError(msg)
    return tuple(sorted(map(float, kl)))


def _check_budgets(axes: Sequence[Axis]) -> None:
    for one in axes:
        if len(one.at) < LEAST_BUDGETS:
            got = ", ".join(f"{config.budget}" for config in one.configs)
            msg = (
                f"{ANALYSIS} needs at least {LEAST_BUDGETS} budgets of every method, got {got} of "
                f"{one.configs[0].policy.name}:{one.configs[0].selection.name}; without a trace it makes one of seven"
            )
            raise TraceError(msg)

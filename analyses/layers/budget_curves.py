"""How much cache can go? Last-layer drift, KL and top-1 agreement against the budget (paper, figure 3c)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses import naming
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.layers import budgets_told
from perturbkv.analyses.layers.budget_curve import ANALYSIS, BudgetCurve, curve
from perturbkv.analyses.layers.drift import distances
from perturbkv.analyses.measurements import at_step, values
from perturbkv.analyses.pairing import Sides, checked, sweeps
from perturbkv.analyses.result import Result
from perturbkv.analyses.several import Sequenced
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.display import Table
from perturbkv.trace import Trace


@dataclass(frozen=True, repr=False)
class BudgetCurves(Sequenced[BudgetCurve], Result):
    """How much cache can go: curves of several selections over their budgets.

    Attributes:
        members: one per selection and setting.
        distance: of the drift: l1, l2 or cosine.
        kl_floor: median KL with everything kept, in nats: rounding.
        step: decode step looked at.
        identity: of the run.
    """

    members: tuple[BudgetCurve, ...]
    distance: str
    kl_floor: float
    step: int
    identity: RunIdentity

    def conclusion(self) -> str:
        """How often the next token is the full run's, at the largest budget and at the smallest."""
        return budgets_told.conclusion(self.members, self.identity.samples)

    def tables(self) -> Sequence[Table | str]:
        """A row per selection and budget; beneath, where KL rises most."""
        return budgets_told.tables(self.members)

    def notes(self) -> str:
        """What intervals, drift, caches and the noise floor are, a line each."""
        return budgets_told.notes(self.members, self.identity.samples, self.kl_floor)

    def records(self) -> list[dict[str, Any]]:
        """A row per selection and budget: medians over samples of drift and KL (nat), the share with the same token.

        `kept` is the share of a head's entries, `held` that of the whole cache.
        """
        return [row for one in self.members for row in _rows(one, self.distance, self.step)]

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain(
            {
                "distance": self.distance,
                "step": self.step,
                "kl_noise_floor": self.kl_floor,
                "curves": [{**vars(curve), "budgets": curve.budgets} for curve in self.members],
            }
        )
        return document


def summarise(trace: Trace, sides: Sequence[str], distance: str = "l1", step: int = 0) -> BudgetCurves:
    """One curve per side (a selection, a policy, or policy:selection) and setting.

    Raises TraceError where the trace holds no configuration of a side, and as `layers.summarise`.
    """
    held = at_step(trace, ANALYSIS, step)
    found = [places for side in sides for places in sweeps(held.run, side)]
    measured = {
        "drift": distances(held, distance, ANALYSIS, step)[:, :, -1],
        "kl": values(held, "logit_kl", ANALYSIS, step),
        "top1": values(held, "top1_agreement", ANALYSIS, step),
    }
    names = naming.curves([held.run.configs[places[0]] for places in found])
    curves = tuple(curve(held, name, places, measured) for name, places in zip(names, found, strict=True))
    shown = [config for curve in curves for config in curve.configs]
    floor = float(np.median(values(held, "logit_kl_noise_floor", ANALYSIS, step)))
    return BudgetCurves(curves, distance, floor, step, identity(trace, shown, step))


def budget_curves(
    trace: Trace,
    baseline: str = "attention",
    treatments: Sides = "two-stage",
    *,
    step: int = 0,
    distance: str = "l1",
) -> BudgetCurves:
    """How much cache can go, and where does it fall off the cliff? One curve per selection (paper, figure 3c).

    Only complete samples that have the step count.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`): the first curve.
        treatments: likewise, one or several: the others.
        step: which decode step, from 0.
        distance: of the residual stream after the last decoder layer: `l1`, `l2` (its own unit) or `cosine` (0 to 2).
            Beside it stand KL(full ‖ evicted) of the next token, in nats, and how often the likeliest token is the
            same, as a share of samples.

    Returns the curves as one result. Arrays of a `BudgetCurve` are (budget,), medians or shares over samples.

    Raises TraceError where the trace has no complete sample, no configuration of a side, or lacks what is asked for;
    ConfigError for a step that it does not have, and for sides that are no names; UnknownNameError for an unknown
    distance.

    >>> import perturbkv as pk
    >>> found = pk.budget_curves(trace, "attention", "two-stage")
    >>> [one.name for one in found], found[0].medians["kl"].shape  # (budget,)
    (['attention', 'two-stage'], (1,))
    """
    others = checked(trace, baseline, treatments)
    return summarise(trace, [baseline, *others], distance, step)


def _rows(one: BudgetCurve, distance: str, step: int) -> Iterator[dict[str, Any]]:
    for place, config in enumerate(one.configs):
        yield {
            "curve": one.name,
            "config": config.label(),
            "policy": config.policy.name,
            "selection": config.selection.name,
            "budget": config.budget.value,
            "distance": distance,
            "step": step,
            "kept": float(one.kept[place]),
            "held": float(one.held[place]),
            "drift": float(one.medians["drift"][place]),
            "kl": float(one.medians["kl"][place]),
            "top1": float(one.medians["top1"][place]),
        }

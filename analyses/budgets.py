"""How much cache can go? Last-layer drift, KL and top-1 agreement against the budget (paper, figure 3c)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.arithmetic import plain, ratio
from perturbkv.analyses.bootstrap import RESAMPLES, intervals
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.layers import distances
from perturbkv.analyses.naming import selection, short, without_budget
from perturbkv.analyses.pairing import sweeps
from perturbkv.analyses.reading import Floats, check, kept_share, values
from perturbkv.trace import Trace

ANALYSIS = "layers --budgets"


@dataclass(frozen=True)
class BudgetCurve:
    """One selection over its budgets, smallest first.

    Attributes:
        name: selection, and whatever tells the curve from the others.
        labels: of its configurations; `budgets` as the user gave them.
        kept: (budget,) mean share of the prompt's entries kept, in (0, 1].
        means: quantity -> (budget,) mean over samples: last-layer drift, KL(full ‖ evicted) in nats, share of
            samples whose next token is the full run's.
        intervals: quantity -> (2, budget) over samples; None for one sample.
        cliff: the neighbouring budgets between which KL rises most per halving of the budget; None where it rises
            nowhere, or for one budget.
    """

    name: str
    labels: tuple[str, ...]
    budgets: tuple[str, ...]
    kept: Floats
    means: dict[str, Floats]
    intervals: dict[str, Floats | None]
    cliff: tuple[str, str] | None


@dataclass(frozen=True)
class Budgets:
    """Curves of several selections.

    Attributes:
        curves: one per selection and setting.
        distance: of the drift: l1, l2 or cosine.
        kl_floor: mean KL with everything kept, in nats: rounding.
        step: decode step looked at.
        identity: of the run.
    """

    curves: tuple[BudgetCurve, ...]
    distance: str
    kl_floor: float
    step: int
    identity: RunIdentity

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain(
            {
                "distance": self.distance,
                "step": self.step,
                "kl_noise_floor": self.kl_floor,
                "curves": [vars(curve) for curve in self.curves],
            }
        )
        return document


def summarise(
    trace: Trace, sides: list[str], distance: str = "l1", step: int = 0, resamples: int = RESAMPLES, seed: int = 0
) -> Budgets:
    """One curve per side (a selection, a policy, or policy:selection) and setting.

    Raises TraceError where the trace holds no configuration of a side, and as `layers.summarise`.
    """
    check(trace, ANALYSIS, step)
    found = [places for side in sides for places in sweeps(trace.run, side)]
    measured = {
        "drift": distances(trace, distance, ANALYSIS, step)[:, :, -1],
        "kl": values(trace, "logit_kl", ANALYSIS, step),
        "top1": values(trace, "top1_agreement", ANALYSIS, step),
    }
    names = _names(trace, found)
    curves = tuple(
        _curve(trace, name, places, measured, resamples, seed) for name, places in zip(names, found, strict=True)
    )
    shown = [label for curve in curves for label in curve.labels]
    floor = float(values(trace, "logit_kl_noise_floor", ANALYSIS, step).mean())
    return Budgets(curves, distance, floor, step, identity(trace, shown))


def _names(trace: Trace, found: list[list[int]]) -> list[str]:
    """What tells the curves apart, the budget left out."""
    labels = [without_budget(trace.run.labels()[places[0]]) for places in found]
    return [name or selection(label) for name, label in zip(short(labels), labels, strict=True)]


def _curve(
    trace: Trace, name: str, places: list[int], measured: dict[str, Floats], resamples: int, seed: int
) -> BudgetCurve:
    over = {quantity: array[:, places] for quantity, array in measured.items()}
    kept = np.array([kept_share(trace, place, ANALYSIS) for place in places])
    rising = np.argsort(kept, kind="stable")
    samples = len(over["kl"])
    budgets = tuple(str(trace.run.configs[places[index]].budget) for index in rising)
    means = {quantity: array.mean(axis=0)[rising] for quantity, array in over.items()}
    return BudgetCurve(
        name=name,
        labels=tuple(trace.run.labels()[places[index]] for index in rising),
        budgets=budgets,
        kept=kept[rising],
        means=means,
        intervals={
            quantity: intervals(lambda weights, array=array[:, rising]: weights @ array, samples, resamples, seed)  # type: ignore[misc]
            for quantity, array in over.items()
        },
        cliff=_cliff(budgets, kept[rising], means["kl"]),
    )


def _cliff(budgets: tuple[str, ...], kept: Floats, kl: Floats) -> tuple[str, str] | None:
    """Where KL rises most per halving of the kept share."""
    if len(budgets) < 2:
        return None
    rise = np.asarray(ratio(kl[:-1] - kl[1:], np.log2(kept[1:] / kept[:-1])))
    if not (rise > 0).any():
        return None
    place = int(np.nanargmax(rise))
    return budgets[place + 1], budgets[place]

"""How much cache can go? Last-layer drift, KL and top-1 agreement against the budget (paper, figure 3c).

One selection over its budgets: last-layer drift, KL and top-1 agreement (paper, figure 3c).

How curves over budgets are told: in a sentence, in a table, in the notes beneath it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import pairing, text
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.layers.drift import distances
from perturbkv.analyses.measurements import Floats, at_step, held_shares, kept_share, values
from perturbkv.analyses.pairing import Sides, checked, counted, folded, sweeps
from perturbkv.analyses.result import Result, Sequenced
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain, ratio
from perturbkv.analyses.stats.intervals import POSITIVE, Band, Interval
from perturbkv.analyses.text import Outcome
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.trace import Trace

ANALYSIS = "layers --budgets"


@dataclass(frozen=True)
class BudgetCurve:
    """One selection over its budgets, smallest first.

    Attributes:
        name: selection, and whatever tells the curve from the others.
        configs: its configurations.
        kept: (budget,) mean share of the prompt's entries kept, in (0, 1].
        medians: quantity -> (budget,) over samples: last-layer drift, KL(full ‖ evicted) in nats; and `top1`, the
            share of samples whose next token is the full run's.
        means: the same as means over samples, most of which a single prompt can make.
        held: (budget,) entries that the cache holds over those of the full cache; NaN where the trace does not tell.
        intervals: of the medians and of the share, for each budget; None for one sample.
        mean_intervals: of the means.
        cliff: the neighbouring budgets between which the median KL rises most per halving of the budget; None where it
            rises nowhere, or for one budget.
    """

    name: str
    configs: tuple[EvictionConfig, ...]
    kept: Floats
    held: Floats
    medians: dict[str, Floats]
    means: dict[str, Floats]
    intervals: dict[str, Band]
    mean_intervals: dict[str, Band]
    cliff: tuple[Budget, Budget] | None

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """(budget,) as the user gave them."""
        return tuple(config.budget for config in self.configs)


def curve(trace: Trace, name: str, places: list[int], measured: dict[str, Floats]) -> BudgetCurve:
    """The curve of the configurations at `places`; `measured`: quantity -> (sample, config). Raises TraceError."""
    kept = np.array([kept_share(trace, place, ANALYSIS) for place in places])
    rising = np.argsort(kept, kind="stable")
    ordered = [places[index] for index in rising]
    over = {quantity: array[:, ordered] for quantity, array in measured.items()}
    configs = tuple(trace.run.configs[place] for place in ordered)
    means = {quantity: array.mean(axis=0) for quantity, array in over.items()}
    medians = {quantity: np.median(over[quantity], axis=0) for quantity in ("drift", "kl")} | {"top1": means["top1"]}
    agreeing = _agreeing(over["top1"] > 0)
    return BudgetCurve(
        name=name,
        configs=configs,
        kept=kept[rising],
        held=held_shares(trace, ANALYSIS)[ordered],
        medians=medians,
        means=means,
        intervals={quantity: intervals.of_medians(over[quantity]) for quantity in ("drift", "kl")} | {"top1": agreeing},
        mean_intervals={quantity: _of_means(over[quantity]) for quantity in ("drift", "kl")} | {"top1": agreeing},
        cliff=_cliff([config.budget for config in configs], kept[rising], medians["kl"]),
    )


def _of_means(array: Floats) -> Band:
    return intervals.band(lambda weights: weights @ array, len(array), POSITIVE)


def _agreeing(same: NDArray[np.bool_]) -> Band:
    """The exact interval of each budget's share of samples with the same token."""
    found = [interval for interval in map(intervals.of_samples, same.T) if interval]
    if not found:
        return None
    return Interval(np.array([one.low for one in found]), np.array([one.high for one in found]))


def _cliff(budgets: list[Budget], kept: Floats, kl: Floats) -> tuple[Budget, Budget] | None:
    """Where KL rises most per halving of the kept share."""
    if len(budgets) < 2:
        return None
    rise = np.asarray(ratio(kl[:-1] - kl[1:], np.log2(kept[1:] / kept[:-1])))
    if not (rise > 0).any():
        return None
    place = int(np.nanargmax(rise))
    return budgets[place + 1], budgets[place]


_COLUMNS = ["selection", "budget", "#kept", "#held /\nfull", "#drift,\nmedian", "#KL, nat,\nmedian", "#same\ntoken"]
_SAID_SINGLY = 2
"""More curves than these make a sentence that nobody reads."""


def conclusion(curves: Sequence[BudgetCurve], samples: int) -> str:
    """How often the next token is the full run's: of one or two curves at both ends, of many the least and the most."""
    counts = f"({counted(samples, 'sample')})"
    if len(curves) > _SAID_SINGLY:
        every = [_shown(one, place) for one in curves for place in range(len(one.budgets))]
        ends = text.outcome_extremes(every)
        return f"The next token is the full run's in a share of samples that goes {ends} {counts}."
    told = "; ".join(f"{one.name} {_ends(one)}" for one in curves)
    return f"The next token is the full run's with {told} {counts}."


def _shown(one: BudgetCurve, place: int) -> Outcome:
    share, interval = float(one.medians["top1"][place]), text.at(one.intervals["top1"], place)
    return text.by_share(f"with {one.name} at budget {one.budgets[place]}", share, interval, 0)


def _ends(one: BudgetCurve) -> str:
    """'in 25 % [3, 65] of samples at budget 0.01, 88 % [47, 100] at 0.4': at the smallest budget and at the largest."""
    shown = [_shown(one, place).shown for place in (0, len(one.budgets) - 1)]
    first = f"in {shown[0]} of samples at budget {one.budgets[0]}"
    return first if len(one.budgets) == 1 else f"{first}, {shown[1]} at {one.budgets[-1]}"


def tables(curves: Sequence[BudgetCurve]) -> list[Table | str]:
    """A row per selection and budget; beneath, where KL rises most."""
    rows = [_row(one, place) for one in curves for place in range(len(one.budgets))]
    cliffs = [
        f"{one.name}: median KL rises most per halving of the budget from {one.cliff[0]} to {one.cliff[1]}"
        for one in curves
        if one.cliff
    ]
    return [Table("how much cache can go", _COLUMNS, rows), *(["\n".join([*cliffs, ""])] if cliffs else [])]


def _row(one: BudgetCurve, place: int) -> list[str]:
    ends = {name: text.at(band, place) for name, band in one.intervals.items()}
    return [
        folded(one.name) if place == 0 else "",
        str(one.budgets[place]),
        text.percent(float(one.kept[place])),
        text.held(float(one.held[place])),
        text.significant(float(one.medians["drift"][place]), ends["drift"]),
        text.significant(float(one.medians["kl"][place]), ends["kl"]),
        text.percent(float(one.medians["top1"][place]), ends["top1"], "\n"),
    ]


def notes(curves: Sequence[BudgetCurve], samples: int, kl_floor: float) -> str:
    """A line each on intervals, columns, caches and the noise floor."""
    lines = [
        text.about_intervals(samples, medians=True),
        text.about_shares(samples),
        text.ABOUT_DRIFT,
        "Same token: share of samples whose next token is the full run's.",
        text.about_held(float(share) for one in curves for share in one.held),
        f"Noise floor of KL: {kl_floor:.1e} nat (median).",
    ]
    return "\n".join(dict.fromkeys(lines))


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
        return conclusion(self.members, self.identity.samples)

    def tables(self) -> Sequence[Table | str]:
        """A row per selection and budget; beneath, where KL rises most."""
        return tables(self.members)

    def notes(self) -> str:
        """What intervals, drift, caches and the noise floor are, a line each."""
        return notes(self.members, self.identity.samples, self.kl_floor)

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

    Raises TraceError where the trace holds no configuration of a side, and as `drift.summarise`.
    """
    held = at_step(trace, ANALYSIS, step)
    found = [places for side in sides for places in sweeps(held.run, side)]
    measured = {
        "drift": distances(held, distance, ANALYSIS, step)[:, :, -1],
        "kl": values(held, "logit_kl", ANALYSIS, step),
        "top1": values(held, "top1_agreement", ANALYSIS, step),
    }
    names = pairing.curve_names([held.run.configs[places[0]] for places in found])
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

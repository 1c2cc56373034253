"""Curves over the budget: last-layer drift, KL and top-1 agreement (paper, figure 3c)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, Record, column, derived, interval, record
from perturbkv.analyses.conclusions import Case, Claim
from perturbkv.analyses.identity import RunIdentity, identity_at
from perturbkv.analyses.layers.drift import drift_values
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.names import common_text, distinct_names
from perturbkv.analyses.result import MemberSequence, Result, add_first_step
from perturbkv.analyses.sides import Sides, choose_sides, sweeps
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import POSITIVE, Band, Interval, OptionalInterval
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part
from perturbkv.trace import Trace

ANALYSIS = "layers --budgets"
BUDGET = ("budget",)


@record
class Quantities(Record):
    """Drift, KL and top-1 agreement at each budget of a curve."""

    drift: Floats = column("drift after the last layer, in the distance's unit", dims=BUDGET)
    kl: Floats = column("KL(full ‖ evicted) of the next token", unit="nat", dims=BUDGET)
    top1: Floats = column("share of steps whose next token is the full run's, mean over samples", unit="share",
                          dims=BUDGET)  # fmt: skip


@record
class Bands(Record):
    """Intervals of drift, KL and top-1 agreement at each budget of a curve; None for one sample."""

    drift: Band = column("intervals of the drift")
    kl: Band = column("intervals of KL")
    top1: Band = column("intervals of that share, exact for one step")


@record
class BudgetPoint(Record):
    """One budget of a curve, as a line of the table."""

    kept: float = column("share of a head's entries that is kept, mean over heads and samples", unit="share",
                         heading="#kept of\na head")  # fmt: skip
    cache_share: float = column("entries that the cache holds over those of the full cache", heading="#cache\nshare")
    drift: float = column("drift after the last layer, median over samples", heading="#drift,\nmedian",
                          text=text.three_digits)  # fmt: skip
    drift_interval: OptionalInterval = interval()
    kl: float = column("KL(full ‖ evicted) of the next token, median over samples", unit="nat",
                       heading="#KL, nat,\nmedian", text=text.three_digits)  # fmt: skip
    kl_interval: OptionalInterval = interval()
    top1: float = column("share of steps whose next token is the full run's, mean over samples", unit="share",
                         heading="#same\ntoken")  # fmt: skip
    top1_interval: OptionalInterval = interval("exact (Clopper–Pearson) for one step")


@record
class BudgetCurve(Record):
    """The drift, KL and top-1 agreement of one selection over its budgets, smallest first."""

    name: str = column("selection, and whatever tells the curve from the others")
    configs: tuple[EvictionConfig, ...] = column("configuration of each budget")
    kept: Floats = column("mean share of a head's entries that is kept", dims=BUDGET)
    cache_shares: Floats = column(
        "entries that the cache holds over those of the full cache; null where the trace does not tell",
        key="held",
        dims=BUDGET,
    )
    medians: Quantities = column("medians over samples; of top1 the mean")
    means: Quantities = column("means over samples, most of which a single prompt can make")
    intervals: Bands = column("intervals of the medians, and of top1")
    mean_intervals: Bands = column("intervals of the means, and of top1")
    cliff: tuple[Budget, Budget] | None = column(
        "two neighbouring budgets, the larger first, between which median KL rises most per halving of the kept share; "
        "null where it rises nowhere, or for one budget"
    )

    @derived()
    def budgets(self) -> tuple[Budget, ...]:
        """Budgets as given, smallest first; an integer is entries, another number a share of the prompt."""
        return tuple(config.budget for config in self.configs)

    def at(self, index: int) -> BudgetPoint:
        """Return the drift, KL and top-1 agreement at a budget's index, with intervals."""
        return BudgetPoint(
            kept=float(self.kept[index]),
            cache_share=float(self.cache_shares[index]),
            drift=float(self.medians.drift[index]),
            drift_interval=text.interval_at(self.intervals.drift, index),
            kl=float(self.medians.kl[index]),
            kl_interval=text.interval_at(self.intervals.kl, index),
            top1=float(self.medians.top1[index]),
            top1_interval=text.interval_at(self.intervals.top1, index),
        )


def budget_curve(measured: Measurements, name: str, indices: Sequence[int], distance: str) -> BudgetCurve:
    """Return the curve through the configurations at `indices`, which differ in budget alone, in any order.

    Args:
        measured: of one decode step, or the mean over all.
        name: of the curve.
        indices: of the configurations along the axis `config`.
        distance: of the drift: l1, l2 or cosine.

    Raises TraceError for a missing variable.
    """
    counts, tokens = measured["kept_count"], measured["prompt_tokens"]
    kept = np.array([float((counts[:, index].mean(axis=(1, 2)) / tokens).mean()) for index in indices])
    rising = np.argsort(kept, kind="stable")
    ordered = [indices[index] for index in rising]
    drift, kl, top1 = (
        array[:, ordered]
        for array in (drift_values(measured, distance)[:, :, -1], measured["logit_kl"], measured["top1_agreement"])
    )
    configs, same = tuple(measured.trace.run.configs[index] for index in ordered), top1.mean(axis=0)
    agreement = _share_intervals(top1)
    return BudgetCurve(
        name=name,
        configs=configs,
        kept=kept[rising],
        cache_shares=measured.cache_shares[ordered],
        medians=Quantities(np.median(drift, axis=0), np.median(kl, axis=0), same),
        means=Quantities(drift.mean(axis=0), kl.mean(axis=0), same),
        intervals=Bands(intervals.of_medians(drift), intervals.of_medians(kl), agreement),
        mean_intervals=Bands(intervals.of_means(drift, POSITIVE), intervals.of_means(kl, POSITIVE), agreement),
        cliff=_cliff([config.budget for config in configs], kept[rising], np.median(kl, axis=0)),
    )


def _share_intervals(same: Floats) -> Band:
    """Return the interval of the mean share at each budget, of (sample, budget) shares; None for a single sample."""
    if len(same) < 2:
        return None
    each = [intervals.of_shares(column) for column in same.T]
    low, high = (np.array([getattr(one, end) for one in each]) for end in ("low", "high"))
    return Interval(low, high)


def _cliff(budgets: list[Budget], kept: Floats, kl: Floats) -> tuple[Budget, Budget] | None:
    """Return the adjacent budgets, the larger first, between which KL rises most per halving of `kept`.

    None if KL never rises, or for one budget. Budgets and the (budget,) arrays are sorted by `kept`, the least first.
    """
    if len(budgets) < 2:
        return None
    rise = np.asarray(ratio(kl[:-1] - kl[1:], np.log2(kept[1:] / kept[:-1])))
    if not (rise > 0).any():
        return None
    index = int(np.nanargmax(rise))
    return budgets[index + 1], budgets[index]


@record
class BudgetCurves(
    MemberSequence[BudgetCurve],
    Result,
    section="layers",
    key="budgets",
    shown=("kept", "cache_share", "drift", "kl", "top1"),
):
    """Curves of several selections over their budgets.

    Attributes:
        members: one per selection and setting.
        identity: of the run.
    """

    members: tuple[BudgetCurve, ...] = column("one per selection and setting", key="curves")
    distance: str = column("distance of the drift: l1, l2 or cosine")
    kl_floor: float = column("median KL with everything kept, which is rounding", unit="nat", key="kl_noise_floor")
    step: int | None = column(text.STEP)
    identity: RunIdentity

    def claims(self) -> Sequence[Claim]:
        """Return the least and the largest top-1 agreement with the full run."""
        points = ((name, curve.at(index)) for name, curve, index in self._points())
        cases = [Case.number(name, point.top1, point.top1_interval, text.percent) for name, point in points]
        return [Claim("the next token", "is the full run's in", cases)]

    @property
    def agreement_unit(self) -> str:
        """Unit of top-1 agreement, in words: samples at one step, steps otherwise."""
        return "share of samples" if self.step is not None else "share of steps"

    def scope(self) -> Sequence[str]:
        """Return what the claims are of: what is counted, steps, and the number of samples."""
        return [self.agreement_unit, *super().scope()]

    def interval_note(self) -> str:
        """Return the note on n and intervals, which are exact of shares of samples alone."""
        return text.intervals_note(self.identity.samples, exact=self.step is not None, medians=True)

    def title(self) -> str:
        """Return the table's title: the distance, and the choices that all configurations share."""
        shared = common_text(self.identity.configs, "budget")
        return f"{DISTANCES[self.distance]} drift after the last layer and next token by budget: {shared}"

    def lines(self) -> Sequence[Line]:
        """Return a line per selection and budget."""
        return [Line(name, (curve.at(index),)) for name, curve, index in self._points()]

    def _points(self) -> list[tuple[str, BudgetCurve, int]]:
        """Return (configuration's name, curve, index of the budget) for every configuration."""
        points = [(curve, index) for curve in self.members for index in range(len(curve.configs))]
        return [(name, *point) for name, point in zip(self.identity.names, points, strict=True)]

    def caveats(self) -> Sequence[str]:
        """Return the note on cache shares above 1; empty without such shares."""
        above = any((curve.cache_shares > 1).any() for curve in self.members)
        return [f"Cache share: {text.ABOVE_FULL}"] if above else []

    def details(self) -> Sequence[Part]:
        """Return the budgets between which KL rises most, and the noise floor of KL."""
        cliffs = [
            f"{curve.name}: median KL rises most per halving of the budget from {curve.cliff[0]} to {curve.cliff[1]}."
            for curve in self.members
            if curve.cliff
        ]
        return [*cliffs, f"Noise floor of KL: {self.kl_floor:.1e} nat (median)."]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per selection and budget: medians over samples of drift and KL (nat), the share of equal tokens.

        `kept` is the share of a head's entries, `held` that of the whole cache.
        """
        return [row for curve in self.members for row in self._rows(curve)]

    def _rows(self, curve: BudgetCurve) -> Iterator[dict[str, Any]]:
        """Yield the data frame rows of a curve, one per budget."""
        for index, config in enumerate(curve.configs):
            yield {
                "curve": curve.name,
                "config": config.label(),
                "policy": config.policy.name,
                "selection": config.selection.name,
                "budget": config.budget.value,
                "distance": self.distance,
                "step": self.step,
                "kept": float(curve.kept[index]),
                "held": float(curve.cache_shares[index]),
                **{name: float(array[index]) for name, array in curve.medians.arrays(*BUDGET).items()},
            }


def summarise(trace: Trace, sides: Sequence[str], distance: str = "l1", step: int | None = None) -> BudgetCurves:
    """Return a curve per side (a selection, a policy, or policy:selection) and setting.

    Raises TraceError where the trace holds no configuration of a side, and as `drift.summarise`.
    """
    measured = Measurements(trace, ANALYSIS, step)
    run = measured.trace.run
    groups = [indices for side in sides for indices in sweeps(run, side)]
    names = distinct_names([run.configs[indices[0]] for indices in groups], "budget")
    curves = tuple(budget_curve(measured, name, indices, distance) for name, indices in zip(names, groups, strict=True))
    floor = float(np.median(measured["logit_kl_noise_floor"]))
    shown = [config for curve in curves for config in curve.configs]
    result = BudgetCurves(curves, distance, floor, measured.step, identity_at(trace, shown, step))
    return add_first_step(result, measured.step, partial(summarise, trace, sides, distance, 0))


def budget_curves(
    trace: Trace,
    baseline: str | None = None,
    treatments: Sides | None = None,
    *,
    step: int | None = None,
    distance: str = "l1",
) -> BudgetCurves:
    """Return last-layer drift, KL and top-1 agreement over the budgets, a curve per selection (paper, figure 3c).

    Only complete samples that have the step count.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`): the first curve; None:
            attention, or the trace's own where it has no two-stage.
        treatments: likewise, one or several: the others; None: two-stage, or all that the trace has.
        step: which decode step, from 0; None: the mean over the steps of each sample.
        distance: of the residual stream after the last decoder layer: `l1`, `l2` (its own unit) or `cosine` (0 to 2).
            Beside it stand KL(full ‖ evicted) of the next token, in nats, and how often the likeliest token is the
            same, as a share of steps.

    Returns the curves as one result. Arrays of a `BudgetCurve` are (budget,), medians or shares over samples.

    Raises TraceError where the trace has no complete sample, no configuration of a side, or lacks what is asked for;
    ConfigError for a step that it does not have, and for sides that are no names; UnknownNameError for an unknown
    distance.

    >>> import perturbkv as pk
    >>> result = pk.budget_curves(trace, "attention", "two-stage")
    >>> [curve.name for curve in result], result[0].medians.kl.shape  # (budget,)
    (['attention', 'two-stage'], (1,))
    """
    first, names = choose_sides(trace, baseline, treatments)
    return summarise(trace, [first, *names], distance, step)

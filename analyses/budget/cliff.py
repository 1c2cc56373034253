"""Cliffs: the budgets at which KL of the next token passes 0.1 nat, and 1 nat, method by method."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import columns, text
from perturbkv.analyses.budget.budget_axis import Axis, named_axes
from perturbkv.analyses.budget.criteria import Criterion
from perturbkv.analyses.columns import Line, Record, column, interval, record
from perturbkv.analyses.conclusions import Case, Claim
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.result import MemberSequence, Result
from perturbkv.analyses.sides import Sides, check_sides
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.crossings import Crossing, CrossingRatio, crossing, crossing_ratio
from perturbkv.analyses.stats.intervals import Band, OptionalInterval
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_number
from perturbkv.configs.selections import STAGED
from perturbkv.display import Part
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

ANALYSIS = "cliff"
THRESHOLDS = (0.1, 1.0)
"""Default thresholds of KL, in nat."""
LEAST_BUDGETS = 3
"""Smallest number of budgets that make a curve."""


@record
class BudgetKL(Record):
    """KL of the next token at one budget of a method."""

    budget: str = column("budget as given", heading="#budget")
    cache_share: float = column("entries of the cache over those of the full cache", heading="#cache\nshare")
    median: float = column("KL of the next token", unit="nat", heading="#KL, nat,\nmedian", text=text.three_digits)
    median_interval: OptionalInterval = interval()
    mean: float = column("KL, mean over samples; one can dominate it", heading="#mean", text=text.three_digits)


@record
class Cliff(Record, section="cliff of a method"):
    """KL of one method over its budgets, smallest first, and where it passes the thresholds."""

    name: str = column("what distinguishes it from the other methods")
    configs: tuple[EvictionConfig, ...] = column("its configurations, smallest budget first")
    budgets: Floats = column("(budget) as given: all entries, or all shares", dims=("budget",))
    cache_shares: Floats = column(
        "(budget) entries of the cache over those of the full cache", key="held", dims=("budget",)
    )
    cache_bytes: Floats = column(
        "(budget) mean bytes of the evicted caches, in 16 bits or fewer", key="held_bytes", dims=("budget",)
    )
    median: Floats = column("(budget) KL of the next token over samples", unit="nat", dims=("budget",))
    median_interval: Band = interval("of the medians")
    mean: Floats = column("(budget) mean over samples; one sample can dominate it", unit="nat", dims=("budget",))
    unstaged: NDArray[np.int64] = column(
        "(budget) samples in which stage 1 takes no entry in any head", dims=("budget",)
    )
    crossings: tuple[Crossing, ...] = column("one per threshold")
    ratios: tuple[CrossingRatio, ...] = column("one per threshold, over the first method; empty of the first method")

    def interpolate(self, budget: float, quantity: Floats) -> float:
        """Return a (budget,) quantity at any budget, interpolated on both logarithms; NaN outside measured budgets."""
        if not self.budgets[0] <= budget <= self.budgets[-1]:
            return float("nan")
        return float(np.exp(np.interp(np.log(budget), np.log(self.budgets), np.log(quantity))))

    def kl_by_budget(self) -> Iterator[BudgetKL]:
        """Yield the KL of the next token at each budget, with its interval."""
        for index, config in enumerate(self.configs):
            yield BudgetKL(
                budget=str(config.budget),
                cache_share=float(self.cache_shares[index]),
                median=float(self.median[index]),
                median_interval=text.interval_at(self.median_interval, index),
                mean=float(self.mean[index]),
            )


def method_cliff(
    measured: Measurements, name: str, axis: Axis, first: Axis, kl: Floats, thresholds: tuple[float, ...]
) -> Cliff:
    """Return a method's cliff: its KL curve, threshold crossings and their ratios to the first method's.

    Args:
        measured: the trace.
        name: of the method.
        axis: the method's budgets.
        first: those of the first method; the first method itself gets no ratios.
        kl: (sample, config) in nat, of all configurations of the trace.
        thresholds: of KL, in nat, rising.
    """
    curves, first_curves = kl[:, list(axis.indices)], kl[:, list(first.indices)]
    ratios = [] if axis is first else [
        crossing_ratio((first.budgets, axis.budgets), (first_curves, curves), threshold) for threshold in thresholds
    ]  # fmt: skip
    taken = measured["stage1_count"][:, list(axis.indices)].max(axis=(2, 3))  # over layers and heads
    staged = np.array([config.selection.name in STAGED for config in axis.configs])
    held = np.full(len(measured.trace.run.configs), np.nan)
    if "held_bytes" in measured:
        held = measured["held_bytes"].mean(axis=0)
    cliff = Cliff(
        name=name,
        configs=axis.configs,
        budgets=axis.budgets,
        cache_shares=axis.cache_shares,
        cache_bytes=held[list(axis.indices)],
        median=np.median(curves, axis=0),
        median_interval=intervals.of_medians(curves),
        mean=curves.mean(axis=0),
        unstaged=np.asarray(((taken == 0) & staged).sum(axis=0), dtype=np.int64),
        crossings=(),
        ratios=tuple(ratios),
    )
    points = [crossing(axis.budgets, curves, threshold) for threshold in thresholds]
    sized = (
        dataclasses.replace(
            point,
            entries=isinstance(axis.configs[0].budget.value, int),
            cache_share=cliff.interpolate(point.value, cliff.cache_shares),
            cache_bytes=cliff.interpolate(point.value, cliff.cache_bytes),
        )
        for point in points
    )
    return dataclasses.replace(cliff, crossings=tuple(sized))


@record
class Cliffs(
    MemberSequence[Cliff],
    Result,
    section="budget --cliff",
    shown=("threshold", "budget", "cache_share", "megabytes", "over_first"),
    first="method",
    has_medians=True,
):
    """The cliffs of every method of a run; a sequence of them."""

    thresholds: tuple[float, ...] = column("rising", unit="nat")
    steps: int = column("decode steps over which each sample's KL is the mean")
    kl_floor: float = column("median KL with everything kept: rounding", unit="nat", key="kl_noise_floor")
    members: tuple[Cliff, ...] = column("the first is what the others are compared with", key="methods")
    identity: RunIdentity

    def claims(self) -> Sequence[Claim]:
        """Return the budget from which on methods stay below each threshold."""
        return [
            Claim(
                f"median KL of the next token below {threshold:g} nat",
                "needs a budget of",
                [
                    Case(method.name, crossing.value, crossing.budget.removeprefix("*"))  # the table explains its star
                    for method in self.members
                    for crossing in method.crossings
                    if crossing.threshold == threshold
                ],
            )
            for threshold in self.thresholds
        ]

    def title(self) -> str:
        """Return the table's title."""
        return "budget from which on median KL of the next token stays below a threshold"

    def lines(self) -> Sequence[Line]:
        """Return a line per threshold and method."""
        return [
            Line(method.name if len(self) > 1 else "", (method.crossings[index], self._crossing_ratio(method, index)))
            for index in range(len(self.thresholds))
            for method in self.members
        ]

    def caveats(self) -> Sequence[str]:
        """Return notes on budgets without stage 1, and on curves that pass a threshold more than once."""
        again = any(crossing.passes > 1 for method in self.members for crossing in method.crossings)
        mark = ["* The curve passes more than once: the largest budget counts."] if again else []
        named = [
            f"{method.name} b={config.budget} ({count} of {self.identity.samples} samples)"
            for method in self.members
            for config, count in zip(method.configs, method.unstaged, strict=True)
            if count
        ]
        return [*([f"Stage 1 takes no entry: {', '.join(named)}."] if named else []), *mark]

    def details(self) -> Sequence[Part]:
        """Return tables of all curves and of the crossings of means, and notes on how both are made."""
        lines = [Line(method.name if index == 0 else "", (row,))
                 for method in self.members for index, row in enumerate(method.kl_by_budget())]  # fmt: skip
        means = [Line(method.name, (crossing, self._crossing_ratio(method, index)))
                 for method in self.members for index, crossing in enumerate(method.crossings)]  # fmt: skip
        return [
            columns.table("KL of the next token", lines, ("budget", "cache_share", "median", "mean"), self.FIRST),
            columns.table("crossings of the mean over samples", means, ("threshold", "mean_budget", "known"), "method"),
            (
                "Lines join the budgets measured, on both logarithms; beyond them only the side is known, > or <. "
                "Brackets: the budgets at which the median's own interval holds the threshold. Over the first's: the "
                "median over samples of each one's own ratio; a sample that passes beyond the budgets counts with all "
                "that its ratio can be."
            ),
            *([f"KL is each sample's mean over its steps, at most {self.steps}."] if self.steps > 1 else []),
            f"With everything kept KL is {self.kl_floor:.0e} nat (median).",
            text.cache_share_note(share for method in self.members for share in method.cache_shares),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per method and budget: KL of the next token in nat, median and mean over samples, and caches."""
        return [
            {"method": method.name, **config_columns(config), "held": float(method.cache_shares[index]),
             "bytes": float(method.cache_bytes[index]), "median_kl": float(method.median[index]),
             "mean_kl": float(method.mean[index])}
            for method in self.members for index, config in enumerate(method.configs)
        ]  # fmt: skip

    def _crossing_ratio(self, method: Cliff, index: int) -> CrossingRatio:
        """Return the ratio of a method's crossing to the first method's, for the threshold at `index`.

        Of the first method it is 1, without an interval.
        """
        if method.ratios:
            return method.ratios[index]
        samples = self.identity.samples
        return CrossingRatio(self.thresholds[index], (1.0, 1.0), None, samples, samples)


def cliff(trace: Trace, *, sides: Sides | None = None, kl: Sequence[float] = THRESHOLDS) -> Cliffs:
    """Find each method's cliff: the budget from which on the next token's KL stays below a threshold.

    KL(full ‖ evicted) is each sample's mean over its measured steps; the curve is the median over samples, joined by
    lines on both logarithms. Where it passes a threshold more than once the largest budget counts; beyond the budgets
    measured only the side is known. Methods are compared prompt by prompt: the median of each one's ratio.

    Args:
        trace: from `measure` or `read_trace`: three budgets or more, all entries or all shares.
        sides: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`), or several, the first of which
            the others are compared with; by default all that the trace holds.
        kl: thresholds in nat.

    Returns the methods as one result. Arrays of a `Cliff` are (budget,).

    Raises ConfigError for no thresholds, equal ones or any not above 0, and for budgets of both kinds; TraceError
    where the trace has no complete sample, no such side, or fewer than three budgets of one.

    Example, of a `trace` of 5 budgets:
        >>> import perturbkv as pk
        >>> result = pk.cliff(trace)
        >>> [one.name for one in result], result[0].median.shape
        (['attention', 'two-stage'], (5,))
    """
    thresholds = check_thresholds(kl)
    named = check_sides(trace, "", "" if sides is None else sides)
    measured = Measurements(trace, ANALYSIS)
    curves = named_axes(measured, None if sides is None else named)
    axes = [axis for _, axis in curves]
    for axis in axes:
        if len(axis.budgets) < LEAST_BUDGETS:
            got = ", ".join(f"{config.budget}" for config in axis.configs)
            raise TraceError(
                f"{ANALYSIS} needs at least {LEAST_BUDGETS} budgets of every method, got {got} of "
                f"{axis.configs[0].policy.name}:{axis.configs[0].selection.name}; without a trace it makes one of seven"
            )
    each = Criterion("kl", thresholds[0]).sample_means(measured)
    members = tuple(method_cliff(measured, name, axis, axes[0], each, thresholds) for name, axis in curves)
    configs = [config for axis in axes for config in axis.configs]
    floor = float(np.median(Measurements(trace, ANALYSIS, by_step=True)["logit_kl_noise_floor"]))
    return Cliffs(thresholds, measured.trace.run.steps, floor, members, identity(measured.trace, configs))


def check_thresholds(kl: Sequence[float]) -> tuple[float, ...]:
    """Return KL thresholds in nat, sorted. Raises ConfigError for no threshold, duplicates, or a threshold ≤ 0."""
    for threshold in kl:
        check_number("--kl", threshold)
    if not kl or min(kl) <= 0 or len({*kl}) < len(kl):
        raise ConfigError(
            f"--kl takes different numbers above 0, in nat, such as 0.1,1; got {', '.join(map(str, kl)) or 'none'}"
        )
    return tuple(sorted(map(float, kl)))

"""Where does each method fall off its cliff? The budget at which KL of the next token passes 0.1 nat, and 1 nat.

One method over its budgets: KL of the next token, and where it passes the thresholds.

How cliffs are told: in a sentence per threshold, in tables, in the notes beneath.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import pairing, text
from perturbkv.analyses.budget.budget_axis import Axis, axis
from perturbkv.analyses.budget.criteria import Criterion
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import Floats, at_step, values
from perturbkv.analyses.pairing import Sides, checked, folded, sweeps
from perturbkv.analyses.result import Result, Sequenced
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.crossings import Contest, Crossing, contest, crossing
from perturbkv.analyses.stats.intervals import Band
from perturbkv.analyses.text import over, sentence
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_number
from perturbkv.configs.selections import STAGED
from perturbkv.display import Table
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

ANALYSIS = "cliff"


@dataclass(frozen=True)
class Cliff:
    """One method over its budgets, smallest first.

    Attributes:
        name: what tells it from the others.
        configs: its configurations.
        budgets: (budget,) as the user gave them: all entries, or all shares.
        held: (budget,) entries that the cache holds over those of the full cache; NaN where the trace does not tell.
        held_bytes: (budget,) mean bytes of the evicted caches, stored in 16 bits or fewer; NaN likewise.
        median: (budget,) of KL(full ‖ evicted) of the next token over samples, nat; `median_interval` of it.
        mean: (budget,) over samples, most of which single prompts can make.
        unstaged: (budget,) prompts in which stage 1 takes no entry in any head, where the method has a stage 1.
        crossings: one per threshold.
        contests: against the first method, one per threshold; empty of the first.
    """

    name: str
    configs: tuple[EvictionConfig, ...]
    budgets: Floats
    held: Floats
    held_bytes: Floats
    median: Floats
    median_interval: Band
    mean: Floats
    unstaged: NDArray[np.int64]
    crossings: tuple[Crossing, ...]
    contests: tuple[Contest, ...]

    def at(self, budget: float, quantity: Floats) -> float:
        """What a (budget,) quantity is at a budget among those measured, by a line on both logarithms; else NaN."""
        if not self.budgets[0] <= budget <= self.budgets[-1]:
            return float("nan")
        return float(np.exp(np.interp(np.log(budget), np.log(self.budgets), np.log(quantity))))

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        passed = [self._crossing(one) for one in self.crossings]
        return {**vars(self), "crossings": passed, "contests": [one.to_dict() for one in self.contests]}

    def _crossing(self, one: Crossing) -> dict[str, Any]:
        told = one.to_dict(self.budgets[0], self.budgets[-1])
        return {**told, "held": self.at(one.value, self.held), "held_bytes": self.at(one.value, self.held_bytes)}


def method_cliff(
    trace: Trace, name: str, own: Axis, baseline: Axis, each: Floats, thresholds: tuple[float, ...]
) -> Cliff:
    """One method; `each` is (sample, config)."""
    curves, against = each[:, list(own.places)], each[:, list(baseline.places)]
    contests = [] if own is baseline else [
        contest((baseline.at, own.at), (against, curves), threshold) for threshold in thresholds
    ]  # fmt: skip
    return Cliff(
        name=name,
        configs=own.configs,
        budgets=own.at,
        held=own.held,
        held_bytes=_bytes(trace)[list(own.places)],
        median=np.median(curves, axis=0),
        median_interval=intervals.of_medians(curves),
        mean=curves.mean(axis=0),
        unstaged=_method_cliff_unstaged(trace, own),
        crossings=tuple(crossing(own.at, curves, threshold) for threshold in thresholds),
        contests=tuple(contests),
    )


def _bytes(trace: Trace) -> Floats:
    """(config,) mean bytes over samples; NaN where the trace does not tell."""
    if "held_bytes" not in trace.arrays:
        return np.full(len(trace.run.configs), np.nan)
    return np.asarray(values(trace, "held_bytes", ANALYSIS).mean(axis=0))


def _method_cliff_unstaged(trace: Trace, own: Axis) -> NDArray[np.int64]:
    """(budget,) prompts of which a method that has two stages takes nothing in its first."""
    taken = values(trace, "stage1_count", ANALYSIS)[:, list(own.places)].max(axis=(2, 3))
    staged = np.array([config.selection.name in STAGED for config in own.configs])
    return np.asarray(((taken == 0) & staged).sum(axis=0), dtype=np.int64)


_MB = 1e6
_HOW = (
    "Passes: the budget from which on the median over samples of KL(full ‖ evicted) stays below the threshold; lines "
    "join the budgets measured, on both logarithms, and beyond them nothing is told but < and >. Its interval: the "
    "budgets at which the median's own cannot tell the side.",
    "By the mean: the same of the mean over samples, which one prompt can make: it has no interval worth reading.",
    "Over {baseline}'s: each prompt's own budget over its own with {baseline}, the median over prompts; below 1 it "
    "needs less. A prompt that passes beyond the budgets counts with all that its ratio can be, so that of the median "
    "one end may be all that is known; … is an end that the budgets do not show.",
)


def conclusion(members: Sequence[Cliff], thresholds: Sequence[float], samples: int) -> str:
    """Per threshold where the methods pass it, and what each needs of the first one's budget."""
    return "\n".join(_concluded(members, place, threshold, samples) for place, threshold in enumerate(thresholds))


def _concluded(members: Sequence[Cliff], place: int, threshold: float, samples: int) -> str:
    where = ", ".join(f"{_at(one, one.crossings[place])} with {one.name}" for one in members)
    said = f"the budget from which on median KL stays below {threshold:g} nat is {where}"
    known = [(one.name, one.contests[place]) for one in members[1:] if not isnan(one.contests[place].ratio)]
    needs = ", ".join(f"{name} {_ratio(found)}" for name, found in known)
    of = f"; of {members[0].name}'s budget the median prompt needs with {needs}" if known else ""
    return sentence(f"{said}{of} ({over(samples)})")


def _at(one: Cliff, passed: Crossing, apart: str = " ") -> str:
    """'0.12 [0.06, 0.2]'; '> 0.4 [0.2, >0.4]' where the largest budget measured does not do."""
    beyond = {inf: one.budgets[-1], 0.0: one.budgets[0]}
    sign = {inf: "> ", 0.0: "< "}.get(passed.value, "")
    value = sign + _budget(one, beyond.get(passed.value, passed.value))
    return value + text.ends(passed.interval, lambda end: _end(one, end), apart)


def _budget(one: Cliff, value: float) -> str:
    return f"{value:,.0f}" if isinstance(one.configs[0].budget.value, int) else f"{value:.2g}"


def _end(one: Cliff, end: float) -> str:
    """A budget; beyond those measured '<0.005' or '>0.4'."""
    beyond = {inf: f">{_budget(one, one.budgets[-1])}", 0.0: f"<{_budget(one, one.budgets[0])}"}
    return beyond.get(end) or _budget(one, end)


def _ratio(found: Contest, apart: str = " ") -> str:
    """'0.62 × [0.5, 0.8]'; between two ends where the budgets measured do not show the median."""
    least, most = found.limits
    shown = text.ends(found.interval, lambda end: f"{end:.2f}" if 0 < end < inf else "…", apart)
    if not isnan(found.ratio):
        return f"{found.ratio:.2f} ×{shown}"
    between = {(True, True): f"{least:.2f} to {most:.2f}", (True, False): f"≥ {least:.2f}",
               (False, True): f"≤ {most:.2f}", (False, False): "not told"}[least > 0, most < inf]  # fmt: skip
    return between + (shown if between != "not told" else "")


def tables(members: Sequence[Cliff], thresholds: Sequence[float]) -> list[Table | str]:
    """A table per threshold, and one of all curves."""
    return [*(_crossings(members, place, threshold) for place, threshold in enumerate(thresholds)), _curves(members)]


def _crossings(members: Sequence[Cliff], place: int, threshold: float) -> Table:
    columns = ["", "#passes at\nbudget", "#by the\nmean", "#held /\nfull", "#MB",
               f"#over\n{folded(members[0].name, 14)}'s", "#told by\nprompts"]  # fmt: skip
    rows = [[folded(one.name), *_passed(one, one.crossings[place]), *_compared(one, place)] for one in members]
    return Table(f"KL of the next token stays below {threshold:g} nat from this budget on", columns, rows)


def _passed(one: Cliff, passed: Crossing) -> list[str]:
    held, size = (one.at(passed.value, quantity) for quantity in (one.held, one.held_bytes))
    by_mean = Crossing(passed.threshold, passed.mean, None, passed.mean, 1)
    mark = "*" if passed.passes > 1 else ""
    return [mark + _at(one, passed, "\n"), _at(one, by_mean), f"{held:.2g}" if held == held else "–",
            "–" if isnan(size) else f"{size / _MB:.3g}"]  # fmt: skip


def _compared(one: Cliff, place: int) -> list[str]:
    if not one.contests:
        return ["1", ""]
    found = one.contests[place]
    return [_ratio(found, "\n"), f"{found.told} of {found.prompts}"]


def _curves(members: Sequence[Cliff]) -> Table:
    columns = ["", "#b", "#held /\nfull", "#KL, nat,\nmedian", "#mean"]
    return Table("KL of the next token by budget", columns, [row for one in members for row in _rows(one)])


def _rows(one: Cliff) -> Iterator[list[str]]:
    for place, config in enumerate(one.configs):
        median = text.significant(float(one.median[place]), text.at(one.median_interval, place))
        held = "–" if isnan(one.held[place]) else f"{one.held[place]:.2g}"
        name = folded(one.name) if place == 0 else ""
        yield [name, str(config.budget), held, median.replace("\n", " "), text.significant(float(one.mean[place]))]


def notes(members: Sequence[Cliff], samples: int, steps: int, floor: float) -> str:
    """A line each on intervals, crossings, means, comparisons, curves that pass twice, and caches."""
    again = any(one.passes > 1 for member in members for one in member.crossings)
    lines = [
        text.about_intervals(samples, medians=True),
        _HOW[0],
        _HOW[1],
        *([_HOW[2].format(baseline=members[0].name)] if len(members) > 1 else []),
        *(["* The curve passes more than once: the largest budget counts."] if again else []),
        *([f"KL is each sample's mean over its steps, at most {steps}."] if steps > 1 else []),
        *_unstaged(members, samples),
        f"With everything kept KL is {floor:.0e} nat (median).",
        text.about_held(share for one in members for share in one.held),
    ]
    return "\n".join(lines)


def _unstaged(members: Sequence[Cliff], samples: int) -> Iterator[str]:
    """Where the share α of so few entries is none, so that two stages are the second alone."""
    for one in members:
        empty = [(config.budget, int(count)) for config, count in zip(one.configs, one.unstaged, strict=True) if count]
        if empty:
            where = ", ".join(f"{budget} ({count} of {samples} prompts)" for budget, count in empty)
            yield f"Stage 1 of {one.name} takes no entry, as α of so few is none, at b = {where}: stage 2 alone."


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
        return conclusion(self.members, self.thresholds, self.identity.samples)

    def tables(self) -> Sequence[Table | str]:
        """Per threshold the crossings and how they compare; then all curves."""
        return tables(self.members, self.thresholds)

    def notes(self) -> str:
        """What a crossing, its interval and a comparison are."""
        return notes(self.members, self.identity.samples, self.steps, self.kl_floor)

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
    names = pairing.curve_names([one.configs[0] for one in axes])
    members = tuple(method_cliff(held, name, one, axes[0], each, wanted) for name, one in zip(names, axes, strict=True))
    shown = [config for one in axes for config in one.configs]
    floor = float(np.median(values(held, "logit_kl_noise_floor", ANALYSIS)))
    return Cliffs(members, wanted, floor, held.run.steps, identity(held, shown))


def checked_thresholds(kl: Sequence[float]) -> tuple[float, ...]:
    """Thresholds in nat, rising. Raises ConfigError for none, and for one that is not positive or there twice."""
    for one in kl:
        check_number("--kl", one)
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

"""How small may a budget be? The smallest at which perturbation or score keep to a limit, and the bytes it saves.

How safe budgets are told: in a sentence, in a table per criterion, in the notes beneath.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any

import numpy as np

from perturbkv.analyses import measurements, pairing, text
from perturbkv.analyses.budget.budget_axis import axis
from perturbkv.analyses.budget.criteria import (
    ANALYSIS,
    FEW,
    NONE,
    SAFE,
    CacheSize,
    Criterion,
    SafeBudget,
    Tested,
    Verdict,
    cache_size,
    check_size,
    criteria,
    verdict,
    worst,
)
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import at_step, only_alike
from perturbkv.analyses.pairing import Sides, checked, counted, folded, sweeps
from perturbkv.analyses.result import Result, Sequenced
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import LEAST
from perturbkv.analyses.text import capital
from perturbkv.display import Table
from perturbkv.trace import Trace

_WHAT = {"kl": "mean KL", "drop": "mean drop of the score", "top1": "mean share of the same token"}
_UNITS = {"kl": " nat", "drop": " points", "top1": ""}
_GIB = 2**30
_HOW = (
    "Bounds: one-sided, 95 %{assumed}. Budgets are tested from the largest down, up to the first that fails, so that "
    "each selection's verdict errs no more often than one bound does; verdicts on several selections are not corrected "
    "for their number. None: the mean itself exceeds the limit, so that more samples like these would not do."
)
_BOUNDS = {
    "kl": "KL: the larger bound of Student's t and of a lognormal. It holds a lognormal's mean in 95 % of simulated "
    "draws of 8 to 40 samples, but only in 74 to 90 % where one prompt in ten carries the mean. Above limit: the share "
    "of prompts whose own KL exceeds the limit, exact 95 % bound.",
    "drop": "Drop: a bound for any distribution of scores; {few}.",
    "top1": "Same token: exact for single steps, for means over steps a bound for any distribution.",
}
_STEPS = (
    "KL and same token: of the decoding steps that were measured (--steps), after which an answer can be lost all the "
    "same; --max-drop limits whole answers."
)


def said(criterion: Criterion) -> str:
    """'mean KL ≤ 0.1 nat': the limit in words."""
    sign = "≥" if criterion.least else "≤"
    return f"{_WHAT[criterion.name]} {sign} {_value(criterion, criterion.limit)}{_UNITS[criterion.name]}"


def conclusion(curves: Sequence[SafeBudget], samples: int) -> str:
    """Who has a safe budget, who has none, of whom it cannot be told: a sentence each."""
    limits = " and ".join(said(one.criterion) for one in curves[0].verdicts)
    safe = [f"{one.name} {one.safe.config.budget}" for one in curves if one.safe is not None]
    found = ", ".join(safe) or _of_none(curves)
    told = [f"Smallest budget with {limits} (95 % bounds{_assumed(curves)}, {counted(samples, 'sample')}): {found}."]
    told += [capital(_missing(one, samples), one.name) for one in curves if one.safe is None]
    return "\n".join(told)


def _of_none(curves: Sequence[SafeBudget]) -> str:
    """What is told where no selection has a safe budget."""
    none = sum(one.state == NONE for one in curves)
    if none == len(curves):
        return "none of those measured"
    return f"none for {none}, cannot be told for {len(curves) - none}" if none else "cannot be told"


def _assumed(curves: Sequence[SafeBudget]) -> str:
    """What the level of a bound takes for granted."""
    return ", of KL if it is lognormal" if any(told.criterion.name == "kl" for told in curves[0].verdicts) else ""


def _missing(one: SafeBudget, samples: int) -> str:
    """Why a selection has no safe budget: a limit that its mean exceeds, or too few samples."""
    worst = next(told for state in (NONE, FEW) for told in one.verdicts if told.state == state)
    largest = worst.budgets[0]
    where = f"at {largest.config.budget}, the largest measured, its {_WHAT[worst.criterion.name]} is"
    mean, bound = (_value(worst.criterion, value) for value in (largest.mean, largest.bound))
    if worst.state == NONE:
        return f"{one.name} has none: {where} {mean}{_UNITS[worst.criterion.name]}."
    may = "has no bound yet" if isinf(largest.bound) else f"may be {bound}"
    return f"{one.name} cannot be told: {where} {mean} and {may}; {_enough(worst, samples)}."


def _enough(told: Verdict, samples: int) -> str:
    if told.samples_for is not None:
        return f"{told.samples_for:,} samples like these would do"
    if samples < LEAST:
        return f"no bound is given of fewer than {LEAST} samples"
    return "more samples are needed, from these it cannot be told how many"


def tables(curves: Sequence[SafeBudget], size: CacheSize | None, dtype: str) -> list[Table | str]:
    """A table per criterion, and where they were asked for the bytes."""
    made = [_of_criterion(curves, place) for place in range(len(curves[0].verdicts))]
    return [*made, *([] if size is None else [_of_bytes(curves, size, dtype)])]


def _of_criterion(curves: Sequence[SafeBudget], place: int) -> Table:
    """Of every selection its smallest safe budget, and at which it fails."""
    criterion = curves[0].verdicts[place].criterion
    above = ["#above\nlimit"] if criterion.name == "kl" else []
    columns = ["selection", "#smallest\nbudget", "#held /\nfull", "#mean", "#bound", *above, "fails at"]
    rows = [[folded(one.name), *_row(one.verdicts[place])] for one in curves]
    return Table(said(criterion), columns, rows)


def _row(told: Verdict) -> list[str]:
    columns = 5 if told.criterion.name == "kl" else 4
    shown = ["–"] * columns if told.safe is None else [
        str(told.safe.config.budget), text.held(told.safe.held),
        *(_value(told.criterion, value) for value in (told.safe.mean, told.safe.bound)),
        *([] if told.safe.above is None else [f"≤ {100 * told.safe.above:.0f} %"]),
    ]  # fmt: skip
    return [*shown, _failure(told, told.failed)]


def _failure(told: Verdict, failed: Tested | None) -> str:
    """'0.2: mean 0.12', or '0.2: mean 0.08, bound 0.14; n = 75 would do'."""
    if failed is None:
        return "none: it holds at each"
    where = f"{failed.config.budget}: mean {_value(told.criterion, failed.mean)}"
    if not told.criterion.keeps(failed.mean):
        return where
    if isinf(failed.bound):
        return f"{where};\nn ≥ {LEAST} has a bound"
    enough = "n unknown" if told.samples_for is None else f"n = {told.samples_for:,} would do"
    return f"{where}, bound {_value(told.criterion, failed.bound)};\n{enough}"


def _of_bytes(curves: Sequence[SafeBudget], size: CacheSize, dtype: str) -> Table:
    """What the caches take at the length and the batch asked for."""
    title = f"caches of {size.length:,} entries × {size.batch:,} in {dtype}: full {_gib(size.full)}"
    rows = []
    for one in curves:
        taken = _taken(one, size)
        rows.append([folded(one.name), *(["–"] * 4 if one.safe is None else [
            str(one.safe.config.budget), _gib(taken), _gib(size.full - taken), text.percent(1 - taken / size.full),
        ])])  # fmt: skip
    return Table(title, ["selection", "#smallest\nbudget", "#evicted", "#saved", "#of full"], rows)


def _taken(one: SafeBudget, size: CacheSize) -> float:
    """Bytes at the smallest safe budget; NaN where there is none."""
    return float("nan") if one.safe is None else size.evicted(one.safe.config, one.safe.held)


def _gib(taken: float) -> str:
    return f"{taken / _GIB:.3g} GiB".replace("-", "−")


def _value(criterion: Criterion, value: float) -> str:
    if isinf(value):
        return "∞"
    if criterion.name == "drop":
        return f"{100 * value:.3g}".replace("-", "−")
    return f"{value:.3g}" if criterion.name == "kl" else f"{value:.4g}"


def notes(curves: Sequence[SafeBudget], size: CacheSize | None, samples: int) -> str:
    """A line each on the bounds, the order of the tests, and what caches hold."""
    few = f"{samples} samples without any loss leave room for {_room(samples):.3g} points"
    names = [one.criterion.name for one in curves[0].verdicts]
    about = [_BOUNDS[name].format(few=few) for name in names] + ([] if "drop" in names else [_STEPS])
    held = [at.held for one in curves for at in one.verdicts[0].budgets]
    held += [_taken(one, size) / size.full for one in curves if one.safe is not None] if size is not None else []
    how = _HOW.format(assumed=_assumed(curves))
    return "\n".join([f"n = {counted(samples, 'sample')}.", how, *about, text.about_held(held)])


def _room(samples: int) -> float:
    """Points that the bound leaves of so many samples of which none loses anything."""
    return 100 * Criterion("drop", 1.0).bound(np.zeros(samples))


_EXIT_CODES = {SAFE: 0, NONE: 1, FEW: 2}


@dataclass(frozen=True, repr=False)
class SafeBudgets(Sequenced[SafeBudget], Result):
    """The smallest safe budget of every selection of a run.

    Attributes:
        members: one per selection and setting.
        size: caches of the length and batch asked for; None where none was.
        dtype: the run's number type, in which caches are counted.
        identity: of the run.
        alike: samples whose answer all caches begin alike and the full one ends there; 0 where no score is limited.
    """

    members: tuple[SafeBudget, ...]
    size: CacheSize | None
    dtype: str
    identity: RunIdentity
    alike: int = 0

    @property
    def exit_code(self) -> int:
        """0 where every selection has a safe budget; 1 where one has none; else 2 where samples are too few to tell."""
        return _EXIT_CODES[worst(one.state for one in self.members)]

    def conclusion(self) -> str:
        """The smallest safe budgets, who has none, and of whom it cannot be told."""
        return conclusion(self.members, self.identity.samples)

    def tables(self) -> list[Table | str]:
        """Of each criterion a row per selection; then the bytes."""
        return tables(self.members, self.size, self.dtype)

    def notes(self) -> str:
        """What bounds are, how budgets are tested, what caches hold."""
        told = notes(self.members, self.size, self.identity.samples)
        return "\n".join(filter(None, (told, measurements.about_first_token(self.alike, self.identity.samples))))

    def records(self) -> list[dict[str, Any]]:
        """A row per selection, criterion and budget, the largest budget first.

        `mean` and `bound` are nats, a drop of the score in [0, 1], or a share; `above`, of KL, is the exact bound of
        the share of prompts above the limit; `tested` is 0 below the first failure, and `holds` tells nothing there.
        """
        return [
            {"name": one.name, **columns_of(at.config), "criterion": told.criterion.name, "limit": told.criterion.limit,
             "held": at.held, "mean": at.mean, "bound": at.bound, "above": at.above, "tested": int(at.tested),
             "holds": int(at.holds)}
            for one in self.members for told in one.verdicts for at in told.budgets
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {"exit_code": self.exit_code, "cache": self._cache(), "selections": [self._told(one) for one in self]}
        )
        return found

    def _cache(self) -> dict[str, Any] | None:
        return None if self.size is None else {**vars(self.size), "dtype": self.dtype, "full_bytes": self.size.full}

    def _told(self, one: SafeBudget) -> dict[str, Any]:
        safe, verdicts = one.safe, [told.to_dict() for told in one.verdicts]
        document: dict[str, Any] = {"name": one.name, "state": one.state, "verdicts": verdicts}
        if safe is None:
            return document | dict.fromkeys(("budget", "config", "held", "evicted_bytes"))
        taken = None if self.size is None else self.size.evicted(safe.config, safe.held)
        found = {"budget": safe.config.budget, "config": safe.config, "held": safe.held}
        return {**document, **found, "evicted_bytes": taken}


def safe_budget(
    trace: Trace,
    *,
    max_kl: float | None = None,
    max_drop: float | None = None,
    min_top1: float | None = None,
    sides: Sides | None = None,
    for_length: int | None = None,
    for_batch: int = 1,
) -> SafeBudgets:
    """How small may the budget be? Per selection the smallest at which the limits hold with one-sided 95 % bounds.

    Budgets are tested from the largest down, up to the first that fails; of several limits all must hold. Each
    selection by itself: that one of many is wrong is likelier than 5 %.

    Args:
        trace: from `measure` or `read_trace`, all budgets entries or all shares. Only complete samples.
        max_kl: mean KL(full ‖ evicted) of the next token, in nats, over the measured steps of each sample; its bound
            assumes that KL is lognormal.
        max_drop: mean drop of the score of whole answers, in points of 100.
        min_top1: mean share of measured steps whose likeliest token is the full cache's.
        sides: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`), or several; by default all.
        for_length: entries of a prompt for which the caches' bytes are told.
        for_batch: number of such prompts.

    Returns the verdicts as one result, whose `exit_code` says them all.

    Raises ConfigError for no limit or one out of its range, and for budgets of both kinds; TraceError where the trace
    has no complete sample, no such side, or lacks what is limited.

    >>> import perturbkv as pk
    >>> found = pk.safe_budget(trace, max_kl=100.0)
    >>> [(one.name, str(one.safe.config.budget)) for one in found]
    [('attention', '40'), ('two-stage', '40')]
    """
    limits = criteria(max_kl, max_drop, min_top1)
    check_size(for_length, for_batch)
    named = checked(trace, "", "" if sides is None else sides)
    wanted = [None] if sides is None else named
    held = at_step(trace, ANALYSIS, 0)
    found = dict.fromkeys(tuple(places) for side in wanted for places in sweeps(held.run, side))
    curves = [axis(held, places, ANALYSIS) for places in found]
    each = {limit: limit.each(held) for limit in limits}
    names = pairing.curve_names([one.configs[0] for one in curves])
    members = tuple(
        SafeBudget(name, tuple(verdict(limit, each[limit], curve) for limit in limits))
        for name, curve in zip(names, curves, strict=True)
    )
    size = None if for_length is None else cache_size(held, for_length, for_batch)
    shown = [config for curve in curves for config in curve.configs]
    alike = 0 if max_drop is None else int(only_alike(held).sum())
    return SafeBudgets(members, size, held.run.dtype, identity(held, shown), alike)

"""How safe budgets are told: in a sentence, in a table per criterion, in the notes beneath."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf

from perturbkv.analyses import numbers
from perturbkv.analyses.cache_sizes import CacheSize
from perturbkv.analyses.criteria import Criterion
from perturbkv.analyses.fixed_sequence import FEW, NONE, SafeBudget, Tested, Verdict
from perturbkv.analyses.naming import counted, folded
from perturbkv.analyses.sentences import capital
from perturbkv.display import Table

_WHAT = {"kl": "mean KL", "drop": "mean drop of the score", "top1": "mean share of the same token"}
_UNITS = {"kl": " nat", "drop": " points", "top1": ""}
_GIB = 2**30
_HOW = (
    "Bound: one-sided, 95 %. Budgets are tested from the largest down, up to the first that fails, so that each "
    "selection's verdict errs in at most 5 % of cases; verdicts on several selections are not corrected for their "
    "number."
)
_BOUNDS = {
    "kl": "KL: the larger bound of Student's t and of a lognormal; no bound sees a prompt that carries the mean and is "
    "not among the samples.",
    "drop": "Drop: a bound for any distribution of scores; {few}.",
    "top1": "Same token: exact for single steps, for means over steps a bound for any distribution.",
}


def said(criterion: Criterion) -> str:
    """'mean KL ≤ 0.1 nat': the limit in words."""
    sign = "≥" if criterion.least else "≤"
    return f"{_WHAT[criterion.name]} {sign} {_value(criterion, criterion.limit)}{_UNITS[criterion.name]}"


def conclusion(curves: Sequence[SafeBudget], samples: int) -> str:
    """Who has a safe budget, who has none, of whom it cannot be told: a sentence each."""
    limits = " and ".join(said(one.criterion) for one in curves[0].verdicts)
    safe = [f"{one.name} {one.safe.config.budget}" for one in curves if one.safe is not None]
    first = f"Smallest budget with {limits} (95 % bounds, {counted(samples, 'sample')}): "
    told = [first + (", ".join(safe) if safe else "none of those measured") + "."]
    told += [capital(_missing(one), one.name) for one in curves if one.safe is None]
    return "\n".join(told)


def _missing(one: SafeBudget) -> str:
    """Why a selection has no safe budget: a limit that its mean exceeds, or too few samples."""
    worst = next(told for state in (NONE, FEW) for told in one.verdicts if told.state == state)
    largest = worst.budgets[0]
    where = f"at {largest.config.budget}, the largest measured, its {_WHAT[worst.criterion.name]} is"
    mean, bound = (_value(worst.criterion, value) for value in (largest.mean, largest.bound))
    if worst.state == NONE:
        return f"{one.name} has none: {where} {mean}{_UNITS[worst.criterion.name]}."
    return f"{one.name} cannot be told: {where} {mean} and may be {bound}; {_enough(worst)}."


def _enough(told: Verdict) -> str:
    if told.samples_for is None:
        return "more samples are needed, from these it cannot be told how many"
    return f"{told.samples_for:,} samples like these would do"


def tables(curves: Sequence[SafeBudget], size: CacheSize | None, dtype: str) -> list[Table | str]:
    """A table per criterion, and where they were asked for the bytes."""
    made = [_of_criterion(curves, place) for place in range(len(curves[0].verdicts))]
    return [*made, *([] if size is None else [_of_bytes(curves, size, dtype)])]


def _of_criterion(curves: Sequence[SafeBudget], place: int) -> Table:
    """Of every selection its smallest safe budget, and at which it fails."""
    criterion = curves[0].verdicts[place].criterion
    columns = ["selection", "#smallest\nbudget", "#held /\nfull", "#mean", "#bound", "fails at"]
    rows = [[folded(one.name), *_row(one.verdicts[place])] for one in curves]
    return Table(said(criterion), columns, rows)


def _row(told: Verdict) -> list[str]:
    shown = ["–"] * 4 if told.safe is None else [
        str(told.safe.config.budget), numbers.held(told.safe.held),
        *(_value(told.criterion, value) for value in (told.safe.mean, told.safe.bound)),
    ]  # fmt: skip
    return [*shown, _failure(told, told.failed)]


def _failure(told: Verdict, failed: Tested | None) -> str:
    """'0.2: mean 0.12', or '0.2: mean 0.08, bound 0.14; n = 75 would do'."""
    if failed is None:
        return "none measured"
    where = f"{failed.config.budget}: mean {_value(told.criterion, failed.mean)}"
    if not told.criterion.keeps(failed.mean):
        return where
    enough = "n unknown" if told.samples_for is None else f"n = {told.samples_for:,} would do"
    return f"{where}, bound {_value(told.criterion, failed.bound)};\n{enough}"


def _of_bytes(curves: Sequence[SafeBudget], size: CacheSize, dtype: str) -> Table:
    """What the caches take at the length and the batch asked for."""
    title = f"caches of {size.length:,} entries × {size.batch:,} in {dtype}: full {_gib(size.full)}"
    rows = []
    for one in curves:
        taken = None if one.safe is None else size.evicted(one.safe.config, one.safe.held)
        rows.append([folded(one.name), *(["–"] * 4 if one.safe is None or taken is None else [
            str(one.safe.config.budget), _gib(taken), _gib(size.full - taken), numbers.percent(1 - taken / size.full),
        ])])  # fmt: skip
    return Table(title, ["selection", "#smallest\nbudget", "#evicted", "#saved", "#of full"], rows)


def _gib(taken: float) -> str:
    return f"{taken / _GIB:.3g} GiB".replace("-", "−")


def _value(criterion: Criterion, value: float) -> str:
    if isinf(value):
        return "∞"
    if criterion.name == "drop":
        return f"{100 * value:.3g}".replace("-", "−")
    return f"{value:.3g}" if criterion.name == "kl" else f"{value:.4g}"


def notes(curves: Sequence[SafeBudget], samples: int) -> str:
    """A line each on the bounds, the order of the tests, and what caches hold."""
    few = f"{samples} samples without any loss leave room for {370 / samples:.2g} points"
    about = [_BOUNDS[one.criterion.name].format(few=few) for one in curves[0].verdicts]
    return "\n".join([f"n = {counted(samples, 'sample')}.", _HOW, *about, numbers.ABOUT_HELD])

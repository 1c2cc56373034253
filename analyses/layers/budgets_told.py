"""How curves over budgets are told: in a sentence, in a table, in the notes beneath it."""

from __future__ import annotations

from collections.abc import Sequence

from perturbkv.analyses import conclusions, text
from perturbkv.analyses.conclusions import Outcome
from perturbkv.analyses.layers.budget_curve import BudgetCurve
from perturbkv.analyses.naming import counted, folded
from perturbkv.display import Table

_COLUMNS = ["selection", "budget", "#kept", "#held /\nfull", "#drift,\nmedian", "#KL, nat,\nmedian", "#same\ntoken"]
_SAID_SINGLY = 2
"""More curves than these make a sentence that nobody reads."""


def conclusion(curves: Sequence[BudgetCurve], samples: int) -> str:
    """How often the next token is the full run's: of one or two curves at both ends, of many the least and the most."""
    counts = f"({counted(samples, 'sample')})"
    if len(curves) > _SAID_SINGLY:
        every = [_shown(one, place) for one in curves for place in range(len(one.budgets))]
        return f"The next token is the full run's in a share of samples that goes {conclusions.ends(every)} {counts}."
    told = "; ".join(f"{one.name} {_ends(one)}" for one in curves)
    return f"The next token is the full run's with {told} {counts}."


def _shown(one: BudgetCurve, place: int) -> Outcome:
    share, interval = float(one.medians["top1"][place]), text.at(one.intervals["top1"], place)
    return conclusions.by_share(f"with {one.name} at budget {one.budgets[place]}", share, interval, 0)


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

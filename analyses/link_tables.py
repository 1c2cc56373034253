"""The tables of a link: ranks and areas of each setting, what else could make them, measures compared, curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan

from perturbkv.analyses import numbers
from perturbkv.analyses.calibration import Bin
from perturbkv.analyses.estimates import Estimate
from perturbkv.analyses.first_step import CIRCULAR
from perturbkv.analyses.intervals import Interval
from perturbkv.analyses.link_budgets import EVICTED
from perturbkv.analyses.link_found import Linked
from perturbkv.analyses.link_prompts import MEASURES, NAMES, Contrast, Strength
from perturbkv.analyses.link_settings import Control, Setting
from perturbkv.analyses.naming import counted, folded
from perturbkv.analyses.ranked_together import LEAST_CONFIGS
from perturbkv.display import Table

HEADLINE = "propagated"
"""The measure that conclusions and curves on the screen are of, chosen beforehand."""
AGAINST = "lost"
"""What every other measure is held against: the attention that was given up knows no values."""
_STRENGTH = ("measure", "#ρ", "#τ-b", "#p", "#n", "#lost above\nkept", "#n")
_CONTROL = (
    "measure",
    "#ρ of dealt\nscores",
    "#ρ of other\nprompts' measure",
    "#own ρ less\nthat of others",
    "#lost above kept,\nbetween prompts",
)
_CONTRAST = ("budget", "measure", "#its ρ less\nthat of 1 − S", "#n", "#its area less\nthat of 1 − S", "#n")
_CIRCULAR = ("budget", "measure", "#ρ", "#n", "#lost above\nkept", "#n")
_CURVE = ("budget", "#perturbed", "#answers", "#prompts", "#lost", "#score lost,\nof 100")
_ACROSS = ("measure", "#ρ over the budgets\nof one method", "#n")


def tables(found: Linked) -> list[Table | str]:
    """All of them, the settings together first; where nothing is to be told, the reason instead."""
    said: list[Table | str] = [_answered(found)]
    said += [f"b={name}: fewer than {LEAST_CONFIGS} methods, no ranks" for name in found.too_few]
    telling = [one for one in found.settings if one.decides]
    if len(telling) > 1:
        said.append(_overall("all budgets, one at a time: each prompt's mean over them", found.overall[0].strengths))
    if telling:
        said += [_overall(f"{one.dataset}, all budgets", one.strengths) for one in found.overall[1:]]
    said += [part for one in found.settings for part in _of_setting(one)]
    return [
        *said,
        *([_contrasts(found, telling), _circular(telling), _curves(telling)] if telling else []),
        *_across(found),
    ]


def _answered(found: Linked) -> str:
    """'the full cache answers 12 of 16 prompts of needle (score > 0), …; lost: below 0.5 of its score'."""
    told = ", ".join(f"{part.answered} of {counted(part.samples, 'prompt')} of {part.dataset}" for part in found.parts)
    rule = found.rule
    return f"the full cache answers {told} (score > {rule.right:g}); lost: below {rule.lost:g} of its score"


def _of_setting(one: Setting) -> list[Table | str]:
    held = " to ".join(dict.fromkeys(map(numbers.held, one.held_ends)))
    lost, silence = f"{int(one.lost.sum())} of {one.lost.size} lost", one.silence()
    about = f"b={one.name}: {len(one.configs)} methods, held / full {held}; {lost}{f' ({silence})' if silence else ''}"
    if not one.decides:
        return [about]
    evidence = numbers.percent(one.evidence)
    return [
        Table(about, _STRENGTH, [_strength(one.strength(name), _p(one.control(name))) for name in MEASURES]),
        f"b={one.name}: θ̂ is of the {evidence} of (prompt, head) with σ > 0.5 in all methods",
        Table(f"b={one.name}: what else could make it", _CONTROL, [_control(one.control(name)) for name in MEASURES]),
    ]


def _overall(title: str, strengths: Iterable[Strength]) -> Table:
    rows = [_strength(one) for one in strengths if one.measure in MEASURES]
    return Table(title, [name for name in _STRENGTH if name != "#p"], rows)


def _strength(one: Strength, *p: str) -> list[str]:
    ranks = [estimate(one.rho), estimate(one.tau), *p, str(one.rho.prompts)]
    return [NAMES[one.measure], *ranks, estimate(one.auc), str(one.auc.prompts)]


def _p(control: Control) -> str:
    """'0.012', a star behind it where it stands beside all others."""
    p = control.rho.p
    return "–" if isnan(p) else ("<0.001" if p < 0.001 else f"{p:.3f}") + "*" * control.stands


def _control(one: Control) -> list[str]:
    dealt = "–" if isnan(one.rho.low) else f"{numbers.decimal(one.rho.low)} … {numbers.decimal(one.rho.high)}"
    return [NAMES[one.measure], dealt, *map(estimate, (one.by_name, one.beyond, one.between))]


def estimate(one: Estimate, apart: str = "\n") -> str:
    """The value with its interval on a line of its own."""
    return numbers.decimal(one.value, one.interval, apart=apart)


def _contrasts(found: Linked, settings: Sequence[Setting]) -> Table:
    """Each measure against 1 − S, per setting and in all."""
    named = [(f"b={one.name}", one.contrasts) for one in settings]
    every = [("all", found.overall[0].contrasts)] if len(named) > 1 else []
    rows = [row for name, contrasts in [*named, *every] for row in _under(name, map(_contrast, _against(contrasts)))]
    return Table(f"measures on the same prompts, each against {MEASURES[AGAINST]}", _CONTRAST, rows)


def _against(contrasts: Sequence[Contrast]) -> list[Contrast]:
    return [one for one in contrasts if one.second == AGAINST]


def _contrast(one: Contrast) -> list[str]:
    return [NAMES[one.first], estimate(one.rho), str(one.rho.prompts), estimate(one.auc), str(one.auc.prompts)]


def _circular(settings: Sequence[Setting]) -> Table:
    rows = [
        row
        for one in settings
        for row in _under(f"b={one.name}", (_circular_row(one.strength(name)) for name in CIRCULAR))
    ]
    return Table("circular: on the answer's first token these nearly are the score", _CIRCULAR, rows)


def _circular_row(one: Strength) -> list[str]:
    return [NAMES[one.measure], estimate(one.rho), str(one.rho.prompts), estimate(one.auc), str(one.auc.prompts)]


def _curves(settings: Sequence[Setting]) -> Table:
    rows = [row for one in settings for row in _under(f"b={one.name}", map(_bin, one.curves[HEADLINE]))]
    return Table(f"how often an answer is lost, by {NAMES[HEADLINE]} over the outputs' norm", _CURVE, rows)


def _bin(one: Bin) -> list[str]:
    ends, told = f"{one.low:.3g} to {one.high:.3g}", one.drop_interval
    points = told and Interval(100 * told.low, 100 * told.high, told.kind)
    lost = numbers.percent(one.lost, one.lost_interval)
    return [ends, str(one.answers), str(one.prompts), lost, numbers.decimal(100 * one.drop, points)]


def _across(found: Linked) -> list[Table]:
    if not any(one.rho.prompts for one in found.across):
        return []
    names = {EVICTED: "the budget itself", **NAMES}
    rows = [[names[one.measure], estimate(one.rho, " "), str(one.rho.prompts)] for one in found.across]
    return [Table("across budgets, for many reasons: no evidence of a link", _ACROSS, rows)]


def _under(name: str, rows: Iterable[list[str]]) -> list[list[str]]:
    """Rows with a name before the first of them."""
    return [[folded(name) if place == 0 else "", *row] for place, row in enumerate(rows)]

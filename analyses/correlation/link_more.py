"""The tables of a link that one asks for: data sets, every budget's measures, what else could make it, and curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan

from perturbkv.analyses import text
from perturbkv.analyses.correlation.by_name import Names
from perturbkv.analyses.correlation.calibration import Bin
from perturbkv.analyses.correlation.correlation_settings import Control, Setting
from perturbkv.analyses.correlation.correlation_tables import AGAINST, HEADLINE, estimate, measures
from perturbkv.analyses.correlation.link_budgets import EVICTED
from perturbkv.analyses.correlation.link_found import Linked
from perturbkv.analyses.correlation.link_prompts import MEASURES, NAMES, Contrast, Strength
from perturbkv.analyses.correlation.method_identity import Beyond
from perturbkv.analyses.first_step import CIRCULAR
from perturbkv.analyses.naming import folded
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.analyses.stats.shuffled import Chance
from perturbkv.display import Table

_STRENGTH = ("measure", "#ρ", "#τ-b", "#p", "#n", "#lost above\nkept", "#p", "#n")
_CONTROL = (
    "measure", "#ρ of dealt\nscores", "#ρ of other\nprompts' measure", "#lost above kept,\nof others' measure",
    "#lost above kept,\nbetween prompts",
)  # fmt: skip
_CONTRAST = ("budget", "measure", "#its ρ less\nthat of 1 − S", "#n", "#its area less\nthat of 1 − S", "#n")
_CIRCULAR = ("budget", "measure", "#ρ", "#n", "#lost above\nkept", "#n")
_CURVE = ("budget", "#perturbed", "#answers", "#prompts", "#lost", "#score lost,\nof 100")
_ACROSS = ("measure", "#ρ over the budgets\nof one method", "#n")


def more(found: Linked) -> list[Table | str]:
    """All that stand behind the first ones; none where no setting tells anything."""
    telling = [one for one in found.settings if one.decides]
    if not telling:
        return []
    return [
        *(measures(f"{one.dataset}, all budgets", one) for one in found.overall[1:]),
        *(part for one in telling for part in _of_setting(one)),
        _contrasts(found, telling),
        _circular(telling),
        _curves(telling),
        *_across(found),
    ]


def _of_setting(one: Setting) -> list[Table | str]:
    evidence = text.percent(one.evidence)
    return [
        Table(f"b={one.name}", _STRENGTH, [_strength(one.strength(name), one.named(name)) for name in MEASURES]),
        f"b={one.name}: θ̂ is of the {evidence} of (prompt, head) with σ > 0.5 in all methods",
        Table(
            f"b={one.name}: what else could make it",
            _CONTROL,
            [_control(one.control(name), one.named(name)) for name in MEASURES],
        ),
    ]


def _strength(one: Strength, names: Beyond) -> list[str]:
    ranks = [estimate(one.rho), estimate(one.tau), _p(names.rho), str(one.rho.prompts)]
    share = text.percent(one.auc.value, one.auc.interval, "\n")
    return [NAMES[one.measure], *ranks, share, _p(names.auc), str(one.auc.prompts)]


def _p(names: Names) -> str:
    """'0.012', a star behind it where it stands beside all others."""
    p = names.exchanged.p
    return "–" if isnan(p) else ("<0.001" if p < 0.001 else f"{p:.3f}") + "*" * names.stands


def _control(one: Control, names: Beyond) -> list[str]:
    others, between = (text.percent(share.value, share.interval, "\n") for share in (names.auc.others, one.between))
    return [NAMES[one.measure], _dealt(one.rho), estimate(names.rho.others), others, between]


def _dealt(one: Chance) -> str:
    return "–" if isnan(one.low) else f"{text.decimal(one.low)} … {text.decimal(one.high)}"


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
    return Table("circular: of the answer's second token these nearly are the score", _CIRCULAR, rows)


def _circular_row(one: Strength) -> list[str]:
    share = text.percent(one.auc.value, one.auc.interval, "\n")
    return [NAMES[one.measure], estimate(one.rho), str(one.rho.prompts), share, str(one.auc.prompts)]


def _curves(settings: Sequence[Setting]) -> Table:
    rows = [row for one in settings for row in _under(f"b={one.name}", map(_bin, one.curves[HEADLINE]))]
    return Table(f"how often an answer is lost, by {NAMES[HEADLINE]} over the outputs' norm", _CURVE, rows)


def _bin(one: Bin) -> list[str]:
    ends, told = f"{one.low:.3g} to {one.high:.3g}", one.drop_interval
    points = told and Interval(100 * told.low, 100 * told.high, told.kind)
    lost = text.percent(one.lost, one.lost_interval)
    return [ends, str(one.answers), str(one.prompts), lost, text.decimal(100 * one.drop, points, digits=0)]


def _across(found: Linked) -> list[Table]:
    if not any(one.rho.prompts for one in found.across):
        return []
    names = {EVICTED: "the budget itself", **NAMES}
    rows = [[names[one.measure], estimate(one.rho, " "), str(one.rho.prompts)] for one in found.across]
    return [Table("across budgets, for many reasons: no evidence of a link", _ACROSS, rows)]


def _under(name: str, rows: Iterable[list[str]]) -> list[list[str]]:
    """Rows with a name before the first of them."""
    return [[folded(name) if place == 0 else "", *row] for place, row in enumerate(rows)]

"""The tables of a link that one reads first: its measures, and its budgets; `link_more` has the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import factorial

from perturbkv.analyses import text
from perturbkv.analyses.correlation.by_name import Names
from perturbkv.analyses.correlation.correlation_settings import Setting
from perturbkv.analyses.correlation.link_found import Linked, Overall
from perturbkv.analyses.correlation.link_prompts import MEASURES, NAMES, Strength
from perturbkv.analyses.naming import counted, folded
from perturbkv.analyses.ranked_together import LEAST_CONFIGS
from perturbkv.analyses.stats.estimates import Estimate
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.display import Table

HEADLINE = "propagated"
"""The measure that conclusions and curves on the screen are of, chosen beforehand."""
AGAINST = "lost"
"""What every other measure is held against: the attention that was given up knows no values."""
_FEW_METHODS = 5
_EQUAL = 1e-9
"""Means that differ by less were added in another order."""
_LINK = ("#ρ", "#ρ, less\nnames", "#n", "#lost above\nkept", "#points,\nless names", "#n")


def tables(found: Linked) -> list[Table | str]:
    """What is answered, the measures together, and the first of them at each budget; or why nothing is to be told."""
    telling = [one for one in found.settings if one.decides]
    said: list[Table | str] = [_answered(found)]
    said += [f"b={name}: fewer than {LEAST_CONFIGS} methods, no ranks" for name in found.too_few]
    if telling:
        said += [measures(_together(found), found.overall[0]), *_beside(found.overall[0]), *_few_methods(telling)]
    said += [_budgets(telling)] if len(telling) > 1 else [_about(one) for one in telling or found.settings]
    return [*said, *_silent(found.settings)]


def _answered(found: Linked) -> str:
    """'the full cache answers 12 of 16 prompts of needle (score > 0, median 1), …; lost: below 0.5 of its score'."""
    told = ", ".join(
        f"{part.answered} of {counted(part.samples, 'prompt')} of {part.dataset}"
        + (f" (score > {found.rule.right:g}; median {part.median_full:.2g})" if part.answered else "")
        for part in found.parts
    )
    return f"the full cache answers {told}; lost: below {found.rule.lost:g} of its score"


def _together(found: Linked) -> str:
    """The title of the measures' table."""
    if len(found.settings) == 1:
        return f"b={found.settings[0].name}"
    return "all budgets, one at a time: each prompt's mean over them"


def measures(title: str, every: Overall) -> Table:
    """A row per measure that is not circular: ranks, areas, and what of them is more than the methods' names."""
    names = [one.measure for one in every.strengths if one.measure in MEASURES]
    rows = [
        [NAMES[name], *_linked(every.strength(name), every.named(name).rho, every.named(name).auc)] for name in names
    ]
    return Table(title, ("measure", *_LINK), rows)


def _linked(one: Strength, rho: Names, auc: Names) -> list[str]:
    return [
        estimate(one.rho), _starred(estimate(rho.beyond), rho), str(one.rho.prompts),
        text.percent(one.auc.value, one.auc.interval, "\n"), _starred(points(auc.beyond, "\n"), auc),
        str(one.auc.prompts),
    ]  # fmt: skip


def _starred(told: str, names: Names) -> str:
    """With a star behind the value where it stands."""
    value, apart, interval = told.partition("\n")
    return f"{value}{'*' * names.stands}{apart}{interval}"


def _beside(every: Overall) -> list[str]:
    """Which measure has the lowest ρ, with all that tie with it, and how the first stands against 1 − S."""
    known = [one for one in every.strengths if one.measure in MEASURES and one.rho.prompts]
    if not known:
        return []
    least = min(one.rho.value for one in known)
    lowest = [one for one in known if one.rho.value - least < _EQUAL]
    named = " and ".join(
        filter(None, (", ".join(NAMES[one.measure] for one in lowest[:-1]), NAMES[lowest[-1].measure]))
    )
    contrast = every.contrast(HEADLINE, AGAINST).rho
    told = f"lowest ρ, by looking: {named}{' alike' * (len(lowest) > 1)}, {estimate(lowest[0].rho, ' ')}"
    against = f"ρ of {NAMES[HEADLINE]} less that of {NAMES[AGAINST]}: {estimate(contrast, ' ')}"
    return [told, *([against] if contrast.prompts else [])]


def _few_methods(settings: Sequence[Setting]) -> list[str]:
    """That few methods have few orders, in which measures easily agree."""
    fewest = min(len(one.configs) for one in settings)
    if fewest >= _FEW_METHODS:
        return []
    return [f"{fewest} methods have {factorial(fewest)} orders only: measures that agree in them cannot be told apart"]


def _budgets(settings: Sequence[Setting]) -> Table:
    rows = [
        [f"{folded(f'b={one.name}')}\nheld {' to '.join(_held(one))}\nlost {int(one.lost.sum())} of {one.lost.size}",
         *_linked(one.strength(HEADLINE), one.named(HEADLINE).rho, one.named(HEADLINE).auc)]
        for one in settings
    ]  # fmt: skip
    return Table(f"{NAMES[HEADLINE]}, by budget", ("budget", *_LINK), rows)


def _about(one: Setting) -> str:
    """'b=0.4: 3 methods, held / full 1.20; 37 of 48 lost'."""
    held, lost = " to ".join(_held(one)), f"{int(one.lost.sum())} of {one.lost.size} lost"
    return f"b={one.name}: {len(one.configs)} methods, held / full {held}; {lost}"


def _held(one: Setting) -> Iterable[str]:
    return dict.fromkeys(map(text.held, one.held_ends))


def _silent(settings: Sequence[Setting]) -> list[str]:
    """Why some settings tell less than others, each reason with its settings."""
    reasons: dict[str, list[str]] = {}
    for one in settings:
        if silence := one.silence():
            reasons.setdefault(silence, []).append(f"b={one.name}")
    return [f"{', '.join(names)}: {silence}" for silence, names in reasons.items()]


def estimate(one: Estimate, apart: str = "\n") -> str:
    """The value with its interval, on a line of its own."""
    return text.decimal(one.value, one.interval, apart=apart)


def points(one: Estimate, apart: str = " ") -> str:
    """The same of a difference of shares, in points of 100."""
    ends = one.interval and Interval(100 * one.interval.low, 100 * one.interval.high, one.interval.kind)
    return text.decimal(100 * one.value, ends, digits=0, apart=apart)

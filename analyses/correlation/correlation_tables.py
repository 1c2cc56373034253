"""The tables of a link that one reads first: its measures, and its budgets; the others follow.

What is found of a link: its settings, each of them and all together, as one object that others tell and draw.

The tables of a link that one asks for: data sets, every budget's measures, what else could make it, and curves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import factorial, isnan

from perturbkv.analyses import text
from perturbkv.analyses.correlation.correlation_settings import EVICTED, AcrossBudgets, Control, Part, Setting
from perturbkv.analyses.correlation.lost_answers import Bin, Rule
from perturbkv.analyses.correlation.method_identity import MEASURES, NAMES, Beyond, Contrast, Names, Strength
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.measurements import CIRCULAR_MEASURES
from perturbkv.analyses.pairing import LEAST_CONFIGS, counted, folded
from perturbkv.analyses.stats.intervals import Estimate, Interval
from perturbkv.analyses.stats.permutation import Chance
from perturbkv.display import Table


@dataclass(frozen=True)
class Overall:
    """Each prompt's mean over settings, in every one of which its configurations were compared.

    Attributes:
        dataset: whose prompts; empty for those of all data sets.
        strengths: one per measure.
        contrasts: every two measures on the same prompts.
        names: what of the link the methods' names make, one per measure.
    """

    dataset: str
    strengths: tuple[Strength, ...]
    contrasts: tuple[Contrast, ...]
    names: tuple[Beyond, ...]

    def strength(self, measure: str) -> Strength:
        """Of one measure."""
        return next(one for one in self.strengths if one.measure == measure)

    def named(self, measure: str) -> Beyond:
        """What the methods' names make of one measure's link."""
        return next(one for one in self.names if one.measure == measure)

    def contrast(self, first: str, second: str) -> Contrast:
        """Of two measures."""
        return next(one for one in self.contrasts if (one.first, one.second) == (first, second))


@dataclass(frozen=True, repr=False)
class Linked:
    """The link between the first step's perturbation and the score of the answer.

    Attributes:
        identity: which run this is; of several traces all of their data sets.
        parts: the traces: data set, samples, how many of them the full cache answers.
        rule: when the full cache is right, and when an answer is lost.
        settings: one per budget, granularity and protection of three configurations or more; `too_few`: the others'
            names.
        overall: all settings together, one at a time: of all prompts first, then, where there are several, of each
            data set.
        across: over the budgets of one method, for many reasons; empty where no method has three.
        everything: whether all tables are shown, or those that one reads first.
        prompts: (prompt,) the trace's place in `parts` and the sample's name, of the arrays in `settings`.
    """

    identity: RunIdentity
    parts: tuple[Part, ...]
    rule: Rule
    settings: tuple[Setting, ...]
    too_few: tuple[str, ...]
    overall: tuple[Overall, ...]
    across: tuple[AcrossBudgets, ...]
    everything: bool
    prompts: tuple[tuple[int, str], ...]


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


_STRENGTH = ("measure", "#ρ", "#τ-b", "#p", "#n", "#lost above\nkept", "#p", "#n")
_CONTROL = (
    "measure", "#ρ of dealt\nscores", "#ρ of other\nprompts' measure", "#lost above kept,\nof others' measure",
    "#lost above kept,\nbetween prompts",
)  # fmt: skip
_CONTRAST = ("budget", "measure", "#its ρ less\nthat of 1 − S", "#n", "#its area less\nthat of 1 − S", "#n")
_CIRCULAR = ("budget", "measure", "#ρ", "#n", "#lost above\nkept", "#n")
_CURVE = ("budget", "#perturbed", "#answers", "#prompts", "#lost", "#score lost,\nof 100")
_ACROSS = ("measure", "#ρ over the budgets\nof one method", "#n")


def further_tables(found: Linked) -> list[Table | str]:
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
        for row in _under(f"b={one.name}", (_circular_row(one.strength(name)) for name in CIRCULAR_MEASURES))
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

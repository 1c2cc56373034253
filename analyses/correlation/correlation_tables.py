"""Tables of score correlations: all budgets together, each budget, controls, contrasts and calibration curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import factorial, isnan

from perturbkv.analyses import columns, text
from perturbkv.analyses.columns import Line, Record, column, record
from perturbkv.analyses.correlation.correlation_settings import EVICTED, AcrossBudgets, MeasureLookup, Setting
from perturbkv.analyses.correlation.method_identity import (
    Contrast,
    IdentityBaseline,
    IdentityBaselines,
    Strength,
)
from perturbkv.analyses.measures import REFERENCE, Measures
from perturbkv.analyses.names import fold
from perturbkv.analyses.stats.intervals import Estimate, Interval
from perturbkv.display import Part, Table

SHOWN = ("rho", "rho_beyond", "rho_prompts", "auc", "auc_beyond", "auc_prompts")
_FEW_METHODS = 5
"""Number of methods below which a caveat tells that they have few orders."""
_EQUAL = 1e-9
"""Means that differ by less were added in another order."""


def format_estimate(one: Estimate, separator: str = "\n") -> str:
    """Return an estimate with its interval behind the separator, by default on a second line."""
    return text.decimal(one.value, one.interval, separator=separator)


def format_points(one: Estimate, separator: str = " ") -> str:
    """Return a difference of shares with its interval, in points of 100."""
    ends = one.interval and Interval(100 * one.interval.low, 100 * one.interval.high, one.interval.kind)
    return text.decimal(100 * one.value, ends, digits=0, separator=separator)


def format_share(one: Estimate) -> str:
    """Return a share in percent with its interval on a second line."""
    return text.percent(one.value, one.interval, "\n")


@record
class Overall(MeasureLookup, Record, section="overall correlation"):
    """The correlations of all settings together: each prompt counts with its mean over them.

    Attributes:
        measures: those of the text that was measured.
    """

    measures: Measures
    dataset: str = column("whose prompts; empty: all")
    strengths: tuple[Strength, ...] = column("one per measure")
    contrasts: tuple[Contrast, ...] = column("every two measures that are not circular, on the same prompts")
    baselines: tuple[IdentityBaselines, ...] = column("method identity baseline, one per measure", key="names")

    def contrast(self, first: str, second: str) -> Contrast:
        """Return the difference between two measures."""
        return next(one for one in self.contrasts if (one.first, one.second) == (first, second))


@record
class MeasureRow(Record):
    """One line of the table of measures."""

    rho: Estimate = column(
        "Spearman's ρ of measure and score over the methods of one prompt, mean over prompts; below 0 the more "
        "perturbed score less",
        heading="#ρ", text=format_estimate,
    )  # fmt: skip
    rho_beyond: str = column(
        "less the ρ of other prompts' measures, which share the methods' names; *: significant",
        heading="#ρ, less\nnames",
    )
    rho_prompts: int = column("prompts whose methods differ in both", heading="#n")
    auc: Estimate = column(
        "share of pairs of a lost and a kept answer of one prompt whose lost one is more perturbed, ties half; 50 % by "
        "chance",
        heading="#lost above\nkept", text=format_share,
    )  # fmt: skip
    auc_beyond: str = column(
        "points of 100 less those of other prompts' measures; *: significant", heading="#points,\nless names"
    )
    auc_prompts: int = column("prompts with lost and kept answers", heading="#n")


def measure_row(measure: str, results: Overall | Setting) -> MeasureRow:
    """Return a measure's record for the table of measures."""
    strength, baselines = results.strength(measure), results.identity_baselines(measure)
    return MeasureRow(
        rho=strength.rho,
        rho_beyond=_with_star(format_estimate(baselines.rho.beyond), baselines.rho),
        rho_prompts=strength.rho.prompts,
        auc=strength.auc,
        auc_beyond=_with_star(format_points(baselines.auc.beyond, "\n"), baselines.auc),
        auc_prompts=strength.auc.prompts,
    )


def measure_lines(results: Overall | Setting) -> list[Line]:
    """Return a table line per measure that is not circular."""
    return [Line(name, (measure_row(measure, results),)) for measure, name in results.measures.predictors.items()]


def budget_table(settings: Sequence[Setting]) -> Table:
    """Return the table of the headline measure by budget."""
    measures = settings[0].measures
    lines = [Line(f"b={one.name}", (measure_row(measures.headline, one),)) for one in settings]
    return columns.table(f"{measures.names[measures.headline]}, by budget", lines, SHOWN, "budget")


def describe_setting(one: Setting) -> str:
    """Return a setting's summary: 'b=0.4: 3 methods, cache share 1.20; 37 of 48 lost'."""
    shares = " to ".join(dict.fromkeys(map(text.cache_share, one.cache_share_ends)))
    return f"b={one.name}: {len(one.configs)} methods, cache share {shares}; {one.lost_count} of {one.answers} lost"


def lowest_rho_notes(overall: Overall) -> list[str]:
    """Return a note on the measures with the lowest ρ, and one on the headline's ρ less that of 1 − S.

    Both are left out where no measure has a ρ, the second also where no prompt has both.
    """
    measures, headline = overall.measures.predictors, overall.measures.headline
    known = [one for one in overall.strengths if one.measure in measures and one.rho.prompts]
    if not known:
        return []
    least = min(one.rho.value for one in known)
    tied = [one for one in known if one.rho.value - least < _EQUAL]
    names = text.join_names([measures[one.measure] for one in tied])
    contrast = overall.contrast(headline, REFERENCE).rho
    first = f"lowest ρ, by looking: {names}{' alike' * (len(tied) > 1)}, {format_estimate(tied[0].rho, ' ')}"
    against = f"ρ of {measures[headline]} less that of {measures[REFERENCE]}: {format_estimate(contrast, ' ')}"
    return [first, *([against] if contrast.prompts else [])]


def few_methods_note(settings: Sequence[Setting]) -> list[str]:
    """Return the caveat that few methods have few possible orders, so that measures easily agree; else nothing."""
    fewest = min((len(one.configs) for one in settings), default=_FEW_METHODS)
    if fewest >= _FEW_METHODS:
        return []
    return [f"{fewest} methods have only {factorial(fewest)} orders, in which measures easily agree."]


def undecided_notes(settings: Sequence[Setting]) -> list[str]:
    """Return a sentence per reason for settings without statistics, naming the settings."""
    reasons: dict[str, list[str]] = {}
    for one in settings:
        if one.undecided_reason:
            reasons.setdefault(one.undecided_reason, []).append(f"b={one.name}")
    return [f"{', '.join(names)}: {reason}." for reason, names in reasons.items()]


def _with_star(value: str, baseline: IdentityBaseline) -> str:
    """Return a number's text, its interval on a second line, with a star after the number if it is significant."""
    first, newline, ends = value.partition("\n")
    return f"{first}{'*' * baseline.significant}{newline}{ends}"


def further_tables(
    settings: Sequence[Setting], overall: Sequence[Overall], across: Sequence[AcrossBudgets]
) -> list[Part]:
    """Return the tables of data sets, budgets, controls, contrasts and curves; nothing where no setting decides."""
    deciding = [one for one in settings if one.decides]
    if not deciding:
        return []
    return [
        *([budget_table(deciding)] if len(deciding) > 1 else []),
        *(columns.table(f"{one.dataset}, all budgets", measure_lines(one), SHOWN, "measure") for one in overall[1:]),
        *(part for one in deciding for part in _setting_tables(one)),
        _contrast_table(overall[0], deciding),
        _circular_table(deciding),
        _curve_table(deciding),
        *_across_tables(across, overall[0].measures),
    ]


def _setting_tables(one: Setting) -> list[Part]:
    """Return a setting's table of measures, a note on θ̂, and its table of controls."""
    strengths, controls = [], []
    for name, shown in one.measures.predictors.items():
        own, baselines, control = one.strength(name), one.identity_baselines(name), one.control(name)
        ranks = [format_estimate(own.rho), format_estimate(own.tau), _format_p(baselines.rho), str(own.rho.prompts)]
        strengths.append([shown, *ranks, format_share(own.auc), _format_p(baselines.auc), str(own.auc.prompts)])
        null = control.rho
        permuted = "–" if isnan(null.low) else f"{text.decimal(null.low)} … {text.decimal(null.high)}"
        areas = map(format_share, (baselines.auc.others, control.between))
        controls.append([shown, permuted, format_estimate(baselines.rho.others), *areas])
    evidence = f"θ̂ is of the {text.percent(one.evidence)} of (prompt, head) with σ > 0.5 in all methods"
    return [
        Table(f"b={one.name}", ("measure", "#ρ", "#τ-b", "#p", "#n", "#lost above\nkept", "#p", "#n"), strengths),
        f"b={one.name}: {evidence}",
        Table(
            f"b={one.name}: controls",
            (
                "measure",
                "#ρ of permuted\nscores",
                "#ρ of other\nprompts' measure",
                "#lost above kept,\nof others' measure",
                "#lost above kept,\nbetween prompts",
            ),
            controls,
        ),
    ]


def _format_p(baseline: IdentityBaseline) -> str:
    """Return the p-value of a baseline's permutation null: '0.012*', with a star if significant; a dash for NaN."""
    p = baseline.exchanged.p
    return "–" if isnan(p) else ("<0.001" if p < 0.001 else f"{p:.3f}") + "*" * baseline.significant


def _contrast_table(overall: Overall, settings: Sequence[Setting]) -> Table:
    """Return the table of each measure against 1 − S, per setting and over all."""
    names, named = overall.measures.names, [(f"b={one.name}", one.contrasts) for one in settings]
    every = [("all", overall.contrasts)] if len(named) > 1 else []
    rows = []
    for name, contrasts in [*named, *every]:
        cells = [
            [names[one.first], format_estimate(one.rho), str(one.rho.prompts), format_estimate(one.auc),
             str(one.auc.prompts)]
            for one in contrasts if one.second == REFERENCE
        ]  # fmt: skip
        rows += _with_first_name(name, cells)
    return Table(
        f"measures on the same prompts, each against {names[REFERENCE]}",
        ("budget", "measure", "#its ρ less\nthat of 1 − S", "#n", "#its area less\nthat of 1 − S", "#n"),
        rows,
    )


def _circular_table(settings: Sequence[Setting]) -> Table:
    """Return the table of the circular measures, per setting."""
    measures, rows = settings[0].measures, []
    for setting in settings:
        strengths = [(shown, setting.strength(name)) for name, shown in measures.circular.items()]
        cells = [
            [shown, format_estimate(one.rho), str(one.rho.prompts), format_share(one.auc), str(one.auc.prompts)]
            for shown, one in strengths
        ]
        rows += _with_first_name(f"b={setting.name}", cells)
    return Table(
        f"circular: of {measures.circular_tokens} these nearly are the score",
        ("budget", "measure", "#ρ", "#n", "#lost above\nkept", "#n"),
        rows,
    )


def _curve_table(settings: Sequence[Setting]) -> Table:
    """Return the table of calibration curves of the headline measure, per setting."""
    measures, rows = settings[0].measures, []
    for setting in settings:
        cells = [
            [f"{one.low:.3g} to {one.high:.3g}", str(one.answers), str(one.prompts),
             text.percent(one.lost, one.lost_interval),
             format_points(Estimate(one.drop, one.drop_interval, one.prompts))]
            for one in setting.curves[measures.headline]
        ]  # fmt: skip
        rows += _with_first_name(f"b={setting.name}", cells)
    by = measures.names[measures.headline]
    return Table(
        f"how often an answer is lost, by {by} over the outputs' norm",
        ("budget", "#perturbed", "#answers", "#prompts", "#lost", "#score lost,\nof 100"),
        rows,
    )


def _across_tables(across: Sequence[AcrossBudgets], measures: Measures) -> list[Table]:
    """Return the table of correlations over budgets, as a list; empty if no prompt has a correlation."""
    if not any(one.rho.prompts for one in across):
        return []
    names = {EVICTED: "the budget itself", **measures.names}
    rows = [[names[one.measure], format_estimate(one.rho, " "), str(one.rho.prompts)] for one in across]
    return [
        Table(
            "across budgets, for many reasons: no evidence",
            ("measure", "#ρ over the budgets\nof one method", "#n"),
            rows,
        )
    ]


def _with_first_name(name: str, rows: Iterable[list[str]]) -> list[list[str]]:
    """Return the rows with a first column added: the name in the first row, empty below."""
    return [[fold(name) if index == 0 else "", *row] for index, row in enumerate(rows)]

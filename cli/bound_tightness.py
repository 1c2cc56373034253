"""`perturbkv bound-tightness`: how tight are θ, θ̂ and θ̂_relax, and do they order selections as L does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.analyses import numbers
from perturbkv.cli import console
from perturbkv.cli.choices import parse_compare
from perturbkv.cli.options import FRACTIONS, LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import Study, open_study
from perturbkv.configs.eviction import EvictionConfig

if TYPE_CHECKING:
    from perturbkv.analyses.bound_tightness import BoundTightness, Tightness
    from perturbkv.analyses.rank_agreement import Concordance, RankAgreement, RankCorrelation

_SELECTIONS = "attention,attention-unpooled,two-stage-uniform,two-stage,value,random,hindsight"

_TOLD = {"attention": "attention", "two-stage-uniform": "ν ≡ 1"}
"""Selections that the table compares with two-stage, and how it calls them."""


@with_options
def bound_tightness(
    run: RunOptions,
    look: LookOptions,
    selection: Annotated[str, Option(help="Whose bounds the table and the figures show.")] = "two-stage",
    compare: Annotated[
        str, Option(help="Selections to measure and to rank, separated by commas; a finished trace has its own.")
    ] = _SELECTIONS,
) -> None:
    """Measure the bounds: L/θ, L/θ̂, θ/θ̂, θ̂/θ̂_relax, violations, and whether lower bounds mean lower L."""
    wanted, names = run.with_budgets(FRACTIONS), parse_compare(compare)
    sides = names if selection in names else [*names, selection]
    study = open_study("bound-tightness", wanted, look, lambda: wanted.configs(sides), leave_out_unfit=not run.budget)
    if study is None:
        return
    from perturbkv.analyses import bound_tightness, rank_agreement

    whole = bound_tightness.summarise(study.trace, look.step)
    shown, agreements = whole.of(selection), rank_agreement.summarise(study.trace, look.step)
    _draw(study, shown, agreements)
    document = {**whole.to_dict(), "rank_agreement": [agreement.to_dict() for agreement in agreements]}
    study.finish(document, lambda: _print(selection, shown, agreements))


def _draw(study: Study, shown: BoundTightness, agreements: tuple[RankAgreement, ...]) -> None:
    from perturbkv.figures.bound_tightness import draw, draw_heads

    study.save(draw(shown, agreements, study.width_mm), shown.identity, "bound-tightness")
    study.save(draw_heads(shown, study.width_mm), shown.identity, "bound-tightness-heads")


def _print(selection: str, shown: BoundTightness, agreements: tuple[RankAgreement, ...]) -> None:
    checked = ", ".join(f"{name} ({count:,})" for name, count in shown.checked.items())
    console.say(f"violations: 0, over all configurations; checked {checked}")
    _print_ratios(selection, shown)
    _print_agreements(agreements)
    from perturbkv.analyses.intervals import LEAST
    from perturbkv.analyses.rank_agreement import CONTENDERS

    words = numbers.about_intervals(shown.identity.samples)
    console.say(
        "σ ≤ 0.5 is shown and is no evidence for Theorems 3 and 4. ρ: Spearman's rank correlation with L across "
        f"{', '.join(CONTENDERS)} of one head. vs: how often, of two-stage and this one, the lower bound has the lower "
        f"L, where σ > 0.5 in both; n: heads of all samples, in how many samples; a dash where these are fewer than "
        f"{LEAST}. 1 − S, the attention given up, knows no values. {words} Under a budget stands "
        f"its held / full: entries that the evicted cache holds over those of the full cache."
    )


def _print_ratios(selection: str, shown: BoundTightness) -> None:
    """A table per setting, a pair of rows per budget."""
    from perturbkv.analyses.bound_tightness import RATIOS

    found = [(one.config, partial(_rows, config=one)) for one in shown.configs]
    for others, rows in _by_setting(found).items():
        title = f"{selection} {others}".rstrip()
        console.say(f"\n{title}: median over samples and heads, 5 to 95 % beneath", bold=True)
        console.table("", ["budget", "σ", "#share", *(f"#{name}" for name in RATIOS)], rows)


def _by_setting(
    found: Sequence[tuple[EvictionConfig, Callable[[str], list[list[str]]]]], *without: str
) -> dict[str, list[list[str]]]:
    """Rows made of each budget, those together whose configurations differ in budget, and in `without`, alone."""
    from perturbkv.analyses.naming import budgets

    tables: dict[str, list[list[str]]] = {}
    names = budgets([config for config, _ in found], *without)
    for (budget, *others), (_, rows) in zip(names, found, strict=True):
        tables.setdefault(" ".join(others), []).extend(rows(budget))
    return tables


def _rows(budget: str, config: Tightness) -> list[list[str]]:
    """Two rows: where σ is evidence, and where it is not."""
    evidence = [_spread(spread.evidence) for spread in config.spreads.values()]
    flagged = [_spread(spread.flagged) for spread in config.spreads.values()]
    share, ends = config.flagged_share, config.flagged_share_interval
    others = None if ends is None else replace(ends, low=1 - ends.high, high=1 - ends.low)
    return [
        [budget, "> 0.5", numbers.percent(1 - share, others, "\n"), *evidence],
        [f"held {numbers.held(config.held)}", "≤ 0.5", numbers.percent(share, ends, "\n"), *flagged],
    ]


def _spread(quantiles: object) -> str:
    low, _, median, _, high = (float(value) for value in quantiles)  # type: ignore[attr-defined]
    return "–" if median != median else f"{median:.2f}\n{low:.2f}–{high:.2f}"


def _print_agreements(agreements: tuple[RankAgreement, ...]) -> None:
    from perturbkv.analyses.rank_agreement import BOUNDS

    if not any(agreement.correlations for agreement in agreements):
        console.say("rank correlation: needs three or more selections of one budget, this trace has fewer")
    found = [(agreement.configs[0], partial(_agreement_rows, agreement=agreement)) for agreement in agreements]
    for others, rows in _by_setting(found, "selection").items():
        if rows:
            title = f"does a lower bound mean a lower L? {others}".rstrip()
            console.table(title, ["budget", "", *(f"#{name}" for name in BOUNDS)], rows)


def _agreement_rows(budget: str, agreement: RankAgreement) -> list[list[str]]:
    """ρ over the contenders, everywhere and where σ > 0.5; there also how often a bound picks the better of two."""
    from perturbkv.analyses.rank_agreement import CONTENDERS

    cells: dict[str, list[str]] = {}
    for ranked in agreement.correlations:
        if set(ranked.selections) <= set(CONTENDERS):
            everywhere = "–" if ranked.bound == "θ̂" else numbers.decimal(ranked.mean, ranked.interval, apart="\n")
            cells.setdefault("ρ", []).append(everywhere)
            evidence = numbers.decimal(ranked.evidence_mean, ranked.evidence_interval, apart="\n")
            cells.setdefault("ρ where σ > 0.5", []).append(_evidence(ranked, evidence))
    for pair in agreement.pairs:
        if pair.second == "two-stage" and pair.first in _TOLD:
            evidence = numbers.percent(pair.evidence_share, pair.evidence_interval)
            cells.setdefault(f"vs {_TOLD[pair.first]}", []).append(_evidence(pair, evidence))
    return [[budget if place == 0 else "", name, *found] for place, (name, found) in enumerate(cells.items())]


def _evidence(found: RankCorrelation | Concordance, shown: str) -> str:
    """The number with the heads and samples that it is of; of fewer than five samples these alone."""
    from perturbkv.analyses.intervals import LEAST

    counts = f"n = {found.evidence_values:,} in {found.evidence_samples}"
    return f"{shown if found.evidence_samples >= LEAST else '–'}\n{counts}"

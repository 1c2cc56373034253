"""The tables of the bounds: each ratio's spread per budget, and whether a lower bound means a lower perturbation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from perturbkv.analyses import text
from perturbkv.analyses.bounds.rank_agreement import BOUNDS, CONTENDERS, Concordance, RankAgreement, RankCorrelation
from perturbkv.analyses.bounds.ratios import RATIOS, Tightness
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.naming import budgets
from perturbkv.analyses.sentences import turned
from perturbkv.analyses.stats.intervals import LEAST
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table

_TOLD = {"attention": "attention", "two-stage-uniform": "ν ≡ 1"}
"""Selections that the table compares with two-stage, and how it calls them."""


def ratio_tables(selection: str, shown: Sequence[Tightness]) -> list[Table | str]:
    """A table per setting, a pair of rows per budget."""
    found = [(one.config, partial(ratio_rows, config=one)) for one in shown]
    columns = ["budget", "σ", "#share", *(f"#{name}" for name in RATIOS)]
    return [
        Table(f"{f'{selection} {others}'.rstrip()}: median over samples and heads, 5 to 95 % beneath", columns, rows)
        for others, rows in _by_setting(found).items()
    ]


def agreement_tables(agreements: Sequence[RankAgreement]) -> list[Table | str]:
    """A table per setting of which selections can be ranked, or why there is none."""
    found = [(one.telling, partial(agreement_rows, agreement=one)) for one in agreements]
    columns = ["budget", "", *(f"#{name}" for name in BOUNDS)]
    tables: list[Table | str] = [
        Table(f"does a lower bound mean a lower L? {others}".rstrip(), columns, rows)
        for others, rows in _by_setting(found, "selection").items()
        if rows
    ]
    if any(agreement.correlations for agreement in agreements):
        return tables
    return ["rank correlation: needs three or more selections of one budget, this trace has fewer", *tables]


def ratio_rows(budget: str, config: Tightness) -> list[list[str]]:
    """Two rows: where σ is evidence, and where it is not."""
    evidence = [_spread(spread.evidence) for spread in config.spreads.values()]
    flagged = [_spread(spread.flagged) for spread in config.spreads.values()]
    share, ends = config.flagged_share, config.flagged_share_interval
    return [
        [budget, "> 0.5", text.percent(1 - share, turned(ends), "\n"), *evidence],
        [f"held {text.held(config.held)}", "≤ 0.5", text.percent(share, ends, "\n"), *flagged],
    ]


def agreement_rows(budget: str, agreement: RankAgreement) -> list[list[str]]:
    """ρ over the contenders, everywhere and where σ > 0.5; there also how often a bound picks the better of two."""
    cells: dict[str, list[str]] = {}
    for ranked in agreement.correlations:
        if set(ranked.selections) <= set(CONTENDERS):
            everywhere = "–" if ranked.bound == "θ̂" else text.decimal(ranked.mean, ranked.interval, apart="\n")
            cells.setdefault("ρ", []).append(everywhere)
            evidence = text.decimal(ranked.evidence_mean, ranked.evidence_interval, apart="\n")
            cells.setdefault("ρ where σ > 0.5", []).append(_evidence(ranked, evidence))
    for pair in agreement.pairs:
        if pair.second == "two-stage" and pair.first in _TOLD:
            evidence = text.percent(pair.evidence_share, pair.evidence_interval)
            cells.setdefault(f"vs {_TOLD[pair.first]}", []).append(_evidence(pair, evidence))
    return [[budget if place == 0 else "", name, *found] for place, (name, found) in enumerate(cells.items())]


def _by_setting(
    found: Sequence[tuple[EvictionConfig, Callable[[str], list[list[str]]]]], *without: str
) -> dict[str, list[list[str]]]:
    """Rows made of each budget, those together whose configurations differ in budget, and in `without`, alone."""
    tables: dict[str, list[list[str]]] = {}
    names = budgets([config for config, _ in found], *without)
    for (budget, *others), (_, rows) in zip(names, found, strict=True):
        tables.setdefault(" ".join(others), []).extend(rows(budget))
    return tables


def _spread(quantiles: Floats) -> str:
    low, _, median, _, high = (float(value) for value in quantiles)
    return "–" if median != median else f"{median:.2f}\n{low:.2f}–{high:.2f}"


def _evidence(found: RankCorrelation | Concordance, shown: str) -> str:
    """The number with the heads and samples that it is of; of fewer than five samples these alone."""
    counts = f"n = {found.evidence_values:,} in {found.evidence_samples}"
    return f"{shown if found.evidence_samples >= LEAST else '–'}\n{counts}"

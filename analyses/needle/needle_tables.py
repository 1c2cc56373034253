"""The tables of a needle run: what each method finds, and whether perturbation tells."""

from __future__ import annotations

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.first_step import MEASURES
from perturbkv.analyses.naming import folded
from perturbkv.analyses.needle.needle_grid import OUTCOMES, Method
from perturbkv.analyses.needle.retrieval import CIRCULAR, BudgetLink, Correlation, Retrieval
from perturbkv.analyses.ranked_together import LEAST_CONFIGS
from perturbkv.display import Table

ABOUT_RANKS = (
    "ρ < 0: the more perturbed of a prompt's methods find less. Only methods of one budget, one granularity and one "
    "protection are ranked together; under a budget stands what their caches hold over the full cache. Mean over the n "
    "prompts whose methods differ; its interval over them. L1, θ (of all heads) and drift are relative to the full "
    "run's norms."
)


def found_table(named: list[tuple[str, Method]], lengths: tuple[int, ...]) -> Table:
    """A row per method: what it finds in all, and by prompt tokens."""
    columns = ["method", "#held /\nfull", "#found", "#leading\ndigits", *(f"#{length:,}" for length in lengths)]
    title = "share of numbers found in all, of their leading digits, and found by prompt tokens"
    return Table(title, columns, [_row(folded(name, 24), method) for name, method in named])


def link_tables(link: Retrieval) -> list[Table | str]:
    """Of which prompts the ranks are, and the ranks: those known beforehand, and apart those that nearly are scores."""
    said: list[Table | str] = [f"does perturbation tell? {link.samples} prompts that the full cache answers"]
    said += [f"b={budget}: fewer than {LEAST_CONFIGS} methods, no ranks" for budget in link.too_few]
    if not link.budgets:
        return said
    first = [(one, one.correlations) for one in link.budgets]
    circular = [(one, one.circular) for one in link.budgets]
    return [
        *said,
        _ranks("Spearman's ρ between the methods of one prompt, first decode step", MEASURES, first),
        _ranks("circular: on the answer's own tokens these nearly are the score", CIRCULAR, circular),
    ]


def _row(name: str, method: Method) -> list[str]:
    columns = [column[~np.isnan(column)] for column in method.grid.T]
    by_length = [float(column.mean()) if len(column) else float("nan") for column in columns]
    whole = text.percent(method.score, method.score_interval, "\n")
    digits = text.percent(method.digits, method.digits_interval, "\n")
    return [name, text.held(method.held), whole, digits, *(text.percent(share) for share in by_length)]


def _ranks(title: str, measures: dict[str, str], budgets: list[tuple[BudgetLink, tuple[Correlation, ...]]]) -> Table:
    """A row per budget and measure, both outcomes beside each other, each with its n."""
    rows = []
    for link, correlations in budgets:
        held = " to ".join(dict.fromkeys(map(text.held, link.held_ends)))
        names = [link.name, f"held {held}", *[""] * len(measures)]
        found = {(one.measure, one.outcome): one for one in correlations}
        for place, (name, words) in enumerate(measures.items()):
            cells = [cell for outcome in OUTCOMES for cell in _ranked(found[name, outcome])]
            rows.append([names[place], words, *cells])
    return Table(title, ["budget", "measure", "#whole number", "#n", "#digits", "#n"], rows)


def _ranked(one: Correlation) -> list[str]:
    return [text.decimal(one.rho, one.interval), str(one.deciding)]

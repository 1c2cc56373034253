"""Is a fact still found from an evicted cache, and does perturbation tell? (Paper, appendix E and figure 8.).

The tables of a needle run: what each method finds, and whether perturbation tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import FIRST_STEP_MEASURES, Floats, at_step
from perturbkv.analyses.needle.retrieval import (
    ANALYSIS,
    CIRCULAR,
    OUTCOMES,
    BudgetLink,
    Correlation,
    Method,
    Retrieval,
    cells_of,
    check_scored,
    correlate,
    grid_of,
    measures,
    methods,
)
from perturbkv.analyses.pairing import LEAST_CONFIGS, common, counted, folded, short_names
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import LEAST
from perturbkv.analyses.text import decided, extremes, sentence, tally_verdicts
from perturbkv.display import Table
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        _ranks("Spearman's ρ between the methods of one prompt, first decode step", FIRST_STEP_MEASURES, first),
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


_TELLS = {
    -1: ("methods that perturb a prompt's first step more find fewer digits", "fewer"),
    1: ("methods that perturb a prompt's first step more find more digits", "more"),
    0: ("whether methods that perturb a prompt's first step more find fewer digits is undecided", "undecided"),
}


@dataclass(frozen=True, repr=False)
class Needle(Result):
    """Retrieval of every method, and what its perturbation tells of it.

    Attributes:
        identity: which run this is.
        samples: names of the complete samples.
        cells: (sample, 2) depth and length of each, as places in the grid.
        lengths, depths: of the grid, in the order of its axes.
        haystack, scenario: how the prompts were made and compressed.
        full: the full cache.
        methods: the configurations, in the run's order.
        measured: measure -> (sample, config), relative to the full run's own norms (KL in nat, 1 − S as it is).
        link: rank correlations between the measures and what was found.
    """

    identity: RunIdentity
    samples: tuple[str, ...]
    cells: NDArray[np.int64]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    haystack: str
    scenario: str
    full: Method
    methods: tuple[Method, ...]
    measured: dict[str, Floats]
    link: Retrieval

    def conclusion(self) -> str:
        """What the best and the worst method find beside the full cache, and whether perturbation tells."""
        full = text.percent(self.full.score, self.full.score_interval)
        prompts = f"n = {counted(self.identity.samples, 'prompt')}"
        if not self.full.score:
            return f"Even the full cache finds no number ({full}; {prompts}): there is nothing that eviction can lose."
        names = [name for name, _ in self._named()]
        return sentence(f"{self._found()}; the full cache finds {full} ({prompts}); {self._told()}", *names)

    def tables(self) -> list[Table | str]:
        """What is found, and the ranks of what perturbation tells."""
        shared = f"haystack: {self.haystack} · scenario: {self.scenario} · {common(self.identity.configs)}"
        named = [("full cache", self.full), *self._named()]
        return [shared, found_table(named, self.lengths), *link_tables(self.link)]

    def notes(self) -> str:
        """What intervals and ranks mean."""
        ranks = f"{ABOUT_RANKS} " if self.link.budgets else ""
        return (
            f"{ranks}{text.about_intervals(self.identity.samples, exact=True)} Of shares of prompts found: exact "
            f"ones. {text.ABOUT_HELD}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        shown = ("lengths", "depths", "haystack", "scenario")
        found: dict[str, Any] = plain({name: getattr(self, name) for name in shown})
        told = {"full": self.full.to_dict(), "methods": [method.to_dict() for method in self.methods]}
        return {**found, **told, "correlation": self.link.to_dict()}

    def records(self) -> list[dict[str, Any]]:
        """A row per sample and method: what it found in [0, 1], and what was measured; the full cache has no measures.

        `score` is 1 where the whole number was found, `digits` the share of its leading digits that are right.
        """
        whole = {"config": "full cache", "policy": None, "selection": None, "budget": None}
        rows: list[dict[str, Any]] = []
        for place, sample in enumerate(self.samples):
            depth, length = self.cells[place]
            cell = {"sample": sample, "length": self.lengths[length], "depth": self.depths[depth]}
            rows.append({**whole, **cell, **_outcomes(self.full, place)})
            for column, (config, method) in enumerate(zip(self.identity.configs, self.methods, strict=True)):
                measured = {name: float(array[place, column]) for name, array in self.measured.items()}
                rows.append({**columns_of(config), **cell, **_outcomes(method, place), **measured})
        return rows

    def plot_digits(self, width_mm: float = 174) -> Figure:
        """Maps of the share of leading digits that are right, length × depth, one per method."""
        return self._drawn("Needle.plot_digits", width_mm)

    def plot_depths(self, width_mm: float = 174) -> Figure:
        """Both shares by depth, over all lengths."""
        return self._drawn("Needle.plot_depths", width_mm)

    def plot_correlation(self, width_mm: float = 174) -> Figure:
        """Rank correlation of every measure with what was found."""
        return self._drawn("Needle.plot_correlation", width_mm)

    def _named(self) -> list[tuple[str, Method]]:
        names = [name or "evicted" for name in short_names(self.identity.configs)]
        return list(zip(names, self.methods, strict=True))

    def _found(self) -> str:
        """The method that finds least and the one that finds most."""
        ordered = sorted(self._named(), key=lambda pair: pair[1].score)
        (worst, least), (best, most) = ordered[0], ordered[-1]
        shares = [text.percent(one.score, one.score_interval) for one in (least, most)]
        if len(ordered) == 1:
            return f"from the evicted cache {shares[0]} of the numbers are found"
        if least.score == most.score:
            return f"all {len(ordered)} methods find {shares[0]} of the numbers"
        unsure = " (their intervals overlap)" if _overlap(least, most) else ""
        return f"{best} finds {shares[1]} of the numbers, {worst} {shares[0]}{unsure}"

    def _told(self) -> str:
        """Whether the first step's perturbation tells which methods find less."""
        correlations = [_first(one.correlations) for one in self.link.budgets]
        known = [one for one in correlations if not isnan(one.rho)]
        if not known:
            few = "no two methods of a prompt differ" if correlations else "too few methods share a budget"
            return f"whether those that perturb more find less cannot be said: {few}"
        told = extremes([("", one.rho, text.decimal(one.rho, one.interval)) for one in known])
        prompts = min(one.deciding for one in known)
        few = ", too few for an interval" if prompts < LEAST else ""
        verdicts = [decided(one.interval, 0) for one in known]
        return (
            f"{tally_verdicts(verdicts, _TELLS, 'budget')}: ρ = {told} (n = {counted(prompts, 'deciding prompt')}{few})"
        )


def needle(trace: Trace) -> Needle:
    """What is found of a number hidden in a long text, and whether perturbation tells (paper, appendix E, figure 8).

    Shares of prompts, and of leading digits, in [0, 1], by depth and length: (depth, length). Spearman's ρ between each
    measure of the first decode step and what was found, across the methods of one prompt and one budget (METHOD: the
    protocol, 7).

    Args:
        trace: of needle prompts, with answers that were generated from the full cache and from every evicted one.

    Raises TraceError for any other trace, one without a complete sample, or not what is needed.

    Example, of a `trace` of 2 lengths and 2 depths:
        >>> import perturbkv as pk
        >>> pk.needle(trace).full.grid.shape
        (2, 2)
    """
    at_step(trace, ANALYSIS, 0)
    lengths, depths = grid_of(trace)
    check_scored(trace)
    full, *evicted = methods(trace)
    measured = measures(trace)
    return Needle(
        identity=identity(trace, trace.run.configs),
        samples=tuple(name for name, whole in zip(trace.sample_ids, trace.ok, strict=True) if whole),
        cells=cells_of(trace),
        lengths=lengths,
        depths=depths,
        haystack=str(trace.run.dataset_options["haystack"]),
        scenario=trace.run.scenario,
        full=full,
        methods=tuple(evicted),
        measured=measured,
        link=correlate(trace, measured),
    )


def _outcomes(method: Method, sample: int) -> dict[str, float]:
    return {name: float(found[sample]) for name, found in method.found.items()}


def _overlap(least: Method, most: Method) -> bool:
    """True where the exact intervals of two methods share anything; False for a single prompt, which has none."""
    low, high = most.score_interval, least.score_interval
    return low is not None and high is not None and low.low <= high.high


def _first(correlations: tuple[Correlation, ...]) -> Correlation:
    """Of the propagated perturbation with the digits: the whole number is lost with its first digit."""
    (found,) = [one for one in correlations if (one.measure, one.outcome) == ("propagated", "digits")]
    return found

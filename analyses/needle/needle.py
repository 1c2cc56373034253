"""Retrieval of a fact from an evicted cache, and whether perturbation predicts it (paper, appendix E and figure 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, Record, column, record, table
from perturbkv.analyses.conclusions import Case, Claim, unanswered_claims
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Floats, Measurements, is_cut_off
from perturbkv.analyses.needle.retrieval import (
    ANALYSIS,
    RankedBudget,
    Retrieval,
    RetrievalCorrelation,
    RetrievalCorrelations,
    cells_of,
    check_scored,
    correlate,
    grid_of,
    measures,
    retrieval,
)
from perturbkv.analyses.result import Result
from perturbkv.analyses.sides import LEAST_CONFIGS
from perturbkv.analyses.verdicts import LESS, MORE
from perturbkv.display import Part, plural
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from perturbkv.captions import CaptionedFigure


@record
class LengthScore(Record):
    """The share of hidden numbers found in prompts of one length."""

    length: int = column("tokens of the prompts", heading="#tokens")
    score: float = column("share of the prompts whose number is found", unit="share", heading="#number\nfound")


@record
class Needle(
    Result, section="needle", rows="samples", shown=("cache_share", "score", "digits"), first="method", has_shares=True
):
    """Retrieval of every method, and its rank correlation with perturbation.

    Attributes:
        identity: of the run.
        samples: names of the complete samples.
        cells: (sample, 2) indices of depth and length in the grid.
        measured: measure -> (sample, config), relative to the full run's own norms (KL in nat, 1 − S without unit).
    """

    identity: RunIdentity
    samples: tuple[str, ...]
    cells: NDArray[np.int64]
    lengths: tuple[int, ...] = column("of the prompts, tokens")
    depths: tuple[float, ...] = column("where the fact lies, 0 to 1")
    haystack: str = column("prose or noise")
    scenario: str = column("regular or context-only")
    answer_tokens: int = column("largest number of tokens of an answer")
    cut_off: int = column("samples whose full answer was cut off there, without an end token")
    full: Retrieval = column("the full cache's; its `config` is null")
    methods: tuple[Retrieval, ...] = column("one per configuration, in the run's order")
    measured: dict[str, Floats]
    correlation: RetrievalCorrelations = column("rank correlations between perturbation and retrieval")

    def claims(self) -> Sequence[Claim]:
        """Return the shares of numbers found by the best and worst method, and whether perturbation predicts it."""
        if not self.full.score:
            claim, fails = Claim("evicted caches", "find", []), "the full cache finds no number"
            return unanswered_claims(claim, fails, self.cut_off, len(self.samples), [self.answer_tokens])
        found = [Case.number(name, one.score, one.score_interval, text.percent) for name, one in self._named_methods()]
        correlations = [(budget.name, budget.principal()) for budget in self.correlation.budgets]
        cases = [
            Case.number(f"b={name}", one.rho, one.rho_interval, lambda rho, ends: f"ρ = {text.decimal(rho, ends)}", 0)
            for name, one in correlations
        ]
        few = "no two methods of a prompt differ" if correlations else "too few methods share a budget"
        perturbed = "methods that perturb a prompt's first step more"
        return [
            Claim("an evicted cache", "finds the number in", found[1:]),
            Claim("the full cache", "finds it in", found[:1]),
            Claim(perturbed, "find", cases, {LESS: "fewer digits", MORE: "more digits"}, noun="budget", missing=few),
        ]

    def scope(self) -> Sequence[str]:
        """Return what the claims are of."""
        deciding = {budget.principal().deciding for budget in self.correlation.budgets} - {0}
        sign = "=" if len(deciding) == 1 else "≥"
        ranked = [f"ρ: n {sign} {plural(min(deciding), 'deciding prompt')}"] if deciding else []
        return ["share of prompts", f"n = {plural(self.identity.samples, 'prompt')}", *ranked]

    def title(self) -> str:
        """Return the table's title: the haystack, the scenario and the shared choices."""
        return f"needle in {self.haystack}, {self.scenario}: {self.identity.shared}"

    def lines(self) -> Sequence[Line]:
        """Return a line per method, the full cache first."""
        return [Line(name, (method,)) for name, method in self._named_methods()]

    def details(self) -> Sequence[Part]:
        """Return tables of numbers found by length and of rank correlations, and a note on cache shares above 1."""
        shares = [method.cache_share for method in self.methods]
        above = [text.cache_share_note(shares)] if any(share > 1 for share in shares) else []
        lines = [
            Line(name if number == 0 else "", (LengthScore(length, score),))
            for name, method in self._named_methods()
            for number, (length, score) in enumerate(zip(self.lengths, method.by_length(), strict=True))
        ]
        lengths = table("numbers found, by prompt length", lines, ("length", "score"), self.FIRST)
        return [*above, lengths, *self._rank_tables()]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per sample and method: scores in [0, 1] and measures, which the full cache lacks.

        `score` is 1 where the whole number was found, `digits` the share of its leading digits that are right.
        """
        whole = {"config": "full cache", "policy": None, "selection": None, "budget": None}
        rows: list[dict[str, Any]] = []
        for index, sample in enumerate(self.samples):
            depth, length = self.cells[index]
            cell = {"sample": sample, "length": self.lengths[length], "depth": self.depths[depth]}
            rows.append({**whole, **cell, **_outcomes(self.full, index)})
            for number, (config, method) in enumerate(zip(self.identity.configs, self.methods, strict=True)):
                measured = {name: float(array[index, number]) for name, array in self.measured.items()}
                rows.append({**config_columns(config), **cell, **_outcomes(method, index), **measured})
        return rows

    def plot_digits(self, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
        """Return a figure of the share of right leading digits as maps of length × depth, one per method."""
        return self._draw("Needle.plot_digits", width_mm, style)

    def plot_depths(self, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
        """Return a figure of the shares of numbers and of leading digits by depth, over all lengths."""
        return self._draw("Needle.plot_depths", width_mm, style)

    def plot_correlation(self, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
        """Return a figure of the rank correlation of every measure with numbers and with leading digits found."""
        return self._draw("Needle.plot_correlation", width_mm, style)

    def _named_methods(self) -> list[tuple[str, Retrieval]]:
        """Return (name, retrieval) pairs: the full cache, then all methods."""
        return [("full cache", self.full), *zip(self.identity.names, self.methods, strict=True)]

    def _rank_tables(self) -> list[Part]:
        """Return tables of the rank correlations of each budget, of circular measures in a table of their own."""
        few = [f"b={name}: fewer than {LEAST_CONFIGS} methods, no ranks" for name in self.correlation.too_few]
        if not self.correlation.budgets:
            return [*few]
        answered = f"{plural(self.correlation.samples, 'prompt')} that the full cache answers"
        title = f"Spearman's ρ between the methods of one prompt, first decode step, {answered}"
        budgets = self.correlation.budgets
        return [
            *few,
            _rank_table(title, [(budget, budget.correlations) for budget in budgets]),
            _rank_table(
                "circular: on the answer's own tokens these nearly are the score",
                [(budget, budget.circular) for budget in budgets],
            ),
            (
                "ρ < 0: the more perturbed of a prompt's methods find less. Only methods of one budget, one "
                "granularity and one protection are ranked. ρ is a mean over the n prompts whose methods differ, its "
                "interval is over them. L1, θ (of all heads) and drift are relative to the full run's norms."
            ),
        ]


def needle(trace: Trace) -> Needle:
    """Compare how well caches retrieve a number hidden in a long text (paper, appendix E, figure 8).

    Shares of prompts, and of leading digits, in [0, 1], by depth and length: (depth, length). Spearman's ρ between each
    measure of the first decode step and both outcomes, across the methods of one prompt and one budget (METHOD: the
    protocol, 7).

    Args:
        trace: of needle prompts, with answers that were generated from the full cache and from every evicted one.

    Raises TraceError for any other trace, one without a complete sample, or not what is needed.

    Example, of a `trace` of 2 lengths and 2 depths:
        >>> import perturbkv as pk
        >>> pk.needle(trace).full.grid.shape
        (2, 2)
    """
    measured = Measurements(trace, ANALYSIS, by_step=True)
    lengths, depths = grid_of(trace)
    check_scored(trace)
    full, *evicted = retrieval(measured)
    by_measure = measures(measured)
    return Needle(
        identity=identity(trace, trace.run.configs),
        samples=measured.sample_ids,
        cells=cells_of(trace),
        lengths=lengths,
        depths=depths,
        haystack=str(trace.run.dataset_options["haystack"]),
        scenario=trace.run.scenario,
        answer_tokens=trace.run.generate,
        cut_off=int(is_cut_off(trace).sum()),
        full=full,
        methods=tuple(evicted),
        measured=by_measure,
        correlation=correlate(measured, by_measure),
    )


def _rank_table(title: str, budgets: Sequence[tuple[RankedBudget, Sequence[RetrievalCorrelation]]]) -> Part:
    """Return a table with a line per correlation, grouped by budget."""
    lines = []
    for budget, correlations in budgets:
        first_cells = {
            0: budget.name,
            1: f"cache {' to '.join(dict.fromkeys(map(text.decimal, budget.cache_share_range)))}",
        }
        lines += [Line(first_cells.get(number, ""), (each,)) for number, each in enumerate(correlations)]
    return table(title, lines, ("outcome", "measure", "rho", "deciding"), "budget")


def _outcomes(method: Retrieval, sample: int) -> dict[str, float]:
    """Return outcome -> score of a method's answer to the sample at an index."""
    return {name: float(answers[sample]) for name, answers in method.answers.items()}

"""How tight are θ, θ̂ and θ̂_relax, and do they order selections as the perturbation does? (Paper, Theorems 2–4.).

The tables of the bounds: each ratio's spread per budget, and whether a lower bound means a lower perturbation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any

from perturbkv.analyses import text
from perturbkv.analyses.bounds import rank_agreement
from perturbkv.analyses.bounds.rank_agreement import BOUNDS, CONTENDERS, Concordance, RankAgreement, RankCorrelation
from perturbkv.analyses.bounds.ratios import (
    LEVELS,
    RATIOS,
    Tightness,
    about_others,
    bounded,
    check_inequalities,
    of_eviction,
    tightness,
)
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import Floats, at_step, held_shares
from perturbkv.analyses.pairing import budgets, of_selection
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import LEAST
from perturbkv.analyses.text import decided, extremes, factor, over, sentence, tally_verdicts, turned
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Table
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


ANALYSIS = "bound-tightness"
_BOUND = "θ̂"
_LOW, _MEDIAN, _HIGH = (LEVELS.index(level) for level in (0.05, 0.5, 0.95))
_ORDERED = {
    1: ("the selection with the lower bound perturbs less", "less"),
    -1: ("the selection with the lower bound perturbs more", "more"),
    0: ("whether the selection with the lower bound perturbs less is undecided", "undecided"),
}


@dataclass(frozen=True, repr=False)
class BoundTightness(Result):
    """The bounds of every configuration of a trace, and of one selection what is shown.

    Attributes:
        selection: whose bounds are shown.
        configs: one entry per configuration, in the trace's order.
        checked: how many values each inequality was checked on; none was violated, or this would not exist.
        agreements: whether a lower bound means a lower L, per setting of two or more selections.
        step: decode step looked at.
        run: what was run.
        identity: of the run, with the configurations shown.
        others: configurations of the trace in few bits, of which the theorems say nothing.
    """

    selection: str
    configs: tuple[Tightness, ...]
    checked: dict[str, int]
    agreements: tuple[RankAgreement, ...]
    step: int
    run: RunConfig
    identity: RunIdentity
    others: tuple[EvictionConfig, ...] = ()

    @property
    def shown(self) -> tuple[Tightness, ...]:
        """The configurations of the selection, by α, then budget."""
        return tuple(self.configs[place] for place in of_selection(self.run, self.selection))

    def of(self, selection: str) -> BoundTightness:
        """The same of another selection. Raises TraceError where the trace holds none of it."""
        shown = [self.run.configs[place] for place in of_selection(self.run, selection)]
        named = dataclasses.replace(self.identity, configs=tuple(shown))
        return dataclasses.replace(self, selection=selection, identity=named)

    def conclusion(self) -> str:
        """How far θ̂ lies above the perturbation, and whether ranking selections by it ranks them by the latter."""
        return sentence(f"{self._loose()}; {self._ordered()}")

    def tables(self) -> list[Table | str]:
        """What was checked, each ratio's spread, and whether the bounds order selections as L does."""
        counts = ", ".join(f"{name} ({count:,})" for name, count in self.checked.items())
        checked = f"violations: 0, over all configurations; checked {counts}"
        return [checked, *ratio_tables(self.selection, self.shown), *agreement_tables(self.agreements)]

    def notes(self) -> str:
        """What rows, columns and counts mean."""
        return (
            "L: the isolated perturbation. σ ≤ 0.5 is shown and is no evidence for Theorems 3 and 4. ρ: Spearman's "
            f"rank correlation with L across {', '.join(CONTENDERS)} of one head. vs: how often, of two-stage and this "
            "one, the lower bound has the lower L, where σ > 0.5 in both; n: heads of all samples, in how many "
            f"samples; a dash where these are fewer than {LEAST}. 1 − S, the attention given up, knows no values. "
            f"{text.about_intervals(self.identity.samples)} Under a budget stands its held / full: entries that the "
            f"evicted cache holds over those of the full cache.{about_others(self.others)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        return {
            "step": self.step,
            "levels": list(LEVELS),
            "per_head_levels": ["least", "median", "largest over samples"],
            "violations": 0,
            "inequalities_checked": self.checked,
            "configurations": [config.to_dict() for config in self.configs],
            "rank_agreement": [agreement.to_dict() for agreement in self.agreements],
        }

    def records(self) -> list[dict[str, Any]]:
        """A row per configuration, ratio, layer and head: least, median and largest over the samples.

        `sigma_at_most_half` is the share of the samples in which σ ≤ 0.5.
        """
        return [
            {
                **columns_of(one.config),
                "ratio": name,
                "layer": self.identity.layer(layer),
                "head": head,
                **dict(zip(("least", "median", "largest"), plain(spread.by_head[:, layer, head]), strict=True)),
                "sigma_at_most_half": float(share),
                "samples": one.evicted_samples,
            }
            for one in self.configs
            for name, spread in one.spreads.items()
            for layer, heads in enumerate(one.flagged_heads)
            for head, share in enumerate(heads)
        ]

    def plot_heads(self, width_mm: float = 174) -> Figure:
        """Maps of L/θ, layer × head, a panel per budget."""
        return self._drawn("BoundTightness.plot_heads", width_mm)

    def _loose(self) -> str:
        """θ̂ over L of the median head where σ > 0.5, and of nine heads in ten."""
        names = [" ".join(parts) for parts in budgets([one.config for one in self.shown])]
        quantiles = [one.spreads["L/θ̂"].evidence for one in self.shown]
        if all(isnan(found[_MEDIAN]) for found in quantiles):
            return f"there is no bound to judge for {self.selection}: {self._why_none()}"
        named = list(zip([f"b={name}" for name in names], self.shown, quantiles, strict=True))
        told = [(name, float(found[_MEDIAN]), _times(found)) for name, _, found in named]
        covered = [(name, 1 - one.flagged_share, _covered(one)) for name, one, _ in named]
        samples = over(max(one.evicted_samples for one in self.shown)).partition(":")[0]
        return (
            f"the paper's bound {_BOUND} covers {extremes(covered)} of heads and is {extremes(told)} the perturbation "
            f"of {self.selection} there (median head; in parentheses nine heads in ten; {samples})"
        )

    def _why_none(self) -> str:
        if not any(one.evicted_samples for one in self.shown):
            return "nothing was evicted"
        if all(one.flagged_share == 1 for one in self.shown):
            return "stage 1 keeps at most half of the attention in every head, where Theorem 3 says nothing"
        return "perturbation and bounds are 0"

    def _ordered(self) -> str:
        """Whether a lower θ̂ means a lower L, in how many settings, and by how much."""
        correlations = [one for agreement in self.agreements for one in agreement.correlations]
        ranked = [one for one in correlations if _counts(one)]
        if not ranked:
            few = "too few samples hold ranks where σ > 0.5" if correlations else "fewer than three of a budget"
            return f"whether the selection with the lower bound perturbs less cannot be said: {few}"
        told = [("", one.evidence_mean, text.decimal(one.evidence_mean, one.evidence_interval)) for one in ranked]
        found = tally_verdicts([decided(one.evidence_interval, 0) for one in ranked], _ORDERED, "setting")
        samples = min(one.evidence_samples for one in ranked)
        return f"{found}: ρ = {extremes(told)} ({over(samples)})"


def bound_tightness(trace: Trace, selection: str = "two-stage", step: int = 0) -> BoundTightness:
    """How tight the paper's bounds are, and whether lowering them lowers the perturbation (paper, Theorems 2–4).

    L is the isolated L1 perturbation; L/θ, L/θ̂, θ/θ̂ and θ̂/θ̂_relax are plain numbers in [0, 1] where σ > 0.5. All
    configurations are measured and checked; tables and figures show those of one selection.

    Args:
        trace: what was measured.
        selection: whose bounds tables and figures show; or a policy, or `policy:selection`.
        step: decode step.

    Raises BoundError where a bound is violated (METHOD: L ≤ θ ≤ θ̂, and θ̂ ≤ θ̂_relax where σ > 0.5), TraceError where
    the trace holds no such configuration, no complete sample or not what is needed, ConfigError where it has no such
    step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> found = pk.bound_tightness(trace, "attention")
        >>> found.shown[0].spreads["L/θ̂"].by_head.shape  # least, median and largest; layers; heads
        (3, 2, 2)
    """
    trace, others = of_eviction(trace)
    there = at_step(trace, ANALYSIS, step)
    held, shares = bounded(there, ANALYSIS, step), held_shares(there, ANALYSIS)
    configs = (tightness(config, float(shares[place]), held.of(place)) for place, config in enumerate(held.configs))
    shown = [trace.run.configs[place] for place in of_selection(trace.run, selection)]
    return BoundTightness(
        selection=selection,
        checked=check_inequalities(held),
        configs=tuple(configs),
        agreements=rank_agreement.summarise(trace, step),
        step=step,
        run=trace.run,
        identity=identity(trace, shown, step),
        others=others,
    )


def _covered(one: Tightness) -> str:
    """The share of heads in which σ > 0.5."""
    return text.percent(1 - one.flagged_share, turned(one.flagged_share_interval))


def _times(ratios: Any) -> str:
    """How often the perturbation goes into its bound: '3.1 × (1.6 to 8.2)'."""
    median, most, least = (1 / float(ratios[place]) if ratios[place] else float("inf") for place in
                           (_MEDIAN, _LOW, _HIGH))  # fmt: skip
    return f"{factor(median)} ({text.decimal(least, digits=1)} to {text.decimal(most, digits=1)})"


def _counts(one: RankCorrelation) -> bool:
    """True for θ̂ over the selections that one would choose among, where enough samples are evidence."""
    return one.bound == _BOUND and set(one.selections) <= set(CONTENDERS) and one.evidence_samples >= LEAST

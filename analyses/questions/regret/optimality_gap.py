"""The gap between a method's kept sets and the best known ones, and how much of it is not knowing the query.

Three factors, as `optimum.chain` has it: L(method) / L(best) = L(method) / L(plain) · L(plain) / L(knowing) ·
L(knowing) / L(best). *Plain* ranks by the window's estimate without pooling and stages, *knowing* by the realised
values of the same thing. Of geometric means over the same heads the product holds exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.columns import Record, column, interval, record
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import plural, short_names
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import half_share, ratio
from perturbkv.analyses.stats.intervals import RATIO, OptionalInterval, StatisticKind
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.optimum import chain
from perturbkv.optimum.search import PREFIX, PROMPT, SearchResults

_NEVER_BELOW = replace(RATIO, limits=(1, np.inf))
"""L over that of the best known set: never below 1."""
_ROUNDING = 1e-9
"""Share of the largest L of a head's sets below which the best one's is rounding."""
_SAME = 1e-9
"""Two values of L that differ by a smaller share are equal."""


@record
class Factor(Record):
    """A factor of the loss L: geometric mean over heads, then over samples; NaN where it is not defined."""

    value: float = column("L over L")
    interval: OptionalInterval = column("over samples")


def _format_factor(factor: Factor) -> str:
    """Return a factor, its interval on a second line."""
    return text.decimal(factor.value, factor.interval, separator="\n")


@record
class OptimalityGap(Record):
    """The loss of one method's kept sets over that of the best known sets of the same heads and sizes."""

    SECTION: ClassVar[str] = "optimality gap"

    config: EvictionConfig = column("the method")
    heads: int = column("heads that it is of, those of all samples together")
    samples: int = column("samples that have one of these heads; of one alone there are no intervals")
    sum_ratio: float = column("Σ of isolated L over that of the best known sets", heading="#Σ of all\nheads")
    sum_ratio_interval: OptionalInterval = interval()
    median_ratio: float = column(
        "L over the best's of each sample's median head, the median over samples", heading="#median\nhead"
    )
    median_ratio_interval: OptionalInterval = interval()
    half: float = column(
        "the smallest share of heads that carries half of Σ L", unit="share", heading="#half of Σ\nin heads"
    )
    factor: Factor = column(
        "L over the best's, geometric mean over heads, then samples", heading="#mean\nfactor", text=_format_factor
    )
    form: Factor = column(
        "the part of the factor that pooling and stages cost; null like the next where the method estimates neither A "
        "nor A ν",
        heading="#pooling,\nstages",
        text=_format_factor,
    )
    query: Factor = column("the part that not knowing the query costs", heading="#query\nunknown", text=_format_factor)
    criterion: Factor = column(
        "the part that the criterion costs with the query known; the three multiply to `factor`",
        heading="#criterion",
        text=_format_factor,
    )

    @property
    def decomposed(self) -> bool:
        """True where the parts of the factor are known."""
        return not np.isnan(self.query.value)


@dataclass(frozen=True)
class Heads:
    """The heads of one sample whose best known set loses more than rounding.

    Attributes:
        methods: (method, head) isolated L of each method's set.
        best: (head,) isolated L of the best known set.
    """

    methods: Floats
    best: Floats

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]], methods: int) -> Heads:
        """Return the heads in a search's rows, except heads whose best known L is rounding."""
        values = np.array([row["perturbation"] for row in rows], dtype=np.float64).reshape(-1, methods).T
        best = np.array([row["best"] for row in rows], dtype=np.float64)
        lossy = best > _ROUNDING * values.max(axis=0, initial=0)
        return cls(values[:, lossy], best[lossy])


def optimality_gaps(configs: Sequence[EvictionConfig], samples: Sequence[Heads]) -> tuple[OptimalityGap, ...]:
    """Return every method's optimality gap, over samples with heads; empty if no sample has a head."""
    known = [sample for sample in samples if sample.best.size]
    return tuple(_optimality_gap(configs, index, known) for index in range(len(configs))) if known else ()


def _optimality_gap(configs: Sequence[EvictionConfig], index: int, samples: Sequence[Heads]) -> OptimalityGap:
    """Return the optimality gap of the method at an index, over samples that each have a head."""
    sums = np.array([(one.methods[index].sum(), one.best.sum()) for one in samples])
    medians = np.array([np.median(one.methods[index] / one.best) for one in samples])
    methods = _chain_indices(configs, index)
    logs = [_log_factors(sample, methods) for sample in samples]
    return OptimalityGap(
        config=configs[index],
        heads=sum(one.best.size for one in samples),
        samples=len(samples),
        sum_ratio=float(ratio(*sums.sum(axis=0))),
        sum_ratio_interval=intervals.of_statistic(
            lambda weights: ratio(*(weights @ sums).T), len(samples), _NEVER_BELOW
        ),
        median_ratio=float(np.median(medians)),
        median_ratio_interval=intervals.of_median(medians),
        half=half_share(np.concatenate([one.methods[index] for one in samples])),
        factor=_factor([_mean_log_ratio(one.methods[index], one.best) for one in samples], _NEVER_BELOW),
        form=_factor([each[0] for each in logs]),
        query=_factor([each[1] for each in logs]),
        criterion=_factor([each[2] for each in logs], _NEVER_BELOW),
    )


def _chain_indices(configs: Sequence[EvictionConfig], index: int) -> list[int] | None:
    """Return the indices of a method, of its unpooled form and of its known-query form; None if any is missing."""
    links = [configs[index], chain.without_pooling(configs[index]), chain.with_known_query(configs[index])]
    return [configs.index(link) for link in links if link is not None] if set(links) <= set(configs) else None


def _log_factors(sample: Heads, methods: Sequence[int] | None) -> list[float]:
    """Return a sample's three log factors along a chain of methods, means over heads; NaN for no chain."""
    if methods is None:
        return [float("nan")] * 3
    values = [*(sample.methods[index] for index in methods), sample.best]
    return [_mean_log_ratio(above, below) for above, below in pairwise(values)]


def _mean_log_ratio(above: Floats, below: Floats) -> float:
    """Return the mean over heads of log(above / below)."""
    return float(np.log(above / below).mean())


def _factor(logs: Sequence[float], kind: StatisticKind = RATIO) -> Factor:
    """Return the geometric mean factor over samples from their logarithms, with its interval; NaN if any is NaN."""
    each = np.array(logs)
    if np.isnan(each).any():
        return Factor(float("nan"), None)
    ends = intervals.of_statistic(lambda weights: np.exp(weights @ each), len(each), kind)
    return Factor(float(np.exp(each.mean())), ends)


@record
class SearchedPart(Record):
    """The searches on whole prompts at one budget, or those on prefixes.

    Attributes:
        configs: the methods at this part's budget.
        rows: per sample its heads, as `SearchResults` holds them.
    """

    part: str = column("prompt or prefix")
    configs: tuple[EvictionConfig, ...]
    rows: tuple[tuple[Mapping[str, Any], ...], ...]
    heads: int = column("heads searched, of all samples")
    left_out: int = column("heads whose best set loses nothing but rounding")
    settled: int = column("heads in which no swap helps any more")
    tried: int = column("heads in which a proof was tried")
    closed: int = column("heads in which the best set is proven")
    at_optimum: int = column("heads with a proven best set that swaps alone had reached")
    gap: float = column(
        "largest share of L by which a bound lies below the best set where none was proven; 0 without such heads",
        unit="share",
    )
    methods: tuple[OptimalityGap, ...] = column("gap of each method to the best known sets")
    first_layer: tuple[OptimalityGap, ...] = column(
        "the same of the heads of the first measured layer; empty where none was drawn"
    )
    other_layers: tuple[OptimalityGap, ...] = column("the same of all others")

    @property
    def name(self) -> str:
        """Whole prompts or prefixes, with the budget: 'prompts, b=64'."""
        return f"{'prefixes' if self.part == PREFIX else 'prompts'}, b={self.configs[0].budget}"

    @property
    def names(self) -> list[str]:
        """Names of the methods."""
        names = short_names(self.configs)
        return [name or str(config.selection) for name, config in zip(names, self.configs, strict=True)]

    def principal(self) -> list[int]:
        """Return the indices of the methods for the conclusion: decomposed methods that are not plain forms.

        Without any, those of all methods that do not know the query.
        """
        realisable = [
            index
            for index, each in enumerate(self.methods)
            if each.config.selection.name not in chain.KNOWN_QUERY_SELECTIONS
        ]
        decomposed = [index for index in realisable if self._is_decomposed(self.methods[index])]
        return decomposed or realisable

    def summary(self) -> str:
        """Return the number of searched heads, and how certain their best known sets are."""
        clauses = [f"{self.name}: {plural(self.heads, 'head')} searched, no swap helps any more in {self.settled}"]
        if self.tried:
            unproven = self.tried - self.closed
            clauses.append(f"the best set is proven in {self.closed} of {self.tried}, where swaps alone had reached it "
                           f"in {self.at_optimum}")  # fmt: skip
            if unproven:
                clauses.append(f"of {unproven} not proven the bound is up to {text.percent(self.gap)} lower")
        if self.left_out:
            clauses.append(f"{plural(self.left_out, 'head')} left out, whose best set loses nothing but rounding")
        return "; ".join(clauses) + "."

    @staticmethod
    def _is_decomposed(method: OptimalityGap) -> bool:
        """Return whether a method has a known decomposition and differs from its form without pooling."""
        return method.decomposed and chain.without_pooling(method.config) != method.config


def searched_parts(sets: SearchResults) -> tuple[SearchedPart, ...]:
    """Return whole prompts by budget, then the prefixes, where heads were searched."""
    parts = [_searched_part(sets, PROMPT, configs) for configs in _by_budget(sets.run.configs)]
    parts.append(_searched_part(sets, PREFIX, _prefix_configs(sets)))
    return tuple(part for part in parts if part.heads)


def _by_budget(configs: tuple[EvictionConfig, ...]) -> list[tuple[EvictionConfig, ...]]:
    """Return the configurations grouped by budget."""
    budgets = dict.fromkeys(config.budget for config in configs)
    return [tuple(config for config in configs if config.budget == budget) for budget in budgets]


def _prefix_configs(sets: SearchResults) -> tuple[EvictionConfig, ...]:
    """Return the methods with the budget and window of the prefixes."""
    budget, window = Budget(int(sets.settings["budget"])), int(sets.settings["window"])
    return tuple(replace(config, budget=budget, window=window) for config in _by_budget(sets.run.configs)[0])


def _searched_part(sets: SearchResults, part: str, configs: tuple[EvictionConfig, ...]) -> SearchedPart:
    """Return the searches on whole prompts or on prefixes (`part`), at the budget of `configs`."""
    rows = tuple(
        tuple(row for row in sample["heads"] if row["part"] == part and row["budget"] == str(configs[0].budget))
        for sample in sets.rows
    )
    every = [row for sample in rows for row in sample]
    tried = [row for row in every if row["lower"] is not None]
    closed = [row for row in tried if row["closed"]]
    count = len(configs)
    heads = [Heads.from_rows(sample, count) for sample in rows]
    first = [Heads.from_rows([row for row in sample if not row["layer"]], count) for sample in rows]
    others = [Heads.from_rows([row for row in sample if row["layer"]], count) for sample in rows]
    return SearchedPart(
        part=part,
        configs=configs,
        rows=rows,
        heads=len(every),
        left_out=len(every) - sum(sample.best.size for sample in heads),
        settled=sum(bool(row["settled"]) for row in every),
        tried=len(tried),
        closed=len(closed),
        at_optimum=sum(row["improved"] <= row["best"] * (1 + _SAME) for row in closed),
        gap=max((1 - row["lower"] / row["best"] for row in tried if not row["closed"]), default=0.0),
        methods=optimality_gaps(configs, heads),
        first_layer=optimality_gaps(configs, first),
        other_layers=optimality_gaps(configs, others),
    )

"""Order of selections by a bound and by the perturbation L: rank correlations within each head, and pairs.

Beside θ and θ̂ there is 1 − S, the evicted attention, as the order that ignores values. θ and 1 − S compare any kept
sets. Theorem 3 fixes stage 1, so θ̂ compares only selections that have the same one (METHOD: the protocol, 12): two of
them do, of which a rank correlation would be ±1, and their pair is counted instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.bounds.ratios import Bounds
from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.json_values import setting_object
from perturbkv.analyses.measurements import EVIDENCE, Floats
from perturbkv.analyses.sides import group_by_selection
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import (
    CORRELATION,
    DIFFERENCE,
    MIN_SAMPLES,
    OptionalInterval,
    mean_where_known,
    share_kind,
)
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.configs.selections import STAGED

ANALYSIS = "bound-tightness"
CONTENDERS = ("attention", "attention-unpooled", "two-stage-uniform", "two-stage")
"""Selections to choose among in practice; controls are so much worse that any bound ranks them last."""
STAGED_BOUND, MASS = "θ̂", "1 − S"
BOUNDS = ("θ", STAGED_BOUND, MASS)
RANKING_BOUNDS = ("θ", MASS)
"""Bounds that need no stage 1: those that rank all selections."""
_SHOWN = ({"attention", "two-stage"}, {"two-stage-uniform", "two-stage"})
"""Pairs that tables and figures show; the second has one stage 1."""
LEAST_SELECTIONS = 3
"""Smallest number of selections with a rank correlation; for two, `Concordance` counts right orders."""


@record
class RankCorrelation(Record):
    """Spearman's ρ between a bound and the perturbation L across selections, within each head and sample."""

    bound: str = column("bound θ or 1 − S; θ̂ is compared in pairs of one stage 1 alone", heading="bound")
    selections: tuple[str, ...] = column("selections that are ranked")
    mean: float = column(
        "Spearman's ρ with L, mean over samples and heads; null where no value is left", heading="#ρ with L"
    )
    mean_interval: OptionalInterval = column("over samples", key="interval")
    by_head: Floats = column("ρ of each head, mean over samples", dims=("layer", "head"))
    values: int = column("(sample, head) that were ranked", heading="#heads")
    samples: int = column("samples that hold such heads", heading="#samples")


@record
class Concordance(Record):
    """The share of heads in which the selection with the lower bound also has the lower L, of two selections.

    All bounds of a pair stand on the same heads, those in which L and each of them differ.
    """

    first: str = column("first selection")
    second: str = column("second selection")
    same_stage1: bool = column("whether both have stages, and so the same stage 1: only then θ̂ is compared")
    bound: str = column("bound θ, θ̂ or 1 − S", heading="bound")
    share: float = column(
        "heads in which the selection with the lower bound has the lower L too, a share of those in which L and all "
        "bounds differ, mean over samples; null where none does",
        unit="share",
    )
    share_interval: OptionalInterval = column("over samples", key="interval")
    gain: float = column(
        "the share less that of 1 − S in the same heads, mean over samples; null for 1 − S itself", unit="share"
    )
    gain_interval: OptionalInterval = column("of the paired difference, over samples")
    values: int = column("(sample, head) that count: of one stage 1 those with σ > 0.5, else all", heading="#heads")
    samples: int = column("samples that hold such heads", heading="#samples")

    @derived(unit="share", heading="#lower bound,\nlower L", json=False, interval=lambda row: row.share_interval)
    def agreement(self) -> float:
        """Heads in which the selection with the lower bound has the lower L; a dash of fewer than five samples."""
        return self.share if self.samples >= MIN_SAMPLES else float("nan")

    @derived(
        heading="#less that of\n1 − S, points", json=False, text=text.points, interval=lambda row: row.gain_interval
    )
    def advantage(self) -> float | None:
        """That share less the one of 1 − S in the same heads, in points; a dash of fewer than five samples."""
        return None if self.bound == MASS or self.samples < MIN_SAMPLES else self.gain


@record
class RankAgreement(Record, section="agreement"):
    """The agreement of bounds with L for configurations that differ in selection alone."""

    configs: tuple[EvictionConfig, ...] = column("one per selection", json=False)
    correlations: tuple[RankCorrelation, ...] = column(
        "over the contenders and over all, of θ and of 1 − S; empty for fewer than three selections",
        key="rank_correlations",
    )
    pairs: tuple[Concordance, ...] = column(
        "every two selections, of θ and of 1 − S, and of θ̂ where they have the same stage 1", key="concordance"
    )

    @derived()
    def setting(self) -> dict[str, Any]:
        """Choices of a configuration that all selections share; others and the label are absent."""
        return setting_object(self.configs)

    @property
    def most_specific_config(self) -> EvictionConfig:
        """The configuration with the most options, whose choices name the setting."""
        return max(self.configs, key=lambda config: len(config.flat()))

    @property
    def shown(self) -> tuple[Concordance, ...]:
        """The rows of two-stage beside attention, and beside two-stage-uniform, which has the same stage 1."""
        return tuple(pair for names in _SHOWN for pair in self.pairs if {pair.first, pair.second} == names)


def compare_orders(bounds: Bounds, run: RunConfig) -> tuple[RankAgreement, ...]:
    """Return, for each setting of several selections, how well the order by each bound agrees with that by L."""
    return tuple(_agreement(bounds, group) for group in group_by_selection(run) if len(group) > 1)


@dataclass(frozen=True)
class _Group:
    """Arrays (selection, sample, layer, head) of one setting, over the samples in which every selection evicts."""

    names: tuple[str, ...]
    perturbation: Floats
    bounds: dict[str, Floats]
    sigma: Floats

    def select(self, names: tuple[str, ...]) -> _Group:
        """Return the group restricted to the named selections."""
        indices = [self.names.index(name) for name in names]
        bounds = {bound: array[indices] for bound, array in self.bounds.items()}
        return _Group(names, self.perturbation[indices], bounds, self.sigma[indices])

    @property
    def same_stage1(self) -> bool:
        """True where all selections have stages: as their options are equal, stage 1 holds the same entries."""
        return set(self.names) <= {*STAGED}


def _agreement(bounds: Bounds, group: dict[str, int]) -> RankAgreement:
    """Return the agreement of bounds with L among selections; `group`: selection -> index of its configuration."""
    indices = list(group.values())
    samples = bounds.evicted[:, indices].all(axis=1)
    perturbation, sigma, *arrays = (
        np.moveaxis(array[samples][:, indices], 1, 0)
        for array in (bounds.perturbation, bounds.sigma, bounds.theta, bounds.theta_hat, 1 - bounds.mass)
    )
    by_bound = dict(zip(BOUNDS, arrays, strict=True))
    whole = _Group(tuple(group), perturbation=perturbation, bounds=by_bound, sigma=sigma)
    contenders = tuple(name for name in group if name in CONTENDERS)
    ranked = [names for names in dict.fromkeys((contenders, whole.names)) if len(names) >= LEAST_SELECTIONS]
    return RankAgreement(
        configs=tuple(bounds.configs[index] for index in indices),
        correlations=tuple(_correlation(whole.select(names), bound) for names in ranked for bound in RANKING_BOUNDS),
        pairs=tuple(row for pair in combinations(whole.names, 2) for row in _concordances(whole.select(pair))),
    )


def _correlation(group: _Group, bound: str) -> RankCorrelation:
    """Return Spearman's ρ between a bound and L over all selections of a group."""
    rho = spearman(group.bounds[bound], group.perturbation)
    per_sample = mean_where_known(rho, (1, 2))
    return RankCorrelation(
        bound=bound,
        selections=group.names,
        mean=float(mean_where_known(per_sample)),
        mean_interval=intervals.of_mean(per_sample, CORRELATION),
        by_head=mean_where_known(rho),
        values=_count_known(rho),
        samples=_count_known(per_sample),
    )


def _concordances(pair: _Group) -> list[Concordance]:
    """Return, for each bound that compares the two selections of `pair`, how often the lower bound has the lower L."""
    names = BOUNDS if pair.same_stage1 else RANKING_BOUNDS
    counted = np.asarray((pair.sigma > EVIDENCE).all(axis=0)) if pair.same_stage1 else None
    bounds = [pair.bounds[name] for name in names]
    second_perturbs_less = pair.perturbation[1] < pair.perturbation[0]
    counts = np.all([array[0] != array[1] for array in (pair.perturbation, *bounds)], axis=0)
    if counted is not None:
        counts = counts & counted
    # whether each bound orders both as L does; NaN where L or any of the bounds is equal, and where σ is too low
    agreeing = tuple(np.where(counts, (bound[1] < bound[0]) == second_perturbs_less, np.nan) for bound in bounds)
    per_sample = {name: mean_where_known(each, (1, 2)) for name, each in zip(names, agreeing, strict=True)}
    kind = share_kind(agreeing[0][0].size if len(agreeing[0]) else 0)  # of a sample's heads
    rows = []
    for name, shares in per_sample.items():
        gains = np.full_like(shares, np.nan) if name == MASS else shares - per_sample[MASS]
        rows.append(
            Concordance(
                first=pair.names[0],
                second=pair.names[1],
                same_stage1=pair.same_stage1,
                bound=name,
                share=float(mean_where_known(shares)),
                share_interval=intervals.of_mean(shares, kind),
                gain=float(mean_where_known(gains)),
                gain_interval=intervals.of_mean(gains, DIFFERENCE),
                values=_count_known(agreeing[0]),
                samples=_count_known(shares),
            )
        )
    return rows


def _count_known(values: Floats) -> int:
    """Return the number of values that are not NaN."""
    return int((~np.isnan(values)).sum())

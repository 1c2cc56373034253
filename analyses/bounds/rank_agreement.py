"""Order of selections by a bound and by the perturbation L: rank correlations within each head.

Beside θ and θ̂ there is 1 − S, the evicted attention, as the order that ignores values.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.bounds.ratios import Bounds
from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.json_values import setting_object
from perturbkv.analyses.measurements import EVIDENCE, Floats
from perturbkv.analyses.pairing import group_by_selection
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import CORRELATION, MIN_SAMPLES, OptionalInterval, mean_where_known, share_kind
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig

ANALYSIS = "bound-tightness"
CONTENDERS = ("attention", "attention-unpooled", "two-stage-uniform", "two-stage")
"""Selections to choose among in practice; controls are so much worse that any bound ranks them last."""
BOUNDS = ("θ", "θ̂", "1 − S")
LEAST_SELECTIONS = 3
"""Smallest number of selections with a rank correlation; for two, `Concordance` counts right orders."""


@record
class RankCorrelation(Record):
    """Spearman's ρ between a bound and the perturbation L across selections, within each head and sample."""

    bound: str = column("bound θ, θ̂ or 1 − S", heading="bound")
    selections: tuple[str, ...] = column("selections that are ranked")
    mean: float = column("Spearman's ρ with L, mean over samples and heads; null where no value is left")
    mean_interval: OptionalInterval = column("over samples", key="interval")
    evidence_mean: float = column("Spearman's ρ where σ > 0.5 in every selection: all bounds on the same heads")
    evidence_mean_interval: OptionalInterval = column("over samples", key="evidence_interval")
    evidence_values: int = column("(sample, head) with σ > 0.5 in every selection", heading="#heads")
    evidence_samples: int = column("samples that hold such heads", heading="#samples")
    by_head: Floats = column("ρ of each head, mean over samples", dims=("layer", "head"))
    values: int = column("(sample, head) that were ranked")
    flagged: int = column("(sample, head) left out because σ ≤ 0.5 in one of the selections (θ̂ alone)")

    @derived(heading="#ρ with L", json=False, interval=lambda row: row.mean_interval)
    def rho(self) -> float:
        """Spearman's ρ with L of all heads; θ̂ has none, as Theorem 3 is silent on some."""
        return float("nan") if self.bound == "θ̂" else self.mean

    @derived(heading="#ρ where\nσ > 0.5", json=False, interval=lambda row: row.evidence_mean_interval)
    def evidence_rho(self) -> float:
        """Spearman's ρ with L where σ > 0.5 in every selection; a dash of fewer than five samples."""
        return self.evidence_mean if self.evidence_samples >= MIN_SAMPLES else float("nan")


@record
class Concordance(Record):
    """The share of heads in which the selection with the lower bound also has the lower L, of two selections."""

    first: str = column("first selection")
    second: str = column("second selection")
    bound: str = column("bound θ, θ̂ or 1 − S", heading="bound")
    share: float = column(
        "heads in which the selection with the lower bound has the lower L too, a share of those in which both differ, "
        "mean over samples; null where none does",
        unit="share",
    )
    share_interval: OptionalInterval = column("over samples", key="interval")
    evidence_share: float = column("share where σ > 0.5 in both: all bounds on the same heads", unit="share")
    evidence_share_interval: OptionalInterval = column("over samples", key="evidence_interval")
    evidence_values: int = column("(sample, head) with σ > 0.5 in both", heading="#heads")
    evidence_samples: int = column("samples that hold such heads", heading="#samples")
    values: int = column("(sample, head) in which bound and L differ")

    @derived(
        unit="share", heading="#lower bound,\nlower L", json=False, interval=lambda row: row.evidence_share_interval
    )
    def evidence_agreement(self) -> float:
        """Heads with σ > 0.5 in which the lower bound has the lower L; a dash of fewer than five samples."""
        return self.evidence_share if self.evidence_samples >= MIN_SAMPLES else float("nan")


@record
class RankAgreement(Record):
    """The agreement of bounds with L for configurations that differ in selection alone."""

    SECTION = "agreement"

    configs: tuple[EvictionConfig, ...] = column("one per selection", json=False)
    correlations: tuple[RankCorrelation, ...] = column(
        "over the contenders and over all, for each bound; empty for fewer than three selections",
        key="rank_correlations",
    )
    pairs: tuple[Concordance, ...] = column("every two selections, for each bound", key="concordance")

    @derived()
    def setting(self) -> dict[str, Any]:
        """Choices of a configuration that all selections share; others and the label are absent."""
        return setting_object(self.configs)

    @property
    def most_specific(self) -> EvictionConfig:
        """The configuration with the most options, whose choices name the setting."""
        return max(self.configs, key=lambda config: len(config.flat()))


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

    def evidence(self, bound: str) -> NDArray[np.bool_]:
        """Return (sample, layer, head) True where a bound is valid: for θ̂ if all σ > 0.5, for others everywhere."""
        everywhere = np.ones(self.sigma.shape[1:], dtype=bool)
        return np.asarray((self.sigma > EVIDENCE).all(axis=0)) if bound == "θ̂" else everywhere


def _agreement(bounds: Bounds, group: dict[str, int]) -> RankAgreement:
    """Return the agreement of bounds with L among selections; `group`: selection -> index of its configuration."""
    indices = list(group.values())
    samples = bounds.evicted[:, indices].all(axis=1)
    arrays = [
        np.moveaxis(array[samples][:, indices], 1, 0)
        for array in (bounds.perturbation, bounds.sigma, bounds.theta, bounds.theta_hat, 1 - bounds.mass)
    ]
    by_bound = dict(zip(BOUNDS, arrays[2:], strict=True))
    whole = _Group(tuple(group), perturbation=arrays[0], bounds=by_bound, sigma=arrays[1])
    contenders = tuple(name for name in group if name in CONTENDERS)
    ranked = [names for names in dict.fromkeys((contenders, whole.names)) if len(names) >= LEAST_SELECTIONS]
    return RankAgreement(
        configs=tuple(bounds.configs[index] for index in indices),
        correlations=tuple(_correlation(whole.select(names), bound) for names in ranked for bound in whole.bounds),
        pairs=tuple(
            _concordance(whole.select(pair), bound) for pair in combinations(whole.names, 2) for bound in whole.bounds
        ),
    )


def _correlation(group: _Group, bound: str) -> RankCorrelation:
    """Return Spearman's ρ between a bound and L over all selections of a group."""
    valid = group.evidence(bound)
    rho = np.where(valid, spearman(group.bounds[bound], group.perturbation), np.nan)
    per_sample = mean_where_known(rho, (1, 2))
    proven = np.where(group.evidence("θ̂"), rho, np.nan)
    evidence = mean_where_known(proven, (1, 2))
    return RankCorrelation(
        bound=bound,
        selections=group.names,
        mean=float(mean_where_known(per_sample)),
        mean_interval=intervals.of_mean(per_sample, CORRELATION),
        evidence_mean=float(mean_where_known(evidence)),
        evidence_mean_interval=intervals.of_mean(evidence, CORRELATION),
        evidence_values=_count(proven),
        evidence_samples=_count(evidence),
        by_head=mean_where_known(rho),
        values=_count(rho),
        flagged=int((~valid).sum()),
    )


def _concordance(pair: _Group, bound: str) -> Concordance:
    """Return the share of heads in which the selection with the lower bound has the lower L, for two selections."""
    limit, perturbation = (np.sign(array[1] - array[0]) for array in (pair.bounds[bound], pair.perturbation))
    differing = pair.evidence(bound) & (limit != 0) & (perturbation != 0)
    agreeing = np.where(differing, limit == perturbation, np.nan)
    per_sample = mean_where_known(agreeing, (1, 2))
    proven = np.where(pair.evidence("θ̂"), agreeing, np.nan)
    evidence = mean_where_known(proven, (1, 2))
    share = share_kind(agreeing[0].size if len(agreeing) else 0)
    return Concordance(
        first=pair.names[0],
        second=pair.names[1],
        bound=bound,
        share=float(mean_where_known(per_sample)),
        share_interval=intervals.of_mean(per_sample, share),
        evidence_share=float(mean_where_known(evidence)),
        evidence_share_interval=intervals.of_mean(evidence, share),
        evidence_values=_count(proven),
        evidence_samples=_count(evidence),
        values=int(differing.sum()),
    )


def _count(values: Floats) -> int:
    """Return the number of values that are not NaN."""
    return int((~np.isnan(values)).sum())

"""Does lowering a bound order selections as the perturbation L does? Rank correlations within each head.

Beside θ and θ̂ stands 1 − S, the attention that was given up: what an ordering that knows no values achieves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.bounds.ratios import Bounded, bounded
from perturbkv.analyses.json_values import setting_object
from perturbkv.analyses.measurements import EVIDENCE, Floats, at_step
from perturbkv.analyses.pairing import by_selection
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain, ratio
from perturbkv.analyses.stats.intervals import CORRELATION, Scalar, share_of
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace

ANALYSIS = "bound-tightness"
CONTENDERS = ("attention", "attention-unpooled", "two-stage-uniform", "two-stage")
"""Selections that one would really choose among; the controls beside them are so far off that any bound finds them."""
BOUNDS = ("θ", "θ̂", "1 − S")
LEAST_SELECTIONS = 3
"""Ranks of two are right or wrong: that is what `Concordance` counts."""


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's ρ between a bound and L across selections of the same head and sample.

    Attributes:
        bound: θ, θ̂ or 1 − S.
        selections: which are ranked.
        mean: over samples and heads, in [−1, 1]; NaN where no value is left.
        interval: of the mean, over samples.
        evidence_mean, evidence_interval: where σ > 0.5 in every selection: all bounds on the same heads.
        evidence_values, evidence_samples: how many (sample, head) these are of, in how many samples.
        by_head: (layer, head) mean over samples.
        values: how many (sample, head) were ranked.
        flagged: how many were left out because σ ≤ 0.5 in one of the selections (θ̂ only).
    """

    bound: str
    selections: tuple[str, ...]
    mean: float
    interval: Scalar
    evidence_mean: float
    evidence_interval: Scalar
    evidence_values: int
    evidence_samples: int
    by_head: Floats
    values: int
    flagged: int


@dataclass(frozen=True)
class Concordance:
    """How often of two selections the one with the lower bound also has the lower L.

    Attributes:
        first, second: the selections.
        bound: θ, θ̂ or 1 − S.
        share: of the heads in which both bound and L differ, mean over samples, in [0, 1]; NaN where none does.
        interval: of the share, over samples.
        evidence_share, evidence_interval: where σ > 0.5 in both: all bounds on the same heads.
        evidence_values, evidence_samples: how many (sample, head) these are of, in how many samples.
        values: how many (sample, head) differ.
    """

    first: str
    second: str
    bound: str
    share: float
    interval: Scalar
    evidence_share: float
    evidence_interval: Scalar
    evidence_values: int
    evidence_samples: int
    values: int


@dataclass(frozen=True)
class RankAgreement:
    """Configurations that differ in selection alone.

    Attributes:
        configs: one per selection.
        correlations: over the contenders and over all, for each bound; empty for fewer than three selections.
        pairs: every two selections, for each bound.
    """

    configs: tuple[EvictionConfig, ...]
    correlations: tuple[RankCorrelation, ...]
    pairs: tuple[Concordance, ...]

    @property
    def telling(self) -> EvictionConfig:
        """The configuration that has most options, and so tells the setting from others."""
        return max(self.configs, key=lambda config: len(config.flat()))

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain(
            {
                "setting": setting_object(self.configs),
                "rank_correlations": [vars(correlation) for correlation in self.correlations],
                "concordance": [vars(pair) for pair in self.pairs],
            }
        )
        return document


def summarise(trace: Trace, step: int = 0) -> tuple[RankAgreement, ...]:
    """One entry per setting of two or more selections. Raises TraceError and ConfigError as `measurements.at_step`."""
    held = bounded(at_step(trace, ANALYSIS, step), ANALYSIS, step)
    return tuple(_agreement(held, group) for group in by_selection(trace.run) if len(group) > 1)


@dataclass(frozen=True)
class _Group:
    """(selection, sample, layer, head) arrays of one setting, over the samples of which every selection evicts."""

    names: tuple[str, ...]
    perturbation: Floats
    bounds: dict[str, Floats]
    sigma: Floats

    def within(self, names: tuple[str, ...]) -> _Group:
        places = [self.names.index(name) for name in names]
        bounds = {bound: array[places] for bound, array in self.bounds.items()}
        return _Group(names, self.perturbation[places], bounds, self.sigma[places])

    def counted(self, bound: str) -> NDArray[np.bool_]:
        """(sample, layer, head) True where the bound is evidence: θ̂ where every σ > 0.5, the others always."""
        everywhere = np.ones(self.sigma.shape[1:], dtype=bool)
        return np.asarray((self.sigma > EVIDENCE).all(axis=0)) if bound == "θ̂" else everywhere


def _agreement(held: Bounded, group: dict[str, int]) -> RankAgreement:
    places = list(group.values())
    samples = held.evicted[:, places].all(axis=1)
    arrays = [
        np.moveaxis(array[samples][:, places], 1, 0)
        for array in (held.perturbation, held.sigma, held.theta, held.theta_hat, 1 - held.mass)
    ]
    bounds = dict(zip(BOUNDS, arrays[2:], strict=True))
    whole = _Group(tuple(group), perturbation=arrays[0], bounds=bounds, sigma=arrays[1])
    contenders = tuple(name for name in group if name in CONTENDERS)
    ranked = [names for names in dict.fromkeys((contenders, whole.names)) if len(names) >= LEAST_SELECTIONS]
    return RankAgreement(
        configs=tuple(held.configs[place] for place in places),
        correlations=tuple(_correlation(whole.within(names), bound) for names in ranked for bound in whole.bounds),
        pairs=tuple(
            _concordance(whole.within(pair), bound) for pair in combinations(whole.names, 2) for bound in whole.bounds
        ),
    )


def _correlation(group: _Group, bound: str) -> RankCorrelation:
    counted = group.counted(bound)
    found = np.where(counted, spearman(group.bounds[bound], group.perturbation), np.nan)
    per_sample = _mean(found, (1, 2))
    proven = np.where(group.counted("θ̂"), found, np.nan)
    evidence = _mean(proven, (1, 2))
    return RankCorrelation(
        bound=bound,
        selections=group.names,
        mean=float(_mean(per_sample, (0,))),
        interval=intervals.of_mean(per_sample, CORRELATION),
        evidence_mean=float(_mean(evidence, (0,))),
        evidence_interval=intervals.of_mean(evidence, CORRELATION),
        evidence_values=_count(proven),
        evidence_samples=_count(evidence),
        by_head=_mean(found, (0,)),
        values=_count(found),
        flagged=int((~counted).sum()),
    )


def _concordance(pair: _Group, bound: str) -> Concordance:
    limit, perturbation = (np.sign(array[1] - array[0]) for array in (pair.bounds[bound], pair.perturbation))
    differing = pair.counted(bound) & (limit != 0) & (perturbation != 0)
    agreeing = np.where(differing, limit == perturbation, np.nan)
    per_sample = _mean(agreeing, (1, 2))
    proven = np.where(pair.counted("θ̂"), agreeing, np.nan)
    evidence = _mean(proven, (1, 2))
    share = share_of(agreeing[0].size if len(agreeing) else 0)
    return Concordance(
        first=pair.names[0],
        second=pair.names[1],
        bound=bound,
        share=float(_mean(per_sample, (0,))),
        interval=intervals.of_mean(per_sample, share),
        evidence_share=float(_mean(evidence, (0,))),
        evidence_interval=intervals.of_mean(evidence, share),
        evidence_values=_count(proven),
        evidence_samples=_count(evidence),
        values=int(differing.sum()),
    )


def _count(values: Floats) -> int:
    """How many are not NaN."""
    return int((~np.isnan(values)).sum())


def _mean(values: Floats, axes: tuple[int, ...]) -> Floats:
    """Mean of what is not NaN; NaN where nothing is."""
    held = ~np.isnan(values)
    return np.asarray(ratio(np.where(held, values, 0).sum(axis=axes), held.sum(axis=axes)))

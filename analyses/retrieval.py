"""Does perturbation tell whether the needle is still found? Rank correlation between the two. (No paper tested it.).

Only samples that the full cache answers count: where it fails, eviction has nothing to lose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.arithmetic import plain
from perturbkv.analyses.bootstrap import RESAMPLES, Interval, resample
from perturbkv.analyses.needle import OUTCOMES
from perturbkv.analyses.ranks import spearman
from perturbkv.analyses.reading import Floats, check
from perturbkv.trace import Trace

ANALYSIS = "needle"
MEASURES = {
    "isolated": "isolated L1",
    "theta": "θ",
    "propagated": "propagated L1",
    "drift": "last layer's drift",
    "kl": "KL, nat",
    "lost": "1 − S",
}


@dataclass(frozen=True)
class Correlation:
    """Spearman's ρ between a measure of perturbation and an outcome; negative: more perturbed, less of it found.

    Attributes:
        measure: a key of `MEASURES`.
        outcome: `score` (exactly right) or `digits` (share of leading digits).
        rho: over all samples × configurations; NaN where all outcomes are alike.
        interval: 95 % of bootstrap resamples of the samples.
        within: mean over samples of ρ across the configurations of one prompt, where their outcomes differ.
        within_interval: of that mean, over those samples; `deciding` says how many they are.
        found, lost: median of the measure where the whole number was found, and where it was not.
    """

    measure: str
    outcome: str
    rho: float
    interval: Interval
    within: float
    within_interval: Interval
    deciding: int
    found: float
    lost: float


@dataclass(frozen=True)
class Retrieval:
    """The link between perturbation and retrieval.

    Attributes:
        samples: that the full cache answers; `left_out`: the others.
        steps: decode steps that every measure is the mean of.
        correlations: one per outcome and measure.
        perturbation: (measure, sample, config) relative to the full run's own norms (KL in nat, 1 − S as it is).
        score, digits: (sample, config) the outcomes.
    """

    samples: int
    left_out: int
    steps: int
    correlations: tuple[Correlation, ...]
    perturbation: Floats
    score: Floats
    digits: Floats

    def of(self, outcome: str) -> list[Correlation]:
        """The correlations with one outcome, by measure."""
        return [one for one in self.correlations if one.outcome == outcome]

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; the perturbation beside each score."""
        document = {name: value for name, value in vars(self).items() if name not in ("correlations", "perturbation")}
        beside = dict(zip(MEASURES, self.perturbation, strict=True))
        found: dict[str, Any] = plain(
            document | {"correlations": [vars(one) for one in self.correlations], "perturbation": beside}
        )
        return found


def summarise(trace: Trace, resamples: int = RESAMPLES, seed: int = 0) -> Retrieval:
    """Correlations over a run that generated answers. Raises TraceError where it lacks them."""
    check(trace, ANALYSIS, 0)
    answered = np.asarray(trace.get("score_full", ANALYSIS)) == 1
    outcomes = {name: np.asarray(trace.get(name, ANALYSIS), dtype=np.float64)[answered] for name in OUTCOMES}
    measured = {name: array[answered] for name, array in measures(trace).items()}
    return Retrieval(
        samples=int(answered.sum()),
        left_out=int((~answered).sum()),
        steps=trace.run.steps,
        correlations=tuple(
            _correlation((name, outcome), measured[name], outcomes, resamples, seed)
            for outcome in OUTCOMES
            for name in MEASURES
        ),
        perturbation=np.stack([measured[name] for name in MEASURES]),
        score=outcomes["score"],
        digits=outcomes["digits"],
    )


def measures(trace: Trace) -> dict[str, Floats]:
    """(sample, config) mean over decode steps of each measure, relative to the full run's norms."""

    def get(name: str) -> Floats:
        return np.asarray(trace.get(name, ANALYSIS), dtype=np.float64)

    heads = get("output_norm").sum(axis=(2, 3))[:, None]
    total: Callable[[str], Floats] = lambda name: get(name).sum(axis=(3, 4))  # noqa: E731
    found = {
        "isolated": total("perturbation_isolated") / heads,
        "theta": total("theta") / heads,
        "propagated": total("perturbation_propagated") / heads,
        "drift": get("hidden_drift_l1")[..., -1] / get("hidden_norm")[:, None, :, -1],
        "kl": get("logit_kl"),
        "lost": 1 - get("retained_mass").mean(axis=(3, 4)),
    }
    return {name: array.mean(axis=-1) for name, array in found.items()}


def _correlation(
    names: tuple[str, str], measured: Floats, outcomes: dict[str, Floats], resamples: int, seed: int
) -> Correlation:
    outcome, score = outcomes[names[1]], outcomes["score"]
    deciding = (outcome != outcome[:, :1]).any(axis=1)
    within = spearman(measured[deciding].T, outcome[deciding].T) if deciding.any() else np.empty(0)
    hit, miss = measured[score == 1], measured[score == 0]
    return Correlation(
        *names,
        rho=_rho(measured, outcome),
        interval=_interval(lambda drawn: _rho(measured[drawn], outcome[drawn]), len(outcome), resamples, seed),
        within=float(within.mean()) if len(within) else float("nan"),
        within_interval=_interval(lambda drawn: float(within[drawn].mean()), len(within), resamples, seed),
        deciding=int(deciding.sum()),
        found=float(np.median(hit)) if len(hit) else float("nan"),
        lost=float(np.median(miss)) if len(miss) else float("nan"),
    )


def _rho(measured: Floats, outcome: Floats) -> float:
    """Over all samples and configurations."""
    return float(spearman(measured.reshape(-1), outcome.reshape(-1)))


def _interval(statistic: Callable[[Any], float], samples: int, resamples: int, seed: int) -> Interval:
    """Percentile interval over resampled samples, those left out that leave nothing to rank."""
    if samples < 2:
        return None
    found = np.array([statistic(drawn) for drawn in resample(samples, resamples, seed)])
    held = found[~np.isnan(found)]
    if not len(held):
        return None
    low, high = np.quantile(held, (0.025, 0.975))
    return float(low), float(high)

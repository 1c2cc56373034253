"""L = (1 − S) ‖μ_gone − μ_kept‖₁, head by head: how much goes, and how unlike what stays it is (METHOD: the split).

What a stored mean of the entries that went wins back: corrected configurations against the same uncorrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import with_floor
from perturbkv.analyses.identity import identity
from perturbkv.analyses.measurements import Floats, at_step, values
from perturbkv.analyses.outcomes import Outcome, Outcomes, divergence
from perturbkv.analyses.pairing import common
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import CORRELATION, RATIO, Kind, Scalar, share_of
from perturbkv.analyses.verdicts import equal_isolated, verdicts
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import NONE, ORACLE
from perturbkv.trace import Trace

ANALYSIS = "split"
WHOLE = 1e-12
"""1 − S up to here is what rounding leaves of a sum of attention: L / (1 − S) would be noise."""
_EQUAL = 1e-9
"""Of a ratio's logarithm: nearer to 1 two heads are equal, whatever rounding says."""
SIGNED = Kind(RATIO.freedom)
"""Parts of a variance, of which one can be negative: as unsure as a ratio, on the plain scale."""


@dataclass(frozen=True)
class Parts:
    """Logarithms of one configuration, (sample, layer, head) each; NaN where the head has no L or 1 − S.

    Attributes:
        loss: log L, isolated.
        mass: log (1 − S).
    """

    loss: Floats
    mass: Floats

    @property
    def difference(self) -> Floats:
        """The logarithm of D = ‖μ_gone − μ_kept‖₁."""
        return np.asarray(self.loss - self.mass)

    @property
    def held(self) -> NDArray[np.bool_]:
        """(sample, layer, head) True where all three are numbers."""
        return ~np.isnan(self.loss)


def parts(trace: Trace, config: EvictionConfig, step: int) -> Parts:
    """Of one configuration of a trace. A head is left out where 1 − S is rounding, or L below its noise floor.

    Raises TraceError for what the trace lacks.
    """
    place = trace.config_index(config.label())
    found, floor = with_floor(trace, "isolated", "l1", step)
    mass = 1 - values(trace, "retained_mass", ANALYSIS, step)[:, place]
    there = (mass > WHOLE) & (found[:, place] > floor)
    logs = (np.log(np.where(there, part, np.nan)) for part in (found[:, place], mass))
    return Parts(*logs)


@dataclass(frozen=True)
class Spread:
    """What tells the heads of one sample apart: Var(log L) = Var(log(1 − S)) + Var(log D) + 2 Cov. Means over samples.

    Attributes:
        config: the configuration.
        deviation: of log L over a sample's heads.
        mass, difference, both: the three parts as shares of Var(log L), which sum to 1; `both` is 2 Cov.
        by_mass: (Var(log(1 − S)) + Cov) / Var(log L): the mass' share where the common part is halved.
        correlation: of log(1 − S) and log D.
        heads: of which these are, all samples'.
        left_out: heads of all samples of which nothing went, or too little to tell it from rounding.
    """

    config: EvictionConfig
    deviation: float
    deviation_interval: Scalar
    mass: float
    mass_interval: Scalar
    difference: float
    difference_interval: Scalar
    both: float
    both_interval: Scalar
    by_mass: float
    by_mass_interval: Scalar
    correlation: float
    correlation_interval: Scalar
    heads: int
    left_out: int


def spread(config: EvictionConfig, found: Parts) -> Spread:
    """The parts of the variance over heads, of each sample that has two heads that differ; NaN where none has."""
    each = np.array([_variances(*sides) for sides in zip(found.mass, found.difference, strict=True)])
    first, second, twice = each.T
    whole = first + second + twice
    whole = np.where(whole > 0, whole, np.nan)
    product = np.sqrt(first * second)
    told = {
        "deviation": (np.sqrt(whole), RATIO),
        "mass": (first / whole, RATIO),
        "difference": (second / whole, RATIO),
        "both": (twice / whole, SIGNED),
        "by_mass": ((first + twice / 2) / whole, SIGNED),
        "correlation": (twice / 2 / np.where(product > _EQUAL, product, np.nan), CORRELATION),
    }
    means: dict[str, Any] = {name: _mean(numbers) for name, (numbers, _) in told.items()}
    means |= {f"{name}_interval": intervals.of_mean(numbers, kind) for name, (numbers, kind) in told.items()}
    heads = int(found.held.sum())
    return Spread(config=config, **means, heads=heads, left_out=found.held.size - heads)


def _variances(mass: Floats, difference: Floats) -> tuple[float, float, float]:
    """Var(log(1 − S)), Var(log D) and 2 Cov over the heads of one sample, (layer, head) each."""
    held = ~np.isnan(mass)
    if held.sum() < 2:
        return np.nan, np.nan, np.nan
    (first, common), (_, second) = np.cov(mass[held], difference[held], bias=True)
    return float(first), float(second), float(2 * common)


def _mean(per_sample: Floats) -> float:
    held = per_sample[~np.isnan(per_sample)]
    return float(held.mean()) if len(held) else float("nan")


@dataclass(frozen=True)
class Contest:
    """One configuration over another of the same budget: L's ratio is the product of the other two, exactly.

    Attributes:
        baseline, treatment: the configurations.
        loss, mass, difference: ratios of L, 1 − S and D: geometric means over the heads of each sample, then over
            samples.
        mass_falls, difference_falls: share of heads in which 1 − S, or D, is smaller than the baseline's.
        heads: of all samples, in which both are told; `left_out` the others.
    """

    baseline: EvictionConfig
    treatment: EvictionConfig
    loss: float
    loss_interval: Scalar
    mass: float
    mass_interval: Scalar
    difference: float
    difference_interval: Scalar
    mass_falls: float
    mass_falls_interval: Scalar
    difference_falls: float
    difference_falls_interval: Scalar
    heads: int
    left_out: int


def contest(trace: Trace, baseline: EvictionConfig, treatment: EvictionConfig, step: int) -> Contest:
    """Two configurations of a trace; heads that keep the same entries in both are equal, whatever rounding says.

    Raises TraceError for what the trace lacks.
    """
    first, second = parts(trace, baseline, step), parts(trace, treatment, step)
    same = equal_isolated(trace, *(trace.config_index(one.label()) for one in (baseline, treatment)))
    held = first.held & second.held
    logs = {
        name: np.where(held, np.where(same, 0, getattr(second, name) - getattr(first, name)), np.nan)
        for name in ("loss", "mass", "difference")
    }
    found = {name: _geometric(each) for name, each in logs.items()}
    falls = {f"{name}_falls": _falling(logs[name], held) for name in ("mass", "difference")}
    told: dict[str, Any] = {name: number for name, (number, _) in (found | falls).items()}
    told |= {f"{name}_interval": interval for name, (_, interval) in (found | falls).items()}
    heads = int(held.sum())
    return Contest(baseline, treatment, **told, heads=heads, left_out=held.size - heads)


def _by_sample(each: Floats) -> Floats:
    """(sample,) mean over the heads that have a number, of the samples that have one."""
    flat = each.reshape(len(each), -1)
    flat = flat[~np.isnan(flat).all(axis=1)]
    return np.asarray(np.nanmean(flat, axis=1))


def _geometric(logs: Floats) -> tuple[float, Scalar]:
    """The exponential of the mean over samples of each one's mean over heads."""
    each = _by_sample(logs)
    if not len(each):
        return float("nan"), None
    interval = intervals.scalar(lambda weights: np.exp(weights @ each), len(each), RATIO)
    return float(np.exp(each.mean())), interval


def _falling(logs: Floats, held: NDArray[np.bool_]) -> tuple[float, Scalar]:
    """Mean over samples of each one's share of heads whose ratio is below 1."""
    each = _by_sample(np.where(held, logs < -_EQUAL, np.nan))
    if not len(each):
        return float("nan"), None
    return float(each.mean()), intervals.of_mean(each, share_of(logs[0].size))


@dataclass(frozen=True)
class Prediction:
    """What it costs that the mass of what went is predicted: L over that of the oracle, which knows it.

    Attributes:
        isolated, propagated: Σ over heads and samples; NaN where the oracle's is 0.
    """

    isolated: float
    isolated_interval: Scalar
    propagated: float
    propagated_interval: Scalar


@dataclass(frozen=True)
class Row(Outcome):
    """One correction, against none.

    Attributes:
        kl_ratio: mean KL over the uncorrected one's mean, which single samples can carry.
        kl_falls: share of samples whose KL is lower, by more than two noise floors.
        prediction: against the oracle; None where the trace holds none, and of the oracle itself.
    """

    kl_ratio: float
    kl_ratio_interval: Scalar
    kl_falls: float
    kl_falls_interval: Scalar
    prediction: Prediction | None

    @property
    def name(self) -> str:
        """The correction as it is written: `corrected(mass=stored)`."""
        return str(self.compared.treatment.correction)

    @property
    def oracle(self) -> bool:
        """Whether it knows what no method can know."""
        return self.compared.treatment.correction.name == ORACLE

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        names = ("kl_ratio", "kl_ratio_interval", "kl_falls", "kl_falls_interval", "prediction")
        return {**super().to_dict(), **{name: getattr(self, name) for name in names}}


class Setting(Outcomes[Row]):
    """One configuration and its corrections, methods first, the oracle last; the baseline is uncorrected."""

    @property
    def setting(self) -> str:
        """What all rows share, in words."""
        return common((self.baseline,))


def settings(trace: Trace, shown: Sequence[EvictionConfig], step: int) -> tuple[Setting, ...]:
    """Of each of the uncorrected configurations that are shown those that correct it; none where none does."""
    found = ((config, _corrected(trace, config)) for config in shown)
    return tuple(_setting(trace, config, others, step) for config, others in found if others)


def _corrected(trace: Trace, config: EvictionConfig) -> list[EvictionConfig]:
    uncorrected = ((one, replace(one, correction=Choice(NONE))) for one in trace.run.configs if one.corrected)
    return sorted((one for one, other in uncorrected if other == config), key=lambda one: one.correction.name == ORACLE)


def _setting(trace: Trace, config: EvictionConfig, others: Sequence[EvictionConfig], step: int) -> Setting:
    return Setting(
        baseline=config,
        kl=divergence(trace, ANALYSIS, config, step),
        rows=tuple(_row(trace, config, one, others, step) for one in others),
        identity=identity(trace, [config, *others], step),
    )


def _row(trace: Trace, config: EvictionConfig, one: EvictionConfig, others: Sequence[EvictionConfig], step: int) -> Row:
    oracles = [other for other in others if other.correction.name == ORACLE and other != one]
    prediction = _prediction(trace, oracles[0], one, step) if oracles else None
    return Row.of(trace, ANALYSIS, config, one, step, **_kl(trace, config, one, step), prediction=prediction)


def _prediction(trace: Trace, oracle: EvictionConfig, one: EvictionConfig, step: int) -> Prediction:
    found = head_comparison.summarise(trace, oracle, one, step)
    return Prediction(
        isolated=found.isolated.sum_ratio,
        isolated_interval=found.isolated.sum_ratio_interval,
        propagated=found.propagated.sum_ratio,
        propagated_interval=found.propagated.sum_ratio_interval,
    )


def _kl(trace: Trace, config: EvictionConfig, one: EvictionConfig, step: int) -> dict[str, Any]:
    """Mean KL over the uncorrected mean, and in which share of samples it is lower by more than noise."""
    held = at_step(trace, ANALYSIS, step)
    kl, floor = values(held, "logit_kl", ANALYSIS, step), values(held, "logit_kl_noise_floor", ANALYSIS, step)
    first, second = (kl[:, held.config_index(side.label())] for side in (config, one))
    falls = verdicts(first, second, floor) == 1

    def total(weights: Floats) -> Floats:
        return np.asarray(ratio(weights @ second, weights @ first))

    return {
        "kl_ratio": float(ratio(second.mean(), first.mean())),
        "kl_ratio_interval": intervals.scalar(total, len(first), RATIO),
        "kl_falls": float(falls.mean()),
        "kl_falls_interval": intervals.of_samples(falls),
    }

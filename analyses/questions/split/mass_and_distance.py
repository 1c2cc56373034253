"""Each head's loss L = (1 − S) · D split into its two factors, and how much a stored mean of evicted entries recovers.

1 − S is the attention on evicted entries, D = ‖μ_gone − μ_kept‖₁ how far their mean value is from that of the kept ones
(METHOD: the split). Corrected configurations are compared with the same uncorrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Line, Record, column, derived, interval, record
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import perturbation_and_floor
from perturbkv.analyses.identity import identity
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.outcomes import Outcome, OutcomeSetting, next_token_kl
from perturbkv.analyses.pairing import PairRecord, common
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import (
    CORRELATION,
    RATIO,
    OptionalInterval,
    StatisticKind,
    estimate_mean,
    share_kind,
)
from perturbkv.analyses.verdicts import equal_isolated, verdicts
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import NONE, ORACLE
from perturbkv.trace import Trace

ANALYSIS = "split"
_LEAST_MASS = 1e-12
"""Values of 1 − S below this are rounding errors of a sum of attention: L / (1 − S) would be noise."""
_EQUAL = 1e-9
"""A head is equal in both configurations where the logarithm of its ratio is at most this: that is rounding."""
SIGNED = StatisticKind(RATIO.freedom)
"""A part of a variance, which can be negative: as uncertain as a ratio, on the plain scale."""


@dataclass(frozen=True)
class LogFactors:
    """The logarithms of one configuration's L and of its factors, (sample, layer, head) each; NaN where L is unknown.

    Attributes:
        loss: log L, the isolated perturbation.
        mass: log (1 − S), the attention on evicted entries.
    """

    loss: Floats
    mass: Floats

    @property
    def difference(self) -> Floats:
        """(sample, layer, head) log D, where D = ‖μ_gone − μ_kept‖₁ = L / (1 − S)."""
        return np.asarray(self.loss - self.mass)

    @property
    def known(self) -> NDArray[np.bool_]:
        """(sample, layer, head) True where log L is known (not NaN)."""
        return ~np.isnan(self.loss)


def log_factors(measured: Measurements, config: EvictionConfig) -> LogFactors:
    """Return the logarithms of one configuration; NaN for heads whose 1 − S is rounding, or L below its noise floor.

    Raises TraceError where the trace lacks a variable.
    """
    index = measured.index(config)
    loss, floor = perturbation_and_floor(measured, "isolated", "l1")
    mass = 1 - measured["retained_mass"][:, index]
    known = (mass > _LEAST_MASS) & (loss[:, index] > floor)
    logs = (np.log(np.where(known, values, np.nan)) for values in (loss[:, index], mass))
    return LogFactors(*logs)


@record
class Spread(Record):
    """The variance of log L over a sample's heads in parts, mean over samples: Var(log(1 − S)) + Var(log D) + 2 Cov."""

    SECTION: ClassVar[str] = "split spread"

    config: EvictionConfig = column("an uncorrected configuration")
    deviation: float = column("standard deviation of log L over a sample's heads", heading="#sd of\nlog L")
    deviation_interval: OptionalInterval = interval()
    mass: float = column("Var(log(1 − S)) over Var(log L)", unit="share", heading="#Var\nlog(1−S)")
    mass_interval: OptionalInterval = interval()
    difference: float = column("Var(log D) over Var(log L)", unit="share", heading="#Var\nlog D")
    difference_interval: OptionalInterval = interval()
    both: float = column("2 Cov over Var(log L): with the other two it makes 1", unit="share", heading="#2 Cov")
    both_interval: OptionalInterval = interval()
    by_mass: float = column("`mass` and half of `both`", unit="share", heading="#by mass")
    by_mass_interval: OptionalInterval = interval()
    correlation: float = column("Pearson's correlation of log(1 − S) and log D over heads")
    correlation_interval: OptionalInterval = interval()
    heads: int = column("heads of all samples that these are of")
    left_out: int = column("heads of which nothing goes, or too little to tell from rounding")


def spread(config: EvictionConfig, logs: LogFactors) -> Spread:
    """Return the parts of the variance of log L over heads, mean over the samples with two heads that differ.

    NaN where no sample has two such heads.
    """
    each = np.array([_variances(*factors) for factors in zip(logs.mass, logs.difference, strict=True)])
    first, second, twice = each.T
    whole = first + second + twice
    whole = np.where(whole > 0, whole, np.nan)
    product = np.sqrt(first * second)
    statistics = {
        "deviation": (np.sqrt(whole), RATIO),
        "mass": (first / whole, RATIO),
        "difference": (second / whole, RATIO),
        "both": (twice / whole, SIGNED),
        "by_mass": ((first + twice / 2) / whole, SIGNED),
        "correlation": (twice / 2 / np.where(product > _EQUAL, product, np.nan), CORRELATION),
    }
    means: dict[str, Any] = {}
    for name, (values, kind) in statistics.items():
        mean = estimate_mean(values, kind)
        means |= {name: mean.value, f"{name}_interval": mean.interval}
    heads = int(logs.known.sum())
    return Spread(config=config, **means, heads=heads, left_out=logs.known.size - heads)


def _variances(mass: Floats, difference: Floats) -> tuple[float, float, float]:
    """Return Var(log(1 − S)), Var(log D) and 2 Cov over the heads of one sample, from (layer, head) logarithms.

    NaN where fewer than two heads have a number.
    """
    known = ~np.isnan(mass)
    if known.sum() < 2:
        return np.nan, np.nan, np.nan
    (first, common), (_, second) = np.cov(mass[known], difference[known], bias=True)
    return float(first), float(second), float(2 * common)


@record
class Contest(PairRecord, Record):
    """A treatment compared with a baseline of the same budget: L's ratio is exactly 1 − S's times D's."""

    SECTION: ClassVar[str] = "split contest"

    baseline: EvictionConfig = column("what is compared with")
    treatment: EvictionConfig = column("what is compared")
    loss: float = column("L, isolated, over the baseline's: geometric mean of heads, then of samples", heading="#L")
    loss_interval: OptionalInterval = interval()
    mass: float = column("1 − S over the baseline's, likewise; `loss` is `mass` times `difference`", heading="#1 − S")
    mass_interval: OptionalInterval = interval()
    difference: float = column("D over the baseline's, likewise", heading="#D")
    difference_interval: OptionalInterval = interval()
    mass_falls: float = column(
        "share of heads whose 1 − S is below the baseline's, mean over samples", unit="share",
        heading="#heads where\n1−S falls",
    )  # fmt: skip
    mass_falls_interval: OptionalInterval = interval()
    difference_falls: float = column(
        "share of heads whose D is below the baseline's, mean over samples", unit="share",
        heading="#heads where\nD falls",
    )  # fmt: skip
    difference_falls_interval: OptionalInterval = interval()
    heads: int = column("heads of all samples in which both sides lose something")
    left_out: int = column("the other heads")


def contest(measured: Measurements, baseline: EvictionConfig, treatment: EvictionConfig) -> Contest:
    """Return the ratios of L, 1 − S and D, treatment over baseline; 1 for heads that keep the same entries in both.

    Raises TraceError where the trace lacks a variable.
    """
    first, second = log_factors(measured, baseline), log_factors(measured, treatment)
    same = equal_isolated(measured.trace, measured.index(baseline), measured.index(treatment))
    known = first.known & second.known
    logs = {
        name: np.where(known, np.where(same, 0, getattr(second, name) - getattr(first, name)), np.nan)
        for name in ("loss", "mass", "difference")
    }
    estimates = {name: _geometric_mean(each) for name, each in logs.items()}
    estimates |= {f"{name}_falls": _falling_share(logs[name], known) for name in ("mass", "difference")}
    numbers: dict[str, Any] = {name: number for name, (number, _) in estimates.items()}
    numbers |= {f"{name}_interval": interval for name, (_, interval) in estimates.items()}
    heads = int(known.sum())
    return Contest(baseline=baseline, treatment=treatment, **numbers, heads=heads, left_out=known.size - heads)


def _sample_means(values: Floats) -> Floats:
    """Return (sample,) means over heads of (sample, layer, head) values, without NaN.

    Samples whose heads are all NaN are left out.
    """
    flat = values.reshape(len(values), -1)
    flat = flat[~np.isnan(flat).all(axis=1)]
    return np.asarray(np.nanmean(flat, axis=1))


def _geometric_mean(logs: Floats) -> tuple[float, OptionalInterval]:
    """Return the geometric mean over heads, then samples, of (sample, layer, head) logarithms, with its interval."""
    each = _sample_means(logs)
    if not len(each):
        return float("nan"), None
    interval = intervals.of_statistic(lambda weights: np.exp(weights @ each), len(each), RATIO)
    return float(np.exp(each.mean())), interval


def _falling_share(logs: Floats, known: NDArray[np.bool_]) -> tuple[float, OptionalInterval]:
    """Return the share of `known` heads with a ratio below 1 (log < 0), mean over samples, with its interval."""
    each = _sample_means(np.where(known, logs < -_EQUAL, np.nan))
    if not len(each):
        return float("nan"), None
    return float(each.mean()), intervals.of_mean(each, share_kind(logs[0].size))


@record
class Prediction(Record):
    """The cost of predicting how much attention the evicted entries have: L over that of the oracle, which knows it."""

    SECTION: ClassVar[str] = "prediction"

    isolated_cost: float = column(
        "isolated L1 over the oracle's, summed over heads and samples; NaN where the oracle's is 0",
        key="isolated",
        heading="#isolated\n/ oracle",
    )
    isolated_cost_interval: OptionalInterval = column("over samples", key="isolated_interval")
    propagated_cost: float = column(
        "propagated L1 over the oracle's, likewise", key="propagated", heading="#propagated\n/ oracle"
    )
    propagated_cost_interval: OptionalInterval = column("over samples", key="propagated_interval")


@record
class Row(Outcome):
    """A corrected configuration compared with the same one uncorrected."""

    SECTION: ClassVar[str] = "correction"

    kl_ratio: float = column(
        "mean KL over the uncorrected one's mean, which single samples can carry", heading="#mean KL\nover none"
    )
    kl_ratio_interval: OptionalInterval = interval()
    kl_falls: float = column(
        "share of samples whose KL is below the baseline's by more than two noise floors", unit="share",
        heading="#prompts of\nless KL",
    )  # fmt: skip
    kl_falls_interval: OptionalInterval = column("exact")
    prediction: Prediction | None = column(
        "against the oracle; null where the trace holds none, and of the oracle itself"
    )

    @derived()
    def name(self) -> str:
        """The correction, as it is written: `corrected(mass=stored)`."""
        return str(self.treatment.correction)


@record
class Setting(OutcomeSetting):
    """One uncorrected configuration, the baseline, and its corrections: methods first, the oracle last."""

    SECTION: ClassVar[str] = "split setting"

    baseline: EvictionConfig = column("the uncorrected configuration, which every row is compared with")
    rows: tuple[Row, ...] = column("methods, then the oracle")

    @property
    def setting(self) -> str:
        """The choices that all rows share, as a label writes them."""
        return common((self.baseline,))

    def lines(self) -> Sequence[Line]:
        """Return the uncorrected line, then a line per correction with the cost of predicting the mass."""
        rows = [Line(row.name, (row, *([row.prediction] if row.prediction else []))) for row in self.rows]
        return [Line("none (= 1)", (self,)), *rows]


def settings(measured: Measurements, shown: Sequence[EvictionConfig], step: int) -> tuple[Setting, ...]:
    """Return a setting per uncorrected configuration in `shown` of which the trace has corrected forms."""
    groups = ((config, _corrections(measured.trace, config)) for config in shown)
    return tuple(_setting(measured, config, corrected, step) for config, corrected in groups if corrected)


def _corrections(trace: Trace, config: EvictionConfig) -> list[EvictionConfig]:
    """Return the trace's corrected forms of an uncorrected configuration, the oracle last."""
    uncorrected = ((one, replace(one, correction=Choice(NONE))) for one in trace.run.configs if one.corrected)
    same = [corrected for corrected, plain in uncorrected if plain == config]
    return sorted(same, key=lambda one: one.correction.name == ORACLE)


def _setting(measured: Measurements, config: EvictionConfig, corrected: Sequence[EvictionConfig], step: int) -> Setting:
    """Return the setting of an uncorrected configuration and its corrected forms."""
    return Setting(
        baseline=config,
        **next_token_kl(measured.trace, ANALYSIS, config, step),
        rows=tuple(_row(measured, config, one, corrected, step) for one in corrected),
        identity=identity(measured.trace, [config, *corrected], step),
    )


def _row(
    measured: Measurements,
    config: EvictionConfig,
    treatment: EvictionConfig,
    corrected: Sequence[EvictionConfig],
    step: int,
) -> Row:
    """Return a corrected configuration compared with the uncorrected `config`, and with the oracle in `corrected`."""
    trace = measured.trace
    oracles = [other for other in corrected if other.correction.name == ORACLE and other != treatment]
    prediction = _prediction(trace, oracles[0], treatment, step) if oracles else None
    return Row.compare(
        trace, ANALYSIS, config, treatment, step, **_kl_columns(measured, config, treatment), prediction=prediction
    )


def _prediction(trace: Trace, oracle: EvictionConfig, treatment: EvictionConfig, step: int) -> Prediction:
    """Return the ratios of a correction's isolated and propagated L1 to those of the oracle correction."""
    compared = head_comparison.summarise(trace, oracle, treatment, step)
    return Prediction(
        isolated_cost=compared.isolated.sum_ratio,
        isolated_cost_interval=compared.isolated.sum_ratio_interval,
        propagated_cost=compared.propagated.sum_ratio,
        propagated_cost_interval=compared.propagated.sum_ratio_interval,
    )


def _kl_columns(measured: Measurements, config: EvictionConfig, treatment: EvictionConfig) -> dict[str, Any]:
    """Return the columns `kl_ratio` and `kl_falls` of a correction, with their intervals."""
    first, second = (measured["logit_kl"][:, measured.index(side)] for side in (config, treatment))
    falls = verdicts(first, second, measured["logit_kl_noise_floor"]) == 1

    def mean_ratio(weights: Floats) -> Floats:
        return np.asarray(ratio(weights @ second, weights @ first))

    return {
        "kl_ratio": float(ratio(second.mean(), first.mean())),
        "kl_ratio_interval": intervals.of_statistic(mean_ratio, len(first), RATIO),
        "kl_falls": float(falls.mean()),
        "kl_falls_interval": intervals.of_share(falls),
    }

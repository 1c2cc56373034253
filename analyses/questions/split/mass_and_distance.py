"""L = (1 − S) ‖μ_gone − μ_kept‖₁, head by head, and how much a stored mean of the evicted entries recovers.

A head loses by how much attention goes, 1 − S, and by how unlike the rest it is, D = ‖μ_gone − μ_kept‖₁ (METHOD: the
split). Corrected configurations are compared with the same uncorrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from perturbkv.analyses.stats.intervals import CORRELATION, RATIO, OptionalInterval, StatisticKind, share_kind
from perturbkv.analyses.verdicts import equal_isolated, verdicts
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import NONE, ORACLE
from perturbkv.trace import Trace

ANALYSIS = "split"
_LEAST_MASS = 1e-12
"""Smaller 1 − S are what rounding leaves of a sum of attention: L / (1 − S) would be noise."""
_EQUAL = 1e-9
"""Logarithms of ratios up to here are rounding: the two heads are equal."""
SIGNED = StatisticKind(RATIO.freedom)
"""Parts of a variance, one of which can be negative: as uncertain as a ratio, on the plain scale."""


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
    def known(self) -> NDArray[np.bool_]:
        """(sample, layer, head) True where all three are numbers."""
        return ~np.isnan(self.loss)


def parts(measured: Measurements, config: EvictionConfig) -> Parts:
    """Return the parts of one configuration; NaN for heads whose 1 − S is rounding, or L below its noise floor.

    Raises TraceError for what the trace lacks.
    """
    index = measured.index(config)
    loss, floor = perturbation_and_floor(measured, "isolated", "l1")
    mass = 1 - measured["retained_mass"][:, index]
    there = (mass > _LEAST_MASS) & (loss[:, index] > floor)
    logs = (np.log(np.where(there, part, np.nan)) for part in (loss[:, index], mass))
    return Parts(*logs)


@record
class Spread(Record):
    """Why the heads of a sample differ: Var(log L) = Var(log(1 − S)) + Var(log D) + 2 Cov. Means over samples."""

    SECTION = "split spread"

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


def spread(config: EvictionConfig, logs: Parts) -> Spread:
    """Return the parts of the variance over heads, of each sample that has two heads that differ; NaN if none has."""
    each = np.array([_variances(*sides) for sides in zip(logs.mass, logs.difference, strict=True)])
    first, second, twice = each.T
    whole = first + second + twice
    whole = np.where(whole > 0, whole, np.nan)
    product = np.sqrt(first * second)
    numbers = {
        "deviation": (np.sqrt(whole), RATIO),
        "mass": (first / whole, RATIO),
        "difference": (second / whole, RATIO),
        "both": (twice / whole, SIGNED),
        "by_mass": ((first + twice / 2) / whole, SIGNED),
        "correlation": (twice / 2 / np.where(product > _EQUAL, product, np.nan), CORRELATION),
    }
    means: dict[str, Any] = {name: _mean(values) for name, (values, _) in numbers.items()}
    means |= {f"{name}_interval": intervals.of_mean(values, kind) for name, (values, kind) in numbers.items()}
    heads = int(logs.known.sum())
    return Spread(config=config, **means, heads=heads, left_out=logs.known.size - heads)


def _variances(mass: Floats, difference: Floats) -> tuple[float, float, float]:
    """Return Var(log(1 − S)), Var(log D) and 2 Cov over the heads of one sample, (layer, head) each."""
    known = ~np.isnan(mass)
    if known.sum() < 2:
        return np.nan, np.nan, np.nan
    (first, common), (_, second) = np.cov(mass[known], difference[known], bias=True)
    return float(first), float(second), float(2 * common)


def _mean(per_sample: Floats) -> float:
    known = per_sample[~np.isnan(per_sample)]
    return float(known.mean()) if len(known) else float("nan")


@record
class Contest(PairRecord, Record):
    """One configuration over another of the same budget: L's ratio is the product of the other two, exactly."""

    SECTION = "split contest"

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
    """Return a pair's contest; heads that keep the same entries in both are equal, whatever rounding says.

    Raises TraceError for what the trace lacks.
    """
    first, second = parts(measured, baseline), parts(measured, treatment)
    same = equal_isolated(measured.trace, measured.index(baseline), measured.index(treatment))
    known = first.known & second.known
    logs = {
        name: np.where(known, np.where(same, 0, getattr(second, name) - getattr(first, name)), np.nan)
        for name in ("loss", "mass", "difference")
    }
    numbers = {name: _geometric(each) for name, each in logs.items()}
    numbers |= {f"{name}_falls": _falling_share(logs[name], known) for name in ("mass", "difference")}
    shown: dict[str, Any] = {name: number for name, (number, _) in numbers.items()}
    shown |= {f"{name}_interval": interval for name, (_, interval) in numbers.items()}
    heads = int(known.sum())
    return Contest(baseline=baseline, treatment=treatment, **shown, heads=heads, left_out=known.size - heads)


def _by_sample(each: Floats) -> Floats:
    """Return (sample,) means over the heads that have a number, of the samples that have one."""
    flat = each.reshape(len(each), -1)
    flat = flat[~np.isnan(flat).all(axis=1)]
    return np.asarray(np.nanmean(flat, axis=1))


def _geometric(logs: Floats) -> tuple[float, OptionalInterval]:
    """Return the exponential of the mean over samples of each one's mean over heads."""
    each = _by_sample(logs)
    if not len(each):
        return float("nan"), None
    interval = intervals.of_statistic(lambda weights: np.exp(weights @ each), len(each), RATIO)
    return float(np.exp(each.mean())), interval


def _falling_share(logs: Floats, known: NDArray[np.bool_]) -> tuple[float, OptionalInterval]:
    """Return the mean over samples of each one's share of heads whose ratio is below 1."""
    each = _by_sample(np.where(known, logs < -_EQUAL, np.nan))
    if not len(each):
        return float("nan"), None
    return float(each.mean()), intervals.of_mean(each, share_kind(logs[0].size))


@record
class Prediction(Record):
    """Cost of predicting the mass of the evicted entries: L over that of the oracle, which knows it."""

    SECTION = "prediction"

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
    """One correction, against none."""

    SECTION = "correction"

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

    @property
    def oracle(self) -> bool:
        """True for the oracle, which knows what no method can know."""
        return self.treatment.correction.name == ORACLE


@record
class Setting(OutcomeSetting):
    """One configuration and its corrections, methods first, the oracle last; the baseline is uncorrected."""

    SECTION = "split setting"

    baseline: EvictionConfig = column("the uncorrected configuration, which every row is compared with")
    rows: tuple[Row, ...] = column("methods, then the oracle")

    @property
    def setting(self) -> str:
        """The choices that all rows share, as a label writes them."""
        return common((self.baseline,))

    def lines(self) -> Sequence[Line]:
        """Return the line without correction, then one per correction with what predicting the mass costs."""
        rows = [Line(row.name, (row, *([row.prediction] if row.prediction else []))) for row in self.rows]
        return [Line("none (= 1)", (self,)), *rows]


def settings(measured: Measurements, shown: Sequence[EvictionConfig], step: int) -> tuple[Setting, ...]:
    """Return, for each uncorrected configuration that is shown, those that correct it; none where none does."""
    groups = ((config, _corrected(measured.trace, config)) for config in shown)
    return tuple(_setting(measured, config, corrected, step) for config, corrected in groups if corrected)


def _corrected(trace: Trace, config: EvictionConfig) -> list[EvictionConfig]:
    uncorrected = ((one, replace(one, correction=Choice(NONE))) for one in trace.run.configs if one.corrected)
    same = [corrected for corrected, plain in uncorrected if plain == config]
    return sorted(same, key=lambda one: one.correction.name == ORACLE)


def _setting(measured: Measurements, config: EvictionConfig, corrected: Sequence[EvictionConfig], step: int) -> Setting:
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
    trace = measured.trace
    oracles = [other for other in corrected if other.correction.name == ORACLE and other != treatment]
    prediction = _prediction(trace, oracles[0], treatment, step) if oracles else None
    return Row.compare(
        trace, ANALYSIS, config, treatment, step, **_kl(measured, config, treatment), prediction=prediction
    )


def _prediction(trace: Trace, oracle: EvictionConfig, treatment: EvictionConfig, step: int) -> Prediction:
    compared = head_comparison.summarise(trace, oracle, treatment, step)
    return Prediction(
        isolated_cost=compared.isolated.sum_ratio,
        isolated_cost_interval=compared.isolated.sum_ratio_interval,
        propagated_cost=compared.propagated.sum_ratio,
        propagated_cost_interval=compared.propagated.sum_ratio_interval,
    )


def _kl(measured: Measurements, config: EvictionConfig, treatment: EvictionConfig) -> dict[str, Any]:
    """Return mean KL over the uncorrected one's mean, and the share of samples in which KL is lower beyond noise."""
    first, second = (measured["logit_kl"][:, measured.index(side)] for side in (config, treatment))
    falls = verdicts(first, second, measured["logit_kl_noise_floor"]) == 1

    def total(weights: Floats) -> Floats:
        return np.asarray(ratio(weights @ second, weights @ first))

    return {
        "kl_ratio": float(ratio(second.mean(), first.mean())),
        "kl_ratio_interval": intervals.of_statistic(total, len(first), RATIO),
        "kl_falls": float(falls.mean()),
        "kl_falls_interval": intervals.of_share(falls),
    }

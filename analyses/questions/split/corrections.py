"""What a stored mean of the entries that went wins back: corrected configurations against the same uncorrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.identity import identity
from perturbkv.analyses.measurements import Floats, at_step, values
from perturbkv.analyses.naming import common
from perturbkv.analyses.outcomes import Outcome, Outcomes, divergence
from perturbkv.analyses.questions.split.mass_and_distance import ANALYSIS
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import RATIO, Scalar
from perturbkv.analyses.verdicts import verdicts
from perturbkv.configs.choice import Choice
from perturbkv.configs.correction import NONE, ORACLE
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace


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

"""What one configuration does against another, from the heads to the next token: one line of several tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses import heads, intervals, layers
from perturbkv.analyses.heads import HeadComparison
from perturbkv.analyses.intervals import Scalar
from perturbkv.analyses.numbers import at
from perturbkv.analyses.reading import at_step, values
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace


@dataclass(frozen=True)
class Divergence:
    """KL(full ‖ evicted) of the next token's distribution, in nat: the median over samples, with its interval."""

    median: float
    interval: Scalar


@dataclass(frozen=True)
class Outcome:
    """One configuration against a baseline.

    Attributes:
        compared: its heads against the baseline's.
        drift_ratio: mean drift after the last layer over the baseline's; NaN where that does not drift.
        drift_ratio_interval: over samples.
        kl: of the next token.
    """

    compared: HeadComparison
    drift_ratio: float
    drift_ratio_interval: Scalar
    kl: Divergence

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        return {
            **self.compared.to_dict(),
            "drift_ratio": self.drift_ratio,
            "drift_ratio_interval": self.drift_ratio_interval,
            "kl_median": self.kl.median,
            "kl_median_interval": self.kl.interval,
        }


def outcome(trace: Trace, analysis: str, baseline: EvictionConfig, config: EvictionConfig, step: int) -> Outcome:
    """What a configuration does against the baseline. Raises as `heads.summarise` and `layers.summarise`."""
    drift = layers.summarise(trace, baseline, config, step=step)
    return Outcome(
        compared=heads.summarise(trace, baseline, config, step),
        drift_ratio=float(drift.ratio[-1]),
        drift_ratio_interval=at(drift.ratio_interval, -1),
        kl=divergence(trace, analysis, config, step),
    )


def divergence(trace: Trace, analysis: str, config: EvictionConfig, step: int) -> Divergence:
    """KL of one configuration. Raises TraceError, ConfigError."""
    held = at_step(trace, analysis, step)
    found = values(held, "logit_kl", analysis, step)[:, [held.config_index(config.label())]]
    return Divergence(float(np.median(found)), at(intervals.of_medians(found), 0))

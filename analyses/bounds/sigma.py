"""Three readings of σ per configuration, layer and head, and where it is at most 0.5 (METHOD: Assumption 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import EVIDENCE, Floats, at_step, held_shares, values
from perturbkv.analyses.pairing import of_selection
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import Scalar, rare_share_of
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace

ANALYSIS = "assumption"
READINGS = {"sigma_topk": "top ⌊αb⌋ of A", "sigma_stage1": "stage 1, window", "retained_mass": "S: all that is kept"}
"""Variable -> what is summed: as the paper states σ, as the selection's first stage really holds it, and the whole
kept set, which the paper's figure 4 plots (METHOD: Assumption 1)."""


@dataclass(frozen=True)
class Reading:
    """One reading of σ for one configuration.

    Attributes:
        variable: its name in the trace.
        mean: (layer, head) σ, mean over samples.
        below: (layer, head) in how many samples σ ≤ 0.5.
        samples: of how many.
        share: of (sample, head) with σ > 0.5, in [0, 1], with its interval over samples.
        layer_share: (layer,) the same within each layer.
    """

    variable: str
    mean: Floats
    below: NDArray[np.int64]
    samples: int
    share: float
    share_interval: Scalar
    layer_share: Floats

    @property
    def failing(self) -> NDArray[np.bool_]:
        """(layer, head) True where the mean σ is at most 0.5."""
        return self.mean <= EVIDENCE

    def to_dict(self, named: Callable[[int], int]) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; the heads below are listed, layers by what `named` says."""
        document: dict[str, Any] = plain(
            {
                "share_above_half": self.share,
                "share_above_half_interval": self.share_interval,
                "share_above_half_by_layer": self.layer_share,
                "heads_at_most_half": [
                    {
                        "layer": named(layer),
                        "head": head,
                        "sigma": self.mean[layer, head],
                        "samples": self.below[layer, head],
                    }
                    for layer, head in np.argwhere(self.failing).tolist()
                ],  # fmt: skip
                "sigma": self.mean,
            }
        )
        return document


@dataclass(frozen=True)
class ConfigAssumption:
    """One configuration: budget and α.

    Attributes:
        config: the configuration.
        held: entries that its cache holds over those of the full cache; NaN where the trace does not tell.
        readings: variable -> reading, in the order of `READINGS`.
    """

    config: EvictionConfig
    held: float
    readings: dict[str, Reading]

    def to_dict(self, named: Callable[[int], int]) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers, layers by what `named` says."""
        told: dict[str, Any] = plain({"config": self.config, "held_over_full": self.held})
        return {**told, **{name: reading.to_dict(named) for name, reading in self.readings.items()}}


def sigmas(trace: Trace, selection: str, step: int) -> tuple[ConfigAssumption, ...]:
    """The three readings of σ for every configuration of a selection, by α, then budget.

    Raises TraceError where the trace holds none, and TraceError and ConfigError as `reading.at_step`.
    """
    held = at_step(trace, ANALYSIS, step)
    places = of_selection(held.run, selection)
    sigma = {name: values(held, name, ANALYSIS, step) for name in READINGS}
    shares = held_shares(held, ANALYSIS)
    return tuple(
        ConfigAssumption(
            held.run.configs[place],
            float(shares[place]),
            {name: _reading(name, array[:, place]) for name, array in sigma.items()},
        )
        for place in places
    )


def _reading(variable: str, sigma: Floats) -> Reading:
    above = sigma > EVIDENCE
    return Reading(
        variable=variable,
        mean=sigma.mean(axis=0),
        below=(~above).sum(axis=0),
        samples=len(sigma),
        share=float(above.mean()),
        share_interval=intervals.of_mean(above.mean(axis=(1, 2)), rare_share_of(above[0].size)),
        layer_share=above.mean(axis=(0, 2)),
    )

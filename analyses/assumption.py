"""Does Assumption 1 hold? Both readings of σ per layer and head, and where it is at most 0.5 (paper, figure 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.arithmetic import plain
from perturbkv.analyses.bootstrap import RESAMPLES, Interval, mean_interval
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.pairing import of_selection
from perturbkv.analyses.reading import EVIDENCE, Floats, check, values
from perturbkv.trace import Trace

ANALYSIS = "assumption"
READINGS = {"sigma_topk": "top ⌊αb⌋ of A", "sigma_stage1": "stage 1, window"}
"""Variable -> what σ sums: as the paper states it, and as the selection really holds it (METHOD: Assumption 1)."""


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
    share_interval: Interval
    layer_share: Floats

    @property
    def failing(self) -> NDArray[np.bool_]:
        """(layer, head) True where the mean σ is at most 0.5."""
        return self.mean <= EVIDENCE

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; the heads below are listed."""
        document: dict[str, Any] = plain(
            {
                "share_above_half": self.share,
                "share_above_half_interval": self.share_interval,
                "share_above_half_by_layer": self.layer_share,
                "heads_at_most_half": [
                    {"layer": layer, "head": head, "sigma": self.mean[layer, head], "samples": self.below[layer, head]}
                    for layer, head in np.argwhere(self.failing).tolist()
                ],
                "sigma": self.mean,
            }
        )
        return document


@dataclass(frozen=True)
class ConfigAssumption:
    """One configuration: budget and α.

    Attributes:
        label: of the configuration.
        alpha: its α.
        readings: variable -> reading, in the order of `READINGS`.
    """

    label: str
    alpha: float
    readings: dict[str, Reading]


@dataclass(frozen=True)
class Assumption:
    """Assumption 1 for every budget and α of one selection.

    Attributes:
        selection: whose stage 1 is looked at.
        configs: by α, then budget.
        step: decode step looked at.
        identity: of the run.
    """

    selection: str
    configs: tuple[ConfigAssumption, ...]
    step: int
    identity: RunIdentity

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        return {
            "selection": self.selection,
            "step": self.step,
            "configurations": [
                {"config": config.label, **{name: reading.to_dict() for name, reading in config.readings.items()}}
                for config in self.configs
            ],
        }


def summarise(
    trace: Trace, selection: str = "two-stage", step: int = 0, resamples: int = RESAMPLES, seed: int = 0
) -> Assumption:
    """Both readings of σ for every configuration of a selection.

    Raises TraceError where the trace holds none, and TraceError and ConfigError as `reading.check`.
    """
    check(trace, ANALYSIS, step)
    places, labels = of_selection(trace.run, selection), trace.run.labels()
    sigma = {name: values(trace, name, ANALYSIS, step) for name in READINGS}
    configs = tuple(
        ConfigAssumption(
            labels[place],
            trace.run.configs[place].alpha,
            {name: _reading(name, array[:, place], resamples, seed) for name, array in sigma.items()},
        )
        for place in places
    )
    return Assumption(selection, configs, step, identity(trace, [labels[place] for place in places]))


def _reading(variable: str, sigma: Floats, resamples: int, seed: int) -> Reading:
    above = sigma > EVIDENCE
    return Reading(
        variable=variable,
        mean=sigma.mean(axis=0),
        below=(~above).sum(axis=0),
        samples=len(sigma),
        share=float(above.mean()),
        share_interval=mean_interval(above.mean(axis=(1, 2)), resamples, seed),
        layer_share=above.mean(axis=(0, 2)),
    )

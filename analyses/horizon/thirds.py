"""The decode steps that each sample has, and the first and last third of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats, measured_steps, values
from perturbkv.errors import ConfigError
from perturbkv.trace import Trace

ANALYSIS = "horizon"
LEAST_STEPS = 3


@dataclass(frozen=True)
class Steps:
    """Which steps each sample has: `held` (sample, step), and of those of three steps or more the two thirds."""

    held: NDArray[np.bool_]

    @property
    def long(self) -> NDArray[np.bool_]:
        """(sample,) True for three steps or more."""
        return np.asarray(self.held.sum(axis=1) >= LEAST_STEPS)

    def thirds(self, *arrays: Floats) -> tuple[list[Floats], list[Floats]]:
        """Means of (sample, step, …) arrays over the first and over the last third of the steps: (long sample, …).

        Each long sample has thirds of its own steps.
        """
        first, last = (
            [np.einsum("st,st...->s...", third, array[self.long]) for array in arrays] for third in self._weights()
        )
        return first, last

    def _weights(self) -> tuple[Floats, Floats]:
        """(long sample, step) what each step weighs in the first and in the last third."""
        counts = self.held[self.long].sum(axis=1)
        step, third = np.arange(self.held.shape[1]), (counts // 3)[:, None]
        last = (step >= counts[:, None] - third) & (step < counts[:, None])
        return (step < third) / third, last / third


def steps_of(trace: Trace) -> Steps:
    """The steps of a trace's complete samples. Raises ConfigError where no text has three of them."""
    counts = measured_steps(trace)
    if counts.max() < LEAST_STEPS:
        msg = f"{ANALYSIS} needs at least {LEAST_STEPS} decode steps, got a trace of {counts.max()}; use --steps 32"
        raise ConfigError(msg)
    return Steps(np.arange(counts.max()) < counts[:, None])


def taken(trace: Trace, name: str, steps: Steps, config: int | None = None) -> Floats:
    """(sample, step, …) of one configuration, 0 at the steps that a sample has not: sums leave these out."""
    array = values(trace, name, ANALYSIS)
    array = (array if config is None else array[:, config])[:, : steps.held.shape[1]]
    held = steps.held.reshape(*steps.held.shape, *[1] * (array.ndim - 2))
    return np.where(held, array, 0.0)

"""Outcomes of measured mixtures as arrays over samples, and by how much of the baseline's they differ from it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import RATIO, Band, difference_of
from perturbkv.configs.mixture import Mixture
from perturbkv.configs.patching import Coalition, Game
from perturbkv.errors import ConfigError, FailedRunError
from perturbkv.storage.patching_file import SwapStore
from perturbkv.storage.swap_rows import SwapRow


class Measured:
    """What a store holds of complete samples at one decode step.

    Args:
        store: of measurements.
        game: whose mixtures they are.
        step: decode step looked at.

    Raises FailedRunError where no sample is complete, ConfigError where none has the step.
    """

    def __init__(self, store: SwapStore, game: Game, step: int = 0) -> None:
        complete = [name for name, rows in store.rows.items() if game.none in rows and name not in store.failed]
        if not complete:
            raise FailedRunError(str(store.path or "the measurements"), store.failed)
        self.store, self.game, self.step = store, game, step
        self.samples = [name for name in complete if step < len(store.rows[name][game.none].values["drift"])]
        self.ended = len(complete) - len(self.samples)
        if not self.samples:
            msg = (
                f"expected a step that some sample has, got {step}; --steps {step + 1} asks for it, as far as texts go"
            )
            raise ConfigError(msg)

    def only(self, places: Sequence[int] | NDArray[np.int64]) -> Measured:
        """The same of some of the samples, by their places."""
        found = copy.copy(self)
        found.samples = [self.samples[place] for place in places]
        return found

    def rows(self, mixture: Mixture) -> list[SwapRow]:
        """One of each sample."""
        return [self.store.rows[name][mixture] for name in self.samples]

    def outcome(self, mixture: Mixture, name: str) -> Floats:
        """(sample,) of one of `PER_STEP`, or `score`."""
        rows = self.rows(mixture)
        return np.array([row.score if name == "score" else row.values[name][self.step] for row in rows])

    def coalition(self, coalition: Coalition, name: str) -> Floats:
        """The same of what a coalition of players keeps."""
        return self.outcome(self.game.mixture(coalition), name)

    def heads(self, mixture: Mixture) -> Floats:
        """(sample, layer, head) propagated L1 perturbation of a mixture whose heads were asked for."""
        return np.array([row.heads[self.step] for row in self.rows(mixture) if row.heads is not None])

    def of_heads(self, name: str) -> Floats:
        """(sample, layer, head) `head_floors` or `head_norms`."""
        return np.array([self.store.head_floors(sample, name)[self.step] for sample in self.samples])


def change(differences: Floats, baseline: Floats, outcome: str) -> tuple[Floats, Band]:
    """By how much outcomes (…, sample) differ from the baseline's (sample,), with intervals over samples.

    Of drift and KL Σ differences over Σ baseline, as a share: −0.1 is a tenth less. It is a ratio of sums less 1, and
    has the interval of one. Of scores the mean difference. NaN where the baseline's sum is 0.
    """
    samples, scored = len(baseline), outcome == "score"
    flat = differences.reshape(-1, samples)

    def statistic(weights: Floats) -> Floats:
        if scored:
            return np.asarray(weights @ flat.T)
        below = weights @ baseline
        return np.asarray((weights @ (baseline + flat).T) / np.where(below == 0, np.nan, below)[:, None])

    value = statistic(np.full((1, samples), 1 / samples))[0].reshape(differences.shape[:-1])
    found = intervals.band(statistic, samples, difference_of(1) if scored else RATIO)
    shift = 0.0 if scored else 1.0
    if found is None:
        return value - shift, None
    low, high = (np.asarray(end).reshape(value.shape) - shift for end in (found.low, found.high))
    return value - shift, intervals.Interval(low, high, found.kind)


def scale(baseline: Floats, outcome: str) -> float:
    """What a sum over samples of differences is divided by, to be in the unit of `change`."""
    return float(len(baseline) if outcome == "score" else baseline.sum())


def better(outcome: str) -> int:
    """1 where more is better, −1 where less is."""
    return 1 if outcome == "score" else -1


def all_of(measured: Measured, coalitions: Sequence[Coalition], outcome: str) -> dict[Coalition, Floats]:
    """Coalition -> (sample,) outcomes."""
    return {coalition: measured.coalition(coalition, outcome) for coalition in coalitions}

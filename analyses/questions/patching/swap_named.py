"""Mixtures that were asked for by name against the baseline alone: heads, drift, KL, answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.heads.head_kind import HeadKind, compare
from perturbkv.analyses.outcomes import Divergence
from perturbkv.analyses.questions.patching.swap_values import Measured, change
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import Scalar
from perturbkv.analyses.text import at
from perturbkv.configs.mixture import Mixture


@dataclass(frozen=True)
class Named:
    """One mixture against the baseline's kept sets everywhere.

    Attributes:
        name: as it was asked for.
        mixture: who has which kept set.
        held: entries of its cache over those of the full one, mean over samples.
        heads: propagated L1 perturbation, head by head.
        drift_ratio: Σ over samples of the last layer's drift over the baseline's.
        kl: of the next token.
        top1: share of samples whose next token is the full run's.
        score: mean of the answers'; NaN where none was asked for.
        score_change: over the baseline's, likewise.
    """

    name: str
    mixture: Mixture
    held: float
    heads: HeadKind
    drift_ratio: float
    drift_ratio_interval: Scalar
    kl: Divergence
    top1: float
    score: float
    score_change: float
    score_change_interval: Scalar

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = {
            "name": self.name,
            "mixture": str(self.mixture),
            "held_over_full": self.held,
            "propagated": self.heads.to_dict(),
            "drift_ratio": self.drift_ratio,
            "drift_ratio_interval": self.drift_ratio_interval,
            "kl_median": self.kl.median,
            "kl_median_interval": self.kl.interval,
            "top1": self.top1,
            "score": self.score,
            "score_change": self.score_change,
            "score_change_interval": self.score_change_interval,
        }
        numbers: dict[str, Any] = plain(found)
        return numbers


def named(measured: Measured, name: str, mixture: Mixture) -> Named:
    """What a mixture does; equal kept sets are ties (METHOD: the protocol, 4)."""
    none = measured.game.none
    first = measured.heads(none)
    second = np.where(_same(measured, mixture, first.shape[-1]), first, measured.heads(mixture))
    floors, norms = (measured.of_heads(kind) for kind in ("head_floors", "head_norms"))
    drift = _change(measured, mixture, "drift")
    score = _change(measured, mixture, "score")
    return Named(
        name=name,
        mixture=mixture,
        held=float(np.mean([row.held for row in measured.rows(mixture)])),
        heads=compare(first, second, floors, norms, np.zeros(first.shape[1:], dtype=bool)),
        drift_ratio=drift[0] + 1,
        drift_ratio_interval=_shifted(drift[1]),
        kl=divergence(measured, mixture),
        top1=float(measured.outcome(mixture, "top1").mean()),
        score=float(measured.outcome(mixture, "score").mean()),
        score_change=score[0],
        score_change_interval=score[1],
    )


def divergence(measured: Measured, mixture: Mixture) -> Divergence:
    """KL of a mixture: its median over samples."""
    found = measured.outcome(mixture, "kl")[:, None]
    return Divergence(float(np.median(found)), at(intervals.of_medians(found), 0))


def _change(measured: Measured, mixture: Mixture, outcome: str) -> tuple[float, Scalar]:
    baseline = measured.outcome(measured.game.none, outcome)
    if np.isnan(baseline).any():
        return float("nan"), None
    value, interval = change((measured.outcome(mixture, outcome) - baseline)[None], baseline, outcome)
    return float(value[0]), at(interval, 0)


def _shifted(interval: Scalar) -> Scalar:
    """An interval of a ratio out of that of a change."""
    return None if interval is None else intervals.Interval(interval.low + 1, interval.high + 1, interval.kind)


def _same(measured: Measured, mixture: Mixture, heads: int) -> NDArray[np.bool_]:
    """(sample, layer, head) True where the head's set and all of earlier layers are the baseline's."""
    treated = np.array(mixture.layers)
    equal = np.array([~treated | measured.store.same[sample] for sample in measured.samples])
    equal = np.repeat(equal, heads // equal.shape[-1], axis=-1)
    layers = np.logical_and.accumulate(equal.all(axis=2), axis=1)
    before = np.concatenate([np.ones((len(equal), 1), dtype=bool), layers[:, :-1]], axis=1)
    return np.asarray(equal & before[:, :, None])

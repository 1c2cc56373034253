"""Configurations of equal bytes: what evicting alone loses, and what more entries in fewer bits do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.measurements import Floats, byte_shares, held_shares, values
from perturbkv.analyses.outcomes import Divergence, divergence
from perturbkv.analyses.quality.score_columns import Mean
from perturbkv.analyses.scores import scores
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import DIFFERENCE, POSITIVE, RATIO, share_of
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import FULL
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "bytes"


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        config: which.
        held: entries of its cache over those of the full one, mean over samples.
        stored: its bytes over those of the full cache in 16 bits, likewise.
        evicts: whether anything goes, in any sample.
        moved: propagated L1 of the last layer's heads over their full outputs' norms, mean over samples.
        over: the same over that of evicting alone at the same bytes; None of a row that has no such.
        kl: of the next token, median over samples.
        score: of its answers, in [0, 1]; None where there are none.
        gain: score minus that of evicting alone at the same bytes, sample by sample; None without either.
    """

    config: EvictionConfig
    held: float
    stored: float
    evicts: bool
    moved: Mean
    over: Mean | None
    kl: Divergence
    score: Mean | None
    gain: Mean | None

    @property
    def kind(self) -> str:
        """What was done to the cache: `evicted`, `quantised`, or `both`."""
        if not self.config.quantised:
            return "evicted"
        return "both" if self.evicts else "quantised"

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        told = {"moved": self.moved, "over": self.over, "score": self.score, "gain": self.gain}
        return {
            "config": self.config,
            "bits": self.config.bits,
            "kind": self.kind,
            "held": self.held,
            "bytes": self.stored,
            **{name: None if one is None else one.value for name, one in told.items()},
            **{f"{name}_interval": None if one is None else one.interval for name, one in told.items()},
            "kl_median": self.kl.median,
            "kl_median_interval": self.kl.interval,
        }


@dataclass(frozen=True)
class Setting:
    """Configurations of equal bytes that differ in bits alone, evicting alone in 16 bits first."""

    rows: tuple[Row, ...]

    @property
    def baseline(self) -> EvictionConfig:
        """What evicts alone."""
        return self.rows[0].config


@dataclass(frozen=True)
class Measured:
    """What is read of a trace: (sample, config) each, scores None where answers were not generated."""

    moved: Floats
    scores: Floats | None
    held: Floats
    stored: Floats
    evicts: Floats
    kl: tuple[Divergence, ...]
    configs: tuple[EvictionConfig, ...]

    @classmethod
    def of(cls, trace: Trace, step: int) -> Measured:
        """Raises TraceError where the trace lacks something."""
        moved = values(trace, "perturbation_propagated", ANALYSIS, step)[:, :, -1].sum(axis=-1)
        whole = values(trace, "output_norm", ANALYSIS, step)[:, -1].sum(axis=-1)
        return cls(
            moved=moved / whole[:, None],
            scores=scores(trace, ANALYSIS).evicted if "score_full" in trace.arrays else None,
            held=held_shares(trace, ANALYSIS),
            stored=byte_shares(trace, ANALYSIS),
            evicts=values(trace, "evicted", ANALYSIS).max(axis=0),
            kl=tuple(divergence(trace, ANALYSIS, config, step) for config in trace.run.configs),
            configs=trace.run.configs,
        )

    def row(self, place: int, base: int | None = None) -> Row:
        """One configuration, held against the one that evicts alone at the same bytes."""
        return Row(
            config=self.configs[place],
            held=float(self.held[place]),
            stored=float(self.stored[place]),
            evicts=bool(self.evicts[place]),
            moved=Mean(float(self.moved[:, place].mean()), intervals.of_mean(self.moved[:, place], POSITIVE)),
            over=None if base is None else self._over(place, base),
            kl=self.kl[place],
            score=None if self.scores is None else _mean(self.scores[:, place], share_of(0)),
            gain=None
            if self.scores is None or base is None
            else _mean(self.scores[:, place] - self.scores[:, base], DIFFERENCE),
        )

    def _over(self, place: int, base: int) -> Mean:
        first, second = self.moved[:, base], self.moved[:, place]
        interval = intervals.scalar(
            lambda weights: np.asarray(ratio(weights @ second, weights @ first)), len(first), RATIO
        )
        return Mean(float(ratio(second.sum(), first.sum())), interval)


def _mean(each: Floats, kind: intervals.Kind) -> Mean:
    return Mean(float(each.mean()), intervals.of_mean(each, kind))


def settings(found: Measured) -> tuple[Setting, ...]:
    """Every setting, by budget as the run has them; none at a budget that holds everything in 16 bits already.

    Raises TraceError where there is none.
    """
    alone = [place for place, config in enumerate(found.configs) if not config.quantised and found.evicts[place]]
    made = [_setting(found, place) for place in alone]
    several = tuple(one for one in made if len(one.rows) > 1)
    if not several:
        held = ", ".join(dict.fromkeys(str(config.precision) for config in found.configs))
        msg = (
            f"{ANALYSIS} needs a configuration in 16 bits that evicts something and one like it in quantise(bits=…, "
            f"fill=…), whose budget counts bytes; got a trace of {held}; perturbkv bytes makes one"
        )
        raise TraceError(msg)
    return several


def _setting(found: Measured, base: int) -> Setting:
    alike = [place for place, one in enumerate(found.configs) if _fills(one) and _whole(one) == found.configs[base]]
    ordered = sorted(alike, key=lambda place: -found.configs[place].bits)
    return Setting((found.row(base, base), *(found.row(place, base) for place in ordered)))


def _fills(config: EvictionConfig) -> bool:
    """Whether its budget counts bytes, and its entries are of few bits."""
    return bool(config.precision.options.get("fill"))


def _whole(config: EvictionConfig) -> EvictionConfig:
    """The same in 16 bits."""
    return dataclasses.replace(config, precision=Choice(FULL))


def apart(found: Measured, shown: Sequence[Setting]) -> tuple[Row, ...]:
    """What keeps everything in few bits, beside the settings: quantisation alone."""
    there = {row.config for one in shown for row in one.rows}
    places = [
        place
        for place, config in enumerate(found.configs)
        if config.quantised and not _fills(config) and config not in there and not found.evicts[place]
    ]
    return tuple(found.row(place) for place in sorted(places, key=lambda place: -found.configs[place].bits))

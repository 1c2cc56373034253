"""Whether it is better to evict or to quantise, at equal bytes.

Configurations of equal bytes: what evicting alone loses, and what more entries in fewer bits do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import Floats, at_step, byte_shares, held_shares, scores, values
from perturbkv.analyses.outcomes import Divergence, divergence
from perturbkv.analyses.pairing import common, short_names
from perturbkv.analyses.quality.score_columns import Mean
from perturbkv.analyses.quality.score_tables import points
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain, ratio
from perturbkv.analyses.stats.intervals import DIFFERENCE, POSITIVE, RATIO, share_of
from perturbkv.analyses.text import Words, compared, decided, extremes, over, sentence, tally_verdicts
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import FULL
from perturbkv.display import Table
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


_NAMED = ("b", "#bits", "#held /\nfull", "#bytes /\nfull")
_HEADS = (*_NAMED, "#last layer's\nperturbation", "#over evicting\nalone", "#KL of the next\ntoken (nat)")
_SCORES = (*_NAMED, "#score × 100", "#minus evicting\nalone")
_ALL = "everything kept, in few bits"


@dataclass(frozen=True, repr=False)
class EqualBytes(Result):
    """Every setting of a trace: one budget of bytes, filled with entries of 16, 8, 4 or 2 bits.

    Attributes:
        settings: one by one, evicting alone first in each.
        everything: rows that keep everything in few bits, beside the settings.
        full: score of the full cache's answers; None where there are none.
        others: configurations of the trace that are in no setting and do not keep everything.
        step: decode step looked at.
        identity: of the run.
    """

    settings: tuple[Setting, ...]
    everything: tuple[Row, ...]
    full: Mean | None
    others: tuple[EvictionConfig, ...]
    step: int
    identity: RunIdentity

    @property
    def rows(self) -> tuple[Row, ...]:
        """All of them."""
        return (*(row for one in self.settings for row in one.rows), *self.everything)

    def conclusion(self) -> str:
        """Of each number of bits whether more entries in it perturb less than fewer in 16, and what answers say."""
        bits = sorted({row.config.bits for one in self.settings for row in one.rows[1:]}, reverse=True)
        said = [compared(f"storing {count} bits", "evicting alone", self._cases(count)) for count in bits]
        told = f"within a budget of bytes, {'; '.join(said)} (last layer, {over(self.identity.samples)})"
        return sentence("; ".join(filter(None, [told, self._answered(bits)])))

    def _cases(self, bits: int) -> list[tuple[str, float, intervals.Scalar]]:
        found = [(one, row) for one in self.settings for row in one.rows if row.config.bits == bits]
        names = short_names([one.baseline for one, _ in found])
        return [
            (name, row.over.value, row.over.interval)
            for name, (_, row) in zip(names, found, strict=True)
            if row.over is not None
        ]

    def _answered(self, bits: Sequence[int]) -> str:
        """What the answers' scores say, of each number of bits; empty without answers."""
        return "; ".join(filter(None, map(self._gained, bits)))

    def _gained(self, bits: int) -> str:
        rows = [row for one in self.settings for row in one.rows if row.config.bits == bits]
        gains = [(row, row.gain) for row in rows if row.gain is not None]
        if not gains:
            return ""
        words: Words = {
            1: (f"answers from {bits} bits score higher", "higher"),
            -1: (f"answers from {bits} bits score lower", "lower"),
            0: (f"whether answers from {bits} bits score higher is undecided", "undecided"),
        }
        names = short_names([row.config for row, _ in gains])
        told = extremes([(name, gain.value, points(gain)) for name, (_, gain) in zip(names, gains, strict=True)])
        verdicts = tally_verdicts([decided(gain.interval, 0) for _, gain in gains], words, "case")
        return f"{verdicts}, by {told} points of 100"

    def tables(self) -> list[Table | str]:
        """What shares everything but budget and bits, then what keeps everything: perturbation, and then scores."""
        found: dict[str, list[Row]] = {}
        for one in self.settings:
            found.setdefault(common([one.baseline], "budget"), []).extend(one.rows)
        found |= {_ALL: list(self.everything)} if self.everything else {}
        made: list[Table | str] = [Table(name, _HEADS, [_moved(row) for row in rows]) for name, rows in found.items()]
        if self.full is None:
            return made
        made.append(f"the full cache's answers score {points(self.full)}")
        return [*made, *(Table(f"{name}: answers", _SCORES, [_scored(row) for row in rows])
                         for name, rows in found.items())]  # fmt: skip

    def stored(self) -> list[Table]:
        """Nothing more: bytes stand in its tables."""
        return []

    def notes(self) -> str:
        """What rows and columns mean."""
        left = ", ".join(config.label() for config in self.others)
        return (
            f"{text.about_intervals(self.identity.samples, medians=True)} b: what the cache may take, as entries of "
            "16 bits; in fewer bits more entries take it. bytes / full: of the cache in 16 bits, window, scales and "
            "minima counted. Perturbation: propagated L1 of the last layer's heads over ‖o‖₁; over evicting alone: the "
            "ratio of both means. KL: median over samples. Both are of one step, where an answer need not be lost: "
            f"step {self.step}. Score differences are of the same prompts. {self._unfilled()}"
            f"{text.about_held([row.held for row in self.rows])}"
            f"{f' Left out, as their bytes are none of a budget at which 16 bits evict: {left}.' if left else ''}"
        )

    def _unfilled(self) -> str:
        """Which numbers of bits do not use a budget up, as everything fits into less: bytes are not equal there."""
        bits = {row.config.bits for one in self.settings for row in one.rows[1:] if not row.evicts}
        told = ", ".join(str(count) for count in sorted(bits, reverse=True))
        return f"Where {told} bits hold everything they take less than b (bytes / full). " if bits else ""

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain({
            "settings": [
                {"baseline": one.baseline, "rows": [row.to_dict() for row in one.rows]} for one in self.settings
            ],
            "everything": [row.to_dict() for row in self.everything],
            "full_score": None if self.full is None else self.full.value,
            "full_score_interval": None if self.full is None else self.full.interval,
            "left_out": self.others,
        })  # fmt: skip
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per configuration: bits, kind, `held` and `bytes` over the full cache's, and its means.

        `moved` is the last layer's perturbation over the norms, `over` the same over that of evicting alone; scores in
        [0, 1], NaN where there is nothing to say.
        """
        return [
            {
                **columns_of(row.config),
                "bits": row.config.bits,
                "kind": row.kind,
                "held": row.held,
                "bytes": row.stored,
                "moved": row.moved.value,
                "kl": row.kl.median,
                **{name: float("nan") if one is None else one.value
                   for name, one in (("over", row.over), ("score", row.score), ("gain", row.gain))},
            }
            for row in self.rows
        ]  # fmt: skip


def equal_bytes(trace: Trace, step: int = 0) -> EqualBytes:
    """At equal bytes, is it better to keep fewer entries in 16 bits, or more of them in 8, 4 or 2?.

    Compared is the propagated L1 of the last layer's heads, the next token's KL, and the answers' scores where there
    are any, of configurations whose budget counts bytes (`quantise(bits=4, fill=64)`) with the one in 16 bits that is
    alike in all else: evicting alone. Beside them stands what keeps everything in few bits: quantisation alone.

    Args:
        trace: what was measured.
        step: decode step of perturbation and KL.

    Raises TraceError where no configuration in 16 bits has another of the same bytes beside it, or the trace has no
    complete sample or not what is needed; ConfigError where it has no such step.

    Example, of a `trace` of two selections at two budgets:
        >>> import perturbkv as pk
        >>> [row.config.bits for row in pk.equal_bytes(trace).settings[0].rows]
        [16, 4, 2]
    """
    there = at_step(trace, ANALYSIS, step)
    found = Measured.of(there, step)
    shown = settings(found)
    everything = apart(found, shown)
    configs = [row.config for one in shown for row in one.rows] + [row.config for row in everything]
    whole = None if found.scores is None else scores(there, ANALYSIS).full
    return EqualBytes(
        settings=shown,
        everything=everything,
        full=None if whole is None else Mean(float(whole.mean()), intervals.of_mean(whole, share_of(0))),
        others=tuple(config for config in trace.run.configs if config not in configs),
        step=step,
        identity=identity(trace, configs, step),
    )


def _named(row: Row) -> list[str]:
    """Budget, bits, and what they hold."""
    budget = str(row.config.budget) if row.over is not None else "all"
    return [budget, str(row.config.bits), text.held(row.held), text.held(row.stored)]


def _moved(row: Row) -> list[str]:
    compared = row.over is not None and row.config.quantised
    over = text.decimal(row.over.value, row.over.interval, apart="\n") if row.over and compared else "1"
    return [
        *_named(row),
        text.significant(row.moved.value, row.moved.interval),
        over if row.over else "",
        text.significant(row.kl.median, row.kl.interval),
    ]


def _scored(row: Row) -> list[str]:
    gain = "" if row.gain is None or not row.config.quantised else points(row.gain)
    return [*_named(row), "" if row.score is None else points(row.score), gain]

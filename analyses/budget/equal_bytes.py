"""Whether it is better to evict or to quantise, at equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.budget.byte_rows import ANALYSIS, Measured, Row, Setting, apart, settings
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import at_step
from perturbkv.analyses.naming import common, short
from perturbkv.analyses.quality.quality_told import points
from perturbkv.analyses.quality.score_columns import Mean
from perturbkv.analyses.result import Result
from perturbkv.analyses.scores import scores
from perturbkv.analyses.sentences import Words, compared, decided, ends, over, sentence, tally
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import share_of
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.trace import Trace

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
        names = short([one.baseline for one, _ in found])
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
        names = short([row.config for row, _ in gains])
        told = ends([(name, gain.value, points(gain)) for name, (_, gain) in zip(names, gains, strict=True)])
        return f"{tally([decided(gain.interval, 0) for _, gain in gains], words, 'case')}, by {told} points of 100"

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

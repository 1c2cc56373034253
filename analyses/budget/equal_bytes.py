"""Eviction against quantisation at equal bytes: fewer entries in 16 bits, or more of them in fewer bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from perturbkv.analyses import columns, text
from perturbkv.analyses.columns import Line, Record, column, derived, interval, record
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Floats, Measurements, Scores, scores
from perturbkv.analyses.pairing import short_names
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import DIFFERENCE, POSITIVE, OptionalInterval, share_kind
from perturbkv.analyses.text import Case, Words, comparison, extremes, interval_verdict, sample_note, sentence, tally
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import FULL
from perturbkv.display import Part
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "bytes"


@record
class Row(Record):
    """The bytes, the perturbation and the score of one configuration.

    Attributes:
        evicts: whether anything is evicted, in any sample.
    """

    SECTION: ClassVar[str] = "bytes row"

    config: EvictionConfig = column("the configuration")
    cache_share: float = column(
        "entries over those of the full cache, mean over samples", key="held", heading="#cache\nshare"
    )
    byte_share: float = column(
        "bytes over those of the full cache in 16 bits, window, scales and minima counted", key="bytes",
        heading="#bytes /\nfull",
    )  # fmt: skip
    evicts: bool
    perturbation: float = column(
        "propagated L1 of the last layer's heads over ‖o‖₁, mean over samples", key="moved",
        heading="#last layer's\nperturbation", text=text.three_digits,
    )  # fmt: skip
    perturbation_interval: OptionalInterval = column("over samples", key="moved_interval")
    ratio: float | None = column(
        "perturbation over that of evicting alone at the same bytes, ratio of both means; null where there is none",
        key="over",
    )  # fmt: skip
    ratio_interval: OptionalInterval = column("over samples", key="over_interval")
    kl_median: float = column(
        "KL(full ‖ evicted) of the next token, median over samples", unit="nat", heading="#KL of the next\ntoken, nat",
        text=text.three_digits,
    )  # fmt: skip
    kl_median_interval: OptionalInterval = interval()
    score: float | None = column(
        "of its answers, 0 to 1; null without answers", heading="#score\n× 100", text=text.points
    )
    score_interval: OptionalInterval = interval()
    gain: float | None = column(
        "`score` less that of evicting alone, sample by sample; null without either"
    )  # fmt: skip
    gain_interval: OptionalInterval = interval()

    @derived(heading="#bits")
    def bits(self) -> int:
        """Bits of a stored number: 16, 8, 4 or 2."""
        return self.config.bits

    @derived()
    def kind(self) -> str:
        """Compression of the cache: evicted, quantised, or both."""
        if not self.config.quantised:
            return "evicted"
        return "both" if self.evicts else "quantised"

    @derived(heading="#over evicting\nalone", json=False, interval=lambda row: row.ratio_interval)
    def over_evicting(self) -> float | None:
        """Last layer's propagated perturbation over that of evicting alone at the same bytes, ratio of both means."""
        return self.ratio if self.config.quantised else None

    @derived(heading="#score, less\nevicting's", json=False, text=text.points, interval=lambda row: row.gain_interval)
    def gain_over_evicting(self) -> float | None:
        """Score × 100 less that of evicting alone at the same bytes, sample by sample."""
        return self.gain if self.config.quantised else None


@record
class Setting(Record):
    """Configurations of equal bytes that differ in bits alone; the first one evicts alone, in 16 bits."""

    SECTION: ClassVar[str] = "bytes setting"

    rows: tuple[Row, ...] = column("of the same bytes: the baseline, then fewer bits and more entries")

    @derived()
    def baseline(self) -> EvictionConfig:
        """Evicting alone, in 16 bits."""
        return self.rows[0].config


class RowBuilder:
    """A builder of rows from the measurements of a trace. Raises TraceError where the trace lacks one.

    Attributes:
        configs: of the trace.
        evicts: (config,) above 0 where anything is evicted, in any sample.
        scores: of answers; None where there are none.
    """

    def __init__(self, measured: Measurements) -> None:
        self.configs: tuple[EvictionConfig, ...] = measured.trace.run.configs
        perturbation = measured["perturbation_propagated"][:, :, -1].sum(axis=-1)
        norms = measured["output_norm"][:, -1].sum(axis=-1)
        self._perturbation: Floats = perturbation / norms[:, None]
        self._cache_shares, self._byte_shares = measured.cache_shares, measured.byte_shares
        self._kl = measured["logit_kl"]
        self.evicts: Floats = measured["evicted"].max(axis=0)
        self.scores: Scores | None = scores(measured.trace, ANALYSIS) if "score_full" in measured else None

    def build(self, index: int, base: int | None = None) -> Row:
        """Return a configuration's row, compared at equal bytes with the configuration at `base`, which only evicts."""
        own, kl = self._perturbation[:, index], self._kl[:, index]
        over, over_interval = (None, None) if base is None else self._perturbation_ratio(index, base)
        score = gain = None
        if self.scores is not None:
            score = self.scores.evicted[:, index]
            gain = None if base is None else score - self.scores.evicted[:, base]
        return Row(
            config=self.configs[index],
            cache_share=float(self._cache_shares[index]),
            byte_share=float(self._byte_shares[index]),
            evicts=bool(self.evicts[index]),
            perturbation=float(own.mean()),
            perturbation_interval=intervals.of_mean(own, POSITIVE),
            ratio=over,
            ratio_interval=over_interval,
            kl_median=float(np.median(kl)),
            kl_median_interval=intervals.of_median(kl),
            score=None if score is None else float(score.mean()),
            score_interval=None if score is None else intervals.of_mean(score, share_kind(0)),
            gain=None if gain is None else float(gain.mean()),
            gain_interval=None if gain is None else intervals.of_mean(gain, DIFFERENCE),
        )

    def _perturbation_ratio(self, index: int, base: int) -> tuple[float, OptionalInterval]:
        """Return the perturbation of the configuration at `index` over that at `base`, with its interval."""
        first, second = self._perturbation[:, base], self._perturbation[:, index]

        return float(ratio(second.sum(), first.sum())), intervals.of_ratio(second, first)


def equal_byte_settings(rows: RowBuilder) -> tuple[Setting, ...]:
    """Return the settings of equal bytes, in the run's order; none where 16 bits hold everything.

    Raises TraceError where there is none.
    """
    alone = [index for index, config in enumerate(rows.configs) if not config.quantised and rows.evicts[index]]
    compared = tuple(setting for setting in (_setting(rows, index) for index in alone) if len(setting.rows) > 1)
    if not compared:
        precisions = ", ".join(dict.fromkeys(str(config.precision) for config in rows.configs))
        raise TraceError(
            f"{ANALYSIS} needs a configuration in 16 bits that evicts something and one like it in quantise(bits=…, "
            f"fill=…), whose budget counts bytes; got a trace of {precisions}; perturbkv budget --bytes makes one"
        )
    return compared


def _setting(rows: RowBuilder, base: int) -> Setting:
    """Return the setting of the configurations with the same bytes as the one at `base`, which only evicts."""
    alike = [
        index
        for index, config in enumerate(rows.configs)
        if _counts_bytes(config) and _in_full_precision(config) == rows.configs[base]
    ]
    ordered = sorted(alike, key=lambda index: -rows.configs[index].bits)
    return Setting((rows.build(base, base), *(rows.build(index, base) for index in ordered)))


def _counts_bytes(config: EvictionConfig) -> bool:
    """Return whether a configuration's budget is in bytes, which quantised entries fill."""
    return bool(config.precision.options.get("fill"))


def _in_full_precision(config: EvictionConfig) -> EvictionConfig:
    """Return the same configuration in 16 bits."""
    return dataclasses.replace(config, precision=Choice(FULL))


def quantised_alone(rows: RowBuilder, compared: Sequence[Setting]) -> tuple[Row, ...]:
    """Return the rows of quantised configurations that evict nothing and are in none of the `compared` settings."""
    shown = {row.config for setting in compared for row in setting.rows}
    indices = [
        index
        for index, config in enumerate(rows.configs)
        if config.quantised and not _counts_bytes(config) and config not in shown and not rows.evicts[index]
    ]
    return tuple(rows.build(index) for index in sorted(indices, key=lambda index: -rows.configs[index].bits))


@record
class EqualBytes(Result):
    """Eviction against quantisation: budgets of bytes, each filled with entries of 16, 8, 4 or 2 bits.

    Attributes:
        step: decode step of perturbation and KL.
    """

    SECTION: ClassVar[str] = "budget --bytes"
    SHOWN: ClassVar[tuple[str, ...]] = (
        "bits",
        "cache_share",
        "byte_share",
        "over_evicting",
        "kl_median",
        "gain_over_evicting",
    )
    HAS_MEDIANS: ClassVar[bool] = True

    settings: tuple[Setting, ...] = column("one per policy, selection, budget and so on")
    everything: tuple[Row, ...] = column("rows that keep everything in few bits, compared with nothing")
    full_score: float | None = column("of the full cache's answers, 0 to 1; null without answers")
    full_score_interval: OptionalInterval = interval()
    left_out: tuple[EvictionConfig, ...] = column("in few bits, but neither of a budget in bytes nor of everything")
    step: int
    identity: RunIdentity

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all settings, then the rows of configurations that keep all entries."""
        return (*(row for setting in self.settings for row in setting.rows), *self.everything)

    def conclusion(self) -> str:
        """Return, per number of bits, whether more quantised entries perturb less than 16-bit ones, and scores."""
        bits = sorted({row.bits for setting in self.settings for row in setting.rows[1:]}, reverse=True)
        clauses = [comparison(f"storing {count} bits", "evicting alone", self._bits_cases(count)) for count in bits]
        answers = filter(None, map(self._score_clause, bits))
        perturbed = f"at equal bytes {'; '.join(clauses)} (last layer, {sample_note(self.identity.samples)})"
        return sentence("; ".join([perturbed, *answers]))

    def title(self) -> str:
        """Return the table's title, with the compared quantities and the full cache's score."""
        full = self.full_score
        scored = "" if full is None else f"; the full cache scores {text.points(full, self.full_score_interval)}"
        return f"one budget of bytes, in entries of 16 bits or more entries of fewer bits{scored}"

    def lines(self) -> Sequence[Line]:
        """Return a line per configuration by budget, then lines of configurations that keep all entries."""
        names = short_names([setting.baseline for setting in self.settings])
        compared = [
            Line(name if index == 0 else "", (row,))
            for name, setting in zip(names, self.settings, strict=True)
            for index, row in enumerate(setting.rows)
        ]
        return [*compared, *(Line("" if index else "everything kept", (row,))
                             for index, row in enumerate(self.everything))]  # fmt: skip

    def caveats(self) -> Sequence[str]:
        """Return the note on numbers of bits at which all entries need less than the budget; nothing without such."""
        bits = {row.bits for setting in self.settings for row in setting.rows[1:] if not row.evicts}
        counts = ", ".join(str(count) for count in sorted(bits, reverse=True))
        return [f"Where {counts} bits hold everything they take less than the budget."] if bits else []

    def details(self) -> Sequence[Part]:
        """Return a table of perturbation and score of every row, and notes on the step and on what was left out."""
        left = ", ".join(config.label() for config in self.left_out)
        return [
            columns.table("each by itself", self.lines(), ("bits", "perturbation", "score"), self.FIRST),
            f"Perturbation and KL are of step {self.step}, where an answer need not be lost; differences of scores are "
            "of the same samples.",
            text.cache_share_note([row.cache_share for row in self.rows]),
            *([f"Left out, as no configuration in 16 bits has their bytes: {left}."] if left else []),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per configuration: bits, kind, `held` and `bytes` over the full cache's, and its means.

        `moved` is the last layer's perturbation over the norms, `over` the same over that of evicting alone; scores in
        [0, 1], NaN where there is none.
        """
        return [
            {
                **config_columns(row.config),
                "bits": row.bits,
                "kind": row.kind,
                "held": row.cache_share,
                "bytes": row.byte_share,
                "moved": row.perturbation,
                "kl": row.kl_median,
                **{name: float("nan") if value is None else value
                   for name, value in (("over", row.ratio), ("score", row.score), ("gain", row.gain))},
            }
            for row in self.rows
        ]  # fmt: skip

    def _bits_cases(self, bits: int) -> list[Case]:
        """Return, as a case per setting, perturbation at a number of bits over that of evicting alone."""
        rows = [(setting, row) for setting in self.settings for row in setting.rows if row.bits == bits]
        names = short_names([setting.baseline for setting, _ in rows])
        return [
            Case(name, row.ratio, row.ratio_interval)
            for name, (_, row) in zip(names, rows, strict=True)
            if row.ratio is not None
        ]

    def _score_clause(self, bits: int) -> str:
        """Return a clause on whether answers score higher with a number of bits; empty without answers."""
        rows = [row for setting in self.settings for row in setting.rows if row.bits == bits and row.gain is not None]
        if not rows:
            return ""
        words: Words = {
            1: (f"answers from {bits} bits score higher", "higher"),
            -1: (f"answers from {bits} bits score lower", "lower"),
            0: (f"whether answers from {bits} bits score higher is undecided", "undecided"),
        }
        names = short_names([row.config for row in rows])
        gains = [(name, row.gain or 0.0, text.points(row.gain or 0.0, row.gain_interval))
                 for name, row in zip(names, rows, strict=True)]  # fmt: skip
        verdicts = tally([interval_verdict(row.gain_interval, 0) for row in rows], words, "case")
        return f"{verdicts}, by {extremes(gains)} points of 100"


def equal_bytes(trace: Trace, step: int = 0) -> EqualBytes:
    """Compare fewer entries in 16 bits with more of them in 8, 4 or 2, at equal bytes.

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
    measured = Measurements(trace, ANALYSIS, step)
    rows = RowBuilder(measured)
    compared = equal_byte_settings(rows)
    everything = quantised_alone(rows, compared)
    configs = [row.config for setting in compared for row in setting.rows] + [row.config for row in everything]
    full = None if rows.scores is None else rows.scores.full
    return EqualBytes(
        settings=compared,
        everything=everything,
        full_score=None if full is None else float(full.mean()),
        full_score_interval=None if full is None else intervals.of_mean(full, share_kind(0)),
        left_out=tuple(config for config in trace.run.configs if config not in configs),
        step=step,
        identity=identity(trace, configs, step),
    )

"""Perplexity: exp(−log p / tokens) of a text under every cache, over the same tokens (METHOD: log p and perplexity)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.budget.budget_axis import above_full_caveat
from perturbkv.analyses.columns import Line, Record, column, interval, record
from perturbkv.analyses.conclusions import Case, Claim
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Floats, Measurements, one_token_caveat, text_log_p
from perturbkv.analyses.quality import score_tables
from perturbkv.analyses.quality.score_columns import Cell, Layout, layout_rows
from perturbkv.analyses.result import Result
from perturbkv.analyses.sides import check_trace, comparable_groups
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import RATIO, OptionalInterval, StatisticKind
from perturbkv.analyses.verdicts import ALIKE, LESS, MORE
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import TEXTS
from perturbkv.display import Part, plural
from perturbkv.trace import Trace

ANALYSIS = "perplexity"
_PERPLEXITY = replace(RATIO, limits=(1, np.inf))


@record
class CachePerplexity(Record, section="cache's perplexity"):
    """One configuration's perplexity of the text; lower is better."""

    config: EvictionConfig = column("the configuration")
    cache_share: float = column(
        "entries of its cache over those of the full one, mean over samples; null where the trace lacks them",
        key="held", heading="#cache\nshare",
    )  # fmt: skip
    perplexity: float = column(
        "exp(−log p / tokens) of the text, geometric mean over samples; lower is better", heading="#perplexity"
    )
    perplexity_interval: OptionalInterval = interval()
    ratio: float = column(
        "perplexity over the full cache's of the same tokens, geometric mean over samples",
        heading="#over full\ncache's", text=text.three_digits,
    )  # fmt: skip
    ratio_interval: OptionalInterval = interval()
    baseline: EvictionConfig | None = column(
        "first configuration of its budget, granularity, precision and protection; null for that one itself"
    )
    over_baseline: float | None = column(
        "perplexity over the `baseline`'s of the same tokens, geometric mean over samples; null for that itself",
        heading="#over first\nmethod's", text=text.three_digits,
    )  # fmt: skip
    over_baseline_interval: OptionalInterval = interval()


@record
class Perplexity(
    Result,
    section="quality --metric perplexity",
    rows="samples",
    document="of perplexity",
    shown=("cache_share", "perplexity", "ratio", "over_baseline"),
):
    """The perplexity of a text under every evicted cache, and under the full one.

    Attributes:
        left_out: number of complete samples whose text has no token that a decode step gives.
        log_p_full, log_p: means over the text's tokens, (sample,) and (sample, config), nat.
    """

    identity: RunIdentity
    text: str = column("text that was read: own, answer or given")
    samples: tuple[str, ...] = column("names of the samples")
    tokens: tuple[int, ...] = column("tokens of the text that count, per sample")
    text_tokens: tuple[int, ...] | None = column("all tokens of the text, per sample; null for the own text")
    cut: int = column("samples whose text goes on behind the last decode step; 0 for the own text")
    left_out: int = column("complete samples whose text is a single token, which the prefill gives")
    full: float = column("perplexity under the full cache, geometric mean over samples")
    full_interval: OptionalInterval = interval()
    configs: tuple[CachePerplexity, ...] = column("one per configuration, in the run's order")
    log_p_full: Floats
    log_p: Floats

    def claims(self) -> Sequence[Claim]:
        """Return whether evicted caches have a higher perplexity than the full cache, and the full cache's."""
        ratios = [Case.ratio(name, one.ratio, one.ratio_interval) for name, one in self._with_names(self.configs)]
        full = Case("", self.full, text.decimal(self.full, self.full_interval))
        return [
            Claim(
                "perplexity under an evicted cache",
                "is",
                ratios,
                {MORE: "higher", LESS: "lower", ALIKE: "as high"},
                "under the full cache",
            ),
            Claim("the full cache's perplexity", "is", [full]),
        ]

    def scope(self) -> Sequence[str]:
        """Return which text was read, and the number of samples."""
        return [f"text: {TEXTS[self.text]}", text.sample_note(len(self.samples))]

    def title(self) -> str:
        """Return the text that was read, and how many of its tokens count."""
        whole = self.text_tokens or self.tokens
        of = f"{_range_text(self.tokens)} of its " if self.text_tokens else ""
        return f"{TEXTS[self.text]}, {of}{_range_text(whole)} {'token' if max(whole) == 1 else 'tokens'} scored"

    def lines(self) -> Sequence[Line]:
        """Return a line per configuration."""
        return [Line(name, (one,)) for name, one in self._with_names(self.configs)]

    def interval_note(self) -> str:
        """Return the note on n and intervals."""
        return text.intervals_note(len(self.samples))

    def caveats(self) -> Sequence[str]:
        """Return notes on samples that are left out, on texts that are read in part, and on cache shares above 1."""
        cut = (
            f"Read in part: {self.cut} of {plural(len(self.samples), 'text')}; without --steps each is read to its end."
        )
        return [
            *one_token_caveat(self.left_out),
            *([cut] if self.cut else []),
            *above_full_caveat(one.cache_share for one in self.configs),
        ]

    def details(self) -> Sequence[Part]:
        """Return notes on the tokens that count and on means."""
        return [
            "In the regular scenario the text's first token comes from the prefill, which no cache changes: the second "
            "is the first that counts. Context-only counts the first too.",
            "Perplexities and ratios are geometric means over samples, each of which counts the same.",
            text.cache_share_note([one.cache_share for one in self.configs]),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per sample and configuration: its perplexity, `full` the full cache's, and the tokens."""
        return [
            {**config_columns(one.config), "sample": sample, "tokens": self.tokens[row],
             "perplexity": float(np.exp(-self.log_p[row, index])), "full": float(np.exp(-self.log_p_full[row]))}
            for index, one in enumerate(self.configs) for row, sample in enumerate(self.samples)
        ]  # fmt: skip

    def to_latex(self) -> str:
        """Return the table as LaTeX, for booktabs."""
        return score_tables.latex([self.layout()], self._caption())

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        return score_tables.markdown([self.layout()], self._caption())

    def to_csv(self) -> str:
        """Return the table as CSV: perplexities, ratios and their intervals, guarded against spreadsheets."""
        return score_tables.csv(self.layout(), [one.config for one in self.configs])

    def layout(self) -> Layout:
        """Return the layout of the exported tables."""
        full = [(self.full, self.full_interval), (1.0, None), (None, None)]
        each = [[(one.perplexity, one.perplexity_interval), (one.ratio, one.ratio_interval),
                 (one.over_baseline, one.over_baseline_interval)] for one in self.configs]  # fmt: skip
        shares = [one.cache_share for one in self.configs]
        rows = layout_rows([one.config for one in self.configs], shares, _cells(full), list(map(_cells, each)))
        return Layout(_COLUMNS, (("", len(_COLUMNS)),), rows)

    def _caption(self) -> str:
        """Return the caption of the exported tables: the run, the text and intervals."""
        return f"{self.identity.lines()[0]}. Perplexity: {self.title()}; geometric means. {self.interval_note()}"


def perplexity(trace: Trace) -> Perplexity:
    """Compare the perplexity of a text under every evicted cache with that under the full cache.

    Args:
        trace: from `measure` or `read_trace`; `Settings(text=…, steps=…)` say which text, and how far it is read.

    Returns geometric means over samples, with intervals of these.

    Raises TraceError for anything but a trace, for a trace without log p, without a complete sample, or in which no
    sample has a token that counts.

    Example, of a `trace` of 5 samples:
        >>> import perturbkv as pk
        >>> pk.perplexity(trace).configs[0].ratio > 0
        True
    """
    check_trace(trace)
    measured = Measurements(trace, ANALYSIS)
    log_p = text_log_p(trace, ANALYSIS)
    lengths = None
    if "text_tokens" in trace.arrays:
        lengths = np.asarray(trace.get("text_tokens", ANALYSIS)[log_p.known], dtype=np.int64)
    unscored = 0 if "first_logp" in trace.arrays else 1
    baselines = {index: first for first, *others in comparable_groups(trace.run.configs).values() for index in others}
    perplexities = []
    for index, config in enumerate(trace.run.configs):
        own, first = log_p.evicted[:, index], baselines.get(index)
        compared: dict[str, Any] = {"baseline": None, "over_baseline": None, "over_baseline_interval": None}
        if first is not None:
            compared = {"baseline": trace.run.configs[first], **_mean("over_baseline", log_p.evicted[:, first] - own)}
        own_ratio = _mean("ratio", log_p.full - own)
        own_perplexity = _mean("perplexity", -own, _PERPLEXITY)
        perplexities.append(
            CachePerplexity(config, float(measured.cache_shares[index]), **own_perplexity, **own_ratio, **compared)
        )
    return Perplexity(
        identity=identity(trace, trace.run.configs),
        text=trace.run.text,
        samples=tuple(name for name, known in zip(measured.sample_ids, log_p.known, strict=True) if known),
        tokens=tuple(log_p.tokens.tolist()),
        text_tokens=None if lengths is None else tuple(lengths.tolist()),
        cut=0 if lengths is None else int((log_p.tokens < lengths - unscored).sum()),
        left_out=int((~log_p.known).sum()),
        **_mean("full", -log_p.full, _PERPLEXITY),
        configs=tuple(perplexities),
        log_p_full=log_p.full,
        log_p=log_p.evicted,
    )


def _mean(name: str, logarithms: Floats, kind: StatisticKind = RATIO) -> dict[str, Any]:
    """Return the columns `name` and `<name>_interval`: exp of the mean of (sample,) logarithms, and its interval."""
    ends = intervals.of_statistic(lambda weights: np.exp(weights @ logarithms), len(logarithms), kind)
    return {name: float(np.exp(logarithms.mean())), f"{name}_interval": ends}


_COLUMNS = ("perplexity", "over full cache's", "over first method's")


def _cells(numbers: Iterable[tuple[float | None, OptionalInterval]]) -> tuple[Cell, ...]:
    """Return numbers and their intervals as cells of an exported table; None is not known."""
    return tuple(
        Cell(np.nan if value is None else value, ends, best=False, write=text.decimal, scale=1)
        for value, ends in numbers
    )


def _range_text(counts: Sequence[int]) -> str:
    """Return the least and the largest count as text: '8 to 16', '1'."""
    least, most = min(counts), max(counts)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"

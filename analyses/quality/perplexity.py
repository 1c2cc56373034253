"""Perplexity: exp(−log p / tokens) of a text under every cache, over the same tokens (METHOD: log p and perplexity)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.budget.budget_axis import above_full_caveat
from perturbkv.analyses.columns import Line, Record, column, interval, record
from perturbkv.analyses.conclusions import Case, Claim
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Floats, Measurements, one_token_caveat, text_log_p
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import RATIO, OptionalInterval, StatisticKind
from perturbkv.analyses.verdicts import ALIKE, LESS, MORE
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import TEXTS
from perturbkv.display import Part, plural
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "perplexity"
_PERPLEXITY = replace(RATIO, limits=(1, np.inf))
_COMPARED = {MORE: "higher", LESS: "lower", ALIKE: "as high"}


@record
class CachePerplexity(Record):
    """One configuration's perplexity of the text; lower is better."""

    SECTION: ClassVar[str] = "cache's perplexity"

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


@record
class Perplexity(Result):
    """The perplexity of a text under every evicted cache, and under the full one.

    Attributes:
        left_out: number of complete samples whose text has no token that a decode step gives.
        log_p_full, log_p: means over the text's tokens, (sample,) and (sample, config), nat.
    """

    SECTION: ClassVar[str] = "quality --metric perplexity"
    ROWS: ClassVar[str] = "samples"
    SHOWN: ClassVar[tuple[str, ...]] = ("cache_share", "perplexity", "ratio")

    identity: RunIdentity
    text: str = column("text that was read: own, answer or given")
    samples: tuple[str, ...] = column("names of the samples")
    tokens: tuple[int, ...] = column("tokens of the text that count, per sample")
    left_out: int = column("complete samples whose text is a single token, which the prefill gives")
    full: float = column("perplexity under the full cache, geometric mean over samples")
    full_interval: OptionalInterval = interval()
    configs: tuple[CachePerplexity, ...] = column("one per configuration, in the run's order")
    log_p_full: Floats
    log_p: Floats

    def claims(self) -> Sequence[Claim]:
        """Return whether evicted caches have a higher perplexity than the full cache, and the full cache's."""
        ratios = [Case.ratio(name, one.ratio, one.ratio_interval) for name, one in self._named]
        full = Case("", self.full, text.decimal(self.full, self.full_interval))
        return [
            Claim("perplexity under an evicted cache", "is", ratios, _COMPARED, "under the full cache"),
            Claim("the full cache's perplexity", "is", [full]),
        ]

    def scope(self) -> Sequence[str]:
        """Return which text was read, and the number of samples."""
        return [f"text: {TEXTS[self.text]}", text.sample_note(len(self.samples))]

    def title(self) -> str:
        """Return the text that was read, and its number of tokens."""
        least, most = min(self.tokens), max(self.tokens)
        length = plural(most, "token") if least == most else f"{least:,} to {plural(most, 'token')}"
        return f"{TEXTS[self.text]}, {length}"

    def lines(self) -> Sequence[Line]:
        """Return a line per configuration."""
        return [Line(name, (one,)) for name, one in self._named]

    def interval_note(self) -> str:
        """Return the note on n and intervals."""
        return text.intervals_note(len(self.samples))

    def caveats(self) -> Sequence[str]:
        """Return notes on samples that are left out, and on cache shares above 1."""
        return [*one_token_caveat(self.left_out), *above_full_caveat(one.cache_share for one in self.configs)]

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

    @property
    def _named(self) -> list[tuple[str, CachePerplexity]]:
        """The configurations with their names."""
        return list(zip(self.identity.names, self.configs, strict=True))


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
    if not isinstance(trace, Trace):
        raise TraceError(f"expected a trace, as pk.read_trace or pk.measure give it; got {type(trace).__name__}")
    measured = Measurements(trace, ANALYSIS)
    log_p = text_log_p(trace, ANALYSIS)
    full, evicted, known = log_p.full, log_p.evicted, log_p.known
    configs = tuple(
        CachePerplexity(config, float(share), *_geometric_mean(-values, _PERPLEXITY), *_geometric_mean(full - values))
        for config, share, values in zip(trace.run.configs, measured.cache_shares, evicted.T, strict=True)
    )
    return Perplexity(
        identity(trace, trace.run.configs), trace.run.text,
        tuple(name for name, has_tokens in zip(measured.sample_ids, known, strict=True) if has_tokens),
        tuple(log_p.tokens.tolist()), int((~known).sum()), *_geometric_mean(-full, _PERPLEXITY),
        configs, full, evicted,
    )  # fmt: skip


def _geometric_mean(logarithms: Floats, kind: StatisticKind = RATIO) -> tuple[float, OptionalInterval]:
    """Return exp of the mean of (sample,) logarithms, and its interval over samples."""
    ends = intervals.of_statistic(lambda weights: np.exp(weights @ logarithms), len(logarithms), kind)
    return float(np.exp(logarithms.mean())), ends

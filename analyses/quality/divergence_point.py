"""One configuration's divergence: its own answers, and its next-token predictions along the full cache's answer.

Texts are compared by ROUGE-L: the longest common subsequence of words (Lin, 2004, section 3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isinf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text as words
from perturbkv.analyses.columns import Record, column, derived, interval, record
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import Band, Interval, OptionalInterval
from perturbkv.configs.eviction import EvictionConfig

_WORDS = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
"""A word: letters and digits without a space; in scripts without spaces, each character."""


def rouge_l(text: str, reference: str) -> float:
    """Return F1 of the longest common subsequence of words, in lower case and without punctuation, in [0, 1].

    Two texts without words have 1 where they are equal, else 0.
    """
    first, second = (_WORDS.findall(part.lower()) for part in (text, reference))
    if not first or not second:
        return float(text.strip() == reference.strip())
    return 2 * _longest_common_length(first, second) / (len(first) + len(second))


def _longest_common_length(first: list[str], second: list[str]) -> int:
    """Return the length of the longest common subsequence of words, by Hyyrö's bit-parallel method (2004)."""
    bits: dict[str, int] = {}
    for index, word in enumerate(first):
        bits[word] = bits.get(word, 0) | 1 << index
    whole = (1 << len(first)) - 1
    row = whole
    for word in second:
        matched = row & bits.get(word, 0)
        row = (row + matched) | (row - matched)
    return len(first) - (row & whole).bit_count()


_SHARE = intervals.share_kind(0)
"""A mean over samples of numbers from 0 to 1."""
MOST_SPANS = 32
"""Largest number of points of a KL curve."""
AT_START = "Cache shares are those at the start of the answers."
"""The caveat where caches are compressed again while they answer."""
Row = Mapping[str, Any]
"""The answers to one prompt, as a file of answers holds them."""


def _format_tokens(value: float, ends: OptionalInterval = None) -> str:
    """Return a number of tokens with its interval; 'never' for infinity."""
    return _format_count(value) + words.interval_text(ends, _format_count, " ")


def _format_count(value: float) -> str:
    """Return a number of tokens; 'never' for infinity."""
    return "never" if isinf(value) else f"{value:,.0f}"


@record
class ForcedReading(Record, section="forced reading of a configuration"):
    """One cache's predictions of each next token of the full cache's answer; a sample without tokens is NaN.

    KL is summarised by medians over samples: a single one can dominate a mean.
    """

    kl: Floats = column("per sample: mean over the answer's steps", unit="nat", dims=("sample",))
    kl_interval: OptionalInterval = interval("of the median over samples")
    last: Floats = column("per sample: mean over the last third of its steps", unit="nat", dims=("sample",))
    last_interval: OptionalInterval = interval("of the median over samples")
    top1: Floats = column("per sample: share of steps at which both would take the same token", dims=("sample",))
    top1_interval: OptionalInterval = interval("of the mean over samples")
    curve: Floats = column("median over samples of the mean KL over the steps of each span", unit="nat", dims=("span",))
    curve_interval: Band = interval("of the curve; NaN where the samples are too few for the first span's kind")

    @derived(unit="nat")
    def median_kl(self) -> float:
        """Median over samples of KL over all of an answer."""
        return float(np.nanmedian(self.kl))

    @derived(unit="nat")
    def median_last(self) -> float:
        """Median over samples of KL over the last third."""
        return float(np.nanmedian(self.last))

    @derived()
    def mean_top1(self) -> float:
        """Mean over samples of the share of same tokens."""
        return float(np.nanmean(self.top1))


@record
class DivergencePoint(Record, section="divergence point"):
    """One configuration's answers compared with the full cache's."""

    config: EvictionConfig = column("the configuration")
    cache_share: float = column(
        "entries of its cache over those of the full one when the answers began, mean over samples", key="held_share",
        heading="#cache\nshare",
    )  # fmt: skip
    first_difference: Floats = column(
        "per sample: index of the first token that differs, from 0; where one answer ends and the other goes on, its "
        "end; null: none differs",
        dims=("sample",),
    )
    equal_share_interval: OptionalInterval = interval("of the share of equal answers, exact")
    median_first_difference: float = column(
        "median over samples of the tokens before the first that differs, the lower of two middle ones; null: none "
        "differs",
        heading="#first\ndifference", text=_format_tokens,
    )  # fmt: skip
    median_first_difference_interval: OptionalInterval = interval("of it; an end that is null lies beyond every answer")
    rouge_l: Floats = column("per sample: ROUGE-L (F1 of words) against the full cache's answer", dims=("sample",))
    mean_rouge_l_interval: OptionalInterval = interval("of the mean ROUGE-L")
    forced: ForcedReading | None = column("its reading of the full cache's answer, where that was measured")

    @property
    def equal(self) -> NDArray[np.bool_]:
        """(sample,) True where no token of the answer differs."""
        return np.isinf(self.first_difference)

    @derived(unit="share", heading="#equal\nanswers")
    def equal_share(self) -> float:
        """Share of samples in which no token differs."""
        return float(self.equal.mean())

    @derived(heading="#ROUGE-L")
    def mean_rouge_l(self) -> float:
        """Mean over samples of ROUGE-L (F1 of the longest common sequence of words) against the full cache's answer."""
        return float(self.rouge_l.mean())

    @derived(heading="#KL,\nnat", json=False, text=words.three_digits)
    def kl(self) -> float | None:
        """Median over samples of KL(full ‖ evicted), mean over the steps of the full cache's answer."""
        return self.forced.median_kl if self.forced else None

    @property
    def kl_interval(self) -> OptionalInterval:
        """Interval of the median KL."""
        return self.forced.kl_interval if self.forced else None

    @derived(heading="#KL,\nlast third", json=False, text=words.three_digits,
             interval=lambda one: one.forced and one.forced.last_interval)  # fmt: skip
    def kl_last(self) -> float | None:
        """Median over samples of KL(full ‖ evicted), mean over the last third of each answer's steps."""
        return self.forced.median_last if self.forced else None

    @derived(heading="#same next\ntoken", unit="share", json=False,
             interval=lambda one: one.forced and one.forced.top1_interval)  # fmt: skip
    def same_token(self) -> float | None:
        """Mean over samples of the share of steps at which both caches would take the same token."""
        return self.forced.mean_top1 if self.forced else None

    def equal_prefix_shares(self, tokens: int) -> tuple[Floats, Band]:
        """Return the shares of samples whose first 0, 1, …, `tokens` tokens are equal, with exact intervals.

        Both are (tokens + 1,); no intervals for a single sample.
        """
        counts = (self.first_difference >= np.arange(tokens + 1)[:, None]).sum(axis=1)
        samples = len(self.first_difference)
        if samples < 2:
            return counts / samples, None
        by_count = [intervals.of_share(np.arange(samples) < count) for count in range(samples + 1)]
        low, high = (np.array([getattr(one, end) for one in by_count]) for end in ("low", "high"))
        return counts / samples, Interval(low[counts], high[counts])


def span_means(values: Sequence[Sequence[float]], span: int) -> Floats:
    """Return the means of each sample's values over consecutive `span` steps, (sample, span); NaN for empty spans."""
    count = -(-max(map(len, values)) // span)
    return np.array(
        [[_mean_or_nan(one[index * span : (index + 1) * span]) for index in range(count)] for one in values],
        dtype=np.float64,
    ).reshape(len(values), count)


def divergence_point(rows: Sequence[Row], config: EvictionConfig, span: int) -> DivergencePoint:
    """Return the divergence of one configuration's answers; each point of its KL curve averages `span` steps."""
    label = config.label()
    pairs = [(row["full"]["tokens"], row["evicted"][label]["tokens"]) for row in rows]
    first = np.array([_first_difference(full, evicted) for full, evicted in pairs])
    rouge = np.array([rouge_l(row["evicted"][label]["text"], row["full"]["text"]) for row in rows])
    return DivergencePoint(
        config=config,
        cache_share=float(np.mean([row["evicted"][label].get("held_share", np.nan) for row in rows])),
        first_difference=first,
        equal_share_interval=intervals.of_share(np.isinf(first)),
        median_first_difference=float(np.quantile(first, 0.5, method="lower")),
        median_first_difference_interval=intervals.of_median(first),
        rouge_l=rouge,
        mean_rouge_l_interval=intervals.of_mean(rouge, _SHARE),
        forced=None if rows[0].get("divergence") is None else _forced_reading(rows, label, span),
    )


def _forced_reading(rows: Sequence[Row], label: str, span: int) -> ForcedReading:
    """Return a cache's predictions along the full cache's answers; `label`: the configuration's."""
    read = [row["divergence"]["caches"][label] for row in rows]
    kl, top1 = (np.array([_mean_or_nan(one[name]) for one in read]) for name in ("kl", "top1"))
    last = np.array([_mean_or_nan(one["kl"][2 * len(one["kl"]) // 3 :]) for one in read])
    curves = span_means([one["kl"] for one in read], span)
    return ForcedReading(
        kl=kl,
        kl_interval=_median_interval(kl),
        last=last,
        last_interval=_median_interval(last),
        top1=top1,
        top1_interval=intervals.of_mean(top1, _SHARE),
        curve=np.nanmedian(curves, axis=0),
        curve_interval=intervals.joined([_median_interval(values) for values in curves.T]),
    )


def _median_interval(each: Floats) -> OptionalInterval:
    """Return the interval of the median of (sample,) values; samples that are NaN are left out."""
    return intervals.of_median(each[~np.isnan(each)])


def _first_difference(full: Sequence[int], evicted: Sequence[int]) -> float:
    """Return the index of the first differing token, or the shorter answer's length; infinity for equal answers."""
    if full == evicted:
        return float("inf")
    pairs = enumerate(zip(full, evicted, strict=False))
    return float(next((index for index, (one, other) in pairs if one != other), min(len(full), len(evicted))))


def _mean_or_nan(values: Sequence[float]) -> float:
    """Return the mean; NaN for no values."""
    return float(np.mean(values)) if len(values) else np.nan

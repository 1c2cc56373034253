"""How far one configuration's answers go with the full cache's, and how far its reading of that answer does.

ROUGE-L of two texts: how much of one stands in the other in the same order (Lin, 2004, section 3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import Band, Interval, Scalar
from perturbkv.configs.eviction import EvictionConfig

_WORDS = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
"""Letters and digits that stand together; of scripts that part no words, each sign."""


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, in lower case and without punctuation, in [0, 1].

    Of two texts without words 1 where both are the same, else 0.
    """
    found, wanted = (_WORDS.findall(one.lower()) for one in (text, reference))
    if not found or not wanted:
        return float(text.strip() == reference.strip())
    return 2 * _longest_common(found, wanted) / (len(found) + len(wanted))


def _longest_common(first: list[str], second: list[str]) -> int:
    """Length of the longest common subsequence, 64 words and more at once: a bit per word of `first` (Hyyrö, 2004)."""
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    whole = (1 << len(first)) - 1
    row = whole
    for word in second:
        matched = row & places.get(word, 0)
        row = (row + matched) | (row - matched)
    return len(first) - (row & whole).bit_count()


_BETWEEN = intervals.share_of(0)
"""A mean over samples of numbers from 0 to 1, which are shares of no heads."""
MOST_SPANS = 32
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Free:
    """Answers that every cache wrote on its own, against the full cache's.

    Attributes:
        first: (sample,) place of the first token that differs, from 0; where one answer ends and the other goes on, its
            end; infinite where no token differs, up to the end or to as many tokens as were asked for.
        median: of `first`, the lower of two middle ones.
        median_interval: two samples' values.
        equal_interval: exact, of the share of samples.
        rouge: (sample,) ROUGE-L against the full cache's answer.
        rouge_interval: of its mean.
    """

    first: Floats
    median: float
    median_interval: Scalar
    equal_interval: Scalar
    rouge: Floats
    rouge_interval: Scalar

    @property
    def equal(self) -> NDArray[np.bool_]:
        """(sample,) whether no token differs."""
        return np.isinf(self.first)

    def alike_after(self, tokens: int) -> tuple[Floats, Band]:
        """(tokens + 1,) share of samples in whose first 0, 1, … tokens none differs, and its exact band."""
        counts, samples = (self.first >= np.arange(tokens + 1)[:, None]).sum(axis=1), len(self.first)
        ends = [intervals.of_samples(np.arange(samples) < count) for count in range(samples + 1)]
        known = [end for end in ends if end is not None]
        if not known:
            return counts / samples, None
        low, high = (np.array([getattr(end, side) for end in known]) for side in ("low", "high"))
        return counts / samples, Interval(low[counts], high[counts])


@dataclass(frozen=True)
class Forced:
    """What a cache makes of each next token of the full cache's answer; a sample without tokens is NaN.

    KL is told by medians over samples: a single one can make a mean, and no interval sees it where it was not drawn.

    Attributes:
        kl: (sample,) mean over the answer's steps, nat.
        kl_interval: of the median over samples.
        last: (sample,) mean over the last third of the answer's own steps, nat.
        last_interval: of the median over samples.
        top1: (sample,) share of steps at which both would take the same token.
        top1_interval: of the mean over samples.
        curve: (span,) median KL over the samples that have steps there, each one's the mean over its steps.
        curve_interval: of `curve`; NaN where these are too few for the first span's kind.
    """

    kl: Floats
    kl_interval: Scalar
    last: Floats
    last_interval: Scalar
    top1: Floats
    top1_interval: Scalar
    curve: Floats
    curve_interval: Band

    @property
    def medians(self) -> dict[str, float]:
        """Median KL over samples, of all of an answer and of its last third."""
        return {"kl": float(np.nanmedian(self.kl)), "last": float(np.nanmedian(self.last))}


@dataclass(frozen=True)
class Parting:
    """One configuration.

    Attributes:
        config: the configuration.
        held: entries of its cache over those of the full one when the answers began; NaN where it is not known. A cache
            that is compressed again while it answers holds less later.
        free: its own answers.
        forced: its reading of the full cache's answers; None where that was not measured.
    """

    config: EvictionConfig
    held: float
    free: Free
    forced: Forced | None

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        free, forced = self.free, self.forced
        found: dict[str, Any] = plain(
            {
                "config": self.config,
                "held_share": self.held,
                "first_difference": free.first,
                "equal_share": free.equal.mean(),
                "equal_share_interval": free.equal_interval,
                "median_first_difference": free.median,
                "median_first_difference_interval": free.median_interval,
                "rouge_l": free.rouge,
                "mean_rouge_l": free.rouge.mean(),
                "mean_rouge_l_interval": free.rouge_interval,
                "forced": forced and {**vars(forced), "median_kl": forced.medians["kl"],
                                      "median_last": forced.medians["last"], "mean_top1": np.nanmean(forced.top1)},
            }
        )  # fmt: skip
        return found


def parting(rows: Sequence[Row], config: EvictionConfig, span: int) -> Parting:
    """One configuration over all samples; `span` steps of an answer make one point of the curve."""
    label = config.label()
    held = [row["evicted"][label].get("held_share", np.nan) for row in rows]
    forced = None if rows[0].get("divergence") is None else _forced(rows, label, span)
    return Parting(config, float(np.mean(held)), _free(rows, label), forced)


def spans(values: Sequence[Sequence[float]], span: int) -> Floats:
    """(sample, span) means over `span` steps of each sample's values; NaN where a sample has none of them."""
    count = -(-max(map(len, values)) // span)
    return np.array(
        [[_mean(one[place * span : (place + 1) * span]) for place in range(count)] for one in values], dtype=np.float64
    ).reshape(len(values), count)


def _free(rows: Sequence[Row], label: str) -> Free:
    pairs = [(row["full"]["tokens"], row["evicted"][label]["tokens"]) for row in rows]
    first = np.array([_first_difference(full, evicted) for full, evicted in pairs])
    rouge = np.array([rouge_l(row["evicted"][label]["text"], row["full"]["text"]) for row in rows])
    middle = intervals.of_medians(first[:, None])
    return Free(
        first=first,
        median=float(np.quantile(first, 0.5, method="lower")),
        median_interval=None if middle is None else middle.at(0),
        equal_interval=intervals.of_samples(np.isinf(first)),
        rouge=rouge,
        rouge_interval=intervals.of_mean(rouge, _BETWEEN),
    )


def _forced(rows: Sequence[Row], label: str, span: int) -> Forced:
    read = [row["divergence"]["caches"][label] for row in rows]
    kl, top1 = (np.array([_mean(one[name]) for one in read]) for name in ("kl", "top1"))
    last = np.array([_mean(one["kl"][2 * len(one["kl"]) // 3 :]) for one in read])
    curves = spans([one["kl"] for one in read], span)
    return Forced(
        kl=kl,
        kl_interval=_of_median(kl),
        last=last,
        last_interval=_of_median(last),
        top1=top1,
        top1_interval=intervals.of_mean(top1, _BETWEEN),
        curve=np.nanmedian(curves, axis=0),
        curve_interval=_of_medians(curves),
    )


def _of_median(each: Floats) -> Scalar:
    """Of the median over the samples (sample,) that are not NaN."""
    band = intervals.of_medians(each[~np.isnan(each), None])
    return None if band is None else band.at(0)


def _of_medians(curves: Floats) -> Band:
    """Of each span's median over the samples (sample, span) that have it; NaN where their kind is not the first's."""
    found = [_of_median(one) for one in curves.T]
    if not found or found[0] is None:
        return None
    kind = found[0].kind
    alike = [one if one is not None and one.kind == kind else Interval(np.nan, np.nan) for one in found]
    low, high = (np.array([getattr(one, end) for one in alike]) for end in ("low", "high"))
    return Interval(low, high, kind)


def _first_difference(full: Sequence[int], evicted: Sequence[int]) -> float:
    if full == evicted:
        return float("inf")
    pairs = enumerate(zip(full, evicted, strict=False))
    return float(next((place for place, (one, other) in pairs if one != other), min(len(full), len(evicted))))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else np.nan

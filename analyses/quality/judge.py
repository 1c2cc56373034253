"""The verdicts of an external judge: mean scores of every cache's answers, or preferences against the full cache's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.budget.budget_axis import above_full_caveat
from perturbkv.analyses.columns import Line, Record, column, derived, interval, record
from perturbkv.analyses.identity import RunIdentity, answers_identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import common, method_names, plural
from perturbkv.analyses.quality.divergence_point import AT_START, mean_cache_share
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, OptionalInterval, StatisticKind, difference_kind
from perturbkv.analyses.text import extremes, interval_verdict, sample_note, sentence, tally
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.storage.judgements import TIE, Judge, Judgement

_FREEDOM = 3 / 8
"""Degrees of freedom per sample, as of a mean of shares. For scores drawn from 1 to 10, skewed and not, intervals of
eight samples with the scale's limits cover the mean in 93 to 100 % of draws. Without a scale the limits are the scores
given, which bound nothing where a cache's scores are all equal: then there is no interval."""
_FALLS = {
    1: ("the judge scores answers from evicted caches lower", "lower"),
    -1: ("the judge scores answers from evicted caches higher", "higher"),
    0: ("whether the judge scores answers from evicted caches lower is undecided", "undecided"),
}


@record
class JudgeRequest(Record):
    """The external judge's command and its settings."""

    SECTION: ClassVar[str] = "judge request"

    command: tuple[str, ...] = column("program and arguments")
    pairwise: bool = column("whether pairs are compared, instead of answers scored")
    seed: int = column("of the order within pairs")
    scale: tuple[float, float] | None = column("least and largest score; null: any number")


@record
class ScoredCache(Record):
    """The judge's scores of one cache's answers.

    Attributes:
        drop: (sample,) the full cache's score less this cache's.
    """

    SECTION: ClassVar[str] = "scored cache"

    config: EvictionConfig | None = column("the configuration; null: the full cache")
    cache_share: float = column(
        "entries of its cache over those of the full one, mean over samples", key="held_share", heading="#cache\nshare"
    )
    scores: Floats = column("per sample, in the judge's own unit", dims=("sample",))
    mean_interval: OptionalInterval = interval("of the mean; null where all scores are alike and no scale was given")
    drop: Floats
    mean_drop_interval: OptionalInterval = interval("of the mean drop; null likewise")

    @derived(heading="#mean\nscore", text=text.decimal)
    def mean(self) -> float:
        """Mean over samples of the judge's scores."""
        return float(self.scores.mean())

    @derived()
    def mean_drop(self) -> float:
        """Full cache's score less this cache's, mean over samples."""
        return float(self.drop.mean())

    @derived(heading="#full −\nthis", json=False)
    def shown_drop(self) -> float | None:
        """Full cache's score less this cache's, mean over samples."""
        return None if self.config is None else self.mean_drop

    @property
    def shown_drop_interval(self) -> OptionalInterval:
        """Interval of the mean drop."""
        return self.mean_drop_interval


@record
class JudgeScores(Result):
    """One judge's scores of every cache's answers.

    Attributes:
        compress_every: entries above which a cache was compressed again; None: never.
        judgements: with the judge's comments.
    """

    SECTION: ClassVar[str] = "quality --judge"
    DOCUMENT: ClassVar[str] = "about answers"
    SHOWN: ClassVar[tuple[str, ...]] = ("cache_share", "mean", "shown_drop")
    FIRST: ClassVar[str] = "cache"

    identity: RunIdentity
    judge: JudgeRequest = column("the judge, and how it was asked")
    samples: tuple[str, ...] = column("ids, in the file's order")
    compress_every: int | None
    full: ScoredCache = column("the full cache")
    configs: tuple[ScoredCache, ...] = column("one per configuration, in the run's order")
    judgements: tuple[Judgement, ...]

    def conclusion(self) -> str:
        """Return whether the judge scores evicted caches' answers lower than the full cache's, and by how much."""
        drops = [(name, one.mean_drop, text.decimal(one.mean_drop, one.mean_drop_interval))
                 for name, one in self._named()]  # fmt: skip
        undecided = None if len(self.samples) < MIN_SAMPLES else 0
        verdicts = [
            undecided if one.mean_drop_interval is None else interval_verdict(one.mean_drop_interval, 0)
            for one in self.configs
        ]
        few = "too few samples to decide whether the judge scores answers from evicted caches lower"
        clause = few if None in verdicts else tally(verdicts, _FALLS, "configuration")
        mean = text.decimal(self.full.mean, self.full.mean_interval)
        numbers = f"full cache {mean}, drop {extremes(drops, 'of')}"
        return sentence(f"{clause}: {numbers} ({sample_note(len(self.samples))})")

    def title(self) -> str:
        """Return the quantity of the table, and the choices that all configurations share."""
        return " · ".join(filter(None, ("the judge's scores", common(self.identity.configs))))

    def lines(self) -> Sequence[Line]:
        """Return the full cache, then a line per configuration."""
        return [Line("full cache", (self.full,)), *(Line(name, (one,)) for name, one in self._named())]

    def interval_note(self) -> str:
        """Return the line on n and intervals."""
        return text.intervals_note(len(self.samples))

    def caveats(self) -> Sequence[str]:
        """Return notes on the scores' range, on equal scores without intervals, and on cache shares."""
        every = np.concatenate([one.scores for one in (self.full, *self.configs)])
        limit = "" if self.judge.scale else ", beyond which no interval goes"
        return [
            f"Scores given: {every.min():g} to {every.max():g}{limit}.",
            *(["No interval: all alike; --scale bounds what was not seen."] if self._unbounded else []),
            *([AT_START] if self.compress_every else []),
            *above_full_caveat(one.cache_share for one in self.configs),
        ]

    def details(self) -> Sequence[Part]:
        """Return the note on cache shares."""
        return [text.cache_share_note([one.cache_share for one in self.configs], self.compress_every)]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per answer: the judge's score and comment; `config` is None for the full cache."""
        labels = {one.label(): config_columns(one) for one in self.identity.configs}
        full_cache = dict.fromkeys(config_columns(self.identity.configs[0]))
        return [
            {
                **labels.get(one.label or "", full_cache),
                "sample": one.sample,
                "score": one.score,
                "comment": one.comment,
            }
            for one in self.judgements
        ]

    @property
    def _unbounded(self) -> bool:
        """True where a mean has no interval, as all of its samples are equal and the judge has no scale."""
        ends = [self.full.mean_interval, *(end for one in self.configs
                                           for end in (one.mean_interval, one.mean_drop_interval))]  # fmt: skip
        return len(self.samples) > 1 and None in ends

    def _named(self) -> list[tuple[str, ScoredCache]]:
        """Return (short name, configuration's scores) pairs."""
        return list(zip(method_names(self.identity.configs), self.configs, strict=True))


def judge_scores(answers: WrittenAnswers, judge: Judge, judgements: Sequence[Judgement]) -> JudgeScores:
    """Return the result of a judge's scores of every answer."""
    by_answer = {(one.sample, one.label): one.score for one in judgements}
    samples = tuple(row["sample"] for row in answers.rows)

    def scores(label: str | None) -> Floats:
        return np.array([by_answer[sample, label] for sample in samples], dtype=np.float64)

    every = [float(one.score) for one in judgements if one.score is not None]
    full, limits = scores(None), judge.scale or (min(every), max(every))
    width = limits[1] - limits[0]

    def scored_cache(config: EvictionConfig | None) -> ScoredCache:
        label = None if config is None else config.label()
        own = scores(label)
        drop = full - own
        return ScoredCache(
            config=config,
            cache_share=mean_cache_share(answers.rows, label) if label else 1.0,
            scores=own,
            mean_interval=bounded_interval(own, StatisticKind(_FREEDOM, limits=limits), judge),
            drop=drop,
            mean_drop_interval=bounded_interval(drop, difference_kind(width), judge),
        )

    configs = tuple(scored_cache(config) for config in answers.run.configs)
    return JudgeScores(
        identity=answers_identity(answers),
        judge=JudgeRequest(**judge.record()["judge"]),
        samples=samples,
        compress_every=answers.compress_every,
        full=scored_cache(None),
        configs=configs,
        judgements=tuple(judgements),
    )


def bounded_interval(each: Floats, kind: StatisticKind, judge: Judge) -> OptionalInterval:
    """Return the interval of a mean score; None if all samples are equal and the judge has no scale."""
    return None if judge.scale is None and np.ptp(each) == 0 else intervals.of_mean(each, kind)


OUTCOMES = ("win", TIE, "loss")
"""Outcomes of a comparison of the evicted cache's answer with the full cache's."""
_LOSES = {
    1: ("the judge prefers the full cache's answers", "the full cache's"),
    -1: ("the judge prefers answers from evicted caches", "the evicted one's"),
    0: ("which answers the judge prefers is undecided", "undecided"),
}


@record
class PreferredCache(Record):
    """The judge's preferences between one configuration's answers and the full cache's."""

    SECTION: ClassVar[str] = "preferred cache"

    config: EvictionConfig = column("the configuration")
    cache_share: float = column(
        "entries of its cache over those of the full one, mean over samples", key="held_share", heading="#cache\nshare"
    )
    outcomes: tuple[str, ...] = column("per sample, of the evicted cache's answer: win, tie or loss")
    shares: dict[str, float] = column("outcome → share of samples")
    intervals: dict[str, OptionalInterval] = column("outcome → exact interval of its share", key="share_intervals")
    lost_interval: OptionalInterval = interval("of the share of losses among decided samples, exact")

    @derived()
    def lost(self) -> float:
        """Share of losses among the samples that are no ties."""
        counts = {name: self.outcomes.count(name) for name in OUTCOMES}
        decided = counts["win"] + counts["loss"]
        return counts["loss"] / decided if decided else np.nan

    @derived(heading="#wins", json=False)
    def wins(self) -> str:
        """Share of samples in which the evicted cache's answer is preferred."""
        return self._format_share("win")

    @derived(heading="#ties", json=False)
    def ties(self) -> str:
        """Share of samples in which neither answer is preferred."""
        return self._format_share(TIE)

    @derived(heading="#losses", json=False)
    def losses(self) -> str:
        """Share of samples in which the full cache's answer is preferred."""
        return self._format_share("loss")

    def _format_share(self, outcome: str) -> str:
        """Return the share of samples with an outcome, its interval on a second line."""
        return text.percent(self.shares[outcome], self.intervals[outcome], "\n")


@record
class Preferences(Result):
    """One judge's preferences between every configuration's answers and the full cache's.

    Attributes:
        compress_every: entries above which a cache was compressed again; None: never.
        judgements: with the judge's comments.
    """

    SECTION: ClassVar[str] = "quality --judge --pairwise"
    DOCUMENT: ClassVar[str] = "about answers"
    SHOWN: ClassVar[tuple[str, ...]] = ("cache_share", "wins", "ties", "losses")

    identity: RunIdentity
    judge: JudgeRequest = column("the judge, and how it was asked")
    samples: tuple[str, ...] = column("ids, in the file's order")
    compress_every: int | None
    configs: tuple[PreferredCache, ...] = column("one per configuration, in the run's order")
    same: int = column("pairs of the same text: ties, which the judge did not get", key="same_text")
    first: float = column("share of the decided pairs whose answer shown first won", key="first_won")
    pairs: int = column("pairs that are no ties", key="decided_pairs")
    judgements: tuple[Judgement, ...]

    def conclusion(self) -> str:
        """Return whether the judge prefers the full cache's answers, and how often evicted caches' answers lose."""
        count = f"n = {plural(len(self.samples), 'sample')}"
        if self.same == len(self.judgements):
            return f"All answers from evicted caches are the full cache's: the judge was asked nothing ({count})."
        shares = [(name, one.shares["loss"], text.percent(one.shares["loss"], one.intervals["loss"]))
                  for name, one in self._named()]  # fmt: skip
        verdicts = [interval_verdict(one.lost_interval, 0.5) or 0 for one in self.configs]
        clause = tally(verdicts, _LOSES, "configuration")
        return sentence(f"{clause}: evicted caches' answers lose {extremes(shares, 'of')} ({count})")

    def title(self) -> str:
        """Return the quantity of the table, and the choices that all configurations share."""
        return " · ".join(filter(None, ("answers against the full cache's", common(self.identity.configs))))

    def lines(self) -> Sequence[Line]:
        """Return a line per configuration."""
        return [Line(name, (one,)) for name, one in self._named()]

    def interval_note(self) -> str:
        """Return the line on n and intervals."""
        return f"n = {plural(len(self.samples), 'sample')}. {text.shares_note(len(self.samples))}"

    def caveats(self) -> Sequence[str]:
        """Return how many pairs of equal texts were not judged, and how often the answer shown first won."""
        return [
            f"{plural(self.same, 'pair')} of the same text: ties, which the judge did not get.",
            f"The answer shown first won {text.percent(self.first)} of {plural(self.pairs, 'decided pair')}.",
            *([AT_START] if self.compress_every else []),
            *above_full_caveat(one.cache_share for one in self.configs),
        ]

    def details(self) -> Sequence[Part]:
        """Return the seed of the order within pairs, and the note on cache shares."""
        share = text.cache_share_note([one.cache_share for one in self.configs], self.compress_every)
        return [f"The order within pairs is drawn by seed {self.judge.seed}.", share]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per pair: outcome of the evicted cache's answer, position of the full cache's, and comment."""
        labels = {one.label(): config_columns(one) for one in self.identity.configs}
        return [
            {**labels[one.label or ""], "sample": one.sample, "outcome": one.outcome, "full_is": one.full_is,
             "comment": one.comment}
            for one in self.judgements
        ]  # fmt: skip

    def _named(self) -> list[tuple[str, PreferredCache]]:
        """Return (short name, configuration's preferences) pairs."""
        return list(zip(method_names(self.identity.configs), self.configs, strict=True))


def judge_preferences(answers: WrittenAnswers, judge: Judge, judgements: Sequence[Judgement]) -> Preferences:
    """Return the result of a judge's preferences in every pair of answers."""
    by_answer = {(one.sample, one.label): str(one.outcome) for one in judgements}
    samples = tuple(row["sample"] for row in answers.rows)
    firsts = [one.first for one in judgements if one.first is not None]
    configs = []
    for config in answers.run.configs:
        outcomes = tuple(by_answer[sample, config.label()] for sample in samples)
        configs.append(_preferred_cache(config, mean_cache_share(answers.rows, config.label()), outcomes))
    first = float(np.mean(firsts)) if firsts else np.nan
    texts = [(row["full"]["text"], one["text"]) for row in answers.rows for one in row["evicted"].values()]
    same = sum(full == own for full, own in texts)
    return Preferences(
        identity=answers_identity(answers),
        judge=JudgeRequest(**judge.record()["judge"]),
        samples=samples,
        compress_every=answers.compress_every,
        configs=tuple(configs),
        same=same,
        first=first,
        pairs=len(firsts),
        judgements=tuple(judgements),
    )


def _preferred_cache(config: EvictionConfig, share: float, outcomes: tuple[str, ...]) -> PreferredCache:
    """Return a configuration's shares of wins, ties and losses with their intervals."""
    hits = {name: np.array([one == name for one in outcomes]) for name in OUTCOMES}
    decided = hits["loss"][~hits[TIE]]
    return PreferredCache(
        config=config,
        cache_share=share,
        outcomes=outcomes,
        shares={name: float(hit.mean()) for name, hit in hits.items()},
        intervals={name: intervals.of_share(hit) for name, hit in hits.items()},
        lost_interval=intervals.of_share(decided) if len(decided) else None,
    )

"""What a judge that is not ours thinks of every answer: mean scores, and how far evicted caches fall below the full.

Which of two answers a judge that is not ours prefers, the full cache's or an evicted one's, in a drawn order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity, of_answers
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import common, counted, folded, short_names
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import LEAST, Kind, Scalar, difference_of
from perturbkv.analyses.text import decided, extremes, over, sentence, tally_verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.storage.judgements import TIE, Judge, Judgement

_FREEDOM = 3 / 8
"""As of a mean of shares. Drawing scores of 1 to 10, skewed and not, intervals of eight samples with the scale's limits
hold the mean in 93 to 100 % of draws. Where the scale is not told its limits are the scores given, which say nothing of
others where a cache's are all alike: then there is no interval."""
_ALIKE = "All alike: no interval; give --scale to bound what was not seen."
_FALLS = {
    1: ("the judge scores answers from evicted caches lower", "lower"),
    -1: ("the judge scores answers from evicted caches higher", "higher"),
    0: ("whether the judge scores answers from evicted caches lower is undecided", "undecided"),
}


@dataclass(frozen=True)
class Scored:
    """The judge's scores of one cache's answers.

    Attributes:
        config: the configuration; None: the full cache.
        held: entries of its cache over those of the full one.
        scores: (sample,) in the judge's own unit.
        interval: of their mean; None also where they are all alike and the scale is not told.
        drop: (sample,) the full cache's score less this one's.
        drop_interval: of its mean, likewise.
    """

    config: EvictionConfig | None
    held: float
    scores: Floats
    interval: Scalar
    drop: Floats
    drop_interval: Scalar

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "config": self.config,
                "held_share": self.held,
                "scores": self.scores,
                "mean": self.scores.mean(),
                "mean_interval": self.interval,
                "mean_drop": self.drop.mean(),
                "mean_drop_interval": self.drop_interval,
            }
        )
        return found


@dataclass(frozen=True, repr=False)
class Judged(Result):
    """Every cache's answers before one judge.

    Attributes:
        identity: which run this is.
        judge: who was asked.
        samples: names, in the file's order.
        compress_every: entries above which a cache was compressed again; None: never.
        full: the full cache.
        configs: in the run's order.
        judgements: with the judge's comments.
    """

    identity: RunIdentity
    judge: Judge
    samples: tuple[str, ...]
    compress_every: int | None
    full: Scored
    configs: tuple[Scored, ...]
    judgements: tuple[Judgement, ...]

    def conclusion(self) -> str:
        """Whether evicted caches' answers are scored lower, and by how much."""
        drops = [(name, float(one.drop.mean()), text.decimal(float(one.drop.mean()), one.drop_interval))
                 for name, one in self._named()]  # fmt: skip
        alike = None if len(self.samples) < LEAST else 0  # without an interval nothing is decided
        verdicts = [alike if one.drop_interval is None else decided(one.drop_interval, 0) for one in self.configs]
        said = "the judge's mean scores" if None in verdicts else tally_verdicts(verdicts, _FALLS, "configuration")
        mean = text.decimal(float(self.full.scores.mean()), self.full.interval)
        told = f"full cache {mean}, drop {extremes(drops, 'of')}"
        return sentence(f"{said}: {told} ({over(len(self.samples))})")

    def tables(self) -> list[Table | str]:
        """Mean score of every cache, and its drop."""
        rows = [["full cache", *_row(self.full)[:2], "–"]]
        rows += [[folded(name, 30), *_row(one)] for name, one in self._named()]
        held = text.HELD_AT_START if self.compress_every else "#held /\nfull"
        columns = ("cache", held, "#mean\nscore", "#full − this")
        return [*filter(None, [common(self.identity.configs)]), Table("", columns, rows)]

    def notes(self) -> str:
        """n, the range of scores, and what a drop is."""
        given = np.concatenate([one.scores for one in (self.full, *self.configs)])
        return " ".join(
            [
                f"{text.about_intervals(len(self.samples))} Scores given: {given.min():g} to {given.max():g}"
                f"{'' if self.judge.scale else ', beyond which no interval goes'}.",
                *([_ALIKE] if self._unbounded else []),
                "Full − this: of the same sample, mean.",
                text.about_held([one.held for one in self.configs], self.compress_every),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "judge": self.judge.record()["judge"],
                "samples": self.samples,
                "full": self.full.to_dict(),
                "configs": [one.to_dict() for one in self.configs],
            }
        )
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per answer: the judge's score and comment; of the full cache `config` is None."""
        columns = {one.label(): columns_of(one) for one in self.identity.configs}
        nobody = dict.fromkeys(columns_of(self.identity.configs[0]))
        return [
            {**columns.get(one.label or "", nobody), "sample": one.sample, "score": one.score, "comment": one.comment}
            for one in self.judgements
        ]

    @property
    def _unbounded(self) -> bool:
        """Whether some mean has no interval because all that it is of is alike."""
        found = [self.full.interval, *(end for one in self.configs for end in (one.interval, one.drop_interval))]
        return len(self.samples) > 1 and None in found

    def _named(self) -> list[tuple[str, Scored]]:
        names = [name or "evicted" for name in short_names(self.identity.configs)]
        return list(zip(names, self.configs, strict=True))


def judged(answers: WrittenAnswers, judge: Judge, judgements: Sequence[Judgement]) -> Judged:
    """The scores that a judge gave every answer."""
    given = {(one.sample, one.label): one.score for one in judgements}
    samples = tuple(row["sample"] for row in answers.rows)

    def scores(label: str | None) -> Floats:
        return np.array([given[sample, label] for sample in samples], dtype=np.float64)

    every = [float(one.score) for one in judgements if one.score is not None]
    full, limits = scores(None), judge.scale or (min(every), max(every))
    width = limits[1] - limits[0]

    def scored(config: EvictionConfig | None) -> Scored:
        label = None if config is None else config.label()
        own, shares = scores(label), [row["evicted"][label].get("held_share", np.nan) if label else 1.0
                                      for row in answers.rows]  # fmt: skip
        drop = full - own
        return Scored(
            config=config,
            held=float(np.mean(shares)),
            scores=own,
            interval=bounded(own, Kind(_FREEDOM, limits=limits), judge),
            drop=drop,
            drop_interval=bounded(drop, difference_of(width), judge),
        )

    configs = tuple(scored(config) for config in answers.run.configs)
    told = answers.compress_every
    return Judged(of_answers(answers), judge, samples, told, scored(None), configs, tuple(judgements))


def bounded(each: Floats, kind: Kind, judge: Judge) -> Scalar:
    """The interval of a mean; None where all samples are alike and no scale says how far others could lie."""
    return None if judge.scale is None and np.ptp(each) == 0 else intervals.of_mean(each, kind)


def _row(one: Scored) -> list[str]:
    return [
        text.held(one.held),
        _mean(one.scores, one.interval),
        _mean(one.drop, one.drop_interval),
    ]


def _mean(each: Floats, interval: Scalar) -> str:
    alike = "\nall alike" if interval is None and len(each) > 1 else ""
    return text.decimal(float(each.mean()), interval, apart="\n") + alike


OUTCOMES = ("win", TIE, "loss")
"""Of the evicted cache's answer against the full cache's."""
_LOSES = {
    1: ("the judge prefers the full cache's answers", "the full cache's"),
    -1: ("the judge prefers answers from evicted caches", "the evicted one's"),
    0: ("which answers the judge prefers is undecided", "undecided"),
}


@dataclass(frozen=True)
class Preferred:
    """One configuration's answers against the full cache's.

    Attributes:
        config: the configuration.
        held: entries of its cache over those of the full one.
        outcomes: (sample,) win, tie or loss of its own answer.
        shares: outcome -> share of samples.
        intervals: outcome -> its exact interval.
        lost_interval: exact, of the share of losses among the samples that are no ties.
    """

    config: EvictionConfig
    held: float
    outcomes: tuple[str, ...]
    shares: dict[str, float]
    intervals: dict[str, Scalar]
    lost_interval: Scalar

    @property
    def lost(self) -> float:
        """Losses among the samples that are no ties; NaN where all are."""
        counts = {name: self.outcomes.count(name) for name in OUTCOMES}
        played = counts["win"] + counts["loss"]
        return counts["loss"] / played if played else np.nan

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "config": self.config,
                "held_share": self.held,
                "outcomes": self.outcomes,
                "shares": self.shares,
                "share_intervals": self.intervals,
                "lost": self.lost,
                "lost_interval": self.lost_interval,
            }
        )
        return found


@dataclass(frozen=True, repr=False)
class Preferences(Result):
    """Every configuration's answers against the full cache's, before one judge.

    Attributes:
        identity: which run this is.
        judge: who was asked.
        samples: names, in the file's order.
        compress_every: entries above which a cache was compressed again; None: never.
        configs: in the run's order.
        same: pairs of the same text, of which nobody was asked.
        first: share of the decided pairs whose first answer won: a judge who looks at the answers alone has 0.5.
        pairs: how many pairs were decided.
        judgements: with the judge's comments.
    """

    identity: RunIdentity
    judge: Judge
    samples: tuple[str, ...]
    compress_every: int | None
    configs: tuple[Preferred, ...]
    same: int
    first: float
    pairs: int
    judgements: tuple[Judgement, ...]

    def conclusion(self) -> str:
        """Whose answers are preferred, and how often the evicted cache's lose."""
        count = f"n = {counted(len(self.samples), 'sample')}"
        if self.same == len(self.judgements):
            return f"All answers from evicted caches are the full cache's: the judge was asked nothing ({count})."
        told = [(name, one.shares["loss"], text.percent(one.shares["loss"], one.intervals["loss"]))
                for name, one in self._named()]  # fmt: skip
        verdicts = [decided(one.lost_interval, 0.5) or 0 for one in self.configs]
        said = tally_verdicts(verdicts, _LOSES, "configuration")
        return sentence(f"{said}: evicted caches' answers lose {extremes(told, 'of')} ({count})")

    def tables(self) -> list[Table | str]:
        """Wins, ties and losses of every configuration."""
        rows = [
            [folded(name, 24), text.held(one.held),
             *(text.percent(one.shares[outcome], one.intervals[outcome], apart="\n") for outcome in OUTCOMES)]
            for name, one in self._named()
        ]  # fmt: skip
        held = text.HELD_AT_START if self.compress_every else "#held /\nfull"
        columns = ("configuration", held, "#wins", "#ties", "#losses")
        return [*filter(None, [common(self.identity.configs)]), Table("", columns, rows)]

    def notes(self) -> str:
        """n, what a tie is, and whether the place of an answer decided."""
        samples = len(self.samples)
        return (
            f"n = {counted(samples, 'sample')}. {text.about_shares(samples)} Wins, ties, losses of the evicted "
            f"cache's answer against the full cache's; {counted(self.same, 'pair')} of the same text: ties, and nobody "
            f"was asked. The answer shown first won {text.percent(self.first)} of "
            f"{counted(self.pairs, 'decided pair')}, in an order drawn by seed {self.judge.seed}. "
            f"{text.about_held([one.held for one in self.configs], self.compress_every)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "judge": self.judge.record()["judge"],
                "samples": self.samples,
                "configs": [one.to_dict() for one in self.configs],
                "same_text": self.same,
                "first_won": self.first,
                "decided_pairs": self.pairs,
            }
        )
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per pair: outcome of the evicted cache's answer, which side the full cache's was, the comment."""
        columns = {one.label(): columns_of(one) for one in self.identity.configs}
        return [
            {**columns[one.label or ""], "sample": one.sample, "outcome": one.outcome, "full_is": one.full_is,
             "comment": one.comment}
            for one in self.judgements
        ]  # fmt: skip

    def _named(self) -> list[tuple[str, Preferred]]:
        names = [name or "evicted" for name in short_names(self.identity.configs)]
        return list(zip(names, self.configs, strict=True))


def preferred(answers: WrittenAnswers, judge: Judge, judgements: Sequence[Judgement]) -> Preferences:
    """Wins, ties and losses that a judge gave every pair."""
    given = {(one.sample, one.label): str(one.outcome) for one in judgements}
    samples = tuple(row["sample"] for row in answers.rows)
    firsts = [one.first for one in judgements if one.first is not None]
    configs = []
    for config in answers.run.configs:
        outcomes = tuple(given[sample, config.label()] for sample in samples)
        shares = [row["evicted"][config.label()].get("held_share", np.nan) for row in answers.rows]
        configs.append(_counted(config, float(np.mean(shares)), outcomes))
    first = float(np.mean(firsts)) if firsts else np.nan
    texts = [(row["full"]["text"], one["text"]) for row in answers.rows for one in row["evicted"].values()]
    same = sum(full == own for full, own in texts)
    return Preferences(
        of_answers(answers), judge, samples, answers.compress_every, tuple(configs), same, first, len(firsts),
        tuple(judgements),
    )  # fmt: skip


def _counted(config: EvictionConfig, held: float, outcomes: tuple[str, ...]) -> Preferred:
    hits = {name: np.array([one == name for one in outcomes]) for name in OUTCOMES}
    played = hits["loss"][~hits[TIE]]
    return Preferred(
        config=config,
        held=held,
        outcomes=outcomes,
        shares={name: float(hit.mean()) for name, hit in hits.items()},
        intervals={name: intervals.of_samples(hit) for name, hit in hits.items()},
        lost_interval=intervals.of_samples(played) if len(played) else None,
    )

"""Which of two answers a judge that is not ours prefers, the full cache's or an evicted one's, in a drawn order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity, of_answers
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.naming import common, counted, folded, short
from perturbkv.analyses.result import Result
from perturbkv.analyses.sentences import decided, ends, sentence, tally
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import Scalar
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.storage.judgements import TIE, Judge, Judgement

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
        said = tally(verdicts, _LOSES, "configuration")
        return sentence(f"{said}: evicted caches' answers lose {ends(told, 'of')} ({count})")

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
        names = [name or "evicted" for name in short(self.identity.configs)]
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

"""Quality: scores of the answers from evicted caches, data set by data set (paper, tables 1 to 3, 5 and 6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from perturbkv.analyses import columns, measurements, text
from perturbkv.analyses.columns import Line, Record, column, derived, record
from perturbkv.analyses.conclusions import Case, Claim, cut_off_claim, unanswered_claims
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.multi_trace import as_traces
from perturbkv.analyses.names import short_names
from perturbkv.analyses.quality import score_tables
from perturbkv.analyses.quality.graded_tasks import Task, shared_configs, tasks
from perturbkv.analyses.quality.score_columns import (
    AVERAGE,
    FULL,
    Comparison,
    DatasetScores,
    Gain,
    Layout,
    MethodScore,
    ScoreColumn,
    ScoreDifference,
    dataset_columns,
    rows,
    score_column,
)
from perturbkv.analyses.quality.score_columns import layout as lay_out
from perturbkv.analyses.result import Result
from perturbkv.analyses.sides import comparable_groups, pairs
from perturbkv.analyses.verdicts import LESS, MORE
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part, plural
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_MOST_NAMED = 4
"""Largest number of data sets that are named in a figure's foot."""


@record
class ShownScore(Record):
    """A line of a table of scores: a configuration, or the full cache where `method` is None."""

    cache_share: float = column(
        "entries of the cache over those of the full one, mean over data sets", heading="#cache\nshare"
    )
    method: MethodScore | None
    full: ScoreColumn
    gain: Gain | None

    @derived(heading="#score\n× 100", json=False)
    def score(self) -> str:
        """Mean score of the answers × 100; *: the highest of its budget, granularity and protection, by looking."""
        if self.method is None:
            return _format_score(self.full.full, self.full.full_interval)
        return ("*" if self.method.best else "") + _format_score(self.method.score, self.method.score_interval)

    @derived(heading="#less\nfull cache's", json=False)
    def minus_full(self) -> str:
        """Score × 100 less the full cache's, sample by sample."""
        return _format_difference(self.method.minus_full if self.method else None)

    @derived(heading="#less\nbaseline's", json=False)
    def minus_baseline(self) -> str:
        """Score × 100 less the baseline's, sample by sample."""
        return _format_difference(self.gain)

    @derived(heading="#samples\n+/=/−", json=False)
    def samples_of_baseline(self) -> str:
        """Samples whose answer is better than, as good as, worse than the baseline's."""
        return self.gain.samples if self.gain else ""


@record
class Quality(
    Result,
    section="quality",
    document="of scores",
    rows="samples",
    shown=("cache_share", "score", "minus_full", "minus_baseline", "samples_of_baseline"),
    first="method",
):
    """Scores of every data set, by kind of task and on average.

    Attributes:
        identity: of all runs together.
        lacking: the data sets without a configuration that another data set has.
        tasks: the data sets with each sample's scores, those of a kind together.
        pairs: indices of each baseline and treatment that differ in selection alone; empty without such a pair.
    """

    identity: RunIdentity
    configs: tuple[EvictionConfig, ...] = column("those that all traces hold, in the order of `methods`")
    left_out: tuple[EvictionConfig, ...] = column("those that only some of the traces hold")
    lacking: tuple[str, ...]
    tasks: tuple[Task, ...]
    baseline: str = column("selection that `gains` are over")
    treatment: str = column("selection that `gains` are of")
    pairs: tuple[tuple[int, int], ...]
    datasets: tuple[DatasetScores, ...] = column("one per data set, those of a kind together")
    kinds: tuple[ScoreColumn, ...] = column("one per kind of task: the mean over its data sets")
    average: ScoreColumn = column("the mean over all data sets, each of which counts the same")

    def claims(self) -> Sequence[Claim]:
        """Return the full cache's score, the least and the largest of the evicted ones, and whether treatments gain."""
        average = self.average
        if not average.full:
            return unanswered_claims(Claim("evicted caches", "score", []), "the full cache scores 0", *self._cut_off)
        full = Case.number("", average.full, average.full_interval, text.points)
        named = zip(self.identity.names, average.methods, strict=True)
        evicted = [Case.number(name, one.score, one.score_interval, text.points) for name, one in named]
        names = short_names([gain.treatment for gain in average.gains])
        gains = [
            Case.number(name, gain.difference, gain.difference_interval, text.difference_in_points, 0)
            for name, gain in zip(names, average.gains, strict=True)
        ]
        comparison = Claim(self.treatment, "scores", gains, {MORE: "higher", LESS: "lower"}, self.baseline)
        return [
            Claim("the full cache", "scores", [full], where=" of 100"),
            Claim("an evicted cache", "scores", evicted),
            *([comparison] if gains else []),
        ]

    def scope(self) -> Sequence[str]:
        """Return what the claims are of: the average of data sets, where there are several, and the samples."""
        count = len(self.average.tasks)
        average = [f"average of {count} data sets"] if count > 1 else []
        return [*average, text.sample_note(self.average.samples)]

    def title(self) -> str:
        """Return the data set, or that it is an average of several, the baseline, and what a star marks."""
        star = "; *: best of its budget, by looking" if any(one.best for one in self.average.methods) else ""
        return self._column_title(self.average) + star

    def lines(self) -> Sequence[Line]:
        """Return the full cache, then a line per configuration."""
        return self._column_lines(self.average)

    def interval_note(self) -> str:
        """Return the line on n and intervals."""
        return f"n = {score_tables.sample_counts(self.datasets)}. {score_tables.brackets_note(self.datasets)}"

    def caveats(self) -> Sequence[str]:
        """Return notes on terms that are not the data sets' own, left-out configurations, and unchangeable answers."""
        left = f"Left out: {plural(len(self.left_out), 'configuration')} that not all data sets have."
        terms = score_tables.terms_notes(self.datasets)
        if self.average.full and self.average.cut_off:  # else the conclusion begins with it
            terms = [*terms, f"{cut_off_claim(*self._cut_off).clause()}."]
        return [
            *([" ".join(terms)] if terms else []),
            *([left] if self.left_out else []),
            *measurements.first_token_caveat(sum(task.one_token_answers for task in self.tasks), self.average.samples),
        ]

    def details(self) -> Sequence[Part]:
        """Return tables of each kind of task and each data set, and notes on metrics and configurations left out."""
        several = len(self.datasets) > 1
        kinds = [kind for kind in self.kinds if 1 < len(kind.tasks) < len(self.tasks)]
        left = ", ".join(config.label() for config in self.left_out)
        one_token_answers = sum(task.one_token_answers for task in self.tasks)
        return [
            *(
                columns.table(self._column_title(one), self._column_lines(one), self.SHOWN, self.FIRST)
                for one in [*kinds, *(self.datasets if several else [])]
            ),
            score_tables.grades_note(self.datasets),
            *(["Every data set counts the same in a kind's mean and in the average."] if several else []),
            f"*: {score_tables.BEST}; differences show whether that is decided.",
            *filter(None, [measurements.first_token_note(one_token_answers, self.average.samples)]),
            *([f"Left out, as not all data sets have them ({', '.join(self.lacking)}): {left}."] if left else []),
            text.cache_share_note([method.cache_share for one in self.datasets for method in one.methods]),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per sample and configuration, the full cache first: score in [0, 1], `full` the full cache's.

        `held` is the cache share; `propagated` L1 over the full run's norms and `kl` in nat are of the first step.
        """
        full_cache = {"config": "full cache", "policy": None, "selection": None, "budget": None}
        records: list[dict[str, Any]] = []
        measured = {"propagated": None, "kl": None}
        for one, (index, sample) in ((task, place) for task in self.tasks for place in enumerate(task.samples)):
            labels = {"dataset": one.dataset, "kind": one.kind, "sample": sample, "full": float(one.full[index])}
            records.append({**full_cache, **labels, "score": labels["full"], "held": 1.0, **measured})
            for number, config in enumerate(self.configs):
                first_step = {name: float(getattr(one, name)[index, number]) for name in measured}
                score, share = float(one.evicted[index, number]), float(one.cache_shares[index, number])
                records.append({**config_columns(config), **labels, "score": score, "held": share, **first_step})
        return records

    def to_latex(self) -> str:
        """Return the tables as LaTeX, for booktabs."""
        return score_tables.latex(self.layouts(), self._caption())

    def to_markdown(self) -> str:
        """Return the tables as Markdown."""
        return score_tables.markdown(self.layouts(), self._caption())

    def to_csv(self) -> str:
        """Return the widest table as CSV: scores × 100 and their intervals, guarded against spreadsheets."""
        return score_tables.csv(self.layouts()[-1], self.configs)

    def layouts(self) -> tuple[Layout, ...]:
        """Return the layouts by kind, if any kind holds several data sets, and by data set."""
        kinds = [self.kinds] if 1 < len(self.kinds) < len(self.datasets) else []
        return tuple(lay_out(self.configs, shown, self.average) for shown in [*kinds, self.datasets])

    @property
    def _cut_off(self) -> tuple[int, int, list[int]]:
        """Answers of the full cache that were cut off, all of them, and each data set's largest number of tokens."""
        return self.average.cut_off, self.average.samples, [task.terms.answer for task in self.tasks]

    def _caption(self) -> str:
        """Return the caption of the exported tables: the run, metrics and intervals."""
        return f"{self.identity.lines()[0]}. {score_tables.caption(self.datasets)}"

    def _column_title(self, one: ScoreColumn) -> str:
        """Return a table's title: the data set, or the kind or average with its number of data sets; the baseline."""
        name = one.tasks[0].name if len(one.tasks) == 1 else f"{one.name} of {len(one.tasks)} data sets"
        return name + (f"; baseline: {self.baseline}" if self.pairs else "")

    def _column_lines(self, one: ScoreColumn) -> list[Line]:
        """Return the lines of a data set, a kind of task, or the average: full cache, then each configuration."""
        names = self.identity.names
        gains = {gain.treatment: gain for gain in reversed(one.gains)}  # of several baselines the first
        lines = [Line(FULL, (ShownScore(1.0, None, one, None),))]
        for row in rows(self.configs, [one]):
            if row.index is not None:
                method = one.methods[row.index]
                shown = ShownScore(method.cache_share, method, one, gains.get(method.config))
                lines.append(Line(names[row.index], (shown,)))
        return lines


def _format_score(value: float, interval: Any) -> str:
    """Return a score × 100, its interval on a second line."""
    return text.points(value, interval, separator="\n", end_digits=0)


def _format_difference(difference: ScoreDifference | None) -> str:
    """Return a difference of scores × 100, its interval on a second line; empty for None."""
    return "" if difference is None else _format_score(difference.difference, difference.difference_interval)


def quality(traces: Trace | Iterable[Trace], *, baseline: str = "attention", treatment: str = "two-stage") -> Quality:
    """Score the answers from evicted caches by the data sets' own metrics (paper, tables 1 to 3, 5 and 6).

    A score is a mean over samples, an average one over data sets, each of which counts the same (the paper's "Ave.").
    Intervals: over samples of a data set as everywhere, over several data sets by `analyses.stats.intervals`.

    Args:
        traces: one of each data set, with answers that were generated from the full cache and from every evicted one.
        baseline: a selection, or policy:selection.
        treatment: compared with the baseline at the same budget and, for two selections, the same policy.

    Raises TraceError for traces without graded answers, without a complete sample, of one data set twice, of different
    models or scenarios, or without a configuration that all of them hold.

    Example, of a `trace` of 5 samples:
        >>> import perturbkv as pk
        >>> pk.quality(trace).datasets[0].samples
        5
    """
    graded = as_traces(traces)
    configs = shared_configs(graded)
    every = dict.fromkeys(config for trace in graded for config in trace.run.configs)
    partial = tuple(config for config in every if config not in configs)
    pair_indices: tuple[tuple[int, int], ...] = ()
    with contextlib.suppress(TraceError):  # the configurations may hold no such pair
        both = pairs(replace(graded[0].run, configs=configs), baseline, treatment)
        pair_indices = tuple((configs.index(first), configs.index(second)) for first, second in both)
    compared, datasets = Comparison(configs, pair_indices, comparable_groups(configs)), tasks(graded, configs)
    by_kind = groupby(datasets, key=lambda task: task.kind)
    each = [identity(trace, configs) for trace in graded]
    return Quality(
        identity=replace(
            each[0],
            dataset=_names_or_count([one.dataset for one in each], f"{len(each)} data sets"),
            samples=sum(one.samples for one in each),
            failed=sum(one.failed for one in each),
            trace=_names_or_count([one.trace for one in each if one.trace], "one of each"),
            byte_shares=tuple(
                sum(shares) / len(each) for shares in zip(*(one.byte_shares for one in each), strict=True)
            ),
        ),
        configs=configs,
        left_out=partial,
        lacking=tuple(one.run.dataset for one in graded if not set(partial) <= set(one.run.configs)),
        tasks=datasets,
        baseline=baseline,
        treatment=treatment,
        pairs=pair_indices,
        datasets=dataset_columns(datasets, compared),
        kinds=tuple(score_column(kind, list(some), compared) for kind, some in by_kind),
        average=score_column(AVERAGE, datasets, compared),
    )


def _names_or_count(names: Sequence[str], many: str) -> str:
    """Return up to four names, joined by commas; the text `many` for more names."""
    return ", ".join(names) if len(names) <= _MOST_NAMED else many

"""Quality: scores of the answers from evicted caches, data set by data set (paper, tables 1 to 3, 5 and 6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from math import isnan
from typing import Any

from perturbkv.analyses import columns, measurements, text
from perturbkv.analyses.columns import Line, Record, column, derived, record
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.multi_trace import as_traces
from perturbkv.analyses.pairing import CACHE_SIZE_CHOICES, comparable_groups, method_names, pairs, plural, short_names
from perturbkv.analyses.quality import score_tables
from perturbkv.analyses.quality.graded_tasks import Task, partial_configs, shared_configs, tasks
from perturbkv.analyses.quality.score_columns import (
    AVERAGE,
    FULL,
    Comparison,
    DatasetScores,
    Gain,
    Layout,
    MethodScore,
    Row,
    ScoreColumn,
    ScoreDifference,
    by_dataset,
    by_kind,
    rows,
    score_column,
)
from perturbkv.analyses.quality.score_columns import layout as lay_out
from perturbkv.analyses.result import Result
from perturbkv.analyses.text import Words, interval_verdict, sentence, tally
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Part, Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_MOST_NAMED = 4
"""Data sets in a figure's foot, which grows with each."""
_MOST_BEST = 3
"""Budgets whose best method a conclusion names; of more the least and the largest."""
_ROUNDED = 0.005
"""Shares that differ by less are written alike."""


@record
class ShownScore(Record):
    """One line of a table of scores: a configuration, or the full cache."""

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
class Quality(Result):
    """Scores of every data set, by kind of task and on average.

    Attributes:
        identity: of all runs together.
        lacking: the data sets that lack a configuration that others have.
        tasks: the data sets, those of a kind together, with each sample's scores.
        pairs: indices of a baseline and a treatment that differ in selection alone; none where there is no such pair.
    """

    SECTION = "quality"
    DOCUMENT = "of scores"
    SHOWN = ("cache_share", "score", "minus_full", "minus_baseline", "samples_of_baseline")
    FIRST = "method"

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

    def conclusion(self) -> str:
        """Return the best configuration of each budget beside the full cache, and how often the treatment wins."""
        average = self.average
        full, over = text.points(average.full, average.full_interval), _describe(average)
        if not average.full:
            return f"Even the full cache scores 0 ({over}): there is nothing that eviction can lose."
        best = "; ".join(self._best_of_groups())
        contest = self._contest()
        clauses = [f"the full cache scores {full} of 100 ({over})", best, *([contest] if contest else [])]
        return sentence("; ".join(clauses), *short_names(self.configs))

    def title(self) -> str:
        """Return the data set or their average, and what the baseline is."""
        return self._title(self.average)

    def lines(self) -> Sequence[Line]:
        """Return the full cache, then a line per configuration."""
        return self._lines(self.average)

    def interval_note(self) -> str:
        """Return the line on n and intervals."""
        return f"n = {score_tables.sample_counts(self.datasets)}. {score_tables.brackets_note(self.datasets)}"

    def caveats(self) -> Sequence[str]:
        """Return the terms that are not the data sets' own, how much was left out, and answers that cannot be lost."""
        left = f"Left out: {plural(len(self.left_out), 'configuration')} that not all data sets have."
        terms = score_tables.terms_notes(self.datasets)
        return [
            *([" ".join(terms)] if terms else []),
            *([left] if self.left_out else []),
            *measurements.first_token_caveat(sum(task.alike for task in self.tasks), self.average.samples),
        ]

    def details(self) -> Sequence[Part]:
        """Return the tables of every kind of task and data set, what graded, and what was left out."""
        several = len(self.datasets) > 1
        kinds = [kind for kind in self.kinds if 1 < len(kind.tasks) < len(self.tasks)]
        left = ", ".join(config.label() for config in self.left_out)
        alike = sum(task.alike for task in self.tasks)
        return [
            *(self._table(one) for one in [*kinds, *(self.datasets if several else [])]),
            score_tables.grades_note(self.datasets),
            *(["Every data set counts the same in a kind's mean and in the average."] if several else []),
            f"*: {score_tables.BEST}; differences show whether that is decided.",
            *filter(None, [measurements.first_token_note(alike, self.average.samples)]),
            *([f"Left out, as not all data sets have them ({', '.join(self.lacking)}): {left}."] if left else []),
            text.cache_share_note([method.cache_share for one in self.datasets for method in one.methods]),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per sample and configuration, the full cache first: score in [0, 1], `full` the full cache's.

        `held` is the cache share; `propagated` L1 over the full run's norms and `kl` in nat are of the first step.
        """
        return [row for task in self.tasks for row in _task_records(task, self.configs)]

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
        """Return the table by kind, where kinds hold several data sets, and the one by data set."""
        summed = [self.kinds] if 1 < len(self.kinds) < len(self.datasets) else []
        return tuple(lay_out(self.configs, shown, self.average) for shown in [*summed, self.datasets])

    def _caption(self) -> str:
        return f"{self.identity.lines()[0]}. {score_tables.caption(self.datasets)}"

    def _table(self, one: ScoreColumn) -> Table:
        return columns.table(self._title(one), self._lines(one), self.SHOWN, self.FIRST)

    def _title(self, one: ScoreColumn) -> str:
        name = one.tasks[0].name if len(one.tasks) == 1 else f"{one.name} of {len(one.tasks)} data sets"
        return name + (f"; baseline: {self.baseline}" if self.pairs else "")

    def _lines(self, one: ScoreColumn) -> list[Line]:
        names = method_names(self.configs)
        gains = {gain.treatment: gain for gain in reversed(one.gains)}
        lines = [Line(FULL, (ShownScore(1.0, None, one, None),))]
        for row in rows(self.configs, [one]):
            if row.index is not None:
                method = one.methods[row.index]
                shown = ShownScore(method.cache_share, method, one, gains.get(method.config))
                lines.append(Line(names[row.index], (shown,)))
        return lines

    def _best_of_groups(self) -> list[str]:
        """Return the highest score of each budget and granularity; of many those of the least and largest budget."""
        names = method_names(self.configs, "budget", *CACHE_SIZE_CHOICES)
        evicted = rows(self.configs, [self.average])[1:]
        groups = [list(some) for _, some in groupby(evicted, key=lambda row: row.group)]
        ends = (evicted[0].budget, evicted[-1].budget)
        named = [some for some in groups if len(groups) <= _MOST_BEST or some[0].budget in ends]
        return [f"at b={some[0].group} {_best_clause(some, self.configs, names)}" for some in named]

    def _contest(self) -> str:
        """Return in how many cases the treatment scores higher than the baseline; empty without such pairs."""
        if not self.pairs:
            return ""
        words: Words = {
            1: (f"{self.treatment} scores higher than {self.baseline}", "higher"),
            -1: (f"{self.treatment} scores lower than {self.baseline}", "lower"),
            0: (f"whether {self.treatment} scores higher than {self.baseline} is undecided", "undecided"),
        }
        gains = self.average.gains
        verdicts = tally([interval_verdict(gain.difference_interval, 0) for gain in gains], words, "case")
        difference = text.points(gains[0].difference, gains[0].difference_interval)
        return f"{verdicts} (difference {difference})" if len(self.pairs) == 1 else verdicts


def _format_score(value: float, interval: Any) -> str:
    return text.points(value, interval, separator="\n", end_digits=0)


def _format_difference(one: ScoreDifference | None) -> str:
    return "" if one is None else _format_score(one.difference, one.difference_interval)


def _best_clause(some: Sequence[Row], configs: Sequence[EvictionConfig], names: Sequence[str]) -> str:
    """Return 'two-stage scores best by looking, 45.1 [40.2, 50.0]' of a group, equal ones together."""
    first = max(some, key=lambda row: row.cells[0].value)
    index = first.index or 0
    score = text.points(first.cells[0].value, first.cells[0].interval) + _share_clause(
        first.cache_share, configs[index]
    )
    if len(some) == 1:
        return f"{names[index]} scores {score}"
    best = [names[row.index or 0] for row in some if row.cells[0].best]
    if not best:
        return f"all {len(some)} methods score {score}"
    return f"{' and '.join(best)} {'score alike and' if len(best) > 1 else 'scores'} best by looking, {score}"


def _share_clause(share: float, config: EvictionConfig) -> str:
    """Return ' (cache share 1.20)' where that is not the budget, which in entries is no share; empty where unknown."""
    alike = isinstance(config.budget.value, float) and abs(share - config.budget.value) < _ROUNDED
    return "" if isnan(share) or alike else f" (cache share {text.cache_share(share)})"


def _describe(one: ScoreColumn) -> str:
    """Return '24 samples', or 'the average of 3 data sets, 24 samples'."""
    samples = plural(one.samples, "sample")
    return samples if len(one.tasks) == 1 else f"the average of {len(one.tasks)} data sets, {samples}"


def quality(traces: Trace | Iterable[Trace], *, baseline: str = "attention", treatment: str = "two-stage") -> Quality:
    """Score the answers from evicted caches by the data sets' own metrics (paper, tables 1 to 3, 5 and 6).

    A score is a mean over samples, an average one over data sets, each of which counts the same (the paper's "Ave.").
    Intervals: over samples of a data set as everywhere, over several data sets by `analyses.stats.intervals`.

    Args:
        traces: one of each data set, with answers that were generated from the full cache and from every evicted one.
        baseline: a selection, or policy:selection.
        treatment: what is compared with it at the same budget and, of two selections, the same policy.

    Raises TraceError for traces without graded answers, without a complete sample, of one data set twice, of different
    models or scenarios, or without a configuration that all of them hold.

    Example, of a `trace` of 5 samples:
        >>> import perturbkv as pk
        >>> pk.quality(trace).datasets[0].samples
        5
    """
    graded = as_traces(traces)
    configs = shared_configs(graded)
    partial = partial_configs(graded, configs)
    chosen = _pairs(graded[0].run, configs, baseline, treatment)
    compared, datasets = Comparison(configs, chosen, comparable_groups(configs)), tasks(graded, configs)
    return Quality(
        identity=_identity(graded, configs),
        configs=configs,
        left_out=partial,
        lacking=tuple(one.run.dataset for one in graded if not set(partial) <= set(one.run.configs)),
        tasks=datasets,
        baseline=baseline,
        treatment=treatment,
        pairs=chosen,
        datasets=by_dataset(datasets, compared),
        kinds=by_kind(datasets, compared),
        average=score_column(AVERAGE, datasets, compared),
    )


def _pairs(
    run: RunConfig, configs: tuple[EvictionConfig, ...], baseline: str, treatment: str
) -> tuple[tuple[int, int], ...]:
    """Return indices of each baseline and treatment; none where the configurations hold no such pair."""
    try:
        both = pairs(replace(run, configs=configs), baseline, treatment)
    except TraceError:
        return ()
    return tuple((configs.index(first), configs.index(second)) for first, second in both)


def _identity(traces: Sequence[Trace], configs: Sequence[EvictionConfig]) -> RunIdentity:
    """Return the identity of all runs together."""
    each = [identity(trace, configs) for trace in traces]
    return replace(
        each[0],
        dataset=_names_or_count([one.dataset for one in each], f"{len(each)} data sets"),
        samples=sum(one.samples for one in each),
        failed=sum(one.failed for one in each),
        trace=_names_or_count([one.trace for one in each if one.trace], "one of each"),
        byte_shares=tuple(sum(some) / len(each) for some in zip(*(one.byte_shares for one in each), strict=True)),
    )


def _names_or_count(names: Sequence[str], many: str) -> str:
    """Return the names; where they are too many, `many`."""
    return ", ".join(names) if len(names) <= _MOST_NAMED else many


def _task_records(task: Task, configs: Sequence[EvictionConfig]) -> list[dict[str, Any]]:
    whole = {"config": "full cache", "policy": None, "selection": None, "budget": None}
    records: list[dict[str, Any]] = []
    for index, sample in enumerate(task.samples):
        labels = {"dataset": task.dataset, "kind": task.kind, "sample": sample, "full": float(task.full[index])}
        records.append({**whole, **labels, "score": labels["full"], "held": 1.0, "propagated": None, "kl": None})
        for number, config in enumerate(configs):
            first_step = {name: float(getattr(task, name)[index, number]) for name in ("propagated", "kl")}
            score, share = float(task.evicted[index, number]), float(task.cache_shares[index, number])
            records.append({**config_columns(config), **labels, "score": score, "held": share, **first_step})
    return records

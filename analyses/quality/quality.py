"""How good are the answers from evicted caches, data set by data set? (Paper, tables 1 to 3, 5 and 6.)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.multi_trace import as_traces
from perturbkv.analyses.pairing import pairs, ranked_together
from perturbkv.analyses.quality import score_tables
from perturbkv.analyses.quality.graded_tasks import Task, left_out, shared, tasks
from perturbkv.analyses.quality.score_columns import (
    AVERAGE,
    Column,
    Layout,
    Sides,
    by_dataset,
    by_kind,
    column,
    of_first_step,
)
from perturbkv.analyses.quality.score_columns import layout as lay_out
from perturbkv.analyses.quality.score_tables import tables
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Part
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_MOST_NAMED = 4
"""Data sets in a figure's foot, which grows with each."""


@dataclass(frozen=True, repr=False)
class Quality(Result):
    """Scores of every data set, by kind of task and on average.

    Attributes:
        identity: of all runs together.
        configs: the configurations that every trace holds.
        left_out: those that only some of them hold.
        lacking: the data sets that lack one of these.
        tasks: the data sets, those of a kind together, with each sample's scores.
        sides: names of baseline and treatment.
        pairs: places of a baseline and a treatment that differ in selection alone; none where the traces hold no such.
        datasets, kinds: a column each.
        average: over all data sets, each of which counts the same.
    """

    identity: RunIdentity
    configs: tuple[EvictionConfig, ...]
    left_out: tuple[EvictionConfig, ...]
    lacking: tuple[str, ...]
    tasks: tuple[Task, ...]
    sides: tuple[str, str]
    pairs: tuple[Sides, ...]
    datasets: tuple[Column, ...]
    kinds: tuple[Column, ...]
    average: Column

    def conclusion(self) -> str:
        """Which configuration keeps most of the full cache's score, and whether the treatment beats the baseline."""
        return score_tables.quality_conclusion(self.average, self.configs, self.pairs, self.sides)

    def tables(self) -> Sequence[Part]:
        """Data sets by kind, the kinds beside their average, and differences."""
        return tables(self.configs, self.datasets, self.kinds, self.average, self.pairs, self.sides)

    def notes(self) -> str:
        """What a score and its brackets are, and what was left out."""
        return score_tables.quality_notes(self.datasets, self.left_out, self.lacking)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; scores in [0, 1]."""
        found: dict[str, Any] = plain({
            "configs": self.configs,
            "left_out": self.left_out,
            "baseline": self.sides[0],
            "treatment": self.sides[1],
            "datasets": [self._told(one) | self._of_dataset(one.tasks[0]) for one in self.datasets],
            "kinds": [self._told(one) for one in self.kinds],
            "average": self._told(self.average),
        })  # fmt: skip
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per sample and configuration, the full cache first: score in [0, 1], `full` that of the full cache.

        Beside it what its cache holds over the full one, and of the first step propagated L1 over the full run's norms
        and KL in nat; the full cache has none.
        """
        return [row for task in self.tasks for row in _rows(task, self.configs)]

    def to_latex(self) -> str:
        """The tables as LaTeX, for booktabs."""
        from perturbkv.analyses.quality.score_tables import document

        return document(self.layouts(), self._caption())

    def to_markdown(self) -> str:
        """The tables as Markdown."""
        from perturbkv.analyses.quality.score_tables import markdown

        return markdown(self.layouts(), self._caption())

    def to_csv(self) -> str:
        """The widest table as CSV: scores × 100 with the ends of their intervals, guarded against spreadsheets."""
        from perturbkv.analyses.quality.score_tables import csv

        return csv(self.layouts()[-1], self.configs)

    def layouts(self) -> tuple[Layout, ...]:
        """The table by kind, where kinds hold several data sets, and the one by data set."""
        summed = [self.kinds] if 1 < len(self.kinds) < len(self.datasets) else []
        return tuple(lay_out(self.configs, columns, self.average) for columns in [*summed, self.datasets])

    def _caption(self) -> str:
        return f"{self.identity.lines()[0]}. {score_tables.about_marks(self.datasets)}"

    def _told(self, one: Column) -> dict[str, Any]:
        """A column, not yet plain."""
        rows = zip(self.configs, one.evicted, one.held, one.best, one.lost, strict=True)
        return {
            "name": one.name,
            "kind": "" if one.name == AVERAGE else one.kind,
            "datasets": [task.dataset for task in one.tasks],
            "samples": one.samples,
            "full": one.full.value,
            "full_interval": one.full.interval,
            "methods": [
                {"config": config, "held": held, "score": mean.value, "score_interval": mean.interval, "best": best,
                 "minus_full": _contest(lost)}
                for config, mean, held, best, lost in rows
            ],
            "gains": [
                {"baseline": self.configs[first], "treatment": self.configs[second], **_contest(gain)}
                for (first, second), gain in zip(self.pairs, one.gains, strict=True)
            ],
        }  # fmt: skip

    def _of_dataset(self, task: Task) -> dict[str, Any]:
        steps = [{"config": config, **of_first_step(task, place)} for place, config in enumerate(self.configs)]
        return {"failed": task.failed, "first_step": steps}


def quality(traces: Trace | Iterable[Trace], *, baseline: str = "attention", treatment: str = "two-stage") -> Quality:
    """How good the answers from evicted caches are, by the data sets' own metrics (paper, tables 1 to 3, 5 and 6).

    A score is a mean over samples, an average one over data sets, each of which counts the same (the paper's "Ave.").
    Intervals: over samples of a data set as everywhere, over several data sets by `analyses.stats.intervals`.

    Args:
        traces: one of each data set, with answers that were generated from the full cache and from every evicted one.
        baseline: a selection, or policy:selection.
        treatment: what is held against it at the same budget and, of two selections, the same policy.

    Raises TraceError for traces without graded answers, without a complete sample, of one data set twice, of different
    models or scenarios, or without a configuration that all of them hold.

    Example, of a `trace` of 5 samples:
        >>> import perturbkv as pk
        >>> pk.quality(trace).datasets[0].samples
        5
    """
    held = as_traces(traces)
    configs = shared(held)
    others = left_out(held, configs)
    found, rivals = tasks(held, configs), ranked_together(configs)
    sides = _sides(held[0].run, configs, baseline, treatment)
    return Quality(
        identity=_identity(held, configs),
        configs=configs,
        left_out=others,
        lacking=tuple(one.run.dataset for one in held if not set(others) <= set(one.run.configs)),
        tasks=found,
        sides=(baseline, treatment),
        pairs=sides,
        datasets=by_dataset(found, sides, rivals),
        kinds=by_kind(found, sides, rivals),
        average=column(AVERAGE, found, sides, rivals),
    )


def _sides(run: RunConfig, configs: tuple[EvictionConfig, ...], baseline: str, treatment: str) -> tuple[Sides, ...]:
    """Places of each baseline and treatment; none where the configurations hold no such pair."""
    try:
        found = pairs(replace(run, configs=configs), baseline, treatment)
    except TraceError:
        return ()
    return tuple((configs.index(first), configs.index(second)) for first, second in found)


def _identity(traces: Sequence[Trace], configs: Sequence[EvictionConfig]) -> RunIdentity:
    """Of all runs together."""
    each = [identity(trace, configs) for trace in traces]
    return replace(
        each[0],
        dataset=_listed([one.dataset for one in each], f"{len(each)} data sets"),
        samples=sum(one.samples for one in each),
        failed=sum(one.failed for one in each),
        trace=_listed([one.trace for one in each if one.trace], "one of each"),
        stored=tuple(sum(some) / len(each) for some in zip(*(one.stored for one in each), strict=True)),
    )


def _listed(names: Sequence[str], many: str) -> str:
    """The names; of many what stands for them."""
    return ", ".join(names) if len(names) <= _MOST_NAMED else many


def _contest(one: Any) -> dict[str, Any]:
    difference = {"difference": one.difference.value, "difference_interval": one.difference.interval}
    return {**difference, "wins": one.wins, "ties": one.ties, "losses": one.losses}


def _rows(task: Task, configs: Sequence[EvictionConfig]) -> list[dict[str, Any]]:
    whole = {"config": "full cache", "policy": None, "selection": None, "budget": None}
    rows: list[dict[str, Any]] = []
    for place, sample in enumerate(task.samples):
        about = {"dataset": task.dataset, "kind": task.kind, "sample": sample, "full": float(task.full[place])}
        rows.append({**whole, **about, "score": about["full"], "held": 1.0, "propagated": None, "kl": None})
        for number, config in enumerate(configs):
            moved = {name: float(getattr(task, name)[place, number]) for name in ("propagated", "kl")}
            score, held = float(task.evicted[place, number]), float(task.held[place, number])
            rows.append({**columns_of(config), **about, "score": score, "held": held, **moved})
    return rows

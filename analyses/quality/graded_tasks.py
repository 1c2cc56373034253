"""Scores of several data sets side by side: which traces belong in one table, and what each of them holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perturbkv.analyses.asked_once import check_once
from perturbkv.analyses.first_token import only_alike
from perturbkv.analyses.measurements import Floats, at_step, held_by_sample, values
from perturbkv.analyses.naming import counted
from perturbkv.analyses.quality.quality_terms import Terms, terms
from perturbkv.analyses.scores import scores
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.configs.task_kinds import KINDS, OTHERS, kind_of
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "quality"
_ALIKE = ("model", "revision", "random_weights", "scenario", "dtype", "head_scores")
"""What runs share whose scores stand in one table; on which terms each was asked and graded, its `Terms` say."""


@dataclass(frozen=True)
class Task:
    """One data set, as a trace measured it.

    Attributes:
        name: in tables: the data set's, of a file its stem, where no two have the same.
        dataset: as the run names it.
        kind: of task, one of `KINDS`.
        samples: names of the complete samples.
        failed: how many others there are.
        terms: on which they were asked and graded.
        full: (sample,) scores of the full cache's answers, in [0, 1].
        evicted: (sample, config) of the configurations that all traces share.
        held: (sample, config) entries that the cache holds over those of the full one; NaN where the trace does not
            tell.
        propagated: (sample, config) propagated L1 of the first step over the norms of the full run's heads.
        kl: (sample, config) KL(full ‖ evicted) of the first step, in nat.
        alike: how many samples' full answers have no token but one that all caches share, as `first_token` says.
    """

    name: str
    dataset: str
    kind: str
    samples: tuple[str, ...]
    failed: int
    terms: Terms
    full: Floats
    evicted: Floats
    held: Floats
    propagated: Floats
    kl: Floats
    alike: int


def tasks(traces: Sequence[Trace], configs: Sequence[EvictionConfig]) -> tuple[Task, ...]:
    """One task per trace, those of a kind together. Raises TraceError where answers are not there or not graded."""
    names = _names([trace.run.dataset for trace in traces])
    found = [
        _task(name, trace, [trace.run.configs.index(config) for config in configs])
        for name, trace in zip(names, traces, strict=True)
    ]
    return tuple(sorted(found, key=lambda task: KINDS.index(task.kind)))


def _task(name: str, trace: Trace, places: list[int]) -> Task:
    at_step(trace, ANALYSIS, 0)
    graded = scores(trace, ANALYSIS)
    moved = values(trace, "perturbation_propagated", ANALYSIS, 0).sum(axis=(2, 3))
    norms = values(trace, "output_norm", ANALYSIS, 0).sum(axis=(1, 2))
    return Task(
        name=name,
        dataset=trace.run.dataset,
        kind=_kind(trace.run),
        samples=tuple(name for name, whole in zip(trace.sample_ids, trace.ok, strict=True) if whole),
        failed=len(trace.failures),
        terms=terms(trace.run),
        full=graded.full,
        evicted=graded.evicted[:, places],
        held=held_by_sample(trace, ANALYSIS)[:, places],
        propagated=np.asarray(moved / norms[:, None])[:, places],
        kl=values(trace, "logit_kl", ANALYSIS, 0)[:, places],
        alike=int(only_alike(trace).sum()),
    )


def _names(datasets: Sequence[str]) -> list[str]:
    """Names of data sets, and stems of files where these are different."""
    stems = [Path(one).stem if one.endswith((".jsonl", ".json")) else one for one in datasets]
    return stems if len(set(stems)) == len(stems) else list(datasets)


def _kind(run: RunConfig) -> str:
    """Of a file whose rows are all of one known data set, that one's."""
    found, worded = kind_of(run.dataset), list(run.dataset_options.get("wording", {}))
    return kind_of(worded[0]) if found == OTHERS and len(worded) == 1 else found


def shared(traces: Sequence[Trace]) -> tuple[EvictionConfig, ...]:
    """The configurations that all traces hold, in the first one's order.

    Raises TraceError, which names the trace, for none at all, a data set or a prompt that is there twice, runs of other
    models or scenarios, and where no configuration is shared.
    """
    if not traces:
        msg = f"{ANALYSIS} needs at least one trace, got none"
        raise TraceError(msg)
    _check_alike(traces)
    _check_apart(traces)
    held = [trace.run.configs for trace in traces]
    found = tuple(config for config in held[0] if all(config in others for others in held))
    if not found:
        said = ", ".join(f"{counted(len(one), 'configuration')} in {_called(trace)}"
                         for one, trace in zip(held, traces, strict=True))  # fmt: skip
        msg = f"expected traces that share a configuration, got {said}, none of them in all; measure the same ones"
        raise TraceError(msg)
    return found


def left_out(traces: Sequence[Trace], configs: Sequence[EvictionConfig]) -> tuple[EvictionConfig, ...]:
    """The configurations that some of the traces hold and others lack."""
    every = dict.fromkeys(config for trace in traces for config in trace.run.configs)
    return tuple(config for config in every if config not in configs)


def _check_alike(traces: Sequence[Trace]) -> None:
    first = traces[0]
    for other in traces[1:]:
        for name in _ALIKE:
            one, two = getattr(first.run, name), getattr(other.run, name)
            if one != two:
                said = f"{one} in {_called(first)} and {two} in {_called(other)}" if name != "head_scores" else "others"
                msg = f"expected traces of one {name.replace('_', ' ')}, got {said}; look at them apart"
                raise TraceError(msg)


def _check_apart(traces: Sequence[Trace]) -> None:
    seen: dict[str, Trace] = {}
    for trace in traces:
        if before := seen.get(trace.run.dataset):
            msg = (
                f"expected traces of different data sets, got {trace.run.dataset} in {_called(before)} and in "
                f"{_called(trace)}; leave one out"
            )
            raise TraceError(msg)
        seen[trace.run.dataset] = trace
    check_once(traces, _called)


def _called(trace: Trace) -> str:
    return trace.source or f"the trace of {trace.run.dataset}"

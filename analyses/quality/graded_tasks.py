"""Scores of several data sets side by side: which traces belong in one table, and what each of them holds.

On which terms answers were asked for and graded: metric, length of an answer, cut prompts, chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv.analyses.measurements import Floats, at_step, held_by_sample, only_alike, scores, values
from perturbkv.analyses.multi_trace import check_once
from perturbkv.analyses.pairing import counted
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import METRICS, RunConfig
from perturbkv.configs.task_kinds import KINDS, NEEDLE, OTHERS, kind_of
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_OWN = {NEEDLE: frozenset({"exact-number"})}
"""Metrics of data sets whose runs record no wording."""


@dataclass(frozen=True)
class Terms:
    """What a data set's scores depend on beside model, prompts and configurations.

    Attributes:
        metrics: that graded; empty where the trace does not tell.
        own_metrics: the data set's; empty of one that has none.
        answer: tokens of an answer at most.
        own_answers: data set -> tokens that it gives an answer; of a file there may be several, or none.
        max_tokens: to which longer prompts were cut; None: they were not.
        chat: whether prompts went through the chat template.
        own_chats: what the data sets go with; where nothing is recorded, with one.
    """

    metrics: frozenset[str]
    own_metrics: frozenset[str]
    answer: int
    own_answers: tuple[tuple[str, int], ...]
    max_tokens: int | None
    chat: bool
    own_chats: frozenset[bool]


Named = Sequence[tuple[str, Terms]]
"""Data sets by their names in tables."""


def terms(run: RunConfig) -> Terms:
    """The terms of a run."""
    recorded = _recorded(run)
    own = frozenset(_metric(str(one["metric"])) for one in recorded.values() if "metric" in one)
    lengths = ((name, one["generation_length"]) for name, one in recorded.items() if "generation_length" in one)
    return Terms(
        metrics=frozenset(run.dataset_options.get(METRICS, ())),
        own_metrics=own or _OWN.get(run.dataset, frozenset()),
        answer=run.generate,
        own_answers=tuple(sorted(lengths)),
        max_tokens=run.max_tokens,
        chat=run.chat_template,
        own_chats=frozenset(bool(one.get("chat_template", True)) for one in recorded.values()) or frozenset({True}),
    )


def _recorded(run: RunConfig) -> dict[str, dict[str, Any]]:
    """LongBench's or RULER's data set -> its wording; needle's is a list of sentences, which name no terms."""
    found = run.dataset_options.get("wording", {})
    return {name: one for name, one in found.items() if isinstance(one, dict)}


def _metric(function: str) -> str:
    """`qa_f1` of LongBench's `get_qa_f1_with_score`."""
    return function.removeprefix("get_").removesuffix("_with_score")


def graded_by(named: Named) -> str:
    """'the data sets' own metrics (qa_f1, rouge)', or which metric graded which data set."""
    own = [one for one in named if one[1].metrics and one[1].metrics == one[1].own_metrics]
    others = [one for one in named if one not in own]
    told = [_of(metrics, names, named) for metrics, names in _alike(others, _metrics)]
    if own:
        metrics = ", ".join(sorted({metric for _, one in own for metric in one.metrics}))
        told.append(
            f"the data sets' own metrics ({metrics})" if len(own) > 1 else f"{own[0][0]}'s own metric ({metrics})"
        )
    return ", ".join(told)


def departures(named: Named) -> list[str]:
    """A sentence for each of answers' length, cut and chat template that is not the data sets' own."""
    return [said for said in (_lengths(named), _cuts(named), *_chats(named)) if said]


def _metrics(one: Terms) -> str:
    return ", ".join(sorted(one.metrics)) or "a metric that the trace does not name"


def _lengths(named: Named) -> str:
    """Of data sets that give answers no length, or others than these were asked for."""
    other = [(name, one) for name, one in named if {length for _, length in one.own_answers} != {one.answer}]
    found = [_of(said, names, named) for said, names in _alike(other, lambda one: f"{one.answer:,} tokens")]
    own = sorted({kept for _, one in other for kept in one.own_answers if kept[1] != one.answer})
    lengths = f" (own lengths: {', '.join(f'{name} {length}' for name, length in own)})" if own else ""
    return f"Answers: at most {', '.join(found)}{lengths}." if found else ""


def _cuts(named: Named) -> str:
    if all(one.max_tokens is None for _, one in named):
        return ""
    return f"Prompts: {', '.join(_of(said, names, named) for said, names in _alike(named, _cut))}."


def _cut(one: Terms) -> str:
    return "uncut" if one.max_tokens is None else f"cut to at most {one.max_tokens:,} tokens"


def _chats(named: Named) -> list[str]:
    """Of data sets that went otherwise than they go."""
    other = [(name, one) for name, one in named if one.own_chats != {one.chat}]
    return [f"{_of(said, names, named)}." for said, names in _alike(other, _chat)]


def _chat(one: Terms) -> str:
    return "With a chat template" if one.chat else "Without a chat template"


def _alike(named: Named, of: Callable[[Terms], str]) -> list[tuple[str, list[str]]]:
    """What is said of some data sets, and of which."""
    found: dict[str, list[str]] = {}
    for name, one in named:
        found.setdefault(of(one), []).append(name)
    return list(found.items())


def _of(said: str, names: Sequence[str], named: Named) -> str:
    """'f1 (mine, yours)'; where all are alike without their names."""
    return said if len(names) == len(named) else f"{said} ({', '.join(names)})"


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
        alike: how many samples' full answers have no token but one that all caches share, as `about_first_token` says.
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

"""Graded data sets, and the terms of their scores: metric, length of answers, cut prompts, chat template.

Traces of one table share model, scenario and number type; each data set and each prompt is there once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perturbkv.analyses.measurements import Floats, Measurements, has_only_first_token, is_cut_off, scores
from perturbkv.analyses.multi_trace import check_no_duplicate_prompts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import METRICS, RunConfig
from perturbkv.configs.task_kinds import KINDS, NEEDLE, OTHERS, kind_of
from perturbkv.display import plural
from perturbkv.errors import TraceError
from perturbkv.trace import Trace


@dataclass(frozen=True)
class Terms:
    """The conditions of a run's scores other than model, prompts and configurations.

    Attributes:
        metrics: the metrics of the scores; empty where the trace does not name them.
        own_metrics: the data set's own metrics; empty where it has none.
        answer: largest number of tokens of an answer.
        own_answers: data set -> its own number of tokens of an answer; a file may have several, or none.
        max_tokens: tokens to which longer prompts were cut; None: prompts were not cut.
        chat: whether prompts went through the chat template.
        own_chats: whether the data sets are meant for a chat template; where nothing is recorded, they are.
    """

    metrics: frozenset[str]
    own_metrics: frozenset[str]
    answer: int
    own_answers: tuple[tuple[str, int], ...]
    max_tokens: int | None
    chat: bool
    own_chats: frozenset[bool]


NamedTerms = Sequence[tuple[str, Terms]]
"""(Name in tables, terms) of each data set."""


def terms(run: RunConfig) -> Terms:
    """Return the terms of a run's scores."""
    wordings = run.dataset_options.get("wording", {})  # by data set, of LongBench and RULER; needle's is no dict
    recorded = {name: one for name, one in wordings.items() if isinstance(one, dict)}
    functions = (str(wording["metric"]) for wording in recorded.values() if "metric" in wording)
    metrics = frozenset(name.removeprefix("get_").removesuffix("_with_score") for name in functions)
    lengths = ((name, wording["generation_length"]) for name, wording in recorded.items()
               if "generation_length" in wording)  # fmt: skip
    return Terms(
        metrics=frozenset(run.dataset_options.get(METRICS, ())),
        own_metrics=metrics or {NEEDLE: frozenset({"exact-number"})}.get(run.dataset, frozenset()),
        answer=run.generate,
        own_answers=tuple(sorted(lengths)),
        max_tokens=run.max_tokens,
        chat=run.chat_template,
        own_chats=frozenset(bool(wording.get("chat_template", True)) for wording in recorded.values())
        or frozenset({True}),
    )


def metrics_text(named: NamedTerms) -> str:
    """Return the metrics of all data sets as text: 'the data sets' own metrics (qa_f1, rouge)', others with names."""
    own = [one for one in named if one[1].metrics and one[1].metrics == one[1].own_metrics]
    foreign = [one for one in named if one not in own]
    by_metrics = _group_names(
        foreign, lambda one: ", ".join(sorted(one.metrics)) or "a metric that the trace does not name"
    )
    parts = [_add_names(metrics, names, named) for metrics, names in by_metrics]
    if own:
        metrics = ", ".join(sorted({metric for _, one in own for metric in one.metrics}))
        parts.append(
            f"the data sets' own metrics ({metrics})" if len(own) > 1 else f"{own[0][0]}'s own metric ({metrics})"
        )
    return ", ".join(parts)


def term_notes(named: NamedTerms) -> list[str]:
    """Return sentences on answers' length, cut prompts and chat templates that are not the data sets' own."""
    other = [(name, one) for name, one in named if {length for _, length in one.own_answers} != {one.answer}]
    used = [
        _add_names(length, names, named) for length, names in _group_names(other, lambda one: f"{one.answer:,} tokens")
    ]
    own = sorted({(name, length) for _, one in other for name, length in one.own_answers if length != one.answer})
    lengths = f" (own lengths: {', '.join(f'{name} {length}' for name, length in own)})" if own else ""
    notes = [f"Answers: at most {', '.join(used)}{lengths}."] if used else []
    if any(one.max_tokens is not None for _, one in named):
        cuts = _group_names(
            named, lambda one: "uncut" if one.max_tokens is None else f"cut to at most {one.max_tokens:,} tokens"
        )
        notes.append(f"Prompts: {', '.join(_add_names(part, names, named) for part, names in cuts)}.")
    other = [(name, one) for name, one in named if one.own_chats != {one.chat}]
    chats = _group_names(other, lambda one: f"{'With' if one.chat else 'Without'} a chat template")
    return [*notes, *(f"{_add_names(part, names, named)}." for part, names in chats)]


def _group_names(named: NamedTerms, describe: Callable[[Terms], str]) -> list[tuple[str, list[str]]]:
    """Return (description, names of its data sets) for each distinct description."""
    groups: dict[str, list[str]] = {}
    for name, one in named:
        groups.setdefault(describe(one), []).append(name)
    return list(groups.items())


def _add_names(description: str, names: Sequence[str], named: NamedTerms) -> str:
    """Return a description with its data sets' names, 'f1 (mine, yours)'; no names if all data sets have it."""
    return description if len(names) == len(named) else f"{description} ({', '.join(names)})"


ANALYSIS = "quality"
_SHARED = ("model", "revision", "random_weights", "scenario", "dtype", "head_scores")
"""Settings in which runs must agree for their scores to be in one table; `Terms` may differ."""


@dataclass(frozen=True)
class Task:
    """One data set, as a trace measured it.

    Attributes:
        name: name in tables: the data set's; a file's stem, where no two data sets have the same.
        dataset: name of the data set in the run.
        kind: kind of task, one of `KINDS`.
        samples: names of the complete samples.
        failed: number of samples that failed.
        terms: conditions of the scores.
        full: (sample,) scores of the full cache's answers, in [0, 1].
        evicted: (sample, config) of the configurations that all traces share.
        cache_shares: (sample, config) entries of the cache over those of the full one; NaN where the trace lacks them.
        propagated: (sample, config) propagated L1 of the first step over the norms of the full run's heads.
        kl: (sample, config) KL(full ‖ evicted) of the first step, in nat.
        one_token_answers: number of samples whose full answer is one token or none, alike for all caches.
        cut_off: number of samples whose full answer was cut off at `terms.answer` tokens.
    """

    name: str
    dataset: str
    kind: str
    samples: tuple[str, ...]
    failed: int
    terms: Terms
    full: Floats
    evicted: Floats
    cache_shares: Floats
    propagated: Floats
    kl: Floats
    one_token_answers: int
    cut_off: int


def tasks(traces: Sequence[Trace], configs: Sequence[EvictionConfig]) -> tuple[Task, ...]:
    """Return a task per trace, sorted by kind. Raises TraceError for answers that are not graded."""
    datasets = [trace.run.dataset for trace in traces]
    stems = [Path(one).stem if one.endswith((".jsonl", ".json")) else one for one in datasets]
    names = stems if len(set(stems)) == len(stems) else list(datasets)
    each = [
        _task(name, trace, [trace.run.configs.index(config) for config in configs])
        for name, trace in zip(names, traces, strict=True)
    ]
    return tuple(sorted(each, key=lambda task: KINDS.index(task.kind)))


def _task(name: str, trace: Trace, indices: list[int]) -> Task:
    """Return the task of a trace, with the configurations at `indices`."""
    measured = Measurements(trace, ANALYSIS, 0)
    command = f"perturbkv quality {trace.source} --metric perplexity" if trace.source else "pk.perplexity(trace)"
    hint = f"; it has log p of a text, which `{command}` compares" if "text_logp" in trace.arrays else ""
    graded = scores(trace, ANALYSIS, instead=hint)
    perturbation = measured["perturbation_propagated"].sum(axis=(2, 3))
    norms = measured["output_norm"].sum(axis=(1, 2))
    kind, worded = kind_of(trace.run.dataset), list(trace.run.dataset_options.get("wording", {}))
    return Task(
        name=name,
        dataset=trace.run.dataset,
        kind=kind_of(worded[0]) if kind == OTHERS and len(worded) == 1 else kind,
        samples=measured.sample_ids,
        failed=len(trace.failures),
        terms=terms(trace.run),
        full=graded.full,
        evicted=graded.evicted[:, indices],
        cache_shares=measured.cache_shares_by_sample[:, indices],
        propagated=np.asarray(perturbation / norms[:, None])[:, indices],
        kl=measured["logit_kl"][:, indices],
        one_token_answers=int(has_only_first_token(trace).sum()),
        cut_off=int(is_cut_off(trace).sum()),
    )


def shared_configs(traces: Sequence[Trace]) -> tuple[EvictionConfig, ...]:
    """Return the configurations that all traces hold, in the order of the first trace.

    Raises TraceError for no trace, a data set or a prompt that is in two traces, runs of different models or scenarios,
    and where no configuration is shared.
    """
    if not traces:
        raise TraceError(f"{ANALYSIS} needs at least one trace, got none")
    _check_equal_settings(traces)
    seen: dict[str, Trace] = {}
    for trace in traces:
        if before := seen.get(trace.run.dataset):
            raise TraceError(
                f"expected traces of different data sets, got {trace.run.dataset} in {_trace_name(before)} and in "
                f"{_trace_name(trace)}; leave one out"
            )
        seen[trace.run.dataset] = trace
    check_no_duplicate_prompts(traces, _trace_name)
    every = [trace.run.configs for trace in traces]
    common = tuple(config for config in every[0] if all(config in configs for configs in every))
    if not common:
        got = ", ".join(f"{plural(len(configs), 'configuration')} in {_trace_name(trace)}"
                        for configs, trace in zip(every, traces, strict=True))  # fmt: skip
        raise TraceError(
            f"expected traces that share a configuration, got {got}, none of them in all; measure the same ones"
        )
    return common


def _check_equal_settings(traces: Sequence[Trace]) -> None:
    """Raise TraceError for traces that differ in a setting that must be equal for one table of scores."""
    first = traces[0]
    for other in traces[1:]:
        for name in _SHARED:
            one, two = getattr(first.run, name), getattr(other.run, name)
            if one != two:
                got = (
                    f"{one} in {_trace_name(first)} and {two} in {_trace_name(other)}"
                    if name != "head_scores"
                    else "others"
                )
                raise TraceError(f"expected traces of one {name.replace('_', ' ')}, got {got}; look at them apart")


def _trace_name(trace: Trace) -> str:
    """Return the path of a trace, or a name by its data set."""
    return trace.source or f"the trace of {trace.run.dataset}"

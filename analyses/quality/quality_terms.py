"""On which terms answers were asked for and graded: metric, length of an answer, cut prompts, chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from perturbkv.configs.run import METRICS, RunConfig
from perturbkv.configs.task_kinds import NEEDLE

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

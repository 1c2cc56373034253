"""Answers as people read them and JSON holds them: text and score of each, prompt by prompt.

A run that answers: one prompt after the other, each from all of its caches, as its line of a file tells it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.metrics import Metric
from perturbkv.display import Table, as_html
from perturbkv.escaping import escape_line
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers import grading
from perturbkv.pipeline.answers.generation import AnswerOptions, Answers, answer
from perturbkv.pipeline.answers.grading import Decode, metrics_of
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.storage.answers_file import WrittenAnswers

_FULL = "full cache"


def row(
    prompt: Prompt, answers: Answers, labels: Sequence[str], decode: Decode, graded: Mapping[str, Metric]
) -> dict[str, Any]:
    """The sample's line: every answer with its score from 0 to 1, null where it has none, and what its cache held."""
    metric = graded.get(prompt.grading)
    question = prompt.token_ids[len(prompt.token_ids) - prompt.question_tokens :]

    def said(tokens: list[int]) -> dict[str, Any]:
        score = grading.grade(grading.text_of(tokens, decode), prompt, graded)
        return {"tokens": tokens, "text": decode(tokens), "score": score if metric else None}

    return {
        "sample": prompt.sample_id,
        "prompt_tokens": len(prompt.token_ids),
        "prompt": decode(list(prompt.token_ids)),
        "question": decode(list(question), skip_special_tokens=True),
        "answers": list(prompt.answers),
        "metric": metric.name if metric else None,
        "full": said(answers.full),
        "evicted": {
            label: {"held_share": held, **stored, **said(tokens)}
            for label, held, stored, tokens in zip(labels, answers.held, _bytes(answers), answers.evicted, strict=True)
        },
        "compressions": _compressions(answers, labels),
        "divergence": _divergence(answers, labels),
    }


def _divergence(answers: Answers, labels: Sequence[str]) -> dict[str, Any] | None:
    """Every cache's, step by step; None where it was not asked for."""
    found = answers.divergence
    if found is None:
        return None
    caches = zip(labels, found.kl.tolist(), found.top1.tolist(), strict=True)
    return {
        "noise_floor": found.noise_floor.tolist(),
        "caches": {label: {"kl": kl, "top1": top1} for label, kl, top1 in caches},
    }


def _bytes(answers: Answers) -> list[dict[str, float]]:
    """What each cache takes of the full one's bytes; nothing where all store 16 bits."""
    return [{"bytes_share": share} for share in answers.stored] or [{} for _ in answers.held]


def _compressions(answers: Answers, labels: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "config": labels[one.config],
            "generated": one.generated,
            "entries_before": one.before,
            "entries_after": one.after,
            "relative": float(one.perturbation.sum() / one.output_norm.sum()),
            "perturbation": one.perturbation.tolist(),
            "output_norm": one.output_norm.tolist(),
            "retained_mass": one.retained_mass.tolist(),
        }
        for one in answers.compressions
    ]


@dataclass(frozen=True, repr=False)
class Generation(Sequence[Answers]):
    """What the caches of several prompts wrote: a sequence of `Answers`, one per prompt, that shows itself as text.

    Attributes:
        members: the answers, token by token.
        written: the same as `perturbkv generate --json` tells it, an object per prompt (`docs/json.md`), with the run:
            what `divergence` and `judge` look at.
    """

    members: tuple[Answers, ...]
    written: WrittenAnswers

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """An object per prompt."""
        return self.written.rows

    def __len__(self) -> int:
        return len(self.members)

    @overload
    def __getitem__(self, place: int) -> Answers: ...

    @overload
    def __getitem__(self, place: slice) -> Generation: ...

    def __getitem__(self, place: int | slice) -> Answers | Generation:
        if isinstance(place, slice):
            return replace(self, members=self.members[place], written=replace(self.written, rows=self.rows[place]))
        return self.members[place]

    def to_dict(self) -> dict[str, Any]:
        """`samples`: one object per prompt, as `docs/json.md` says."""
        return {"samples": list(self.rows)}

    def records(self) -> list[dict[str, Any]]:
        """A row per prompt and cache, the full one first: `held_share`, `score` (None: no metric), `text`.

        `bytes_share` beside them, of the full cache's bytes, where a configuration stores few bits or is corrected.
        """
        return [
            {"sample": one["sample"], "config": name, "held_share": made["held_share"],
             "tokens": len(made["tokens"]), "score": made["score"], "text": made["text"], **_told(one, made)}
            for one in self.rows
            for name, made in _caches(one).items()
        ]  # fmt: skip

    def to_frame(self) -> Any:
        """A `pandas.DataFrame` of `records`."""
        import pandas as pd

        return pd.DataFrame(self.records())

    def __repr__(self) -> str:
        return "\n".join(line for one in self.rows for line in _lines(one))

    def _repr_html_(self) -> str:
        return as_html(list(map(_table, self.rows)))


def _caches(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> what it wrote and held, the full cache first."""
    return {_FULL: {"held_share": 1.0, **row["full"]}, **row["evicted"]}


def _told(row: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, float]:
    """A cache's `bytes_share`, where those of its prompt have one."""
    return {"bytes_share": made.get("bytes_share", 1.0)} if _has_bytes(row) else {}


def _has_bytes(row: Mapping[str, Any]) -> bool:
    return any("bytes_share" in made for made in row["evicted"].values())


def _held(made: Mapping[str, Any]) -> str:
    few = f", bytes / full {made['bytes_share']:.2f}" if "bytes_share" in made else ""
    return f"held / full {made['held_share']:.2f}{few}"


def _title(row: Mapping[str, Any]) -> str:
    return f"{escape_line(row['sample'])} · {row['prompt_tokens']:,} tokens"


def _one_line(text: str) -> str:
    return escape_line(" ".join(text.split())) or "(nothing)"


def _lines(row: Mapping[str, Any]) -> list[str]:
    """A prompt's answers for a terminal, each beneath the cache that wrote it."""
    lines = [_title(row), *([f"  expected: {_one_line(' | '.join(row['answers']))}"] if row["answers"] else [])]
    for name, made in _caches(row).items():
        score = "" if made["score"] is None else f", {row['metric']} {made['score']:.3f}"
        lines += [f"  {escape_line(name)} ({_held(made)}{score}):", f"    {_one_line(made['text'])}"]
    return lines


def _table(row: Mapping[str, Any]) -> Table:
    """A prompt's answers for a notebook, what was expected above them; scores only where there is a metric."""
    graded = row["metric"] is not None
    lines = [("expected", "", *[""] * (_has_bytes(row) + graded), " | ".join(row["answers"]))] if row["answers"] else []
    for name, made in _caches(row).items():
        score = [f"{made['score']:.3f}"] if graded else []
        few = [f"{share:.2f}" for share in _told(row, made).values()]
        lines.append((name, f"{made['held_share']:.2f}", *few, *score, _one_line(made["text"])))
    columns = (
        "cache",
        "#held / full",
        *(["#bytes / full"] if _has_bytes(row) else []),
        *([f"#{row['metric']}, 0 to 1"] if graded else []),
        "answer",
    )
    return Table(_title(row), columns, lines)


@dataclass(frozen=True)
class Answered:
    """One prompt's answers, and its line of generation.jsonl."""

    answers: Answers
    row: dict[str, Any]


def answered(
    adapter: Adapter, prompt: Prompt, run: ResolvedRun, options: AnswerOptions, resources: Resources
) -> Answered:
    """Answer a prompt from its full cache and every configuration's. Raises what `answer` raises."""
    made = answer(adapter, prompt, run, options, resources)
    line = row(prompt, made, run.labels(), adapter.tokenizer.decode, metrics_of([prompt]))
    return Answered(_on_cpu(made), line)


def _on_cpu(made: Answers) -> Answers:
    """The answers with nothing left on a device: they outlive the model, and go to other processes."""
    compressions = [
        replace(
            one, perturbation=one.perturbation.cpu(), output_norm=one.output_norm.cpu(),
            retained_mass=one.retained_mass.cpu(),
        )
        for one in made.compressions
    ]  # fmt: skip
    found = made.divergence
    if found is not None:
        found = replace(found, kl=found.kl.cpu(), top1=found.top1.cpu(), noise_floor=found.noise_floor.cpu())
    return replace(made, compressions=compressions, divergence=found)

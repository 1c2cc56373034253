"""Answers of prompts as text with scores, for people and for JSON: one object per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.metrics import Metric
from perturbkv.datasets.prompts import Decode, decode_answer, grade, metrics_of
from perturbkv.display import Table, as_html
from perturbkv.escaping import escape_line
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.generation import Answers, answer
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.storage.answers_file import WrittenAnswers

_FULL = "full cache"


def answer_row(
    prompt: Prompt, answers: Answers, labels: Sequence[str], decode: Decode, metrics: Mapping[str, Metric]
) -> dict[str, Any]:
    """Return a prompt's JSON object: the answer from each cache, its score (None without a metric), its cache share.

    `labels` are those of the configurations; `decode` turns tokens into text; `metrics` are by `Prompt.grading`.
    """
    metric, divergence = metrics.get(prompt.grading), None
    if (found := answers.divergence) is not None:
        caches = zip(labels, found.kl.tolist(), found.top1.tolist(), strict=True)
        by_cache = {label: {"kl": kl, "top1": top1} for label, kl, top1 in caches}
        divergence = {"noise_floor": found.noise_floor.tolist(), "caches": by_cache}
    question = prompt.token_ids[len(prompt.token_ids) - prompt.question_tokens :]
    byte_shares = [{"bytes_share": share} for share in answers.stored] or [{} for _ in answers.held]

    def answer_object(tokens: list[int]) -> dict[str, Any]:
        score = grade(decode_answer(tokens, decode), prompt, metrics)
        return {"tokens": tokens, "text": decode(tokens), "score": score if metric else None}

    return {
        "sample": prompt.sample_id,
        "prompt_tokens": len(prompt.token_ids),
        "prompt": decode(list(prompt.token_ids)),
        "question": decode(list(question), skip_special_tokens=True),
        "answers": list(prompt.answers),
        "metric": metric.name if metric else None,
        "full": answer_object(answers.full),
        "evicted": {
            label: {"held_share": entry_share, **byte_share, **answer_object(tokens)}
            for label, entry_share, byte_share, tokens in zip(
                labels, answers.held, byte_shares, answers.evicted, strict=True
            )
        },
        "compressions": [
            {
                "config": labels[compression.config],
                "generated": compression.generated,
                "entries_before": compression.before,
                "entries_after": compression.after,
                "relative": float(compression.perturbation.sum() / compression.output_norm.sum()),
                "perturbation": compression.perturbation.tolist(),
                "output_norm": compression.output_norm.tolist(),
                "retained_mass": compression.retained_mass.tolist(),
            }
            for compression in answers.compressions
        ],
        "divergence": divergence,
    }


@dataclass(frozen=True, repr=False)
class Generation(Sequence[Answers]):
    """The answers of several prompts: a sequence of `Answers`, one per prompt, that shows itself as text.

    Attributes:
        members: the answers, token by token.
        written: the same as in `perturbkv generate --json`, an object per prompt (`json.md`), with the run; the
            input of `divergence`.
    """

    members: tuple[Answers, ...]
    written: WrittenAnswers

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """The JSON object of each prompt."""
        return self.written.rows

    def __len__(self) -> int:
        return len(self.members)

    @overload
    def __getitem__(self, index: int) -> Answers: ...

    @overload
    def __getitem__(self, place: slice) -> Generation: ...

    def __getitem__(self, place: int | slice) -> Answers | Generation:
        if isinstance(place, slice):
            return replace(self, members=self.members[place], written=replace(self.written, rows=self.rows[place]))
        return self.members[place]

    def to_dict(self) -> dict[str, Any]:
        """Return {"samples": …}, one object per prompt, as in `docs/reference/json.md`."""
        return {"samples": list(self.rows)}

    def records(self) -> list[dict[str, Any]]:
        """Return a row per prompt and cache, the full cache first, with the answer's text, score and cache share.

        `score` is None without a metric. Rows have `bytes_share`, the share of the full cache's bytes, where a
        configuration is quantised or corrected.
        """
        return [
            {"sample": row["sample"], "config": name, "held_share": cache["held_share"],
             "tokens": len(cache["tokens"]), "score": cache["score"], "text": cache["text"],
             **_byte_share_column(row, cache)}
            for row in self.rows
            for name, cache in _caches(row).items()
        ]  # fmt: skip

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` of `records`."""
        import pandas as pd

        return pd.DataFrame(self.records())

    def __repr__(self) -> str:
        return "\n".join(line for row in self.rows for line in _text_lines(row))

    def _repr_html_(self) -> str:
        """Return the tables of all prompts as HTML, for notebooks."""
        return as_html(list(map(_answers_table, self.rows)))


def _caches(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return cache name -> JSON object of its answer in a prompt's row, the full cache first."""
    return {_FULL: {"held_share": 1.0, **row["full"]}, **row["evicted"]}


def _byte_share_column(row: Mapping[str, Any], cache: Mapping[str, Any]) -> dict[str, float]:
    """Return {`bytes_share`: share} of a cache; empty where the prompt's row has no such shares."""
    return {"bytes_share": cache.get("bytes_share", 1.0)} if _has_byte_shares(row) else {}


def _has_byte_shares(row: Mapping[str, Any]) -> bool:
    """Return whether a prompt's row reports the cache size as a share of the full cache's bytes."""
    return any("bytes_share" in cache for cache in row["evicted"].values())


def _heading(row: Mapping[str, Any]) -> str:
    """Return the id and length of a prompt as a heading."""
    return f"{escape_line(row['sample'])} · {row['prompt_tokens']:,} tokens"


def _one_line(text: str) -> str:
    """Return a text on one line, with control characters escaped; "(nothing)" for an empty text."""
    return escape_line(" ".join(text.split())) or "(nothing)"


def _text_lines(row: Mapping[str, Any]) -> list[str]:
    """Return the answers to a prompt as lines for a terminal, with the name of the cache above each answer."""
    lines = [_heading(row), *([f"  expected: {_one_line(' | '.join(row['answers']))}"] if row["answers"] else [])]
    for name, cache in _caches(row).items():
        about = f"cache share {cache['held_share']:.2f}"
        if "bytes_share" in cache:
            about += f", bytes / full {cache['bytes_share']:.2f}"
        if cache["score"] is not None:
            about += f", {row['metric']} {cache['score']:.3f}"
        lines += [f"  {escape_line(name)} ({about}):", f"    {_one_line(cache['text'])}"]
    return lines


def _answers_table(row: Mapping[str, Any]) -> Table:
    """Return a notebook table of the answers to a prompt, the accepted ones first, with scores where graded."""
    has_scores = row["metric"] is not None
    no_numbers = [""] * (1 + _has_byte_shares(row) + has_scores)
    lines = [("expected", *no_numbers, " | ".join(row["answers"]))] if row["answers"] else []
    for name, cache in _caches(row).items():
        score = [f"{cache['score']:.3f}"] if has_scores else []
        byte_share = [f"{share:.2f}" for share in _byte_share_column(row, cache).values()]
        lines.append((name, f"{cache['held_share']:.2f}", *byte_share, *score, _one_line(cache["text"])))
    columns = (
        "cache",
        "#cache share",
        *(["#bytes / full"] if _has_byte_shares(row) else []),
        *([f"#{row['metric']}, 0 to 1"] if has_scores else []),
        "answer",
    )
    return Table(_heading(row), columns, lines)


@dataclass(frozen=True)
class AnsweredPrompt:
    """One prompt's answers, and its JSON object in generation.jsonl."""

    answers: Answers
    row: dict[str, Any]


def answer_prompt(
    adapter: Adapter, prompt: Prompt, run: ResolvedRun, divergence: bool, resources: Resources
) -> AnsweredPrompt:
    """Return the answers to a prompt from the full cache and from every configuration's. Raises as `answer`."""
    answers = answer(adapter, prompt, run, resources, divergence=divergence)
    row = answer_row(prompt, answers, run.labels(), adapter.tokenizer.decode, metrics_of([prompt]))
    return AnsweredPrompt(answers, row)

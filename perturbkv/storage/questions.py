"""What a judge is asked: one answer at a time, or a pair whose order is drawn, never which configuration wrote it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.visible import line

FULL = "full"
SIDES = ("a", "b")


@dataclass(frozen=True)
class Question:
    """One line for the judge.

    Attributes:
        sample: its id.
        label: of the configuration; None: the full cache's own answer.
        fields: what the judge reads beside the line's id.
        full_is: in a pair, which side the full cache's answer is: a or b; empty for a single answer.
    """

    sample: str
    label: str | None
    fields: Mapping[str, Any]
    full_is: str = ""

    @property
    def id(self) -> str:
        """By which the judge's answer is known: of sample and configuration, and tells neither."""
        return _digest([self.sample, self.label, bool(self.full_is)])

    @property
    def content(self) -> str:
        """A digest of all that the judge reads: a judgement holds for this text alone."""
        return _digest(dict(self.fields))

    @property
    def is_tie(self) -> bool:
        """Whether it is a pair of the same text, which nobody has to be asked."""
        return bool(self.full_is) and self.fields["a"] == self.fields["b"]

    @property
    def whose(self) -> str:
        """Which answer it is, for who asked; the judge never learns it."""
        cache = "full cache" if self.label is None else line(self.label)
        return f"sample '{line(self.sample)[:40]}' ({cache[:80]})"

    def line(self) -> str:
        """As the judge gets it: ASCII, whatever it reads its input as."""
        return json.dumps({"id": self.id, **self.fields}) + "\n"


def singly(answers: WrittenAnswers) -> Iterator[Question]:
    """Every answer on its own, beside the full cache's, which is the first of each sample."""
    for row in answers.rows:
        full = row["full"]["text"]
        texts = [(None, full), *((label, row["evicted"][label]["text"]) for label in answers.run.labels())]
        for label, text in texts:
            yield Question(row["sample"], label, {**_about(row), FULL: full, "answer": text})


def pairwise(answers: WrittenAnswers, seed: int) -> Iterator[Question]:
    """Every evicted answer beside the full cache's; `seed` draws which is a, of each pair whatever the others are."""
    for row in answers.rows:
        for label in answers.run.labels():
            full_is = SIDES[int(_digest([seed, row["sample"], label]), 16) % 2]
            texts = (row["full"]["text"], row["evicted"][label]["text"])
            first, second = texts if full_is == "a" else texts[::-1]
            yield Question(row["sample"], label, {**_about(row), "a": first, "b": second}, full_is)


def _about(row: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked; None where the file is of a version that did not keep it."""
    told = {"sample": row["sample"], "prompt": row.get("prompt"), "question": row.get("question")}
    return {**told, "answers": row["answers"]}


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

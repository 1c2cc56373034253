"""Questions to a judge of answers, and the file that keeps its judgements, which the same command resumes.

A judge reads one answer at a time, or a pair in random order, and never learns which configuration wrote which.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from perturbkv.errors import ConfigError, PluginError
from perturbkv.escaping import line
from perturbkv.storage import json_lines
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.user_files import FileKind

FULL = "full"
SIDES = ("a", "b")


@dataclass(frozen=True)
class Question:
    """A line that the judge reads.

    Attributes:
        sample: the sample's id.
        label: the configuration's label; None: the full cache's own answer.
        fields: what the judge reads beside the line's id.
        full_is: in a pair, the side of the full cache's answer, a or b; empty for a single answer.
    """

    sample: str
    label: str | None
    fields: Mapping[str, Any]
    full_is: str = ""

    @property
    def id(self) -> str:
        """The key of the judge's answer: a digest of sample and configuration that reveals neither."""
        return _digest([self.sample, self.label, bool(self.full_is)])

    @property
    def content(self) -> str:
        """A digest of everything that the judge reads: a judgement is valid for this text alone."""
        return _digest(dict(self.fields))

    @property
    def is_tie(self) -> bool:
        """Whether this is a pair of equal texts, which needs no judge."""
        return bool(self.full_is) and self.fields["a"] == self.fields["b"]

    @property
    def whose(self) -> str:
        """The sample and the configuration, for the user's messages; the judge never reads it."""
        cache = "full cache" if self.label is None else line(self.label)
        return f"sample '{line(self.sample)[:40]}' ({cache[:80]})"

    def line(self) -> str:
        """Return the line that the judge reads: JSON in ASCII, so that its encoding does not matter."""
        return json.dumps({"id": self.id, **self.fields}) + "\n"


def singly(answers: WrittenAnswers) -> Iterator[Question]:
    """Return a question per answer, beside the full cache's, which is each sample's first."""
    for row in answers.rows:
        full = row["full"]["text"]
        texts = [(None, full), *((label, row["evicted"][label]["text"]) for label in answers.run.labels())]
        for label, text in texts:
            yield Question(row["sample"], label, {**_prompt_fields(row), FULL: full, "answer": text})


def pairwise(answers: WrittenAnswers, seed: int) -> Iterator[Question]:
    """Return a question per evicted answer, paired with the full cache's.

    `seed` draws which of the two is a, for each pair independently of the other pairs.
    """
    for row in answers.rows:
        for label in answers.run.labels():
            full_is = SIDES[int(_digest([seed, row["sample"], label]), 16) % 2]
            texts = (row["full"]["text"], row["evicted"][label]["text"])
            first, second = texts if full_is == "a" else texts[::-1]
            yield Question(row["sample"], label, {**_prompt_fields(row), "a": first, "b": second}, full_is)


def _prompt_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt, the question and the accepted answers; None where an older file did not keep them."""
    told = {"sample": row["sample"], "prompt": row.get("prompt"), "question": row.get("question")}
    return {**told, "answers": row["answers"]}


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


TIE = "tie"
_HINT = "give --overwrite or another --output"
_KIND = FileKind("a file of judgements", ConfigError, 2**30, _HINT)


@dataclass(frozen=True)
class Judge:
    """A judge's command, and how it is asked.

    Attributes:
        command: program and arguments.
        pairwise: whether pairs are compared, instead of answers scored.
        seed: seed of the order within pairs.
        scale: least and largest score that it may give; None: any number.
    """

    command: tuple[str, ...]
    pairwise: bool = False
    seed: int = 0
    scale: tuple[float, float] | None = None

    def record(self) -> dict[str, Any]:
        """Return the first line of a file of judgements."""
        return {"judge": json.loads(json.dumps(asdict(self)))}


@dataclass(frozen=True)
class Judgement:
    """A judge's answer to one question.

    Attributes:
        sample, label: sample and configuration; the label is None for the full cache's own answer.
        content: digest of what the judge read.
        score: score of a single answer.
        outcome: in a pair, the evicted answer's win, tie or loss.
        full_is: in a pair, the side of the full cache's answer.
        comment: the judge's comment.
    """

    sample: str
    label: str | None
    content: str
    score: float | None = None
    outcome: str | None = None
    full_is: str = ""
    comment: str = ""

    @property
    def first(self) -> bool | None:
        """Whether the answer that was shown first won; None for a tie."""
        return None if self.outcome == TIE else (self.outcome == "loss") == (self.full_is == "a")


def judged(question: Question, said: Mapping[str, Any], judge: Judge) -> Judgement:
    """Return the judgement of a question from the judge's line. Raises PluginError for an invalid line."""
    comment = said.get("comment")
    if not isinstance(comment, str | None):
        raise refusal(question, "a `comment` that is text", comment)
    asked = (question.sample, question.label, question.content)
    if not judge.pairwise:
        return Judgement(*asked, score=_score(question, said, judge), comment=comment or "")
    winner = said.get("winner")
    if winner not in (*SIDES, TIE):
        raise refusal(question, "a `winner` of a, b or tie", winner)
    outcome = TIE if winner == TIE else "loss" if winner == question.full_is else "win"
    return Judgement(*asked, outcome=outcome, full_is=question.full_is, comment=comment or "")


def tie(question: Question) -> Judgement:
    """Return the judgement of a pair of equal texts."""
    return Judgement(question.sample, question.label, question.content, outcome=TIE, full_is=question.full_is)


def _score(question: Question, said: Mapping[str, Any], judge: Judge) -> float:
    score = said.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not _finite(score):
        raise refusal(question, "a `score` that is a number", score)
    if judge.scale is not None and not judge.scale[0] <= score <= judge.scale[1]:
        raise refusal(question, f"a `score` from {judge.scale[0]:g} to {judge.scale[1]:g}", score)
    return float(score)


def _finite(score: float) -> bool:
    try:
        return isfinite(score)
    except OverflowError:
        return False


def refusal(question: Question, wanted: str, got: object) -> PluginError:
    """Return the error for an invalid answer of the judge."""
    return PluginError(f"expected from the judge, of {question.whose}, {wanted}, got {line(repr(got))[:100]}")


class Kept:
    """The judgements in a file: those of an earlier call, and each new one as soon as the judge gives it.

    Raises ConfigError for a file of another judge or of other answers.
    """

    def __init__(self, path: Path, judge: Judge, questions: Sequence[Question], overwrite: bool) -> None:
        self.path = path
        asked = {(one.sample, one.label): one.content for one in questions}
        there = json_lines.read(path, _KIND) if path.exists() and not overwrite else [judge.record()]
        header, *others = there or [{}]
        if header != judge.record():
            raise _KIND.refusal(path, "one of another judge, or of another way to ask it")
        self.found = {(one.sample, one.label): one for one in (_read(path, document) for document in others)}
        if any(asked.get(key) != one.content for key, one in self.found.items()):
            raise _KIND.refusal(path, "one of other answers")
        json_lines.write(path, [header, *(asdict(one) for one in self.found.values())])

    def keep(self, judgement: Judgement) -> None:
        """Write a judgement to the file."""
        self.found[judgement.sample, judgement.label] = judgement
        json_lines.append(self.path, asdict(judgement))


def _read(path: Path, document: Mapping[str, Any]) -> Judgement:
    strange = _KIND.refusal(path, f"a line that is no judgement of ours, {str(document)[:40]}")
    try:
        found = Judgement(**document)
    except TypeError:
        raise strange from None
    score = found.score is None or (isinstance(found.score, int | float) and not isinstance(found.score, bool))
    texts = all(isinstance(one, str) for one in (found.sample, found.label or "", found.content, found.comment))
    if not (score and texts and found.outcome in (None, "win", TIE, "loss") and found.full_is in ("", *SIDES)):
        raise strange
    return found

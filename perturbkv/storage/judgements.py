"""Questions to a judge of answers, and the file of its judgements, from which a killed command resumes.

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
from perturbkv.escaping import escape_line
from perturbkv.storage import json_lines
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.user_files import FileKind

FULL = "full"
SIDES = ("a", "b")


@dataclass(frozen=True)
class Question:
    """A question to the judge: one line of its input.

    Attributes:
        sample: the sample's id.
        label: the configuration's label; None: the full cache's own answer.
        fields: the line's fields other than its id.
        full_is: in a pair, the side of the full cache's answer, a or b; empty for a single answer.
    """

    sample: str
    label: str | None
    fields: Mapping[str, Any]
    full_is: str = ""

    @property
    def id(self) -> str:
        """Key of the judge's reply: a digest of sample and configuration, which reveals neither of the two."""
        return _digest([self.sample, self.label, bool(self.full_is)])

    @property
    def content(self) -> str:
        """Digest of the full text that the judge reads; a judgement is valid only for this text."""
        return _digest(dict(self.fields))

    @property
    def is_tie(self) -> bool:
        """Whether the question is a pair of equal texts, which needs no judge."""
        return bool(self.full_is) and self.fields["a"] == self.fields["b"]

    @property
    def description(self) -> str:
        """Sample and configuration as text for error messages, hidden from the judge."""
        cache = "full cache" if self.label is None else escape_line(self.label)
        return f"sample '{escape_line(self.sample)[:40]}' ({cache[:80]})"

    def line(self) -> str:
        """Return the question as an input line for the judge: JSON in ASCII."""
        return json.dumps({"id": self.id, **self.fields}) + "\n"


def single_questions(answers: WrittenAnswers) -> Iterator[Question]:
    """Yield one question per answer, for scoring; the full cache's answer is shown along with it.

    The first question of each sample is about the full cache's own answer.
    """
    for row in answers.rows:
        full = row["full"]["text"]
        texts = [(None, full), *((label, row["evicted"][label]["text"]) for label in answers.run.labels())]
        for label, text in texts:
            yield Question(row["sample"], label, {**_prompt_fields(row), FULL: full, "answer": text})


def pair_questions(answers: WrittenAnswers, seed: int) -> Iterator[Question]:
    """Yield one question per answer from an evicted cache, for comparison with the full cache's answer.

    `seed` draws which of the two is `a`, for each pair independently of the other pairs.
    """
    for row in answers.rows:
        for label in answers.run.labels():
            full_is = SIDES[int(_digest([seed, row["sample"], label]), 16) % 2]
            texts = (row["full"]["text"], row["evicted"][label]["text"])
            first, second = texts if full_is == "a" else texts[::-1]
            yield Question(row["sample"], label, {**_prompt_fields(row), "a": first, "b": second}, full_is)


def _prompt_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields shared by all questions of a sample; prompt and question are None if not stored."""
    fields = {"sample": row["sample"], "prompt": row.get("prompt"), "question": row.get("question")}
    return {**fields, "answers": row["answers"]}


def _digest(value: Any) -> str:
    """Return a short digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


TIE = "tie"
_KIND = FileKind("a file of judgements", ConfigError, 2**30, "give --overwrite or another --output")


@dataclass(frozen=True)
class Judge:
    """A judge's command and its kind of questions.

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
        """Return the JSON object that identifies the judge, the first line of its file of judgements."""
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
        """Whether the answer shown first (a) won; None for a tie."""
        return None if self.outcome == TIE else (self.outcome == "loss") == (self.full_is == "a")


def parse_judgement(question: Question, reply: Mapping[str, Any], judge: Judge) -> Judgement:
    """Return the judgement in the judge's reply to a question. Raises PluginError for an invalid reply."""
    comment = reply.get("comment")
    if not isinstance(comment, str | None):
        raise refusal(question, "a `comment` that is text", comment)
    identity = (question.sample, question.label, question.content)
    if not judge.pairwise:
        return Judgement(*identity, score=_parse_score(question, reply, judge), comment=comment or "")
    winner = reply.get("winner")
    if winner not in (*SIDES, TIE):
        raise refusal(question, "a `winner` of a, b or tie", winner)
    outcome = TIE if winner == TIE else "loss" if winner == question.full_is else "win"
    return Judgement(*identity, outcome=outcome, full_is=question.full_is, comment=comment or "")


def tie_judgement(question: Question) -> Judgement:
    """Return the judgement "tie" on a pair of equal texts."""
    return Judgement(question.sample, question.label, question.content, outcome=TIE, full_is=question.full_is)


def _parse_score(question: Question, reply: Mapping[str, Any], judge: Judge) -> float:
    """Return the score in a judge's reply. Raises PluginError for a value that is no number on the judge's scale."""
    score = reply.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not _is_finite(score):
        raise refusal(question, "a `score` that is a number", score)
    if judge.scale is not None and not judge.scale[0] <= score <= judge.scale[1]:
        raise refusal(question, f"a `score` from {judge.scale[0]:g} to {judge.scale[1]:g}", score)
    return float(score)


def _is_finite(score: float) -> bool:
    """Return whether a number is finite after conversion to float, unlike a very large integer."""
    try:
        return isfinite(score)
    except OverflowError:
        return False


def refusal(question: Question, wanted: str, got: object) -> PluginError:
    """Return the PluginError that refuses a judge's invalid reply to a question."""
    return PluginError(
        f"expected from the judge, of {question.description}, {wanted}, got {escape_line(repr(got))[:100]}"
    )


class JudgementFile:
    """A file of judgements: those of earlier calls, and each new one as soon as the judge gives it.

    Raises ConfigError for a file of another judge or of other answers.
    """

    def __init__(self, path: Path, judge: Judge, questions: Sequence[Question], overwrite: bool) -> None:
        self.path = path
        contents = {(question.sample, question.label): question.content for question in questions}
        lines = json_lines.read(path, _KIND) if path.exists() and not overwrite else [judge.record()]
        header, *others = lines or [{}]
        if header != judge.record():
            raise _KIND.refusal(path, "one of another judge, or of another way to ask it")
        stored = [_parse_document(path, document) for document in others]
        self.judgements: dict[tuple[str, str | None], Judgement] = {
            (judgement.sample, judgement.label): judgement for judgement in stored
        }
        if any(contents.get(key) != judgement.content for key, judgement in self.judgements.items()):
            raise _KIND.refusal(path, "one of other answers")
        json_lines.write(path, [header, *map(asdict, self.judgements.values())])

    def add(self, judgement: Judgement) -> None:
        """Append a judgement to the file."""
        self.judgements[judgement.sample, judgement.label] = judgement
        json_lines.append(self.path, asdict(judgement))


def _parse_document(path: Path, document: Mapping[str, Any]) -> Judgement:
    """Return the judgement in a line of the file. Raises ConfigError for an invalid line."""
    invalid = _KIND.refusal(path, f"a line that is no judgement of ours, {str(document)[:40]}")
    try:
        result = Judgement(**document)
    except TypeError:
        raise invalid from None
    valid_score = result.score is None or (isinstance(result.score, int | float) and not isinstance(result.score, bool))
    texts = (result.sample, result.label or "", result.content, result.comment)
    valid_pair = result.outcome in (None, "win", TIE, "loss") and result.full_is in ("", *SIDES)
    if not (valid_score and valid_pair and all(isinstance(text, str) for text in texts)):
        raise invalid
    return result

"""What a judge said, checked as it comes and kept at once: a file that a same call goes on with.

What a judge is asked: one answer at a time, or a pair whose order is drawn, never which configuration wrote it.
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


TIE = "tie"
_HINT = "give --overwrite or another --output"
_KIND = FileKind("a file of judgements", ConfigError, 2**30, _HINT)


@dataclass(frozen=True)
class Judge:
    """Who is asked, and how.

    Attributes:
        command: program and arguments.
        pairwise: whether pairs are compared, instead of answers scored.
        seed: of the order within pairs.
        scale: least and largest score that may be given; None: any number.
    """

    command: tuple[str, ...]
    pairwise: bool = False
    seed: int = 0
    scale: tuple[float, float] | None = None

    def record(self) -> dict[str, Any]:
        """As the first line of a file of judgements holds it."""
        return {"judge": json.loads(json.dumps(asdict(self)))}


@dataclass(frozen=True)
class Judgement:
    """What the judge said of one question.

    Attributes:
        sample, label: whose; of the full cache's own answer the label is None.
        content: digest of what was read.
        score: of a single answer.
        outcome: of a pair, for the evicted answer: win, tie or loss.
        full_is: of a pair, which side the full cache's answer was.
        comment: of the judge.
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
        """Of a pair whether the one that was shown first won; None for a tie."""
        return None if self.outcome == TIE else (self.outcome == "loss") == (self.full_is == "a")


def judged(question: Question, said: Mapping[str, Any], judge: Judge) -> Judgement:
    """The judgement that a line makes of its question. Raises PluginError for what is none."""
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
    """Of a pair of the same text."""
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
    """The error for what a judge said of a question."""
    return PluginError(f"expected from the judge, of {question.whose}, {wanted}, got {line(repr(got))[:100]}")


class Kept:
    """A file of judgements: those of an earlier call, and each new one as soon as it is there.

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
        """Write one down."""
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

"""One prompt with its context and its question apart."""

from __future__ import annotations

from dataclasses import dataclass

from perturbkv.datasets.templates import Chat
from perturbkv.errors import DatasetError

LONGEST_ID = 1000
"""Characters: an id is a name, which tables, figures and errors show."""


@dataclass(frozen=True)
class Sample:
    """A prompt as text, before the chat template.

    Attributes:
        id: unique in its dataset.
        context: what a context-only scenario would compress: instruction and long text.
        question: what follows the context.
        answers: accepted answers, for scoring.
        answer_prefix: the beginning of the assistant's turn, which the model has to complete.
        task: LongBench's data set, needle or RULER's task, whose metric grades an answer; empty where none does.
        classes: what an answer is chosen from, where it is.
        delimiter: between prompt and answer_prefix, where no chat template stands there.
        metric: that grades an answer instead of the task's, one of `metrics.CHOICES`; empty where none is chosen.
        chat: the turns of a chat, which `context` and `question` then hold for people; None for a single turn.

    Raises DatasetError where context and question are both empty, and for an id or a text that no file can hold.
    """

    id: str
    context: str
    question: str = ""
    answers: tuple[str, ...] = ()
    answer_prefix: str = ""
    task: str = ""
    classes: tuple[str, ...] = ()
    delimiter: str = "\n"
    metric: str = ""
    chat: Chat | None = None

    def __post_init__(self) -> None:
        check_id(self.id)
        for name, texts in (
            ("prompt", (self.prompt,)),
            ("answers", self.answers),
            ("answer_prefix", (self.answer_prefix,)),
        ):
            for text in texts:
                check_text(f"sample '{self.id}': expected its {name}", text)
        if not self.prompt.strip():
            msg = f"sample '{self.id}' has an empty prompt; give it a context or a question"
            raise DatasetError(msg)

    @property
    def prompt(self) -> str:
        """The whole user turn: context, then question."""
        return self.context + self.question


def check_id(sample_id: str) -> None:
    """Raise DatasetError for an id that no trace can hold: what is measured is stored under it; or that is no name."""
    check_text("expected an id", sample_id)
    if "\0" in sample_id:
        msg = f"expected an id without NUL characters, which no trace holds, got {sample_id[:40]!r}"
        raise DatasetError(msg)
    if len(sample_id) > LONGEST_ID:
        msg = f"expected an id of at most {LONGEST_ID:,} characters, got {len(sample_id):,}: '{sample_id[:40]}…'"
        raise DatasetError(msg)


def check_text(whose: str, text: str) -> None:
    """Raise DatasetError, which begins with `whose`, for text that is none: with half of a surrogate pair in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        msg = f"{whose} to be text, got half of a surrogate pair in it"
        raise DatasetError(msg) from None

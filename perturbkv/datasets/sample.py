"""One prompt with its context and its question apart."""

from __future__ import annotations

from dataclasses import dataclass

from perturbkv.errors import DatasetError


@dataclass(frozen=True)
class Sample:
    """A prompt as text, before the chat template.

    Attributes:
        id: unique in its dataset.
        context: what a context-only scenario would compress: instruction and long text.
        question: what follows the context.
        answers: accepted answers, for scoring.
        answer_prefix: the beginning of the assistant's turn, which the model has to complete.
        task: LongBench's data set, or needle, whose metric grades an answer; empty where none does.
        classes: what an answer is chosen from, where it is.

    Raises DatasetError where context and question are both empty.
    """

    id: str
    context: str
    question: str = ""
    answers: tuple[str, ...] = ()
    answer_prefix: str = ""
    task: str = ""
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            msg = f"sample '{self.id}' has an empty prompt; give it a context or a question"
            raise DatasetError(msg)

    @property
    def prompt(self) -> str:
        """The whole user turn: context, then question."""
        return self.context + self.question

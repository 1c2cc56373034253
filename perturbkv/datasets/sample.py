"""One prompt with its context and its question apart.

A model's chat template around one prompt, or around the turns of a chat, and where the question begins in the text.

A template is a program of the model's maker: it may refuse a role, or roles that do not take turns, with a reason of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from perturbkv.errors import DatasetError, ModelError

_MARK = "\ue000prompt\ue000"
"""A text that stands in no chat template, and shows where a template puts texts."""


@dataclass(frozen=True)
class Message:
    """One turn of a chat: who speaks (`system`, `user` or `assistant`), and what."""

    role: str
    text: str


@dataclass(frozen=True)
class Chat:
    """Turns of which the last one, a user's, asks what the model shall answer.

    Attributes:
        messages: at least one.
        where: file and line, for errors.
    """

    messages: tuple[Message, ...]
    where: str


@dataclass(frozen=True)
class LaidOut:
    """A prompt's whole text.

    Attributes:
        text: what is tokenized.
        border: characters of it before the question; −1 where context and question cannot be told apart, or one of
            them is not there.
        around: the same text without anything of the sample's own.
    """

    text: str
    border: int
    around: str


def chat_turn(prompt: str, tokenizer: Any) -> str:
    """A user's turn and the beginning of the answer to it. Raises ModelError where the template cannot be run."""
    try:
        return _rendered([Message("user", prompt)], tokenizer)
    except Exception as error:
        msg = f"the tokenizer's chat template cannot be used: {_said(error)}; --no-chat-template does without"
        raise ModelError(msg) from error


def around_turn(tokenizer: Any) -> tuple[str, int]:
    """What stands around a user's turn, and where the turn's text begins in it."""
    marked = chat_turn(_MARK, tokenizer)
    return marked, max(marked.find(_MARK), 0)


def after_turn(tokenizer: Any) -> str:
    """What a chat template puts behind a user's turn, up to the answer; empty where the tokenizer has none."""
    return chat_turn(_MARK, tokenizer).partition(_MARK)[2] if tokenizer.chat_template else ""


def laid_out(chat: Chat, tokenizer: Any, answer_prefix: str = "") -> LaidOut:
    """The chat's whole text, up to the beginning of its answer; the question is the text of the last message.

    What the template writes before that text, and everything earlier, is the context. Raises DatasetError, which names
    file and line, where the template refuses the messages, or changes what comes before a text with the text.
    """
    *earlier, last = chat.messages
    text = _of_chat(chat, chat.messages, tokenizer)
    before, mark, after = _of_chat(chat, [*earlier, Message(last.role, _MARK)], tokenizer).partition(_MARK)
    if not (mark and text.startswith(before) and text[len(before) :].endswith(after)):
        msg = (
            f"{chat.where}: expected a chat template that leaves the last message's text in its place, got one that "
            "changes what stands around it: where the question begins cannot be told; use another model"
        )
        raise DatasetError(msg)
    around = _of_chat(chat, [Message(one.role, _MARK) for one in chat.messages], tokenizer)
    return LaidOut(text + answer_prefix, len(before) if earlier else -1, around)


def _of_chat(chat: Chat, messages: Iterable[Message], tokenizer: Any) -> str:
    try:
        return _rendered(messages, tokenizer)
    except Exception as error:
        roles = ", ".join(one.role for one in chat.messages)
        msg = (
            f"{chat.where}: the tokenizer's chat template refuses messages of {roles[:200]}: {_said(error)}; change "
            "them, or use another model"
        )
        raise DatasetError(msg) from None


def _rendered(messages: Iterable[Message], tokenizer: Any) -> str:
    turns = [{"role": one.role, "content": one.text} for one in messages]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


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

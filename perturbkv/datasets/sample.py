"""Samples: prompts as text, with context and question separate, and a chat template's text around them.

A template is a program by the model's authors: it may refuse a role, or roles that do not alternate, with a message of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from perturbkv.errors import DatasetError, ModelError

_MARK = "\ue000prompt\ue000"
"""A text that occurs in no chat template, and marks where a template puts texts."""


@dataclass(frozen=True)
class Message:
    """One turn of a chat: the role of its speaker (`system`, `user` or `assistant`), and its text."""

    role: str
    text: str


@dataclass(frozen=True)
class Chat:
    """Turns of a chat, the last one a user's, which the model shall answer.

    Attributes:
        messages: at least one.
        where: file and line, for errors.
    """

    messages: tuple[Message, ...]
    where: str


@dataclass(frozen=True)
class RenderedPrompt:
    """The whole text of a prompt, as it is tokenized.

    Attributes:
        text: the text to tokenize.
        context_end: number of characters before the question; −1 where context and question cannot be separated, or
            one of them is missing.
        template_text: the chat template's text around that of the sample.
        message_end: number of characters before the chat template's text behind the last message; −1 where that text
            is not known, or there is none.
        answer_start: number of characters before the answer prefix; −1 where there is no chat template.
    """

    text: str
    context_end: int
    template_text: str
    message_end: int = -1
    answer_start: int = -1


def render_turn(prompt: str, tokenizer: Any) -> str:
    """Return the chat template's text for a prompt as a user's turn, up to the start of the answer.

    Raises ModelError where the template cannot be rendered.
    """
    try:
        return _render([Message("user", prompt)], tokenizer)
    except Exception as error:
        raise ModelError(
            f"the tokenizer's chat template cannot be used: {_error_text(error)}; --no-chat-template does without"
        ) from error


def turn_frame(tokenizer: Any) -> tuple[str, int]:
    """Return the chat template's text around a user's turn, and the index at which the turn is inserted.

    The index is 0 where the template does not show the turn as it is.
    """
    marked = render_turn(_MARK, tokenizer)
    return marked, max(marked.find(_MARK), 0)


def text_after_turn(tokenizer: Any) -> str:
    """Return the chat template's text between a user's turn and the answer; empty without a chat template."""
    return render_turn(_MARK, tokenizer).partition(_MARK)[2] if tokenizer.chat_template else ""


def render_chat(chat: Chat, tokenizer: Any, answer_prefix: str = "") -> RenderedPrompt:
    """Return a chat's text by the chat template, up to the start of the answer.

    The question is the text of the last message, and everything before it the context. Raises DatasetError, with
    file and line, where the template refuses the messages, or where the text before the question depends on it.
    """
    *earlier, last = chat.messages
    text = _render_chat_messages(chat, chat.messages, tokenizer)
    before, mark, after = _render_chat_messages(chat, [*earlier, Message(last.role, _MARK)], tokenizer).partition(_MARK)
    if not (mark and text.startswith(before) and text[len(before) :].endswith(after)):
        raise DatasetError(
            f"{chat.where}: expected a chat template that leaves the last message's text in its place, got one that "
            "changes what stands around it: where the question begins cannot be told; use another model"
        )
    marked = [Message(message.role, _MARK) for message in chat.messages]
    around = _render_chat_messages(chat, marked, tokenizer)
    context_end = len(before) if earlier else -1
    return RenderedPrompt(text + answer_prefix, context_end, around, len(text) - len(after), len(text))


def _render_chat_messages(chat: Chat, messages: Iterable[Message], tokenizer: Any) -> str:
    """Return the chat template's text for messages. Raises DatasetError, with the chat's line, if it fails."""
    try:
        return _render(messages, tokenizer)
    except Exception as error:
        roles = ", ".join(message.role for message in chat.messages)
        raise DatasetError(
            f"{chat.where}: the tokenizer's chat template refuses messages of {roles[:200]}: {_error_text(error)}; "
            "change them, or use another model"
        ) from None


def _render(messages: Iterable[Message], tokenizer: Any) -> str:
    """Return the chat template's text for messages. Raises the template's own exceptions."""
    turns = [{"role": message.role, "content": message.text} for message in messages]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def _error_text(error: Exception) -> str:
    """Return an exception's class and message in one line, cut to a limited length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


LONGEST_ID = 1000
"""Longest id in characters: an id is a name, shown in tables, figures and errors."""


@dataclass(frozen=True)
class Sample:
    """A prompt as text, before the chat template.

    Attributes:
        id: unique in its dataset.
        context: instruction and long text, which the context-only scenario compresses.
        question: text after the context.
        answers: accepted answers, for scoring.
        answer_prefix: the beginning of the assistant's turn, which the model completes.
        task: LongBench's dataset, needle or RULER's task, whose metric grades an answer; empty where none does.
        classes: possible answers, for classification tasks.
        delimiter: text between prompt and answer_prefix, where no chat template separates them.
        metric: metric in place of the task's, one of `metrics.CHOICES`; empty where none is chosen.
        chat: the turns of a chat, which `context` and `question` then show to people; None for a single turn.
        text: a text that follows the prompt, for decode steps to read; empty without one.

    Raises DatasetError where context and question are both empty, for a `text` of white space alone, and for an id or
    a text that no file can hold.
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
    text: str = ""

    def __post_init__(self) -> None:
        check_id(self.id)
        for name, texts in (
            ("prompt", (self.prompt,)),
            ("answers", self.answers),
            ("answer_prefix", (self.answer_prefix,)),
            ("text", (self.text,)),
        ):
            for text in texts:
                check_text(f"sample '{self.id}': expected its {name}", text)
        if not self.prompt.strip():
            raise DatasetError(f"sample '{self.id}' has an empty prompt; give it a context or a question")
        if self.text and not self.text.strip():
            raise DatasetError(f"sample '{self.id}': expected words in its `text`, got white space; leave it out")

    @property
    def prompt(self) -> str:
        """The whole user turn: context, then question."""
        return self.context + self.question


def check_id(sample_id: str) -> None:
    """Raise DatasetError for a sample id that is too long, or that a trace cannot store."""
    check_text("expected an id", sample_id)
    if "\0" in sample_id:
        raise DatasetError(f"expected an id without NUL characters, which no trace holds, got {sample_id[:40]!r}")
    if len(sample_id) > LONGEST_ID:
        raise DatasetError(
            f"expected an id of at most {LONGEST_ID:,} characters, got {len(sample_id):,}: '{sample_id[:40]}…'"
        )


def check_text(expected: str, text: str) -> None:
    """Raise DatasetError for text with an unpaired surrogate; the message begins with `expected`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DatasetError(f"{expected} to be text, got half of a surrogate pair in it") from None

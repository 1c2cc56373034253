"""Samples from a jsonl file: a `prompt`, used verbatim, a chat's `messages`, or LongBench's fields, all checked.

Errors name file and line. In a row with `messages`, as chat services write them, the last user's turn is the question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perturbkv.datasets import metrics, wording
from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset, in_longbench
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.sample import Chat, Message, Sample, check_text
from perturbkv.datasets.wording import Wording
from perturbkv.errors import DatasetError, UnknownNameError
from perturbkv.user_files import FileKind, parse_json

FILE = FileKind("a jsonl file (UTF-8)", DatasetError, 2 * 2**30)
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


@dataclass(frozen=True)
class Row:
    """The object of one line; every method raises DatasetError for a field of another type.

    Attributes:
        fields: the parsed fields.
        index: index of the row among the file's rows, from 0.
        where: file and line, for errors.
    """

    fields: Mapping[str, Any]
    index: int
    where: str

    def text(self, name: str) -> str:
        """Return a text field; empty where the row lacks it."""
        value = self.fields.get(name, "")
        if not isinstance(value, str):
            msg = f"expected `{name}` to be text, got {kind(value)}"
            raise self.refusal(msg)
        return self.encodable(f"`{name}`", value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a list of texts; empty where the row lacks it."""
        values = self.fields.get(name, [])
        if not isinstance(values, list):
            msg = f"expected `{name}` to be a list of texts, got {kind(values)}"
            raise self.refusal(msg)
        for value in values:
            if not isinstance(value, str):
                msg = f"expected `{name}` to be a list of texts, got {kind(value)} in it"
                raise self.refusal(msg)
        return tuple(self.encodable(f"`{name}`", value) for value in values)

    def identity(self, name: str) -> str:
        """Return a field that is text or an integer, as text; the row's index where it is missing or empty."""
        value = self.fields.get(name, "")
        if not isinstance(value, str | int) or isinstance(value, bool):
            msg = f"expected `{name}` to be text or a whole number, got {kind(value)}"
            raise self.refusal(msg)
        return self.encodable(f"`{name}`", str(value)) or str(self.index)

    def indexed_identity(self, name: str) -> str:
        """Return the row's index followed by the field, for data whose own ids repeat.

        The index alone without the field.
        """
        named = self.fields.get(name) is not None and self.identity(name)
        return f"{self.index}-{named}" if named and self.fields[name] else str(self.index)

    def own_identity(self) -> str:
        """Return the field `id`; without it, the row's index and LongBench's `_id`."""
        return self.indexed_identity("_id") if self.fields.get("id") is None else self.identity("id")

    def sample(self, **fields: Any) -> Sample:
        """Return the sample of these fields. Raises DatasetError with file and line."""
        try:
            return Sample(**fields)
        except DatasetError as error:
            raise self.refusal(error) from None

    def encodable(self, name: str, value: str) -> str:
        """Return the value of a field called `name`. Raises DatasetError where no file can hold it."""
        try:
            check_text(f"expected {name}", value)
        except DatasetError as error:
            raise self.refusal(error) from None
        return value

    def refusal(self, problem: object) -> DatasetError:
        """Return the error with file and line."""
        return DatasetError(f"{self.where}: {problem}")


def kind(value: object) -> str:
    """Return the type of a JSON value, in words."""
    return _KINDS.get(type(value), "an object")


def read_rows(text: str, where: str, most: int) -> list[Row]:
    """Return at most `most` rows of a jsonl text.

    Raises DatasetError for a line that is no JSON object, and for no line.
    """
    rows: list[Row] = []
    for line, content in _lines(text):
        if len(rows) == most:
            break
        rows.append(_parse(content, len(rows), f"{where}, line {line}"))
    if not rows:
        msg = f"expected at least one sample in {where}, got none"
        raise DatasetError(msg)
    return rows


def check_identities(samples: tuple[Sample, ...], rows: list[Row]) -> None:
    """Raise DatasetError, with the line, where a sample has the id of an earlier one."""
    seen: set[str] = set()
    for sample, row in zip(samples, rows, strict=True):
        if sample.id in seen:
            msg = f"expected every id once, got '{sample.id}' again"
            raise row.refusal(msg)
        seen.add(sample.id)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            yield number, content


def _parse(content: str, index: int, where: str) -> Row:
    try:
        document = parse_json(content, finite=False)  # of the numbers in a row none but ids is read
    except ValueError as error:
        msg = f"{where}: expected a JSON object, got text that is no JSON ({error})"
        raise DatasetError(msg) from None
    if not isinstance(document, dict):
        msg = f"{where}: expected a JSON object, got {kind(document)}"
        raise DatasetError(msg)
    return Row(document, index, where)


ROLES = ("system", "user", "assistant")
_CALLS = ("tool_calls", "function_call")
"""Fields of a message with content other than text."""


def chat_sample(row: Row) -> Sample:
    """Return the sample of a row's messages. Raises DatasetError, with file and line, for an invalid chat."""
    if "prompt" in row.fields:
        msg = "expected `prompt` or `messages`, got both; leave one out"
        raise row.refusal(msg)
    messages = tuple(_message(row, index, one) for index, one in enumerate(_message_list(row)))
    *earlier, last = messages
    _check_last(row, last)
    return row.sample(
        id=row.identity("id"),
        context="".join(f"{one.text}\n\n" for one in earlier),
        question=last.text,
        answers=row.texts("answers"),
        answer_prefix=row.text("answer_prefix"),
        chat=Chat(messages, row.where),
    )


def _message_list(row: Row) -> list[Any]:
    messages = row.fields["messages"]
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else kind(messages)
        msg = f"expected `messages` to be a list of messages, got {got}"
        raise row.refusal(msg)
    return messages


def _message(row: Row, index: int, value: Any) -> Message:
    """Return one message with a known role and a text; `index` counts from 0. Raises DatasetError."""
    if not isinstance(value, dict):
        msg = f"expected message {index + 1} to be an object with `role` and `content`, got {kind(value)}"
        raise row.refusal(msg)
    role, text = value.get("role"), value.get("content")
    if role not in ROLES:
        got = repr(role)[:40] if isinstance(role, str) else kind(role)
        msg = f"expected message {index + 1} to have one of the roles {', '.join(ROLES)}, got {got}"
        raise row.refusal(msg)
    if calls := next((name for name in _CALLS if value.get(name)), None):
        msg = f"expected message {index + 1} to be text alone, got `{calls}` beside it; leave such chats out"
        raise row.refusal(msg)
    if not isinstance(text, str):
        msg = f"expected the `content` of message {index + 1} to be text, got {kind(text)}"
        raise row.refusal(msg)
    return Message(role, row.encodable(f"the content of message {index + 1}", text))


def _check_last(row: Row, last: Message) -> None:
    """Raise DatasetError unless the last message is a user's and not empty."""
    if last.role == "assistant":
        msg = (
            "expected the last message to be a user's, got an assistant's; leave it out, or move its text to "
            "`answers`, where it is an accepted answer, or to `answer_prefix`, where the model goes on with it"
        )
        raise row.refusal(msg)
    if last.role != "user" or not last.text.strip():
        got = "an empty one" if last.role == "user" else f"a {last.role}'s"
        msg = f"expected the last message to be a user's, who asks something; got {got}"
        raise row.refusal(msg)


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """Return the first samples of a file. Raises DatasetError with file and line for what cannot be read."""
    path = Path(name)
    text = FILE.read_text(path)
    rows = read_rows(text, str(path), options.samples)
    wordings = _wordings(rows)
    samples = tuple(replace(_sample(row, wordings), metric=_metric(row)) for row in rows)
    check_identities(samples, rows)
    recorded = {dataset: worded.record() for dataset, worded in wordings.items()}
    digest = hashlib.sha256(text.encode()).hexdigest()
    return LoadedDataset(samples, {"file_sha256": digest, "wording": recorded}, tuple(wordings.values()))


def longbench_sample(row: Row, worded: Wording) -> Sample:
    """Return the sample of a row with LongBench's fields, in its dataset's wording."""
    for name in ("context", "input") if worded.has_question else ("context",):
        if name not in row.fields:
            msg = f"expected the field `{name}`, which {worded.dataset}'s prompt has; got {[*row.fields]}"
            raise row.refusal(msg)
    context = row.text("context")
    if not context.strip():
        msg = "the context is empty; give `context` some text"
        raise row.refusal(msg)
    before, after = worded.surrounding_text(row.text("input"))
    return row.sample(
        id=row.own_identity(),
        context=before + context,
        question=after,
        answers=row.texts("answers"),
        task=worded.dataset,
        classes=row.texts("all_classes") if row.fields.get("all_classes") is not None else (),
    )


def _wordings(rows: list[Row]) -> dict[str, Wording]:
    """Return the wording of each LongBench dataset that a row names."""
    wordings: dict[str, Wording] = {}
    for row in rows:
        name = row.fields.get("dataset")
        if (
            {"prompt", "messages"} & row.fields.keys()
            or not isinstance(name, str)
            or not in_longbench(name)
            or name in wordings
        ):
            continue
        try:
            wordings[name] = wording.read(name)
        except DatasetError as error:
            raise row.refusal(error) from None
    return wordings


def _metric(row: Row) -> str:
    """Return the metric that the row names for its answers; empty where it names none."""
    named = row.text("metric")
    try:
        if named:
            metrics.check_name(named)
    except UnknownNameError as error:
        raise row.refusal(error) from None
    return named


def _sample(row: Row, wordings: dict[str, Wording]) -> Sample:
    if "messages" in row.fields:
        return chat_sample(row)
    if "prompt" in row.fields:
        return row.sample(
            id=row.identity("id"),
            context=row.text("prompt"),
            answers=row.texts("answers"),
            answer_prefix=row.text("answer_prefix"),
        )
    if "context" not in row.fields and "input" not in row.fields:
        msg = f"expected the field `prompt`, `messages`, or `context` and `input`; got {[*row.fields]}"
        raise row.refusal(msg)
    worded = wordings.get(str(row.fields.get("dataset")))
    return longbench_sample(row, worded) if worded else _plain(row)


def _plain(row: Row) -> Sample:
    """Return a sample of context and question with an empty line between them."""
    context, question = row.text("context"), row.text("input")
    if not (context + question).strip():
        msg = "the prompt is empty; give `context` or `input` some text"
        raise row.refusal(msg)
    return row.sample(
        id=row.own_identity(),
        context=context,
        question=f"\n\n{question}" if context and question else question,
        answers=row.texts("answers"),
    )

"""Samples from a jsonl file: a `prompt`, used verbatim, a chat's `messages`, or `context` and `question`, all checked.

Errors name file and line. In a row with `messages`, as chat services write them, the last user's turn is the question.
LongBench's word for the question is `input`, which a row may have instead. In a row with `outputs`, as NVIDIA's RULER
writes them, `input` is the whole prompt, and `outputs` are graded by RULER's match.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbkv.configs.task_kinds import LONGBENCH
from perturbkv.datasets import metrics, wording
from perturbkv.datasets.dataset_registry import GENERATION_LENGTH, DatasetOptions, LoadedDataset, in_longbench
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.sample import Chat, Message, Sample
from perturbkv.datasets.wording import Wording
from perturbkv.errors import DatasetError, UnknownNameError
from perturbkv.escaping import escape_line
from perturbkv.user_files import FileKind, parse_json

FILE = FileKind("a jsonl file (UTF-8)", DatasetError, 2 * 2**30)
WAYS = (("prompt",), ("messages",), ("context", "question", "input"))
"""The fields that say a prompt, in three ways of which a row has one."""
FIELDS = (
    *(name for way in WAYS for name in way),
    *("id", "answers", "answer_prefix", "metric", "text"),
    *("dataset", "all_classes", "_id", "length", "language"),
)
"""All fields of a row; the last five are LongBench's, and `length` and `language` are never read."""
RULER_FIELDS = (
    *("index", "input", "outputs", "answer_prefix", "metric"),
    *("length", "length_w_model_temp", "token_position_answer"),
)
"""All fields of a row of RULER; the last three are never read."""
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


@dataclass(frozen=True)
class Row:
    """A line's JSON object. Every method raises DatasetError, with file and line, for a field of another type.

    Attributes:
        fields: the parsed fields, without those that are null, which count as missing.
        index: index of the row among the file's rows, from 0.
        where: file and line, for errors.
    """

    fields: Mapping[str, Any]
    index: int
    where: str

    @property
    def is_ruler(self) -> bool:
        """True of a row as NVIDIA's RULER writes it, which alone has `outputs`."""
        return "outputs" in self.fields

    def text(self, name: str) -> str:
        """Return a text field; empty if the row lacks the field."""
        value = self.fields.get(name, "")
        if not isinstance(value, str):
            raise self.refusal(f"expected `{name}` to be text, got {json_type(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a list of texts; empty if the row lacks the field."""
        values = self.fields.get(name, [])
        if not isinstance(values, list):
            raise self.refusal(f"expected `{name}` to be a list of texts, got {json_type(values)}")
        for value in values:
            if not isinstance(value, str):
                raise self.refusal(f"expected `{name}` to be a list of texts, got {json_type(value)} in it")
        return tuple(values)

    def id_text(self, name: str) -> str:
        """Return a text or integer field as text; the row's index if the field is missing or empty."""
        value = self.fields.get(name, "")
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise self.refusal(f"expected `{name}` to be text or a whole number, got {json_type(value)}")
        return str(value) or str(self.index)

    def question(self) -> str:
        """Return the question: `question`, or LongBench's `input`. Raises DatasetError for two different ones."""
        question, longbench_input = self.text("question"), self.text("input")
        if {"question", "input"} <= self.fields.keys() and question != longbench_input:
            raise self.refusal(
                "expected `question` or `input`, which mean the same, got both with different texts; leave one out"
            )
        return question or longbench_input

    def sample_id(self) -> str:
        """Return the field `id`, else the row's index followed by LongBench's `_id`, which may repeat."""
        if "id" in self.fields:
            return self.id_text("id")
        longbench_id = self.id_text("_id") if self.fields.get("_id") not in (None, "") else ""
        return f"{self.index}-{longbench_id}" if longbench_id else str(self.index)

    def sample(self, **fields: Any) -> Sample:
        """Return a `Sample` with the given fields. Raises DatasetError, with file and line, for invalid fields."""
        try:
            return Sample(**fields)
        except DatasetError as error:
            raise self.refusal(error) from None

    def refusal(self, problem: object) -> DatasetError:
        """Return, not raise, the DatasetError for a problem of this row, with file and line."""
        return DatasetError(f"{self.where}: {problem}")


def json_type(value: object) -> str:
    """Return the type of a JSON value in words, such as `a number`."""
    return _KINDS.get(type(value), "an object")


def read_rows(text: str, where: str, most: int) -> list[Row]:
    """Return the first `most` rows of a jsonl text, skipping empty lines; `where` names its file in errors.

    Raises DatasetError for a line that is no JSON object, and for a text without rows.
    """
    lines = itertools.islice(_lines(text, where), most)
    rows = [_parse_row(content, index, place) for index, (place, content) in enumerate(lines)]
    if not rows:
        raise _no_rows(where)
    return rows


def _lines(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield file and line number, and the content, of every line that is not empty."""
    for line, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            yield f"{where}, line {line}", content


def _no_rows(where: str) -> DatasetError:
    """Return, not raise, the DatasetError for a file without rows."""
    return DatasetError(f"expected at least one sample in {where}, got none")


def _check_fields(row: Row) -> None:
    """Raise DatasetError, with file and line, for an unknown field, and for a prompt that is given in two ways."""
    known = RULER_FIELDS if row.is_ruler else FIELDS
    if unknown := next((name for name in row.fields if name not in known), None):
        close, shown = difflib.get_close_matches(unknown, known, n=1), escape_line(unknown)[:40]
        raise row.refusal(
            f"unknown field `{shown}`; did you mean `{close[0]}`?"
            if close
            else f"expected the fields {', '.join(known)}, got `{shown}`; take it out"
        )
    # the first field of each way to say the prompt that the row takes
    given = [next(name for name in way if name in row.fields) for way in WAYS if row.fields.keys() & set(way)]
    if len(given) > 1:
        raise row.refusal(f"expected `{given[0]}` or `{given[1]}`, got both; leave one out")
    if not given:
        got = [*row.fields] or "none that is not null"
        ways = "`input`, RULER's prompt" if row.is_ruler else "`prompt`, `messages`, or `context` and `question`"
        raise row.refusal(f"expected the field {ways}; got {got}")
    _check_effects(row, given[0])


_OF_LONGBENCH = ("dataset", "all_classes", "_id")


def _check_effects(row: Row, way: str) -> None:
    """Raise DatasetError, with file and line, for a field without effect in a row whose prompt is its field `way`."""
    idle = next((name for name in _OF_LONGBENCH if name in row.fields), None) if way in ("prompt", "messages") else None
    if idle:
        raise row.refusal(
            f"`{idle}` has no effect beside `{way}`; leave it out, or say the prompt by `context` and `question`"
        )
    if "all_classes" in row.fields and "dataset" not in row.fields:
        raise row.refusal("`all_classes` has no effect without `dataset`, one of LongBench's names; leave it out")
    answers = "outputs" if row.is_ruler else "answers"
    if "metric" in row.fields and not row.texts(answers):
        raise row.refusal(f"`metric` has no effect without `{answers}`; give some, or leave it out")


def _parse_row(content: str, index: int, where: str) -> Row:
    """Return the row of a line. Raises DatasetError where it is no JSON object."""
    try:
        document = parse_json(content, finite=False)  # of the numbers in a row none but ids is read
    except ValueError as error:
        raise DatasetError(f"{where}: expected a JSON object, got text that is no JSON ({error})") from None
    if not isinstance(document, dict):
        raise DatasetError(f"{where}: expected a JSON object, got {json_type(document)}")
    return Row({name: value for name, value in document.items() if value is not None}, index, where)


ROLES = ("system", "user", "assistant")
_OF_MESSAGE = ("role", "content", "name")
_EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values of fields that chat services write into every message, used or not."""


def _chat_sample(row: Row) -> Sample:
    """Return the sample of a row with `messages`. Raises DatasetError, with file and line, for an invalid chat."""
    messages = tuple(_message(row, index, value) for index, value in enumerate(_message_list(row)))
    *earlier, last = messages
    if last.role != "user" or not last.text.strip():
        got = "an empty one" if last.role == "user" else f"one of the {last.role}"
        raise row.refusal(
            f"expected the last message to be a user's, who asks something; got {got}: leave it out, or move its text "
            "to `answers` or `answer_prefix`"
        )
    return row.sample(
        id=row.id_text("id"),
        context="".join(f"{message.text}\n\n" for message in earlier),
        question=last.text,
        answers=row.texts("answers"),
        answer_prefix=row.text("answer_prefix"),
        chat=Chat(messages, row.where),
    )


def _message_list(row: Row) -> list[Any]:
    """Return the field `messages`. Raises DatasetError unless it is a non-empty list."""
    messages = row.fields["messages"]
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else json_type(messages)
        raise row.refusal(f"expected `messages` to be a list of messages, got {got}")
    return messages


def _message(row: Row, index: int, value: Any) -> Message:
    """Return an item of `messages` as a message; `index` counts from 0.

    Raises DatasetError for an unknown role, and for content other than text.
    """
    if not isinstance(value, dict):
        raise row.refusal(
            f"expected message {index + 1} to be an object with `role` and `content`, got {json_type(value)}"
        )
    role, text = value.get("role"), value.get("content")
    if role not in ROLES:
        got = repr(role)[:40] if isinstance(role, str) else json_type(role)
        raise row.refusal(f"expected message {index + 1} to have one of the roles {', '.join(ROLES)}, got {got}")
    if unknown := next((name for name in value if name not in _OF_MESSAGE and value[name] not in _EMPTY), None):
        got = escape_line(unknown)[:40]
        raise row.refusal(f"expected `role`, `content` and `name` in message {index + 1}, got `{got}`; take it out")
    if not isinstance(text, str):
        raise row.refusal(f"expected the `content` of message {index + 1} to be text, got {json_type(text)}")
    return Message(role, text)


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """Return the first samples of the jsonl file `name`. Raises DatasetError, with file and line, for invalid rows."""
    path = Path(name)
    text = FILE.read_text(path)
    rows = read_rows(text, str(path), options.samples)
    wordings: dict[str, Wording] = {}
    seen: set[str] = set()
    samples = tuple(_checked_sample(row, wordings, seen) for row in rows)
    recorded = {dataset: each.record() for dataset, each in wordings.items()}
    digest = hashlib.sha256(text.encode()).hexdigest()
    longest = max((each.generation_length for each in wordings.values()), default=GENERATION_LENGTH)
    return LoadedDataset(samples, {"file_sha256": digest, "wording": recorded}, longest)


def longbench_sample(row: Row, dataset_wording: Wording) -> Sample:
    """Return the sample of a row with LongBench's fields, with the prompt wording of its dataset.

    Raises DatasetError, with file and line, for a row without a context, or without the question that the wording has.
    """
    missing = {"`context`": "context" not in row.fields}
    missing["`question` (or `input`)"] = dataset_wording.has_question and not {"question", "input"} & row.fields.keys()
    if name := next((name for name, lacks in missing.items() if lacks), None):
        raise row.refusal(
            f"expected the field {name}, which {dataset_wording.dataset}'s prompt has; got {[*row.fields]}"
        )
    context = row.text("context")
    if not context.strip():
        raise row.refusal("the context is empty; give `context` some text")
    before, after = dataset_wording.surrounding_text(row.question())
    return row.sample(
        id=row.sample_id(),
        context=before + context,
        question=after,
        answers=row.texts("answers"),
        answer_prefix=row.text("answer_prefix"),
        task=dataset_wording.dataset,
        classes=row.texts("all_classes"),
    )


def _add_wording(row: Row, wordings: dict[str, Wording]) -> None:
    """Add to `wordings` the wording of the LongBench dataset that a row names, if any. Raises DatasetError."""
    if "dataset" not in row.fields or (name := row.text("dataset")) in wordings:
        return
    try:
        if not in_longbench(name):
            hint = "leave `dataset` out for words of your own"
            raise UnknownNameError(
                name, "dataset of LongBench", itertools.chain.from_iterable(LONGBENCH.values()), hint
            )
        wordings[name] = wording.read(name)
    except (DatasetError, UnknownNameError) as error:
        raise row.refusal(error) from None


def _metric(row: Row) -> str:
    """Return the field `metric`; without it RULER's match for its rows, else empty. Raises DatasetError if unknown."""
    name = row.text("metric") or (metrics.STRING_MATCH_ALL if row.is_ruler else "")
    try:
        if name:
            metrics.check_name(name)
    except UnknownNameError as error:
        raise row.refusal(error) from None
    return name


def _checked_sample(row: Row, wordings: dict[str, Wording], seen: set[str]) -> Sample:
    """Return a row's sample, and add its LongBench wording to `wordings` and its id to `seen`, those of rows before it.

    Raises DatasetError, with file and line, for an invalid row and for an id that is seen already.
    """
    _check_fields(row)
    _add_wording(row, wordings)
    sample = row.sample(**{**vars(_sample(row, wordings)), "metric": _metric(row), "text": row.text("text")})
    if sample.id in seen:
        raise row.refusal(f"expected every id once, got '{sample.id}' again")
    seen.add(sample.id)
    return sample


def _sample(row: Row, wordings: Mapping[str, Wording]) -> Sample:
    """Return a row's sample, made from its `messages`, its `prompt`, or its `context` and `question`."""
    if "messages" in row.fields:
        return _chat_sample(row)
    if row.is_ruler or "prompt" in row.fields:
        sample_id, prompt, answers = ("index", "input", "outputs") if row.is_ruler else ("id", "prompt", "answers")
        return row.sample(
            id=row.id_text(sample_id),
            context=row.text(prompt),
            answers=row.texts(answers),
            answer_prefix=row.text("answer_prefix"),
        )
    dataset_wording = wordings.get(str(row.fields.get("dataset")))
    return longbench_sample(row, dataset_wording) if dataset_wording else _context_sample(row)


def _context_sample(row: Row) -> Sample:
    """Return the sample of a row with `context` and `question`, separated by an empty line."""
    context, question = row.text("context"), row.question()
    if not (context + question).strip():
        raise row.refusal("the prompt is empty; give `context` or `question` some text")
    return row.sample(
        id=row.sample_id(),
        context=context,
        question=f"\n\n{question}" if context and question else question,
        answers=row.texts("answers"),
        answer_prefix=row.text("answer_prefix"),
    )


@dataclass(frozen=True)
class FileDescription:
    """A jsonl file of prompts, described without a tokenizer.

    Attributes:
        rows: number of lines that are not empty.
        fields: field -> number of rows that have it, in the order in which they appear.
        first: the first row that is not refused; None where every row is.
        characters: length of every prompt that is not refused, in characters.
        graded: number of prompts with accepted answers.
        refusals: the error of every row that a run would refuse, with file and line.
    """

    rows: int
    fields: Mapping[str, int]
    first: Sample | None
    characters: tuple[int, ...]
    graded: int
    refusals: tuple[str, ...]


def describe(path: Path) -> FileDescription:
    """Return what a jsonl file of prompts holds, and which of its rows a run would refuse.

    What only a model knows, such as a chat template that refuses a role, is not checked. Raises DatasetError for a file
    that cannot be read, and for one without rows.
    """
    fields: Counter[str] = Counter()
    samples: list[Sample] = []
    refusals: list[str] = []
    wordings: dict[str, Wording] = {}
    seen: set[str] = set()
    index = -1
    for index, (where, content) in enumerate(_lines(FILE.read_text(path), str(path))):
        try:
            row = _parse_row(content, index, where)
            fields.update(row.fields.keys())
            samples.append(_checked_sample(row, wordings, seen))
        except DatasetError as error:
            refusals.append(str(error))
    if index < 0:
        raise _no_rows(str(path))
    characters = tuple(len(sample.prompt) for sample in samples)
    graded = sum(bool(sample.answers) for sample in samples)
    return FileDescription(index + 1, dict(fields), next(iter(samples), None), characters, graded, tuple(refusals))

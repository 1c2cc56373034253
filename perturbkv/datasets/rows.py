"""The lines of a jsonl file as checked objects: a field is what it should be, or an error that names file and line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perturbkv.datasets.sample import Sample, check_text
from perturbkv.errors import DatasetError
from perturbkv.user_files import FileKind, parse_json

FILE = FileKind("a jsonl file (UTF-8)", DatasetError, 2 * 2**30)
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


@dataclass(frozen=True)
class Row:
    """One line's object; every method raises DatasetError for a field that is of another kind.

    Attributes:
        fields: as parsed.
        place: of the row among the file's rows, from 0.
        where: file and line, for errors.
    """

    fields: Mapping[str, Any]
    place: int
    where: str

    def text(self, name: str) -> str:
        """A field that is text; empty where the row lacks it."""
        value = self.fields.get(name, "")
        if not isinstance(value, str):
            msg = f"expected `{name}` to be text, got {kind(value)}"
            raise self.refusal(msg)
        return self.encodable(f"`{name}`", value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that is a list of texts; empty where the row lacks it."""
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
        """A field that is text or a whole number, as text; the row's place where it lacks it or it is empty."""
        value = self.fields.get(name, "")
        if not isinstance(value, str | int) or isinstance(value, bool):
            msg = f"expected `{name}` to be text or a whole number, got {kind(value)}"
            raise self.refusal(msg)
        return self.encodable(f"`{name}`", str(value)) or str(self.place)

    def placed_identity(self, name: str) -> str:
        """The row's place and behind it the field, for data whose own ids come twice; the place alone without one."""
        named = self.fields.get(name) is not None and self.identity(name)
        return f"{self.place}-{named}" if named and self.fields[name] else str(self.place)

    def own_identity(self) -> str:
        """The field `id`; of a row without it what its place and LongBench's `_id` make."""
        return self.placed_identity("_id") if self.fields.get("id") is None else self.identity("id")

    def sample(self, **fields: Any) -> Sample:
        """The sample of these fields."""
        try:
            return Sample(**fields)
        except DatasetError as error:
            raise self.refusal(error) from None

    def encodable(self, name: str, value: str) -> str:
        """The value, of a field called `name`. Raises DatasetError where no file can hold it."""
        try:
            check_text(f"expected {name}", value)
        except DatasetError as error:
            raise self.refusal(error) from None
        return value

    def refusal(self, problem: object) -> DatasetError:
        """The error that names file and line."""
        return DatasetError(f"{self.where}: {problem}")


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    return _KINDS.get(type(value), "an object")


def read_rows(text: str, where: str, most: int) -> list[Row]:
    """At most `most` rows of a jsonl text. Raises DatasetError for a line that is no JSON object, and for no line."""
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
    """Raise DatasetError, which names the line, where a sample has the id of an earlier one."""
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


def _parse(content: str, place: int, where: str) -> Row:
    try:
        found = parse_json(content, finite=False)  # of the numbers in a row none but ids is read
    except ValueError as error:
        msg = f"{where}: expected a JSON object, got text that is no JSON ({error})"
        raise DatasetError(msg) from None
    if not isinstance(found, dict):
        msg = f"{where}: expected a JSON object, got {kind(found)}"
        raise DatasetError(msg)
    return Row(found, place, where)

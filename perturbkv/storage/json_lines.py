"""Files of one JSON object per line that grow sample by sample, so that a killed run resumes with the next sample.

The first line identifies the run. A last line that a killed run left unfinished is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturbkv.errors import ConfigError
from perturbkv.escaping import escape_json
from perturbkv.storage.atomic_files import clear_leftovers, write_atomically
from perturbkv.storage.output import Lock, translate_os_errors
from perturbkv.user_files import FileKind, parse_json

Document = dict[str, Any]


def read(path: Path, kind: FileKind) -> list[Document]:
    """Return the JSON object of each line of a file, without a last line left unfinished by a killed process.

    Raises the error of `kind` where another line is no JSON object.
    """
    return parse(path, kind.read_text(path), kind)


def parse(path: Path, text: str, kind: FileKind) -> list[Document]:
    """Return the JSON object of each line of `text`, as `read`; `path` names the file in error messages."""
    documents = [parse_line(line) for line in text.split("\n") if line.strip()]
    if len(documents) > 1 and documents[-1] is None:
        documents.pop()
    if broken := [number for number, document in enumerate(documents, start=1) if document is None]:
        raise kind.refusal(path, f"a line {broken[0]} that is no JSON object")
    return [document for document in documents if document is not None]


def write(path: Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """Write a file in an existing folder atomically, one JSON object per line."""
    text = "".join(map(format_line, documents))
    clear_leftovers(path)
    write_atomically(path, lambda stream: stream.write(text.encode()), folders=False)


def append(path: Path, document: Mapping[str, Any]) -> None:
    """Append a JSON object as a line to a file, and flush it to the disk."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(format_line(document))
        stream.flush()
        os.fsync(stream.fileno())


def format_line(document: Mapping[str, Any]) -> str:
    """Return an object as a line of JSON, ending with a newline."""
    return escape_json(json.dumps(document, ensure_ascii=False, allow_nan=False)) + "\n"


def parse_line(text: str) -> Document | None:
    """Return the JSON object of a line; None for an invalid line, such as one left unfinished by a killed run."""
    try:
        document = parse_json(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


_KIND = FileKind("results sample by sample", ConfigError, 8 * 2**30, "give --overwrite or another --output")
SAMPLE, MADE_WITH = "sample", "made_with"
"""The keys under which a line names its sample, and the first line what its run was made of and with."""


@dataclass
class SampleLines:
    """The lines of one run's results, in the order in which they were written; the first one makes the file.

    Attributes:
        rows: an object per line, whose sample's id is under `sample`.
        made_with: what the first line says of the run's provenance.
        path: the file; None: the rows are kept in memory alone.
    """

    rows: list[dict[str, Any]]
    made_with: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    _first: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def sample_ids(self) -> set[str]:
        """Ids of the samples with a row."""
        return {row[SAMPLE] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """Append a sample's row, and flush it to the disk if there is a file."""
        if self.path is not None and self.rows:
            append(self.path, row)
        elif self.path is not None:
            write(self.path, [self._first, row])
        self.rows.append(row)

    def select(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows of the samples with ids `names`, in that order; samples without a row are left out."""
        rows = {row[SAMPLE]: row for row in self.rows}
        return [rows[name] for name in names if name in rows]

    def sort(self, names: Sequence[str]) -> None:
        """Sort the rows by the order of the ids `names`, and rewrite the file where that changes it."""
        before, self.rows = self.rows, self.select(names)
        if self.path is not None and self.rows != before:
            write(self.path, [self._first, *self.rows])


@contextmanager
def open_sample_lines(
    path: Path | None,
    header: Mapping[str, Any],
    overwrite: bool = False,
    wait: bool = False,
    made_with: Mapping[str, Any] | None = None,
    is_row: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> Iterator[SampleLines]:
    """Open a file of results with lines of samples, locked against other writers, and yield its lines.

    `header`, the first line, identifies the run; `made_with` is added to it, and may differ when a run goes on. Without
    a path the results are kept in memory alone. `wait` waits for another writer; `is_row` tells whether an object is a
    sample's row, beside that it has the sample's id.

    Raises ConfigError for a file whose first line is not `header` or whose others are no rows, unless `overwrite`
    replaces it; OutputError where
    nothing can be written.
    """
    first = {**header, **({MADE_WITH: made_with} if made_with else {})}
    if path is None:
        yield SampleLines([], made_with or {})
        return
    with Lock(path, wait), translate_os_errors(path):
        rows: list[dict[str, Any]] = []
        if os.path.lexists(path) and not overwrite:
            first, rows = _finished_rows(path, header, is_row)
            write(path, [first, *rows])
        yield SampleLines(rows, first.get(MADE_WITH, {}), path, first)


def _finished_rows(
    path: Path, header: Mapping[str, Any], is_row: Callable[[Mapping[str, Any]], bool]
) -> tuple[Document, list[Document]]:
    """Return the first line and the rows of finished samples in a file.

    Raises ConfigError where the first line is not `header`, or another is no row.
    """
    first, *rows = read(path, _KIND) or [{}]
    if {name: value for name, value in first.items() if name != MADE_WITH} != json.loads(json.dumps(header)):
        raise _KIND.refusal(path, "one of another question, or of another run")
    if invalid := [row for row in rows if not (isinstance(row.get(SAMPLE), str) and is_row(row))]:
        raise _KIND.refusal(path, f"a line that is no sample's, {str(invalid[0])[:40]}")
    return first, rows

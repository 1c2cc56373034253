"""Files of one JSON object per line that grow sample by sample, so that a killed run goes on with the next sample.

The first line identifies the run. A last line that a killed run left unfinished is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturbkv.errors import ConfigError
from perturbkv.escaping import in_json
from perturbkv.storage.atomic_files import clear_leftovers, write_whole
from perturbkv.storage.output import Lock, refusals
from perturbkv.user_files import FileKind, parse_json

Document = dict[str, Any]


def read(path: Path, kind: FileKind) -> list[Document]:
    """Return the objects of all lines; a last one that a killed process left unfinished is left out.

    Raises the error of `kind` where another line is no JSON object.
    """
    return parsed(path, kind.read_text(path), kind)


def parsed(path: Path, text: str, kind: FileKind) -> list[Document]:
    """Return the objects of a file's text, as `read` does for the file. Raises as `read`."""
    found = [of_line(line) for line in text.split("\n") if line.strip()]
    if len(found) > 1 and found[-1] is None:
        found.pop()
    if broken := [place for place, one in enumerate(found, start=1) if one is None]:
        raise kind.refusal(path, f"a line {broken[0]} that is no JSON object")
    return [one for one in found if one is not None]


def write(path: Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """Write a file with these lines alone, whole or not at all."""
    text = "".join(map(line, documents))
    clear_leftovers(path)
    write_whole(path, lambda stream: stream.write(text.encode()))


def append(path: Path, document: Mapping[str, Any]) -> None:
    """Add a line to a file; it is on the disk when this returns."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(line(document))
        stream.flush()
        os.fsync(stream.fileno())


def line(document: Mapping[str, Any]) -> str:
    """Return an object as a line of its file."""
    return in_json(json.dumps(document, ensure_ascii=False, allow_nan=False)) + "\n"


def of_line(text: str) -> Document | None:
    """Return a line's object; None for a line that a killed run left unfinished."""
    try:
        document = parse_json(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


_KIND = FileKind("results sample by sample", ConfigError, 2 * 2**30, "give --overwrite or another --output")
SAMPLE = "sample"
"""The key under which a line names its sample."""


@dataclass
class SampleLines:
    """The lines of one run's results, in the order in which they were written.

    Attributes:
        rows: an object per finished sample, whose id is under `sample`.
    """

    rows: list[dict[str, Any]]
    _lock: Lock | None = field(default=None, repr=False)

    @property
    def done(self) -> set[str]:
        """The samples that have a line."""
        return {row[SAMPLE] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """Add a sample; it is on the disk when this returns where there is a file."""
        if self._lock is not None:
            self._lock.check()
            append(self._lock.path, row)
        self.rows.append(row)

    def of(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the lines of the named samples, in that order; samples without a line are left out."""
        found = {row[SAMPLE]: row for row in self.rows}
        return [found[name] for name in names if name in found]


@contextmanager
def sample_lines(
    path: Path | None, question: Mapping[str, Any], overwrite: bool = False, wait: bool = False
) -> Iterator[SampleLines]:
    """Yield the lines of a file, locked against other writers; without a path they are kept in memory alone.

    Raises ConfigError for a file whose first line is not `question`, unless `overwrite` replaces it; OutputError where
    nothing can be written.
    """
    if path is None:
        yield SampleLines([])
        return
    with Lock(path, wait) as lock, refusals(path):
        rows = [] if overwrite else _finished_rows(path, question)
        write(path, [question, *rows])
        yield SampleLines(rows, lock)


def _finished_rows(path: Path, question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the finished samples of an existing file. Raises ConfigError where its first line is not `question`."""
    if not os.path.lexists(path):
        return []
    first, *rows = read(path, _KIND) or [{}]
    if first != json.loads(json.dumps(question)):
        raise _KIND.refusal(path, "one of another question, or of another run")
    if strange := [row for row in rows if not isinstance(row.get(SAMPLE), str)]:
        raise _KIND.refusal(path, f"a line that is no sample's, {str(strange[0])[:40]}")
    return rows

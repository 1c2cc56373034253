"""Files of one JSON object a line, which grow as results come: a killed run loses no more than its last line.

What a run finds sample by sample, one line of JSON each, so that a killed run goes on with the next sample.

The first line is the question. A line that a killed run left unfinished is passed over where it is the last one.
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
    """The objects of all lines; a last one that a killed process left unfinished is passed over.

    Raises the error of `kind` where the first line, or one that others follow, is no object.
    """
    return parsed(path, kind.read_text(path), kind)


def parsed(path: Path, text: str, kind: FileKind) -> list[Document]:
    """The same of a file's text, for who needs that too. Raises as `read`."""
    found = [of_line(line) for line in text.split("\n") if line.strip()]
    if len(found) > 1 and found[-1] is None:
        found.pop()
    if broken := [place for place, one in enumerate(found, start=1) if one is None]:
        raise kind.refusal(path, f"a line {broken[0]} that is no JSON object")
    return [one for one in found if one is not None]


def write(path: Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """The file with these lines alone, whole or not at all."""
    text = "".join(map(line, documents))
    clear_leftovers(path)
    write_whole(path, lambda stream: stream.write(text.encode()))


def append(path: Path, document: Mapping[str, Any]) -> None:
    """One line more, on the disk when this returns."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(line(document))
        stream.flush()
        os.fsync(stream.fileno())


def line(document: Mapping[str, Any]) -> str:
    """An object as a line of its file."""
    return in_json(json.dumps(document, ensure_ascii=False, allow_nan=False)) + "\n"


def of_line(text: str) -> Document | None:
    """A line's object; None for one that a killed run left unfinished."""
    try:
        document = parse_json(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


_KIND = FileKind("results sample by sample", ConfigError, 2 * 2**30, "give --overwrite or another --output")
SAMPLE = "sample"
"""The key of a line that names its sample."""


@dataclass
class SampleLines:
    """The lines of a question, in the order in which they were found.

    Attributes:
        rows: an object per finished sample, which names it under `sample`.
    """

    rows: list[dict[str, Any]]
    _lock: Lock | None = field(default=None, repr=False)

    @property
    def done(self) -> set[str]:
        """The samples that need not be looked at again."""
        return {row[SAMPLE] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """One more sample, on the disk when this returns where there is a file."""
        if self._lock is not None:
            self._lock.check()
            append(self._lock.path, row)
        self.rows.append(row)

    def of(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The lines of these samples, in this order; those that are not there are left out."""
        found = {row[SAMPLE]: row for row in self.rows}
        return [found[name] for name in names if name in found]


@contextmanager
def sample_lines(
    path: Path | None, question: Mapping[str, Any], overwrite: bool = False, wait: bool = False
) -> Iterator[SampleLines]:
    """The lines of a file, which nobody else writes meanwhile; without a path they are kept in memory alone.

    Raises ConfigError for a file of another question, unless `overwrite` replaces it; OutputError where nothing can be
    written.
    """
    if path is None:
        yield SampleLines([])
        return
    with Lock(path, wait) as lock, refusals(path):
        rows = [] if overwrite else _held(path, question)
        write(path, [question, *rows])
        yield SampleLines(rows, lock)


def _held(path: Path, question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The finished samples of a file that is there. Raises ConfigError where it is of another question."""
    if not os.path.lexists(path):
        return []
    first, *rows = read(path, _KIND) or [{}]
    if first != json.loads(json.dumps(question)):
        raise _KIND.refusal(path, "one of another question, or of another run")
    if strange := [row for row in rows if not isinstance(row.get(SAMPLE), str)]:
        raise _KIND.refusal(path, f"a line that is no sample's, {str(strange[0])[:40]}")
    return rows

"""What a run finds sample by sample, one line of JSON each, so that a killed run goes on with the next sample.

The first line is the question. A line that a killed run left unfinished is passed over where it is the last one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from perturbkv.errors import ConfigError
from perturbkv.reading import FileKind, parse_json
from perturbkv.storage.files import clear_leftovers, write_whole
from perturbkv.storage.lock import Lock
from perturbkv.storage.places import refusals
from perturbkv.visible import in_json

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
    _stream: IO[str] | None = field(default=None, repr=False)
    _lock: Lock | None = field(default=None, repr=False)

    @property
    def done(self) -> set[str]:
        """The samples that need not be looked at again."""
        return {row[SAMPLE] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """One more sample, on the disk when this returns where there is a file."""
        if self._stream is not None and self._lock is not None:
            self._lock.check()
            self._stream.write(_line(row))
            self._stream.flush()
            os.fsync(self._stream.fileno())
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
        clear_leftovers(path)
        text = "".join(map(_line, [dict(question), *rows]))
        write_whole(path, lambda stream: stream.write(text.encode()))
        with path.open("a", encoding="utf-8") as stream:
            yield SampleLines(rows, stream, lock)


def _held(path: Path, question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The finished samples of a file that is there. Raises ConfigError where it is of another question."""
    if not os.path.lexists(path):
        return []
    lines = [_parsed(line) for line in _KIND.read_text(path).split("\n") if line.strip()]
    first, others = (lines[0], lines[1:]) if lines else (None, [])
    if first != json.loads(json.dumps(question)):
        msg = f"{path} is of another question, or of another run; give --overwrite or another --output"
        raise ConfigError(msg)
    whole = others[:-1] if others and others[-1] is None else others
    if strange := [row for row in whole if row is None or not isinstance(row.get(SAMPLE), str)]:
        raise _KIND.refusal(path, f"a line that is no sample's, {str(strange[0])[:40]}")
    return [row for row in whole if row is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        document = parse_json(line)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _line(document: Mapping[str, Any]) -> str:
    return in_json(json.dumps(document, ensure_ascii=False, allow_nan=False)) + "\n"

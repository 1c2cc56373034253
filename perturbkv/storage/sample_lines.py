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
from typing import Any

from perturbkv.errors import ConfigError
from perturbkv.storage import json_lines
from perturbkv.storage.output import Lock
from perturbkv.storage.places import refusals
from perturbkv.user_files import FileKind

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
            json_lines.append(self._lock.path, row)
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
        json_lines.write(path, [question, *rows])
        yield SampleLines(rows, lock)


def _held(path: Path, question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The finished samples of a file that is there. Raises ConfigError where it is of another question."""
    if not os.path.lexists(path):
        return []
    first, *rows = json_lines.read(path, _KIND) or [{}]
    if first != json.loads(json.dumps(question)):
        raise _KIND.refusal(path, "one of another question, or of another run")
    if strange := [row for row in rows if not isinstance(row.get(SAMPLE), str)]:
        raise _KIND.refusal(path, f"a line that is no sample's, {str(strange[0])[:40]}")
    return rows

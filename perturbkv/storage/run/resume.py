"""A finished trace that a run goes on with: its samples one at a time, as they were before they were joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError, TraceUnavailableError
from perturbkv.schema import ANSWER_TEXT, KEPT, TEXT, VARIABLES
from perturbkv.storage.run.merge import Shapes, code_bytes
from perturbkv.storage.run.shards import check_extends, differing_fields
from perturbkv.storage.trace.trace_file import describe_whole, opened, read_run, sample_of


class ExistingTrace:
    """What a trace file holds, its numbers unread.

    Args:
        path: the file. Raises TraceError where it is not a whole trace.
    """

    def __init__(self, path: Path) -> None:
        held = describe_whole(path)
        self.sample_ids, self.failures, self.labels = held.sample_ids, held.failures, tuple(held.run.labels())
        self.with_text, self.with_kept = frozenset(held.with_text), frozenset(held.with_kept)
        self.with_answers, self.answered = frozenset(held.with_answers), "generated" in held.variables
        self._path, self._stamp = path, path.stat().st_mtime_ns
        self._places = {name: place for place, name in enumerate(held.sample_ids) if name not in held.failures}

    def part(self, sample_id: str) -> ExistingSample | None:
        """The sample; None where it failed or is not there."""
        place = self._places.get(sample_id)
        return None if place is None else ExistingSample(self._path, self._stamp, place, self.labels)


def existing_trace(path: Path, run: RunConfig, overwrite: bool = False) -> ExistingTrace | None:
    """The trace at `path` that `run` goes on with; None where there is none, or with `overwrite` one of another run.

    Raises TraceError for a trace of another run where `overwrite` is False.
    """
    if not path.exists() or (overwrite and not _goes_on(path, run)):
        return None
    check_extends(run, read_run(path), path)
    return ExistingTrace(path)


def _goes_on(path: Path, run: RunConfig) -> bool:
    """Whether the file that is there is a whole trace of this run or of a part of it."""
    try:
        return not differing_fields(run, describe_whole(path).run)
    except TraceUnavailableError:
        raise
    except TraceError:
        return False


@dataclass(frozen=True)
class ExistingSample:
    """A complete sample of a trace file, at `place` along its `sample` axis; a part of the sample to be."""

    path: Path
    stamp: int
    place: int
    labels: tuple[str, ...]

    def arrays(self, names: Iterable[str] = tuple(VARIABLES)) -> dict[str, NDArray[Any]]:
        """Those of the named variables that it holds, as in a `SampleTrace`; one sample's bytes alone are read."""
        with opened(self.path, self.stamp) as file:
            return sample_of(file, names, self.place)

    def shapes(self) -> Shapes:
        """Variable name -> shape, that of kept_code without what is no head's."""
        with opened(self.path, self.stamp) as file:
            own = (*TEXT, *ANSWER_TEXT, *KEPT)
            shapes = {name: file.shape(name)[1:] for name in VARIABLES if name in file and name not in own}
            parts = sample_of(file, (*TEXT, *ANSWER_TEXT, *KEPT[:2]), self.place)
            found = {**shapes, **{name: array.shape for name, array in parts.items()}}
            return found | ({KEPT[2]: (code_bytes(parts),)} if KEPT[2] in file else {})

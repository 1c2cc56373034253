"""The writer of a run's trace: it collects samples, resumes and extends older runs, and writes the trace file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError, TraceUnavailableError
from perturbkv.schema import KEPT, TEXTS, VARIABLES
from perturbkv.storage.atomic_files import atomic_path, clear_leftovers
from perturbkv.storage.run.journal import Entry, Journal, journal_path
from perturbkv.storage.run.sample_parts import (
    FULL_RUN,
    Shapes,
    check_same_run,
    code_bytes,
    disjoint_parts,
    join_parts,
    merged_shapes,
    single_complete_part,
)
from perturbkv.storage.run.shards import check_extends, differing_fields
from perturbkv.storage.trace.texts import Texts, with_text, without_kept
from perturbkv.storage.trace.trace_file import describe_whole, open_trace, read_run, read_sample
from perturbkv.storage.trace.trace_writing import write_trace
from perturbkv.trace import FailedSample, SampleTrace


class ExistingTrace:
    """The contents of a trace file, without its numbers.

    Args:
        path: the file.

    Attributes:
        sample_ids: all samples, in the order of the file.
        failures: id of each failed sample -> reason.
        labels: labels of the configurations.

    Raises TraceError where it is not a whole trace.
    """

    def __init__(self, path: Path) -> None:
        stored = describe_whole(path)
        self.sample_ids: tuple[str, ...] = stored.sample_ids
        self.failures: dict[str, str] = stored.failures
        self.labels: tuple[str, ...] = tuple(stored.run.labels())
        self._path, self._stamp = path, path.stat().st_mtime_ns
        self._indices = {name: index for index, name in enumerate(stored.sample_ids) if name not in stored.failures}

    def part(self, sample_id: str) -> ExistingSample | None:
        """Return a complete sample of the trace; None for a failed or absent sample."""
        index = self._indices.get(sample_id)
        return None if index is None else ExistingSample(self._path, self._stamp, index, self.labels)


def existing_trace(path: Path, run: RunConfig, overwrite: bool = False) -> ExistingTrace | None:
    """Return the existing trace at `path` that `run` resumes or extends.

    None where there is no file, or, with `overwrite`, one of another run. Raises TraceError for a trace of another run
    where `overwrite` is False.
    """
    if not path.exists() or (overwrite and not _is_extendable(path, run)):
        return None
    check_extends(run, read_run(path), path)
    return ExistingTrace(path)


def _is_extendable(path: Path, run: RunConfig) -> bool:
    """Return whether the existing file is a complete trace of this run or of a part of it.

    Raises TraceUnavailableError where it cannot be opened now, as it need not be damaged.
    """
    try:
        return not differing_fields(run, describe_whole(path).run)
    except TraceUnavailableError:
        raise
    except TraceError:
        return False


@dataclass(frozen=True)
class ExistingSample:
    """A complete sample of a trace file, at `index` of its `sample` axis, as a part of a new sample."""

    path: Path
    stamp: int
    index: int
    labels: tuple[str, ...]

    def arrays(self, names: Iterable[str] = tuple(VARIABLES)) -> dict[str, NDArray[Any]]:
        """Return name -> array of the named variables in the file, without reading other samples."""
        with open_trace(self.path, self.stamp) as file:
            return read_sample(file, names, self.index)

    def shapes(self) -> Shapes:
        """Return variable name -> shape, with unused bytes of kept_code not counted."""
        with open_trace(self.path, self.stamp) as file:
            varying = (*TEXTS, *KEPT)
            shapes = {name: file.shape(name)[1:] for name in VARIABLES if name in file and name not in varying}
            arrays = read_sample(file, (*TEXTS, "kept_offset", "kept_length"), self.index)
            shapes |= {name: array.shape for name, array in arrays.items()}
            return shapes | ({"kept_code": (code_bytes(arrays),)} if "kept_code" in file else {})


_log = logging.getLogger(__name__)


class TraceWriter:
    """The writer of a run's trace file.

    Samples go to a journal beside the file as they come; `finish` assembles the file under another name and renames it.
    A killed process loses at most the sample in flight, and never an existing file.

    Args:
        path: the trace file.
        run: its configuration. A finished trace or journal of the same run is resumed; one of the same run with fewer
            samples or configurations is extended.
        sample_ids: every sample of the run, in the order of the file.
        attrs: provenance, stored as root attributes.
        overwrite: replace a trace or journal of another run. A file of another run, or one that is no whole trace,
            stays until this run's is whole and replaces it; a journal of another run is removed at once. A run that
            was killed in between is resumed only with `overwrite`: without it the other run's file is refused.
        texts: texts of prompts and answers, which the samples that are appended get.
        kept: whether these samples keep the positions of kept entries.
        shards: journals of shards of this run, whose samples are included; `finish` removes them.

    Raises TraceError where a file or journal of another run exists and `overwrite` is False.
    """

    def __init__(
        self,
        path: Path,
        run: RunConfig,
        sample_ids: Sequence[str],
        attrs: Mapping[str, str],
        overwrite: bool = False,
        texts: Texts | None = None,
        shards: Sequence[Journal] = (),
        kept: bool = True,
    ) -> None:
        self.path = path
        self.run = run
        self.attrs: dict[str, str] = dict(attrs)
        self.texts: Texts = texts or {}
        self.kept = kept
        self.sample_ids: tuple[str, ...] = tuple(sample_ids)
        self._check_ids()
        self._configs = dict(zip(run.labels(), run.configs, strict=True))
        self._journal, self._shards = Journal(journal_path(path)), tuple(shards)
        self._journal.check_ownership()
        if overwrite and ((old_run := self._journal.run()) is None or differing_fields(run, old_run)):
            self._journal.discard()
        clear_leftovers(path)
        self._old = existing_trace(path, run, overwrite)
        self._entries = self._journal_entries()
        self._begun = False
        self._failed_now: set[str] = set()  # ids of the samples that failed in this run, not in an older one
        self._lacking = self._find_missing()

    def missing(self) -> dict[str, tuple[EvictionConfig, ...]]:
        """Return sample id -> configurations to be measured, in the run's order; complete samples are absent.

        A sample that failed in an older run is measured again, one that failed in this one is not.
        """
        left = self._lacking.keys() - self._failed_now
        return {name: self._lacking[name] for name in self.sample_ids if name in left}

    def done(self) -> set[str]:
        """Return the ids of the samples that need no measurement: complete, or failed in this run."""
        return set(self.sample_ids) - self.missing().keys()

    def append(self, sample: SampleTrace | FailedSample, configs: Sequence[EvictionConfig] | None = None) -> None:
        """Store a sample in the journal, measured for `configs` in this order, by default all of the run's.

        Raises TraceError for a sample or configurations that are not of this run, for configurations that are already
        stored or whose number is not the sample's, and where the sample's full-cache run is not the one measured
        before. A complete sample replaces its parts.
        """
        if sample.sample_id not in self._entries:
            raise TraceError(f"expected a sample of this run, got '{sample.sample_id}'")
        labels = self._known_labels(self.run.configs if configs is None else configs)
        if self._begun and not self._journal.exists_on_disk():
            self._forget_vanished()
        if isinstance(sample, SampleTrace):
            self._check_part(sample, labels)
        if not self._begun:
            self._journal.begin(self.run)
            self._begun = True
        stored = with_text(sample if self.kept else without_kept(sample), self.texts)
        entry = self._journal.append(stored, labels)
        self._entries[sample.sample_id].append(entry)
        if isinstance(sample, FailedSample):
            self._failed_now.add(sample.sample_id)
        else:
            self._failed_now.discard(sample.sample_id)
        if lacking := self._missing_configs(sample.sample_id):
            self._lacking[sample.sample_id] = lacking
        else:
            self._lacking.pop(sample.sample_id, None)

    def abandon(self) -> None:
        """Give up the run, and remove its journal if it holds no sample."""
        self._journal.discard_empty()

    def failures(self) -> dict[str, str]:
        """Return sample id -> reason of the last failure, for samples that lack a configuration."""
        reasons = {name: self._failure_reason(name) for name in self._lacking}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def unmeasured(self) -> list[str]:
        """Return the ids of the samples that lack a configuration without having failed."""
        return [name for name in self._lacking if self._failure_reason(name) is None]

    def finish(self) -> Path:
        """Write the trace from journal and older file, and remove the journal. Raises TraceError for missing samples.

        A file that holds everything is left as it is, its configurations in the order in which it has them.
        """
        if missing := self.unmeasured():
            raise TraceError(
                f"expected every sample to be measured, {len(missing)} are not, such as '{missing[0]}'; "
                "run the same command again to measure what is missing"
            )
        if not self._is_finished():
            with atomic_path(self.path, folders=False) as temporary:
                write_trace(temporary, self.run, self.sample_ids, self.attrs, self._shapes, self._sample)
        for journal in (self._journal, *self._shards):
            journal.discard()
        return self.path

    def _check_ids(self) -> None:
        """Raise TraceError for an empty list of samples, and for a duplicate sample id."""
        if not self.sample_ids:
            raise TraceError("expected at least one sample in a run, got none")
        if len(set(self.sample_ids)) < len(self.sample_ids):
            raise TraceError("expected every sample id once, got one of them twice")

    def _known_labels(self, configs: Iterable[EvictionConfig]) -> list[str]:
        """Return the labels of configurations. Raises TraceError for a duplicate or one foreign to this run."""
        labels = [config.label() for config in configs]
        invalid = [label for label in labels if label not in self._configs or labels.count(label) > 1]
        if invalid:
            raise TraceError(f"expected configurations of this run, each once, got '{invalid[0]}'")
        return labels

    def _forget_vanished(self) -> None:
        """Forget the entries of a journal removed during the run, so that their samples are missing again."""
        self._begun, before = False, sum(map(len, self._entries.values()))
        self._entries = {
            name: [entry for entry in entries if entry.path.exists()] for name, entries in self._entries.items()
        }
        vanished = before - sum(map(len, self._entries.values()))
        self._lacking = self._find_missing()
        _log.info(
            "%s vanished, and %d samples in it; the same command measures them again", self._journal.folder, vanished
        )

    def _check_part(self, sample: SampleTrace, labels: Sequence[str]) -> None:
        """Raise TraceError for a part that cannot be joined with the stored parts."""
        length = sample.sizes()["config"]
        if length != len(labels):
            raise TraceError(f"expected {len(labels)} configurations in sample '{sample.sample_id}', got {length}")
        if len(labels) == len(self._configs):
            return
        parts = self._parts(sample.sample_id)
        stored = [label for part in parts for label in part.labels if label in labels]
        if stored:
            raise TraceError(
                f"expected what is missing of sample '{sample.sample_id}', got '{stored[0]}', which is there"
            )
        check_same_run(sample.sample_id, [*(part.arrays(FULL_RUN) for part in parts), sample.arrays])

    def _journal_entries(self) -> dict[str, list[Entry]]:
        """Return sample id -> its entries in the journals of this run, older parts first."""
        if self._journal.run() is None:
            self._journal.discard()
        entries: dict[str, list[Entry]] = {name: [] for name in self.sample_ids}
        shards = (entry for shard in self._shards for entry in self._run_entries(shard) if self._is_new(entry))
        for entry in (*self._run_entries(self._journal), *shards):
            entries[entry.sample_id].append(entry)
        return entries

    def _run_entries(self, journal: Journal) -> list[Entry]:
        """Return the entries of a journal of this run. Raises TraceError for a journal of another run."""
        run = journal.run()
        if run is None:
            return []
        check_extends(self.run, run, journal.folder)
        ids, labels = set(self.sample_ids), self._configs.keys()
        return [entry for entry in journal.entries() if entry.sample_id in ids and labels >= set(entry.labels)]

    def _is_new(self, entry: Entry) -> bool:
        """Return whether a shard's entry is not in the file yet, as it is after a killed merge."""
        if self._old is None:
            return True
        part = self._old.part(entry.sample_id)
        if entry.reason is not None:
            return part is None and self._old.failures.get(entry.sample_id) != entry.reason
        return part is None or not set(entry.labels) <= set(part.labels)

    def _parts(self, name: str) -> list[ExistingSample | Entry]:
        """Return the stored parts of a sample, older parts first, with no configuration twice."""
        old = self._old.part(name) if self._old else None
        entries = [entry for entry in self._entries[name] if entry.reason is None]
        return disjoint_parts([*([old] if old else []), *entries])

    def _find_missing(self) -> dict[str, tuple[EvictionConfig, ...]]:
        """Return sample id -> configurations that it lacks, for all incomplete samples."""
        return {name: configs for name in self.sample_ids if (configs := self._missing_configs(name))}

    def _missing_configs(self, name: str) -> tuple[EvictionConfig, ...]:
        """Return the configurations that a sample lacks, in the run's order."""
        stored = {label for part in self._parts(name) for label in part.labels}
        return tuple(config for label, config in self._configs.items() if label not in stored)

    def _failure_reason(self, name: str) -> str | None:
        """Return the reason of a sample's last failure; None if it did not fail."""
        if self._old and not self._entries[name]:
            return self._old.failures.get(name)
        reasons = [entry.reason for entry in self._entries[name] if entry.reason is not None]
        return reasons[-1] if reasons else None

    def _is_finished(self) -> bool:
        """Return whether the file holds all samples and configurations, and the journal nothing newer."""
        old = self._old
        if old is None or old.sample_ids != self.sample_ids or set(old.labels) != set(self._configs):
            return False
        return not any(self._entries[name] and self._parts(name) != [old.part(name)] for name in self.sample_ids)

    def _shapes(self, name: str) -> Shapes | None:
        """Return variable name -> shape of a sample in the finished file; None for a failed sample."""
        if name in self._lacking:
            return None
        return merged_shapes([part.shapes() for part in self._parts(name)])

    def _sample(self, name: str) -> SampleTrace | FailedSample:
        """Return a sample for the finished file, joined from its stored parts."""
        if name in self._lacking:
            return FailedSample(name, str(self._failure_reason(name)))
        parts = [(SampleTrace(name, part.arrays()), part.labels) for part in self._parts(name)]
        return single_complete_part(parts, list(self._configs)) or join_parts(parts, list(self._configs))

"""Collecting a run's samples, resuming and extending it, and leaving its trace file behind."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perturbkv.config import RunConfig
from perturbkv.errors import TraceError
from perturbkv.journal import Journal, journal_path
from perturbkv.journal import replace as replace_file
from perturbkv.store import check_whole, read_run, read_trace, write_trace
from perturbkv.trace import FailedSample, SampleTrace, Trace


class TraceWriter:
    """Collects the samples of one run and writes their trace file.

    Samples go to a journal beside the file as they come; `finish` assembles the file under another name and renames
    it. A killed process so loses at most the sample in flight, and never a file that was there.

    Args:
        path: the trace file to be.
        run: its configuration. A finished trace or journal of the same run is gone on with; of the same run with
            fewer samples, extended.
        sample_ids: every sample of the run, in the order of the file.
        attrs: provenance, stored as root attributes.
        overwrite: replace a trace or journal of another run.

    Raises TraceError where a file or journal of another run is there and `overwrite` is False.
    """

    def __init__(
        self,
        path: Path,
        run: RunConfig,
        sample_ids: Sequence[str],
        attrs: Mapping[str, str],
        overwrite: bool = False,
    ) -> None:
        self.path, self.run, self.attrs = path, run, dict(attrs)
        self.sample_ids = tuple(sample_ids)
        self._check_ids()
        self._journal = Journal(journal_path(path))
        if overwrite:
            self._drop_other_runs()
        self._old = self._finished_trace()
        self._check_journal()
        self._failed: set[str] = set()

    def done(self) -> set[str]:
        """Samples that need not be measured: complete in the file or in the journal."""
        kept = self._old_complete() | {name for name in self._journal.sample_ids() if self._complete(name)}
        return (kept | self._failed) & set(self.sample_ids)

    def append(self, sample: SampleTrace | FailedSample) -> None:
        """Keep one finished sample in the journal. Raises TraceError for a sample that is not of this run."""
        if sample.sample_id not in self.sample_ids:
            msg = f"expected a sample of this run, got '{sample.sample_id}'"
            raise TraceError(msg)
        if self._journal.run() is None:
            self._journal.begin(self.run)
        self._journal.append(sample)
        if isinstance(sample, FailedSample):
            self._failed.add(sample.sample_id)

    def finish(self) -> Path:
        """Write the file from journal and older file, then remove the journal. Raises TraceError for missing ones."""
        if self._is_finished():
            return self.path
        sources = {name: self._source(name) for name in self.sample_ids}
        missing = [name for name, source in sources.items() if source is None]
        if missing:
            msg = f"expected every sample to be measured, {len(missing)} are not, such as '{missing[0]}'"
            raise TraceError(msg)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
        try:
            self._assemble(temporary)
            replace_file(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self._journal.discard()
        return self.path

    def _check_ids(self) -> None:
        if not self.sample_ids:
            msg = "expected at least one sample in a run, got none"
            raise TraceError(msg)
        if len(set(self.sample_ids)) < len(self.sample_ids):
            msg = "expected every sample id once, got one of them twice"
            raise TraceError(msg)

    def _drop_other_runs(self) -> None:
        if self._journal.folder.exists() and not self._extends(self._journal.run()):
            self._journal.discard()
        if self.path.exists():
            try:
                same = self._extends(read_run(self.path))
                check_whole(self.path)
            except TraceError:
                same = False
            if not same:
                self.path.unlink()

    def _finished_trace(self) -> Trace | None:
        """The trace that is there; None where there is none."""
        if not self.path.exists():
            return None
        run = read_run(self.path)
        if not self._extends(run):
            raise self._other_run(run, self.path)
        check_whole(self.path)
        return read_trace(self.path)

    def _check_journal(self) -> None:
        for leftover in self.path.parent.glob(f"{self.path.name}.tmp-*"):
            leftover.unlink()
        run = self._journal.run()
        if run is None:
            self._journal.discard()
        elif not self._extends(run):
            raise self._other_run(run, self._journal.folder)
        else:
            self._journal.begin(self.run)

    def _extends(self, run: RunConfig | None) -> bool:
        """Whether this run is `run`, or `run` with more samples."""
        return (
            run is not None and run.samples <= self.run.samples and replace(run, samples=self.run.samples) == self.run
        )

    def _other_run(self, run: RunConfig, where: Path) -> TraceError:
        fields = ", ".join(self.run.differences(run))
        return TraceError(
            f"expected a trace of this run at {where}, got one that differs in {fields}; "
            "use another --output, or --overwrite to replace it"
        )

    def _old_complete(self) -> set[str]:
        if self._old is None:
            return set()
        return set(self._old.sample_ids) - set(self._old.failures)

    def _complete(self, name: str) -> bool:
        return isinstance(self._journal.read(name), SampleTrace)

    def _is_finished(self) -> bool:
        return self._old is not None and self._old.sample_ids == self.sample_ids and not self._journal.sample_ids()

    def _source(self, name: str) -> str | None:
        if self._journal.read(name) is not None:
            return "journal"
        if self._old is not None and name in self._old.sample_ids:
            return "file"
        return None

    def _sample(self, name: str) -> SampleTrace | FailedSample:
        sample = self._journal.read(name)
        if sample is None and self._old is not None:
            return self._old.sample(name)
        if sample is None:
            msg = f"the journal of {self.path} lost the sample '{name}' while it was read"
            raise TraceError(msg)
        return sample

    def _assemble(self, temporary: Path) -> None:
        write_trace(temporary, self.run, self.sample_ids, self.attrs, self._sample)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())

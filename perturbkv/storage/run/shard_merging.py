"""Shards of a run: writing one, and merging all into the run's trace, one sample in memory at a time."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig, Shard
from perturbkv.errors import LockedOutputError, MissingShardError, TraceError
from perturbkv.storage.output import Lock, check_free
from perturbkv.storage.run.journal import Journal, journal_path
from perturbkv.storage.run.shards import (
    ShardJournal,
    ShardRecord,
    check_consistent,
    check_extends,
    differing_fields,
    find_shards,
    format_shards,
    merge_provenance,
    remove_stale_files,
)
from perturbkv.storage.run.writer import TraceWriter, existing_trace
from perturbkv.storage.trace.texts import Texts
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import FailedSample, SampleTrace, Trace

_log = logging.getLogger(__name__)


def merge(path: str | Path, *, overwrite: bool = False, wait: bool = False) -> Trace:
    """Merge the shards of a run, measured by `measure(..., shard="3/16")`, into the trace at `path`.

    A trace without shards is complete, and is read as it is. After a kill the same call resumes.

    Args:
        path: the trace, as it was given to the shards.
        overwrite: replace a trace of another run at `path`.
        wait: where another process writes the trace or one of its shards, wait until it is done.

    Raises TraceError where a shard is missing, naming it, or where there is nothing to
    read; OutputError for shards of different runs, and where another process is writing.
    """
    merge_shards(Path(path), overwrite=overwrite, wait=wait)
    return read_trace(path)


def merge_shards(path: Path, *, overwrite: bool = False, wait: bool = False) -> int:
    """Merge the shards beside the trace `path`, as `merge`; return the number of shards, 0 for a complete trace."""
    if not (shards := find_shards(path)):
        with suppress(LockedOutputError):
            check_free(path)  # removes the file of a merge that was killed at its very end
        remove_stale_files(path)
        describe(path)  # raises where there is no whole trace
        return 0
    _check_shards_free(shards, wait)
    if records := _read_records(path, shards):
        _check_all_finished(path, records[0], overwrite)  # before locking the trace, which others may need
    with Lock(path, wait):
        shards = find_shards(path)  # anew, as another merge may have removed them
        _check_shards_free(shards, wait)
        if records := _read_records(path, shards):
            _check_all_finished(path, records[0], overwrite)
            _create_writer(path, records, [shard.journal for shard in shards], overwrite).finish()
        for shard in shards:
            shard.journal.discard()
        remove_stale_files(path)
    return len(shards)


def measured_shards(path: Path, record: ShardRecord, overwrite: bool = False) -> list[Shard]:
    """Return the finished shards of a run: marked as done, already in the trace, or without samples.

    `record` is the record of any shard of the run.
    """
    count = record.shard.count
    marked = {
        journal.shard.number for journal in find_shards(path) if journal.shard.count == count and journal.is_done()
    }
    old = existing_trace(path, record.run, overwrite)
    whole = set(old.sample_ids) if old and set(old.labels) >= set(record.run.labels()) else set()

    def is_measured(shard: Shard) -> bool:
        samples, configs = record.share(shard)
        return shard.number in marked or whole >= set(samples if configs else ())

    return [shard for shard in record.shards() if is_measured(shard)]


def resumable_shards(path: Path, run: RunConfig, overwrite: bool, wait: bool) -> list[ShardJournal]:
    """Return the shards that an unsharded run resumes, after checking that no living process writes them.

    With `overwrite` those of another run are removed. Raises LockedOutputError, or waits, where a living process
    writes one.
    """
    shards = find_shards(path)
    _check_shards_free(shards, wait)
    for shard in shards:
        shard.journal.check_ownership()
        shard_run = shard.journal.run()
        if shard_run is None:
            _log.info("%s does not say of which run it is; its samples are measured again", shard.journal.folder)
        if shard_run is None or (overwrite and differing_fields(run, shard_run)):
            shard.journal.discard()
    remove_stale_files(path)
    return [shard for shard in shards if shard.journal.folder.exists()]


def joint_provenance(attrs: Mapping[str, str], shards: Sequence[ShardJournal]) -> dict[str, str]:
    """Return the provenance of this process (`attrs`) joined with that of the resumed shards."""
    return merge_provenance([*(record.attrs for shard in shards if (record := shard.record())), attrs])


def _check_shards_free(shards: Sequence[ShardJournal], wait: bool) -> None:
    """Raise LockedOutputError while a living process writes a shard; with `wait`, wait until none does.

    A shard that is done is waited for in any case, as its process ends in a moment.
    """
    for shard in shards:
        check_free(shard.path, wait or shard.is_done())


def _read_records(path: Path, shards: Sequence[ShardJournal]) -> list[ShardRecord]:
    """Return the records of all shards; empty if only the leftovers of a killed merge exist.

    Raises OutputError as `check_consistent`, TraceError where no shard names its run.
    """
    records = [record for shard in shards if (record := shard.record())]
    if records:
        check_consistent(path, records)
    elif not path.exists() or any(shard.journal.sample_ids() for shard in shards):
        raise TraceError(
            f"expected shards of a run beside {path}, got {shards[0].journal.folder}, which does not say of which; "
            "run the command that measures it again"
        )
    return records


def _check_all_finished(path: Path, record: ShardRecord, overwrite: bool) -> None:
    """Raise MissingShardError for a run with unmeasured shards."""
    finished = set(measured_shards(path, record, overwrite))
    if lacking := [shard for shard in record.shards() if shard not in finished]:
        raise MissingShardError(_missing_message(path, record, lacking))


def _missing_message(path: Path, record: ShardRecord, lacking: Sequence[Shard]) -> str:
    """Return the error message on missing shards."""
    count = record.shard.count
    return (
        f"expected all {count:,} shards of {path}, got {count - len(lacking):,}: {format_shards(lacking)} "
        f"{'is' if len(lacking) == 1 else 'are'} missing; the same command with --shard {lacking[0]} "
        f"(shard='{lacking[0]}') measures that"
    )


def _create_writer(
    path: Path, records: Sequence[ShardRecord], journals: Sequence[Journal], overwrite: bool
) -> TraceWriter:
    """Return the writer of the merged trace. Raises TraceError for a shard marked as done that is incomplete."""
    first, attrs = records[0], merge_provenance([record.attrs for record in records])
    writer = TraceWriter(path, first.run, first.sample_ids, attrs, overwrite, shards=journals)
    if unmeasured := set(writer.unmeasured()):
        missing = {name: set(configs) for name, configs in writer.missing().items() if name in unmeasured}
        shares = {shard: first.share(shard) for shard in first.shards()}
        lacking = [
            shard
            for shard, (samples, configs) in shares.items()
            if any(missing.get(name, set()) & set(configs) for name in samples)
        ]
        raise MissingShardError(_missing_message(path, first, lacking))
    return writer


_MOST_CHECKED = 8
"""Number of other shards that a new shard is compared with."""


class ShardWriter:
    """The writer of one shard, which collects its samples in a journal, as `TraceWriter` does for a whole run.

    Args:
        trace: the trace file of the run; samples that it, or the journal of a run without shards, has are not missing.
        record: the shard's description of the run.
        texts: texts of prompts and answers, stored with the samples.
        kept: whether samples are stored with kept positions.
        overwrite: replace shards of other runs now, and a trace of another run when all shards are merged.

    Raises TraceError and OutputError where those of another run exist and `overwrite` is False.
    """

    def __init__(
        self, trace: Path, record: ShardRecord, texts: Texts, kept: bool = True, overwrite: bool = False
    ) -> None:
        self.shard: ShardJournal = ShardJournal(trace, record.shard)
        self._record = record
        _check_other_shards(trace, record, overwrite)
        existing = _existing_labels(trace, record.run, overwrite)
        self._writer = TraceWriter(self.shard.path, record.run, record.sample_ids, {}, overwrite, texts, kept=kept)
        self._missing = _missing_share(record, self._writer.missing(), existing)
        self._begin()

    def missing(self) -> dict[str, tuple[EvictionConfig, ...]]:
        """Return sample id -> configurations that the shard still has to measure; complete samples are absent."""
        return dict(self._missing)

    def done(self) -> set[str]:
        """Return the ids of the shard's samples that need no further measurement."""
        samples, _ = self._record.share(self._record.shard)
        return set(samples) - self._missing.keys()

    def append(self, sample: SampleTrace | FailedSample, configs: Sequence[EvictionConfig]) -> None:
        """Store a sample that was measured for `configs`. Raises TraceError as `TraceWriter.append`."""
        self._writer.append(sample, configs)
        self._missing.pop(sample.sample_id, None)

    def abandon(self) -> None:
        """Give up the run, and remove its journal if it holds no sample."""
        self.shard.journal.discard_empty()

    def finish(self) -> Path:
        """Mark the shard as done, and return the path of its journal.

        Raises TraceError for missing samples, and where the journal was removed meanwhile.
        """
        folder = self.shard.journal.folder
        was_removed = self.shard.record() is None  # a sample that came later made the folder anew, without the record
        if was_removed or self._missing:
            got = "a folder that was removed meanwhile" if was_removed else f"all but {len(self._missing)}"
            raise TraceError(
                f"expected every sample of shard {self._record.shard} in {folder}, got {got}; run the same command "
                "again to measure what is missing"
            )
        self.shard.finish()
        return folder

    def failures(self) -> dict[str, str]:
        """Return sample id -> reason of failure, for the failed samples of the shard."""
        return self._writer.failures()

    def _begin(self) -> None:
        """Write the shard's record, unless the shard is complete, as a merge may then be reading it."""
        before = self.shard.record()
        if self.shard.is_done() and not self._missing and before and before.is_equivalent(self._record):
            return
        self.shard.begin(self._record)


def _missing_share(
    record: ShardRecord, missing: dict[str, tuple[EvictionConfig, ...]], existing: dict[str, set[str]]
) -> dict[str, tuple[EvictionConfig, ...]]:
    """Return sample id -> configurations of the record's shard that are in `missing` but not in `existing`."""
    samples, configs = record.share(record.shard)
    share = {
        name: tuple(
            config for config in missing.get(name, ()) if config in configs and config.label() not in existing[name]
        )
        for name in samples
    }
    return {name: lacking for name, lacking in share.items() if lacking}


def _existing_labels(trace: Path, run: RunConfig, overwrite: bool) -> dict[str, set[str]]:
    """Return sample id -> configuration labels in the existing trace or in the journal of an unsharded run."""
    labels: dict[str, set[str]] = defaultdict(set)
    if old := existing_trace(trace, run, overwrite):
        labels.update({name: set(old.labels) for name in old.sample_ids if name not in old.failures})
    journal = Journal(journal_path(trace))
    journal.check_ownership()
    journal_run = journal.run()
    if journal_run is not None and not (overwrite and differing_fields(run, journal_run)):
        check_extends(run, journal_run, journal.folder)
        for entry in journal.entries():
            labels[entry.sample_id].update(entry.labels)
    return labels


def _check_other_shards(trace: Path, record: ShardRecord, overwrite: bool) -> None:
    """Raise OutputError if shards of another run, or of a different division of this run, exist.

    With `overwrite` those of another run are removed, except those that a living process writes. Without it only the
    first few are checked; all are compared when they are merged.
    """
    shards = find_shards(trace)
    for shard in shards if overwrite else shards[:_MOST_CHECKED]:
        other = shard.record()
        if other and overwrite and differing_fields(record.run, other.run):
            _remove_shard(shard, other)
        elif other:
            check_consistent(trace, [record, other])


def _remove_shard(shard: ShardJournal, expected: ShardRecord) -> None:
    """Remove a shard, unless a living process writes it or its record differs from `expected`."""
    with suppress(LockedOutputError), Lock(shard.path):
        if shard.record() == expected:  # it was not begun anew meanwhile
            shard.journal.discard()

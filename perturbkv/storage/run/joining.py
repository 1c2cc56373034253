"""Shards of a run: measuring one, and merging all into the run's trace, one sample in memory at a time."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig, Shard
from perturbkv.errors import HeldError, MissingShardError, TraceError
from perturbkv.schema import TEXT
from perturbkv.storage.output import Lock, drop_dead, wait_until_free
from perturbkv.storage.run.journal import Journal, journal_path
from perturbkv.storage.run.shards import (
    ShardJournal,
    ShardRecord,
    beside,
    check_consistent,
    check_extends,
    clear_killed,
    differing_fields,
    merge_provenance,
    named,
)
from perturbkv.storage.run.writer import TraceWriter, existing_trace
from perturbkv.storage.trace.texts import Texts, with_text
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import FailedSample, SampleTrace, Trace

_log = logging.getLogger(__name__)


def merge(path: str | Path, *, overwrite: bool = False, wait: bool = False) -> Trace:
    """Merge the shards of a run, which `measure(..., shard="3/16")` wrote, into the trace at `path`.

    A trace without shards is complete, and is read as it is. After a kill the same call resumes.

    Args:
        path: the trace, as it was given to the shards.
        overwrite: replace a trace of another run at `path`.
        wait: where another process writes the trace or one of its shards, wait until it is done.

    Raises TraceError where a shard is missing, naming it and the command that measures it, or where there is nothing to
    read; OutputError for shards of different runs, and where another process is writing.
    """
    join(Path(path), overwrite=overwrite, wait=wait)
    return read_trace(Path(path))


def join(path: Path, *, overwrite: bool = False, wait: bool = False, texts: Texts | None = None) -> int:
    """Merge the shards beside `path`, as `merge` does; return how many they were.

    `texts` are the texts that the trace is to have; None: those of the shards, either all or none of which have text.
    """
    if not (found := beside(path)):
        drop_dead(path)  # of a merge that was killed at its very end
        clear_killed(path)
        describe(path)
        return 0
    _wait_for(found, wait)
    if records := _records(path, found):
        _check_all_finished(path, records[0], overwrite)  # before locking the trace, which others may need
    with Lock(path, wait) as lock:
        found = beside(path)
        _wait_for(found, wait)
        if records := _records(path, found):
            _check_all_finished(path, records[0], overwrite)
            wanted = _texts(path, records, overwrite) if texts is None else texts
            writer = _writer(path, records, [one.journal for one in found], wanted, overwrite)
            lock.check()
            writer.finish()
        for one in found:
            one.journal.discard()
        clear_killed(path)
    return len(found)


def done(path: Path, record: ShardRecord, overwrite: bool = False) -> list[Shard]:
    """Return the shards of a run that are measured: marked as done, already in the trace, or without any samples."""
    said = {one.shard.number for one in beside(path) if one.shard.count == record.shard.count and one.is_done()}
    old = existing_trace(path, record.run, overwrite)
    whole = set(old.sample_ids) if old and set(old.labels) >= set(record.run.labels()) else set()

    def measured(shard: Shard) -> bool:
        samples, configs = record.share(shard)
        return shard.number in said or whole >= set(samples if configs else ())

    return [shard for shard in record.shards() if measured(shard)]


def taken_over(path: Path, run: RunConfig, overwrite: bool, wait: bool) -> list[ShardJournal]:
    """Return the shards that a run without shards resumes, none of them being written by a living process.

    With `overwrite` those of another run are removed. Raises HeldError, or waits, where a living process writes one.
    """
    found = beside(path)
    _wait_for(found, wait)
    for one in found:
        one.journal.check_ownership()
        held = one.journal.run()
        if held is None:
            _log.info("%s does not say of which run it is; its samples are measured again", one.journal.folder)
        if held is None or (overwrite and differing_fields(run, held)):
            one.journal.discard()
    clear_killed(path)
    return [one for one in found if one.journal.folder.exists()]


def together(attrs: Mapping[str, str], shards: Sequence[ShardJournal]) -> dict[str, str]:
    """Return the joint provenance of a process and of the shards that it resumes."""
    return merge_provenance([*(held.attrs for one in shards if (held := one.record())), attrs])


def _wait_for(found: Sequence[ShardJournal], wait: bool) -> None:
    """Raise HeldError for a shard that a living process writes, or wait for it.

    A shard that is done is waited for, as its process ends in a moment.
    """
    for one in found:
        wait_until_free(one.path, wait or one.is_done())


def _records(path: Path, found: Sequence[ShardJournal]) -> list[ShardRecord]:
    """Return the records of all shards; none where only leftovers of a merge that was killed at its end exist.

    Raises OutputError as `check_consistent`, TraceError where no shard says of which run it is.
    """
    records = [held for one in found if (held := one.record())]
    if records:
        check_consistent(path, records)
    elif not path.exists() or any(one.journal.sample_ids() for one in found):
        msg = (
            f"expected shards of a run beside {path}, got {found[0].journal.folder}, which does not say of which; "
            "run the command that measures it again"
        )
        raise TraceError(msg)
    return records


def _check_all_finished(path: Path, record: ShardRecord, overwrite: bool) -> None:
    finished = set(done(path, record, overwrite))
    if lacking := [shard for shard in record.shards() if shard not in finished]:
        raise MissingShardError(_missing_message(path, record, lacking))


def _missing_message(path: Path, record: ShardRecord, lacking: Sequence[Shard]) -> str:
    count = record.shard.count
    return (
        f"expected all {count:,} shards of {path}, got {count - len(lacking):,}: {named(lacking)} "
        f"{'is' if len(lacking) == 1 else 'are'} missing; this measures {lacking[0]}: "
        f"{record.command.measuring(lacking[0])}"
    )


def _writer(
    path: Path, records: Sequence[ShardRecord], journals: Sequence[Journal], texts: Texts | None, overwrite: bool
) -> TraceWriter:
    """Return the trace's writer. Raises TraceError where a shard that is marked as done lacks something."""
    first, attrs = records[0], merge_provenance([one.attrs for one in records])
    kept = all(one.kept for one in records)
    writer = TraceWriter(path, first.run, first.sample_ids, attrs, overwrite, texts, journals, kept)
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


def _texts(path: Path, records: Sequence[ShardRecord], overwrite: bool) -> Texts | None:
    """Return None where all samples have their text, an empty dict where none has. Raises TraceError for a mixture."""
    if not any(one.text for one in records):
        return {}
    without = [one for one in records if not one.text]
    old = existing_trace(path, records[0].run, overwrite)
    more = old and set(old.sample_ids) - old.failures.keys() - old.with_text
    if without or more or Journal(journal_path(path)).sample_ids():
        msg = (
            f"expected the prompts' text in all shards of {path} or in none, got samples without; this adds it: "
            f"{records[0].command.without_shard()}"
        )
        raise TraceError(msg)
    return None


_LOOKED_AT = 8


class ShardWriter:
    """Writer of one shard: collects its samples in a journal, as `TraceWriter` does for a whole run.

    Args:
        trace: the trace file of the run; what it, or the journal of a run without shards, holds is not missing.
        record: the shard's description of the run.
        texts: texts of prompts and answers, stored with the samples, as merging has no tokenizer.
        overwrite: replace shards of other runs now, and a trace of another run when all shards are merged.

    Raises TraceError and OutputError where those of another run exist and `overwrite` is False.
    """

    def __init__(self, trace: Path, record: ShardRecord, texts: Texts, overwrite: bool = False) -> None:
        self.shard, self._record, self._texts = ShardJournal(trace, record.shard), record, texts
        _check_other_shards(trace, record, overwrite)
        held = _existing_labels(trace, record.run, overwrite)
        self._own = TraceWriter(self.shard.path, record.run, record.sample_ids, {}, overwrite, kept=record.kept)
        self._missing = _missing_share(record, self._own.missing(), held)
        self._begin()

    def missing(self) -> dict[str, tuple[EvictionConfig, ...]]:
        """Return sample -> the configurations that the shard has still to measure; complete samples are absent."""
        return dict(self._missing)

    def done(self) -> set[str]:
        """Return the samples of which the shard has nothing left to measure."""
        samples, _ = self._record.share(self._record.shard)
        return set(samples) - self._missing.keys()

    def append(self, sample: SampleTrace | FailedSample, configs: Sequence[EvictionConfig]) -> None:
        """Store a sample, measured for `configs`, with its text. Raises TraceError as a `TraceWriter` does."""
        self._own.append(with_text(sample, self._texts), configs)
        self._missing.pop(sample.sample_id, None)

    def leave(self) -> None:
        """Abandon the run: remove a journal that holds no sample."""
        self.shard.journal.discard_empty()

    def finish(self) -> Path:
        """Mark the shard as done and return its journal. Raises TraceError where the journal was removed meanwhile."""
        if self._missing or not self.shard.journal.folder.is_dir():
            msg = (
                f"expected every sample of shard {self._record.shard} in {self.shard.journal.folder}, got fewer, as "
                "it was removed meanwhile; run the same command again to measure what is missing"
            )
            raise TraceError(msg)
        self.shard.finish()
        return self.shard.journal.folder

    def failures(self) -> dict[str, str]:
        """Return sample -> why it failed."""
        return self._own.failures()

    def _begin(self) -> None:
        """Write the shard's record, unless the shard is done and lacks nothing: a merge may be reading it."""
        before = self.shard.record()
        if self.shard.is_done() and not self._missing and before and before.is_equivalent(self._record):
            return
        self.shard.begin(self._record)
        if self._texts and not (before and before.text):
            self._add_texts()

    def _add_texts(self) -> None:
        """Add the text to samples that were measured without it."""
        for entry in self.shard.journal.entries():
            if entry.reason is None and not entry.shapes().keys() >= set(TEXT):
                sample = with_text(SampleTrace(entry.sample_id, entry.arrays()), self._texts)
                self.shard.journal.append(sample, entry.labels)
                entry.path.unlink()


def _missing_share(
    record: ShardRecord, missing: dict[str, tuple[EvictionConfig, ...]], held: dict[str, set[str]]
) -> dict[str, tuple[EvictionConfig, ...]]:
    """Return the missing configurations per sample that belong to the shard and are not in `held`."""
    samples, configs = record.share(record.shard)
    own = {
        name: tuple(one for one in missing.get(name, ()) if one in configs and one.label() not in held[name])
        for name in samples
    }
    return {name: lacking for name, lacking in own.items() if lacking}


def _existing_labels(trace: Path, run: RunConfig, overwrite: bool) -> dict[str, set[str]]:
    """Return sample -> labels that the existing trace, or the journal of a run without shards, holds."""
    held: dict[str, set[str]] = defaultdict(set)
    if old := existing_trace(trace, run, overwrite):
        held.update({name: set(old.labels) for name in old.sample_ids if name not in old.failures})
    journal = Journal(journal_path(trace))
    journal.check_ownership()
    of = journal.run()
    if of is not None and not (overwrite and differing_fields(run, of)):
        check_extends(run, of, journal.folder)
        for entry in journal.entries():
            held[entry.sample_id].update(entry.labels)
    return held


def _check_other_shards(trace: Path, record: ShardRecord, overwrite: bool) -> None:
    """Raise OutputError where shards of another run, or of another division of this one, exist.

    With `overwrite` those of another run are removed, but for those that a living process writes. Without it only the
    first few are checked: all are compared when they are merged.
    """
    found = beside(trace)
    for shard in found if overwrite else found[:_LOOKED_AT]:
        other = shard.record()
        if other and overwrite and differing_fields(record.run, other.run):
            _remove(shard, other)
        elif other:
            check_consistent(trace, [record, other])


def _remove(shard: ShardJournal, expected: ShardRecord) -> None:
    with suppress(HeldError), Lock(shard.path):
        if shard.record() == expected:  # and was not begun anew meanwhile
            shard.journal.discard()

"""Joining the shards of a run into its trace, one sample in memory at a time.

Collecting the samples of one shard, resuming it, and noting that it is done.
"""

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
    check_alike,
    check_extends,
    clear_killed,
    differing_fields,
    named,
    provenance_of,
)
from perturbkv.storage.run.writer import TraceWriter, existing_trace
from perturbkv.storage.trace.texts import Texts, with_text
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import FailedSample, SampleTrace, Trace

_log = logging.getLogger(__name__)


def merge(path: str | Path, *, overwrite: bool = False, wait: bool = False) -> Trace:
    """Join the shards of a run, which `measure(..., shard="3/16")` left, into the trace at `path`.

    A trace without shards is whole, and read as it is. Killed at any moment, the same call goes on.

    Args:
        path: the trace, as the shards were given it.
        overwrite: replace a trace of another run at `path`.
        wait: where another process writes the trace or one of its shards, wait until it is done.

    Raises TraceError where a shard is missing, which is named with what measures it, or nothing is there; OutputError
    for shards of different runs, and where another process is at work there.
    """
    join(Path(path), overwrite=overwrite, wait=wait)
    return read_trace(Path(path))


def join(path: Path, *, overwrite: bool = False, wait: bool = False, texts: Texts | None = None) -> int:
    """Join what lies beside `path`, as `merge`; returns how many shards that were.

    `texts` are those that the trace is to have, None: what the shards have, which all have theirs or none has.
    """
    if not (found := beside(path)):
        drop_dead(path)  # of a merge that was killed at its very end
        clear_killed(path)
        describe(path)
        return 0
    _wait_for(found, wait)
    if records := _records(path, found):
        _check_done(path, records[0], overwrite)  # before the trace is locked: nobody is kept from it for nothing
    with Lock(path, wait) as lock:
        found = beside(path)
        _wait_for(found, wait)
        if records := _records(path, found):
            _check_done(path, records[0], overwrite)
            wanted = _texts(path, records, overwrite) if texts is None else texts
            writer = _writer(path, records, [one.journal for one in found], wanted, overwrite)
            lock.check()
            writer.finish()
        for one in found:
            one.journal.discard()
        clear_killed(path)
    return len(found)


def done(path: Path, record: ShardRecord, overwrite: bool = False) -> list[Shard]:
    """The shards of a run that are measured: they say so, the trace that is there has their share, or it is empty."""
    said = {one.shard.number for one in beside(path) if one.shard.count == record.shard.count and one.is_done()}
    old = existing_trace(path, record.run, overwrite)
    whole = set(old.sample_ids) if old and set(old.labels) >= set(record.run.labels()) else set()

    def measured(shard: Shard) -> bool:
        samples, configs = record.share(shard)
        return shard.number in said or whole >= set(samples if configs else ())

    return [shard for shard in record.shards() if measured(shard)]


def taken_over(path: Path, run: RunConfig, overwrite: bool, wait: bool) -> list[ShardJournal]:
    """The shards that a run without shards goes on with: no living process writes them.

    With `overwrite` those of another run are removed. Raises HeldError, or waits.
    """
    found = beside(path)
    _wait_for(found, wait)
    for one in found:
        one.journal.check_ours()
        held = one.journal.run()
        if held is None:
            _log.info("%s does not say of which run it is; its samples are measured again", one.journal.folder)
        if held is None or (overwrite and differing_fields(run, held)):
            one.journal.discard()
    clear_killed(path)
    return [one for one in found if one.journal.folder.exists()]


def together(attrs: Mapping[str, str], shards: Sequence[ShardJournal]) -> dict[str, str]:
    """The provenance of a process that goes on with shards, and theirs."""
    return provenance_of([*(held.attrs for one in shards if (held := one.record())), attrs])


def _wait_for(found: Sequence[ShardJournal], wait: bool) -> None:
    """Raise HeldError for a shard that a living process writes, or wait; one that is done ends in a moment."""
    for one in found:
        wait_until_free(one.path, wait or one.is_done())


def _records(path: Path, found: Sequence[ShardJournal]) -> list[ShardRecord]:
    """What the shards know, all of one run; nothing where only what a merge left is there that was killed at its end.

    Raises OutputError as `check_alike`, TraceError where no shard says of which run it is.
    """
    records = [held for one in found if (held := one.record())]
    if records:
        check_alike(path, records)
    elif not path.exists() or any(one.journal.sample_ids() for one in found):
        msg = (
            f"expected shards of a run beside {path}, got {found[0].journal.folder}, which does not say of which; "
            "run the command that measures it again"
        )
        raise TraceError(msg)
    return records


def _check_done(path: Path, record: ShardRecord, overwrite: bool) -> None:
    finished = set(done(path, record, overwrite))
    if lacking := [shard for shard in record.shards() if shard not in finished]:
        raise MissingShardError(_lacking(path, record, lacking))


def _lacking(path: Path, record: ShardRecord, lacking: Sequence[Shard]) -> str:
    count = record.shard.count
    return (
        f"expected all {count:,} shards of {path}, got {count - len(lacking):,}: {named(lacking)} "
        f"{'is' if len(lacking) == 1 else 'are'} missing; this measures {lacking[0]}: "
        f"{record.command.measuring(lacking[0])}"
    )


def _writer(
    path: Path, records: Sequence[ShardRecord], journals: Sequence[Journal], texts: Texts | None, overwrite: bool
) -> TraceWriter:
    """What writes the trace. Raises TraceError where a shard that says it is done lacks something."""
    first, attrs = records[0], provenance_of([one.attrs for one in records])
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
        raise MissingShardError(_lacking(path, first, lacking))
    return writer


def _texts(path: Path, records: Sequence[ShardRecord], overwrite: bool) -> Texts | None:
    """None where all samples have their text, nothing where none has. Raises TraceError where only some have."""
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
    """Collects what one shard measures, in its journal, as a `TraceWriter` does for a whole run.

    Args:
        trace: the trace file to be; what it holds already, or the journal of a run without shards, is not missing.
        record: what the shard knows of the run.
        texts: of prompts and answers, kept with the samples: who joins them has no tokenizer.
        overwrite: shards and traces of other runs are replaced; the trace when all shards are joined.

    Raises TraceError and OutputError where those of another run are there and `overwrite` is False.
    """

    def __init__(self, trace: Path, record: ShardRecord, texts: Texts, overwrite: bool = False) -> None:
        self.shard, self._record, self._texts = ShardJournal(trace, record.shard), record, texts
        _check_others(trace, record, overwrite)
        held = _held(trace, record.run, overwrite)
        self._own = TraceWriter(self.shard.path, record.run, record.sample_ids, {}, overwrite, kept=record.kept)
        self._missing = _share(record, self._own.missing(), held)
        self._begin()

    def missing(self) -> dict[str, tuple[EvictionConfig, ...]]:
        """Sample -> the configurations of it that the shard has still to measure; samples that lack none are absent."""
        return dict(self._missing)

    def done(self) -> set[str]:
        """Samples of which the shard has nothing to measure."""
        samples, _ = self._record.share(self._record.shard)
        return set(samples) - self._missing.keys()

    def append(self, sample: SampleTrace | FailedSample, configs: Sequence[EvictionConfig]) -> None:
        """Keep one sample, measured for `configs`, with its text. Raises TraceError as a `TraceWriter` does."""
        self._own.append(with_text(sample, self._texts), configs)
        self._missing.pop(sample.sample_id, None)

    def leave(self) -> None:
        """Leave a run that cannot go on: of one that kept no sample nothing is left."""
        self.shard.journal.discard_empty()

    def finish(self) -> Path:
        """Note that the shard is done; returns its journal. Raises TraceError where that vanished meanwhile."""
        if self._missing or not self.shard.journal.folder.is_dir():
            msg = (
                f"expected every sample of shard {self._record.shard} in {self.shard.journal.folder}, got fewer, as "
                "it was removed meanwhile; run the same command again to measure what is missing"
            )
            raise TraceError(msg)
        self.shard.finish()
        return self.shard.journal.folder

    def failures(self) -> dict[str, str]:
        """Sample -> why it failed."""
        return self._own.failures()

    def _begin(self) -> None:
        """Note what the shard knows; one that is done and lacks nothing stays so, as others may be joining it."""
        before = self.shard.record()
        if self.shard.is_done() and not self._missing and before and before.is_alike(self._record):
            return
        self.shard.begin(self._record)
        if self._texts and not (before and before.text):
            self._add_texts()

    def _add_texts(self) -> None:
        """Samples that were measured without their text get it."""
        for entry in self.shard.journal.entries():
            if entry.reason is None and not entry.shapes().keys() >= set(TEXT):
                sample = with_text(SampleTrace(entry.sample_id, entry.arrays()), self._texts)
                self.shard.journal.append(sample, entry.labels)
                entry.path.unlink()


def _share(
    record: ShardRecord, missing: dict[str, tuple[EvictionConfig, ...]], held: dict[str, set[str]]
) -> dict[str, tuple[EvictionConfig, ...]]:
    """What of a run's missing configurations is the shard's, and not held by others."""
    samples, configs = record.share(record.shard)
    own = {
        name: tuple(one for one in missing.get(name, ()) if one in configs and one.label() not in held[name])
        for name in samples
    }
    return {name: lacking for name, lacking in own.items() if lacking}


def _held(trace: Path, run: RunConfig, overwrite: bool) -> dict[str, set[str]]:
    """Sample -> labels of what the trace holds that is there, or the journal of a run without shards."""
    held: dict[str, set[str]] = defaultdict(set)
    if old := existing_trace(trace, run, overwrite):
        held.update({name: set(old.labels) for name in old.sample_ids if name not in old.failures})
    journal = Journal(journal_path(trace))
    journal.check_ours()
    of = journal.run()
    if of is not None and not (overwrite and differing_fields(run, of)):
        check_extends(run, of, journal.folder)
        for entry in journal.entries():
            held[entry.sample_id].update(entry.labels)
    return held


def _check_others(trace: Path, record: ShardRecord, overwrite: bool) -> None:
    """Raise OutputError where shards of another run, or of another way to share it out, are there.

    With `overwrite` those of another run are removed, but for those that a living process writes. Without it the first
    few are looked at: all are held against one another when they are joined.
    """
    found = beside(trace)
    for shard in found if overwrite else found[:_LOOKED_AT]:
        other = shard.record()
        if other and overwrite and differing_fields(record.run, other.run):
            _remove(shard, other)
        elif other:
            check_alike(trace, [record, other])


def _remove(shard: ShardJournal, expected: ShardRecord) -> None:
    with suppress(HeldError), Lock(shard.path):
        if shard.record() == expected:  # and was not begun anew meanwhile
            shard.journal.discard()

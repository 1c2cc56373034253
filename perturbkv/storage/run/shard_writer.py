"""Collecting the samples of one shard, resuming it, and noting that it is done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import HeldError, TraceError
from perturbkv.schema import TEXT
from perturbkv.storage.output import Lock
from perturbkv.storage.run.extending import check_extends, differing_fields
from perturbkv.storage.run.journal_part import Journal, journal_path
from perturbkv.storage.run.resume import existing_trace
from perturbkv.storage.run.shards import ShardJournal, ShardRecord, beside, check_alike
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.texts import Texts, with_text
from perturbkv.trace import FailedSample, SampleTrace

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

"""Joining the shards of a run into its trace, one sample in memory at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from perturbkv.configs.run import RunConfig
from perturbkv.configs.shard import Shard
from perturbkv.errors import MissingShardError, TraceError
from perturbkv.storage.output import Lock, drop_dead, wait_until_free
from perturbkv.storage.run.extending import differing_fields
from perturbkv.storage.run.journal_part import Journal, journal_path
from perturbkv.storage.run.resume import existing_trace
from perturbkv.storage.run.shards import (
    ShardJournal,
    ShardRecord,
    beside,
    check_alike,
    clear_killed,
    named,
    provenance_of,
)
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.texts import Texts
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import Trace

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

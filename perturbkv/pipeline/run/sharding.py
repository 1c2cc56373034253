"""One shard of a run: measured into its own journal, and all of them joined by the one that ends last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perturbkv.configs.run import Shard
from perturbkv.errors import LockedOutputError, MissingShardError
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Engine, Progress, measure_missing, provenance, texts_of
from perturbkv.storage.output import Lock, check_free, check_writable, wait_until_free
from perturbkv.storage.run.shard_merging import ShardWriter, measured_shards, merge_shards
from perturbkv.storage.run.shards import Command, ShardJournal, ShardRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardDone:
    """A shard that is measured, while the trace is not whole yet.

    Attributes:
        trace: where the trace will be.
        shard: which it is.
        samples: whose measurements it has.
        configs: how many configurations it has of each.
        failures: sample that failed -> why.
        done: the shards that are measured, this one among them.
    """

    trace: Path
    shard: Shard
    samples: tuple[str, ...]
    configs: int
    failures: Mapping[str, str]
    done: tuple[Shard, ...]

    def __str__(self) -> str:
        of_each = f", {self.configs} configurations of each" if self.shard.by == "configs" else ""
        samples = f"{len(self.samples):,} sample{'' if len(self.samples) == 1 else 's'}{of_each}"
        there = f"{len(self.done):,} of {self.shard.count:,} shards are there"
        return f"shard {self.shard} is done: {samples}; {there}; perturbkv merge {self.trace} joins them when all are"

    __repr__ = __str__


def run_shard(
    planned: Plan,
    engine: Engine,
    path: Path,
    shard: Shard,
    *,
    command: Command = Command(),  # noqa: B008 - frozen
    overwrite: bool = False,
    wait: bool = False,
    progress: Progress = lambda done, total: None,
) -> Path | ShardDone:
    """Measure what one shard of the run at `path` lacks; the last one joins all, and gives the trace.

    Any number of processes do so at once, on any machines, one for each shard. Raises as `run_to_file`, and OutputError
    where shards of another run are there.
    """
    ids, attrs = tuple(planned.prompts.ids), provenance(planned)
    record = ShardRecord(shard, planned.run, ids, attrs, planned.text, command, planned.kept)
    place = ShardJournal(path, shard).path
    check_writable(place)
    with _alone(path, place, wait, lambda: _all_done(path, record, overwrite)) as lock:
        writer = ShardWriter(path, record, texts_of(planned), overwrite)
        samples, configs = record.share(shard)
        missing = writer.missing()
        if len(missing) < len(samples):
            _log.info("%d of %d samples of shard %s are there already; going on", len(samples) - len(missing),
                      len(samples), shard)  # fmt: skip
        measure_missing(planned, engine, writer, lock, path, len(samples), progress)
        failures = writer.failures()
    if _joined(planned, path, record, overwrite):
        return path
    return ShardDone(path, shard, samples, len(configs), failures, tuple(measured_shards(path, record, overwrite)))


@contextmanager
def _alone(path: Path, place: Path, wait: bool, joining: Callable[[], bool]) -> Iterator[Lock]:
    """The shard's lock, held while nobody holds the trace's: who joins shards looks at both in the other order.

    Raises LockedOutputError, or waits, for the trace without keeping the shard from who joins it; a joining is always
    awaited.
    """
    while True:
        try:
            check_free(path)
        except LockedOutputError:
            wait_until_free(path, wait or joining())
        with Lock(place, wait) as lock:
            try:
                check_free(path)
            except LockedOutputError:
                if not (wait or joining()):
                    raise
                continue
            yield lock
            return


def _all_done(path: Path, record: ShardRecord, overwrite: bool) -> bool:
    """Whether no shard lacks anything: who holds the trace then joins them, and is through in a moment."""
    return len(measured_shards(path, record, overwrite)) == record.shard.count


def _joined(planned: Plan, path: Path, record: ShardRecord, overwrite: bool) -> bool:
    """Whether all shards were there and this process joined them; where another one does it, it does not."""
    if not _all_done(path, record, overwrite):
        return False
    try:
        joined = merge_shards(path, overwrite=overwrite, texts=texts_of(planned))
    except LockedOutputError as error:
        _log.info("all shards are done, and joined elsewhere: %s", error)
        return False
    except MissingShardError:  # one that was done began again meanwhile, and joins all when it ends
        return False
    _log.info("all %d shards are done: joined into %s", max(joined, record.shard.count), path)
    return True

"""One shard of a run, measured into its own journal; the shard that ends last joins all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perturbkv.configs.run import Shard
from perturbkv.display import plural
from perturbkv.errors import LockedOutputError, MissingShardError
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Engine, Progress, measure_missing, provenance, texts_of
from perturbkv.storage.output import Lock, check_free, check_writable
from perturbkv.storage.run.shard_merging import ShardWriter, measured_shards, merge_shards
from perturbkv.storage.run.shards import ShardJournal, ShardRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardDone:
    """The result of measuring a shard of a trace that is not complete yet.

    Attributes:
        trace: the future path of the trace.
        shard: the shard.
        samples: ids of the shard's samples.
        configs: number of configurations per sample.
        failures: failed sample -> reason.
        done: the measured shards, this one among them.
    """

    trace: Path
    shard: Shard
    samples: tuple[str, ...]
    configs: int
    failures: Mapping[str, str]
    done: tuple[Shard, ...]

    def __str__(self) -> str:
        of_each = f", {self.configs} configurations of each" if self.shard.by == "configs" else ""
        samples = f"{plural(len(self.samples), 'sample')}{of_each}"
        there = f"{len(self.done):,} of {self.shard.count:,} shards are there"
        return f"shard {self.shard} is done: {samples}; {there}; perturbkv merge {self.trace} joins them when all are"

    __repr__ = __str__


def run_shard(
    planned: Plan,
    engine: Engine,
    path: Path,
    shard: Shard,
    *,
    overwrite: bool = False,
    wait: bool = False,
    progress: Progress = lambda done, total: None,
) -> Path | ShardDone:
    """Measure a shard's missing samples, and return its result, or the trace's path once all shards are joined.

    The shard that ends last joins all. Any number of processes may run at once, on any machines, one per shard. Raises
    as `run_to_file`, and OutputError where shards of another run exist.
    """
    ids, attrs = tuple(planned.prompts.ids), provenance(planned)
    record = ShardRecord(shard, planned.run, ids, attrs)
    journal = ShardJournal(path, shard).path
    check_writable(journal)
    with _lock_shard(path, journal, wait, lambda: _are_all_measured(path, record, overwrite)):
        writer = ShardWriter(path, record, texts_of(planned), planned.kept, overwrite)
        samples, configs = record.share(shard)
        missing = writer.missing()
        if len(missing) < len(samples):
            _log.info("%d of %d samples of shard %s are there already; going on", len(samples) - len(missing),
                      len(samples), shard)  # fmt: skip
        measure_missing(planned, engine, writer, path, len(samples), progress)
        failures = writer.failures()
    if _join_if_complete(path, record, overwrite):
        return path
    return ShardDone(path, shard, samples, len(configs), failures, tuple(measured_shards(path, record, overwrite)))


@contextmanager
def _lock_shard(path: Path, journal: Path, wait: bool, all_done: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock of a shard, unless another process has locked the trace.

    Where the trace is locked, this waits with `wait` and while all shards are joined, and raises LockedOutputError
    otherwise. The shard is not locked meanwhile, as joining takes the two locks in the other order.
    """
    while True:
        check_free(path, wait or all_done())
        with Lock(journal, wait):
            try:
                check_free(path)
            except LockedOutputError:
                if not (wait or all_done()):
                    raise
                continue
            yield
            return


def _are_all_measured(path: Path, record: ShardRecord, overwrite: bool) -> bool:
    """Return whether all shards are measured, in which case a process that holds the trace's lock is joining them."""
    return len(measured_shards(path, record, overwrite)) == record.shard.count


def _join_if_complete(path: Path, record: ShardRecord, overwrite: bool) -> bool:
    """Join the shards into the trace if all are measured; return whether they were joined."""
    if not _are_all_measured(path, record, overwrite):
        return False
    try:
        joined = merge_shards(path, overwrite=overwrite)
    except LockedOutputError as error:
        _log.info("all shards are done, and joined elsewhere: %s", error)
        return False
    except MissingShardError:  # one that was done began again meanwhile, and joins all when it ends
        return False
    _log.info("all %d shards are done: joined into %s", max(joined, record.shard.count), path)
    return True

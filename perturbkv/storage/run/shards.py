"""Shards of a run: their journals beside the trace, and whether a run can extend an older one.

A shard's lock and journal are named like those of an output `<trace>.shard-3-of-16`, a file that is never made. Each
journal describes the whole run. Only samples and configurations may be added to a run.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import DIGESTS, METRICS, RunConfig, Shard
from perturbkv.errors import LockedOutputError, OutputError, PerturbkvError, TraceError
from perturbkv.storage.atomic_files import write_atomically
from perturbkv.storage.output import TEMPORARY, check_free, real_path
from perturbkv.storage.run.journal import DONE, SHARD, SUFFIX, Journal, journal_path


def check_extends(run: RunConfig, old: RunConfig, path: Path) -> None:
    """Raise TraceError if the output at `path`, of the run `old`, cannot be extended to `run`."""
    if fields := differing_fields(run, old):
        values = _name_values(fields, old, run, ", not ")
        raise TraceError(
            f"expected a trace of this run at {path}, got one that differs in {values}"
            f"{_changed_plugins_text(run, old) if 'plugins' in fields else ''}; use another "
            "--output, or --overwrite to replace it (only samples and configurations may be added)"
        )


def differing_fields(run: RunConfig, old: RunConfig) -> list[str]:
    """Return the names of the fields that prevent extending `old` to `run`; empty if `old` is a part of `run`."""
    digests = [one.dataset_options.get("file_sha256") for one in (run, old)]
    may_grow = {
        "dataset": digests[0] is not None and digests[0] == digests[1],  # the same file, elsewhere
        "samples": old.samples <= run.samples,
        "configs": set(old.configs) <= set(run.configs),
        "head_scores": not old.head_scores,  # empty where no configuration needs them
        "plugins": old.plugins.items() <= run.plugins.items(),
        "dataset_options": _is_extension(old.dataset_options, run.dataset_options),
    }
    return [name for name in run.differences(old) if not may_grow.get(name, False)]


_LONGEST_VALUE = 40
"""Most characters of a setting's value that a message shows."""


def _name_values(fields: Sequence[str], first: RunConfig, other: RunConfig, between: str) -> str:
    """Return the names of fields, with both runs' values where these are short: 'steps (8, not 4), configs'."""
    texts = []
    for name in fields:
        values = [getattr(run, name) for run in (first, other)]
        short = all(isinstance(value, str | int | None) and len(str(value)) <= _LONGEST_VALUE for value in values)
        shown = between.join("none" if value in (None, "") else str(value) for value in values)
        texts.append(f"{name} ({shown})" if short else name)
    return ", ".join(texts)


def _changed_plugins_text(run: RunConfig, old: RunConfig) -> str:
    """Return a text that names the external scores and policies with changed versions; empty without changes."""
    names = [name for name, version in old.plugins.items() if run.plugins.get(name, version) != version]
    return f" ({', '.join(names)} is another version now)" if names else ""


def _is_extension(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether new dataset options differ only in added prompts, and in the metrics that grade these prompts."""
    may_grow = {DIGESTS: None, METRICS: None}
    same_prompts = old.get(DIGESTS, {}).items() <= new.get(DIGESTS, {}).items()
    same_metrics = set(old.get(METRICS, ())) <= set(new.get(METRICS, ())) and (METRICS in old) == (METRICS in new)
    return {**old, **may_grow} == {**new, **may_grow} and same_prompts and same_metrics


_FOLDER_NAME = re.compile(r"shard-([0-9]+)-of-([0-9]+)")
_MOST_NAMED = 6
"""Most shards that a message names."""


@dataclass(frozen=True)
class ShardRecord:
    """A shard's description of the whole run.

    Attributes:
        shard: the shard.
        run: the whole run's configuration.
        sample_ids: ids of all samples of the run, in the order of the file.
        attrs: provenance of the shard's measurements.
    """

    shard: Shard
    run: RunConfig
    sample_ids: tuple[str, ...]
    attrs: Mapping[str, str]

    def share(self, shard: Shard) -> tuple[tuple[str, ...], tuple[EvictionConfig, ...]]:
        """Return the sample ids of a shard, and the configurations that it measures on each sample."""
        return shard.select(self.sample_ids, self.run.configs)

    def is_equivalent(self, other: ShardRecord) -> bool:
        """Return whether both records describe the same share of the same run, whatever the machine."""
        return dataclasses.replace(self, attrs=other.attrs) == other

    def shards(self) -> list[Shard]:
        """Return all shards into which the run is divided."""
        return [dataclasses.replace(self.shard, number=number + 1) for number in range(self.shard.count)]

    def document(self) -> dict[str, Any]:
        """Return the record as a JSON object, without the run, which is stored in the journal."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "run"}
        return {**values, "shard": dataclasses.asdict(self.shard)}


class ShardJournal:
    """The journal of one shard, with its record; its lock is named after `path`."""

    def __init__(self, trace: Path, shard: Shard) -> None:
        self.shard = shard
        target = real_path(trace)
        self.path: Path = target.with_name(f"{target.name}.shard-{shard.number}-of-{shard.count}")
        self.journal: Journal = Journal(journal_path(self.path))

    def record(self) -> ShardRecord | None:
        """Return the shard's record; None if it is unreadable or another shard's.

        Raises OutputError for another program's files.
        """
        self.journal.check_ownership()
        run = self.journal.run()
        try:
            record = json.loads((self.journal.folder / SHARD).read_text())
            shard = Shard(**record["shard"])
            ids, attrs = tuple(map(str, record["sample_ids"])), dict(record["attrs"])
        except (OSError, ValueError, KeyError, TypeError, PerturbkvError):
            return None
        if run is None or (shard.number, shard.count) != (self.shard.number, self.shard.count):
            return None
        return ShardRecord(shard, run, ids, attrs)

    def begin(self, record: ShardRecord) -> None:
        """Create the journal, store the record, and remove the mark of completion."""
        (self.journal.folder / DONE).unlink(missing_ok=True)
        self.journal.begin(record.run)
        text = json.dumps(record.document())
        write_atomically(self.journal.folder / SHARD, lambda stream: stream.write(text.encode()), folders=False)

    def finish(self) -> None:
        """Mark the shard as done, that is, complete."""
        write_atomically(self.journal.folder / DONE, lambda stream: stream.write(b""), folders=False)

    def is_done(self) -> bool:
        """Return whether the shard is marked as done."""
        try:
            (self.journal.folder / DONE).read_bytes()  # a network file system may answer exists() from a cache
        except OSError:
            return False
        return True


def find_shards(trace: Path) -> list[ShardJournal]:
    """Return the shards with a journal beside the trace, sorted by count and number."""
    target = real_path(trace)
    pattern = f"{glob.escape(target.name)}.shard-*-of-*{SUFFIX}"
    journals = [_parse_folder(target, folder) for folder in target.parent.glob(pattern)]
    return sorted(filter(None, journals), key=lambda journal: (journal.shard.count, journal.shard.number))


def remove_stale_files(trace: Path) -> None:
    """Remove the locks and temporary files left by killed shards beside a trace."""
    target = real_path(trace)
    pattern = f".{glob.escape(target.name)}.shard-*-of-*"
    for file in target.parent.glob(f"{pattern}.lock"):
        with suppress(LockedOutputError):
            check_free(file.with_name(file.name.removeprefix(".").removesuffix(".lock")))
    for file in target.parent.glob(f"{pattern}{TEMPORARY}*"):
        file.unlink(missing_ok=True)


def _parse_folder(trace: Path, folder: Path) -> ShardJournal | None:
    """Return the shard journal with the given folder name; None for a name of another form."""
    match = _FOLDER_NAME.fullmatch(folder.name.removeprefix(f"{trace.name}.").removesuffix(SUFFIX))
    try:
        journal = ShardJournal(trace, Shard(int(match[1]), int(match[2]))) if match else None
    except (PerturbkvError, ValueError):
        return None
    return journal if journal and journal.journal.folder.name == folder.name else None


def check_consistent(trace: Path, records: Iterable[ShardRecord]) -> None:
    """Raise OutputError for records of different runs, or of different divisions of one run.

    The first record may be that of a shard that is about to be measured.
    """
    first, *others = records
    for other in others:
        both = f"expected shards of one run beside {trace}, got {first.shard} and {other.shard}"
        fields = first.run.differences(other.run)
        if not fields and first.sample_ids != other.sample_ids:
            fields = ["samples"]
        if differing_fields(first.run, other.run) and differing_fields(other.run, first.run):
            raise OutputError(
                f"{both}, which differ in {_name_values(fields, first.run, other.run, ' and ')}; use another --output, "
                "or --overwrite to replace them"
            )
        divisions = [f"{record.shard.count} by {record.shard.by}" for record in (first, other)]
        if fields or divisions[0] != divisions[1]:  # one run extends the other, or they are one run in two divisions
            differing = _name_values(fields, first.run, other.run, " and ")
            difference = f"which differ in {differing}" if fields else f"of {' and of '.join(divisions)}"
            raise OutputError(
                f"{both}, {difference}; go on as the run was begun, with --shard {other.shard}, or without --shard, "
                "which takes what all of them hold"
            )


def format_shards(shards: Sequence[Shard]) -> str:
    """Return a text of the first shards and the count of the rest, such as '3/16, 7/16 and 4 more'."""
    more = f" and {len(shards) - _MOST_NAMED} more" if len(shards) > _MOST_NAMED else ""
    return ", ".join(map(str, shards[:_MOST_NAMED])) + more


def merge_provenance(attrs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the joint provenance of several processes: differing values joined by '; ', and the latest `created`."""
    names = dict.fromkeys(name for process in attrs for name in process)
    merged = {name: "; ".join(dict.fromkeys(process[name] for process in attrs if name in process)) for name in names}
    return merged | {"created": max(process["created"] for process in attrs)} if "created" in names else merged

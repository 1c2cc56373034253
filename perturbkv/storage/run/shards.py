"""Shards of a run: their journals beside the trace, and whether a run can extend what an older one left.

A shard's lock and journal are named like those of an output `<trace>.shard-3-of-16`, a file that is never made. Each
journal describes the whole run. Only samples and configurations may be added to a run.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import BY, DIGESTS, METRICS, RunConfig, Shard
from perturbkv.errors import OutputError, PerturbkvError, TraceError
from perturbkv.storage.atomic_files import write_whole
from perturbkv.storage.output import TEMPORARY, drop_dead, real
from perturbkv.storage.run.journal import DONE, SHARD, SUFFIX, Journal, journal_path


def check_extends(run: RunConfig, held: RunConfig, where: Path) -> None:
    """Raise TraceError unless the output at `where`, of the run `held`, can be extended to `run`."""
    if fields := differing_fields(run, held):
        msg = (
            f"expected a trace of this run at {where}, got one that differs in {', '.join(fields)}"
            f"{_changed_plugins(run, held) if 'plugins' in fields else ''}; use another "
            "--output, or --overwrite to replace it (only samples and configurations may be added)"
        )
        raise TraceError(msg)


def differing_fields(run: RunConfig, held: RunConfig) -> list[str]:
    """Return the fields that prevent extending `held` to `run`; none where `held` is a part of `run`."""
    may_grow = {
        "samples": held.samples <= run.samples,
        "configs": set(held.configs) <= set(run.configs),
        "head_scores": not held.head_scores,  # empty where no configuration needs them
        "plugins": held.plugins.items() <= run.plugins.items(),
        "dataset_options": _is_extension(held.dataset_options, run.dataset_options),
    }
    return [name for name in run.differences(held) if not may_grow.get(name, False)]


def _changed_plugins(run: RunConfig, held: RunConfig) -> str:
    """Return in words which scores and policies have changed since."""
    names = [name for name, version in held.plugins.items() if run.plugins.get(name, version) != version]
    return f" ({', '.join(names)} is another version now)" if names else ""


def _is_extension(held: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Return whether options differ only in added prompts, and in the metrics that grade these."""
    may_grow = {DIGESTS: None, METRICS: None}
    old, new = held.get(DIGESTS, {}), asked.get(DIGESTS, {})
    more = old.items() <= new.items() and set(held.get(METRICS, ())) <= set(asked.get(METRICS, ()))
    graded = (METRICS in held) == (METRICS in asked)
    return {**held, **may_grow} == {**asked, **may_grow} and more and graded


_NAMED = re.compile(r"shard-([0-9]+)-of-([0-9]+)")
_MOST_NAMED = 6


@dataclass(frozen=True)
class Command:
    """The command line that measured a shard: its words, with None in place of the shard, and its folder.

    Without words the shard was measured by a Python call.
    """

    words: tuple[str | None, ...] = ()
    folder: str = ""

    def measuring(self, shard: Shard) -> str:
        """Return the command that measures another shard of the same run."""
        if not self.words:
            written = f"'{shard}'" if shard.by == BY[0] else f"pk.Shard.parse('{shard}', '{shard.by}')"
            return f"pk.measure with the same arguments and shard={written}"
        return self._typed([str(shard) if word is None else word for word in self.words])

    def without_shard(self) -> str:
        """Return the command that measures the same run without shards."""
        if not self.words:
            return "pk.measure with the same arguments and no shard"
        place = self.words.index(None)
        return self._typed([str(word) for word in (*self.words[: place - 1], *self.words[place + 1 :])])

    def _typed(self, words: Sequence[str]) -> str:
        there = "" if self.folder == str(Path.cwd()) else f"cd {shlex.quote(self.folder)} && "
        return there + shlex.join(words)


@dataclass(frozen=True)
class ShardRecord:
    """A shard's description of the whole run.

    Attributes:
        shard: which shard it is.
        run: the whole run's configuration.
        sample_ids: ids of all samples of the run, in the order of the file.
        attrs: provenance of the shard's measurements.
        text: whether its samples are stored with the text of prompts and answers.
        kept: whether they are stored with kept positions.
        command: the command that measured it.
    """

    shard: Shard
    run: RunConfig
    sample_ids: tuple[str, ...]
    attrs: Mapping[str, str]
    text: bool
    command: Command = Command()
    kept: bool = True

    def share(self, shard: Shard) -> tuple[tuple[str, ...], tuple[EvictionConfig, ...]]:
        """Return the samples that a shard of the run measures, and the configurations that it measures of each."""
        return shard.of(self.sample_ids, self.run.configs)

    def is_equivalent(self, other: ShardRecord) -> bool:
        """Return whether both describe the same share of the same run, whatever the command and the machine."""
        return dataclasses.replace(self, attrs=other.attrs, command=other.command) == other

    def shards(self) -> list[Shard]:
        """Return all shards of the run."""
        return [dataclasses.replace(self.shard, number=number + 1) for number in range(self.shard.count)]

    def document(self) -> dict[str, Any]:
        """Return everything but the run, which the journal holds, as a JSON object."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "run"}
        return {**own, "shard": dataclasses.asdict(self.shard), "command": dataclasses.asdict(self.command)}


class ShardJournal:
    """The journal of one shard, with its record; its lock is named after `path`."""

    def __init__(self, trace: Path, shard: Shard) -> None:
        self.shard, where = shard, real(trace)
        self.path = where.with_name(f"{where.name}.shard-{shard.number}-of-{shard.count}")
        self.journal = Journal(journal_path(self.path))

    def record(self) -> ShardRecord | None:
        """Return the shard's record; None where it cannot be read. Raises OutputError for another program's files."""
        self.journal.check_ownership()
        run = self.journal.run()
        try:
            held = json.loads((self.journal.folder / SHARD).read_text())
            shard, command = Shard(**held["shard"]), held["command"]
            told = Command(tuple(command["words"]), command["folder"])
            ids, attrs = tuple(map(str, held["sample_ids"])), dict(held["attrs"])
        except (OSError, ValueError, KeyError, TypeError, PerturbkvError):
            return None
        if run is None or (shard.number, shard.count) != (self.shard.number, self.shard.count):
            return None
        return ShardRecord(shard, run, ids, attrs, held.get("text") is True, told, held.get("kept") is not False)

    def begin(self, record: ShardRecord) -> None:
        """Make the journal and store the record, not marked as done, so that it is not merged."""
        (self.journal.folder / DONE).unlink(missing_ok=True)
        self.journal.begin(record.run)
        text = json.dumps(record.document())
        write_whole(self.journal.folder / SHARD, lambda stream: stream.write(text.encode()), folders=False)

    def finish(self) -> None:
        """Mark the shard as done: nothing of its share is missing."""
        write_whole(self.journal.folder / DONE, lambda stream: stream.write(b""), folders=False)

    def is_done(self) -> bool:
        """Return whether the shard is marked as done."""
        try:
            (self.journal.folder / DONE).read_bytes()  # opened: of a network's file system a look may be old
        except OSError:
            return False
        return True


def beside(trace: Path) -> list[ShardJournal]:
    """Return the shards that have a journal beside a trace, sorted."""
    where = real(trace)
    pattern = f"{glob.escape(where.name)}.shard-*-of-*{SUFFIX}"
    found = [_parse_folder(where, folder) for folder in where.parent.glob(pattern)]
    return sorted((one for one in found if one), key=lambda one: (one.shard.count, one.shard.number))


def clear_killed(trace: Path) -> None:
    """Remove the locks and temporary files that killed shards of a trace left beside their journals."""
    where = real(trace)
    shards = f".{glob.escape(where.name)}.shard-*-of-*"
    for file in where.parent.glob(f"{shards}.lock"):
        drop_dead(file.with_name(file.name.removeprefix(".").removesuffix(".lock")))
    for file in where.parent.glob(f"{shards}{TEMPORARY}*"):
        file.unlink(missing_ok=True)


def _parse_folder(trace: Path, folder: Path) -> ShardJournal | None:
    """Return the shard that a folder's name denotes; None where it denotes none."""
    said = _NAMED.fullmatch(folder.name.removeprefix(f"{trace.name}.").removesuffix(SUFFIX))
    try:
        one = ShardJournal(trace, Shard(int(said[1]), int(said[2]))) if said else None
    except (PerturbkvError, ValueError):
        return None
    return one if one and one.journal.folder.name == folder.name else None


def check_consistent(trace: Path, records: Iterable[ShardRecord]) -> None:
    """Raise OutputError where shards belong to different runs or to different divisions of one.

    The first record may be a new one.
    """
    first, *others = records
    for other in others:
        both = f"expected shards of one run beside {trace}, got {first.shard} and {other.shard}"
        fields = first.run.differences(other.run) or ["samples"] * (first.sample_ids != other.sample_ids)
        if differing_fields(first.run, other.run) and differing_fields(other.run, first.run):
            msg = f"{both}, which differ in {', '.join(fields)}; use another --output, or --overwrite to replace them"
            raise OutputError(msg)
        ways = [f"{one.shard.count} by {one.shard.by}" for one in (first, other)]
        if fields or ways[0] != ways[1]:
            which = f"which differ in {', '.join(fields)}" if fields else f"of {' and of '.join(ways)}"
            msg = (
                f"{both}, {which}; go on as the run was begun, {other.command.measuring(other.shard)}, or without "
                "--shard, which takes what all of them hold"
            )
            raise OutputError(msg)


def named(shards: Sequence[Shard]) -> str:
    """Return shards in words: '3/16, 7/16 and 4 more'."""
    more = f" and {len(shards) - _MOST_NAMED} more" if len(shards) > _MOST_NAMED else ""
    return ", ".join(map(str, shards[:_MOST_NAMED])) + more


def merge_provenance(attrs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the joint provenance of several processes: differing values joined, each once; `created` is the latest."""
    names = dict.fromkeys(name for one in attrs for name in one)
    told = {name: "; ".join(dict.fromkeys(one[name] for one in attrs if name in one)) for name in names}
    return told | {"created": max(one["created"] for one in attrs)} if "created" in names else told

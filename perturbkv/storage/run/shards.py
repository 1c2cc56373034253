"""The shards of a run beside its trace: journals of their own, each of which knows the whole run.

A shard is locked, and its journal lies, as those of an output `<trace>.shard-3-of-16`, of which no file is ever made.

Whether a run goes on with what an older one left: only samples and configurations may be added.
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
from perturbkv.configs.run import DIGESTS, METRICS, RunConfig, Shard
from perturbkv.errors import OutputError, PerturbkvError, TraceError
from perturbkv.storage.atomic_files import write_whole
from perturbkv.storage.output import TEMPORARY, drop_dead, real
from perturbkv.storage.run.journal import DONE, SHARD, SUFFIX, Journal, journal_path


def check_extends(run: RunConfig, held: RunConfig, where: Path) -> None:
    """Raise TraceError unless what lies at `where`, of the run `held`, can be extended to `run`."""
    if fields := differing_fields(run, held):
        msg = (
            f"expected a trace of this run at {where}, got one that differs in {', '.join(fields)}"
            f"{_changed(run, held) if 'plugins' in fields else ''}; use another "
            "--output, or --overwrite to replace it (only samples and configurations may be added)"
        )
        raise TraceError(msg)


def differing_fields(run: RunConfig, held: RunConfig) -> list[str]:
    """Fields in which `held` differs so that it cannot be extended to `run`; none where it is a part of it."""
    may_grow = {
        "samples": held.samples <= run.samples,
        "configs": set(held.configs) <= set(run.configs),
        "head_scores": not held.head_scores,  # empty where no configuration needs them
        "plugins": held.plugins.items() <= run.plugins.items(),
        "dataset_options": _grown(held.dataset_options, run.dataset_options),
    }
    return [name for name in run.differences(held) if not may_grow.get(name, False)]


def _changed(run: RunConfig, held: RunConfig) -> str:
    """Which scores and policies are another version now."""
    names = [name for name, version in held.plugins.items() if run.plugins.get(name, version) != version]
    return f" ({', '.join(names)} is another version now)" if names else ""


def _grown(held: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether options differ in prompts that were added alone, and in what grades those."""
    may_grow = {DIGESTS: None, METRICS: None}
    old, new = held.get(DIGESTS, {}), asked.get(DIGESTS, {})
    more = old.items() <= new.items() and set(held.get(METRICS, ())) <= set(asked.get(METRICS, ()))
    graded = (METRICS in held) == (METRICS in asked)
    return {**held, **may_grow} == {**asked, **may_grow} and more and graded


_NAMED = re.compile(r"shard-([0-9]+)-of-([0-9]+)")
_MOST_NAMED = 6


@dataclass(frozen=True)
class Command:
    """What was typed to measure a shard: its words, None where the shard stands, and in which folder.

    Without words it was a function that was called.
    """

    words: tuple[str | None, ...] = ()
    folder: str = ""

    def measuring(self, shard: Shard) -> str:
        """How another shard of the same run is measured."""
        if not self.words:
            return f"pk.measure with the same arguments and shard='{shard}'"
        return self._typed([str(shard) if word is None else word for word in self.words])

    def without_shard(self) -> str:
        """How the same run is measured without shards."""
        if not self.words:
            return "pk.measure with the same arguments and no shard"
        place = self.words.index(None)
        return self._typed([str(word) for word in (*self.words[: place - 1], *self.words[place + 1 :])])

    def _typed(self, words: Sequence[str]) -> str:
        there = "" if self.folder == str(Path.cwd()) else f"cd {shlex.quote(self.folder)} && "
        return there + shlex.join(words)


@dataclass(frozen=True)
class ShardRecord:
    """What a shard knows of the whole run.

    Attributes:
        shard: which it is.
        run: the whole run's configuration.
        sample_ids: of every sample of the run, in the order of the file.
        attrs: provenance of what the shard measured.
        text: whether its samples are kept with the text of prompts and answers.
        kept: whether they are with kept positions.
        command: how it was asked for.
    """

    shard: Shard
    run: RunConfig
    sample_ids: tuple[str, ...]
    attrs: Mapping[str, str]
    text: bool
    command: Command = Command()
    kept: bool = True

    def share(self, shard: Shard) -> tuple[tuple[str, ...], tuple[EvictionConfig, ...]]:
        """The samples that a shard of the run measures, and the configurations that it measures of each."""
        return shard.of(self.sample_ids, self.run.configs)

    def is_alike(self, other: ShardRecord) -> bool:
        """Whether both are of the same share of the same run, however it was asked for and wherever measured."""
        return dataclasses.replace(self, attrs=other.attrs, command=other.command) == other

    def shards(self) -> list[Shard]:
        """All shards of the run."""
        return [dataclasses.replace(self.shard, number=number + 1) for number in range(self.shard.count)]

    def document(self) -> dict[str, Any]:
        """All but the run, which the journal holds, as JSON has it."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "run"}
        return {**own, "shard": dataclasses.asdict(self.shard), "command": dataclasses.asdict(self.command)}


class ShardJournal:
    """The journal of one shard, with its record; `path` is what its lock is named after."""

    def __init__(self, trace: Path, shard: Shard) -> None:
        self.shard, where = shard, real(trace)
        self.path = where.with_name(f"{where.name}.shard-{shard.number}-of-{shard.count}")
        self.journal = Journal(journal_path(self.path))

    def record(self) -> ShardRecord | None:
        """What it knows of the run; None where that cannot be read. Raises OutputError for somebody else's files."""
        self.journal.check_ours()
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
        """Make the journal, and note what it knows; it is not done, so that nobody joins it."""
        (self.journal.folder / DONE).unlink(missing_ok=True)
        self.journal.begin(record.run)
        text = json.dumps(record.document())
        write_whole(self.journal.folder / SHARD, lambda stream: stream.write(text.encode()), folders=False)

    def finish(self) -> None:
        """Note that nothing of its share is missing."""
        write_whole(self.journal.folder / DONE, lambda stream: stream.write(b""), folders=False)

    def is_done(self) -> bool:
        """Whether it says that nothing of its share is missing."""
        try:
            (self.journal.folder / DONE).read_bytes()  # opened: of a network's file system a look may be old
        except OSError:
            return False
        return True


def beside(trace: Path) -> list[ShardJournal]:
    """The shards of which something lies beside a trace, in their order."""
    where = real(trace)
    pattern = f"{glob.escape(where.name)}.shard-*-of-*{SUFFIX}"
    found = [_named(where, folder) for folder in where.parent.glob(pattern)]
    return sorted((one for one in found if one), key=lambda one: (one.shard.count, one.shard.number))


def clear_killed(trace: Path) -> None:
    """Remove what killed shards of a trace left beside their journals: locks, and files to try the place with."""
    where = real(trace)
    shards = f".{glob.escape(where.name)}.shard-*-of-*"
    for file in where.parent.glob(f"{shards}.lock"):
        drop_dead(file.with_name(file.name.removeprefix(".").removesuffix(".lock")))
    for file in where.parent.glob(f"{shards}{TEMPORARY}*"):
        file.unlink(missing_ok=True)


def _named(trace: Path, folder: Path) -> ShardJournal | None:
    """The shard that a folder's name says; None where it is no shard's."""
    said = _NAMED.fullmatch(folder.name.removeprefix(f"{trace.name}.").removesuffix(SUFFIX))
    try:
        one = ShardJournal(trace, Shard(int(said[1]), int(said[2]))) if said else None
    except (PerturbkvError, ValueError):
        return None
    return one if one and one.journal.folder.name == folder.name else None


def check_alike(trace: Path, records: Iterable[ShardRecord]) -> None:
    """Raise OutputError where shards are not of one run, or share it out in different ways; the first may be new."""
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
    """Shards in words: '3/16, 7/16 and 4 more'."""
    more = f" and {len(shards) - _MOST_NAMED} more" if len(shards) > _MOST_NAMED else ""
    return ", ".join(map(str, shards[:_MOST_NAMED])) + more


def provenance_of(attrs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Root attributes of what several processes measured: where they differ, each value once; made as the last was."""
    names = dict.fromkeys(name for one in attrs for name in one)
    told = {name: "; ".join(dict.fromkeys(one[name] for one in attrs if name in one)) for name in names}
    return told | {"created": max(one["created"] for one in attrs)} if "created" in names else told

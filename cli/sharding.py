"""`--shard`: measure one share of a run, and say how far the others are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perturbkv.cli import console
from perturbkv.cli.options import RunOptions

if TYPE_CHECKING:
    from perturbkv.configs.shard import Shard
    from perturbkv.pipeline.run.plan import Plan
    from perturbkv.pipeline.run.running import Engine, Progress
    from perturbkv.pipeline.run.sharding import ShardDone
    from perturbkv.storage.run.shards import Command

_OPTION = "--shard"


def run(options: RunOptions, planned: Plan, engine: Engine, path: Path, progress: Progress) -> Path | ShardDone:
    """Measure what is missing of a trace, or of the shard that is asked for. Raises PerturbkvErrors."""
    from perturbkv.pipeline.run.running import run_to_file
    from perturbkv.pipeline.run.sharding import run_shard

    overwrite, wait = options.overwrite, options.wait
    if options.part is None:
        return run_to_file(planned, engine, path, overwrite=overwrite, wait=wait, progress=progress)
    command = typed(sys.argv[1:])
    return run_shard(planned, engine, path, options.part, command=command, overwrite=overwrite, wait=wait,
                     progress=progress)  # fmt: skip


def typed(arguments: Sequence[str]) -> Command:
    """The command line, so that it can be told for another shard."""
    from perturbkv.storage.run.shards import Command

    words: list[str | None] = ["perturbkv"]
    for word in arguments:
        if word.startswith(f"{_OPTION}="):
            words += [_OPTION, None]
        else:
            words.append(None if words[-1] == _OPTION else word)
    return Command(tuple(words), str(Path.cwd()))


def whole_or_left(made: Sequence[Path | ShardDone], as_json: bool) -> list[Path]:
    """The traces, where all are whole; else what was measured of the others is told, and the command ends.

    It exits with 1 where samples failed.
    """
    left = [one for one in made if not isinstance(one, Path)]
    if not left:
        return [one for one in made if isinstance(one, Path)]
    if as_json:
        console.print_json({"shards": [describe(one) for one in left]})
    else:
        for one in left:
            console.say(str(one))
    for reason in (reason for one in left for reason in one.failures.values()):
        console.note(f"failed: {reason}")
    raise typer.Exit(1 if any(one.failures for one in left) else 0)


def describe(one: ShardDone) -> dict[str, Any]:
    """What was measured, and how far the others are."""
    return {
        "trace": str(one.trace),
        **share(one.shard, one.samples, one.configs),
        "failed": dict(one.failures),
        "done": [shard.number for shard in one.done],
    }


def share(shard: Shard, samples: Sequence[str], configs: int) -> dict[str, Any]:
    """What a shard measures."""
    return {"shard": str(shard), "by": shard.by, "of": shard.count, "samples": list(samples), "configs": configs}

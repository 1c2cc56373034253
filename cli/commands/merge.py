"""`perturbkv merge`: join the shards of a run into its trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from perturbkv.cli import console
from perturbkv.cli.commands.trace import HDF5, describe, report
from perturbkv.cli.options import JsonOption
from perturbkv.errors import TraceError

_SHARD = re.compile(r"(.+)\.shard-([0-9]+)-of-([0-9]+)\.journal")


def merge(
    output: Annotated[Path, Argument(help="What the shards were given as --output", show_default=False)],
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a trace of another run")] = False,
    wait: Annotated[bool, Option("--wait", help="Wait while another process writes there")] = False,
    as_json: JsonOption = False,
) -> None:
    """Join the shards of a run, which --shard leaves, into its trace.

    A missing shard is named, with the command that measures it. Killed at any moment, the same command goes on.
    """
    from perturbkv.storage.run.joining import join

    joined = {path: join(path, overwrite=overwrite, wait=wait) for path in _traces(output)}
    if as_json:
        console.print_json({"merged": [{**describe(path), "shards": count} for path, count in joined.items()]})
    failed = [report(path, as_json) for path in joined]
    if any(failed):
        raise typer.Exit(1)


def _traces(output: Path) -> list[Path]:
    """The trace that an --output names, or those of its data sets. Raises TraceError where there is none."""
    from perturbkv.storage.run.shards import beside

    if output.suffix in HDF5:
        return [output]
    if named := _SHARD.fullmatch(output.name):
        trace = output.with_name(named[1])
        msg = f"expected a trace, got its shard {named[2]}/{named[3]}; perturbkv merge {trace} joins all of them"
        raise TraceError(msg)
    own = output / "trace.h5"
    each = [] if own.exists() or beside(own) else [folder / own.name for folder in sorted(output.glob("*/"))]
    found = [path for path in [own, *each] if path.exists() or beside(path)]
    if not found:
        msg = (
            f"expected a trace or shards of one in {output}, got neither; make some with --shard and --output {output}"
        )
        raise TraceError(msg)
    return found

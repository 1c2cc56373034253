"""Commands on finished traces: `merge` and `report`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from perturbkv.analyses.names import plural
from perturbkv.cli import console
from perturbkv.cli.commands.trace import HDF5, print_trace, trace_document
from perturbkv.cli.options import JsonOption
from perturbkv.cli.saving import new_file
from perturbkv.errors import TraceError

_SHARD = re.compile(r"(.+)\.shard-([0-9]+)-of-([0-9]+)\.journal")


def merge(
    output: Annotated[Path, Argument(help="Path that the shards had as --output", show_default=False)],
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a trace of another run")] = False,
    wait: Annotated[bool, Option("--wait", help="Wait while another process writes there")] = False,
    as_json: JsonOption = False,
) -> None:
    """Join the shards of a run, which --shard leaves.

    A missing shard is named, with the command that measures it. Killed at any moment, the same command goes on.
    """
    from perturbkv.storage.run.shard_merging import merge_shards

    shards = {path: merge_shards(path, overwrite=overwrite, wait=wait) for path in _trace_paths(output)}
    if as_json:
        console.print_json({"merged": [{**trace_document(path), "shards": count} for path, count in shards.items()]})
    failed = [print_trace(path, as_json) for path in shards]
    if any(failed):
        raise typer.Exit(1)


def _trace_paths(output: Path) -> list[Path]:
    """Return the trace paths of an --output: a single trace, or the traces in its folders, one per data set.

    Raises TraceError where there is neither a trace nor a shard of one.
    """
    from perturbkv.storage.run.shards import find_shards

    if output.suffix in HDF5:
        return [output]
    if shard := _SHARD.fullmatch(output.name):
        trace = output.with_name(shard[1])
        raise TraceError(
            f"expected a trace, got its shard {shard[2]}/{shard[3]}; perturbkv merge {trace} joins all of them"
        )
    single = output / "trace.h5"
    is_single = single.exists() or find_shards(single)
    several = [] if is_single else [folder / single.name for folder in sorted(output.glob("*/"))]
    traces = [path for path in [single, *several] if path.exists() or find_shards(path)]
    if not traces:
        raise TraceError(
            f"expected a trace or shards of one in {output}, got neither; make some with --shard and --output {output}"
        )
    return traces


def report(
    traces: Annotated[list[Path], Argument(help="Finished traces, side by side", show_default=False)],
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="PATH", help="The page", show_default="report.html beside the first trace"),
    ] = None,
    full: Annotated[bool, Option("--full", help="Keep everything, however large the page becomes")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a file that is there")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make one page to look at, of a trace or of several.

    One HTML file that holds everything: it opens in any browser, without network, and can be mailed. Choose two
    configurations in it and see which heads they change, which words of a prompt they keep, and what that costs.
    """
    from perturbkv.reporting.report import page_path
    from perturbkv.reporting.report import report as make
    from perturbkv.storage.trace.export import check_not_source
    from perturbkv.storage.trace.trace_file import read_trace

    given = output or traces[0].parent / "report.html"
    for trace in traces:
        check_not_source(trace, given)
    path = page_path(given)
    finished = [read_trace(trace) for trace in traces]
    with new_file(path, overwrite) as temporary:
        page = make(finished, full=full)
        temporary.write_bytes(page.html.encode())
    header = {"traces": [{"trace": one.source, "trace_digest": one.digest} for one in finished]}
    if as_json:
        sizes = {"bytes": page.bytes, "samples": page.samples, "configurations": page.configs}
        console.print_json({"file": str(path), **sizes, **header, "full": full})
        return
    size = f"{page.bytes / 1e6:.1f} MB, {plural(page.samples, 'sample')}, {plural(page.configs, 'configuration')}"
    console.say(f"{path}: {size}; opens in any browser, without network")

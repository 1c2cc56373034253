"""Commands on finished traces: `merge`, `export` and `report`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from perturbkv.cli import console
from perturbkv.cli.commands.trace import HDF5_SUFFIXES, print_trace, trace_document
from perturbkv.cli.options import JsonOption
from perturbkv.cli.saving import new_file
from perturbkv.cli.session import print_failures
from perturbkv.display import plural
from perturbkv.errors import ConfigError, TraceError
from perturbkv.storage.output import OutputFile, OutputFolder
from perturbkv.storage.trace.export import (
    SUFFIXES,
    check_not_source,
    check_suffix,
    columns,
    tokens_path,
    write,
    write_tokens,
)
from perturbkv.storage.trace.trace_file import read_trace


def merge(
    output: Annotated[Path, Argument(help="Path that the shards had as --output", show_default=False)],
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a trace of another run")] = False,
    wait: Annotated[bool, Option("--wait", help="Wait while another process writes there")] = False,
    as_json: JsonOption = False,
) -> None:
    """Join the shards of a run, which --shard leaves.

    A missing shard is named. Killed at any moment, the same command goes on.
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

    if output.suffix in HDF5_SUFFIXES:
        return [output]
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


def export(
    traces: Annotated[list[Path], Argument(help="Finished traces, or folders of them", show_default=False)],
    output: Annotated[
        list[Path] | None,
        Option("--output", "-o", metavar="PATH", help="A .csv or .parquet file", show_default="both, beside the trace"),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace files that are there")] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Write traces as tables, CSV or Parquet.

    One row per sample × configuration × step × layer × head, with every variable as a column. Where the trace holds its
    prompts' text, their tokens go into a file beside it, NAME.tokens.csv or .parquet.
    """
    tables = _table_paths(_expand_folders(traces), output)
    for trace, paths in tables.items():
        for path in paths:
            OutputFolder(path.parent, overwrite).claim(OutputFile(path))
            check_not_source(trace, path)
    finished = {trace: read_trace(trace) for trace in tables}
    token_paths = {
        trace: [tokens_path(path) for path in paths] if "prompt_token" in finished[trace].arrays else []
        for trace, paths in tables.items()
    }
    for path in itertools.chain.from_iterable(token_paths.values()):
        OutputFolder(path.parent, overwrite).claim(OutputFile(path))
    counts: dict[str, int] = {}
    with console.progress(
        "samples", sum(len(tables[name]) * int(one.ok.sum()) for name, one in finished.items())
    ) as bar:
        for trace, paths in tables.items():
            counts |= {str(path): write(finished[trace], path, bar.advance) for path in paths}
            counts |= {str(path): write_tokens(finished[trace], path) for path in token_paths[trace]}
    failures = {name: reason for one in finished.values() for name, reason in one.failures.items()}
    if as_json:
        names = list(dict.fromkeys(name for one in finished.values() for name in columns(one)))
        console.print_json({"files": counts, "columns": names, "failed": failures})
    else:
        for name, count in counts.items():
            console.say(f"{name}: {count:,} rows")
    print_failures(failures)
    if failures:
        raise typer.Exit(1)


def _expand_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the traces, those of a folder in its place. Raises TraceError for a folder without traces."""
    traces: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = sorted(file for suffix in HDF5_SUFFIXES for file in path.rglob(f"*{suffix}"))
        if not inside:
            raise TraceError(
                f"expected traces ({', '.join(HDF5_SUFFIXES)}) in the folder {path}, got none; name the traces "
                "themselves"
            )
        traces += inside
    return list(dict.fromkeys(traces))


def _table_paths(traces: Sequence[Path], output: Sequence[Path] | None) -> dict[Path, list[Path]]:
    """Return trace -> paths of its tables: those of --output, else one of each suffix beside it. Raises ConfigError."""
    if output and len(traces) > 1:
        raise ConfigError(
            f"--output names the tables of one trace, got {len(traces)} traces; leave it out: tables lie beside them"
        )
    for path in output or []:
        check_suffix(path)
    tables = {trace: list(output or [trace.with_suffix(suffix) for suffix in SUFFIXES]) for trace in traces}
    written = [path for paths in tables.values() for path in paths]
    if twice := next((path for path in written if written.count(path) > 1), None):
        raise ConfigError(
            f"expected a table per trace, got {twice} for two of them; export them one by one with --output"
        )
    return tables

"""`perturbkv export`: traces as tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from perturbkv.cli import console
from perturbkv.cli.commands.trace import HDF5
from perturbkv.cli.options import JsonOption
from perturbkv.cli.session import print_failures
from perturbkv.errors import ConfigError, TraceError
from perturbkv.storage.output import OutputFile, OutputFolder
from perturbkv.storage.trace.export import (
    SUFFIXES,
    check_not_source,
    check_suffix,
    columns,
    token_tables,
    tokens_path,
    write,
    write_tokens,
)
from perturbkv.storage.trace.trace_file import read_trace


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
        _check_tables(trace, paths, overwrite)
    finished = {trace: read_trace(trace) for trace in tables}
    token_paths = {
        trace: [tokens_path(path) for path in paths] if "prompt_token" in finished[trace].arrays else []
        for trace, paths in tables.items()
    }
    for path in itertools.chain.from_iterable(token_paths.values()):
        OutputFolder(path.parent, overwrite).claim(OutputFile(path))
    without_text = itertools.chain.from_iterable(paths for trace, paths in tables.items() if not token_paths[trace])
    stale = list(dict.fromkeys(old for path in without_text for old in token_tables(path)))
    if stale and not overwrite:
        raise ConfigError(
            f"expected no {stale[0]} beside a trace without text, got prompts of an earlier one; --overwrite removes it"
        )
    for path in stale:
        path.unlink()
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
        document = {
            "files": counts,
            "removed": [str(path) for path in stale],
            "columns": names,
            "failed": failures,
        }
        console.print_json(document)
    else:
        for path in stale:
            console.say(f"{path}: removed, as the trace holds no text")
        for name, count in counts.items():
            console.say(f"{name}: {count:,} rows")
    print_failures(failures)
    if failures:
        raise typer.Exit(1)


def _expand_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the traces, those of a folder in its place. Raises TraceError for a folder without traces."""
    traces: list[Path] = []
    for path in paths:
        inside = sorted(file for suffix in HDF5 for file in path.rglob(f"*{suffix}")) if path.is_dir() else [path]
        if not inside:
            raise TraceError(
                f"expected traces ({', '.join(HDF5)}) in the folder {path}, got none; name the traces themselves"
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


def _check_tables(trace: Path, paths: Sequence[Path], overwrite: bool) -> None:
    """Raise OutputError or ConfigError for a table that cannot be written, or is the trace itself."""
    for path in paths:
        OutputFolder(path.parent, overwrite).claim(OutputFile(path))
        check_not_source(trace, path)

"""`perturbkv export`: a trace as tidy CSV and Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from perturbkv.cli import console
from perturbkv.cli.commands.trace import say_failures
from perturbkv.cli.options import JsonOption
from perturbkv.cli.saving import free


def export(
    trace: Annotated[Path, Argument(help="A finished trace", show_default=False)],
    output: Annotated[
        list[Path] | None,
        Option("--output", "-o", metavar="PATH", help="A .csv or .parquet file", show_default="both, beside the trace"),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace files that are there")] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Write a trace as a table, CSV or Parquet.

    One row per sample × configuration × step × layer × head, with every variable as a column. Where the trace holds its
    prompts' text, their tokens go into a file beside it, NAME.tokens.csv.
    """
    from perturbkv.storage.trace.export import (
        SUFFIXES,
        check_other,
        check_suffix,
        columns,
        tokens_path,
        write,
        write_tokens,
    )
    from perturbkv.storage.trace.trace_file import read_trace

    paths = output or [trace.with_suffix(suffix) for suffix in SUFFIXES]
    for path in paths:
        check_suffix(path)
        check_other(trace, free(path, overwrite))
    finished = read_trace(trace)
    beside = [free(tokens_path(path), overwrite) for path in paths] if "prompt_token" in finished.arrays else []
    with console.progress("samples", len(paths) * int(finished.ok.sum())) as bar:
        counts = {str(path): write(finished, path, bar.one_more) for path in paths}
        counts |= {str(path): write_tokens(finished, path) for path in beside}
    if as_json:
        console.print_json({"files": counts, "columns": list(columns(finished)), "failed": dict(finished.failures)})
    else:
        for name, count in counts.items():
            console.say(f"{name}: {count:,} rows")
    say_failures(dict(finished.failures))
    if finished.failures:
        raise typer.Exit(1)

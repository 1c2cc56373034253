"""Finished traces: as tables and pages, joined from shards, and what a file holds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from perturbkv.analyses.pairing import plural
from perturbkv.cli import console
from perturbkv.cli.commands.trace import HDF5, describe, report_run
from perturbkv.cli.options import JsonOption
from perturbkv.cli.saving import new_file
from perturbkv.cli.session import say_failures
from perturbkv.errors import ConfigError, TraceError
from perturbkv.escaping import escape_line
from perturbkv.storage.output import OutputFile, OutputFolder

if TYPE_CHECKING:
    from perturbkv.storage.trace.trace_file import Description


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
        check_not_source,
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
        OutputFolder(path.parent, overwrite).claim(OutputFile(path))
        check_not_source(trace, path)
    finished = read_trace(trace)
    token_tables = [tokens_path(path) for path in paths] if "prompt_token" in finished.arrays else []
    for path in token_tables:
        OutputFolder(path.parent, overwrite).claim(OutputFile(path))
    with console.progress("samples", len(paths) * int(finished.ok.sum())) as bar:
        counts = {str(path): write(finished, path, bar.one_more) for path in paths}
        counts |= {str(path): write_tokens(finished, path) for path in token_tables}
    if as_json:
        console.print_json({"files": counts, "columns": list(columns(finished)), "failed": dict(finished.failures)})
    else:
        for name, count in counts.items():
            console.say(f"{name}: {count:,} rows")
    say_failures(dict(finished.failures))
    if finished.failures:
        raise typer.Exit(1)


_SHARD = re.compile(r"(.+)\.shard-([0-9]+)-of-([0-9]+)\.journal")


def merge(
    output: Annotated[Path, Argument(help="What the shards were given as --output", show_default=False)],
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a trace of another run")] = False,
    wait: Annotated[bool, Option("--wait", help="Wait while another process writes there")] = False,
    as_json: JsonOption = False,
) -> None:
    """Join the shards of a run, which --shard leaves.

    A missing shard is named, with the command that measures it. Killed at any moment, the same command goes on.
    """
    from perturbkv.storage.run.shard_merging import merge_shards

    joined = {path: merge_shards(path, overwrite=overwrite, wait=wait) for path in _traces(output)}
    if as_json:
        console.print_json({"merged": [{**describe(path), "shards": count} for path, count in joined.items()]})
    failed = [report_run(path, as_json) for path in joined]
    if any(failed):
        raise typer.Exit(1)


def _traces(output: Path) -> list[Path]:
    """The trace that an --output names, or those of its data sets. Raises TraceError where there is none."""
    from perturbkv.storage.run.shards import find_shards

    if output.suffix in HDF5:
        return [output]
    if named := _SHARD.fullmatch(output.name):
        trace = output.with_name(named[1])
        msg = f"expected a trace, got its shard {named[2]}/{named[3]}; perturbkv merge {trace} joins all of them"
        raise TraceError(msg)
    own = output / "trace.h5"
    each = [] if own.exists() or find_shards(own) else [folder / own.name for folder in sorted(output.glob("*/"))]
    found = [path for path in [own, *each] if path.exists() or find_shards(path)]
    if not found:
        msg = (
            f"expected a trace or shards of one in {output}, got neither; make some with --shard and --output {output}"
        )
        raise TraceError(msg)
    return found


_MILLION = 1e6


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
    from perturbkv.reporting.report import report as make
    from perturbkv.storage.trace.export import check_not_source
    from perturbkv.storage.trace.trace_file import read_trace

    path = output or traces[0].parent / "report.html"
    for trace in traces:
        check_not_source(trace, path)
    if path.suffix.lower() not in ("", ".html", ".htm"):
        msg = f"expected a page's name to end in .html, got {path}; name it {path.with_suffix('.html').name}"
        raise ConfigError(msg)
    finished = [read_trace(trace) for trace in traces]
    with new_file(path, overwrite) as temporary:
        made = make(finished, full=full)
        temporary.write_bytes(made.html.encode())
    about = {"traces": [{"trace": one.source, "trace_digest": one.digest} for one in finished]}
    if as_json:
        sizes = {"bytes": made.bytes, "samples": made.samples, "configurations": made.configs}
        console.print_json({"file": str(path), **sizes, **about, "full": full})
        return
    size = f"{made.bytes / _MILLION:.1f} MB, {plural(made.samples, 'sample')}, {plural(made.configs, 'configuration')}"
    console.say(f"{path}: {size}; opens in any browser, without network")


def describe_trace(
    trace: Annotated[Path, Argument(metavar="FILE", help="A trace file", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Show a trace's run, samples, variables and provenance."""
    from perturbkv.analyses.json_values import provenance_object, run_object
    from perturbkv.storage.trace.trace_file import describe

    description = describe(trace)
    if as_json:
        document = {**dataclasses.asdict(description), "attrs": provenance_object(description.attrs)}
        console.print_json({**document, "run": run_object(description.run), "path": str(trace)})
        return
    run = description.run
    states = f"{len(description.sample_ids)} samples, {len(description.failures)} failed"
    about = [
        ("samples", states),
        ("text", _held(description, description.with_text)),
        *_answers(description),
        ("kept positions", _held(description, description.with_kept)),
        *_caches(description.caches),
        *((escape_line(name), escape_line(value)) for name, value in sorted(description.attrs.items())),
    ]
    console.table(str(trace), ["", ""], about)
    console.table("configurations", ["config"], [(label,) for label in run.labels()])
    rows = [
        (
            escape_line(name),
            " ".join(map(escape_line, variable.dims)),
            "×".join(map(str, variable.shape)),
            escape_line(variable.units),
            f"{variable.nbytes:,}",
        )
        for name, variable in description.variables.items()
    ]
    console.table("variables", ["name", "axes", "shape", "unit", "#bytes"], rows)
    for reason in description.failures.values():
        console.say(escape_line(f"failed: {reason}"))


def _answers(description: Description) -> list[tuple[str, str]]:
    """Whether the text of answers can be read, where there are answers."""
    there = "generated" in description.variables
    return [("text of answers", _held(description, description.with_answers))] if there else []


def _held(description: Description, samples: Sequence[str]) -> str:
    """Of how many samples something can be read from the file that a trace may go without."""
    held, complete = len(samples), len(description.sample_ids) - len(description.failures)
    return "not stored" if not held else "stored" if held == complete else f"stored of {held} of {complete} samples"


def _caches(caches: dict[str, int]) -> list[tuple[str, str]]:
    """What the evicted caches of all samples and configurations held, and how much of it was padding."""
    if not caches:
        return []
    held, padding = caches["cache_bytes"], caches["cache_padding_bytes"]
    return [("evicted caches", f"{held:,} bytes, of which {padding:,} ({padding / max(held, 1):.1%}) are padding")]

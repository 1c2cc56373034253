"""`perturbkv export`: traces as tables, and the card with which a folder of them is a hub's data set."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer
from typer import Argument, Option

from perturbkv.cli import console
from perturbkv.cli.commands.trace import HDF5
from perturbkv.cli.options import JsonOption
from perturbkv.cli.saving import new_file
from perturbkv.cli.session import print_failures
from perturbkv.errors import ConfigError, TraceError
from perturbkv.reporting import data_card
from perturbkv.storage.output import OutputFile, OutputFolder
from perturbkv.storage.trace.export import (
    SUFFIXES,
    check_not_source,
    check_suffix,
    columns,
    row_count,
    token_tables,
    tokens_path,
    write,
    write_tokens,
)
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace


def export(
    traces: Annotated[list[Path], Argument(help="Finished traces, or folders of them", show_default=False)],
    output: Annotated[
        list[Path] | None,
        Option("--output", "-o", metavar="PATH", help="A .csv or .parquet file", show_default="both, beside the trace"),
    ] = None,
    card: Annotated[bool, Option("--card", help="Write README.md, a hub's data card; Parquet alone")] = False,
    licence: Annotated[
        str | None,
        Option("--license", metavar="ID", help="With --card: the tables' licence, cc-by-4.0", show_default="unknown"),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace files that are there")] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Write traces as tables, CSV or Parquet; a data card.

    One row per sample × configuration × step × layer × head, with every variable as a column. Where the trace holds its
    prompts' text, their tokens go into a file beside it, NAME.tokens.csv or .parquet. With --card, README.md lies in
    the named folder, or the one that all tables have in common (docs/how-to/publish_traces.md).
    """
    if licence is not None and not card:
        raise ConfigError("--license is the card's; add --card")
    licence = data_card.licence_id(licence or data_card.UNKNOWN)
    tables = _table_paths(_expand_folders(traces), output, (".parquet",) if card else None)
    for trace, paths in tables.items():
        _check_tables(trace, paths, overwrite)
    folders = [path for path in traces if path.is_dir()]
    readme = _check_card(list(tables.values()), folders, overwrite) if card else None
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
    text = "" if readme is None else _card_text(readme, finished, tables, licence)
    for path in stale:
        path.unlink()
    counts: dict[str, int] = {}
    with console.progress(
        "samples", sum(len(tables[name]) * int(one.ok.sum()) for name, one in finished.items())
    ) as bar:
        for trace, paths in tables.items():
            counts |= {str(path): write(finished[trace], path, bar.advance) for path in paths}
            counts |= {str(path): write_tokens(finished[trace], path) for path in token_paths[trace]}
    if readme is not None:
        with new_file(readme, overwrite) as temporary:
            temporary.write_text(text, encoding="utf-8")
    failures = {name: reason for one in finished.values() for name, reason in one.failures.items()}
    if as_json:
        names = list(dict.fromkeys(name for one in finished.values() for name in columns(one)))
        document = {
            "files": counts,
            "removed": [str(path) for path in stale],
            "columns": names,
            "card": readme and str(readme),
            "failed": failures,
        }
        console.print_json(document)
    else:
        for path in stale:
            console.say(f"{path}: removed, as the trace holds no text")
        for name, count in counts.items():
            console.say(f"{name}: {count:,} rows")
        if readme is not None:
            console.say(f"{readme}: the data card; read it before you publish: what it does not know, it says")
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


def _table_paths(
    traces: Sequence[Path], output: Sequence[Path] | None, suffixes: Sequence[str] | None
) -> dict[Path, list[Path]]:
    """Return trace -> paths of its tables: those of --output, else one of each suffix beside it.

    `suffixes` are those that all tables must have; None: any that a table can have. Raises ConfigError.
    """
    if output and len(traces) > 1:
        raise ConfigError(
            f"--output names the tables of one trace, got {len(traces)} traces; leave it out: tables lie beside them"
        )
    for path in output or []:
        check_suffix(path)
        if suffixes is not None and path.suffix not in suffixes:
            raise ConfigError(
                f"--card describes {suffixes[0]} tables, got {path}; name it {path.with_suffix(suffixes[0]).name}"
            )
    if output and suffixes is not None and len(output) > 1:
        raise ConfigError(f"--card describes one table of a trace, got {len(output)}; give --output once")
    tables = {trace: list(output or [trace.with_suffix(suffix) for suffix in suffixes or SUFFIXES]) for trace in traces}
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


def _check_card(tables: Sequence[Sequence[Path]], folders: Sequence[Path], overwrite: bool) -> Path:
    """Return the path of the card: in the folder that the tables and the named folders have in common.

    Raises OutputError or ConfigError where it cannot be written, for a README.md that is no card, and for a file name
    that hubs take for a pattern.
    """
    parents = [path.parent for paths in tables for path in paths]
    folder = Path(os.path.commonpath([path.resolve() for path in (*parents, *folders)]))
    for path in itertools.chain.from_iterable(tables):
        data_card.check_file_name(path.resolve().relative_to(folder))
    here = Path.cwd()
    readme = (folder.relative_to(here) if folder.is_relative_to(here) else folder) / data_card.NAME
    OutputFolder(readme.parent, overwrite).claim(OutputFile(readme))
    if readme.exists() and not data_card.is_card(readme):
        raise ConfigError(f"expected a data card of ours at {readme}, got another file; move it away")
    return readme


def _card_text(
    readme: Path, finished: Mapping[Path, Trace], tables: Mapping[Path, Sequence[Path]], licence: str
) -> str:
    """Return the card of the tables that are going to be written."""
    folder = readme.parent.resolve()
    described = []
    for trace, (path, *_) in tables.items():
        tokens, source, one = tokens_path(path), trace.resolve(), finished[trace]
        described.append(
            data_card.Table(
                one,
                PurePosixPath(path.resolve().relative_to(folder)),
                row_count(one),
                PurePosixPath(tokens.resolve().relative_to(folder)) if "prompt_token" in one.arrays else None,
                PurePosixPath(source.relative_to(folder)) if source.is_relative_to(folder) else None,
            )
        )
    return data_card.data_card(described, licence)

"""`perturbkv report`: traces as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from perturbkv.analyses.naming import counted
from perturbkv.cli import console
from perturbkv.cli.options import JsonOption
from perturbkv.cli.saving import claimed
from perturbkv.errors import ConfigError

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
    from perturbkv.storage.trace.export import check_other
    from perturbkv.storage.trace.trace_file import read_trace

    path = output or traces[0].parent / "report.html"
    for trace in traces:
        check_other(trace, path)
    if path.suffix.lower() not in ("", ".html", ".htm"):
        msg = f"expected a page's name to end in .html, got {path}; name it {path.with_suffix('.html').name}"
        raise ConfigError(msg)
    finished = [read_trace(trace) for trace in traces]
    with claimed(path, overwrite) as beside:
        made = make(finished, full=full)
        beside.write_bytes(made.html.encode())
    about = {"traces": [{"trace": one.source, "trace_digest": one.digest} for one in finished]}
    if as_json:
        sizes = {"bytes": made.bytes, "samples": made.samples, "configurations": made.configs}
        console.print_json({"file": str(path), **sizes, **about, "full": full})
        return
    size = (
        f"{made.bytes / _MILLION:.1f} MB, {counted(made.samples, 'sample')}, {counted(made.configs, 'configuration')}"
    )
    console.say(f"{path}: {size}; opens in any browser, without network")

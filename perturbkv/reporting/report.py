"""Reports of one trace or several: a page that displays itself in a notebook and is saved as one file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbkv.errors import ConfigError, OutputError, TraceError
from perturbkv.reporting.html import page
from perturbkv.storage.atomic_files import write_atomically
from perturbkv.storage.output import check_writable, real_path
from perturbkv.trace import Trace

_HEIGHT = 900
"""Height of the frame in a notebook, in pixels."""


@dataclass(frozen=True, repr=False)
class Report:
    """A page that opens in any browser, without network.

    Attributes:
        title: models and data sets.
        html: the whole page.
        samples: number of complete samples of all traces.
        configs: number of configurations of all traces.
    """

    title: str
    html: str
    samples: int
    configs: int

    @property
    def bytes(self) -> int:
        """The size of the file in bytes."""
        return len(self.html.encode())

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the page to a file, whole or not at all.

        Args:
            path: the file's path, .html where it has no suffix; folders are made.
            overwrite: whether an existing file may be replaced.

        Returns:
            The path.

        Raises:
            ConfigError: for another suffix than .html.
            OutputError: where nothing can be written, or a file exists.
        """
        target = check_path(page_path(Path(path)), overwrite)
        content = self.html.encode()
        write_atomically(target, lambda stream: stream.write(content))
        return target

    def __repr__(self) -> str:
        return f"Report of {self.title}: {self.bytes / 1e6:.1f} MB, {self.samples} samples; .save(path) writes it"

    def _repr_html_(self) -> str:
        """Return the page in a frame without access to the notebook and the network."""
        title, content = html.escape(f"Report of {self.title}"), html.escape(self.html)
        return (
            f'<iframe title="{title}" width="100%" height="{_HEIGHT}" sandbox="allow-scripts" '
            f'srcdoc="{content}"></iframe>'
        )


def report(
    traces: Trace | Sequence[Trace], path: str | Path | None = None, *, full: bool = False, overwrite: bool = False
) -> Report:
    """Return a report of a trace, or of several side by side.

    Args:
        traces: a trace or several.
        path: where the page is also written; .html where it has no suffix.
        full: whether everything is stored, however large the page becomes: values as they were measured, and the kept
            sets of every head.
        overwrite: whether a file at `path` may be replaced.

    Returns:
        The report, which displays itself in a notebook.

    Raises:
        ConfigError: for no trace, another object, a trace that is given twice, or a path that is no .html.
        TraceError: for a trace without a complete sample.
        OutputError: where the page cannot be written, or would replace a file.

    Example:
        >>> result = report(trace)
        >>> result.samples, result.configs
        (1, 2)
        >>> result.html.startswith("<!doctype html>")
        True
    """
    checked = (traces,) if isinstance(traces, Trace) else _as_tuple(traces)
    check_traces(checked)
    if isinstance(path, Trace):
        raise ConfigError(
            "expected the traces of one report in a list, got two arguments; write pk.report([first, second])"
        )
    if path is not None:
        if any(one.source and real_path(Path(one.source)) == real_path(Path(path)) for one in checked):
            raise OutputError(f"expected another file than the trace itself, got {path}; name another")
        check_path(page_path(Path(path)), overwrite)
    from perturbkv.reporting.payload import payload

    content = payload(checked, full=full)
    counts = [(int(one.ok.sum()), len(one.run.configs)) for one in checked]
    samples, configs = (sum(column) for column in zip(*counts, strict=True))
    result = Report(content.title, page(content), samples, configs)
    if path is not None:
        result.save(path, overwrite=overwrite)
    return result


def _as_tuple(traces: Any) -> tuple[Trace, ...]:
    """Return a trace, or a sequence of traces, as a tuple. Raises ConfigError for any other object."""
    items = tuple(traces) if isinstance(traces, Iterable) and not isinstance(traces, str | Path) else (traces,)
    for one in items:
        if not isinstance(one, Trace):
            raise ConfigError(
                f"expected a trace or a list of traces, got {type(one).__name__}; pk.read_trace(path) gives one"
            )
    return items


def check_traces(traces: Sequence[Trace]) -> None:
    """Raise ConfigError for no trace or a repeated trace, TraceError for a trace without a complete sample."""
    if not traces:
        raise ConfigError("expected a trace or several for a report, got none")
    for index, one in enumerate(traces):
        name = one.source or "the trace in memory"
        if any(one is other or (one.digest and one.digest == other.digest) for other in traces[:index]):
            raise ConfigError(f"expected every trace once, got {name} twice; leave one out")
        if not one.ok.any():
            raise TraceError(
                f"expected a trace with a complete sample, got {name}, whose samples all failed; measure it again"
            )


def page_path(path: Path) -> Path:
    """Return the page's path: a name without suffix gets .html. Raises ConfigError for another suffix than .html."""
    if path.is_dir():  # refused where it is to be written
        return path
    named = path if path.suffix or not path.name else path.with_name(f"{path.name}.html")
    if named.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"expected a page's name to end in .html, got {path}; name it {path.with_suffix('.html').name}"
        )
    return named


def check_path(path: Path, overwrite: bool) -> Path:
    """Return the path unchanged. Raises OutputError if it cannot be written, or an existing file would be replaced."""
    check_writable(path)
    if path.exists() and not overwrite:
        raise OutputError(f"expected no file at {path}, got one; overwrite=True replaces it")
    return path

"""Output files of commands: figures with the run's identity in their metadata, and JSON documents.

summary.json holds the numbers of every analysis of one trace, or of several analysed together. Each function that
returns an `OutputFile` says which files it may replace; `OutputFolder.claim` checks that before any work is done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perturbkv.cli import console
from perturbkv.errors import ConfigError, NarrowFigureError
from perturbkv.storage.atomic_files import atomic_path, clear_leftovers, write_atomically
from perturbkv.storage.output import Lock, OutputFile, OutputFolder
from perturbkv.user_files import FileKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity
    from perturbkv.analyses.result import Result
    from perturbkv.cli.options import FigureOptions
    from perturbkv.trace import Trace


_MADE_BY_US = {"png": b"Software\0perturbkv", "svg": b"<dc:title>perturbkv", "pdf": b"/Creator (perturbkv"}
"""The bytes that name this library in the metadata of a figure, by format."""


def figure_files(folder: Path, stems: Iterable[str], formats: Iterable[str]) -> list[OutputFile]:
    """Return the output files of figures, stem × format; they replace only figures of this library."""
    return [
        OutputFile(folder / f"{stem}.{suffix}", "a figure of ours", content_test(_MADE_BY_US[suffix]))
        for suffix in formats
        for stem in stems
    ]


def caption_files(folder: Path, stems: Iterable[str]) -> list[OutputFile]:
    """Return the output files of figures' captions, text and LaTeX; they replace only captions of this library."""
    return [
        OutputFile(folder / f"{stem}.caption{suffix}", "a caption of ours", _is_caption)
        for stem in stems
        for suffix in (".txt", ".tex")
    ]


def _is_caption(path: Path) -> bool:
    """Return whether a caption's LaTeX file, at the path or beside it, says that this library wrote it."""
    from perturbkv.captions import MADE_BY_US

    latex = path.with_suffix(".tex")
    return latex.exists() and latex.read_bytes().startswith(MADE_BY_US.encode())


def text_file(path: Path, begins: str) -> OutputFile:
    """Return the output file of a table; it replaces only a file that starts with the text `begins`."""
    return OutputFile(path, "a table of ours", lambda path: path.read_bytes().startswith(begins.encode()))


def content_test(mark: bytes) -> Callable[[Path], bool]:
    """Return a function that tests whether a file contains these bytes."""
    return lambda path: mark in path.read_bytes()


@contextmanager
def new_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary file's path for the block to write; afterwards the file is renamed to `path`.

    No other process writes `path` meanwhile. Raises the errors of `OutputFolder.claim` before the block.
    """
    with OutputFolder(path.parent, overwrite).claim(OutputFile(path), writer=path):
        clear_leftovers(path)
        with atomic_path(path) as temporary:
            yield temporary


def draw_figure(result: Result, stem: Path, look: FigureOptions, overwrite: bool, method: str = "plot") -> list[str]:
    """Draw a result's figure and save it as `save_figure` does, with its caption unless for a screen; return the paths.

    `method` names the result's method that draws it; `look` has width, style and formats. Raises ConfigError for a
    figure that has no room at its width, and the errors of `save_figure`.
    """
    try:
        figure = getattr(result, method)(look.width_mm, look.style)
    except NarrowFigureError as error:
        if look.columns == 1:
            raise ConfigError(
                f"--columns 1 is too narrow for figure {stem.name}: it needs {error.needed_mm} mm; write --columns 2"
            ) from None
        raise
    paths = save_figure(figure, result.identity, stem, look.formats, overwrite)
    if look.style != "screen":
        OutputFolder(stem.parent, overwrite).claim(*caption_files(stem.parent, [stem.name]))
        paths += map(str, figure.save_caption(stem))
    return paths


def save_figure(
    figure: Figure, identity: RunIdentity, stem: Path, formats: list[str], overwrite: bool = False
) -> list[str]:
    """Write a figure as `<stem>.<format>` in every format, with the run's identity as metadata; return the paths.

    Raises ConfigError where it would replace a file that is no figure of this library, unless `overwrite` is set.
    """
    from perturbkv.figures import style

    OutputFolder(stem.parent, overwrite).claim(*figure_files(stem.parent, [stem.name], formats))
    paths = []
    for suffix in formats:
        path = stem.with_name(f"{stem.name}.{suffix}")
        with style.use(), warnings.catch_warnings(), atomic_path(path) as temporary:
            warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in letters that the font lacks shows boxes
            figure.savefig(temporary, format=suffix, dpi=300, metadata=style.metadata(identity, suffix))
        paths.append(str(path))
    return paths


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON document with its schema version, atomically."""
    write_atomically(path, lambda stream: stream.write(console.as_json(document).encode()))


SUMMARY_NAME = "summary.json"
_SUMMARY = FileKind("a summary of ours", ConfigError, hint="move it away or give another --output")


@dataclass(frozen=True)
class Source:
    """The path of an analysed trace and the digest of its file, which is empty while the trace does not exist."""

    path: str
    digest: str = ""

    def is_among(self, others: Sequence[Source]) -> bool:
        """Return whether another source is the same file, or has the same content."""
        path = Path(self.path).resolve()
        return any(
            (self.digest and self.digest == other.digest) or Path(other.path).resolve() == path for other in others
        )


def summary_header(trace: Trace) -> dict[str, Any]:
    """Return the JSON fields on a trace common to all documents: path, digest, run, failed samples, bytes."""
    from perturbkv.analyses.identity import identity
    from perturbkv.analyses.json_values import run_object

    shares = identity(trace, trace.run.configs).byte_shares  # of the full cache's bytes; empty where none is quantised
    return {
        "trace": trace.source,
        "trace_digest": trace.digest,
        "run": run_object(trace.run),
        "failed": dict(trace.failures),
        "bytes_over_full": dict(zip(trace.run.labels(), shares, strict=True)) if shares else {},
    }


def summary_file(folder: Path, sources: Sequence[Source], name: str, options: Mapping[str, Any]) -> OutputFile:
    """Return the output file of a folder's summary, to which the analysis `name` of these traces is added.

    It replaces an earlier run of the analysis only if that had the same options, flags apart that it lacked.
    """

    def is_ours(path: Path) -> bool:
        """Return True; raise ConfigError for a summary of other traces, or of the analysis with other options."""
        document = _read_summary(path)
        if not all(source.is_among(sources) for source in _sources(document)):
            paths = ", ".join(source.path for source in _sources(document))
            raise ConfigError(
                f"{path} is of another trace, {paths}; give another --output, or --overwrite to replace it"
            )
        stored = document["analyses"].get(name, {}).get("asked")
        different = [] if stored is None else [key for key in options if stored.get(key) not in (options[key], False)]
        if different:
            before, now = (
                ", ".join(_option_text(key, values.get(key)) for key in different) for values in (stored, options)
            )
            raise ConfigError(
                f"{path} holds {name} {before}; this one is {now}; give another --output, or --overwrite to replace "
                "its numbers and figures"
            )
        return True

    return OutputFile(folder / SUMMARY_NAME, "a summary of ours", is_ours)


def _option_text(option: str, value: Any) -> str:
    """Return an option as text: 'with --max-kl 0.1', or 'without --max-kl'."""
    name = f"--{option.replace('_', '-')}"
    if value is None or value is False:
        return f"without {name}"
    return f"with {name}" if value is True else f"with {name} {value}"


def write_summary(path: Path, header: Mapping[str, Any], name: str, numbers: dict[str, Any], overwrite: bool) -> None:
    """Write the numbers of the analysis `name` into a summary; its analyses of other traces are dropped.

    Analyses that end at the same time wait for each other. Raises ConfigError for a file that is no summary, unless
    `overwrite` is set.
    """
    with Lock(path, wait=True):
        others: dict[str, Any] = {}
        if path.exists():
            with suppress(*[ConfigError] if overwrite else []):
                document = _read_summary(path)
                others = document["analyses"] if _digests(document) == _digests(header) else {}
        write_json(path, {**header, "analyses": {**others, name: numbers}})


def _sources(document: Mapping[str, Any]) -> list[Source]:
    """Return the traces of a summary as sources: the single trace of its fields, or the items of `traces`."""
    return [Source(trace["trace"], trace["trace_digest"]) for trace in document.get("traces", [document])]


def _digests(document: Mapping[str, Any]) -> list[str]:
    """Return the digests of the traces of a summary."""
    return [source.digest for source in _sources(document)]


def _read_summary(path: Path) -> dict[str, Any]:
    """Return a summary's JSON document. Raises ConfigError for a file that is no summary."""
    document = _SUMMARY.read_json(path)
    if not isinstance(document, dict) or not {"schema", "analyses"} <= document.keys():
        raise _SUMMARY.refusal(path, "another document")
    return document

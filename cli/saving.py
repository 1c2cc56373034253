"""Where files may be written, and figures, with the run's identity in the file's metadata.

summary.json: the numbers of every analysis that was asked of one trace, or of several that belong together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perturbkv.cli import console
from perturbkv.errors import ConfigError
from perturbkv.storage import output
from perturbkv.storage.atomic_files import clear_leftovers, write_whole, written_whole
from perturbkv.storage.output import Lock, check_kind, check_place
from perturbkv.user_files import FileKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity
    from perturbkv.trace import Trace


_MADE_BY_US = {"png": b"Software\0perturbkv", "svg": b"<dc:title>perturbkv", "pdf": b"/Creator (perturbkv"}
"""How the metadata of a figure name its maker."""


def free(path: Path, overwrite: bool) -> Path:
    """The path. Raises OutputError where nothing can be written, ConfigError for a file that may not be replaced."""
    check_place(path)
    if path.exists() and not overwrite:
        msg = f"expected no file at {path}, got one; --overwrite replaces it"
        raise ConfigError(msg)
    return path


def reachable(path: Path, wait: bool = False) -> Path:
    """The path. Raises OutputError where nothing can be written, and where another process writes it now."""
    check_place(path)
    output.check_free(path, wait)
    return path


@contextmanager
def claimed(path: Path, overwrite: bool) -> Iterator[Path]:
    """A new file beside `path`, which takes its place when the block has filled it; no other process writes it then.

    Raises what `free` raises, before the block.
    """
    check_place(path)
    with output.Lock(path, advice=output.WAIT_ALONE):
        clear_leftovers(free(path, overwrite))
        with written_whole(path) as beside:
            yield beside


def free_figures(folder: Path, stems: Iterable[str], formats: Iterable[str], overwrite: bool) -> None:
    """Raise ConfigError where a figure would replace a file that is none of ours; `overwrite` allows it."""
    for suffix in formats:
        for stem in stems:
            path = folder / f"{stem}.{suffix}"
            check_kind(path)
            if path.exists() and not overwrite and _MADE_BY_US[suffix] not in path.read_bytes():
                msg = f"expected a figure of ours at {path}, got another file; --overwrite replaces it"
                raise ConfigError(msg)


def free_text(path: Path, begins: str, overwrite: bool) -> Path:
    """The path. Raises ConfigError where a text would replace a file that is none of ours, which begin with `begins`.

    OutputError where nothing can be written.
    """
    check_place(path)
    if path.exists() and not overwrite and not path.read_bytes().startswith(begins.encode()):
        msg = f"expected a table of ours at {path}, got another file; --overwrite replaces it"
        raise ConfigError(msg)
    return path


def save_figure(
    figure: Figure, identity: RunIdentity, stem: Path, formats: list[str], overwrite: bool = False
) -> list[str]:
    """Write the figure as `stem.<format>` for each format; returns the paths. Raises what `free_figures` raises."""
    from perturbkv.figures import style

    free_figures(stem.parent, [stem.name], formats, overwrite)
    paths = []
    for suffix in formats:
        path = stem.with_name(f"{stem.name}.{suffix}")
        with style.use(), warnings.catch_warnings(), written_whole(path) as beside:
            warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in letters that the font lacks shows boxes
            figure.savefig(beside, format=suffix, dpi=300, metadata=style.metadata(identity, suffix))
        paths.append(str(path))
    return paths


SUMMARY_NAME = "summary.json"
_KIND = FileKind("a summary of ours", ConfigError, hint="move it away or give another --output")


@dataclass(frozen=True)
class Source:
    """A trace that numbers are of: its path, and the digest of its file, empty where it is not made yet."""

    path: str
    digest: str = ""

    def among(self, others: Sequence[Source]) -> bool:
        """Whether one of the others is the same file, or has the same content."""
        here = Path(self.path).resolve()
        return any((self.digest and self.digest == one.digest) or Path(one.path).resolve() == here for one in others)


def summary_header(trace: Trace) -> dict[str, Any]:
    """What every document says of a trace."""
    from perturbkv.analyses.json_values import run_object

    return {
        "trace": trace.source,
        "trace_digest": trace.digest,
        "run": run_object(trace.run),
        "failed": dict(trace.failures),
        "bytes_over_full": _stored(trace),
    }


def _stored(trace: Trace) -> dict[str, float]:
    """What every configuration takes in bytes, where some store few bits; nothing elsewhere."""
    from perturbkv.analyses.identity import identity

    shares = identity(trace, trace.run.configs).stored
    return dict(zip(trace.run.labels(), shares, strict=True)) if shares else {}


def check_summary_free(
    path: Path, sources: Sequence[Source], name: str, asked: Mapping[str, Any], overwrite: bool = False
) -> None:
    """Raise ConfigError where a summary holds numbers of other traces, or of another question to these.

    The same question replaces its old answer, and so does one that only adds to it.
    """
    check_place(path)
    if overwrite or not path.exists():
        return
    before = _read(path)
    if not all(one.among(sources) for one in _sources(before)):
        said = ", ".join(one.path for one in _sources(before))
        msg = f"{path} is of another trace, {said}; give another --output, or --overwrite to replace it"
        raise ConfigError(msg)
    old = before["analyses"].get(name, {}).get("asked")
    other = [option for option in asked if old is not None and old.get(option) not in (asked[option], False)]
    if old is not None and other:
        had, wanted = (", ".join(_said(option, of.get(option)) for option in other) for of in (old, asked))
        msg = (
            f"{path} holds {name} {had}; this one is {wanted}; give another --output, or --overwrite to replace its "
            "numbers and figures"
        )
        raise ConfigError(msg)


def _said(option: str, value: Any) -> str:
    """'with --max-kl 0.1', or 'without --max-kl'."""
    name = f"--{option.replace('_', '-')}"
    return (
        f"without {name}"
        if value is None or value is False
        else f"with {name}"
        if value is True
        else f"with {name} {value}"
    )


def write_summary(path: Path, told: Mapping[str, Any], name: str, numbers: dict[str, Any], overwrite: bool) -> None:
    """Put one analysis into a summary whose traces `told` names; those of the same traces that stand there stay.

    Analyses that end at the same time wait for each other. Raises ConfigError for a file that is no summary of ours,
    unless `overwrite` allows to replace it.
    """
    with Lock(path, wait=True):
        others: dict[str, Any] = {}
        if path.exists():
            with suppress(*[ConfigError] if overwrite else []):
                before = _read(path)
                same = _digests(before) == _digests(told)
                others = before["analyses"] if same else {}
        document = {**told, "analyses": {**others, name: numbers}}
        write_whole(path, lambda stream: stream.write(console.as_json(document).encode()))


def _sources(document: Mapping[str, Any]) -> list[Source]:
    return [Source(one["trace"], one["trace_digest"]) for one in document.get("traces", [document])]


def _digests(document: Mapping[str, Any]) -> list[str]:
    return [one.digest for one in _sources(document)]


def _read(path: Path) -> dict[str, Any]:
    """A summary of ours: its traces and their digests, its analyses. Raises ConfigError for any other file."""
    before = _KIND.read_json(path)
    told = before if _is_object(before) else {}
    traces = told.get("traces", [told])
    whole = isinstance(traces, list) and traces and all(map(_is_trace, traces))
    if not whole or not _is_object(told.get("analyses"), _is_analysis):
        raise _KIND.refusal(path, "another document")
    return {name: told[name] for name in ("traces", "trace", "trace_digest", "analyses") if name in told}


def _is_trace(value: Any) -> bool:
    return _is_object(value) and all(isinstance(value.get(name), str) for name in ("trace", "trace_digest"))


def _is_object(value: Any, holds: Callable[[Any], bool] = lambda value: True) -> bool:
    return isinstance(value, dict) and all(map(holds, value.values()))


def _is_analysis(value: Any) -> bool:
    return _is_object(value) and _is_object(value.get("asked", {}))

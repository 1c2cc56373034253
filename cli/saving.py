"""Where files may be written, and figures, with the run's identity in the file's metadata."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.errors import ConfigError
from perturbkv.storage import output
from perturbkv.storage.atomic_files import clear_leftovers, written_whole
from perturbkv.storage.places import check_kind, check_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity

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

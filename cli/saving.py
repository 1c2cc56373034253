"""Where files may be written, and figures, with the run's identity in the file's metadata."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity


def free(path: Path, overwrite: bool) -> Path:
    """The path. Raises ConfigError where a file is there already that may not be replaced."""
    if path.exists() and not overwrite:
        msg = f"expected no file at {path}, got one; --overwrite replaces it"
        raise ConfigError(msg)
    return path


def save_figure(figure: Figure, identity: RunIdentity, stem: Path, formats: list[str]) -> list[str]:
    """Write the figure as `stem.<format>` for each format; returns the paths."""
    from perturbkv.figures import style

    paths = []
    for suffix in formats:
        path = stem.with_name(f"{stem.name}.{suffix}")
        with style.use(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in letters that the font lacks shows boxes
            figure.savefig(path, format=suffix, dpi=300, metadata=style.metadata(identity, suffix))
        paths.append(str(path))
    return paths

"""Saving figures, with the run's identity in the file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli.options import check_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity

FORMATS = ("png", "svg", "pdf")
FormatOption = Annotated[
    list[str] | None, Option("--format", help="png, svg, pdf; repeatable. Default: png and svg.", show_default=False)
]


def save_figure(figure: Figure, identity: RunIdentity, stem: Path, formats: list[str]) -> list[str]:
    """Write the figure as `stem.<format>` for each format; returns the paths. Raises UnknownNameError."""
    from perturbkv.figures import style

    paths = []
    for suffix in formats:
        path = stem.with_name(f"{stem.name}.{check_choice('format', suffix, FORMATS)}")
        with style.use():
            figure.savefig(path, format=suffix, dpi=300, metadata=style.metadata(identity, suffix))
        paths.append(str(path))
    return paths

"""How the figures of an analysis come out: the options of every command that draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from perturbkv.cli.choices import check_choice
from perturbkv.errors import ConfigError

FORMATS = ("png", "svg", "pdf")
COLUMNS = (1, 2)
LOOK = "Analysis and figures"
"""Where the help lists them."""


@dataclass(frozen=True)
class FigureOptions:
    """Files and width of the figures."""

    figure_format: Annotated[
        list[str] | None,
        Option("--format", metavar="NAME", help="png, svg, pdf", rich_help_panel=LOOK, show_default="png, svg"),
    ] = None
    columns: Annotated[
        int, Option(metavar="N", help="Figures' width: 1 (84 mm) or 2 (174 mm) columns", rich_help_panel=LOOK)
    ] = 2

    def __post_init__(self) -> None:
        for suffix in self.formats:
            check_choice("format", suffix, FORMATS)
        if self.columns not in COLUMNS:
            msg = f"--columns must be 1 (84 mm) or 2 (174 mm), got {self.columns}"
            raise ConfigError(msg)

    @property
    def formats(self) -> list[str]:
        """Which files each figure becomes."""
        return self.figure_format or ["png", "svg"]

    @property
    def width_mm(self) -> int:
        """Printed width of the figures."""
        from perturbkv.figures import style

        return style.COLUMN_MM if self.columns == 1 else style.WIDE_MM

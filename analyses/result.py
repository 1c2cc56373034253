"""What every result can do: say itself in a sentence, show its tables, become JSON, a data frame and a figure."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perturbkv.display import Part, as_html, as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity


class Result(ABC):
    """What an analysis found. In a terminal and in a notebook it shows itself: conclusion, run, tables, notes.

    Attributes:
        identity: of the run: what stands in figures and files.
    """

    identity: RunIdentity

    @abstractmethod
    def conclusion(self) -> str:
        """What to conclude, in one sentence before any jargon, with its interval and n, or why nothing can be said."""

    @abstractmethod
    def tables(self) -> Sequence[Part]:
        """Its tables, passages of text, and lines between them."""

    def stored(self) -> Sequence[Part]:
        """What caches take in bytes, where some store few bits, or more than entries; what is read of what is held."""
        return [*self.identity.bytes_table(), *filter(None, [self.identity.about_read()])]

    @abstractmethod
    def notes(self) -> str:
        """What n, intervals, ties and columns mean: once, beneath all tables."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON holds it."""

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """A row of plain values per smallest thing that was measured: what `to_frame` holds."""

    def plot(self, width_mm: float = 174) -> Figure:
        """The figure that the command draws, at its printed width: 174 mm, or 84 for one column of a journal."""
        return self._drawn(type(self).__name__, width_mm)

    def to_frame(self) -> Any:
        """A `pandas.DataFrame` of `records`."""
        import pandas as pd

        return pd.DataFrame(self.records())

    def _drawn(self, name: str, width_mm: float) -> Figure:
        """The figure of a name in `perturbkv.figures.FIGURES`, reached by name: figures lie above and know results."""
        drawn: Figure = importlib.import_module("perturbkv.figures").draw(name, self, width_mm)
        return drawn

    def __repr__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _parts(self) -> list[Part]:
        return [self.conclusion(), self.identity.lines()[0], *self.tables(), *self.stored(), self.notes()]

"""What every result can do: say itself in a sentence, show its tables, become JSON, a data frame and a figure.

Results that belong together: a sequence of them, told one after the other, the notes once.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perturbkv.analyses.identity import RunIdentity
from perturbkv.display import Part, as_html, as_text
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


Member = TypeVar("Member")
One = TypeVar("One", bound=Result)


class Sequenced(Generic[Member]):
    """A sequence of its members: `len`, iteration and indexing give them."""

    members: tuple[Member, ...]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __getitem__(self, place: int) -> Member:
        return self.members[place]


@dataclass(frozen=True, repr=False)
class Several(Sequenced[One], Result):
    """Several results of one question, each of which draws itself.

    Attributes:
        members: the results.
        identity: of the run, with every configuration shown.
    """

    members: tuple[One, ...]
    identity: RunIdentity

    def conclusion(self) -> str:
        """A sentence of each, on a line of its own."""
        return "\n".join(one.conclusion() for one in self.members)

    def tables(self) -> Sequence[Part]:
        """The tables of each."""
        return [part for one in self.members for part in one.tables()]

    def notes(self) -> str:
        """What stands beneath all of them, each line once."""
        return once(self.members)

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, under one key, as `docs/json.md` says."""

    def records(self) -> list[dict[str, Any]]:
        """The rows of each."""
        return [row for one in self.members for row in one.records()]

    def plot(self, width_mm: float = 174) -> Figure:
        """The figure of the only one. Raises ConfigError where there are several: each has a figure of its own."""
        if len(self.members) != 1:
            msg = f"expected one series to draw, got {len(self.members)}; draw them singly: result[0].plot()"
            raise ConfigError(msg)
        return self.members[0].plot(width_mm)


def once(results: Sequence[Result]) -> str:
    """The notes of several results, each line once."""
    return "\n".join(dict.fromkeys(line for one in results for line in one.notes().splitlines()))

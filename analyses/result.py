"""Results: a sentence to conclude, a table of declared columns, notes; JSON, frames and figures follow from them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from perturbkv.analyses import columns, text
from perturbkv.analyses.columns import Line, Record
from perturbkv.analyses.identity import RunIdentity
from perturbkv.display import Part, Table, as_html, as_text
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MOST_NOTES = 3


class Result(Record, ABC):
    """An analysis' numbers. In a terminal and in a notebook it shows itself: conclusion, run, table, notes.

    A result is a frozen dataclass that declares its columns (`perturbkv.analyses.columns`): `to_dict`, the JSON
    reference, the table and `explain` follow from them.

    Attributes:
        identity: of the run: what stands in figures and files.
        KEY: the key under which its command's document holds it; empty: its keys are the document's own.
        SHOWN: names of the columns that the table shows, beside the lines' names; at most six.
        FIRST: heading of the column that holds the lines' names.
        DOCUMENT: heading in the JSON reference of the keys that the command adds to the result's own.
    """

    KEY: ClassVar[str] = ""
    SHOWN: ClassVar[tuple[str, ...]] = ()
    DOCUMENT: ClassVar[str] = "every analysis"
    FIRST: ClassVar[str] = "configuration"

    identity: RunIdentity

    @abstractmethod
    def conclusion(self) -> str:
        """Return what to conclude, in one sentence with interval and n, or why nothing can be said."""

    def title(self) -> str:
        """Return what the table shows, in a few words."""
        return ""

    def lines(self) -> Sequence[Line]:
        """Return the lines of the table."""
        return ()

    def tables(self) -> Sequence[Part]:
        """Return the table, until every result has one."""
        return [self.table()]

    def caveats(self) -> Sequence[str]:
        """Return at most two short sentences without which the table would be misread."""
        return ()

    def details(self) -> Sequence[Part]:
        """Return further tables and lines, which `--explain` shows."""
        return ()

    def interval_note(self) -> str:
        """Return the line on n and intervals."""
        return text.intervals_note(self.identity.samples)

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """Return a row of plain values per smallest thing that was measured: what `to_frame` holds."""

    def shown_columns(self) -> Sequence[str]:
        """Return the names of the table's columns; those in `SHOWN` where lines are of one sort."""
        return self.SHOWN

    def table(self) -> Table:
        """Return the table of the shown columns, without those that hold nothing."""
        return columns.table(self.title(), self.lines(), self.shown_columns(), self.FIRST)

    def notes(self) -> str:
        """Return at most three lines beneath the table: n and intervals, then the caveats."""
        return "\n".join(self._remarks()[:_MOST_NOTES])

    def explain(self) -> list[Part]:
        """Return what every column of the table means, and the further tables."""
        records = [record for line in self.lines() for record in line.records]
        declared = columns.declarations(records, self.shown_columns())
        more = ["\n".join(self._remarks()[_MOST_NOTES:])] if len(self._remarks()) > _MOST_NOTES else []
        return [columns.explanation(list(declared.values())), *more, *self.details(), *self.identity.bytes_table()]

    def _remarks(self) -> list[str]:
        """Return all that could stand beneath the table, what matters most first."""
        return list(filter(None, [self.interval_note(), self.identity.about_read(), *self.caveats()]))

    def plot(self, width_mm: float = 174) -> Figure:
        """Return the figure that the command draws, at its printed width: 174 mm, or 84 for one column of a journal."""
        return self._drawn(type(self).__name__, width_mm)

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` of `records`."""
        import pandas as pd

        return pd.DataFrame(self.records())

    def _drawn(self, name: str, width_mm: float) -> Figure:
        """Return the figure of a name in `perturbkv.figures.FIGURES`: figures lie above and know results."""
        drawn: Figure = importlib.import_module("perturbkv.figures").draw(name, self, width_mm)
        return drawn

    def __repr__(self) -> str:
        return as_text(self.screen())

    def _repr_html_(self) -> str:
        return as_html(self.screen())

    def screen(self) -> list[Part]:
        """Return the screen: the conclusion, the run in one line, the table, the notes."""
        return [self.conclusion(), self.identity.lines()[0], *self.tables(), self.notes()]


Member = TypeVar("Member")
MemberResult = TypeVar("MemberResult", bound=Result)


class Sequenced(Generic[Member]):
    """A sequence of its members: `len`, iteration and indexing give them."""

    members: tuple[Member, ...]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __getitem__(self, index: int) -> Member:
        return self.members[index]


@dataclass(frozen=True, repr=False)
class Several(Sequenced[MemberResult], Result):
    """Several results of one question in one table, each of which draws itself.

    Attributes:
        members: the results.
        identity: of the run, with every configuration shown.
    """

    members: tuple[MemberResult, ...]
    identity: RunIdentity

    def conclusion(self) -> str:
        """Return the sentence of each, on a line of its own."""
        return "\n".join(member.conclusion() for member in self.members)

    def title(self) -> str:
        """Return the title that they share."""
        return self.members[0].title()

    def lines(self) -> Sequence[Line]:
        """Return the lines of each."""
        return [line for member in self.members for line in member.lines()]

    def table(self) -> Table:
        """Return one table of all lines."""
        first = self.members[0]
        return columns.table(self.title(), self.lines(), first.SHOWN, first.FIRST)

    def caveats(self) -> Sequence[str]:
        """Return the caveats of all, each once."""
        return list(dict.fromkeys(caveat for member in self.members for caveat in member.caveats()))

    def details(self) -> Sequence[Part]:
        """Return the further tables of each."""
        return [part for member in self.members for part in member.details()]

    def interval_note(self) -> str:
        """Return the first one's line on n and intervals."""
        return self.members[0].interval_note()

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of each."""
        return [row for member in self.members for row in member.records()]

    def plot(self, width_mm: float = 174) -> Figure:
        """Return the figure of the only one. Raises ConfigError where there are several: each has its own."""
        if len(self.members) != 1:
            msg = f"expected one series to draw, got {len(self.members)}; draw them singly: result[0].plot()"
            raise ConfigError(msg)
        return self.members[0].plot(width_mm)


def once(results: Sequence[Result]) -> str:
    """Return the notes of several results, each line once."""
    return "\n".join(dict.fromkeys(line for one in results for line in one.notes().splitlines()))

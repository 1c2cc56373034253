"""Results: a sentence to conclude, a table of declared columns, notes; JSON, frames and figures follow from them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from perturbkv.analyses import columns, text
from perturbkv.analyses.columns import Line, Record
from perturbkv.analyses.conclusions import Claim, conclude
from perturbkv.analyses.identity import RunIdentity
from perturbkv.display import Part, Table, as_html, as_text
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.captions import CaptionedFigure


_MOST_NOTES = 3
Member = TypeVar("Member")


class Result(Record, ABC):
    """The numbers of an analysis. Terminals and notebooks display its conclusion, run, table and notes.

    A result is a frozen dataclass that declares its columns (`perturbkv.analyses.columns`): `to_dict`, the JSON
    reference, the table and `explain` follow from them. The attributes in capitals are keywords of a subclass:
    `class Horizon(Result, section="horizon", rows="steps")`.

    Attributes:
        identity: of the run, as figures and files show it.
        KEY: key of the result in its command's JSON document; empty where the document has the result's own keys.
        SHOWN: names of the table's columns after the first, at most six.
        FIRST: heading of the first column, the lines' names.
        ROWS: what `records` has a row for, where that is finer than the table: `heads`, `samples`.
        HAS_SHARES, HAS_MEDIANS: whether the table holds shares of samples, or medians over samples.
        SCOPE: what the claims are of, beside the number of samples.
        DOCUMENT: heading in the JSON reference of the keys that the command adds to the result's own.
    """

    KEY: ClassVar[str] = ""
    SHOWN: ClassVar[tuple[str, ...]] = ()
    DOCUMENT: ClassVar[str] = "every analysis"
    SCOPE: ClassVar[str] = ""
    FIRST: ClassVar[str] = "configuration"
    ROWS: ClassVar[str] = ""
    HAS_SHARES: ClassVar[bool] = False
    HAS_MEDIANS: ClassVar[bool] = False

    identity: RunIdentity

    def claims(self) -> Sequence[Claim]:
        """Return the claims, the answer to the question first; none for an audit, which has its own conclusion."""
        return ()

    def scope(self) -> Sequence[str]:
        """Return what the claims are of: settings, steps, and the number of samples."""
        return list(filter(None, [self.SCOPE, self.identity.steps, text.sample_note(self.identity.samples)]))

    def conclusion(self) -> str:
        """Return the claims as one sentence, with what they are of."""
        return conclude(self.claims(), self.scope())

    def _with_names(self, members: Sequence[Member]) -> list[tuple[str, Member]]:
        """Return members, one per configuration of the identity, with the configurations' names."""
        return list(zip(self.identity.names, members, strict=True))

    def title(self) -> str:
        """Return the table's title, a few words."""
        return ""

    def lines(self) -> Sequence[Line]:
        """Return the table's lines, each a name with its records."""
        return ()

    def body(self) -> list[Part]:
        """Return the displayed parts between run and notes: the table, if it has lines."""
        return [self.table()] if self.lines() else []

    def caveats(self) -> Sequence[str]:
        """Return at most two short sentences that readers of the table need."""
        return ()

    def details(self) -> Sequence[Part]:
        """Return further tables and lines for `--explain`."""
        return ()

    def interval_note(self) -> str:
        """Return the note on n and intervals."""
        return text.intervals_note(self.identity.samples, exact=self.HAS_SHARES, medians=self.HAS_MEDIANS)

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """Return the rows of `to_frame(ROWS)`, plain values at the finest level that was measured."""

    def shown_columns(self) -> Sequence[str]:
        """Return the names of the table's columns after the first."""
        return self.SHOWN

    def table(self) -> Table:
        """Return the table of the shown columns, without empty ones."""
        return columns.table(self.title(), self.lines(), self.shown_columns(), self.FIRST)

    def notes(self) -> str:
        """Return what the first step alone gives, then at most three lines: n and intervals, then the caveats."""
        first = [self.identity.first_step] if self.identity.first_step else []
        return "\n".join([*first, *self._remarks()[:_MOST_NOTES]])

    def explain(self) -> list[Part]:
        """Return what `--explain` adds: the meaning of every column, the notes not shown, and further tables."""
        records = [record for line in self.lines() for record in line.records]
        declared = columns.declarations(records, self.shown_columns())
        more = ["\n".join(self._remarks()[_MOST_NOTES:])] if len(self._remarks()) > _MOST_NOTES else []
        return [columns.explanation(list(declared.values())), *more, *self.details(), *self.identity.bytes_table()]

    def _remarks(self) -> list[str]:
        """Return the notes under the table, most important first."""
        samples = " ".join(filter(None, [self.interval_note(), self.identity.whole_caches_note()]))
        return list(filter(None, [samples, self.identity.cache_share_note(), *self.caveats()]))

    def plot(self, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
        """Return the result's figure, a matplotlib `Figure` with an attribute `caption`.

        Args:
            width_mm: printed width in mm: 174, or 84 for one column of a journal; None: 174.
            style: "screen", with notes in the picture; "paper", low and with its notes in the caption; "talk", a slide,
                whose text is large where it fills one.

        Raises:
            UnknownNameError: an unknown style.
            ConfigError: a width that is too small; the message says which one is large enough.
        """
        return self._draw(type(self).__name__, width_mm, style)

    def to_frame(self, rows: str = "") -> Any:
        """Return a `pandas.DataFrame`: the table as it is shown, with intervals and n, or its finest rows.

        Args:
            rows: what has a row each: nothing for the table's lines, or the result's own kind, such as `heads`.

        Raises ConfigError for another kind.
        """
        import pandas as pd

        if rows not in ("", self.ROWS):
            own = f" or '{self.ROWS}'" if self.ROWS else ""
            raise ConfigError(f"expected rows of {type(self).__name__} to be ''{own}, got '{rows}'")
        if rows == self.ROWS:
            return pd.DataFrame(self.records())
        shown = columns.frame_rows(self.lines(), self.shown_columns(), self.FIRST)
        return pd.DataFrame([{**row, "n": self.identity.samples} for row in shown])

    def _draw(self, name: str, width_mm: float | None, style: str) -> CaptionedFigure:
        """Return this result's figure called `name` in `perturbkv.figures.FIGURES`, imported on first use."""
        figure: CaptionedFigure = importlib.import_module("perturbkv.figures").draw(name, self, width_mm, style)
        return figure

    def __repr__(self) -> str:
        return as_text(self.screen())

    def _repr_html_(self) -> str:
        """Return the displayed parts as HTML, for a notebook."""
        return as_html(self.screen())

    def screen(self) -> list[Part]:
        """Return the displayed parts: the conclusion, the run in one line, the table, the notes."""
        return [self.conclusion(), self.identity.run_line(), *self.body(), self.notes()]


AnyResult = TypeVar("AnyResult", bound=Result)


def add_first_step(result: AnyResult, step: int | None, analyse_first_step: Callable[[], AnyResult]) -> AnyResult:
    """Return a result of means over several steps with its conclusion at the first step alone.

    `analyse_first_step` returns the same result of that step. A result of one `step` is returned as it is.
    """
    if step is not None:
        return result
    alone = analyse_first_step()
    first = conclude(alone.claims()[:1], [term for term in alone.scope() if term not in result.scope()])
    record: Any = result
    beside: AnyResult = replace(record, identity=replace(result.identity, first_step=first))
    return beside


MemberResult = TypeVar("MemberResult", bound=Result)


class MemberSequence(Generic[Member]):
    """A sequence of members: `len`, iteration and indexing refer to `members`."""

    members: tuple[Member, ...]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __getitem__(self, index: int) -> Member:
        return self.members[index]


@dataclass(frozen=True, repr=False)
class ResultGroup(MemberSequence[MemberResult], Result):
    """Results of one question in one table, each with a figure of its own.

    Attributes:
        members: the results.
        identity: of the run, with every configuration shown.
    """

    members: tuple[MemberResult, ...]
    identity: RunIdentity

    def title(self) -> str:
        """Return the title of the first member."""
        return self.members[0].title()

    def lines(self) -> Sequence[Line]:
        """Return the lines of all members."""
        return [line for member in self.members for line in member.lines()]

    def shown_columns(self) -> Sequence[str]:
        """Return the names of the first member's columns."""
        return self.members[0].shown_columns()

    def caveats(self) -> Sequence[str]:
        """Return the caveats of all members, each once."""
        return list(dict.fromkeys(caveat for member in self.members for caveat in member.caveats()))

    def details(self) -> Sequence[Part]:
        """Return the further tables of all members."""
        return [part for member in self.members for part in member.details()]

    def interval_note(self) -> str:
        """Return the first member's note on n and intervals."""
        return self.members[0].interval_note()

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of all members."""
        return [row for member in self.members for row in member.records()]

    def plot(self, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
        """Return the only member's figure. Raises ConfigError for several members."""
        if len(self.members) != 1:
            raise ConfigError(
                f"expected one series to draw, got {len(self.members)}; draw them singly: result[0].plot()"
            )
        return self.members[0].plot(width_mm, style)

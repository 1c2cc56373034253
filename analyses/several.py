"""Results that belong together: a sequence of them, told one after the other, the notes once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.result import Result
from perturbkv.display import Part
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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

"""What a scheduler asks of workers, whatever carries orders to them and answers back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perturbkv.engines.task import Task
from perturbkv.engines.worker import Place, Reply


@dataclass(frozen=True)
class Gone:
    """A worker that ended; `how` in words, such as `signal 9`."""

    how: str


@dataclass(frozen=True)
class Work:
    """The items of one run.

    Attributes:
        task: what is done with each.
        sizes: of every item, in any unit.
        item: makes what is sent, when it is sent.
        done: gets an item's result.
        failed: gets an item that was given up, and why.
    """

    task: Task
    sizes: Sequence[int]
    item: Callable[[int], Any]
    done: Callable[[int, Any], None]
    failed: Callable[[int, str], None]


class Crew(Protocol):
    """Workers at numbered places, none of them there until it is hired.

    Every order is answered by one `Reply`, the first by `hire`'s own; a worker that ends answers with `Gone`.
    """

    @property
    def places(self) -> Sequence[Place]:
        """Where the workers compute."""

    def hire(self, place: int) -> None:
        """Start the worker of a place, where none is."""

    def begin(self, place: int, task: Task) -> None:
        """Have a worker prepare a task."""

    def do(self, place: int, item: Any) -> None:
        """Have a worker do an item of its task."""

    def heard(self, seconds: float) -> list[tuple[int, Reply | Gone]]:
        """Wait at most so long for the next answers; each worker that ended is told of once."""

    def dismiss(self, place: int) -> None:
        """End the worker of a place, at once, whatever it does; nothing of it is heard any more."""

    def close(self) -> None:
        """End all workers, within seconds."""

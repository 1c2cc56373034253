"""Which items of a run wait for a worker: each gets two attempts and no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MOST = 2


class Waiting:
    """The items that wait, those of the largest size first; one whose worker ended comes once more, last.

    Args:
        sizes: of the items, by their places; what takes longest begins first, so that nobody waits for it last.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._waiting = deque(sorted(range(len(sizes)), key=lambda place: -sizes[place]))
        self._ends: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> int:
        """The next item's place."""
        return self._waiting.popleft()

    def ended(self, item: int, how: str) -> str | None:
        """An attempt ended its worker: None where another one follows, else why the item is given up."""
        ends = self._ends.setdefault(item, [])
        ends.append(how)
        if len(ends) < MOST:
            self._waiting.append(item)
            return None
        told = how if len(set(ends)) == 1 else ", then ".join(ends)
        del self._ends[item]
        return f"its worker ended twice ({told})"

    def done(self, item: int) -> None:
        """The item needs no attempt any more."""
        self._ends.pop(item, None)

"""Every `adjective-noun`, sorted and each once, without holding them: RULER draws its keys from six million."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import overload


class Pairs(Sequence[str]):
    """What `sorted({f"{first}-{second}" for first in firsts for second in seconds})` holds, in its order.

    Pairs of one first word stand together, unless another first word goes on behind its hyphen (`well`, `well-kept`):
    such first words are one group, whose pairs are made and sorted when it is looked into.
    """

    def __init__(self, firsts: Iterable[str], seconds: Iterable[str]) -> None:
        self._seconds = sorted(set(seconds))
        self._groups: list[list[str]] = []
        for head in sorted(f"{first}-" for first in set(firsts)):
            if self._groups and head.startswith(self._groups[-1][0]):
                self._groups[-1].append(head)
            else:
                self._groups.append([head])
        sizes = (len(self._seconds) if len(group) == 1 else len(self._sorted(group)) for group in self._groups)
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        found = range(len(self))[place]
        group = bisect.bisect_right(self._ends, found)
        within = found - (self._ends[group - 1] if group else 0)
        heads = self._groups[group]
        return heads[0] + self._seconds[within] if len(heads) == 1 else self._sorted(heads)[within]

    def _sorted(self, heads: Sequence[str]) -> list[str]:
        return sorted({head + second for head in heads for second in self._seconds})

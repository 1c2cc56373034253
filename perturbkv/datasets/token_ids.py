"""A prompt's token ids in four bytes each, for whoever reads them a tuple of Python's numbers, which take 36."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


class TokenIds(Sequence[int]):
    """Equal to a tuple of the same numbers, with its hash and its words; a part of it is a tuple.

    Raises TypeError for what are no whole numbers, OverflowError for those beyond 64 bits.
    """

    __slots__ = ("_held",)

    def __init__(self, ids: Iterable[int]) -> None:
        held = np.array(ids if isinstance(ids, TokenIds) else array("q", ids))
        narrow = held.astype(np.int32)
        self._held: NDArray[Any] = narrow if np.array_equal(narrow, held) else held

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...

    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        found = self._held[place].tolist()
        return tuple(found) if isinstance(place, slice) else int(found)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        return iter(self._held.tolist())

    def __add__(self, behind: Iterable[int]) -> tuple[int, ...]:
        return (*self, *behind)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return np.array_equal(self._held, other._held)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._held, dtype=dtype)

    def __reduce__(self) -> tuple[type[TokenIds], tuple[array[int]]]:
        return TokenIds, (array("i" if self._held.dtype == np.int32 else "q", self._held.tobytes()),)

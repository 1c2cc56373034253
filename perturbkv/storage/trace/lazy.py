"""Arrays of which some are read only when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LazyArrays(Mapping[str, NDArray[np.generic]]):
    """Name -> array: `held` at once, `later` through `read`, which is called once per name."""

    def __init__(
        self, held: Mapping[str, NDArray[Any]], later: Sequence[str], read: Callable[[str], NDArray[Any]]
    ) -> None:
        self._held, self._later, self._read = dict(held), tuple(later), read

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        if name in self._later and name not in self._held:
            self._held[name] = self._read(name)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._held, *self._later]))

    def __len__(self) -> int:
        return len(set(self._held) | set(self._later))

"""Which of two configurations' kept sets each head has: a mixture of both. No torch here."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

_LAYER = re.compile(r"[bt]|\([01]+\)")
_WORDS = {False: "b", True: "t"}


@dataclass(frozen=True)
class Mixture:
    """A kept set for every head, the baseline's or the treatment's.

    Attributes:
        layers: per measured layer and kept set (query head, key/value head), True where it is the treatment's.
    """

    layers: tuple[tuple[bool, ...], ...]

    @classmethod
    def of_layers(cls, layers: int, heads: int, treated: Collection[int]) -> Self:
        """The treatment's kept sets in all heads of these layers, by their places, the baseline's elsewhere."""
        return cls(tuple((layer in treated,) * heads for layer in range(layers)))

    @classmethod
    def of_cells(cls, layers: int, heads: int, treated: Collection[tuple[int, int]]) -> Self:
        """The treatment's kept sets in these (layer, head), the baseline's elsewhere."""
        return cls(tuple(tuple((layer, head) in treated for head in range(heads)) for layer in range(layers)))

    @classmethod
    def parse(cls, text: str, heads: int) -> Self:
        """What `str` wrote. Raises ValueError for any other text."""
        words = _LAYER.findall(text)
        layers = tuple(tuple(one == "1" for one in word[1:-1]) or (word == "t",) * heads for word in words)
        if "".join(words) != text or any(len(layer) != heads for layer in layers):
            msg = f"expected a letter or {heads} bits for every layer, got '{text}'"
            raise ValueError(msg)
        return cls(layers)

    def __str__(self) -> str:
        """A letter for each layer, `b` or `t`; one whose heads differ is `(0110)`, 1 where they are the treatment's."""
        return "".join(
            _WORDS[layer[0]] if len(set(layer)) == 1 else f"({''.join(map(str, map(int, layer)))})"
            for layer in self.layers
        )

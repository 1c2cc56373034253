"""Facts of a decoder's attention: what `proof` finds and the adapter reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FULL, SLIDING, CHUNKED, RECURRENT, MEMORYLESS = "full", "sliding", "chunked", "recurrent", "memoryless"


class RefusedError(Exception):
    """A decoder whose attention is not what the formulas are of; `check` is the check that failed, `layer` where."""

    def __init__(self, check: str, seen: str, layer: int | None = None) -> None:
        super().__init__(seen)
        self.check: str = check
        self.layer: int | None = layer

    def message(self, name: str) -> str:
        """Return what was seen of the model `name`, in one line."""
        where = f"model '{name}'" if self.layer is None else f"layer {self.layer} of model '{name}'"
        so = "" if self.check in ("run", "twin") else "; an eviction study would misread it"
        return f"{where} {self}{so} (proof: {self.check})"


@dataclass(frozen=True)
class LayerFacts:
    """The attention of one decoder layer, and what else it remembers.

    Attributes:
        attention: path of its attention module, from the layer.
        projection: path of the map that receives the heads' outputs, from the attention module.
        kind: `full`, `sliding` or `chunked`: which entries a query sees; `recurrent` or `memoryless` without attention.
        window: number of entries of a window or chunk; None for other kinds.
        heads, kv_heads: numbers of query heads and of key/value heads.
        d_key, d_value: widths of a key and of a value.
        scale: factor on the logits.
        cap: soft cap of the logits; None without one.
        sinks: name of the attention's parameter with the heads' sink logits; empty without sinks.
        has_gate: whether the heads' outputs are multiplied by a gate before the projection receives them.
        state: numbers in the recurrent state of one text, beside attention or in its place; 0 without one.
        latent: numbers that the cache holds of a token, where attention reads keys and values which the layer makes of
            these for all heads; 0 where it reads what the cache holds.
        owner: index of the earlier layer whose cache its attention reads; None where it fills a cache of its own.
    """

    attention: str
    projection: str
    kind: str
    window: int | None
    heads: int
    kv_heads: int
    d_key: int
    d_value: int
    scale: float
    cap: float | None = None
    sinks: str = ""
    has_gate: bool = False
    state: int = 0
    latent: int = 0
    owner: int | None = None

    @classmethod
    def without_attention(cls, state: int) -> LayerFacts:
        """Return the facts of a layer that has no attention, and a recurrent state of so many numbers."""
        return cls("", "", RECURRENT if state else MEMORYLESS, None, 0, 0, 0, 0, 0.0, state=state)

    @property
    def attends(self) -> bool:
        """True if the layer has attention."""
        return self.kind not in (RECURRENT, MEMORYLESS)


@dataclass(frozen=True)
class Rotary:
    """The module that gives the rotations of positions: its path, and the arguments after its input and positions."""

    path: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The attention of a decoder.

    Attributes:
        path: path of the list of decoder layers, from the model.
        layers: facts of every layer.
        rotary: rotations of the measured layers' keys and queries, the first components by pairs half the rotary width
            apart; without a path where they have none or others.
    """

    path: str
    layers: tuple[LayerFacts, ...]
    rotary: Rotary

    def holder(self, index: int) -> int:
        """Return the layer whose cache a layer's attention reads: its own index, or that of the cache's owner."""
        owner = self.layers[index].owner
        return index if owner is None else owner


def measured_layers(layers: Sequence[LayerFacts]) -> tuple[int, ...]:
    """Return the indices of the measured layers: those that see the whole prompt, or all where none does."""
    full = tuple(index for index, layer in enumerate(layers) if layer.kind == FULL)
    return full or tuple(index for index, layer in enumerate(layers) if layer.attends)

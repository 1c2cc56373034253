"""What is known of one layer before anything in it is ranked: its scores and norms, and what stays at both ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError
from perturbkv.selection.resolved_config import Ends, ResolvedConfig
from perturbkv.theory import WORK

Score = Float[Tensor, "kept_head prefix"]
OfModel = Callable[[ResolvedConfig, Ends, Hashable, Callable[[Iterable[Score]], Any]], Any]


@dataclass(frozen=True)
class LayerStatistics:
    """What selections may look at in one layer; prefix = n − window entries.

    Attributes:
        accumulated: the unpooled score, Ā of SnapKV: a row per query head, or per key/value head.
        norms: ν per query head.
        euclidean: ‖V_i W_O^h‖₂ per query head; None where no configuration looks at it.
        kv_heads: number of key/value heads.
        layer, layers: which of how many.
        sample: the sample's id, for the seed of `random`.
        realised: A of the first decoding query per query head; None where it is not known.
        head_scores: given scores of all query heads of the model, (layer, head); empty where there are none.
        valid: False where a kept set has no entry, as ragged caches that are compressed again are padded on the left.
        first_stage: what a policy's own stage 1 ranks by, unpooled; rows of its own. None where none has one.
        of_model: makes something of the competing scores of all layers for a configuration, once for each key.
    """

    accumulated: Float[Tensor, "rows prefix"]
    norms: Float[Tensor, "head prefix"]
    kv_heads: int
    layer: int
    layers: int
    sample: str
    realised: Float[Tensor, "head prefix"] | None = None
    head_scores: Sequence[Sequence[float]] = ()
    valid: Bool[Tensor, "kept_head prefix"] | None = None
    first_stage: Float[Tensor, "first_rows prefix"] | None = None
    of_model: OfModel | None = None
    euclidean: Float[Tensor, "head prefix"] | None = None

    @property
    def prefix(self) -> int:
        """Entries before the window."""
        return self.accumulated.shape[1]

    @property
    def hindsight(self) -> Float[Tensor, "head prefix"]:
        """A of the first decoding query. Raises ConfigError where it is not known."""
        if self.realised is None:
            msg = "a selection by hindsight looks at the next query, which is not known here; choose another selection"
            raise ConfigError(msg)
        return self.realised

    def norms_of(self, config: EvictionConfig) -> Float[Tensor, "head prefix"]:
        """ν in the norm that the selection looks at, float64. Raises ConfigError where it was not computed."""
        if not config.euclidean:
            return self.norms.to(WORK)
        if self.euclidean is None:
            msg = f"selection '{config.selection}' looks at L2 norms, which are not known here"
            raise ConfigError(msg)
        return self.euclidean.to(WORK)

    @property
    def begin(self) -> Int[Tensor, " #kept_head"]:
        """Place of each kept set's first entry."""
        if self.valid is None:
            return torch.zeros(1, dtype=torch.int64, device=self.norms.device)
        return self.prefix - self.valid.sum(dim=-1)


def at_ends(place: Tensor, begin: Tensor, end: int, first: Tensor | int, recent: Tensor | int) -> Tensor:
    """Whether a place is one of the `first` ones from `begin` on, or of the `recent` ones before `end`."""
    return ((place >= begin) & (place < begin + first)) | (place >= end - recent)

"""The scores and norms of one layer that selections rank by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.devices import move_to_first_device
from perturbkv.errors import ConfigError
from perturbkv.selection.resolved_config import PrefixCounts, ResolvedConfig
from perturbkv.theory import WORK

Score = Float[Tensor, "kept_head prefix"]
ModelWide = Callable[[ResolvedConfig, PrefixCounts, Hashable, Callable[[Iterable[Score]], Any]], Any]
"""Function that applies its last argument, a function of all layers' competing scores, once per key.

The configuration and its prefix counts say which scores compete.
"""


@dataclass(frozen=True)
class LayerStatistics:
    """The data of one layer that selections may use; prefix = n − window entries.

    Attributes:
        accumulated: the unpooled score, Ā of SnapKV: a row per query head, or per key/value head.
        norms: ν per query head.
        euclidean: ‖V_i W_O^h‖₂ per query head; None where no configuration uses it.
        kv_heads: number of key/value heads.
        layer, layers: index of the layer, and number of layers.
        sample: the sample's id, for the seed of `random`.
        realised: A of the first decoding query per query head; None where it is not known.
        head_scores: the user's scores of all query heads of the model, (layer, head); empty where there are none.
        valid: False where a kept set has no entry, as ragged caches that are compressed again are padded on the left;
            None where all have all entries.
        first_stage: the score of a policy's own stage 1, unpooled; None where no policy has one.
        model_wide: computes a result from the competing scores of all layers for a configuration, once per key.
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
    model_wide: ModelWide | None = None
    euclidean: Float[Tensor, "head prefix"] | None = None

    @property
    def prefix(self) -> int:
        """Number of entries before the window."""
        return self.accumulated.shape[1]

    @property
    def hindsight(self) -> Float[Tensor, "head prefix"]:
        """Attention weights A of the first decoding query on the prefix. Raises ConfigError where unknown."""
        if self.realised is None:
            raise ConfigError(
                "a selection by hindsight looks at the next query, which is not known here; choose another selection"
            )
        return self.realised

    def selected_norms(self, config: EvictionConfig) -> Float[Tensor, "head prefix"]:
        """Return the value norms ν, in the norm that the selection uses, in float64. Raises ConfigError without any."""
        if not config.euclidean:
            return self.norms.to(WORK)
        if self.euclidean is None:
            raise ConfigError(f"selection '{config.selection}' looks at L2 norms, which are not known here")
        return self.euclidean.to(WORK)

    @property
    def begin(self) -> Int[Tensor, " #kept_head"]:
        """Index of each kept set's first entry."""
        if self.valid is None:
            return torch.zeros(1, dtype=torch.int64, device=self.norms.device)
        return self.prefix - self.valid.sum(dim=-1)


def join_layers(layers: Iterable[LayerStatistics]) -> LayerStatistics:
    """Return the statistics of all layers as those of one layer, on the first one's device, for shared kept sets.

    Its query heads are those of all layers, ordered by key/value head, then by layer.
    """
    all_layers = list(layers)
    first = all_layers[0]

    def join(rows: Sequence[Tensor | None]) -> Tensor:
        parts = move_to_first_device(part for part in rows if part is not None)
        return torch.stack([part.view(first.kv_heads, -1, first.prefix) for part in parts], dim=1).flatten(0, 2)

    names = [name for name in ("accumulated", "norms", "realised", "euclidean") if getattr(first, name) is not None]
    rows: dict[str, Any] = {name: join([getattr(layer, name) for layer in all_layers]) for name in names}
    return dataclasses.replace(first, **rows, layers=1, first_stage=None, model_wide=None)


def is_at_ends(index: Tensor, begin: Tensor, end: int, first: Tensor | int, recent: Tensor | int) -> Tensor:
    """Return a mask of `index`: True for the `first` indices from `begin` on and for the `recent` ones before `end`."""
    return ((index >= begin) & (index < begin + first)) | (index >= end - recent)

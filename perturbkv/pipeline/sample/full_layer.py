"""One layer of a prompt's full cache, the source and the reference of every configuration's kept entries."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

from jaxtyping import Bool, Float
from torch import Tensor

from perturbkv import theory
from perturbkv.cache.makers import FullStep
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.decoding import StepRecord
from perturbkv.pipeline.sample.prefill import Prefill, Realised, Statistics
from perturbkv.selection.kept_sets import Group, kept_masks_of
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.resolved_config import ResolvedConfig

_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class FullLayer:
    """A measured layer's entries, with the prefill's statistics.

    Attributes:
        adapter: the model.
        statistics: the prefill's statistics of all layers.
        index: index among the measured layers.
        keys, values: entries of the cache that it reads: the prompt's, then the decoded ones.
        results: what `compute_once` has computed, by key.
    """

    adapter: Adapter
    statistics: Statistics
    index: int
    keys: Float[Tensor, "kv_head key d_key"]
    values: Float[Tensor, "kv_head key d_value"]
    results: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def from_prefill(cls, adapter: Adapter, prefilled: Prefill, index: int) -> FullLayer:
        """Return the layer with index `index` of a prefilled prompt, with the current entries of its full cache."""
        cached = adapter.cache_layer(prefilled.cache, index)
        keys, values = prefilled.read.get(index) or (cached.keys[0], cached.values[0])
        return cls(adapter, prefilled.statistics, index, keys, values)

    @property
    def latent(self) -> int:
        """Number of components of the latent that the cache stores of a token; 0 where it stores the entries."""
        return self.adapter.layer_facts(self.index).latent

    @property
    def owner(self) -> int:
        """Index of the measured layer that fills the cache: its own, or another's, by which its kept sets go."""
        return self.adapter.owners[self.index]

    @property
    def tokens(self) -> int:
        """Number of the prompt's entries, n."""
        return self.statistics.tokens

    @property
    def prompt_keys(self) -> Float[Tensor, "kv_head n d_key"]:
        """Keys of the prompt's entries."""
        return self.keys[:, : self.tokens]

    @property
    def prompt_values(self) -> Float[Tensor, "kv_head n d_value"]:
        """Values of the prompt's entries."""
        return self.values[:, : self.tokens]

    @property
    def projection(self) -> Float[Tensor, "d_model mixed"]:
        """Weight W_O of the output projection."""
        return self.adapter.output_projection(self.index)

    @cached_property
    def slices(self) -> Float[Tensor, "head d_value d_model"]:
        """Slices W_O^h of the output projection, one per head."""
        return theory.head_slices(self.projection, self.adapter.heads)

    def projection_at(self, step: StepRecord) -> Float[Tensor, "d_model mixed"]:
        """Return W_O of a decode step, with γ of its query before it where the layer has a gate."""
        gate = step.gates.get(self.index)
        return theory.gated_projection(self.projection, None if gate is None else gate[0])

    def slices_at(self, step: StepRecord) -> Float[Tensor, "head d_value d_model"]:
        """Return `slices` of a decode step, likewise."""
        if self.index not in step.gates:
            return self.slices
        return theory.head_slices(self.projection_at(step), self.adapter.heads)

    def gated(self, step: StepRecord, mixed: Float[Tensor, "*row head d_value"]) -> Float[Tensor, "*row head d_value"]:
        """Return Σ A V of a decode step's heads, or ∂ log p / ∂ `head_output`, times γ where the layer has a gate."""
        gate = step.gates.get(self.index)
        return mixed if gate is None else mixed * gate[0].view(mixed.shape[-2:])

    def entry_effects(
        self, step: StepRecord, gradient: Float[Tensor, "row head d_value"]
    ) -> Float[Tensor, "row head key"]:
        """Return ⟨g, 𝒱_i⟩, in nat per unit of attention, of the entries that a decode step sees.

        `gradient` is ∂ log p of the text / ∂ `head_output`.
        """
        values = self.values[:, : step.entries].to(theory.WORK)
        by_group = self.gated(step, gradient).reshape(len(gradient), len(values), -1, values.shape[-1])
        return (by_group @ values.transpose(1, 2)).flatten(1, 2)

    @property
    def softmax(self) -> theory.Softmax:
        """The layer's softmax, by which logits become attention weights."""
        return self.adapter.softmax(self.index)

    def weights(self, step: StepRecord) -> tuple[Float[Tensor, "head key"], Float[Tensor, " head"]]:
        """Return a decode step's attention weights A on entries up to its own, and the weight of each head's sink."""
        return theory.decode_weights(step.query[self.index][0], self.keys[:, : step.entries], self.softmax)

    def weights_per_step(
        self, steps: Sequence[StepRecord]
    ) -> list[tuple[Float[Tensor, "head key"], Float[Tensor, " head"]]]:
        """Return `weights` of each step, with the keys converted once."""
        layer = replace(self, keys=self.keys.to(theory.WORK))
        return [layer.weights(step) for step in steps]

    def full_step(self, step: StepRecord) -> FullStep:
        """Return what this layer does at a decode step of the full run."""
        keys, values = (kind[:, : step.entries] for kind in (self.keys, self.values))
        query, weights = step.query[self.index][0], self.weights(step)  # row 0 is the full run's only one
        return FullStep(query, keys, values, self.tokens, *weights, self.softmax)

    def mean_query(self, window: int) -> Float[Tensor, "head d_key"]:
        """Return the mean of the last `window` queries, which corrected configurations ask a prefill for."""
        return self.statistics.mean_queries[window][self.index]

    def statistics_of(self, config: ResolvedConfig) -> LayerStatistics:
        """Return the scores and norms of the entries before the window that a configuration ranks by."""
        return self.statistics.scorer(self.index)(config).statistics

    def compute_once(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """Return make(), computed once per key and shared by all configurations of the layer."""
        if key not in self.results:
            self.results[key] = make()
        return cast("_Result", self.results[key])

    def groups(self, configs: Sequence[ResolvedConfig], realised: Realised | None = None) -> list[Group]:
        """Return the groups of the configurations that evict, with their kept sets.

        `realised` gives A of the first decode step, for selections with hindsight.
        """
        return self.statistics.groups(configs, self.index, self.prompt_keys, self.prompt_values, realised)

    def kept_masks(self, configs: Sequence[ResolvedConfig], realised: Realised) -> list[Bool[Tensor, "kept_head n"]]:
        """Return the mask of the kept set of each configuration, all of which must evict."""
        masks = kept_masks_of(self.groups(configs, realised))
        return [masks[index] for index in range(len(configs))]

"""Prefill a prompt and keep, per layer, what eviction needs: scores and value norms."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import Cache, DynamicCache

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.devices import stack_on
from perturbkv.errors import ActivationError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.capture import Observer, capture
from perturbkv.pipeline.timing import phase
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.scoring.value_norms import projected_value_norms
from perturbkv.selection.given import Group, kept_groups
from perturbkv.selection.policies import registry
from perturbkv.selection.ranking import LayerStatistics, Scores
from perturbkv.theory import WORK


@dataclass(frozen=True)
class Asked:
    """A score without its pooling, and the window before which entries are scored: computed once per layer."""

    score: Score
    window: int


Source = Callable[
    [int, Float[Tensor, "kv_head key d_head"], Float[Tensor, "kv_head key d_head"]], Bool[Tensor, "kv_head key"]
]
"""From a layer, its full keys and its full values to what is kept of them, by whoever decides that outside."""


@dataclass(frozen=True)
class Statistics:
    """What selections may look at of one prompt, layer by layer as the prefill goes on; nothing of size n × n.

    Attributes:
        sample: the sample's id.
        tokens: n.
        kv_heads, layers: of the model.
        scored: score and window -> per layer the unpooled scores (rows, n − w).
        norms: per layer ν (head, n).
        head_scores: given scores of all query heads; empty where there are none.
        given: of each configuration whose kept sets come from outside, what they are.
        made: what budgets that look at all layers were made of.
    """

    sample: str
    tokens: int
    kv_heads: int
    layers: int
    scored: dict[Asked, list[Tensor]]
    norms: list[Tensor] = field(default_factory=list)
    head_scores: Sequence[Sequence[float]] = ()
    given: Mapping[EvictionConfig, Source] = field(default_factory=dict)
    made: dict[Hashable, Any] = field(default_factory=dict)

    def groups(
        self,
        configs: Sequence[EvictionConfig],
        layer: int,
        key: Float[Tensor, "kv_head key d_head"],
        value: Float[Tensor, "kv_head key d_head"],
        realised: Tensor | None = None,
    ) -> list[Group]:
        """What every configuration keeps of one layer's n entries, whose keys and values are these."""
        given = {config: self.given[config](layer, key, value) for config in configs if config in self.given}
        return kept_groups(configs, self.scores(layer, realised), self.tokens, given)

    def scores(self, layer: int, realised: Tensor | None = None) -> Callable[[EvictionConfig], Scores]:
        """One layer's scores for a configuration; those with the same score share theirs.

        `realised` is A of the first decoding query, where it is known.
        """
        made: dict[Asked, Scores] = {}

        def of(config: EvictionConfig) -> Scores:
            wanted = asked(config)
            if wanted not in made:
                made[wanted] = Scores(self._of(self.scored[wanted][layer], layer, realised))
            return made[wanted]

        return of

    def of_model(self, config: EvictionConfig, key: Hashable, make: Callable[[Iterable[Tensor]], Any]) -> Any:
        """What `make` gives of the pooled scores of all layers, once for each key, score and number of kept sets."""
        whole = (key, registry.build(config.policy).score, config.window, config.granularity)
        if whole not in self.made:
            self.made[whole] = make(self.scores(layer)(config).attention(config) for layer in range(self.layers))
        return self.made[whole]

    def _of(self, accumulated: Tensor, layer: int, realised: Tensor | None) -> LayerStatistics:
        norms = self.norms[layer][:, : accumulated.shape[1]]
        return LayerStatistics(
            accumulated=accumulated,
            norms=norms,
            kv_heads=self.kv_heads,
            layer=layer,
            layers=self.layers,
            sample=self.sample,
            realised=None if realised is None else realised[:, : norms.shape[1]],
            head_scores=self.head_scores,
            of_model=self.of_model,
        )


@dataclass(frozen=True)
class Prefill:
    """One prompt's full cache (batch 1), the logits of its last position, and its statistics.

    `finite` knows of every layer, the final norm and the logits whether they were; nothing was raised yet.
    """

    cache: Cache
    logits: Float[Tensor, " vocab"]
    statistics: Statistics
    finite: FiniteCheck


FINAL_NORM, LOGITS = "the outputs of the final norm", "the logits"


class FiniteCheck:
    """Remembers, place by place and without waiting for the device, whether activations were finite."""

    def __init__(self) -> None:
        self._finite: list[tuple[str, Tensor]] = []

    def __call__(self, layer: int, hidden: Tensor) -> None:
        """Look at one layer's activations."""
        self.look(f"the hidden states of layer {layer}", hidden)

    def look(self, where: str, activations: Tensor) -> None:
        """Look at activations that are called `where`."""
        self._finite.append((where, torch.isfinite(activations).all()))

    def raise_if_not(self, sample: str) -> None:
        """Raise ActivationError for the first place that held NaN or Inf; waits for the device once."""
        if not self._finite:
            return
        places, flags = zip(*self._finite, strict=True)
        for where, finite in zip(places, stack_on(flags[0].device, flags).tolist(), strict=True):
            if not finite:
                raise ActivationError(where, sample)


def asked(config: EvictionConfig) -> Asked:
    """What is computed for a configuration."""
    return Asked(registry.build(config.policy).score.unpooled(), config.window)


LayerRead = Callable[[Statistics, LayerView], None]


@torch.inference_mode()
def prefill(
    adapter: Adapter,
    token_ids: Sequence[int],
    configs: Iterable[EvictionConfig],
    resources: Resources,
    sample: str,
    head_scores: Sequence[Sequence[float]] = (),
    taken: LayerRead | None = None,
    given: Mapping[EvictionConfig, Source] = MappingProxyType({}),
) -> Prefill:
    """Run the prompt once.

    With `taken`, which gets the statistics and each layer as they are there, no full cache is kept: a layer's keys and
    values are let go when the layer is done. `given` says what configurations keep that do not rank.
    """
    wanted = {asked(config): [] for config in configs if not config.given}
    found = Statistics(sample, len(token_ids), adapter.kv_heads, len(adapter.layers), wanted, [], head_scores, given)
    reading = _Reading(adapter, found, resources, taken)
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    with phase("prefill"), capture(adapter, reading.observer()):
        logits = adapter.model(input_ids=ids, past_key_values=reading.cache, use_cache=True, logits_to_keep=1).logits
    reading.finite.look(LOGITS, logits)
    return Prefill(reading.cache, logits[0, -1], found, reading.finite)


class _Reading:
    """Fills the statistics while a prompt runs through the model, layer by layer; its full cache, or nothing of it."""

    def __init__(self, adapter: Adapter, found: Statistics, resources: Resources, taken: LayerRead | None) -> None:
        self.adapter, self.found, self.resources, self.taken = adapter, found, resources, taken
        self.cache, self.finite = DynamicCache(), FiniteCheck()
        self.needs = {need for wanted in found.scored for need in wanted.score.needs}
        self.input: Tensor | None = None

    def observer(self) -> Observer:
        """What the model calls."""
        entering = self._entering if "hidden" in self.needs else None
        return Observer(attention=self._attention, hidden=self._hidden, final=self._final, entering=entering)

    def _entering(self, layer: int, hidden: Tensor) -> None:
        self.input = hidden[0]

    def _attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        view = self._view(layer, query[0], key[0], value[0])
        self.found.norms.append(view.norms)
        with phase("scores"):
            self._score(view)
        if self.taken is not None:
            self.taken(self.found, view)

    def _view(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> LayerView:
        projection = self.adapter.output_projection(layer)
        with phase("norms"):
            norms = layer_norms(value, projection, self.resources)
        return LayerView(
            queries=query,
            keys=key,
            values=value,
            norms=norms,
            projection=projection,
            scale=self.adapter.scale(layer),
            layer=layer,
            layers=self.found.layers,
            sample=self.found.sample,
            window=0,
            attention_input=self.input,
            turned_back=partial(turned_back, self.adapter) if "unrotated" in self.needs else None,
        )

    def _score(self, view: LayerView) -> None:
        """Every score of the layer; those of one window share what it shows."""
        for window in dict.fromkeys(wanted.window for wanted in self.found.scored):
            own = [wanted.score for wanted in self.found.scored if wanted.window == window]
            for score, made in layer_scores(view.of_window(window), own, self.resources.chunk_bytes).items():
                self.finite.look(f"the scores '{score.name}' of layer {view.layer}", made)
                self.found.scored[Asked(score, window)].append(made)

    def _hidden(self, layer: int, hidden: Tensor) -> None:
        self.finite(layer, hidden)
        if self.taken is not None:
            held = self.cache.layers[layer]
            held.keys, held.values = held.keys.new_empty(0), held.values.new_empty(0)

    def _final(self, output: Tensor) -> None:
        self.finite.look(FINAL_NORM, output)


def layer_norms(value: Tensor, w_o: Tensor, resources: Resources) -> Tensor:
    """ν of a layer's values, computed as the run asks for."""
    return projected_value_norms(value, w_o, resources.chunk_bytes, resources.norm_kernel)


def turned_back(adapter: Adapter, queries: Float[Tensor, "head query d_head"]) -> Float[Tensor, "head query d_head"]:
    """Queries of the positions 0, 1, … as they were before rotation, in `WORK`."""
    places = torch.arange(queries.shape[1], device=queries.device).unsqueeze(0)
    cosine, sine = (part[0].to(WORK) for part in adapter.rotary(queries.unsqueeze(0), places))
    size, half = cosine.shape[-1], cosine.shape[-1] // 2
    rotated, rest = queries[..., :size].to(WORK), queries[..., size:].to(WORK)
    swapped = torch.cat([rotated[..., half:], -rotated[..., :half]], dim=-1)
    stretched = cosine.square() + sine.square()  # the factor that YaRN puts on both
    return torch.cat([(rotated * cosine + swapped * sine) / stretched, rest], dim=-1)

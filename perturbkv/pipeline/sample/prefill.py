"""Prefill a prompt and keep, per layer, what eviction needs: scores and value norms.

The model's own rotations of positions, before and after the prompt, made once for all layers of a prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import Cache

from perturbkv.cache import stand_in
from perturbkv.cache.compact import full_cache, windows
from perturbkv.cache.sliding import Window
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.devices import to_device
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample.capture import FINAL_NORM, LOGITS, FiniteCheck, Observer, capture
from perturbkv.pipeline.sample.replay import replay_scores
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import LayerView, Rotation
from perturbkv.scoring.score import ScoreRequest
from perturbkv.scoring.value_norms import euclidean_value_norms, projected_value_norms
from perturbkv.selection.kept_sets import Group, kept_groups
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.ranking import Scores
from perturbkv.selection.resolved_config import Ends, ResolvedConfig, ResolvedRun
from perturbkv.selection.sparse_lines import Positions
from perturbkv.selection.sparse_lines import remembered_positions as wanted_queries
from perturbkv.theory import WORK

TURNED = ("unrotated", "rotations")
"""Needs of scores that ask for rotations."""


class Rotations:
    """Cosines and sines of a range of positions as the model has them, rounded to its type.

    A copy of the model's module is asked, because some kinds (dynamic NTK, LongRoPE) change their frequencies when they
    are asked for later positions: the prompt's decoding would go on with those.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter, self._made = adapter, dict[range, Rotation]()

    def __call__(self, positions: range) -> Rotation:
        """Of these positions, made when first asked for."""
        if positions not in self._made:
            self._made[positions] = self._rotation(positions)
        return self._made[positions]

    def _rotation(self, positions: range) -> Rotation:
        like = torch.empty(0, dtype=self._adapter.dtype, device=self._adapter.device)
        places = torch.tensor(positions, device=like.device).unsqueeze(0)
        cosine, sine = copy.deepcopy(self._adapter.rotary)(like, places, *self._adapter.rotary_kind)
        twice = 2 * len(self._adapter.frequencies) // cosine.shape[-1]  # some modules give each pair's angle once
        return Rotation(cosine[0].repeat(1, twice), sine[0].repeat(1, twice))


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
        euclidean: per layer ‖V_i W_O^h‖₂ (head, n); empty where no configuration looks at it.
        head_scores: given scores of all query heads; empty where there are none.
        given: of each configuration whose kept sets come from outside, what they are.
        made: what budgets that look at all layers were made of.
        mean_queries: window -> per layer the mean of its queries after rotation (head, d_head), where what went is
            corrected for.
        queries: positions -> per layer their queries after rotation (head, query, d_head), for who looks along lines.
    """

    sample: str
    tokens: int
    kv_heads: int
    layers: int
    scored: dict[ScoreRequest, list[Tensor]]
    norms: list[Tensor] = field(default_factory=list)
    head_scores: Sequence[Sequence[float]] = ()
    given: Mapping[ResolvedConfig, Source] = field(default_factory=dict)
    made: dict[Hashable, Any] = field(default_factory=dict)
    euclidean: list[Tensor] = field(default_factory=list)
    mean_queries: dict[int, list[Tensor]] = field(default_factory=dict)
    queries: dict[Positions, list[Tensor]] = field(default_factory=dict)

    def groups(
        self,
        configs: Sequence[ResolvedConfig],
        layer: int,
        key: Float[Tensor, "kv_head key d_head"],
        value: Float[Tensor, "kv_head key d_head"],
        realised: Tensor | None = None,
    ) -> list[Group]:
        """What every configuration keeps of one layer's n entries, whose keys and values are these."""
        given = {config: self.given[config](layer, key, value) for config in configs if config in self.given}
        return kept_groups(configs, self.scores(layer, realised), self.tokens, given)

    def scores(self, layer: int, realised: Tensor | None = None) -> Callable[[ResolvedConfig], Scores]:
        """One layer's scores for a configuration; those with the same score share theirs.

        `realised` is A of the first decoding query, where it is known.
        """
        return partial(self._scores_of, {}, layer, realised)

    def _scores_of(
        self, made: dict[tuple[ScoreRequest, ...], Scores], layer: int, realised: Tensor | None, config: ResolvedConfig
    ) -> Scores:
        wanted = all_asked(config)
        if wanted not in made:
            scores, *first = (self.scored[one][layer] for one in wanted)
            made[wanted] = Scores(self._of(scores, first[0] if first else None, layer, realised))
        return made[wanted]

    def model_wide(
        self, config: ResolvedConfig, ends: Ends, key: Hashable, make: Callable[[Iterable[Tensor]], Any]
    ) -> Any:
        """What `make` gives of the competing scores of all layers, once for each key, score and number of kept sets.

        Entries at both ends, which stay anyway, are left out.
        """
        staged = config.system.first_stage is not None
        alike = ends if staged else (ends.first, ends.recent)
        whole = (key, config.policy, config.window, config.granularity, alike)
        if whole not in self.made:
            self.made[whole] = make(self._competing(config, ends, layer) for layer in range(self.layers))
        return self.made[whole]

    def _competing(self, config: ResolvedConfig, ends: Ends, layer: int) -> Tensor:
        scores = self.scores(layer)(config).competing_scores(config, ends)
        return scores[:, ends.competing_slice(scores.shape[-1])]

    def _of(
        self, accumulated: Tensor, first_stage: Tensor | None, layer: int, realised: Tensor | None
    ) -> LayerStatistics:
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
            first_stage=first_stage,
            model_wide=self.model_wide,
            euclidean=self.euclidean[layer][:, : norms.shape[1]] if self.euclidean else None,
        )


@dataclass(frozen=True)
class Prefill:
    """One prompt's full cache (batch 1), the logits of its last position, and its statistics.

    `finite` knows of every layer, the final norm and the logits whether they were; nothing was raised yet.
    `windows` are what layers that are not measured held of the prompt.
    """

    cache: Cache
    logits: Float[Tensor, " vocab"]
    statistics: Statistics
    finite: FiniteCheck
    windows: Mapping[int, Window] = field(default_factory=dict)


def asked(config: ResolvedConfig) -> ScoreRequest:
    """What is computed for a configuration."""
    return all_asked(config)[0]


def all_asked(config: ResolvedConfig) -> tuple[ScoreRequest, ...]:
    """The same, and what a stage 1 of its own ranks by, where its policy has one."""
    found = (config.system.score, config.system.first_stage)
    return tuple(ScoreRequest(score.unpooled(), config.window) for score in found if score is not None)


@runtime_checkable
class Visitor(Protocol):
    """Gets every layer of a prompt as it was read; `whole` says whether the full cache stays until the last one."""

    whole: bool

    def visit(self, found: Statistics, seen: LayerView) -> None:
        """Take a layer, with the statistics of those read so far."""


@torch.inference_mode()
def prefill(
    adapter: Adapter,
    prompt: Prompt,
    run: ResolvedRun,
    resources: Resources,
    given: Mapping[ResolvedConfig, Source] = MappingProxyType({}),
    visitor: Visitor | None = None,
) -> Prefill:
    """Read what is compressed of a prompt, once; `given` says what configurations keep that do not rank.

    With a `visitor` no full cache is kept unless it asks for the whole: a layer's keys and values are let go when the
    layer is done. Scores that look at a replay come last.
    """
    (token_ids, _), configs, sample = prompt.parts(run.scenario), run.configs, prompt.sample_id
    ranked = [config for config in configs if not config.is_external and not config.has_sparse_prefill]
    wanted: dict[ScoreRequest, list[Tensor]] = {one: [] for config in ranked for one in all_asked(config)}
    shape = (len(token_ids), adapter.kv_heads, len(adapter.layers))
    found = Statistics(sample, *shape, wanted, [], run.head_scores, given)
    found.mean_queries.update((window, []) for window in stand_in.windows(configs))
    found.queries.update((asked, []) for asked in wanted_queries(configs, len(token_ids), sample))
    euclidean = any(config.euclidean for config in configs)
    reading = _Reading(adapter, found, resources, visitor, euclidean)
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    with phase("prefill"), capture(adapter, reading.observer()):
        logits = adapter.model(input_ids=ids, past_key_values=reading.cache, use_cache=True, logits_to_keep=1).logits
    reading.finite.look(LOGITS, logits)
    replay_scores(adapter, token_ids, reading.cache, found.scored, sample, reading.finite)
    held = windows(adapter, reading.cache)
    return Prefill(reading.cache, logits[0, -1], found, reading.finite, held)


class _Reading:
    """Fills the statistics while a prompt runs through the model, layer by layer; its full cache, or nothing of it."""

    def __init__(
        self, adapter: Adapter, found: Statistics, resources: Resources, visitor: Visitor | None, euclidean: bool
    ) -> None:
        self.adapter, self.found, self.resources, self.visitor = adapter, found, resources, visitor
        self.by_length = euclidean
        self.cache, self.finite = full_cache(adapter), FiniteCheck()
        self.wanted = [wanted for wanted in found.scored if wanted.score.replay is None]
        self.needs = {need for wanted in self.wanted for need in wanted.score.needs}
        self.input: Tensor | None = None
        self.rotations = Rotations(adapter)

    def observer(self) -> Observer:
        """What the model calls."""
        entering = self._entering if "hidden" in self.needs else None
        return Observer(attention=self._attention, hidden=self._hidden, final=self._final, entering=entering)

    def _entering(self, layer: int, hidden: Tensor) -> None:
        self.input = hidden[0]

    def _attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        view = self._view(layer, query[0], key[0], value[0])
        self.found.norms.append(view.norms)
        if self.by_length:
            self._euclidean(view)
        for window, means in self.found.mean_queries.items():
            means.append(query[0, :, -window:].to(WORK).mean(dim=1))
        for positions, queries in self.found.queries.items():
            queries.append(query[0][:, to_device(positions, query.device)])
        with phase("scores"):
            self._score(view)
        if self.visitor is not None:
            self.visitor.visit(self.found, view)

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
            rotary=None if self.needs.isdisjoint(TURNED) else self.rotations,
            sinks=self.adapter.sinks(layer),
        )

    def _euclidean(self, view: LayerView) -> None:
        with phase("norms"):
            found = euclidean_value_norms(view.values, view.projection, self.resources.chunk_bytes)
        self.found.euclidean.append(found)

    def _score(self, view: LayerView) -> None:
        """Every score of the layer; those of one window share what it shows."""
        for window in dict.fromkeys(wanted.window for wanted in self.wanted):
            own = [wanted.score for wanted in self.wanted if wanted.window == window]
            for score, made in layer_scores(view.with_window(window), own, self.resources.chunk_bytes).items():
                index = self.adapter.layer_indices[view.layer]
                self.finite.made(f"the scores '{score.display_name}' of layer {index}", made)
                self.found.scored[ScoreRequest(score, window)].append(made)

    def _hidden(self, layer: int, hidden: Tensor) -> None:
        self.finite(self.adapter.layer_indices[layer], hidden)
        if self.visitor is not None and not self.visitor.whole:
            held = self.adapter.cache_layer(self.cache, layer)
            held.keys, held.values = held.keys.new_empty(0), held.values.new_empty(0)

    def _final(self, output: Tensor) -> None:
        self.finite.look(FINAL_NORM, output)


def layer_norms(value: Tensor, w_o: Tensor, resources: Resources) -> Tensor:
    """ν of a layer's values, computed as the run asks for."""
    return projected_value_norms(value, w_o, resources.chunk_bytes, resources.norm_kernel)

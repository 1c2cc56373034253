"""Prefill of a prompt with the statistics that eviction needs per layer, scores and value norms among them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import Cache

from perturbkv import theory
from perturbkv.cache.compact import PromptStates, full_cache, prompt_states
from perturbkv.configs.cache_contents import EVICTED
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.devices import copy_to_device, to_device
from perturbkv.errors import ConfigError, ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample.capture import FINAL_NORM, LOGITS, FiniteCheck, Observer, capture
from perturbkv.pipeline.sample.replay import append_replay_scores
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import LayerView, Rotation
from perturbkv.scoring.value_norms import euclidean_value_norms, projected_value_norms
from perturbkv.selection import compatibility
from perturbkv.selection.kept_sets import Group, kept_groups, move_rankings, rankings
from perturbkv.selection.layer_statistics import LayerStatistics, join_layers
from perturbkv.selection.policies.registry import has_own_code
from perturbkv.selection.ranking import Scores
from perturbkv.selection.resolved_config import PrefixCounts, ResolvedConfig, ResolvedRun, ScoreRequest
from perturbkv.selection.sparse_lines import Positions, last_positions, remembered_positions
from perturbkv.theory import WORK

ROTATION_NEEDS = ("unrotated", "rotations")
"""Needs of scores for which rotations are computed."""


class Rotations:
    """The model's function from ranges of positions to their rotation, rounded to the model's type.

    It uses a copy of the model's rotary module, because some kinds (dynamic NTK, LongRoPE) change their frequencies for
    later positions, and decoding would continue with those.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter, self._rotations = adapter, dict[tuple[range, torch.device], Rotation]()

    def __call__(self, positions: range, device: torch.device) -> Rotation:
        """Return the rotation of these positions on a device, computed once."""
        if (positions, device) not in self._rotations:
            like = torch.empty(0, dtype=self._adapter.dtype, device=self._adapter.device)
            ids = torch.arange(positions.start, positions.stop, positions.step, device=like.device).unsqueeze(0)
            parts = copy.deepcopy(self._adapter.rotary)(like, ids, *self._adapter.rotary_kind)
            twice = 2 * len(self._adapter.frequencies) // parts[0].shape[-1]  # some modules give each pair's angle once
            cosine, sine = (copy_to_device(part[0].repeat(1, twice), device) for part in parts)
            self._rotations[positions, device] = Rotation(cosine, sine)
        return self._rotations[positions, device]


Realised = Callable[[int], Float[Tensor, "head key"]]
"""Function from a layer's index to its attention weights A under the first decoding query, for hindsight selections."""
Source = Callable[
    [int, Float[Tensor, "kv_head key d_key"], Float[Tensor, "kv_head key d_value"]], Bool[Tensor, "kv_head key"]
]
"""Function from a layer's index, full keys and full values to an external kept set."""


EntriesRead = dict[int, tuple[Tensor, Tensor]]
"""Layer whose cache holds latents -> keys (kv_head, key, d_key) and values (kv_head, key, d_value) that are read."""


@dataclass(frozen=True)
class Statistics:
    """The statistics of one prompt for selections, filled layer by layer during the prefill; nothing of size n × n.

    Attributes:
        sample: the sample's id.
        tokens: n.
        kv_heads, layers: numbers of the model's key/value heads, and of its measured layers that fill a cache.
        scored: score and window -> per layer the unpooled scores (rows, n − w).
        norms: `gate_window` -> per layer ν (head, n); 0 alone where the model has no gates.
        euclidean: likewise ‖V_i W_O^h‖₂ (head, n); empty where no configuration uses it.
        head_scores: the user's scores of all query heads; empty where there are none.
        external: configuration with external kept sets -> their source.
        model_results: cached results of `compute_over_layers`, and of rankings that layers share.
        mean_queries: window -> per layer the mean of its queries after rotation (head, d_key), for corrections.
        queries: positions -> per layer their queries after rotation (head, query, d_key), for sparse prefills, and
            where caches are compressed again.
        gates: layer -> γ of its last queries (query, head · d_value), as many as the largest window; only of
            layers with gates.
    """

    sample: str
    tokens: int
    kv_heads: int
    layers: int
    scored: dict[ScoreRequest, list[Tensor]]
    norms: dict[int, list[Tensor]] = field(default_factory=dict)
    head_scores: Sequence[Sequence[float]] = ()
    external: Mapping[ResolvedConfig, Source] = field(default_factory=dict)
    model_results: dict[Hashable, Any] = field(default_factory=dict)
    euclidean: dict[int, list[Tensor]] = field(default_factory=dict)
    mean_queries: dict[int, list[Tensor]] = field(default_factory=dict)
    queries: dict[Positions, list[Tensor]] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)

    def groups(
        self,
        configs: Sequence[ResolvedConfig],
        layer: int,
        key: Float[Tensor, "kv_head key d_key"],
        value: Float[Tensor, "kv_head key d_value"],
        realised: Realised | None = None,
    ) -> list[Group]:
        """Return the groups of all configurations with their kept sets in one layer, from its n entries."""
        external = {config: self.external[config](layer, key, value) for config in configs if config in self.external}
        sharing = tuple(config for config in configs if config.shares_layers)  # ranked once per sample, of all layers
        if (shared_key := ("shared", sharing, realised is None)) not in self.model_results:
            scores_of = self._cache_by_requests(
                lambda config: join_layers(
                    self._layer_statistics(config, index, realised) for index in range(self.layers)
                )
            )
            self.model_results[shared_key] = {config: rankings(config, scores_of(config)) for config in sharing}
        shared = move_rankings(self.model_results[shared_key], key.device)
        return kept_groups(configs, self.scorer(layer, realised), self.tokens, external, shared)

    def scorer(self, layer: int, realised: Realised | None = None) -> Callable[[ResolvedConfig], Scores]:
        """Return a function from a configuration to its scores in one layer, computed once per requests and gate.

        `realised` gives A of the first decoding query, where it is known.
        """
        return self._cache_by_requests(lambda config: self._layer_statistics(config, layer, realised))

    def gate_window(self, config: ResolvedConfig) -> int:
        """Return the key of the norms by which a configuration selects."""
        return config.gate_window if config.gate_window in self.norms else next(iter(self.norms))

    def _cache_by_requests(
        self, make: Callable[[ResolvedConfig], LayerStatistics]
    ) -> Callable[[ResolvedConfig], Scores]:
        """Return a function from a configuration to its scores, made once per tuple of requests and gate."""
        cached: dict[Hashable, Scores] = {}

        def scores_of(config: ResolvedConfig) -> Scores:
            key = config.requests, self.gate_window(config)
            if key not in cached:
                cached[key] = Scores(make(config))
            return cached[key]

        return scores_of

    def compute_over_layers(
        self, config: ResolvedConfig, counts: PrefixCounts, key: Hashable, make: Callable[[Iterable[Tensor]], Any]
    ) -> Any:
        """Return `make` of a configuration's competing scores, given layer by layer; computed once per sample.

        Entries at both ends, which always stay, are left out of the scores. Configurations with the same scores share
        what is computed, by `key`.
        """
        has_stage1 = config.first_stage is not None  # whose entries, at most `counts.free`, get the largest score
        counts_key = counts if has_stage1 else (counts.first, counts.recent)
        full_key = (key, config.policy, config.window, config.granularity, counts_key)
        if full_key not in self.model_results:
            each = (self.scorer(layer)(config).competing_scores(config, counts) for layer in range(self.layers))
            self.model_results[full_key] = make(scores[:, counts.competing_slice(scores.shape[-1])] for scores in each)
        return self.model_results[full_key]

    def _layer_statistics(self, config: ResolvedConfig, layer: int, realised: Realised | None) -> LayerStatistics:
        """Return one layer's statistics for selection, with the requested scores of policy and own stage 1."""
        accumulated, *first = (self.scored[request][layer] for request in config.requests)
        window = self.gate_window(config)
        norms = self.norms[window][layer][:, : accumulated.shape[1]]
        return LayerStatistics(
            accumulated=accumulated,
            norms=norms,
            kv_heads=self.kv_heads,
            layer=layer,
            layers=self.layers,
            sample=self.sample,
            realised=None if realised is None else realised(layer)[:, : norms.shape[1]],
            head_scores=self.head_scores,
            first_stage=first[0] if first else None,
            model_wide=self.compute_over_layers,
            euclidean=self.euclidean[window][layer][:, : norms.shape[1]] if self.euclidean else None,
        )


@dataclass(frozen=True)
class Prefill:
    """One prompt's full cache (batch 1), the logits of its last position, and its statistics.

    `finite` has recorded every layer, the final norm and the logits, and raised nothing yet. `states` are what eviction
    leaves as it is after the prompt, `read` what attention read last, `final` the last position's state after the final
    norm.
    """

    cache: Cache
    logits: Float[Tensor, " vocab"]
    statistics: Statistics
    finite: FiniteCheck
    states: PromptStates = field(default_factory=dict)
    read: EntriesRead = field(default_factory=dict)
    final: Float[Tensor, " d_model"] = field(default_factory=lambda: torch.empty(0))


@runtime_checkable
class Visitor(Protocol):
    """A callback for every layer of a prefill; `needs_full_cache` is whether all of it stays until the last layer."""

    needs_full_cache: bool

    def visit(self, statistics: Statistics, view: LayerView) -> None:
        """Process a layer just read; `statistics` covers this layer and all earlier layers."""


@torch.no_grad()
def prefill(
    adapter: Adapter,
    prompt: Prompt,
    run: ResolvedRun,
    resources: Resources,
    external: Mapping[ResolvedConfig, Source] = MappingProxyType({}),
    visitor: Visitor | None = None,
) -> Prefill:
    """Read a prompt's context, and return its full cache with the statistics that the run's configurations need.

    `external` are the sources of external kept sets. With a `visitor` that does not need the full cache, a layer's keys
    and values are freed when the layer is done. Scores that need a replay are computed last.

    NaN and Inf are recorded in `Prefill.finite`, and raise nothing here. Raises ModelError for a configuration that
    needs plain logits, where the model caps them, rotates keys or queries, where the model rotates none that way,
    rounds or reads what the cache holds, where that is latents, or reads parts of it, where layers read another's;
    ConfigError for head scores that are all 0 where a cache is filled.
    """
    caps = [adapter.softmax(layer).cap for layer in range(len(adapter.layers))]
    compatibility.check_soft_cap(run.configs, next(filter(None, caps), None), adapter.name)
    _check_rotations(adapter, run.configs)
    _check_caches(adapter, run.configs)
    (token_ids, _), configs, sample = prompt.parts(run.scenario), run.configs, prompt.sample_id
    scored: dict[ScoreRequest, list[Tensor]] = {request: [] for config in configs for request in config.requests}
    shape = (len(token_ids), adapter.kv_heads, len(adapter.holders))
    compatibility.check_gates(configs, adapter.has_gates, adapter.name)
    gate_windows = {window for config in configs for window in (config.window, config.gate_window) if window >= 0}
    windows = sorted(gate_windows) if adapter.has_gates else []
    norms: dict[int, list[Tensor]] = {window: [] for window in windows or [0]}
    statistics = Statistics(sample, *shape, scored, norms, _own_head_scores(adapter, run), external)
    statistics.mean_queries.update((config.window, []) for config in configs if config.corrected)
    statistics.queries.update((positions, []) for positions in remembered_positions(configs, len(token_ids), sample))
    if run.compresses:
        adapter.check_own_caches("compressing caches again (--compress-every, --compress-over)")
        statistics.scored.update({accumulated_request(config): [] for config in configs if config.accumulates})
        statistics.queries[last_positions(run.largest_window, len(token_ids))] = []
    euclidean = any(config.euclidean for config in configs)
    reader = _PromptReader(adapter, statistics, resources, visitor, euclidean, prompt.template_tail)
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    with phase("prefill"), capture(adapter, reader.observer()):
        logits = run_with_cache(adapter.model, ids, reader.cache, logits_to_keep=1).logits
    reader.finite.check(LOGITS, logits)
    append_replay_scores(adapter, token_ids, reader.cache, statistics.scored, sample, reader.finite)
    states = prompt_states(adapter, reader.cache)
    return Prefill(reader.cache, logits[0, -1], statistics, reader.finite, states, reader.read, reader.final)


def accumulated_request(config: ResolvedConfig) -> ScoreRequest:
    """Return the request of a score that goes on while decoding, of all entries: the window's had attention, too."""
    return replace(config.requests[0], window=0)


def _own_head_scores(adapter: Adapter, run: ResolvedRun) -> Sequence[Sequence[float]]:
    """Return the user's head scores of the layers that fill a cache. Raises ConfigError where none of them is above 0.

    Those of layers that read another's cache count for nothing, as its layer chooses the kept sets.
    """
    scores = run.head_scores[: len(adapter.holders)]
    if scores and not any(map(any, scores)):
        raise ConfigError(
            f"expected a head score above 0 in a layer of model '{adapter.name}' that fills a cache, got none; those "
            "of layers that read another's cache choose nothing"
        )
    return scores


def _check_rotations(adapter: Adapter, configs: Sequence[ResolvedConfig]) -> None:
    """Raise ModelError for a configuration that rotates keys or queries, where the model rotates none that way."""
    if adapter.rotary is not None:
        return
    for config in configs:
        needs = {need for request in config.requests for need in request.score.needs}
        if config.in_cache or not needs.isdisjoint(ROTATION_NEEDS):
            raise ModelError(
                f"configuration '{config.label()}' rotates keys or queries by their positions, and model "
                f"'{adapter.name}' has no rotations by halves that it could use; choose another policy"
            )


def _check_caches(adapter: Adapter, configs: Sequence[ResolvedConfig]) -> None:
    """Raise ModelError for a configuration that needs a cache of each layer's own entries, where the model has others.

    Few bits, and a policy that evicts nothing, need other entries than latents; reading parts of the cache, or holding
    it changed, needs one cache per layer.
    """
    for config in configs:
        own_code = has_own_code(config.policy.name)
        if own_code or config.cache_contents is not EVICTED:
            adapter.check_own_caches(f"policy '{config.policy}'")
        if config.quantised:
            adapter.check_no_latents(f"precision '{config.precision}'")
        if own_code or not config.evicts:
            adapter.check_no_latents(f"policy '{config.policy.name}'")


def free_entries(adapter: Adapter, cache: Cache, read: EntriesRead, layer: int) -> None:
    """Drop a measured layer's keys and values; latents, which are small, stay in the cache."""
    if read.pop(layer, None) is None:
        cached = adapter.cache_layer(cache, layer)
        cached.keys, cached.values = cached.keys.new_empty(0), cached.values.new_empty(0)


class _PromptReader:
    """The callbacks that fill the statistics while a prompt runs through the model, layer by layer.

    Args:
        adapter: the model.
        statistics: the statistics, still empty.
        resources: memory and kernel for norms and scores.
        visitor: called for every layer, if any.
        euclidean: whether ‖V_i W_O^h‖₂ is recorded too.
        template: positions of the chat template's tokens behind the last message.
    """

    def __init__(
        self,
        adapter: Adapter,
        statistics: Statistics,
        resources: Resources,
        visitor: Visitor | None,
        euclidean: bool,
        template: range,
    ) -> None:
        self.adapter, self.statistics, self.resources, self.visitor = adapter, statistics, resources, visitor
        self.needs_euclidean, self.template = euclidean, template
        self.cache, self.finite = full_cache(adapter), FiniteCheck()
        self.requests = [request for request in statistics.scored if request.score.replay is None]
        self.needs = {need for request in self.requests for need in request.score.needs}
        self.input: Tensor | None = None
        self.attended: tuple[Tensor, ...] = ()
        self.read: EntriesRead = {}
        self.final = torch.empty(0)
        self.rotations = Rotations(adapter)

    def observer(self) -> Observer:
        """Return the observer that records the statistics during the prefill."""
        return Observer(
            attention=self._record_attention,
            gate=self._record_gate,
            hidden=self._check_hidden,
            final=self._record_final,
            attention_input=self._keep_input if "hidden" in self.needs else None,
        )

    def _record_final(self, hidden: Tensor) -> None:
        """Check the outputs of the final norm, and keep the last position's: an `Observer.final`."""
        self.finite.check(FINAL_NORM, hidden)
        self.final = hidden[0, -1].clone()

    def _keep_input(self, layer: int, hidden: Tensor) -> None:
        """Store a layer's attention input until the layer's scores are computed: an `Observer.attention_input`."""
        self.input = hidden[0]

    def _record_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Record a layer that fills a cache, or keep it until its gate is known: an `Observer.attention`."""
        if layer not in self.adapter.holders:
            return
        if self.adapter.layer_facts(layer).latent:
            self.read[layer] = key[0], value[0]
        if self.adapter.has_gate(layer):
            self.attended = query[0], key[0], value[0]
        else:
            self._record_layer(layer, query[0], key[0], value[0])

    def _record_gate(self, layer: int, gate: Tensor) -> None:
        """Record the layer whose attention waits for this gate: an `Observer.gate`.

        None waits where a layer fills no cache (`_record_attention`).
        """
        if self.attended:
            query, key, value = self.attended
            self.attended = ()
            self._record_layer(layer, query, key, value, gate[0])

    def _record_layer(self, layer: int, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None = None) -> None:
        """Record a layer's norms, queries and scores, then call the visitor; `gate` is γ of all queries."""
        views = {
            window: self._view(layer, query, key, value, mean_size(gate, window)) for window in self.statistics.norms
        }
        view = next(iter(views.values()))
        for window, of_window in views.items():
            self.statistics.norms[window].append(of_window.norms)
            if self.needs_euclidean:
                with phase("norms"):
                    norms = euclidean_value_norms(of_window.values, of_window.projection, self.resources.chunk_bytes)
                self.statistics.euclidean.setdefault(window, []).append(norms)
        if gate is not None:
            self.statistics.gates[layer] = gate[-max(1, *self.statistics.norms) :].clone()
        for window, means in self.statistics.mean_queries.items():
            means.append(query[:, -window:].to(WORK).mean(dim=1))
        for positions, queries in self.statistics.queries.items():
            queries.append(query[:, to_device(positions, query.device)])
        with phase("scores"):
            self._record_scores(views)
        if self.visitor is not None:
            self.visitor.visit(self.statistics, view)

    def _view(self, layer: int, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None) -> LayerView:
        """Return a layer's view for scores, with value norms under a gate and an empty window."""
        projection = theory.gated_projection(self.adapter.output_projection(layer), gate)
        with phase("norms"):
            norms = layer_value_norms(value, projection, self.resources)
        return LayerView(
            queries=query,
            keys=key,
            values=value,
            norms=norms,
            projection=projection,
            softmax=self.adapter.softmax(layer),
            layer=layer,
            layers=self.statistics.layers,
            sample=self.statistics.sample,
            window=0,
            position=key.shape[1],
            attention_input=self.input,
            rotary=None if self.needs.isdisjoint(ROTATION_NEEDS) else partial(self.rotations, device=query.device),
            template=self.template,
        )

    def _record_scores(self, views: Mapping[int, LayerView]) -> None:
        """Record all scores of a layer in the statistics; scores with equal windows share a view.

        `views`: window -> view, with value norms under the mean gate of that window. A model without gates has a single
        one, which serves all windows.
        """
        first = next(iter(views.values()))
        index = self.adapter.layer_indices[first.layer]
        for window in dict.fromkeys(request.window for request in self.requests):
            scores = [request.score for request in self.requests if request.window == window]
            view = views.get(window, first).with_window(window)
            for score, rows in layer_scores(view, scores, self.resources.chunk_bytes).items():
                self.finite.check_derived(f"the scores '{score.display_name}' of layer {index}", rows)
                self.statistics.scored[ScoreRequest(score, window)].append(rows)

    def _check_hidden(self, number: int, hidden: Tensor) -> None:
        """Check a layer's output for NaN and Inf, and free its keys and values if unneeded: an `Observer.hidden`."""
        self.finite(number, hidden)
        layer = self.adapter.measured_index.get(number)
        if layer is not None and self.visitor is not None and not self.visitor.needs_full_cache:
            free_entries(self.adapter, self.cache, self.read, layer)


def mean_size(gate: Float[Tensor, "query head_d_value"] | None, window: int) -> Float[Tensor, " head_d_value"] | None:
    """Return the mean |γ| over the last `window` queries; None for no window or no gate (METHOD: gates)."""
    return gate[-window:].to(WORK).abs().mean(dim=0) if gate is not None and window else None


def layer_value_norms(value: Tensor, w_o: Tensor, resources: Resources) -> Tensor:
    """Return the projected value norms ν of a layer's entries (head, key), computed with the run's kernel.

    `value` is (kv_head, key, d_value), and `w_o` the output projection's weight of the heads that share these. Both are
    computed in float32 at least where a gate has made `w_o` finer than the values.
    """
    if w_o.dtype != value.dtype:
        work = torch.promote_types(value.dtype, torch.float32)
        value, w_o = value.to(work), w_o.to(work)
    return projected_value_norms(value, w_o, resources.chunk_bytes, resources.norm_kernel)

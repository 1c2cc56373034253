"""The one pipeline: prefill once, decode from the full cache, evict for every configuration, decode, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from perturbkv import memory
from perturbkv.cache import entries as positions
from perturbkv.cache import quantisation
from perturbkv.cache.compact import CompactCache, CompactLayer, beside
from perturbkv.cache.entries import Kept, KeptEntries, Lengths, borrow, keep, lengths
from perturbkv.cache.stand_in import StandIn
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ActivationError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.generation import end_tokens, generate
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.run.plan import batches_of, passing
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.assembly import (
    BatchResult,
    answer_arrays,
    attention_array,
    changed_arrays,
    held_bytes,
    held_share,
    isolated_arrays,
    kept_arrays,
    lost_arrays,
    prefill_arrays,
    sample_arrays,
    step_arrays,
    with_all_steps,
)
from perturbkv.pipeline.sample.capture import FiniteCheck
from perturbkv.pipeline.sample.decoding import StepRecord, decode_evicted, decode_full, steps_of_text
from perturbkv.pipeline.sample.layer import LayerResult, measure_layer
from perturbkv.pipeline.sample.prefill import Prefill, prefill
from perturbkv.pipeline.variants import corrected as correcting
from perturbkv.pipeline.variants import page_reading, quantised
from perturbkv.pipeline.variants.presses import KeptMasks, sources
from perturbkv.pipeline.variants.sparse_prefill import OwnPrefill, own_prefill, plain_seconds
from perturbkv.schema import VARIABLES
from perturbkv.trace import FailedSample, SampleTrace

_DEFAULT = Resources()
_NOTHING: KeptMasks = MappingProxyType({})


@memory.told()
def trace(
    adapter: Adapter,
    prompts: Iterable[Prompt],
    run: RunConfig,
    resources: Resources = _DEFAULT,
    finished: Callable[[SampleTrace | FailedSample], None] = lambda sample: None,
    wanted: Mapping[str, tuple[EvictionConfig, ...]] = MappingProxyType({}),
) -> list[FailedSample]:
    """Measure prompts one after the other; `finished` gets each as it is ready. Returns those that failed.

    `wanted` names the configurations that a sample still lacks; all of the run's where it does not name the sample. A
    sample whose activations are not finite is marked failed and the run goes on. Raises NoMemoryError.
    """
    failed = []
    for prompt in prompts:
        try:
            configs = wanted.get(prompt.sample_id, run.configs)
            finished(trace_sample(adapter, prompt, replace(run, configs=configs), resources))
        except ActivationError as error:
            failed.append(FailedSample(prompt.sample_id, str(error)))
            finished(failed[-1])
    return failed


@torch.inference_mode()
def trace_sample(
    adapter: Adapter, prompt: Prompt, run: RunConfig, resources: Resources = _DEFAULT, given: KeptMasks = _NOTHING
) -> SampleTrace:
    """Measure every configuration of `run` on one prompt (METHOD: the protocol).

    `given` are the kept sets of configurations `given:NAME`, which have none of their own.

    The prompt is read once; all configurations share its scores, norms and reference. It waits for the device
    three times: for the lengths of the evicted caches, for the numbers, and, with several steps, for the text's end;
    and once for each budget that shares out by layers' entropies (lava).

    Raises ActivationError for NaN or Inf, BudgetError where a budget leaves nothing beside the window, DatasetError
    for a prompt that the scenario cannot take apart, ConfigError where a configuration exceeds `resources.max_bytes`,
    what `entries.check_positions` raises.
    """
    positions.check_positions(run.configs, adapter.config, adapter.name)
    context, question = prompt.parts(run.scenario)
    planned = batches_of(prompt, run, adapter.shape, resources)
    known = sources(adapter, context, run.configs, given)
    before = prefill(adapter, context, run.configs, resources, prompt.sample_id, run.head_scores, given=known)
    full, tokens = reference(adapter, before, question, run.steps, planned.rows)
    layers, kept = _selected(adapter, before, full, run, resources)
    before.finite.raise_if_not(prompt.sample_id)
    decode = _Decoding(adapter, run, resources, before, full, tokens, context, question, layers, kept, planned.rows)
    batches = [decode.batch(places) for places in planned.places]
    arrays = _arrays(adapter, prompt, run, tokens, batches, layers, kept)
    if any(config.lined for config in run.configs):
        arrays |= prefill_arrays(batches, run.configs, arrays["held_share"], plain_seconds(adapter, context))
    decode.finite.raise_if_not(prompt.sample_id)
    return SampleTrace(prompt.sample_id, with_all_steps(arrays, run.steps))


def reference(
    adapter: Adapter, before: Prefill, question: Sequence[int], steps: int, rows: int
) -> tuple[list[StepRecord], Tensor]:
    """The full run's steps as far as its text goes, and their tokens."""
    with phase("reference"):
        full, tokens = decode_full(adapter, before, question, steps, rows)
        measured = steps_of_text(tokens, end_tokens(adapter))
        return full[:measured], tokens[:measured]


def _selected(
    adapter: Adapter, before: Prefill, full: Sequence[StepRecord], run: RunConfig, resources: Resources
) -> tuple[list[LayerResult], list[Lengths]]:
    """Every layer's kept sets with what they alone change, and how long they are, per layer and configuration."""
    with phase("layers"):
        saves = "outputs" in run.save
        layers = [
            measure_layer(adapter, before, full, run.configs, layer, resources, saves)
            for layer in range(len(adapter.layers))
        ]
        return layers, lengths([layer.groups for layer in layers], len(run.configs), adapter.device)


def _arrays(
    adapter: Adapter,
    prompt: Prompt,
    run: RunConfig,
    tokens: Tensor,
    batches: Sequence[BatchResult],
    layers: Sequence[LayerResult],
    kept: Sequence[Lengths],
) -> measure.Arrays:
    """Everything that a trace holds of the sample, at the steps that were measured."""
    with phase("assembly"):
        arrays = sample_arrays(prompt, run, tokens, batches, kept) | isolated_arrays(layers, adapter.device)
        arrays |= changed_arrays(batches, arrays)
        arrays |= {"held_share": held_share(kept, adapter.kv_heads, int(arrays["prompt_tokens"]))}
        arrays |= held_bytes(kept, run.configs, adapter.shape, int(arrays["prompt_tokens"]))
        arrays |= step_arrays(batches) | kept_arrays(batches, kept, layers, adapter.heads)
        arrays |= lost_arrays(layers, adapter.device)
        if run.generate:
            arrays |= answer_arrays(adapter, prompt, batches, run.generate)
        if "outputs" in run.save:
            arrays |= attention_array(layers)
        return arrays


@dataclass(frozen=True, eq=False)
class _Evicted:
    """One layer of a batch: its cache, and what is known of it once the places of its entries are forgotten.

    Attributes:
        entries: the cache.
        order, masks: the configurations and their kept sets, as `entries.Kept` has them.
        moved: what few bits or a correction leave changed in this layer alone, by configuration.
    """

    entries: CompactLayer
    order: tuple[int, ...]
    masks: UInt8[Tensor, "kept_set byte"]
    moved: dict[int, Tensor]


class _Decoding:
    """Decodes one sample from the evicted caches of one batch of configurations after the other."""

    def __init__(
        self,
        adapter: Adapter,
        run: RunConfig,
        resources: Resources,
        before: Prefill,
        full: Sequence[StepRecord],
        tokens: Tensor,
        context: Sequence[int],
        question: Sequence[int],
        layers: Sequence[LayerResult],
        kept: Sequence[Lengths],
        rows: int,
    ) -> None:
        self.adapter, self.run, self.resources, self.before, self.full = adapter, run, resources, before, full
        self.tokens, self.context, self.question = tokens, context, question
        self.layers, self.kept, self.rows = layers, kept, rows
        self.finite, self.passing = FiniteCheck(), passing(run)

    def batch(self, places: tuple[int, ...]) -> BatchResult:
        """One batch: evict, decode, compare."""
        with phase("evict"):
            own = self._own(places)
            found = [self._evict(layer, places, own) for layer in range(len(self.layers))]
            layers = beside(self.adapter, [one.entries for one in found], self.before.windows)
            cache = CompactCache(layers, self._behind(places))
        with phase("decode"):
            asked, evicted = decode_evicted(self.adapter, cache, self.question, self.tokens, self.rows, self.finite)
        with phase("measure"):
            steps = [self._measure(step, len(places)) for step in zip(self.full, evicted, strict=True)]
        whole = sum(layer.borrowed_nbytes for layer in cache.evicted)
        held, padding = cache.nbytes - whole, cache.padding_nbytes
        answers = self._answers(cache, asked, places) if self.run.generate else {}
        moved = {place: torch.stack([one.moved[place] for one in found], dim=-2) for place in found[0].moved}
        kept = [one.masks for one in found]
        return BatchResult(places, steps, found[0].order, kept, held, padding, answers, moved, own)

    def _own(self, places: tuple[int, ...]) -> dict[int, OwnPrefill]:
        """The prefills along lines of configurations whose budget does not cover the prompt."""
        configs = {place: self.run.configs[place] for place in places}
        n, sample = len(self.context), self.before.statistics.sample
        return {
            place: own_prefill(self.adapter, self.context, config, sample, self.resources, self.finite)
            for place, config in configs.items()
            if config.lined and config.kept_entries(n) < n
        }

    def _evict(self, layer: int, places: tuple[int, ...], own: Mapping[int, OwnPrefill]) -> _Evicted:
        """One layer: its rows are one that keeps everything, the configurations, and more of the first kind."""
        held, n = self.adapter.held(self.before.cache, layer), self.before.statistics.tokens
        keys, values = held.keys[0], held.values[0]
        kept = keep(self.layers[layer].groups, set(places), self.kept[layer], keys, values)
        corrected, left = self._corrected(layer, kept, (keys, values))
        kept, moved = self._stored(layer, kept, (keys, values))
        everything = borrow(keys[:, :n], values[:, :n])
        held_by = kept.entries | self._read(layer, places, keys, values)
        held_by |= {place: everything for place in places if self.run.configs[place].lined}
        held_by |= {place: prefilled.rows[layer] for place, prefilled in own.items()}
        rows = [everything, *(held_by[place] for place in places)]
        rows += [everything] * (self.rows - len(rows))
        stand_ins = {row: corrected[place] for row, place in enumerate(places, start=1) if place in corrected}
        cache = CompactLayer(rows, self.adapter.heads, n, self.run.cache, self.passing, stand_ins)
        return _Evicted(cache, kept.order, kept.masks, moved | left)

    def _read(self, layer: int, places: Sequence[int], keys: Tensor, values: Tensor) -> dict[int, KeptEntries]:
        """The rows that evict nothing and read pages."""
        configs = {place: self.run.configs[place] for place in places}
        return page_reading.rows(self.adapter, self.before.statistics, layer, configs, keys, values)

    def _corrected(
        self, layer: int, kept: Kept, whole: tuple[Tensor, Tensor]
    ) -> tuple[dict[int, StandIn], dict[int, Tensor]]:
        """What stands in for the entries that corrected configurations lose, and what is left of the loss."""
        found, configs = self.before.statistics, self.run.configs
        made = correcting.corrections(
            self.adapter, layer, kept.entries, configs, found.mean_queries, whole, found.tokens
        )
        left = correcting.isolated(self.adapter, layer, self.full, whole, made)
        return {place: one.stand_in for place, one in made.items()}, left

    def _stored(self, layer: int, kept: Kept, whole: tuple[Tensor, Tensor]) -> tuple[Kept, dict[int, Tensor]]:
        """The entries as the cache holds them, and what those in few bits change in this layer alone.

        That is measured where they stand in the prompt, as everything isolated is.
        """
        configs = self.run.configs
        there = quantisation.stored(kept, configs)
        turned = positions.positions_in_cache(kept, configs, self.adapter.frequencies)
        held = there if turned.entries == kept.entries else quantisation.stored(turned, configs)
        few = {place: there.entries[place] for place in kept.order if configs[place].quantised}
        for place in few:
            quantised.look(self.finite, self.adapter.layer_indices[layer], held.entries[place])
        return held, quantised.isolated(self.adapter, layer, self.full, whole, few, self.before.statistics.tokens)

    def _behind(self, places: tuple[int, ...]) -> list[int]:
        """Of each row, those that keep everything with it, how far its next position lies before n."""
        own = positions.positions_behind([self.run.configs[place] for place in places], self.before.statistics.tokens)
        return [0, *own, *[0] * (self.rows - 1 - len(own))]

    def _measure(self, step: tuple[StepRecord, StepRecord], configs: int) -> dict[str, Tensor]:
        """The step's quantities, without the rows that fill the batch up."""
        found = measure.propagated(self.adapter, *step)
        if "outputs" in self.run.save:
            found |= measure.raw_outputs(*step)
        return {
            name: tensor[:configs] if "config" in VARIABLES[name].dims else tensor for name, tensor in found.items()
        }

    def _answers(
        self, cache: CompactCache, asked: Float[Tensor, "row vocab"] | None, places: tuple[int, ...]
    ) -> dict[int | None, list[int]]:
        """Each configuration's answer by its place; the full cache's under None, with the first configuration's.

        `asked` are the logits after the question, which stays in the cache: None where there is none.
        """
        first = 0 if 0 in places else 1
        rows = range(first, 1 + len(places))
        cache.forget(after=len(self.question))
        cache.only(rows)
        logits = self.before.logits if asked is None else asked[first : rows.stop]
        ends = end_tokens(self.adapter)
        with phase("answers"):
            made = generate(self.adapter, cache, (), logits, self.run.generate, ends, check=self.finite)
        return dict(zip([None, *places][first:], made, strict=True))

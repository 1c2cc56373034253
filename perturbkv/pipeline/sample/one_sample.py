"""The one pipeline: prefill once, decode from the full cache, evict for every configuration, decode, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from perturbkv import memory
from perturbkv.cache import entries as positions
from perturbkv.cache import quantisation
from perturbkv.cache.compact import CompactCache, CompactLayer, beside
from perturbkv.cache.entries import Kept, Lengths, borrow, keep, lengths
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ActivationError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.generation import generate
from perturbkv.pipeline.answers.recompression import EvictedPrompt
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
from perturbkv.pipeline.sample.decoding import StepRecord, decode_evicted
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.layer import LayerResult, measure_layer
from perturbkv.pipeline.sample.sample_run import SampleRun
from perturbkv.pipeline.variants import corrected as correcting
from perturbkv.pipeline.variants import page_reading, quantised
from perturbkv.pipeline.variants.presses import KeptMasks
from perturbkv.pipeline.variants.sparse_prefill import OwnPrefill, own_prefill, plain_seconds
from perturbkv.schema import VARIABLES
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.trace import FailedSample, SampleTrace

_DEFAULT = Resources()
_NOTHING: KeptMasks = MappingProxyType({})


@memory.translate_allocation_errors()
def trace(
    adapter: Adapter,
    prompts: Iterable[Prompt],
    run: ResolvedRun,
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
            finished(trace_sample(adapter, prompt, run.select_configs(configs), resources))
        except ActivationError as error:
            failed.append(FailedSample(prompt.sample_id, str(error)))
            finished(failed[-1])
    return failed


@torch.inference_mode()
def trace_sample(
    adapter: Adapter, prompt: Prompt, run: ResolvedRun, resources: Resources = _DEFAULT, given: KeptMasks = _NOTHING
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
    planned = batches_of(prompt, run, adapter.shape, resources)
    sample = SampleRun.read(adapter, prompt, run, resources, planned.rows, given)
    layers, kept = _selected(sample)
    sample.prefill.finite.raise_if_not(prompt.sample_id)
    decode = _Decoding(sample, layers, kept)
    batches = [decode.batch(places) for places in planned.indices]
    arrays = _arrays(sample, batches, layers, kept)
    if any(config.has_sparse_prefill for config in run.configs):
        seconds = plain_seconds(adapter, sample.context)
        arrays |= prefill_arrays(batches, run.configs, arrays["held_share"], seconds)
    decode.finite.raise_if_not(prompt.sample_id)
    return SampleTrace(prompt.sample_id, with_all_steps(arrays, run.steps))


def _selected(sample: SampleRun) -> tuple[list[LayerResult], list[Lengths]]:
    """Return every layer's kept sets with what they alone change, and their lengths, per layer and configuration."""
    with phase("layers"):
        layers = [measure_layer(sample, index) for index in range(len(sample.adapter.layers))]
        return layers, lengths([layer.groups for layer in layers], len(sample.run.configs), sample.adapter.device)


def _arrays(
    sample: SampleRun, batches: Sequence[BatchResult], layers: Sequence[LayerResult], kept: Sequence[Lengths]
) -> measure.Arrays:
    """Return everything that a trace holds of the sample, at the steps that were measured."""
    adapter, run, n = sample.adapter, sample.run, sample.tokens
    with phase("assembly"):
        arrays = sample_arrays(sample, batches, kept) | isolated_arrays(layers, adapter.device)
        arrays |= changed_arrays(batches, arrays)
        arrays |= {"held_share": held_share(kept, adapter.kv_heads, n)}
        arrays |= held_bytes(kept, run.configs, adapter.shape, n)
        arrays |= step_arrays(batches) | kept_arrays(batches, kept, layers, adapter.heads)
        arrays |= lost_arrays(layers, adapter.device)
        if run.generate:
            arrays |= answer_arrays(sample, batches)
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

    def __init__(self, sample: SampleRun, layers: Sequence[LayerResult], kept: Sequence[Lengths]) -> None:
        self.sample, self.adapter, self.run = sample, sample.adapter, sample.run
        self.layers, self.kept, self.rows = layers, kept, sample.full.rows
        self.finite, self.passing = FiniteCheck(), passing(sample.run)

    def batch(self, places: tuple[int, ...]) -> BatchResult:
        """One batch: evict, decode, compare."""
        with phase("evict"):
            own = self._own(places)
            found = [self._evict(layer, places, own) for layer in range(len(self.layers))]
            layers = beside(self.adapter, [one.entries for one in found], self.sample.prefill.windows)
            cache = CompactCache(layers, self._behind(places))
        with phase("decode"):
            question, tokens = self.sample.question, self.sample.full.tokens
            asked, evicted = decode_evicted(self.adapter, cache, question, tokens, self.rows, self.finite)
        with phase("measure"):
            steps = [self._measure(step, len(places)) for step in zip(self.sample.full.steps, evicted, strict=True)]
        whole = sum(layer.borrowed_nbytes for layer in cache.evicted)
        held, padding = cache.nbytes - whole, cache.padding_nbytes
        answers = self._answers(cache, asked, places) if self.run.generate else {}
        moved = {place: torch.stack([one.moved[place] for one in found], dim=-2) for place in found[0].moved}
        kept = [one.masks for one in found]
        return BatchResult(places, steps, found[0].order, kept, held, padding, answers, moved, own)

    def _own(self, places: tuple[int, ...]) -> dict[int, OwnPrefill]:
        """The prefills along lines of configurations whose budget does not cover the prompt."""
        configs = {place: self.run.configs[place] for place in places}
        context, sample, resources = self.sample.context, self.sample.prompt.sample_id, self.sample.resources
        n = len(context)
        return {
            place: own_prefill(self.adapter, context, config, sample, resources, self.finite)
            for place, config in configs.items()
            if config.has_sparse_prefill and config.kept_entries(n) < n
        }

    def _evict(self, index: int, places: tuple[int, ...], own: Mapping[int, OwnPrefill]) -> _Evicted:
        """Return one layer: its rows are one that keeps everything, the configurations, and more of the first kind."""
        layer, configs = self.sample.layer(index), self.run.configs
        kept = keep(self.layers[index].groups, set(places), self.kept[index], layer.keys, layer.values)
        made = correcting.corrections(layer, kept.entries, configs)
        left = correcting.isolated(layer, self.sample.full.steps, made)
        kept, moved = self._stored(layer, kept)
        everything = borrow(layer.prompt_keys, layer.prompt_values)
        held_by = kept.entries | page_reading.rows(layer, {place: configs[place] for place in places})
        held_by |= {place: everything for place in places if configs[place].has_sparse_prefill}
        held_by |= {place: prefilled.rows[index] for place, prefilled in own.items()}
        rows = [everything, *(held_by[place] for place in places)]
        rows += [everything] * (self.rows - len(rows))
        stand_ins = {row: made[place].stand_in for row, place in enumerate(places, start=1) if place in made}
        cache = CompactLayer(rows, self.adapter.heads, layer.tokens, self.run.cache, self.passing, stand_ins)
        return _Evicted(cache, kept.order, kept.masks, moved | left)

    def _stored(self, layer: FullLayer, kept: Kept) -> tuple[Kept, dict[int, Tensor]]:
        """Return the entries as the cache holds them, and what those in few bits change in this layer alone.

        That is measured where they stand in the prompt, as everything isolated is.
        """
        configs = self.run.configs
        there = quantisation.stored(kept, configs)
        turned = positions.positions_in_cache(kept, configs, self.adapter.frequencies)
        held = there if turned.entries == kept.entries else quantisation.stored(turned, configs)
        few = {place: there.entries[place] for place in kept.order if configs[place].quantised}
        for place in few:
            quantised.look(self.finite, self.adapter.layer_indices[layer.index], held.entries[place])
        return held, quantised.isolated(layer, self.sample.full.steps, few)

    def _behind(self, places: tuple[int, ...]) -> list[int]:
        """Of each row, those that keep everything with it, how far its next position lies before n."""
        own = positions.positions_behind([self.run.configs[place] for place in places], self.sample.tokens)
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
        cache.forget(after=len(self.sample.question))
        cache.only(rows)
        logits = self.sample.prefill.logits if asked is None else asked[first : rows.stop]
        with phase("answers"):
            made = generate(self.adapter, EvictedPrompt(cache, logits), (), self.run.generate, check=self.finite)
        return dict(zip([None, *places][first:], made, strict=True))

"""The one pipeline: prefill once, decode from the full cache, evict for every configuration, decode, compare.

A GPU reads the next prompt while another thread writes the sample before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, TracebackType

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from perturbkv import memory, theory
from perturbkv.cache.compact import CompactCache, CompactLayer, join_layers
from perturbkv.cache.entries import (
    Lengths,
    borrow,
    check_positions,
    encode_kept_sets,
    gather_kept,
    kept_lengths,
)
from perturbkv.cache.makers import Maker, PromptReading
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.devices import full_precision, stack_on_device, to_device
from perturbkv.errors import ActivationError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.compression import CacheSize, Compressor, EvictedPrompt, held_attention
from perturbkv.pipeline.answers.generation import end_tokens, generate
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.run.plan import copies_each_pass, plan_prompt_batches
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.assembly import (
    BatchResult,
    answer_arrays,
    attention_array,
    cached_sizes,
    changed_isolated_arrays,
    compression_arrays,
    effect_arrays,
    first_token_arrays,
    isolated_arrays,
    kept_arrays,
    lost_arrays,
    own_entries_arrays,
    pad_steps,
    prefill_arrays,
    sample_arrays,
    step_arrays,
)
from perturbkv.pipeline.sample.capture import FiniteCheck
from perturbkv.pipeline.sample.compressed_spans import LaterSets
from perturbkv.pipeline.sample.decoding import StepRecord, decode_evicted, join_rows
from perturbkv.pipeline.sample.effect import average_gradients, propagated_effects
from perturbkv.pipeline.sample.layer import LayerResult, measure_layer, select_groups
from perturbkv.pipeline.sample.sample_run import SampleRun
from perturbkv.pipeline.variants.external_caches import answer_from
from perturbkv.pipeline.variants.given_sets import KeptMasks
from perturbkv.pipeline.variants.readers import time_full_prefill
from perturbkv.schema import VARIABLES
from perturbkv.selection.kept_sets import ExternalGroup, KeptSets, RankingGroup, kept_masks_of
from perturbkv.selection.page_selection import AnyGroup
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.selection.sparse_lines import last_positions
from perturbkv.trace import FailedSample, SampleTrace

_MOST_WAITING = 2
"""Largest number of samples that a `Finisher` has begun or holds."""
_DEFAULT = Resources()
_NO_MASKS: KeptMasks = MappingProxyType({})


class Finisher:
    """A thread that does the host's work of one sample after the other, in order; at most two are begun or waiting.

    Its `with` block ends when all are done, also after an exception or Ctrl-C: no measured sample is lost. Raises what
    the work raises, when the next one is handed over or at the block's end.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="perturbkv-finishing")
        self._waiting: deque[Future[object]] = deque()

    def __enter__(self) -> Finisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            for work in self._waiting:
                work.result()

    def add(self, work: Callable[[], object]) -> None:
        """Let the thread do `work`, after waiting while two others are not done."""
        while len(self._waiting) >= _MOST_WAITING or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()  # of those that are done, too, to raise what they raised
        self._waiting.append(self._thread.submit(work))


@memory.translate_allocation_errors()
def trace(
    adapter: Adapter,
    prompts: Iterable[Prompt],
    run: ResolvedRun,
    resources: Resources = _DEFAULT,
    finished: Callable[[SampleTrace | FailedSample], None] = lambda sample: None,
    lacking: Mapping[str, tuple[EvictionConfig, ...]] = MappingProxyType({}),
) -> list[FailedSample]:
    """Measure prompts one after the other, pass the samples to `finished`, and return the failed samples.

    `finished` is called with each sample as it is ready, on a GPU by another thread while the next prompt is read.
    `lacking` maps a sample's id to the configurations that it still lacks; other samples are measured for all of the
    run's. A sample whose activations are not finite is marked failed and the run goes on. Raises NoMemoryError.
    """
    failed = []
    with Finisher() as finisher:
        for prompt in prompts:
            sample: SampleTrace | FailedSample
            try:
                configs = lacking.get(prompt.sample_id, run.configs)
                sample = trace_sample(adapter, prompt, run.select_configs(configs), resources)
            except ActivationError as error:
                sample = FailedSample(prompt.sample_id, str(error))
                failed.append(sample)
            if adapter.device.type == "cuda":
                finisher.add(partial(finished, sample))
            else:
                finished(sample)
    return failed


@full_precision()
def trace_sample(
    adapter: Adapter,
    prompt: Prompt,
    run: ResolvedRun,
    resources: Resources = _DEFAULT,
    kept_masks: KeptMasks = _NO_MASKS,
) -> SampleTrace:
    """Return the measurements of all configurations of `run` on one prompt (METHOD: the protocol).

    `kept_masks` are the kept sets of configurations of policy `given:NAME`.

    The prompt is read once; all configurations share its scores, norms and reference. Waits for the device for the
    prompt's tokens, the lengths of the evicted caches, whether activations are finite, and every finished array; with
    several steps for the text's end, and with lava for the layers' entropies. Never per head, nor per layer but where
    the cache holds latents, of which it has to count those that are kept.

    Raises ActivationError for NaN or Inf, BudgetError where a budget leaves nothing besides the window, DatasetError
    for a prompt that the scenario cannot split, ConfigError where a configuration exceeds `resources.max_bytes`, and
    what `check_positions` raises.
    """
    inference = not run.averages_gradients  # no backward pass goes through a tensor that was made in inference mode
    with torch.inference_mode(inference), torch.no_grad():
        check_positions(run.configs, adapter.config, adapter.name)
        first = run.at_prompt_end(len(prompt.parts(run.scenario)[0]))
        planned = plan_prompt_batches(prompt, first, adapter.shape, resources)
        sample = SampleRun.read(adapter, prompt, first, resources, planned.rows, kept_masks)
        groups, lengths = _select_layers(sample)
        sample.prefill.finite.raise_if_not(prompt.sample_id)
        decoder = _BatchDecoder(sample, run, groups, lengths)
        batches = [decoder.decode_batch(indices) for indices in planned.indices]
        with phase("layers"):
            layers = [
                measure_layer(sample, index, own, decoder.kept_sets, decoder.finite) for index, own in enumerate(groups)
            ]
        arrays = _assemble_arrays(sample, batches, layers, lengths, decoder.kept_sets)
        if any(batch.prefills for batch in batches):
            arrays |= prefill_arrays(batches, arrays["held_share"], time_full_prefill(adapter, sample.context))
        decoder.finite.raise_if_not(prompt.sample_id)
        return SampleTrace(prompt.sample_id, pad_steps(arrays, run.steps))


def _select_layers(sample: SampleRun) -> tuple[list[list[AnyGroup]], list[Lengths]]:
    """Return the kept sets of every layer, and per layer the numbers of kept entries of all configurations.

    A layer that reads another's cache has the kept sets of the cache's `owner`.
    """
    with phase("layers"):
        groups: list[list[AnyGroup]] = []
        for index, owner in enumerate(sample.adapter.owners):
            groups.append(groups[owner] if owner < index else select_groups(sample, sample.layer(index)))
        return groups, kept_lengths(groups, len(sample.run.configs), sample.adapter.device)


def _assemble_arrays(
    sample: SampleRun,
    batches: Sequence[BatchResult],
    layers: Sequence[LayerResult],
    lengths: Sequence[Lengths],
    later: LaterSets,
) -> measure.Arrays:
    """Return the trace variables of the sample but for those of prefills, without steps that were not measured."""
    adapter, run, n = sample.adapter, sample.run, sample.tokens
    with phase("assembly"):
        arrays = sample_arrays(sample, batches, lengths, later) | isolated_arrays(layers, adapter.device)
        arrays |= effect_arrays(sample, batches, layers) | lost_arrays(layers, adapter.device)
        arrays |= changed_isolated_arrays(batches, arrays)
        arrays |= cached_sizes(batches, adapter.shape, n)
        arrays |= own_entries_arrays(sample, arrays)
        if run.compresses:
            arrays |= compression_arrays(sample, layers, arrays, later)
        arrays |= first_token_arrays(sample, batches)
        arrays |= step_arrays(batches) | kept_arrays(batches, lengths, layers, adapter.heads)
        if run.generate:
            arrays |= answer_arrays(sample, batches)
        if "outputs" in run.save:
            arrays |= attention_array(layers)
        return arrays


@dataclass(frozen=True, eq=False)
class _EvictedLayer:
    """One layer of a batch's evicted cache.

    Attributes:
        cache: the layer of the compact cache.
        order: the configurations, as in `entries.KeptBatch`.
        codes: what `encode_kept_sets` returns for their kept sets.
        own: measured layer that reads this cache -> index of a configuration with entries of its own -> what these
            change in that layer.
        sizes: index of a configuration -> size of its cache.
    """

    cache: CompactLayer
    order: tuple[int, ...]
    codes: tuple[UInt8[Tensor, "kept_set byte"], Int[Tensor, " kept_set"]]
    own: dict[int, dict[int, measure.OwnOutputs]]
    sizes: dict[int, CacheSize]


def _store_step(stored: dict[str, Tensor], step: int, steps: int, quantities: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store a step's quantities in tensors of all `steps`, by name, and return them as they lie there.

    Small tensors of their own would stay between the large ones that each step frees, where no large one fits again.
    """
    for name, tensor in quantities.items():
        if name not in stored:
            stored[name] = tensor.new_empty(steps, *tensor.shape)
        stored[name][step] = tensor
    return {name: stored[name][step] for name in quantities}


class _BatchDecoder:
    """The decoder of one sample from evicted caches, batch by batch of configurations.

    Args:
        sample: the prompt after its prefill and the full run's steps.
        later: the run by which caches are compressed again while they are decoded from.
        groups: per layer the kept sets of all configurations.
        lengths: per layer the numbers of kept entries of all configurations.

    Attributes:
        kept_sets: tokens read -> index of a configuration -> per layer what its row holds once it is compressed.
    """

    def __init__(
        self, sample: SampleRun, later: ResolvedRun, groups: Sequence[Sequence[AnyGroup]], lengths: Sequence[Lengths]
    ) -> None:
        self.sample, self.adapter, self.run, self.later = sample, sample.adapter, sample.run, later
        self.groups, self.lengths, self.rows = groups, lengths, sample.full.rows
        self.finite, self.passing = FiniteCheck(), copies_each_pass(sample.run)
        self.kept_sets: dict[int, dict[int, list[KeptSets]]] = {}

    def decode_batch(self, indices: tuple[int, ...]) -> BatchResult:
        """Evict the cache for the configurations with these indices, decode from it, and return the measurements."""
        sample = self.sample
        with phase("evict"):
            prompt = PromptReading(self.adapter, sample.context, sample.prompt.sample_id, sample.resources, self.finite)
            makers = {index: sample.makers[index].begin(prompt) for index in indices}
            evicted_layers = [self._evict(layer, makers) for layer in self.adapter.holders]
            compact = [layer.cache for layer in evicted_layers]
            cache = CompactCache(join_layers(self.adapter, compact, sample.prefill.states))
            cache_bytes = cache.nbytes - sum(layer.borrowed_nbytes for layer in cache.evicted_layers)
            padding_bytes = cache.padding_nbytes
            again = self.run.averages_gradients or (self.run.generate and self.run.compresses)
            undecoded = cache.fork() if again else None
            if undecoded is not None:
                undecoded.keep_rows(range(1 + len(indices)))  # no padding rows
        sizes = {
            index: CacheSize(*map(sum, zip(*(layer.sizes[index] for layer in evicted_layers), strict=True)))
            for index in indices
        }
        if latent := self.adapter.shape.latent:
            stored = sum(size.entries for size in sizes.values())
            cache_bytes, padding_bytes = stored * latent * self.adapter.dtype.itemsize, 0
        question_logits, steps, gradients = self._decode(cache, indices, undecoded)
        answers = (
            self._answers(
                undecoded if undecoded is not None and self.run.compresses else cache, question_logits, indices
            )
            if self.run.generate
            else {}
        )
        first, owners = evicted_layers[0], self.adapter.owners
        return BatchResult(
            configs=indices,
            steps=steps,
            order=first.order,
            kept=[evicted_layers[owner].codes for owner in owners],
            cache_bytes=cache_bytes,
            padding_bytes=padding_bytes,
            sizes=sizes,
            generated=answers,
            isolated={
                index: self._own_isolated(index, 1 + indices.index(index), evicted_layers, gradients)
                for index in first.own[0]
            },
            prefills={index: maker.prefill for index, maker in makers.items() if maker.prefill is not None},
            first_logp=None if question_logits is None else self._first_logp(question_logits, indices),
            gradients=[[layer[1:] for layer in of_step] for of_step in gradients]
            if self.run.averages_gradients
            else [],
        )

    def _decode(
        self, cache: CompactCache, indices: tuple[int, ...], undecoded: CompactCache | None
    ) -> tuple[Tensor | None, list[dict[str, Tensor]], list[list[Tensor]]]:
        """Decode question and text from a batch's cache, and return the logits after the question and the steps.

        Steps are name -> quantity, and their gradients, row by row. `undecoded` is the cache before it decoded
        anything, where gradients go through it.
        """
        sample, full = self.sample, self.sample.full
        compressor = self._compressor(cache, indices, told=True)
        with phase("decode"):
            question_logits, decoded = decode_evicted(
                self.adapter, cache, sample.question, full.tokens, self.finite, compressor
            )
        records, steps, stored = list[StepRecord](), list[dict[str, Tensor]](), dict[str, Tensor]()
        for reference, evicted in zip(full.steps, decoded, strict=True):
            measure.check_everything_kept(self.finite, self.adapter, reference.logits[0], evicted.logits[0])
            evicted.gradient = [layer.expand(1 + len(indices), -1, -1) for layer in reference.gradient]
            records.append(evicted)
            if not self.run.averages_gradients:
                steps.append(
                    _store_step(stored, len(steps), len(full.steps), self._measure(len(steps), evicted, len(indices)))
                )
                records[-1] = StepRecord(gradient=evicted.gradient)  # the rest is measured
        if self.run.averages_gradients and undecoded is not None:
            with phase("effect"):
                average_gradients(self.adapter, undecoded, sample.question, records, full.text, self.finite)
            steps = [self._measure(step, record, len(indices)) for step, record in enumerate(records)]
        self._put_called(indices, steps)
        if compressor is not None:
            for read, rows in compressor.kept_sets.items():
                self.kept_sets.setdefault(read, {}).update((indices[row], sets) for row, sets in rows.items())
        return question_logits, steps, [record.gradient for record in records]

    def _compressor(self, cache: CompactCache, indices: Sequence[int], told: bool = False) -> Compressor | None:
        """Return what compresses a batch's cache again, or None; `told`: it tells which entries stay."""
        if not self.run.compresses:
            return None
        statistics = self.sample.prefill.statistics
        queries = statistics.queries[last_positions(self.later.largest_window, self.sample.tokens)]
        later = replace(self.later, configs=tuple(self.later.configs[index] for index in indices))
        heads, evicting = self.adapter.heads, RankingGroup | ExternalGroup
        of_layers = (kept_masks_of([one for one in groups if isinstance(one, evicting)]) for groups in self.groups)
        held = [[masks[index] for index in indices] for masks in of_layers]
        attention = {
            place: [
                held_attention(statistics, config, layer, heads, masks[place], max(self.lengths[layer][indices[place]]))
                for layer, masks in enumerate(held)
            ]
            for place, config in enumerate(later.configs)
            if config.accumulates
        }
        prompt = EvictedPrompt(cache, self.sample.prefill.logits, queries, gates=statistics.gates, attention=attention)
        name, question = self.sample.prompt.sample_id, len(self.sample.question)
        return Compressor(self.adapter, prompt, later, name, self.sample.resources, held if told else (), question)

    def _first_logp(self, question_logits: Float[Tensor, "row vocab"], indices: Sequence[int]) -> Tensor:
        """Return log p of the text's first token (config,), after the question."""
        token = self.sample.full.tokens[0]
        first_logp = theory.token_log_probability(
            theory.log_probabilities(question_logits[1 : 1 + len(indices)]), token
        )
        for place, index in enumerate(indices):
            own = self.sample.caches.get(self.run.configs[index])
            if own is not None and own.question_logits is not None:
                log_p = theory.log_probabilities(own.question_logits)
                first_logp[place] = theory.token_log_probability(log_p, token)
        return first_logp

    def _put_called(self, indices: Sequence[int], steps: Sequence[dict[str, Tensor]]) -> None:
        """Put the quantities of caches that decoded for themselves in the place of those of their rows of the batch.

        Noise floors become the larger one of both ways to decode.
        """
        caches = {row: self.sample.caches.get(self.run.configs[index]) for row, index in enumerate(indices)}
        called = {row: cache.steps for row, cache in caches.items() if cache is not None and cache.steps}
        if not called or self.sample.control is None:
            return
        rows = to_device(list(called), self.adapter.device)
        each = zip(self.sample.full.steps, self.sample.control.steps, *called.values(), strict=True)
        for step, (full, *records) in enumerate(each):
            measure.check_everything_kept(self.finite, self.adapter, full.logits[0], records[0].logits[0])
            joined = join_rows(records)
            joined.gradient = [layer.expand(len(records), -1, -1) for layer in full.gradient]
            own = self._measure(step, joined, len(called))
            for name, tensor in own.items():
                if "config" in VARIABLES[name].dims:
                    steps[step][name][rows] = tensor
                else:
                    steps[step][name] = torch.maximum(steps[step][name], tensor)

    def _own_isolated(
        self, config: int, row: int, evicted_layers: Sequence[_EvictedLayer], gradients: Sequence[Sequence[Tensor]]
    ) -> Float[Tensor, "step name layer head"]:
        """Return the isolated `CHANGED_VARIABLES` of a configuration with entries of its own, a row of `gradients`."""
        own = [evicted_layers[owner].own[layer][config] for layer, owner in enumerate(self.adapter.owners)]
        layers = [
            outputs.with_effect([of_step[layer][row] for of_step in gradients if of_step])
            for layer, outputs in enumerate(own)
        ]
        return stack_on_device(self.adapter.device, layers, dim=-2)

    def _evict(self, index: int, makers: Mapping[int, Maker]) -> _EvictedLayer:
        """Return the evicted cache's layer `index` for the configurations with the given makers.

        Its rows are one that keeps everything, one per configuration, and padding rows that keep everything.
        """
        layer, lengths = self.sample.layer(index), self.lengths[index]
        kept = gather_kept(self.groups[index], makers, lengths, layer.keys, layer.values, layer.latent)
        codes = encode_kept_sets(kept.position, [n for config in kept.order for n in lengths[config]], kept.masks)
        sets = kept.sets()
        made = {config: maker.make(layer, sets[config]) for config, maker in makers.items()}
        for entries in made.values():
            if entries.has_rounded_numbers:
                measure.check_stored_entries(self.finite, self.adapter.layer_indices[index], entries.row)
        own = {
            reader: measure.own_outputs(self.sample.layer(reader), self.sample.full.steps, made)
            for reader, owner in enumerate(self.adapter.owners)
            if owner == index
        }
        everything = borrow(layer.prompt_keys, layer.prompt_values)
        rows = [everything, *(entries.row for entries in made.values())]
        rows += [everything] * (self.rows - len(rows))
        stand_ins = {row: entries.stand_in for row, entries in enumerate(made.values(), start=1) if entries.stand_in}
        cache = CompactLayer(rows, self.adapter.heads, layer.tokens, self.run.cache, self.passing, stand_ins)
        sizes = {config: CacheSize.of(entries) for config, entries in made.items()}
        return _EvictedLayer(cache, kept.order, codes, own, sizes)

    def _measure(self, step: int, evicted: StepRecord, configs: int) -> dict[str, Tensor]:
        """Return name -> propagated quantity of a step, without padding rows."""
        full, next_token = self.sample.full.steps[step], self.sample.full.next_tokens[step]
        with phase("measure"):
            quantities = measure.propagated_quantities(self.adapter, full, evicted, next_token)
            if "outputs" in self.run.save:
                quantities |= measure.raw_outputs(full, evicted)
            if "effect" in self.run.save:
                quantities |= propagated_effects(full, evicted)
        return {
            name: tensor[:configs] if "config" in VARIABLES[name].dims else tensor
            for name, tensor in quantities.items()
        }

    def _answers(
        self, cache: CompactCache, question_logits: Float[Tensor, "row vocab"] | None, indices: tuple[int, ...]
    ) -> dict[int | None, list[int]]:
        """Return index -> answer tokens per configuration, and, in the first batch, None -> the full cache's.

        `question_logits` are those after the question, which stays in the cache; None without a question. A cache that
        is compressed again has decoded nothing, and reads the question anew.
        """
        first = 0 if 0 in indices else 1
        rows, logits, question = range(first, 1 + len(indices)), self.sample.prefill.logits, self.sample.question
        compressor = self._compressor(cache, indices)
        if compressor is None:
            cache.forget(after=len(question))
            cache.keep_rows(rows)
            logits, question = logits if question_logits is None else question_logits[first : rows.stop], ()
        with phase("answers"):
            prompt = EvictedPrompt(cache, logits)
            answers = generate(self.adapter, prompt, question, self.run.generate, compressor, self.finite)
        answers = answers[first:] if compressor is not None else answers
        found = dict(zip([None, *indices][first:], answers, strict=True))
        for index in indices:
            config, sample = self.run.configs[index], self.sample
            if (own := sample.caches.get(config)) is not None and own.steps:  # it reads the context anew
                parts, ends = (sample.context, sample.question), end_tokens(self.adapter)
                found[index] = answer_from(self.adapter, config, *parts, sample.prefill, self.run.generate, ends)
        return found

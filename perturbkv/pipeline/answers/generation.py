"""Greedy generation from evicted caches: a prompt's configurations as one batch, each stopping at its own end.

The prompt is prefilled without measurement, each layer evicted as soon as it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from perturbkv import memory
from perturbkv.cache.compact import CompactCache, CompactLayer, join_layers
from perturbkv.cache.entries import GatheredSet, borrow, check_positions, gather_kept, kept_lengths
from perturbkv.cache.makers import Entries, Maker
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.number_formats import FULL_BITS
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.devices import full_precision, to_device
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.pipeline.answers.compression import CacheSize, Compression, Compressor, EvictedPrompt, held_attention
from perturbkv.pipeline.answers.teacher_forcing import Divergence, check_first_row, teacher_force
from perturbkv.pipeline.run.plan import plan_prompt_batches
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.capture import LOGITS, FiniteCheck, Observer, capture, decode_from
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.prefill import Prefill, Statistics, free_entries, prefill
from perturbkv.pipeline.variants.external_caches import ExternalCache, read_plain_caches
from perturbkv.pipeline.variants.given_sets import sources
from perturbkv.pipeline.variants.readers import maker_of
from perturbkv.scoring.layer_view import LayerView
from perturbkv.selection import compatibility
from perturbkv.selection.kept_sets import kept_masks_of
from perturbkv.selection.policies.registry import has_own_code
from perturbkv.selection.resolved_config import ResolvedConfig, ResolvedRun
from perturbkv.selection.sparse_lines import last_positions

_DEFAULT = Resources()


def prefill_and_evict(
    adapter: Adapter,
    prompt: Prompt,
    run: ResolvedRun,
    resources: Resources = _DEFAULT,
    *,
    with_full: bool = False,
) -> EvictedPrompt:
    """Prefill a prompt, evict each layer as soon as it is computed, and return the evicted cache.

    No more than one layer's full cache is in memory, unless a configuration needs all layers or a replay: then layers
    are evicted after the prefill, one after the other. `with_full` adds a first row that keeps everything. A context of
    at most `run.compress_over` entries is not evicted yet, but later.

    Raises what `check_positions` and `sources` raise, and ActivationError for NaN or Inf.
    """
    check_positions(run.configs, adapter.config, adapter.name)
    context, _ = prompt.parts(run.scenario)
    keep_all = len(context) <= run.compress_over
    run = run.at_prompt_end(len(context))
    external = sources(adapter, context, run.configs, {})
    rows = _RowBuilder(adapter, run, with_full, keep_all)
    prefilled = prefill(adapter, prompt, run, resources, external, rows)
    prefilled.finite.raise_if_not(prompt.sample_id)
    if rows.needs_full_cache:
        caches = read_plain_caches(adapter, run.configs, context, prefilled)
        external |= {config: cache.kept_set for config, cache in caches.items()}
        rows.evict_all(prefilled, caches)
    rows.finite.raise_if_not(prompt.sample_id)
    cache = CompactCache(join_layers(adapter, rows.layers, prefilled.states))
    full = prefilled.cache if adapter.shape.latent else None
    statistics = prefilled.statistics
    queries = statistics.queries[last_positions(run.largest_window, len(context))] if run.compresses else []
    return EvictedPrompt(cache, prefilled.logits, queries, rows.sizes, statistics.gates, full, rows.attention)


class _RowBuilder:
    """The builder of a compact cache, layer by layer, with one row per configuration.

    Args:
        adapter: the model.
        run: the run of the configurations.
        with_full: whether a row that keeps everything comes first.
        keep_all: whether caches of policies of ours keep everything as yet.

    Attributes:
        needs_full_cache: whether layers are evicted after the whole prefill, as in `Visitor`.
        layers: the compact layers that are built.
        sizes, attention: as in `EvictedPrompt`.
        finite: whether the stored entries are finite.
    """

    def __init__(self, adapter: Adapter, run: ResolvedRun, with_full: bool, keep_all: bool) -> None:
        self._adapter, self._configs, self._layout = adapter, run.configs, run.cache
        self._with_full, self._keep_all = with_full, keep_all
        self._makers = list(map(maker_of, run.configs))
        self.needs_full_cache = any(
            compatibility.needs_all_layers(config) or has_own_code(config.policy.name) for config in run.configs
        )
        self.layers: list[CompactLayer] = []
        self.sizes: list[list[CacheSize]] = []
        self.attention: dict[int, list[Tensor]] = {
            index: [] for index, config in enumerate(run.configs) if run.compresses and config.accumulates
        }
        self.finite = FiniteCheck()

    def visit(self, statistics: Statistics, view: LayerView) -> None:
        """Evict a layer unless all layers must be read first: a `Visitor`."""
        if not self.needs_full_cache:
            self._evict(FullLayer(self._adapter, statistics, view.layer, view.keys, view.values))

    def evict_all(self, prefilled: Prefill, caches: Mapping[ResolvedConfig, ExternalCache]) -> None:
        """Evict every layer after the prefill, freeing the full cache layer by layer.

        `caches` are what somebody's code has read for the caches of its configurations.
        """
        self._makers = [caches.get(config, maker) for config, maker in zip(self._configs, self._makers, strict=True)]
        for index in self._adapter.holders:
            self._evict(FullLayer.from_prefill(self._adapter, prefilled, index))
            free_entries(self._adapter, prefilled.cache, prefilled.read, index)

    def _evict(self, layer: FullLayer) -> None:
        """Append the compact layer with the entries of all rows, and count them."""
        everything = borrow(layer.keys, layer.values, layer.latent)
        number = self._adapter.layer_indices[layer.index]
        made = self._make(layer)
        if self._keep_all:
            whole = zip(self._configs, self._makers, made, strict=True)
            made = [own if one.is_external else maker.make_whole(everything, number) for one, maker, own in whole]
        for entries in made:
            if entries.has_rounded_numbers:
                measure.check_stored_entries(self.finite, number, entries.row)
        full = Maker().make_whole(everything, number)
        self.sizes.append(list(map(CacheSize.of, (full, *made))))
        first = [everything] if self._with_full else []
        stand_ins = {
            row: entries.stand_in for row, entries in enumerate(made, start=len(first)) if entries.stand_in is not None
        }
        rows, heads = [*first, *(entries.row for entries in made)], self._adapter.heads
        self.layers.append(CompactLayer(rows, heads, layer.tokens, self._layout, stand_ins=stand_ins))

    def _make(self, layer: FullLayer) -> list[Entries]:
        """Return what the caches of all configurations hold of the layer."""
        groups, sets = layer.groups(self._configs), dict[int, GatheredSet]()
        if groups:
            evicting = [index for group in groups for index in group.config_indices]
            (counts,) = kept_lengths([groups], len(self._configs), layer.keys.device)
            sets = gather_kept(groups, evicting, counts, layer.keys, layer.values, layer.latent).sets()
            masks = kept_masks_of(groups)
            for index, own in self.attention.items():
                held = self._configs[index], layer.index, self._adapter.heads, masks[index], max(counts[index])
                own.append(held_attention(layer.statistics, *held))
        everything = GatheredSet.of_all(layer.keys, layer.values, layer.latent)
        return [maker.make(layer, sets.get(index, everything)) for index, maker in enumerate(self._makers)]


def check_answer_options(configs: Iterable[EvictionConfig], most: int | None) -> None:
    """Raise ConfigError for configurations that generation does not support, or answers of fewer tokens than 1.

    `most` is the largest number of tokens of an answer, None for the data's own.
    """
    if most is not None and most < 1:
        raise ConfigError(f"max_new_tokens (--max-new-tokens) must be at least 1, got {most}")
    for config in configs:
        compatibility.check_generation(config)


@torch.inference_mode()
def generate(
    adapter: Adapter,
    prompt: EvictedPrompt,
    question: Sequence[int],
    most: int,
    compressor: Compressor | None = None,
    check: FiniteCheck | None = None,
) -> list[list[int]]:
    """Return the greedy answer of every cache row: at most `most` tokens, up to the first end token.

    Without a question, the first tokens come from the prompt's logits; `check` records all later ones. Without a
    compressor, finished rows leave the cache once they are half of it.
    """
    finite, cache, ends = check or FiniteCheck(), prompt.cache, end_tokens(adapter)
    rows = cache.rows
    observer = Observer() if compressor is None else compressor.observer()
    ids = torch.tensor([list(question)], device=adapter.device).expand(rows, -1)
    next_tokens = prompt.logits.argmax(dim=-1).expand(rows)
    answers: list[list[int]] = [[] for _ in range(rows)]
    batch_rows, open_rows = list(range(rows)), set(range(rows))  # rows still in the cache; unfinished ones
    with decode_from(adapter, cache), capture(adapter, observer):
        if question:
            next_tokens = _next_tokens(adapter, cache, ids, finite)
        for count in range(1, most + 1):
            for row, token in zip(batch_rows, next_tokens.tolist(), strict=True):
                if row in open_rows and token not in ends:
                    answers[row].append(token)
                else:
                    open_rows.discard(row)
            if not open_rows or count == most:
                break
            if compressor is not None:
                compressor.compress(count - 1)
            elif 2 * len(open_rows) <= len(batch_rows):
                open_indices = [index for index, row in enumerate(batch_rows) if row in open_rows]
                cache.keep_rows(open_indices)
                batch_rows = [batch_rows[index] for index in open_indices]
                next_tokens = next_tokens[to_device(open_indices, next_tokens.device)]
            next_tokens = _next_tokens(adapter, cache, next_tokens.unsqueeze(-1), finite)
    return answers


def _next_tokens(adapter: Adapter, cache: CompactCache, ids: Tensor, check: FiniteCheck) -> Tensor:
    """Read tokens (row, token) into the cache, and return the greedy next token per row."""
    logits: Tensor = run_with_cache(adapter.model, ids, cache, logits_to_keep=1).logits
    check.check(LOGITS, logits)
    return logits[:, -1].argmax(dim=-1)


@dataclass(frozen=True)
class Answers:
    """The answers of one prompt from all caches.

    Attributes:
        full: token ids of the full cache's answer.
        evicted: token ids of each configuration's answer.
        held: entries of each configuration's cache over those of the full cache, after the context, all layers counted.
        compressions: compressions of the caches during decoding.
        divergence: divergence of the evicted caches on the full cache's answer, where requested.
        stored: bytes of each configuration's cache over those of the full cache in 16 bits, after the context; empty
            where no configuration is quantised or corrected.
    """

    full: list[int]
    evicted: list[list[int]]
    held: list[float]
    compressions: list[Compression]
    divergence: Divergence | None = None
    stored: list[float] = field(default_factory=list)


@memory.translate_allocation_errors()
@full_precision()
def answer(
    adapter: Adapter, prompt: Prompt, run: ResolvedRun, resources: Resources = _DEFAULT, *, divergence: bool = False
) -> Answers:
    """Read a prompt, and return the answers from the full cache and every configuration's cache.

    `divergence`: it is also measured while every cache reads the full cache's answer.
    All caches are decoded in one batch. Those that exceed `resources.max_bytes` are decoded in several, and each batch
    reads the prompt anew.

    Raises ActivationError for NaN or Inf, NoMemoryError, ConfigError where one configuration alone exceeds the bound,
    and ModelError where the model decodes otherwise from a compact cache that keeps everything than from its own.
    """
    indices: Sequence[tuple[int, ...]] = [tuple(range(len(run.configs)))]
    if resources.max_bytes is not None:
        indices = plan_prompt_batches(prompt, run, adapter.shape, resources).indices
    batches: list[Answers] = []
    for batch in indices:
        part = run.select_configs(run.configs[index] for index in batch)
        batches.append(
            _answer_batch(adapter, prompt, part, divergence, resources, batches[0].full if batches else None)
        )
    joined = _join_batches(indices, batches)
    return replace(joined, stored=[]) if all(config.in_16_bits for config in run.configs) else joined


def _answer_batch(
    adapter: Adapter,
    prompt: Prompt,
    run: ResolvedRun,
    with_divergence: bool,
    resources: Resources,
    full_answer: list[int] | None,
) -> Answers:
    """Return the answers from the caches of `run`; `full_answer`, if known, is that of an earlier batch."""
    context, question = prompt.parts(run.scenario)
    evicted = prefill_and_evict(adapter, prompt, run, resources, with_full=True)
    unmeasured = adapter.shape.unmeasured_numbers(len(context))
    entry_shares = _shares_of_full(
        [[size.entries for size in layer] for layer in evicted.sizes], unmeasured / adapter.shape.stored_entries[1]
    )
    byte_shares = _shares_of_full([[size.bits for size in layer] for layer in evicted.sizes], FULL_BITS * unmeasured)
    forked = replace(evicted, cache=evicted.cache.fork()) if with_divergence else None

    def make_compressor(evicted_prompt: EvictedPrompt) -> Compressor | None:
        if not run.compresses:
            return None
        return Compressor(adapter, evicted_prompt, run, prompt.sample_id, resources, question=len(question))

    compressor, check = make_compressor(evicted), FiniteCheck()
    if full_answer is None and forked is None:  # a divergence checks its own steps
        check_first_row(adapter, evicted, question, check)
    full, *answers = generate(adapter, evicted, question, run.generate, compressor, check)
    full = full if full_answer is None else full_answer
    divergence = None
    if forked is not None:
        divergence = teacher_force(adapter, forked, question, full, make_compressor(forked), check)
    check.raise_if_not(prompt.sample_id)
    compressions = compressor.compressions if compressor else []
    return Answers(full, answers, entry_shares, compressions, divergence, byte_shares)


def _join_batches(indices: Sequence[Sequence[int]], batches: Sequence[Answers]) -> Answers:
    """Return the answers of batches as one; `indices` are those of each batch's configurations in the run.

    The noise floor is the largest of the batches, which have different shapes.
    """
    order = [index for batch in indices for index in batch]
    run_order = sorted(range(len(order)), key=order.__getitem__)  # of joined items, the inverse permutation of `order`

    def join(lists: Iterable[Sequence[Any]]) -> list[Any]:
        joined = [item for each in lists for item in each]
        return [joined[place] for place in run_order]

    compressions = [
        replace(compression, config=batch[compression.config])
        for batch, answers in zip(indices, batches, strict=True)
        for compression in answers.compressions
    ]
    divergences = [answers.divergence for answers in batches if answers.divergence is not None]
    divergence = None
    if divergences:
        divergence = Divergence(
            torch.cat([each.kl for each in divergences])[run_order],
            torch.cat([each.top1 for each in divergences])[run_order],
            torch.stack([each.noise_floor for each in divergences]).amax(dim=0),
        )
    return Answers(
        batches[0].full,
        join(answers.evicted for answers in batches),
        join(answers.held for answers in batches),
        sorted(compressions, key=lambda each: (each.generated, each.config)),
        divergence,
        join(answers.stored for answers in batches),
    )


def _shares_of_full(sizes: Sequence[Sequence[int | float]], unmeasured: int | float) -> list[float]:
    """Return each configuration's size over the full cache's, both with the size of `unmeasured` layers.

    `sizes` are per measured layer, the full cache's first.
    """
    full, *evicted = map(sum, zip(*sizes, strict=True))
    return [(size + unmeasured) / (full + unmeasured) for size in evicted]


def end_tokens(adapter: Adapter) -> set[int]:
    """Return the ids of the tokens that end an answer, by the tokenizer and by the model's generation settings."""
    settings = getattr(adapter.model, "generation_config", None)
    tokens: set[int | None] = set()
    for ends in (getattr(adapter.tokenizer, "eos_token_id", None), getattr(settings, "eos_token_id", None)):
        tokens |= set(ends) if isinstance(ends, list | tuple) else {ends}
    return {end for end in tokens if end is not None}

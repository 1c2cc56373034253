"""Greedy generation from evicted caches: all configurations of a prompt as one batch, each stopping at its own end.

The prompt is prefilled without measurement, each layer evicted as soon as it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perturbkv import memory
from perturbkv.cache import entries, quantisation
from perturbkv.cache.compact import CompactCache, CompactLayer, join_layers
from perturbkv.cache.entries import KeptEntries, borrow, gather_kept, lengths
from perturbkv.cache.quantisation import layer_bits
from perturbkv.cache.stand_in import StandIn
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import FULL, stored_bits
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.devices import to_device
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.recompression import Compression, Compressor, EvictedPrompt
from perturbkv.pipeline.answers.teacher_forcing import Divergence, teacher_force
from perturbkv.pipeline.sample.capture import LOGITS, FiniteCheck, Observer, capture, decode_from
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.prefill import Prefill, Statistics, prefill
from perturbkv.pipeline.variants import corrected, page_reading, quantised
from perturbkv.pipeline.variants.presses import sources
from perturbkv.scoring.layer_view import LayerView
from perturbkv.selection import compatibility
from perturbkv.selection.resolved_config import ResolvedConfig, ResolvedRun

if TYPE_CHECKING:
    from perturbkv.pipeline.run.plan import Plan


_DEFAULT = Resources()


def read_evicting(
    adapter: Adapter,
    prompt: Prompt,
    run: ResolvedRun,
    resources: Resources = _DEFAULT,
    *,
    with_full: bool = False,
    above: int = 0,
) -> EvictedPrompt:
    """Prefill, and evict each layer as soon as it is done, so that no more than one layer's full cache is in memory.

    `with_full` puts a row that keeps everything first, for which all layers stay. They also stay until the end of the
    prefill where a configuration needs all layers or a replay, and are then freed one after the other. A prompt of at
    most `above` entries is kept whole, for later compressions.

    Raises what `entries.check_positions` raises.
    """
    entries.check_positions(run.configs, adapter.config, adapter.name)
    context, _ = prompt.parts(run.scenario)
    whole = len(context) <= above
    given = sources(adapter, context, [] if whole else run.configs, {})
    rows = _RowBuilder(adapter, run, with_full, keeps=whole)
    read = prefill(adapter, prompt, run, resources, given, rows)
    read.finite.raise_if_not(prompt.sample_id)
    if rows.whole:
        rows.evict_all(read)
    rows.stored.raise_if_not(prompt.sample_id)
    behind = [0] * len(run.configs) if whole else entries.position_offsets(run.configs, len(context))
    cache = CompactCache(join_layers(adapter, rows.layers, read.windows), [*([0] if with_full else []), *behind])
    return EvictedPrompt(cache, read.logits, rows.queries)


class _RowBuilder:
    """The builder of a cache's rows, layer by layer: one that keeps everything where requested, and the run's.

    Args:
        adapter: the model.
        run: the run of the configurations.
        with_full: whether a row that keeps everything comes first.
        keeps: whether nothing is evicted yet.
    """

    def __init__(self, adapter: Adapter, run: ResolvedRun, with_full: bool, keeps: bool) -> None:
        self._adapter, self._configs, self._layout = adapter, run.configs, run.cache
        self._with_full, self._keeps = with_full, keeps
        self._window = max(config.window for config in run.configs)
        self.whole = not keeps and any(compatibility.needs_all_layers(config) for config in run.configs)
        self.layers: list[CompactLayer] = []
        self.queries: list[Tensor] = []
        self.stored = FiniteCheck()

    def visit(self, statistics: Statistics, view: LayerView) -> None:
        """Take a layer's last queries, and evict it unless all layers are needed first."""
        self.queries.append(view.queries[:, -self._window :].clone())
        if not self.whole:
            self._evict(FullLayer(self._adapter, statistics, view.layer, view.keys, view.values))

    def evict_all(self, read: Prefill) -> None:
        """Evict all layers after the prefill, and free each one's full cache."""
        for index in range(len(self._adapter.layers)):
            self._evict(FullLayer.of(self._adapter, read, index))
            held = self._adapter.cache_layer(read.cache, index)
            held.keys, held.values = held.keys.new_empty(0), held.values.new_empty(0)

    def _evict(self, layer: FullLayer) -> None:
        kept, stand_ins = (self._keep_everything(layer), {}) if self._keeps else self._kept_entries(layer)
        for row, config in zip(kept, self._configs, strict=True):
            if config.quantised:
                quantised.check_finite(self.stored, self._adapter.layer_indices[layer.index], row)
        everything = [borrow(layer.keys, layer.values)] if self._with_full else []
        by_row = {index + len(everything): one for index, one in stand_ins.items()}
        rows, heads = [*everything, *kept], self._adapter.heads
        self.layers.append(CompactLayer(rows, heads, layer.tokens, self._layout, stand_ins=by_row))

    def _keep_everything(self, layer: FullLayer) -> list[KeptEntries]:
        row = borrow(layer.keys, layer.values)
        return [quantisation.quantise_entries(row, one) if one.quantised else row for one in self._configs]

    def _kept_entries(self, layer: FullLayer) -> tuple[list[KeptEntries], dict[int, StandIn]]:
        """Return the kept entries of each configuration, and the corrections for evicted ones."""
        configs = self._configs
        read = page_reading.cache_rows(layer, dict(enumerate(configs)))
        if len(read) == len(configs):
            return [read[index] for index in range(len(configs))], {}
        chosen = layer.groups(configs)
        (counts,) = lengths([chosen], len(configs), layer.keys.device)
        kept = gather_kept(chosen, range(len(configs)), counts, layer.keys, layer.values)
        made = corrected.corrections(layer, kept.entries, configs)
        kept = entries.rotate_to_cache_positions(kept, configs, self._adapter.frequencies)
        kept = quantisation.quantise_kept(kept, configs)
        stand_ins = {index: one.stand_in for index, one in made.items()}
        held = kept.entries | read
        return [held[index] for index in range(len(configs))], stand_ins


def check_answer_options(configs: Iterable[EvictionConfig], most: int | None, compress_every: int | None) -> None:
    """Raise ConfigError for options that no answers can be generated with; `most` tokens each, None: the data's."""
    if most is not None and most < 1:
        msg = f"max_new_tokens (--max-new-tokens) must be at least 1, got {most}"
        raise ConfigError(msg)
    for config in configs:
        compatibility.check_generation(config)
        if compress_every is not None:
            _check_compressing(config, compress_every)


def _check_compressing(config: EvictionConfig, compress_every: int) -> None:
    compatibility.check_compressible(config)
    budget = config.budget.value
    if not isinstance(budget, int) or budget >= compress_every:
        msg = (
            f"compress_every (--compress-every) {compress_every} needs a budget in tokens below it, got "
            f"budget {config.budget}"
        )
        raise ConfigError(msg)


def check_memory(planned: Plan) -> None:
    """Raise ConfigError where the bound on memory would split the batch of configurations that answer."""
    bound, configs = planned.resources.max_bytes, len(planned.run.configs)
    if bound is not None and len(planned.batches.indices) > 1:
        msg = (
            f"generate answers from all caches at once, and max_bytes (--max-memory) of {bound:,} bytes holds those of "
            f"{planned.batches.rows - 1} of {configs} configurations; raise it or ask for fewer"
        )
        raise ConfigError(msg)


@torch.inference_mode()
def generate(
    adapter: Adapter,
    read: EvictedPrompt,
    question: Sequence[int],
    most: int,
    compressor: Compressor | None = None,
    check: FiniteCheck | None = None,
) -> list[list[int]]:
    """Return at most `most` tokens per row of the prompt's cache, greedily; a row ends before the first end token.

    Without a question, first tokens come from the prompt's logits; `check` checks all others. Without a compressor,
    rows that ended leave the cache once they are half of it.
    """
    finite, cache, ends = check or FiniteCheck(), read.cache, end_tokens(adapter)
    rows = cache.layers[0].batch
    watch = Observer(attention=None if compressor is None else compressor.watch)
    ids = torch.tensor([list(question)], device=adapter.device).expand(rows, -1)
    following = read.logits.argmax(dim=-1).expand(rows)
    answers: list[list[int]] = [[] for _ in range(rows)]
    batch_rows, open_rows = list(range(rows)), set(range(rows))
    with decode_from(adapter, cache), capture(adapter, watch):
        if question:
            following = _next_tokens(adapter, cache, ids, finite)
        for count in range(1, most + 1):
            for row, token in zip(batch_rows, following.tolist(), strict=True):
                if row in open_rows and token not in ends:
                    answers[row].append(token)
                else:
                    open_rows.discard(row)
            if not open_rows or count == most:
                break
            if compressor is not None:
                compressor.compress(count)
            elif 2 * len(open_rows) <= len(batch_rows):
                open_indices = [index for index, row in enumerate(batch_rows) if row in open_rows]
                cache.keep_rows(open_indices)
                batch_rows, following = (
                    [batch_rows[index] for index in open_indices],
                    following[to_device(open_indices, adapter.device)],
                )
            following = _next_tokens(adapter, cache, following.unsqueeze(-1), finite)
    return answers


def _next_tokens(adapter: Adapter, cache: CompactCache, ids: Tensor, check: FiniteCheck) -> Tensor:
    logits: Tensor = adapter.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    check.check(LOGITS, logits)
    return logits[:, -1].argmax(dim=-1)


@dataclass(frozen=True)
class Answers:
    """The answers of one prompt from all caches.

    Attributes:
        full: token ids from the full cache.
        evicted: token ids from each configuration's.
        held: entries of each configuration's cache over those of the full one, after the prompt's compressed part.
        compressions: later compressions of the caches.
        divergence: divergence of the evicted caches on the full cache's answer, where requested.
        stored: bytes of each configuration's entries over those of the full cache in 16 bits, likewise; empty where no
            configuration stores few bits or is corrected.
    """

    full: list[int]
    evicted: list[list[int]]
    held: list[float]
    compressions: list[Compression]
    divergence: Divergence | None = None
    stored: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class AnswerOptions:
    """The options of generation beside a run's own settings.

    Attributes:
        compress_every: entries of a cache above which it is compressed again; None: never.
        divergence: whether every cache reads the full one's answer too.
    """

    compress_every: int | None = None
    divergence: bool = False


@memory.translate_allocation_errors()
def answer(
    adapter: Adapter, prompt: Prompt, run: ResolvedRun, options: AnswerOptions, resources: Resources = _DEFAULT
) -> Answers:
    """Read a prompt and answer it from its full cache and from every configuration's, in one batch.

    Raises ActivationError for NaN or Inf, NoMemoryError.
    """
    limit, (_, question) = options.compress_every, prompt.parts(run.scenario)
    read = read_evicting(adapter, prompt, run, resources, with_full=True, above=limit or 0)
    held, stored = _entry_shares(read.cache, run.configs), _byte_shares(read.cache, run.configs, adapter.d_head)
    again = replace(read, cache=read.cache.fork()) if options.divergence else None

    def compressing(prompt_cache: EvictedPrompt) -> Compressor | None:
        if limit is None:
            return None
        return Compressor(adapter, prompt_cache, run, limit, prompt.sample_id, resources)

    compressor, check = compressing(read), FiniteCheck()
    full, *evicted = generate(adapter, read, question, run.generate, compressor, check)
    followed = None if again is None else teacher_force(adapter, again.cache, question, full, compressing(again), check)
    check.raise_if_not(prompt.sample_id)
    return Answers(full, evicted, held, compressor.done if compressor else [], followed, stored)


def _entry_shares(cache: CompactCache, configs: Sequence[ResolvedConfig]) -> list[float]:
    """Return the entries of each row over those of the first, which keeps everything (METHOD: a budget is not a share).

    For a row that reads pages, the entries that it reads.
    """
    full, *held = (
        sum(_attended_entries(layer, row, configs) for layer in cache.evicted) for row in range(1 + len(configs))
    )
    return [entries / full for entries in held]


def _attended_entries(layer: CompactLayer, row: int, configs: Sequence[ResolvedConfig]) -> int:
    """Return the number of entries that a row of one layer attends to; the first row keeps everything."""
    lengths = layer.lengths(row)
    if not row or not configs[row - 1].reads_pages:
        return sum(lengths)
    config = configs[row - 1]
    sets = layer.heads if config.granularity.name == "query" else len(lengths)
    return sets * config.kept_entries(layer.seen)


def _byte_shares(cache: CompactCache, configs: Sequence[ResolvedConfig], d_head: int) -> list[float]:
    """Return the bytes of each row, corrections included, over those of the first row in 16 bits, before decoding.

    Empty where all rows store 16 bits without corrections.
    """
    if all(config.only_evicts for config in configs):
        return []
    layers, tokens = cache.evicted, cache.get_seq_length()
    full = sum(stored_bits(Choice(FULL), kept, 0, d_head) for layer in layers for kept in layer.lengths(0))
    sizes = [
        sum(
            layer_bits(config, layer.lengths(row), tokens, layer.heads, len(layer.lengths(0)), d_head)
            for layer in layers
        )
        for row, config in enumerate(configs, start=1)
    ]
    return [size / full for size in sizes]


def end_tokens(adapter: Adapter) -> set[int]:
    """Return the tokens that end an answer: the tokenizer's, and those of the model's generation settings."""
    settings = getattr(adapter.model, "generation_config", None)
    tokens: set[int | None] = set()
    for ends in (getattr(adapter.tokenizer, "eos_token_id", None), getattr(settings, "eos_token_id", None)):
        tokens |= set(ends) if isinstance(ends, list | tuple) else {ends}
    return {end for end in tokens if end is not None}

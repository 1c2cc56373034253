"""Greedy generation from evicted caches: all configurations of a prompt as one batch, each stopping at its own end.

A prompt read for its answer: each layer is evicted as soon as it is read, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perturbkv import memory
from perturbkv.cache import entries, quantisation
from perturbkv.cache.compact import CompactCache, CompactLayer, beside
from perturbkv.cache.entries import KeptEntries, borrow, keep, lengths
from perturbkv.cache.quantisation import held_bits
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
from perturbkv.pipeline.answers.teacher_forcing import Divergence, follow
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
    """Prefill, and evict each layer as soon as it is read: at no time does more than one layer's full cache lie there.

    `with_full` puts a row that keeps everything first, for which all layers stay. So they do until the prompt is read
    where a configuration looks at all layers or at a replay; then one is let go after the other. A prompt of at most
    `above` entries is kept whole, for compressions that come later.

    Raises what `entries.check_positions` raises.
    """
    entries.check_positions(run.configs, adapter.config, adapter.name)
    context, _ = prompt.parts(run.scenario)
    whole = len(context) <= above
    given = sources(adapter, context, [] if whole else run.configs, {})
    rows = _Rows(adapter, run, with_full, keeps=whole)
    read = prefill(adapter, prompt, run, resources, given, rows)
    read.finite.raise_if_not(prompt.sample_id)
    if rows.whole:
        rows.evict_all(read)
    rows.stored.raise_if_not(prompt.sample_id)
    behind = [0] * len(run.configs) if whole else entries.positions_behind(run.configs, len(context))
    cache = CompactCache(beside(adapter, rows.layers, read.windows), [*([0] if with_full else []), *behind])
    return EvictedPrompt(cache, read.logits, rows.queries)


class _Rows:
    """The rows of the cache to be, layer by layer: one that keeps everything where it is asked for, and the run's.

    Args:
        adapter: the model.
        run: whose configurations are evicted.
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

    def visit(self, found: Statistics, seen: LayerView) -> None:
        """Take a layer that was read: its last queries, and its entries unless all layers are waited for."""
        self.queries.append(seen.queries[:, -self._window :].clone())
        if not self.whole:
            self._evict(FullLayer(self._adapter, found, seen.layer, seen.keys, seen.values))

    def evict_all(self, read: Prefill) -> None:
        """Evict all layers of a prompt that was read, each let go when it is evicted."""
        for index in range(len(self._adapter.layers)):
            self._evict(FullLayer.of(self._adapter, read, index))
            held = self._adapter.cache_layer(read.cache, index)
            held.keys, held.values = held.keys.new_empty(0), held.values.new_empty(0)

    def _evict(self, layer: FullLayer) -> None:
        kept, stand_ins = (self._all(layer), {}) if self._keeps else self._kept(layer)
        for row, config in zip(kept, self._configs, strict=True):
            if config.quantised:
                quantised.look(self.stored, self._adapter.layer_indices[layer.index], row)
        everything = [borrow(layer.keys, layer.values)] if self._with_full else []
        by_row = {place + len(everything): one for place, one in stand_ins.items()}
        rows, heads = [*everything, *kept], self._adapter.heads
        self.layers.append(CompactLayer(rows, heads, layer.tokens, self._layout, stand_ins=by_row))

    def _all(self, layer: FullLayer) -> list[KeptEntries]:
        row = borrow(layer.keys, layer.values)
        return [quantisation.quantise_entries(row, one) if one.quantised else row for one in self._configs]

    def _kept(self, layer: FullLayer) -> tuple[list[KeptEntries], dict[int, StandIn]]:
        """Return what each configuration keeps, and what stands in for what it does not."""
        configs = self._configs
        read = page_reading.rows(layer, dict(enumerate(configs)))
        if len(read) == len(configs):
            return [read[place] for place in range(len(configs))], {}
        chosen = layer.groups(configs)
        (counts,) = lengths([chosen], len(configs), layer.keys.device)
        kept = keep(chosen, range(len(configs)), counts, layer.keys, layer.values)
        made = corrected.corrections(layer, kept.entries, configs)
        kept = quantisation.stored(entries.positions_in_cache(kept, configs, self._adapter.frequencies), configs)
        stand_ins = {place: one.stand_in for place, one in made.items()}
        held = kept.entries | read
        return [held[place] for place in range(len(configs))], stand_ins


def check_asked(configs: Iterable[EvictionConfig], most: int | None, compress_every: int | None) -> None:
    """Raise ConfigError where answers cannot be generated as asked: `most` tokens each, None: as the dataset says."""
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
    """Raise ConfigError where the bound on memory would divide configurations that answer in one batch."""
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

    Where there is no question, first tokens come from the prompt's logits; `check` looks at all others. Without a
    compressor, rows that ended leave the cache once they are half of it.
    """
    looked, cache, ends = check or FiniteCheck(), read.cache, end_tokens(adapter)
    rows = cache.layers[0].batch
    watch = Observer(attention=None if compressor is None else compressor.watch)
    ids = torch.tensor([list(question)], device=adapter.device).expand(rows, -1)
    following = read.logits.argmax(dim=-1).expand(rows)
    made: list[list[int]] = [[] for _ in range(rows)]
    held, open_rows = list(range(rows)), set(range(rows))
    with decode_from(adapter, cache), capture(adapter, watch):
        if question:
            following = _next(adapter, cache, ids, looked)
        for count in range(1, most + 1):
            for row, token in zip(held, following.tolist(), strict=True):
                if row in open_rows and token not in ends:
                    made[row].append(token)
                else:
                    open_rows.discard(row)
            if not open_rows or count == most:
                break
            if compressor is not None:
                compressor.compress(count)
            elif 2 * len(open_rows) <= len(held):
                going_on = [place for place, row in enumerate(held) if row in open_rows]
                cache.only(going_on)
                held, following = [held[place] for place in going_on], following[to_device(going_on, adapter.device)]
            following = _next(adapter, cache, following.unsqueeze(-1), looked)
    return made


def _next(adapter: Adapter, cache: CompactCache, ids: Tensor, check: FiniteCheck) -> Tensor:
    logits: Tensor = adapter.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    check.look(LOGITS, logits)
    return logits[:, -1].argmax(dim=-1)


@dataclass(frozen=True)
class Answers:
    """What one prompt's caches generated.

    Attributes:
        full: token ids from the full cache.
        evicted: token ids from each configuration's.
        held: entries of each configuration's cache over those of the full one, after the prompt's compressed part.
        compressions: those that came later.
        divergence: of the evicted caches while they read the full cache's answer, where it was asked for.
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
    """How answers are generated, beside a run's own settings.

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
    held, stored = _held(read.cache, run.configs), _stored(read.cache, run.configs, adapter.d_head)
    again = replace(read, cache=read.cache.fresh()) if options.divergence else None

    def compressing(prompt_cache: EvictedPrompt) -> Compressor | None:
        if limit is None:
            return None
        return Compressor(adapter, prompt_cache, run, limit, prompt.sample_id, resources)

    compressor, check = compressing(read), FiniteCheck()
    full, *evicted = generate(adapter, read, question, run.generate, compressor, check)
    followed = None if again is None else follow(adapter, again.cache, question, full, compressing(again), check)
    check.raise_if_not(prompt.sample_id)
    return Answers(full, evicted, held, compressor.done if compressor else [], followed, stored)


def _held(cache: CompactCache, configs: Sequence[ResolvedConfig]) -> list[float]:
    """Entries of each row over those of the first, which keeps everything (METHOD: a budget is not a share).

    Of a row that reads pages those that it reads.
    """
    full, *held = (sum(_read(layer, row, configs) for layer in cache.evicted) for row in range(1 + len(configs)))
    return [entries / full for entries in held]


def _read(layer: CompactLayer, row: int, configs: Sequence[ResolvedConfig]) -> int:
    """Entries that a row of one layer looks at; the first row keeps everything."""
    lengths = layer.lengths(row)
    if not row or not configs[row - 1].reads_pages:
        return sum(lengths)
    config = configs[row - 1]
    sets = layer.heads if config.granularity.name == "query" else len(lengths)
    return sets * config.kept_entries(layer.seen)


def _stored(cache: CompactCache, configs: Sequence[ResolvedConfig], d_head: int) -> list[float]:
    """Bytes that each row stores over those of the first row, in 16 bits; nothing where all are in 16 and uncorrected.

    Entries, and what stands in for others; nothing has been decoded yet.
    """
    if all(config.only_evicts for config in configs):
        return []
    layers, tokens = cache.evicted, cache.get_seq_length()
    full = sum(stored_bits(Choice(FULL), kept, 0, d_head) for layer in layers for kept in layer.lengths(0))
    sizes = [
        sum(
            held_bits(config, layer.lengths(row), tokens, layer.heads, len(layer.lengths(0)), d_head)
            for layer in layers
        )
        for row, config in enumerate(configs, start=1)
    ]
    return [size / full for size in sizes]


def end_tokens(adapter: Adapter) -> set[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's generation settings."""
    settings = getattr(adapter.model, "generation_config", None)
    found: set[int | None] = set()
    for ends in (getattr(adapter.tokenizer, "eos_token_id", None), getattr(settings, "eos_token_id", None)):
        found |= set(ends) if isinstance(ends, list | tuple) else {ends}
    return {end for end in found if end is not None}

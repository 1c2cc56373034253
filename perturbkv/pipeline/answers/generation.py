"""Greedy generation from evicted caches: all configurations of a prompt as one batch, each stopping at its own end.

A prompt read for its answer: each layer is evicted as soon as it is read, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
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
from perturbkv.devices import on_device
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.recompression import Compression, Compressor
from perturbkv.pipeline.answers.teacher_forcing import Divergence, follow
from perturbkv.pipeline.sample.capture import LOGITS, FiniteCheck, Observer, capture, decode_from
from perturbkv.pipeline.sample.prefill import Prefill, Statistics, prefill
from perturbkv.pipeline.variants import corrected, page_reading, quantised
from perturbkv.pipeline.variants.presses import sources
from perturbkv.scoring.layer_view import LayerView
from perturbkv.selection import compatibility

if TYPE_CHECKING:
    from perturbkv.pipeline.run.plan import Plan


_DEFAULT = Resources()


@dataclass(frozen=True)
class Evicted:
    """A prompt whose cache was evicted while it was read.

    Attributes:
        cache: one row per configuration, behind a row that keeps everything where `with_full` asked for it.
        logits: of the context's last position.
        queries: per layer the last queries (head, query, d_head), as many as the largest window.
    """

    cache: CompactCache
    logits: Float[Tensor, " vocab"]
    queries: list[Tensor]


def read_evicting(
    adapter: Adapter,
    context: Sequence[int],
    configs: Sequence[EvictionConfig],
    sample: str,
    *,
    with_full: bool = False,
    layout: str = "ragged",
    head_scores: Sequence[Sequence[float]] = (),
    above: int = 0,
    resources: Resources = _DEFAULT,
) -> Evicted:
    """Prefill, and evict each layer as soon as it is read: at no time does more than one layer's full cache lie there.

    `with_full` puts a row that keeps everything first, for which all layers stay. So they do until the prompt is read
    where a configuration looks at all layers or at a replay; then one is let go after the other. A prompt of at most
    `above` entries is kept whole, for compressions that come later.

    Raises what `entries.check_positions` raises.
    """
    entries.check_positions(configs, adapter.config, adapter.name)
    whole = len(context) <= above
    waits = not whole and any(compatibility.needs_all_layers(config) for config in configs)
    given = sources(adapter, context, [] if whole else configs, {})
    rows = _Rows(adapter, configs, with_full, layout, whole)
    take = rows.remember if waits else rows.take
    read = prefill(adapter, context, configs, resources, sample, head_scores, take, given, whole=waits)
    read.finite.raise_if_not(sample)
    if waits:
        rows.evict_all(read)
    rows.stored.raise_if_not(sample)
    behind = [0] * len(configs) if whole else entries.positions_behind(configs, len(context))
    cache = CompactCache(beside(adapter, rows.layers, read.windows), [*([0] if with_full else []), *behind])
    return Evicted(cache, read.logits, rows.queries)


class _Rows:
    """The rows of the cache to be, layer by layer: one that keeps everything where it is asked for, and `configs`."""

    def __init__(
        self, adapter: Adapter, configs: Sequence[EvictionConfig], with_full: bool, layout: str, whole: bool
    ) -> None:
        self._adapter, self._configs, self._with_full, self._layout = adapter, configs, with_full, layout
        self._whole = whole or not configs
        self._window = max((config.window for config in configs), default=1)
        self.layers: list[CompactLayer] = []
        self.queries: list[Tensor] = []
        self.stored = FiniteCheck()

    def remember(self, found: Statistics, seen: LayerView) -> None:
        """Of a layer that is evicted later its last queries."""
        self.queries.append(seen.queries[:, -self._window :].clone())

    def take(self, found: Statistics, seen: LayerView) -> None:
        """A layer that was read."""
        self.remember(found, seen)
        self._evict(found, seen.layer, seen.keys, seen.values)

    def evict_all(self, read: Prefill) -> None:
        """All layers of a prompt that was read, each let go when it is evicted."""
        for layer in range(len(self._adapter.layers)):
            held = self._adapter.held(read.cache, layer)
            self._evict(read.statistics, layer, held.keys[0], held.values[0])
            held.keys, held.values = held.keys.new_empty(0), held.values.new_empty(0)

    def _evict(self, found: Statistics, layer: int, keys: Tensor, values: Tensor) -> None:
        kept, stand_ins = (self._all(keys, values), {}) if self._whole else self._kept(found, layer, keys, values)
        for row, config in zip(kept, self._configs, strict=True):
            if config.quantised:
                quantised.look(self.stored, self._adapter.layer_indices[layer], row)
        everything = [borrow(keys, values)] if self._with_full else []
        by_row = {place + len(everything): one for place, one in stand_ins.items()}
        rows, heads = [*everything, *kept], self._adapter.heads
        self.layers.append(CompactLayer(rows, heads, found.tokens, self._layout, stand_ins=by_row))

    def _all(self, keys: Tensor, values: Tensor) -> list[KeptEntries]:
        row = borrow(keys, values)
        return [quantisation.quantised(row, one) if one.quantised else row for one in self._configs]

    def _kept(
        self, found: Statistics, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[list[KeptEntries], dict[int, StandIn]]:
        """What each configuration keeps, and what stands in for what it does not."""
        configs = self._configs
        read = page_reading.rows(self._adapter, found, layer, dict(enumerate(configs)), keys, values)
        if len(read) == len(configs):
            return [read[place] for place in range(len(configs))], {}
        chosen = found.groups(configs, layer, keys, values)
        (counts,) = lengths([chosen], len(configs), keys.device)
        kept = keep(chosen, range(len(configs)), counts, keys, values)
        means = found.mean_queries
        made = corrected.corrections(self._adapter, layer, kept.entries, configs, means, (keys, values), found.tokens)
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
        compatibility.check_generating(config)
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
    if bound is not None and len(planned.batches.places) > 1:
        msg = (
            f"generate answers from all caches at once, and max_bytes (--max-memory) of {bound:,} bytes holds those of "
            f"{planned.batches.rows - 1} of {configs} configurations; raise it or ask for fewer"
        )
        raise ConfigError(msg)


@torch.inference_mode()
def generate(
    adapter: Adapter,
    cache: CompactCache,
    question: Sequence[int],
    logits: Float[Tensor, "*row vocab"],
    most: int,
    ends: Collection[int],
    compressor: Compressor | None = None,
    check: FiniteCheck | None = None,
) -> list[list[int]]:
    """At most `most` tokens per row, greedily; a row ends before the first token of `ends`.

    `logits` are those after the context, of all rows or of each: where there is no question, first tokens come from
    them. `check` looks at all others. Without a compressor, rows that ended leave the cache once they are half of it.
    """
    looked = check or FiniteCheck()
    rows = cache.layers[0].batch
    watch = Observer(attention=None if compressor is None else compressor.watch)
    ids = torch.tensor([list(question)], device=adapter.device).expand(rows, -1)
    following = logits.argmax(dim=-1).expand(rows)
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
                held, following = [held[place] for place in going_on], following[on_device(going_on, adapter.device)]
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


@memory.told()
def answer(
    adapter: Adapter,
    prompt: Prompt,
    configs: Sequence[EvictionConfig],
    most: int,
    *,
    scenario: str = "regular",
    layout: str = "ragged",
    head_scores: Sequence[Sequence[float]] = (),
    compress_every: int | None = None,
    divergence: bool = False,
    resources: Resources = _DEFAULT,
) -> Answers:
    """Read a prompt and answer it from its full cache and from every configuration's, in one batch.

    With `divergence` all of them then read the full cache's answer.

    Raises ActivationError for NaN or Inf, NoMemoryError.
    """
    context, question = prompt.parts(scenario)
    read = read_evicting(
        adapter, context, configs, prompt.sample_id, with_full=True, layout=layout, head_scores=head_scores,
        above=compress_every or 0, resources=resources,
    )  # fmt: skip
    held, stored = _held(read.cache, configs), _stored(read.cache, configs, adapter.d_head)
    again = read.cache.fresh() if divergence else None

    def compressing(cache: CompactCache) -> Compressor | None:
        if compress_every is None:
            return None
        return Compressor(
            adapter, cache, configs, compress_every, read.queries, prompt.sample_id, 1, resources, head_scores
        )

    compressor, check = compressing(read.cache), FiniteCheck()
    full, *evicted = generate(adapter, read.cache, question, read.logits, most, end_tokens(adapter), compressor, check)
    followed = None if again is None else follow(adapter, again, question, full, compressing(again), check)
    check.raise_if_not(prompt.sample_id)
    return Answers(full, evicted, held, compressor.done if compressor else [], followed, stored)


def _held(cache: CompactCache, configs: Sequence[EvictionConfig]) -> list[float]:
    """Entries of each row over those of the first, which keeps everything (METHOD: a budget is not a share).

    Of a row that reads pages those that it reads.
    """
    full, *held = (sum(_read(layer, row, configs) for layer in cache.evicted) for row in range(1 + len(configs)))
    return [entries / full for entries in held]


def _read(layer: CompactLayer, row: int, configs: Sequence[EvictionConfig]) -> int:
    """Entries that a row of one layer looks at; the first row keeps everything."""
    lengths = layer.lengths(row)
    if not row or not configs[row - 1].reads:
        return sum(lengths)
    config = configs[row - 1]
    sets = layer.heads if config.granularity.name == "query" else len(lengths)
    return sets * config.kept_entries(layer.seen)


def _stored(cache: CompactCache, configs: Sequence[EvictionConfig], d_head: int) -> list[float]:
    """Bytes that each row stores over those of the first row, in 16 bits; nothing where all are in 16 and uncorrected.

    Entries, and what stands in for others; nothing has been decoded yet.
    """
    if all(config.evicts_alone for config in configs):
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

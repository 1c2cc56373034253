"""Readers of the full cache: configurations that evict nothing, and read some entries at each step or in a prefill.

A reader of pages attends at each step to the pages that the step's query selects. A reader of lines has a sparse
prefill of its own: every layer's attention is masked by the lines that its own queries select. This is exact and dense,
in chunks of queries: it shows the loss, and computes masked logits that a sparse kernel would skip. Its isolated
quantities are measured in the layers of the full prefill.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from perturbkv import theory
from perturbkv.cache.compact import full_cache
from perturbkv.cache.entries import GatheredSet, KeptEntries, borrow
from perturbkv.cache.makers import (
    ActivationCheck,
    Entries,
    Maker,
    OwnPrefill,
    PrefilledLayer,
    PromptReading,
    entry_bits,
    eviction_maker,
)
from perturbkv.configs.cache_contents import EVICTED, PAGES_READ, SOMEBODYS, SPARSE_PREFILL, CacheContents
from perturbkv.configs.number_formats import FULL_BITS
from perturbkv.configs.resources import CHUNK_BYTES, Resources
from perturbkv.devices import block_bytes, stack_on_device, synchronise, to_device
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.models.interface import AttentionFunction
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.capture import LOGITS, intercept_attention
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.measure import LayerMasks
from perturbkv.pipeline.sample.prefill import layer_value_norms
from perturbkv.pipeline.variants.external_caches import NamedCacheMaker
from perturbkv.scoring.value_norms import euclidean_value_norms
from perturbkv.scoring.window_attention import causal_logits
from perturbkv.selection.page_selection import AnyGroup, PagedLayer, PageGroup, PageReader, page_groups
from perturbkv.selection.resolved_config import ResolvedConfig
from perturbkv.selection.sparse_lines import (
    LastQueries,
    Lines,
    Positions,
    SparsePrefillGroup,
    last_positions,
    line_policy,
    lines_for_budget,
    sparse_prefill_groups,
)
from perturbkv.theory import WORK, Summands


class Reader(Maker):
    """The maker of a configuration that evicts nothing.

    Its rows hold the whole prompt. For isolated quantities it says which entries are read; these are stored as its kept
    sets, and its budget counts them.
    """

    @classmethod
    @abstractmethod
    def groups(
        cls, layer: FullLayer, configs: Sequence[ResolvedConfig], queries: Sequence[Float[Tensor, "head d_key"]]
    ) -> Sequence[AnyGroup]:
        """Return groups with the entries of one layer that this kind of reader's configurations among `configs` read.

        `queries` are those of the full run's decode steps, one per step.
        """


@dataclass(frozen=True)
class PagedCacheReader(Reader):
    """The reader of the pages that each query selects."""

    config: ResolvedConfig

    @classmethod
    def groups(
        cls, layer: FullLayer, configs: Sequence[ResolvedConfig], queries: Sequence[Float[Tensor, "head d_key"]]
    ) -> list[PageGroup]:
        """Return the groups of the page-reading configurations in one layer, from one query per step."""
        return page_groups(configs, lambda config: _paged_layer(layer, config), queries, layer.tokens)

    def make(self, layer: PrefilledLayer, kept: GatheredSet) -> Entries:
        """Return all entries, with a function that selects pages unless the budget covers the prompt.

        The pages' bounds, two keys each, are stored beside the entries.
        """
        n, config, (kv_heads, _, d_key) = layer.tokens, self.config, layer.prompt_keys.shape
        row, pages = borrow(layer.prompt_keys, layer.prompt_values), 0
        read_per_set = config.kept_entries(n)
        if read_per_set < n:
            row = replace(row, reader=PageReader(config, _paged_layer(layer, config), n))
            pages = config.blocks(n).full
        sets = layer.adapter.heads if config.granularity.name == "query" else kv_heads
        return Entries(row, entry_bits(row) + 2 * FULL_BITS * d_key * kv_heads * pages, sets * read_per_set)


def _paged_layer(layer: PrefilledLayer, config: ResolvedConfig) -> PagedLayer:
    """Return a layer split into a configuration's pages, once per page size and window."""
    return layer.compute_once(
        ("pages", config.block, config.window),
        lambda: PagedLayer.from_keys(layer.statistics_of(config), layer.prompt_keys, layer.softmax, config.block),
    )


@dataclass(frozen=True)
class SparsePrefillReader(Reader):
    """The reader of the lines along which a prefill of its own attends; decoding attends to all that this leaves.

    `rows` are what its own prefill of one prompt left in each layer; none before it, and where the budget covers the
    prompt: its own prefill is the full one then.
    """

    config: ResolvedConfig
    rows: Sequence[KeptEntries] = ()
    prefill: OwnPrefill = OwnPrefill(1.0, None)

    @classmethod
    def groups(
        cls, layer: FullLayer, configs: Sequence[ResolvedConfig], queries: Sequence[Float[Tensor, "head d_key"]]
    ) -> list[SparsePrefillGroup]:
        """Return the groups of these configurations with their lines, in one layer of the full prefill.

        `queries` decide nothing here.
        """
        weights: dict[tuple[Positions, bool], LastQueries] = {}
        statistics = layer.statistics

        def last_queries(config: ResolvedConfig) -> LastQueries:
            positions = last_positions(line_policy(config).last, statistics.tokens)
            if (key := (positions, config.euclidean)) not in weights:
                own = statistics.queries[positions][layer.index]
                norms = (statistics.euclidean if config.euclidean else statistics.norms)[0][layer.index]
                of_layer = (layer.adapter, layer.index, own, layer.prompt_keys, norms, statistics.sample)
                weights[key] = last_query_weights(*of_layer)
            return weights[key]

        return sparse_prefill_groups(configs, last_queries, statistics.tokens, statistics.sample)

    def begin(self, prompt: PromptReading) -> SparsePrefillReader:
        """Return the reader after its prefill of the prompt, unless its budget covers the prompt."""
        if self.config.kept_entries(len(prompt.token_ids)) >= len(prompt.token_ids):
            return self
        given = (prompt.adapter, prompt.token_ids, self.config, prompt.sample, prompt.resources, prompt.finite_check)
        rows, prefill = run_sparse_prefill(*given)
        return replace(self, rows=rows, prefill=prefill)

    def make(self, layer: PrefilledLayer, kept: GatheredSet) -> Entries:
        """Return all entries that the reader's own prefill left."""
        row = self.rows[layer.index] if self.rows else borrow(layer.prompt_keys, layer.prompt_values)
        return Entries(row, entry_bits(row))


def last_query_weights(
    adapter: Adapter,
    layer: int,
    queries: Float[Tensor, "head query d_key"],
    keys: Float[Tensor, "kv_head key d_key"],
    norms: Float[Tensor, "head key"],
    sample: str,
) -> LastQueries:
    """Return the attention weights and norms that decide a layer's lines.

    Args:
        adapter: the model.
        layer: index of the layer.
        queries: the prompt's last ones.
        keys: of the prompt.
        norms: value norms of the prompt's entries, with which a selection weights them.
        sample: the sample's id, for seeds.
    """
    softmax = adapter.softmax(layer)
    weights, _ = softmax.weights(causal_logits(queries.to(WORK), keys.to(WORK), softmax))
    return LastQueries(weights, norms, len(keys), layer, sample)


def isolated_along_lines(
    layer: FullLayer, group: SparsePrefillGroup, summands: Summands, alphas: Float[Tensor, "config head"]
) -> dict[str, Tensor]:
    """Return `measure.isolated_quantities` averaged over the prompt's measured queries, each over its past entries.

    `summands` begin with those of the prompt's entries; `alphas` are the stage-1 shares α.
    """
    queries, keys = layer.statistics.queries[group.measured_positions][layer.index], layer.prompt_keys
    sets = group.attention_masks(to_device(group.measured_positions, keys.device))
    sharing = layer.adapter.heads // group.kept_heads
    kept, stage1 = (mask.repeat_interleave(sharing, dim=1) for mask in (sets.kept, sets.stage1))
    per_query: list[dict[str, Tensor]] = []
    for index, position in enumerate(group.measured_positions):
        entries = slice(position + 1)
        weights, sink = theory.decode_weights(queries[:, index], keys[:, entries], layer.softmax)
        full = measure.layer_reference(weights, summands.first_entries(position + 1), layer.slices, sink)
        masks = LayerMasks(kept[:, :, index, entries], stage1[:, :, index, entries])
        per_query += measure.isolated_quantities([full], masks, alphas)
    return {name: torch.stack([quantities[name] for quantities in per_query]).mean(dim=0) for name in per_query[0]}


@torch.inference_mode()
def run_sparse_prefill(
    adapter: Adapter,
    token_ids: Sequence[int],
    config: ResolvedConfig,
    sample: str,
    resources: Resources,
    finite: ActivationCheck,
) -> tuple[list[KeptEntries], OwnPrefill]:
    """Prefill a prompt along the lines of one configuration; `finite` checks the logits.

    Returns a row of all entries per measured layer, for the compact cache, and how the prefill went, with the choice of
    lines. A full prefill attends to n (n + 1) / 2 entries per head.
    """
    attention, cache = _LineAttention(adapter, config, sample, resources), full_cache(adapter)
    with intercept_attention(adapter, attention):
        seconds, logits = _time_prefill(adapter, token_ids, cache)
    finite.check(LOGITS, logits)
    layers = [adapter.cache_layer(cache, layer) for layer in range(len(adapter.layers))]
    attended_entries, n = float(stack_on_device(adapter.device, attention.attended_entries).mean()), len(token_ids)
    rows = [borrow(layer.keys[0], layer.values[0]) for layer in layers]
    return rows, OwnPrefill(attended_entries / (n * (n + 1) / 2), seconds)


@torch.inference_mode()
def time_full_prefill(adapter: Adapter, token_ids: Sequence[int]) -> float:
    """Run a full prefill once more, without hooks, and return the seconds that it takes."""
    return _time_prefill(adapter, token_ids, full_cache(adapter))[0]


def _time_prefill(adapter: Adapter, token_ids: Sequence[int], cache: Any) -> tuple[float, Tensor]:
    """Run a prefill into `cache`, and return its seconds and the logits of the last position."""
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    synchronise(adapter.device)
    begin = time.perf_counter()
    logits = run_with_cache(adapter.model, ids, cache, logits_to_keep=1).logits
    synchronise(adapter.device)
    return time.perf_counter() - begin, logits


@dataclass(eq=False)
class _LineAttention:
    """A replacement of the model's attention by attention along lines, which it chooses layer by layer.

    `attended_entries` has, per layer, the number of entries that a head's queries attend to, on the average of heads.
    """

    adapter: Adapter
    config: ResolvedConfig
    sample: str
    resources: Resources
    attended_entries: list[Tensor] = field(default_factory=list)

    def __call__(self, stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, None]:
        """Return the masked attention output of one layer: (1, query, head, d_value)."""
        layer, (query, key, value) = self.adapter.layer_of(module), (tensor[0] for tensor in args[:3])
        chunks = list(self._attend_in_chunks(layer, query, key, value))
        self.attended_entries.append(torch.stack([count for _, count in chunks]).sum())
        output = torch.cat([mixed for mixed, _ in chunks], dim=1)
        return output.transpose(0, 1).unsqueeze(0).contiguous(), None

    def _attend_in_chunks(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, per chunk of queries, outputs (head, query, d_value) and the mean number of attended entries."""
        lines, n = self._choose_lines(layer, query, key, value), key.shape[1]
        most = block_bytes(key.device)
        if self.resources.chunk_bytes < CHUNK_BYTES:  # less than by default was asked for
            most = min(most, self.resources.chunk_bytes)
        size = max(1, most // (16 * len(query) * n))  # bytes per query, head and entry: logits, weights and masks
        for first in range(0, n, size):
            end = min(first + size, n)
            mask = lines.attention_mask(torch.arange(first, end, device=key.device))[..., :end]
            mixed = self._attend(layer, query[:, first:end], key[:, :end], value[:, :end], mask)
            yield mixed, mask.sum(dtype=torch.float64) / len(mask)

    def _choose_lines(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Lines:
        """Return a layer's lines, chosen by the layer's own last queries and values."""
        projection, n = self.adapter.output_projection(layer), key.shape[1]
        if self.config.euclidean:
            norms = euclidean_value_norms(value, projection, self.resources.chunk_bytes)
        else:
            norms = layer_value_norms(value, projection, self.resources)
        queries = query[:, to_device(last_positions(line_policy(self.config).last, n), query.device)]
        last_queries = last_query_weights(self.adapter, layer, queries, key, norms, self.sample)
        return lines_for_budget(self.config, last_queries, n).lines

    def _attend(
        self,
        layer: int,
        query: Float[Tensor, "head query d_key"],
        key: Float[Tensor, "kv_head key d_key"],
        value: Float[Tensor, "kv_head key d_value"],
        mask: Tensor,
    ) -> Float[Tensor, "head query d_value"]:
        """Return the attention output of a chunk of queries over the entries in `mask` (kept_head, query, key)."""
        work, groups = torch.promote_types(query.dtype, torch.float32), len(key)
        queries, softmax = query.to(work).reshape(groups, -1, query.shape[-1]), self.adapter.softmax(layer)
        logits = softmax.logits(queries, key.to(work)).view(len(query), -1, key.shape[1])
        logits.masked_fill_(~mask.repeat_interleave(len(query) // len(mask), dim=0), -torch.inf)
        mixed = softmax.weights(logits)[0].view(groups, -1, key.shape[1]) @ value.to(work)
        return mixed.view(len(query), -1, value.shape[-1]).to(query.dtype)


_MAKERS: Mapping[CacheContents, Callable[[ResolvedConfig], Maker]] = {
    EVICTED: eviction_maker,
    PAGES_READ: PagedCacheReader,
    SPARSE_PREFILL: SparsePrefillReader,
    SOMEBODYS: lambda config: NamedCacheMaker(),
}
"""What a configuration's cache holds -> the maker of it."""


def maker_of(config: ResolvedConfig) -> Maker:
    """Return the maker of a configuration's cache, the same object in all layers and prompts of a run."""
    return config.once(Maker, lambda: _MAKERS[config.cache_contents](config))


def readers_of(configs: Sequence[ResolvedConfig]) -> list[type[Reader]]:
    """Return the kinds of readers of the full cache that the configurations have, in a fixed order."""
    makers = list(map(maker_of, configs))
    return [
        kind for kind in (PagedCacheReader, SparsePrefillReader) if any(isinstance(maker, kind) for maker in makers)
    ]

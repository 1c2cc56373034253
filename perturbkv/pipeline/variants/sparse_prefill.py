"""Sparse prefill: every layer's attention is masked by the lines that its own queries select.

Exact and dense, in chunks of queries: it shows the loss, and computes masked logits that a sparse kernel would skip.
Isolated quantities are measured in the layers of the full prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from perturbkv import theory
from perturbkv.cache.compact import full_cache
from perturbkv.cache.entries import KeptEntries, borrow
from perturbkv.configs.resources import Resources
from perturbkv.devices import stack_on_device, to_device, working_bytes
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.capture import LOGITS, AttentionFunction, FiniteCheck, intercept_attention
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.measure import LayerMasks
from perturbkv.pipeline.sample.prefill import layer_norms
from perturbkv.scoring.value_norms import euclidean_value_norms
from perturbkv.scoring.window_attention import causal_rows
from perturbkv.selection.resolved_config import ResolvedConfig
from perturbkv.selection.sparse_lines import (
    LastQueries,
    Lines,
    Positions,
    SparsePrefillGroup,
    last_positions,
    lines_for_budget,
    sparse_prefill_groups,
)
from perturbkv.theory import WORK, Summands, softmax_with_sinks


def line_groups(layer: FullLayer, configs: Sequence[ResolvedConfig]) -> list[SparsePrefillGroup]:
    """Return the lines of the configurations with a sparse prefill in one layer of the full prefill."""
    made: dict[tuple[Positions, bool], LastQueries] = {}
    statistics = layer.statistics

    def of(config: ResolvedConfig) -> LastQueries:
        asked = last_positions(config, statistics.tokens)
        if (key := (asked, config.euclidean)) not in made:
            queries = statistics.queries[asked][layer.index]
            norms = (statistics.euclidean if config.euclidean else statistics.norms)[layer.index]
            made[key] = last_query_weights(
                layer.adapter, layer.index, queries, layer.prompt_keys, norms, statistics.sample
            )
        return made[key]

    return sparse_prefill_groups(configs, of, statistics.tokens, statistics.sample)


def last_query_weights(
    adapter: Adapter,
    layer: int,
    queries: Float[Tensor, "head query d_head"],
    keys: Float[Tensor, "kv_head key d_head"],
    norms: Float[Tensor, "head key"],
    sample: str,
) -> LastQueries:
    """Return the attention from which a layer's lines are chosen; the queries are those of the last keys."""
    sharing, sinks = len(queries) // len(keys), adapter.sinks(layer)
    rows = [
        causal_rows(
            queries[group].to(WORK), key.to(WORK), adapter.scale(layer), keys.shape[1] - queries.shape[1],
            None if sinks is None else sinks[group],
        )
        for group, key in zip(_head_slices(len(queries), sharing), keys, strict=True)
    ]  # fmt: skip
    return LastQueries(torch.cat(rows), norms, len(keys), layer, sample)


def _head_slices(heads: int, sharing: int) -> list[slice]:
    return [slice(first, first + sharing) for first in range(0, heads, sharing)]


def isolated_along_lines(
    layer: FullLayer, group: SparsePrefillGroup, summands: Summands, alphas: Float[Tensor, "config head"]
) -> dict[str, Tensor]:
    """Return the mean of `measure.isolated_quantities` over the prompt's measured queries, each over its past entries.

    `summands` are those of the prompt's entries, and possibly of more.
    """
    queries, keys = layer.statistics.queries[group.measured_positions][layer.index], layer.prompt_keys
    sets, sharing = (
        group.attention_masks(to_device(group.measured_positions, keys.device)),
        layer.adapter.heads // group.kept_heads,
    )
    kept, stage1 = (mask.repeat_interleave(sharing, dim=1) for mask in (sets.kept, sets.stage1))
    per_query = []
    for index, position in enumerate(group.measured_positions):
        entries = slice(position + 1)
        weights, sink = theory.decode_weights(queries[:, index], keys[:, entries], layer.scale, layer.sinks)
        full = measure.layer_reference(weights, summands.first_entries(position + 1), layer.slices, sink)
        masks = LayerMasks(kept[:, :, index, entries], stage1[:, :, index, entries])
        per_query.append(measure.isolated_quantities(full, masks, alphas))
    return {name: torch.stack([one[name] for one in per_query]).mean(dim=0) for name in per_query[0]}


@dataclass(frozen=True, eq=False)
class SparsePrefill:
    """The result of a sparse prefill.

    Attributes:
        rows: per measured layer all entries, to which decoding attends.
        share: entries that its queries attend to over those of a full prefill, n (n + 1) / 2 per head.
        seconds: its duration, the choice of lines included.
    """

    rows: list[KeptEntries]
    share: float
    seconds: float


@torch.inference_mode()
def run_sparse_prefill(
    adapter: Adapter,
    token_ids: Sequence[int],
    config: ResolvedConfig,
    sample: str,
    resources: Resources,
    finite: FiniteCheck,
) -> SparsePrefill:
    """Prefill a prompt along the lines of one configuration; `finite` checks the logits."""
    attention, cache = _LineAttention(adapter, config, sample, resources), full_cache(adapter)
    with intercept_attention(adapter, attention):
        seconds, logits = _time_prefill(adapter, token_ids, cache)
    finite.check(LOGITS, logits)
    held = [adapter.cache_layer(cache, layer) for layer in range(len(adapter.layers))]
    attended_entries, n = float(stack_on_device(adapter.device, attention.attended_entries).mean()), len(token_ids)
    rows = [borrow(layer.keys[0], layer.values[0]) for layer in held]
    return SparsePrefill(rows, attended_entries / (n * (n + 1) / 2), seconds)


@torch.inference_mode()
def full_prefill_seconds(adapter: Adapter, token_ids: Sequence[int]) -> float:
    """Return the seconds of the full prefill without hooks."""
    return _time_prefill(adapter, token_ids, full_cache(adapter))[0]


def _time_prefill(adapter: Adapter, token_ids: Sequence[int], cache: Any) -> tuple[float, Tensor]:
    """Return the seconds of a prefill, and the logits of its last position."""
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    _synchronise(adapter.device)
    begin = time.perf_counter()
    logits = adapter.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    _synchronise(adapter.device)
    return time.perf_counter() - begin, logits


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(eq=False)
class _LineAttention:
    """A replacement of the model's attention; `attended_entries` has, per layer, the number of entries per head."""

    adapter: Adapter
    config: ResolvedConfig
    sample: str
    resources: Resources
    attended_entries: list[Tensor] = field(default_factory=list)

    def __call__(self, stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, None]:
        """Return the masked attention of one layer: (1, query, head, d_head)."""
        layer, (query, key, value) = self.adapter.layer_of(module), (one[0] for one in args[:3])
        parts = list(self._attend_in_chunks(layer, query, key, value))
        self.attended_entries.append(torch.stack([count for _, count in parts]).sum())
        output = torch.cat([mixed for mixed, _ in parts], dim=1)
        return output.transpose(0, 1).unsqueeze(0).contiguous(), None

    def _attend_in_chunks(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield outputs (head, query, d_head) by chunks, each with the number of entries that a head attends to."""
        lines, n = self._choose_lines(layer, query, key, value), key.shape[1]
        size = max(1, working_bytes(key.device, self.resources.chunk_bytes) // (16 * len(query) * n))
        for first in range(0, n, size):
            here = slice(first, min(first + size, n))
            mask = lines.attention_mask(torch.arange(here.start, here.stop, device=key.device))[..., : here.stop]
            mixed = self._attend(layer, query[:, here], key[:, : here.stop], value[:, : here.stop], mask)
            yield mixed, mask.sum(dtype=torch.float64) / len(mask)

    def _choose_lines(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Lines:
        """Return the lines that the layer's own queries and values select."""
        projection, n = self.adapter.output_projection(layer), key.shape[1]
        if self.config.euclidean:
            norms = euclidean_value_norms(value, projection, self.resources.chunk_bytes)
        else:
            norms = layer_norms(value, projection, self.resources)
        queries = query[:, to_device(last_positions(self.config, n), query.device)]
        seen = last_query_weights(self.adapter, layer, queries, key, norms, self.sample)
        return lines_for_budget(self.config, seen, n).lines

    def _attend(
        self,
        layer: int,
        query: Float[Tensor, "head query d_head"],
        key: Float[Tensor, "kv_head key d_head"],
        value: Float[Tensor, "kv_head key d_head"],
        mask: Tensor,
    ) -> Float[Tensor, "head query d_head"]:
        work, groups = torch.promote_types(query.dtype, torch.float32), len(key)
        queries = query.to(work).reshape(groups, -1, query.shape[-1])
        logits = (queries @ key.to(work).mT * self.adapter.scale(layer)).view(len(query), -1, key.shape[1])
        logits.masked_fill_(~mask.repeat_interleave(len(query) // len(mask), dim=0), -torch.inf)
        weights = softmax_with_sinks(logits, self.adapter.sinks(layer))[0]
        mixed = weights.view(groups, -1, key.shape[1]) @ value.to(work)
        return mixed.view(len(query), -1, value.shape[-1]).to(query.dtype)

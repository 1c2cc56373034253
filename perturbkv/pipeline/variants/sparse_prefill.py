"""A prefill of its own, along lines: every layer's attention is masked by the lines that its own queries choose.

Exact and dense, in chunks of queries: it shows what is lost, and computes masked logits that a sparse kernel would not.

Configurations that read a prompt along lines, in the full prefill's own layers: lines, and isolated quantities.
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
    """Return the lines that each of these configurations that look along lines has in one layer of the full prefill."""
    made: dict[tuple[Positions, bool], LastQueries] = {}
    found = layer.statistics

    def of(config: ResolvedConfig) -> LastQueries:
        asked = last_positions(config, found.tokens)
        if (key := (asked, config.euclidean)) not in made:
            queries = found.queries[asked][layer.index]
            norms = (found.euclidean if config.euclidean else found.norms)[layer.index]
            made[key] = last_queries(layer.adapter, layer.index, queries, layer.prompt_keys, norms, found.sample)
        return made[key]

    return sparse_prefill_groups(configs, of, found.tokens, found.sample)


def last_queries(
    adapter: Adapter,
    layer: int,
    queries: Float[Tensor, "head query d_head"],
    keys: Float[Tensor, "kv_head key d_head"],
    norms: Float[Tensor, "head key"],
    sample: str,
) -> LastQueries:
    """What a layer's lines are chosen from; the queries are those of the last keys."""
    sharing, sinks = len(queries) // len(keys), adapter.sinks(layer)
    rows = [
        causal_rows(
            queries[group].to(WORK), key.to(WORK), adapter.scale(layer), keys.shape[1] - queries.shape[1],
            None if sinks is None else sinks[group],
        )
        for group, key in zip(_groups(len(queries), sharing), keys, strict=True)
    ]  # fmt: skip
    return LastQueries(torch.cat(rows), norms, len(keys), layer, sample)


def _groups(heads: int, sharing: int) -> list[slice]:
    return [slice(first, first + sharing) for first in range(0, heads, sharing)]


def isolated_by_lines(
    layer: FullLayer, group: SparsePrefillGroup, summands: Summands, alphas: Float[Tensor, "config head"]
) -> dict[str, Tensor]:
    """Return `measure.isolated`, the mean over the prompt's queries that are measured, each of the entries it sees.

    `summands` are of the prompt's entries, and may hold more.
    """
    queries, keys = layer.statistics.queries[group.measured_positions][layer.index], layer.prompt_keys
    found, sharing = (
        group.attention_masks(to_device(group.measured_positions, keys.device)),
        layer.adapter.heads // group.kept_heads,
    )
    kept, stage1 = (mask.repeat_interleave(sharing, dim=1) for mask in (found.kept, found.stage1))
    each = []
    for place, position in enumerate(group.measured_positions):
        entries = slice(position + 1)
        weights, sink = theory.decode_weights(queries[:, place], keys[:, entries], layer.scale, layer.sinks)
        full = measure.reference(weights, summands.first_entries(position + 1), layer.slices, sink)
        masks = LayerMasks(kept[:, :, place, entries], stage1[:, :, place, entries])
        each.append(measure.isolated(full, masks, alphas))
    return {name: torch.stack([one[name] for one in each]).mean(dim=0) for name in each[0]}


@dataclass(frozen=True, eq=False)
class OwnPrefill:
    """What a prefill along lines leaves.

    Attributes:
        rows: per measured layer, all entries, which decoding looks at.
        share: entries that its queries look at over those of a full prefill, n (n + 1) / 2 a head.
        seconds: that it took, the choice of lines included.
    """

    rows: list[KeptEntries]
    share: float
    seconds: float


@torch.inference_mode()
def own_prefill(
    adapter: Adapter,
    token_ids: Sequence[int],
    config: ResolvedConfig,
    sample: str,
    resources: Resources,
    check: FiniteCheck,
) -> OwnPrefill:
    """Read a prompt along the lines of one configuration; `check` looks at the logits."""
    attention, cache = _Attention(adapter, config, sample, resources), full_cache(adapter)
    with intercept_attention(adapter, attention):
        seconds, logits = _timed(adapter, token_ids, cache)
    check.look(LOGITS, logits)
    held = [adapter.cache_layer(cache, layer) for layer in range(len(adapter.layers))]
    looked, n = float(stack_on_device(adapter.device, attention.looked).mean()), len(token_ids)
    rows = [borrow(layer.keys[0], layer.values[0]) for layer in held]
    return OwnPrefill(rows, looked / (n * (n + 1) / 2), seconds)


@torch.inference_mode()
def plain_seconds(adapter: Adapter, token_ids: Sequence[int]) -> float:
    """Seconds of the full prefill, nothing watched."""
    return _timed(adapter, token_ids, full_cache(adapter))[0]


def _timed(adapter: Adapter, token_ids: Sequence[int], cache: Any) -> tuple[float, Tensor]:
    """Seconds of a prefill, and the logits of its last position."""
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    _wait(adapter.device)
    begin = time.perf_counter()
    logits = adapter.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    _wait(adapter.device)
    return time.perf_counter() - begin, logits


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(eq=False)
class _Attention:
    """Stands in for the model's attention; `looked` holds, per layer, the entries that a head looks at in all."""

    adapter: Adapter
    config: ResolvedConfig
    sample: str
    resources: Resources
    looked: list[Tensor] = field(default_factory=list)

    def __call__(self, stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, None]:
        """The masked attention of one layer: (1, query, head, d_head)."""
        layer, (query, key, value) = self.adapter.layer_of(module), (one[0] for one in args[:3])
        parts = list(self._parts(layer, query, key, value))
        self.looked.append(torch.stack([count for _, count in parts]).sum())
        output = torch.cat([mixed for mixed, _ in parts], dim=1)
        return output.transpose(0, 1).unsqueeze(0).contiguous(), None

    def _parts(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs (head, query, d_head) chunk by chunk, and how many entries a head looks at in each."""
        lines, n = self._lines(layer, query, key, value), key.shape[1]
        size = max(1, working_bytes(key.device, self.resources.chunk_bytes) // (16 * len(query) * n))
        for first in range(0, n, size):
            here = slice(first, min(first + size, n))
            mask = lines.attention_mask(torch.arange(here.start, here.stop, device=key.device))[..., : here.stop]
            mixed = self._mixed(layer, query[:, here], key[:, : here.stop], value[:, : here.stop], mask)
            yield mixed, mask.sum(dtype=torch.float64) / len(mask)

    def _lines(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Lines:
        """As its own queries and values choose them."""
        projection, n = self.adapter.output_projection(layer), key.shape[1]
        if self.config.euclidean:
            norms = euclidean_value_norms(value, projection, self.resources.chunk_bytes)
        else:
            norms = layer_norms(value, projection, self.resources)
        queries = query[:, to_device(last_positions(self.config, n), query.device)]
        seen = last_queries(self.adapter, layer, queries, key, norms, self.sample)
        return lines_for_budget(self.config, seen, n).lines

    def _mixed(
        self,
        layer: int,
        query: Float[Tensor, "head query d_head"],
        key: Float[Tensor, "kv_head key d_head"],
        value: Float[Tensor, "kv_head key d_head"],
        mask: Tensor,
    ) -> Float[Tensor, "head query d_head"]:
        work, groups = torch.promote_types(query.dtype, torch.float32), len(key)
        asked = query.to(work).reshape(groups, -1, query.shape[-1])
        logits = (asked @ key.to(work).mT * self.adapter.scale(layer)).view(len(query), -1, key.shape[1])
        logits.masked_fill_(~mask.repeat_interleave(len(query) // len(mask), dim=0), -torch.inf)
        weights = softmax_with_sinks(logits, self.adapter.sinks(layer))[0]
        mixed = weights.view(groups, -1, key.shape[1]) @ value.to(work)
        return mixed.view(len(query), -1, value.shape[-1]).to(query.dtype)

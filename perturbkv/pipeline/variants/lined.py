"""Configurations that read a prompt along lines, in the full prefill's own layers: lines, and isolated quantities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv import theory
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.devices import on_device
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.measure import LayerMasks
from perturbkv.pipeline.sample.prefill import Statistics
from perturbkv.scoring.window_attention import causal_rows
from perturbkv.selection.lined import LinedGroup, lined_groups
from perturbkv.selection.prompt_queries import Positions, last
from perturbkv.selection.sparse_lines import LastQueries
from perturbkv.theory import WORK, Summands


def groups(
    adapter: Adapter,
    found: Statistics,
    layer: int,
    configs: Sequence[EvictionConfig],
    keys: Float[Tensor, "kv_head key d_head"],
) -> list[LinedGroup]:
    """Which lines each of these configurations that look along lines has in one layer of the full prefill."""
    made: dict[tuple[Positions, bool], LastQueries] = {}

    def of(config: EvictionConfig) -> LastQueries:
        asked = last(config, found.tokens)
        if (key := (asked, config.euclidean)) not in made:
            queries = found.queries[asked][layer]
            norms = (found.euclidean if config.euclidean else found.norms)[layer]
            made[key] = last_queries(adapter, layer, queries, keys, norms, found.sample)
        return made[key]

    return lined_groups(configs, of, found.tokens, found.sample)


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


def isolated(
    adapter: Adapter,
    layer: int,
    group: LinedGroup,
    queries: Float[Tensor, "head query d_head"],
    keys: Float[Tensor, "kv_head key d_head"],
    summands: Summands,
    slices: Float[Tensor, "head d_head d_model"],
    alphas: Float[Tensor, "config head"],
) -> dict[str, Tensor]:
    """As `measure.isolated`, the mean over the prompt's queries that are asked, each of the entries that it sees.

    `keys` are of the prompt's entries alone; behind theirs `summands` may hold more.
    """
    found, sharing = group.seen(on_device(group.measured, keys.device)), adapter.heads // group.kept_heads
    kept, stage1 = (mask.repeat_interleave(sharing, dim=1) for mask in (found.kept, found.stage1))
    each = []
    for place, position in enumerate(group.measured):
        entries = slice(position + 1)
        weights, sink = theory.decode_weights(
            queries[:, place], keys[:, entries], adapter.scale(layer), adapter.sinks(layer)
        )
        full = measure.reference(weights, summands.of_first(position + 1), slices, sink)
        masks = LayerMasks(kept[:, :, place, entries], stage1[:, :, place, entries])
        each.append(measure.isolated(full, masks, alphas))
    return {name: torch.stack([one[name] for one in each]).mean(dim=0) for name in each[0]}

"""Corrected outputs: what stands in for the entries that a layer loses, and what is left of their loss in it alone.

The isolated perturbation of a corrected configuration is that of its corrected output, under the full run's query. What
bounds the loss of eviction alone (θ, θ̂) does not bound this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from perturbkv import theory
from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.stand_in import StandIn, stand_in
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.devices import on_device
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.decoding import StepRecord


@dataclass(frozen=True, eq=False)
class Corrected:
    """One corrected configuration in one layer.

    Attributes:
        stand_in: what stands in for the entries that went.
        gone: which of the prompt's entries went, per query head.
    """

    stand_in: StandIn
    gone: Bool[Tensor, "head key"]


def corrections(
    adapter: Adapter,
    layer: int,
    entries: Mapping[int, KeptEntries],
    configs: Sequence[EvictionConfig],
    mean_queries: Mapping[int, Sequence[Float[Tensor, "head d_head"]]],
    whole: tuple[Tensor, Tensor],
    prompt_tokens: int,
) -> dict[int, Corrected]:
    """Of each corrected configuration what stands in for what it loses in one layer.

    `entries` are what each keeps of the layer's full cache, whose keys and values (kv_head, key, d_head) are `whole`;
    `mean_queries` those of each window, per layer.
    """
    keys, values = whole
    found = {}
    for place in (place for place in entries if configs[place].corrected):
        gone = _gone(entries[place], keys.shape[1], prompt_tokens, adapter.heads)
        prompt = (keys[:, :prompt_tokens], values[:, :prompt_tokens])
        query = mean_queries[configs[place].window][layer]
        made = stand_in(configs[place].correction, query, *prompt, gone, adapter.scale(layer))
        found[place] = Corrected(made, gone)
    return found


def _gone(entries: KeptEntries, stride: int, prompt_tokens: int, heads: int) -> Bool[Tensor, "head key"]:
    """Which entries a configuration does not keep; those of a key/value head lie `stride` places apart."""
    sets, device = len(entries.lengths), entries.index.device
    lengths = on_device(entries.lengths, device)
    rows = torch.arange(sets, device=device).repeat_interleave(lengths, output_size=len(entries.index))
    gone = torch.ones(sets, prompt_tokens, dtype=torch.bool, device=device)
    gone[rows, entries.index % stride] = False
    return gone.repeat_interleave(heads // sets, dim=0)


def isolated(
    adapter: Adapter,
    layer: int,
    full: Sequence[StepRecord],
    whole: tuple[Tensor, Tensor],
    rows: Mapping[int, Corrected],
) -> dict[int, Tensor]:
    """Per configuration (step, name, head): distances of each head's corrected output in one layer.

    Names are those of `quantised.NAMES`; NaN where a head loses nothing, as its output then is what it is uncorrected.
    """
    steps = [_step(adapter, layer, step, whole, rows) for step in full] if rows else []
    return {place: torch.stack([step[place] for step in steps]) for place in rows}


def _step(
    adapter: Adapter, layer: int, step: StepRecord, whole: tuple[Tensor, Tensor], rows: Mapping[int, Corrected]
) -> dict[int, Tensor]:
    query, scale, sinks = step.query[layer][0], adapter.scale(layer), adapter.sinks(layer)
    keys, values = (kind[:, : step.entries] for kind in whole)
    attention, sink = theory.decode_weights(query, keys, scale, sinks)
    total = theory.log_total(query, keys, scale, sinks)
    slices = theory.head_slices(adapter.output_projection(layer), adapter.heads)
    mixed = theory.weighted_sums(attention.unsqueeze(0), values)[0]
    output, found = theory.projected(mixed, slices), {}
    for place, one in rows.items():
        stays = attention.clone()
        stays[:, : one.gone.shape[1]].masked_fill_(one.gone, 0)
        mass = (one.stand_in.logits(query.to(theory.WORK).unsqueeze(1), scale).squeeze(1) - total).exp()
        kept = theory.weighted_sums(stays.unsqueeze(0), values)[0]
        own = theory.corrected(kept, stays.sum(dim=-1) + sink, one.stand_in.value, mass)
        moved = theory.distances(output, theory.projected(own - mixed, slices))
        loses = one.gone.any(dim=-1)
        found[place] = torch.stack([moved.l1, moved.l2, moved.cosine]).where(loses, torch.nan)
    return found

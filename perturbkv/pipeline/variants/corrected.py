"""Corrected outputs: what stands in for the entries that a layer loses, and what is left of their loss in it alone.

The isolated perturbation of a corrected configuration is that of its corrected output, under the full run's query. What
bounds the loss of eviction alone (θ, θ̂) does not bound this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from perturbkv import theory
from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.stand_in import StandIn, stand_in
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.devices import to_device
from perturbkv.pipeline.sample.decoding import StepRecord
from perturbkv.pipeline.sample.full_layer import FullLayer


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
    layer: FullLayer, entries: Mapping[int, KeptEntries], configs: Sequence[EvictionConfig]
) -> dict[int, Corrected]:
    """Return what stands in for what each corrected configuration loses in one layer; it keeps `entries`."""
    found = {}
    for place in (place for place in entries if configs[place].corrected):
        gone = _gone(entries[place], layer.keys.shape[1], layer.tokens, layer.adapter.heads)
        query = layer.statistics.mean_queries[configs[place].window][layer.index]
        prompt = (layer.prompt_keys, layer.prompt_values)
        made = stand_in(configs[place].correction, query, *prompt, gone, layer.scale)
        found[place] = Corrected(made, gone)
    return found


def _gone(entries: KeptEntries, stride: int, prompt_tokens: int, heads: int) -> Bool[Tensor, "head key"]:
    """Which entries a configuration does not keep; those of a key/value head lie `stride` places apart."""
    sets, device = len(entries.lengths), entries.index.device
    lengths = to_device(entries.lengths, device)
    rows = torch.arange(sets, device=device).repeat_interleave(lengths, output_size=len(entries.index))
    gone = torch.ones(sets, prompt_tokens, dtype=torch.bool, device=device)
    gone[rows, entries.index % stride] = False
    return gone.repeat_interleave(heads // sets, dim=0)


def isolated(layer: FullLayer, full: Sequence[StepRecord], rows: Mapping[int, Corrected]) -> dict[int, Tensor]:
    """Return, per configuration, (step, name, head): distances of each head's corrected output in one layer.

    Names are those of `quantised.NAMES`; NaN where a head loses nothing, as its output then is what it is uncorrected.
    """
    steps = [_step(layer, step, rows) for step in full] if rows else []
    return {place: torch.stack([step[place] for step in steps]) for place in rows}


def _step(layer: FullLayer, step: StepRecord, rows: Mapping[int, Corrected]) -> dict[int, Tensor]:
    query, scale, slices = step.query[layer.index][0], layer.scale, layer.slices
    values = layer.values[:, : step.entries]
    attention, sink = layer.weights(step)
    total = theory.log_total(query, layer.keys[:, : step.entries], scale, layer.sinks)
    mixed = theory.weighted_sums(attention.unsqueeze(0), values)[0]
    output, found = theory.project_outputs(mixed, slices), {}
    for place, one in rows.items():
        stays = attention.clone()
        stays[:, : one.gone.shape[1]].masked_fill_(one.gone, 0)
        mass = (one.stand_in.logits(query.to(theory.WORK).unsqueeze(1), scale).squeeze(1) - total).exp()
        kept = theory.weighted_sums(stays.unsqueeze(0), values)[0]
        own = theory.corrected_output(kept, stays.sum(dim=-1) + sink, one.stand_in.value, mass)
        moved = theory.distances(output, theory.project_outputs(own - mixed, slices))
        loses = one.gone.any(dim=-1)
        found[place] = torch.stack([moved.l1, moved.l2, moved.cosine]).where(loses, torch.nan)
    return found

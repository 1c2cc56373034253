"""Corrections for the evicted entries of a layer, and the isolated perturbation of the corrected output.

It is measured under the full run's query. The bounds of eviction alone (θ, θ̂) do not hold for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from perturbkv import theory
from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.stand_in import StandIn, make_stand_in
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.devices import to_device
from perturbkv.pipeline.sample.decoding import StepRecord
from perturbkv.pipeline.sample.full_layer import FullLayer


@dataclass(frozen=True, eq=False)
class Correction:
    """The correction of one configuration in one layer.

    Attributes:
        stand_in: the entries that replace the evicted ones.
        evicted: mask of the evicted prompt entries, per query head.
    """

    stand_in: StandIn
    evicted: Bool[Tensor, "head key"]


def corrections(
    layer: FullLayer, entries: Mapping[int, KeptEntries], configs: Sequence[EvictionConfig]
) -> dict[int, Correction]:
    """Return index -> correction of the corrected configurations in one layer; `entries` maps index to kept entries."""
    result = {}
    for index in (index for index in entries if configs[index].corrected):
        evicted = _evicted_mask(entries[index], layer.keys.shape[1], layer.tokens, layer.adapter.heads)
        query = layer.statistics.mean_queries[configs[index].window][layer.index]
        prompt = (layer.prompt_keys, layer.prompt_values)
        stand_in = make_stand_in(configs[index].correction, query, *prompt, evicted, layer.scale)
        result[index] = Correction(stand_in, evicted)
    return result


def _evicted_mask(entries: KeptEntries, stride: int, prompt_tokens: int, heads: int) -> Bool[Tensor, "head key"]:
    """Return the mask of the evicted prompt entries per query head; key/value heads are `stride` entries apart."""
    sets, device = len(entries.lengths), entries.index.device
    lengths = to_device(entries.lengths, device)
    rows = torch.arange(sets, device=device).repeat_interleave(lengths, output_size=len(entries.index))
    evicted = torch.ones(sets, prompt_tokens, dtype=torch.bool, device=device)
    evicted.view(-1).index_fill_(0, rows * prompt_tokens + entries.index % stride, False)
    return evicted.repeat_interleave(heads // sets, dim=0)


def isolated_perturbations(
    layer: FullLayer, full: Sequence[StepRecord], rows: Mapping[int, Correction]
) -> dict[int, Tensor]:
    """Return index -> isolated perturbations (step, name, head) of the corrected configurations in one layer.

    They are distances of each head's corrected output, with the names of `stored.CHANGED_VARIABLES`; NaN where a
    head evicts nothing, as no correction applies. `full` are the steps of the full run.
    """
    steps = [_step_perturbations(layer, step, rows) for step in full] if rows else []
    return {index: torch.stack([step[index] for step in steps]) for index in rows}


def _step_perturbations(layer: FullLayer, step: StepRecord, rows: Mapping[int, Correction]) -> dict[int, Tensor]:
    """Return index -> isolated perturbations (name, head) of the corrected configurations at one step."""
    query, scale, slices = step.query[layer.index][0], layer.scale, layer.slices
    values = layer.values[:, : step.entries]
    attention, sink = layer.weights(step)
    total = theory.log_total(query, layer.keys[:, : step.entries], scale, layer.sinks)
    mixed = theory.weighted_sums(attention.unsqueeze(0), values)[0]
    output, result = theory.project_outputs(mixed, slices), {}
    for index, correction in rows.items():
        stays = attention.clone()
        stays[:, : correction.evicted.shape[1]].masked_fill_(correction.evicted, 0)
        mass = (correction.stand_in.logits(query.to(theory.WORK).unsqueeze(1), scale).squeeze(1) - total).exp()
        kept = theory.weighted_sums(stays.unsqueeze(0), values)[0]
        share = stays.sum(dim=-1) + sink
        changed = theory.corrected_output(kept, share, correction.stand_in.value, mass)
        moved = theory.distances(output, theory.project_outputs(changed - mixed, slices))
        evicted = kept / share.unsqueeze(-1)
        apart = theory.project_outputs(changed - evicted, slices).abs().sum(dim=-1)
        evicts = correction.evicted.any(dim=-1)
        result[index] = torch.stack([*moved.tensors(), apart]).where(evicts, torch.nan)
    return result

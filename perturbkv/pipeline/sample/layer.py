"""Measurement of one layer: kept sets of all configurations, isolated quantities, largest evicted outputs.

The largest evicted outputs are those of the evicted entries with the largest ‖A_i 𝒱_i‖₁ = A_i ν_i under full attention
at the first decode step. Nothing here waits for the device, so that a GPU works through all layers without a pause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv import theory
from perturbkv.devices import to_device, working_bytes
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.capture import FiniteCheck
from perturbkv.pipeline.sample.compressed_spans import (
    PLACE_BYTES,
    SPAN_BYTES,
    LaterSets,
    decoding_spans,
    measured_steps,
    sum_missed,
)
from perturbkv.pipeline.sample.decoding import StepRecord
from perturbkv.pipeline.sample.effect import EntryEffects
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.measure import LayerMasks
from perturbkv.pipeline.sample.prefill import layer_value_norms
from perturbkv.pipeline.sample.sample_run import SampleRun
from perturbkv.pipeline.variants import readers
from perturbkv.selection.kept_sets import KeptSets
from perturbkv.selection.page_selection import AnyGroup
from perturbkv.selection.resolved_config import ResolvedConfig
from perturbkv.selection.sparse_lines import SparsePrefillGroup
from perturbkv.theory import WORK, Summands

LOST_ENTRIES = 10
"""Number of evicted entries that are stored per head."""


def rank_outputs(
    attention: Float[Tensor, "head seen"], norms: Float[Tensor, "head seen"], prompt_tokens: int
) -> tuple[Float[Tensor, "head key"], Int[Tensor, "head key"]]:
    """Return A ν of the prompt's entries, descending, and their positions; ties are in the prompt's order.

    Attention weights A and norms ν are those of all entries.
    """
    return (attention * norms.to(WORK))[:, :prompt_tokens].sort(dim=-1, descending=True, stable=True)


def largest_evicted_outputs(
    ranked: tuple[Float[Tensor, "head key"], Int[Tensor, "head key"]], kept: Bool[Tensor, "config head key"]
) -> dict[str, Tensor]:
    """Return positions and A ν of the evicted entries of largest A ν, by name, each (config, head, lost_entry).

    `ranked` are entries as `rank_outputs` returns them. Positions are −1 and outputs NaN where fewer are evicted.
    """
    outputs, positions = ranked
    evicted = ~kept.gather(-1, positions.expand_as(kept))
    ranks = torch.arange(1, LOST_ENTRIES + 1, dtype=torch.int32, device=kept.device)
    evicted_so_far = evicted.cumsum(dim=-1, dtype=torch.int32)
    index = torch.searchsorted(
        evicted_so_far, ranks.expand(*kept.shape[:2], -1).contiguous()
    )  # of the r-th evicted entry
    exists, index = index < kept.shape[-1], index.clamp(max=kept.shape[-1] - 1)
    position, output = (
        row.expand(*kept.shape[:2], -1).gather(-1, index) for row in (positions, outputs)
    )  # fmt: skip
    return {"lost_position": position.where(exists, -1), "lost_output": output.where(exists, torch.nan)}


_ENTRY_BYTES = 21
"""Working memory of the sums over entries, per entry, head and configuration: two masks, and one of them and weights of
one step in float64 beside their product."""


@dataclass(frozen=True)
class LayerResult:
    """The measurements of one layer of one sample.

    Attributes:
        groups: kept sets of every configuration.
        isolated: per step, name -> (config, head), or (head,) for noise floors; configurations in `groups`' order.
        lost: largest evicted outputs of the first step, name -> (config, head, lost_entry), or (head,) for Σ A ν.
        attention: reference attention per step (head, key), where the run saves outputs.
        missed: attention of later steps on each step's token while it is gone, mean over heads and sum over steps
            (config, step); empty where caches are not compressed again.
    """

    groups: Sequence[AnyGroup]
    isolated: list[dict[str, Tensor]]
    lost: dict[str, Tensor]
    attention: list[Tensor]
    missed: Tensor


@dataclass(frozen=True)
class LayerEffects:
    """The isolated effects of one layer on the text.

    Attributes:
        groups: kept sets of every configuration, in whose order these are.
        isolated: per step, `effect_isolated` (config, head) and its noise floor (head,), by name.
        entries: effect of every entry of the prompt, of all heads and steps.
    """

    groups: Sequence[AnyGroup]
    isolated: list[dict[str, Tensor]]
    entries: Float[Tensor, "config n"]


def config_order(groups: Sequence[AnyGroup]) -> list[int]:
    """Return the indices of all configurations in the order of the groups, which all layers share."""
    return [index for group in groups for index in group.config_indices]


def measure_layer(
    sample: SampleRun, index: int, groups: Sequence[AnyGroup], later: LaterSets, finite: FiniteCheck
) -> LayerResult:
    """Return the isolated quantities of one layer at all steps, of the kept sets in `groups` and of `later` ones.

    `finite` records whether the full run's heads put out what the formulas say.
    """
    layer, configs, n, heads = sample.layer(index), sample.run.configs, sample.tokens, sample.adapter.heads
    steps = sample.full.steps
    weights = layer.weights_per_step(steps)
    attention = [entries for entries, _ in weights]
    chosen = measured_steps(sample.run, len(steps), later)
    references = {
        step: measure.layer_reference(weights[step][0], of_step, layer.slices_at(steps[step]), weights[step][1])
        for step, of_step in zip(chosen, _summands(sample, layer, [steps[step] for step in chosen]), strict=True)
    }
    for step, reference in references.items():
        measure.check_head_outputs(finite, layer, steps[step], reference.whole[0])
    ranked = rank_outputs(attention[0], references[0].summands.norms(), n)
    quantities, evicted, missed, context = [], [], [], n + len(sample.question)
    working = working_bytes(layer.keys.device, sample.resources.chunk_bytes)
    at_steps = [group for group in groups if not isinstance(group, SparsePrefillGroup)]
    in_prompt = [group for group in groups if isinstance(group, SparsePrefillGroup)]
    of_spans = PLACE_BYTES + SPAN_BYTES * (1 + len(later)) if sample.run.compresses else 0
    for group, rows in _split_groups(at_steps, heads * layer.keys.shape[1], working, _ENTRY_BYTES + of_spans):
        masks = [_repeat_per_query_head(sets, heads) for sets in group.kept_sets_per_step(rows)]
        alphas = _alpha_per_head(layer, configs, group, rows)
        evicted.append(largest_evicted_outputs(ranked, masks[0].kept))
        if sample.run.compresses:
            own = group.config_indices[rows]
            spans = decoding_spans(masks[0], own, later, index, attention, references, context)
            quantities.append([step for span in spans for step in span.measure(alphas)])
            missed.append(sum_missed(spans))
        else:
            every = [*references.values()]
            held_at = [every] if len(masks) == 1 else [[step] for step in every]  # the steps at which each mask holds
            measured = [measure.isolated_quantities(*each, alphas) for each in zip(held_at, masks, strict=True)]
            quantities.append(list(chain.from_iterable(measured)))
    for lines in in_prompt:  # measured once, at queries of the prompt
        alphas = _alpha_per_head(layer, configs, lines, slice(None))
        seen = lines.decoding_mask(heads)
        quantities.append([readers.isolated_along_lines(layer, lines, references[0].summands, alphas)])
        evicted.append(largest_evicted_outputs(ranked, seen))
    isolated = [_join_configs(step) for step in zip(*quantities, strict=True)]
    if in_prompt:  # noise floors (head,) are the largest of all groups, which are measured at different queries
        first = [steps_of_group[0] for steps_of_group in quantities]
        floors = [name for name, tensor in first[0].items() if tensor.ndim == 1]
        isolated[0] |= {name: torch.stack([group[name] for group in first]).amax(dim=0) for name in floors}
    lost = _join_configs(evicted) | {"weighted_norm": references[0].total}
    saved = attention if "outputs" in sample.run.save else []
    return LayerResult(groups, isolated, lost, saved, torch.cat(missed) if missed else torch.empty(0))


def measure_effects(
    sample: SampleRun, index: int, groups: Sequence[AnyGroup], gradients: Sequence[Float[Tensor, "config head d_value"]]
) -> LayerEffects:
    """Return the isolated effects of one layer, whose kept sets are those of `groups`; a sparse prefill has none.

    `gradients` are the configurations' own, per step, in the order of the run; empty where all have the full run's. The
    noise floor is always by the full run's.
    """
    layer, steps, heads = sample.layer(index), sample.full.steps, sample.adapter.heads
    weights = layer.weights_per_step(steps)
    layer = replace(layer, values=layer.values.to(WORK))

    def effects(step: int, gradient: Float[Tensor, "row head d_value"]) -> EntryEffects:
        return EntryEffects(*weights[step], layer.entry_effects(steps[step], gradient))

    by_full = [effects(step, record.gradient[index]) for step, record in enumerate(steps)]
    working = working_bytes(layer.keys.device, sample.resources.chunk_bytes)
    working //= 2 if gradients else 1  # gradients of its own are as large as a configuration's effects
    at_steps, quantities = [group for group in groups if not isinstance(group, SparsePrefillGroup)], []
    for group, rows in _split_groups(at_steps, heads * layer.keys.shape[1], working):
        masks = [_repeat_per_query_head(sets, heads).kept for sets in group.kept_sets_per_step(rows)]
        chosen, at_step = list(group.config_indices[rows]), masks * len(steps) if len(masks) == 1 else masks
        quantities.append([
            (effects(step, gradients[step][chosen]) if gradients else by_full[step]).isolated(mask)
            for step, mask in enumerate(at_step)
        ])  # fmt: skip
    isolated = [_join_configs(step) for step in zip(*quantities, strict=True)]
    entries = torch.stack([step.pop("entry_effect") for step in isolated]).sum(dim=0)
    for known, effect in zip(isolated, by_full, strict=True):
        known["effect_noise_floor_isolated"] = effect.floor()
    return LayerEffects(groups, isolated, entries)


def _summands(sample: SampleRun, layer: FullLayer, steps: Sequence[StepRecord]) -> list[Summands]:
    """Return the summands of the entries that each step sees; ν of a step is under its own gate, where there is one."""
    n, resources = sample.tokens, sample.resources
    if sample.adapter.has_gate(layer.index):
        seen = [layer.values[:, : step.entries] for step in steps]
        projections = map(layer.projection_at, steps)
        return [
            theory.stack_summands(values, layer_value_norms(values, w_o, resources))
            for values, w_o in zip(seen, projections, strict=True)
        ]
    known = [next(iter(layer.statistics.norms.values()))[layer.index]] if layer.owner == layer.index else []
    others = layer_value_norms(layer.values[:, n * len(known) :], layer.projection, resources)
    everything = theory.stack_summands(layer.values, torch.cat([*known, others], dim=-1))
    return [everything.first_entries(step.entries) for step in steps]


def select_groups(sample: SampleRun, layer: FullLayer) -> list[AnyGroup]:
    """Return the groups of all configurations with their kept sets in one layer: evicting ones, then readers."""
    configs = sample.run.configs

    def realised(other: int) -> Tensor:
        return layer.compute_once(("attention", other), lambda: sample.first_step_attention(other))

    with phase("select"):
        groups: list[AnyGroup] = [*layer.groups(configs, realised)]
        for reader in sample.readers:
            groups += reader.groups(layer, configs, [step.query[layer.index][0] for step in sample.full.steps])
    return groups


_Group = TypeVar("_Group", bound=AnyGroup)


def _split_groups(
    groups: Sequence[_Group], entries: int, working: int, entry_bytes: int = _ENTRY_BYTES
) -> Iterator[tuple[_Group, slice]]:
    """Yield (group, slice of its configurations) pairs, each slice small enough for `working` bytes of memory.

    `entries` is the number of entries times heads, `entry_bytes` what each takes per configuration.
    """
    size = max(1, working // (entry_bytes * entries))
    return (
        (group, slice(start, start + size)) for group in groups for start in range(0, len(group.config_indices), size)
    )


def _repeat_per_query_head(sets: KeptSets, heads: int) -> LayerMasks:
    """Return the masks of kept sets as masks per query head, repeated for the heads that share a set."""
    sharing = heads // sets.kept.shape[1]
    if sharing == 1:
        return LayerMasks(sets.kept, sets.stage1)
    return LayerMasks(sets.kept.repeat_interleave(sharing, dim=1), sets.stage1.repeat_interleave(sharing, dim=1))


def _alpha_per_head(layer: FullLayer, configs: Sequence[ResolvedConfig], group: AnyGroup, rows: slice) -> Tensor:
    """Return the stage-1 share α (config, head) of the group's configurations in the slice `rows`."""
    shares = [configs[index].alphas(layer.owner, group.kept_heads) for index in group.config_indices[rows]]
    per_kept_set = to_device(shares, layer.keys.device, theory.WORK)
    return per_kept_set.repeat_interleave(layer.adapter.heads // group.kept_heads, dim=1)


def _join_configs(groups: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return name -> quantity of all groups, joined along `config`; noise floors (head,) are the first group's."""
    return {
        name: torch.cat([group[name] for group in groups]) if first.ndim > 1 else first
        for name, first in groups[0].items()
    }

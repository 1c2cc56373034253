"""Isolated perturbation of kept entries as the cache stores them: keys moved to other positions, numbers in few bits.

The query is the full run's. Changed keys change every weight, so that A' is the softmax over the kept entries' own
logits and not N⊙A / ΣNA: the bounds of eviction alone (θ, θ̂) do not hold for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from perturbkv import theory
from perturbkv.cache.entries import KeptEntries
from perturbkv.devices import to_device
from perturbkv.pipeline.sample.capture import FiniteCheck
from perturbkv.pipeline.sample.decoding import StepRecord
from perturbkv.pipeline.sample.full_layer import FullLayer

CHANGED_VARIABLES = (*theory.Distances.names("perturbation_isolated"), "perturbation_change")
"""Variables measured of the entries as stored: the distance from the full output, and, in L1, from the evicted one."""


@dataclass(frozen=True, eq=False)
class StoredEntries:
    """The entries that a configuration keeps in one layer, as in the full cache and as its own cache stores them."""

    kept: KeptEntries
    stored: KeptEntries
    quantised: bool


def check_finite(finite: FiniteCheck, layer: int, entries: KeptEntries) -> None:
    """Record whether a layer's quantised entries are finite, as 16-bit scales overflow for large numbers."""
    for kind, numbers in (("keys", entries.keys), ("values", entries.values)):
        finite.check(f"the quantised {kind} of layer {layer}", numbers)


def isolated_perturbations(
    layer: FullLayer, full: Sequence[StepRecord], rows: Mapping[int, StoredEntries]
) -> dict[int, Tensor]:
    """Return index -> isolated perturbations (step, name, head) of the configurations whose entries are changed.

    Names are `CHANGED_VARIABLES`; NaN where a head evicts nothing and moves nothing. `full` are the steps of the full
    run; `rows` are the prompt's entries by index.
    """
    steps = [_step_perturbations(layer, step, rows) for step in full] if rows else []
    return {index: torch.stack([step[index] for step in steps]) for index in rows}


def _step_perturbations(layer: FullLayer, step: StepRecord, rows: Mapping[int, StoredEntries]) -> dict[int, Tensor]:
    """Return index -> isolated perturbations (name, head) of the configurations at one step."""
    query, slices = step.query[layer.index][0], layer.slices
    keys, values = (kind[:, : step.entries] for kind in (layer.keys, layer.values))
    decoded = keys[:, layer.tokens :], values[:, layer.tokens :]

    def attend(entries: KeptEntries) -> Tensor:
        own_keys, own_values, present = _with_decoded(entries, *decoded)
        return theory.attention_output(query, own_keys, own_values, layer.scale, layer.sinks, present=present)

    mixed = theory.attention_output(query, keys, values, layer.scale, layer.sinks)
    output, result = theory.project_outputs(mixed, slices), {}
    for index, row in rows.items():
        evicted, changed = attend(row.kept), attend(row.stored)
        moved = theory.distances(output, theory.project_outputs(changed - mixed, slices))
        apart = theory.project_outputs(changed - evicted, slices).abs().sum(dim=-1)
        numbers = torch.stack([*moved.tensors(), apart])
        if not row.quantised:
            evicts = to_device([kept < layer.tokens for kept in row.kept.lengths], numbers.device)
            numbers = numbers.where(evicts.repeat_interleave(len(query) // len(evicts)), torch.nan)
        result[index] = numbers
    return result


def _with_decoded(entries: KeptEntries, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded keys and values (kept_head, entry, d_head) of kept and decoded entries, and the padding mask.

    `keys` and `values` (kv_head, entry, d_head) are those of the decoded tokens; shorter kept sets are padded.
    """
    sets, sharing = entries.sets(), len(entries.lengths) // len(keys)
    kept = [pad_sequence(list(kind), batch_first=True) for kind in zip(*sets, strict=True)]
    decoded = [kind.repeat_interleave(sharing, dim=0) for kind in (keys, values)]
    real = [kept_keys.new_ones(len(kept_keys), dtype=torch.bool) for kept_keys, _ in sets]
    present = [pad_sequence(real, batch_first=True), torch.ones_like(decoded[0][..., 0], dtype=torch.bool)]
    joined = [torch.cat(pair, dim=1) for pair in zip(kept, decoded, strict=True)]
    return joined[0], joined[1], torch.cat(present, dim=1)

"""Isolated perturbation of quantised kept entries: the same query, and one layer's kept set as the cache stores it.

Quantised keys change every weight, so that A' is the softmax over the kept entries' own logits and not N⊙A / ΣNA: the
bounds of eviction alone (θ, θ̂) do not hold for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from perturbkv import theory
from perturbkv.cache.entries import KeptEntries
from perturbkv.pipeline.sample.capture import FiniteCheck
from perturbkv.pipeline.sample.decoding import StepRecord
from perturbkv.pipeline.sample.full_layer import FullLayer

ISOLATED_VARIABLES = theory.Distances.names("perturbation_isolated")


def check_finite(finite: FiniteCheck, layer: int, entries: KeptEntries) -> None:
    """Record whether a layer's quantised entries are finite, as 16-bit scales overflow for large numbers."""
    for kind, numbers in (("keys", entries.keys), ("values", entries.values)):
        finite.check(f"the quantised {kind} of layer {layer}", numbers)


def isolated_perturbations(
    layer: FullLayer, full: Sequence[StepRecord], rows: Mapping[int, KeptEntries]
) -> dict[int, Tensor]:
    """Return index -> isolated perturbations (step, name, head) of the quantised configurations in one layer.

    Names are `ISOLATED_VARIABLES`. `full` are the steps of the full run; `rows` are the prompt's entries as each
    configuration stores them, by index.
    """
    steps = [_step_perturbations(layer, step, rows) for step in full] if rows else []
    return {index: torch.stack([step[index] for step in steps]) for index in rows}


def _step_perturbations(layer: FullLayer, step: StepRecord, rows: Mapping[int, KeptEntries]) -> dict[int, Tensor]:
    """Return index -> isolated perturbations (name, head) of the quantised configurations at one step."""
    query, scale_and_sinks, slices = step.query[layer.index][0], (layer.scale, layer.sinks), layer.slices
    keys, values = (kind[:, : step.entries] for kind in (layer.keys, layer.values))
    mixed = theory.attention_output(query, keys, values, *scale_and_sinks)
    output, result = theory.project_outputs(mixed, slices), {}
    for index, entries in rows.items():
        cached = _with_decoded(entries, keys[:, layer.tokens :], values[:, layer.tokens :])
        changed = theory.attention_output(query, *cached[:2], *scale_and_sinks, present=cached[2])
        moved = theory.distances(output, theory.project_outputs(changed - mixed, slices))
        result[index] = torch.stack(moved.tensors())
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

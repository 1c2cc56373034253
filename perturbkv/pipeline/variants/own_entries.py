"""Isolated perturbation of entries that are not the full cache's: moved keys, few bits, corrections.

It is measured under the full run's query. Changed entries change every weight, so that A' is the softmax over a row's
own logits and not N⊙A / ΣNA: the bounds of eviction alone (θ, θ̂) do not hold for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from perturbkv import theory
from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.makers import Entries, OwnEntries
from perturbkv.pipeline.sample.capture import FiniteCheck
from perturbkv.pipeline.sample.decoding import StepRecord
from perturbkv.pipeline.sample.full_layer import FullLayer

CHANGED_VARIABLES = (*theory.Distances.names("perturbation_isolated"), "perturbation_change")
"""Variables measured of own entries: the distance from the full output, and, in L1, from the kept set's alone."""


def check_finite(finite: FiniteCheck, layer: int, entries: KeptEntries) -> None:
    """Record whether a layer's quantised entries are finite, as 16-bit scales overflow for large numbers."""
    for kind, numbers in (("keys", entries.keys), ("values", entries.values)):
        finite.check(f"the quantised {kind} of layer {layer}", numbers)


def isolated_perturbations(
    layer: FullLayer, full: Sequence[StepRecord], rows: Mapping[int, Entries]
) -> dict[int, Tensor]:
    """Return index -> isolated perturbations (step, name, head) of the rows with entries of their own.

    Names are `CHANGED_VARIABLES`; NaN where a head's entries are the full cache's. `full` are the steps of the full
    run.
    """
    own = {index: entries for index, entries in rows.items() if isinstance(entries, OwnEntries)}
    steps = [_step_perturbations(layer, step, own) for step in full] if own else []
    return {index: torch.stack([step[index] for step in steps]) for index in own}


def _step_perturbations(layer: FullLayer, record: StepRecord, rows: Mapping[int, OwnEntries]) -> dict[int, Tensor]:
    """Return index -> isolated perturbations (name, head) of rows with entries of their own, at one step."""
    step, slices, result = layer.step(record), layer.slices, {}
    output = theory.project_outputs(step.mixed, slices)
    for index, entries in rows.items():
        evicted, own, changed = entries.outputs(step)
        moved = theory.distances(output, theory.project_outputs(own - step.mixed, slices))
        apart = theory.project_outputs(own - evicted, slices).abs().sum(dim=-1)
        numbers = torch.stack([*moved.tensors(), apart])
        result[index] = numbers if changed is None else numbers.where(changed, torch.nan)
    return result

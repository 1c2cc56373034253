"""Perturbation and bounds of masks that are given outright."""

from __future__ import annotations

from torch import Tensor

from perturbkv import theory


def quantities(
    attention: Tensor, norms: Tensor, value: Tensor, w_o: Tensor, kept: Tensor, stage1: Tensor
) -> tuple[theory.Bounds, Tensor]:
    """Bounds, and the isolated perturbation (config, head)."""
    summands = theory.stack_summands(value, norms)
    stays, first = (theory.kept_sums(attention, summands, mask) for mask in (kept, stage1))
    whole = theory.weighted_sums(attention.unsqueeze(0), value)
    limits = theory.bounds((attention * norms).sum(dim=-1), norms.amin(dim=-1), stays, first)
    slices = theory.head_slices(w_o, len(attention))
    output = theory.project_outputs(whole[0], slices)
    return limits, theory.isolated_perturbation(whole, stays.mixed, stays.mass, slices, output).l1

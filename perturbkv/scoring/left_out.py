"""What a query would give without its heaviest entry, exact even where that entry takes all the weight.

With weights a that add up to 1, o = Σ_j a_j v_j and μ the mean of the values of all entries but j, weighted by a,
a_j / (1 − a_j) · ‖o − v_j‖ = a_j · ‖μ − v_j‖. Only the heaviest entry of a query can have more than half of its weight;
for all others 1 − a_j and o − v_j lose nothing. A sink in the softmax is one of the others, its value 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.theory import WORK, softmax_with_sinks

_LOST = 1e-290
"""Weights below this one are rounded or gone in float64, so that the mean of the others is made of logarithms."""


@dataclass(frozen=True, eq=False)
class HeaviestLeftOut:
    """The heaviest entry of each row, and what the others add up to.

    Attributes:
        place: where the heaviest entry stands, the first of equals.
        weight: its weight a_j.
        mass: the others' weights together, 1 − a_j without its rounding.
        value: v_j.
        mean: μ, the others' mean value; 0 where there is no other.
    """

    place: Int[Tensor, "head row"]
    weight: Float[Tensor, "head row"]
    mass: Float[Tensor, "head row"]
    value: Float[Tensor, "head row d_head"]
    mean: Float[Tensor, "head row d_head"]

    @property
    def whole(self) -> Float[Tensor, "head row d_head"]:
        """Σ_j a_j v_j over all entries."""
        return self.mass.unsqueeze(-1) * self.mean + self.weight.unsqueeze(-1) * self.value

    @property
    def apart(self) -> Float[Tensor, "head row"]:
        """‖μ − v_j‖₂²."""
        return (self.mean - self.value).square().sum(dim=-1)


def leave_out_heaviest(
    weights: Float[Tensor, "head row key"],
    values: Float[Tensor, "kv_head key d_head"],
    logarithms: Callable[[], Float[Tensor, "head row key"]],
    sink: Float[Tensor, "head row"],
    sinks: Float[Tensor, " head"] | None = None,
) -> HeaviestLeftOut:
    """Of rows of weights that add up to 1 with those of the `sink`, which is one of the others and has no value.

    `logarithms` gives those of the weights, up to a constant per row, and `sinks` the sinks' in the same unit.
    """
    weight, place = weights.max(dim=-1, keepdim=True)
    others = weights.scatter(-1, place, 0)
    mass = others.sum(dim=-1) + sink
    if bool((mass < _LOST).any()):
        left, gone = softmax_with_sinks(logarithms().scatter(-1, place, -torch.inf), sinks)
        alone = left.nan_to_num(0)
        others = torch.where((mass < _LOST).unsqueeze(-1), alone, others)
        sink = torch.where(mass < _LOST, gone, sink)
    total = (others.sum(dim=-1) + sink).unsqueeze(-1)
    mean = _per_group(others, values.to(WORK)) / total.where(total > 0, 1)
    return HeaviestLeftOut(place.squeeze(-1), weight.squeeze(-1), mass, _picked(values, place), mean)


def _per_group(
    weights: Float[Tensor, "head row key"], values: Float[Tensor, "kv_head key d_head"]
) -> Float[Tensor, "head row d_head"]:
    """Σ_j a_j v_j, the query heads of a key/value head in one product."""
    heads, rows, keys = weights.shape
    return (weights.reshape(len(values), -1, keys) @ values).view(heads, rows, -1)


def _picked(
    values: Float[Tensor, "kv_head key d_head"], place: Int[Tensor, "head row 1"]
) -> Float[Tensor, "head row d_head"]:
    """The value at each row's place."""
    heads, rows, _ = place.shape
    index = place.view(len(values), -1, 1).expand(-1, -1, values.shape[-1])
    return values.to(WORK).gather(1, index).view(heads, rows, -1)

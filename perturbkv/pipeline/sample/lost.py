"""What single evicted entries add to a head's output under full attention: those of the largest ‖A_i 𝒱_i‖₁ = A_i ν_i.

Of the first decode step, for every configuration and head. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.theory import WORK

ENTRIES = 10
"""How many are told of each head."""


@dataclass(frozen=True)
class Outputs:
    """A ν of a layer's prompt entries, the largest first; equal ones as they stand in the prompt (METHOD: ties).

    Attributes:
        position: of the entries.
        output: A ν of each.
    """

    position: Int[Tensor, "head key"]
    output: Float[Tensor, "head key"]


def ordered(attention: Float[Tensor, "head seen"], norms: Float[Tensor, "head seen"], prompt_tokens: int) -> Outputs:
    """The first `prompt_tokens` entries in the order of what each adds to the output."""
    added = (attention * norms.to(WORK))[:, :prompt_tokens]
    output, position = added.sort(dim=-1, descending=True, stable=True)
    return Outputs(position, output)


def largest_lost(given: Outputs, kept: Bool[Tensor, "config head key"]) -> dict[str, Tensor]:
    """The evicted entries that add most, (config, head, ENTRIES): −1 and NaN where fewer went."""
    gone = ~kept.gather(-1, given.position.expand_as(kept))
    ranks = torch.arange(1, ENTRIES + 1, dtype=torch.int32, device=kept.device)
    counted = gone.cumsum(dim=-1, dtype=torch.int32)
    place = torch.searchsorted(counted, ranks.expand(*kept.shape[:2], -1).contiguous())
    there, place = place < kept.shape[-1], place.clamp(max=kept.shape[-1] - 1)
    position, output = (
        row.expand(*kept.shape[:2], -1).gather(-1, place) for row in (given.position, given.output)
    )  # fmt: skip
    return {"lost_position": position.where(there, -1), "lost_output": output.where(there, torch.nan)}

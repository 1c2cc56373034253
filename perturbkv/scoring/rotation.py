"""Rotary positions as transformers turns queries and keys by them: component i is paired with i + half (`rotate_half`).

Only the first components of a head are rotary where cosines are fewer than d_head (Phi-3's partial rotation); cosine
and sine may both carry a factor (YaRN's), which turning back divides out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.theory import WORK


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of each of some positions; columns of both are the rotary components of a head."""

    cosine: Float[Tensor, "place rotary"]
    sine: Float[Tensor, "place rotary"]

    def turned_back(self, vectors: Float[Tensor, "head place d_head"]) -> Float[Tensor, "head place d_head"]:
        """Rotated vectors at these positions as they were before, in float32 or better."""
        work = torch.promote_types(vectors.dtype, torch.float32)
        cosine, sine = self.cosine.to(WORK), self.sine.to(WORK)
        stretched = cosine.square() + sine.square()
        cosine, sine = (cosine / stretched).to(work), (sine / stretched).to(work)
        size, half = cosine.shape[-1], cosine.shape[-1] // 2
        found = vectors.to(work, copy=True)
        rotary, turned = vectors[..., :size].to(work), found[..., :size]
        turned.mul_(cosine)
        turned[..., :half].addcmul_(rotary[..., half:], sine[:, :half])
        turned[..., half:].addcmul_(rotary[..., :half], sine[:, half:], value=-1)
        return found

    def mean(self, d_head: int) -> Float[Tensor, "d_head d_head"]:
        """R̄: the mean over the positions of the matrices that turn a vector, in `WORK`."""
        size = self.cosine.shape[-1]
        cosine, sine = (part.to(WORK).mean(dim=0) for part in (self.cosine, self.sine))
        pairs = torch.arange(size, device=cosine.device)
        matrix = torch.eye(d_head, dtype=WORK, device=cosine.device)
        matrix[pairs, pairs] = cosine
        matrix[pairs, pairs.roll(size // 2)] = torch.where(pairs < size // 2, -sine, sine)
        return matrix

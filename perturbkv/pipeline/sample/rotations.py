"""The model's own rotations of positions, before and after the prompt, made once for all layers of a prompt."""

from __future__ import annotations

import copy

import torch

from perturbkv.models.adapter import Adapter
from perturbkv.scoring.rotation import Rotation

TURNED = ("unrotated", "rotations")
"""Needs of scores that ask for rotations."""


class Rotations:
    """Cosines and sines of a range of positions as the model has them, rounded to its type.

    A copy of the model's module is asked, because some kinds (dynamic NTK, LongRoPE) change their frequencies when they
    are asked for later positions: the prompt's decoding would go on with those.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter, self._made = adapter, dict[range, Rotation]()

    def __call__(self, positions: range) -> Rotation:
        """Of these positions, made when first asked for."""
        if positions not in self._made:
            self._made[positions] = self._rotation(positions)
        return self._made[positions]

    def _rotation(self, positions: range) -> Rotation:
        like = torch.empty(0, dtype=self._adapter.dtype, device=self._adapter.device)
        places = torch.tensor(positions, device=like.device).unsqueeze(0)
        cosine, sine = copy.deepcopy(self._adapter.rotary)(like, places, *self._adapter.rotary_kind)
        twice = 2 * len(self._adapter.frequencies) // cosine.shape[-1]  # some modules give each pair's angle once
        return Rotation(cosine[0].repeat(1, twice), sine[0].repeat(1, twice))

"""Whether activations and scores are finite, asked of the device once for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from perturbkv.devices import stack_on
from perturbkv.errors import ActivationError

FINAL_NORM, LOGITS = "the outputs of the final norm", "the logits"


class FiniteCheck:
    """Remembers, place by place and without waiting for the device, whether activations were finite."""

    def __init__(self) -> None:
        self._finite: list[tuple[str, Tensor]] = []
        self._made: list[tuple[str, Tensor]] = []

    def __call__(self, layer: int, hidden: Tensor) -> None:
        """Look at one layer's activations."""
        self.look(f"the hidden states of layer {layer}", hidden)

    def look(self, where: str, activations: Tensor) -> None:
        """Look at activations that are called `where`."""
        self._finite.append((where, torch.isfinite(activations).all()))

    def made(self, what: str, numbers: Tensor) -> None:
        """Look at what was made of activations, which are looked at first."""
        self._made.append((what, torch.isfinite(numbers).all()))

    def raise_if_not(self, sample: str) -> None:
        """Raise ActivationError for the first place that held NaN or Inf; waits for the device once."""
        if not self._finite:
            return
        places, flags = zip(*self._finite, *self._made, strict=True)
        for where, finite in zip(places, stack_on(flags[0].device, flags).tolist(), strict=True):
            if not finite:
                raise ActivationError(where, sample)

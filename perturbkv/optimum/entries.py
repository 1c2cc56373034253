"""The isolated perturbation of one head as a fraction of sums over its kept entries (METHOD: the quantities).

With `o = Σ A 𝒱` and `S` the retained mass, `L = ‖o − Σ N A 𝒱 / S‖₁ = ‖S o − Σ N A 𝒱‖₁ / S = ‖Σ N A (o − 𝒱)‖₁ / S`:
both sides of the fraction are sums of what single entries bring, so that swapping two entries costs two vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Kept = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class HeadEntries:
    """What one head's decoding query attends to.

    Attributes:
        attention: (entry,) A, float64, of the prompt and the decoding token itself.
        projected: (entry, d_model) 𝒱 = V W_O^h, float64.
        always: (entry,) True for what stays whatever is chosen: the window and the decoding token.
        sink: weight of the head's sink, an entry without a value that always stays; 0 where there is none.
    """

    attention: Floats
    projected: Floats
    always: Kept
    sink: float = 0.0

    @cached_property
    def output(self) -> Floats:
        """(d_model,) o_h = Σ A 𝒱."""
        return np.asarray(self.attention @ self.projected)

    @cached_property
    def brings(self) -> Floats:
        """(entry, d_model) A (o − 𝒱): what each kept entry adds to the numerator's vector."""
        return self.attention[:, None] * (self.output - self.projected)

    @cached_property
    def free(self) -> NDArray[np.int64]:
        """(free,) places that may go."""
        return np.flatnonzero(~self.always)

    def moved(self, kept: Kept) -> Floats:
        """(d_model,) S o − Σ N A 𝒱, the numerator's vector."""
        return np.asarray(kept @ self.brings + self.sink * self.output)

    def mass(self, kept: Kept) -> float:
        """S = Σ N A, the sink with it."""
        return float(kept @ self.attention + self.sink)

    def perturbation(self, kept: Kept) -> float:
        """L of a kept set, (entry,) True where an entry stays: the L1 norm of what the head's output moves by."""
        return float(np.abs(self.moved(kept)).sum() / self.mass(kept))

    def of_free(self, places: NDArray[np.int64]) -> Kept:
        """(entry,) the set of these free places and of all that always stays."""
        kept = self.always.copy()
        kept[places] = True
        return kept

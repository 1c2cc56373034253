"""What stands in for entries that went, from the formula, entry by entry: NumPy, nothing of perturbkv."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.oracle.theory import Array, softmax


@dataclass
class Extra:
    """One head's entry: a value, and its logit for a query."""

    kind: str
    value: Array
    mean_query: Array
    gone: list[Array]
    scale: float

    def logit(self, query: Array) -> float:
        """The predicted log of Σ exp(scale q·k) over what went."""
        at_mean = self._log_mass(self.mean_query)
        if self.kind == "stored":
            return at_mean
        if self.kind == "linear":
            slope = self.scale * self._mean(self.gone)
            return at_mean + float(slope @ (query - self.mean_query))  # first order about the mean query
        return self._log_mass(query)

    def _log_mass(self, query: Array) -> float:
        return math.log(math.fsum(math.exp(self.scale * float(query @ key)) for key in self.gone))

    def _mean(self, vectors: list[Array]) -> Array:
        return mean(self.mean_query, self.gone, vectors, self.scale)


def mean(query: Array, keys: list[Array], vectors: list[Array], scale: float) -> Array:
    """Mean of vectors by the softmax of the query over these keys alone."""
    weights = softmax([scale * float(query @ key) for key in keys])
    return np.sum([weight * vector for weight, vector in zip(weights, vectors, strict=True)], axis=0)


def extra(
    kind: str, queries: list[Array], kept: list[int], keys: list[Array], values: list[Array], scale: float
) -> Extra | None:
    """Of one head whose window has these queries, and which keeps these of its entries; None where it loses none."""
    gone = [place for place in range(len(keys)) if place not in kept]
    if not gone:
        return None
    query = np.sum(queries, axis=0) / len(queries)
    lost = [keys[place] for place in gone]
    return Extra(kind, mean(query, lost, [values[place] for place in gone], scale), query, lost, scale)


def bits(kind: str, gone: int, heads: int, d_head: int) -> int:
    """Per head a mean value of 16 each, a log-mass of 32, a mean key for `linear`; all lost keys for the oracle."""
    if kind == "none" or gone == 0:
        return 0
    if kind == "oracle":
        return 16 * d_head * heads + 16 * d_head * gone
    return sum(16 * d_head + 32 + (16 * d_head if kind == "linear" else 0) for _ in range(heads))

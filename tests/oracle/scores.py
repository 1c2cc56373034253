"""Naive reference of the scores of later methods, from their formulas (METHOD: Scores of later methods).

Loops over one head's entries in float64; weights are a plain softmax, so that these know nothing of limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.oracle.theory import Array, capped, softmax


class Head:
    """What one query head's window sees: z and a of each of its queries, o, keys and values.

    A sink is one more logit of every query; its entry has no value, and its weight is left out. Queries at `silent`
    positions have no row.
    """

    def __init__(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        scale: float,
        window: int,
        sink: float | None = None,
        silent: range = range(0),
        cap: float | None = None,
    ) -> None:
        self.n, self.keys, self.values = len(keys), keys, values
        self.first = max(0, self.n - window)
        voting = [i for i in range(len(queries))[self.first :] if i not in silent]
        self.z = [[capped(scale * math.fsum(queries[i] * keys[j]), cap) for j in range(i + 1)] for i in voting]
        self.a = [softmax(row + ([] if sink is None else [sink]))[: len(row)] for row in self.z]
        self.o = [self.mixed(row) for row in self.a]

    def mixed(self, weights: Array | list[float]) -> Array:
        """Σ_j a_j v_j."""
        seen = range(len(weights))
        return np.array([math.fsum(weights[j] * self.values[j][c] for j in seen) for c in range(self.values.shape[1])])

    def mean(self) -> list[float]:
        """The window's mean attention on all n entries."""
        return [math.fsum(float(row[j]) for row in self.a if j < len(row)) / len(self.a) for j in range(self.n)]


def squared(vector: Array) -> float:
    return math.fsum(float(x) ** 2 for x in vector)


def caote(head: Head, j: int) -> float:
    a = head.mean()
    return a[j] / (1 - a[j]) * math.sqrt(squared(head.mixed(a) - head.values[j]))


def dropkv(head: Head, j: int) -> float:
    return math.fsum(
        (a[j] / (1 - a[j])) ** 2 * squared(head.values[j] - o) for a, o in zip(head.a, head.o, strict=True)
    )


def obcache_value(head: Head, j: int) -> float:
    return math.fsum(a[j] ** 2 for a in head.a) * squared(head.values[j])


def obcache_key(head: Head, j: int) -> float:
    rows = zip(head.a, head.z, head.o, strict=True)
    return math.fsum((a[j] * z[j]) ** 2 * squared(head.values[j] - o) for a, z, o in rows)


def obcache_joint(head: Head, j: int) -> float:
    v = head.values[j]
    cross = math.fsum(
        a[j] ** 2 * z[j] * (squared(v) - math.fsum(v * o)) for a, z, o in zip(head.a, head.z, head.o, strict=True)
    )
    return obcache_value(head, j) + obcache_key(head, j) + 2 * cross


def value_norm(head: Head, j: int) -> float:
    return head.mean()[j] * math.fsum(abs(float(x)) for x in head.values[j])


def knorm(head: Head, j: int) -> float:
    return -math.sqrt(squared(head.keys[j]))


def snapkv(head: Head, j: int) -> float:
    return head.mean()[j]


OF_ENTRY: dict[str, Callable[[Head, int], float]] = {
    "snapkv": snapkv,
    "caote": caote,
    "dropkv": dropkv,
    "obcache-value": obcache_value,
    "obcache-key": obcache_key,
    "obcache-joint": obcache_joint,
    "value-norm": value_norm,
    "knorm": knorm,
}


def of_layer(
    name: str,
    queries: Array,
    keys: Array,
    values: Array,
    scale: float,
    window: int,
    sinks: Array | None = None,
    silent: range = range(0),
    cap: float | None = None,
) -> Array:
    """(head, n − w) of a score of single entries, unpooled."""
    heads, n, _ = queries.shape
    found = np.zeros((heads, max(0, n - window)))
    for h in range(heads):
        shared = h // (heads // len(keys))
        sink = None if sinks is None else float(sinks[h])
        seen = Head(queries[h], keys[shared], values[shared], scale, window, sink, silent, cap)
        for j in range(found.shape[1]):
            found[h, j] = OF_ENTRY[name](seen, j)
    return found


def rotated(vector: Array, position: int, frequencies: Array, factor: float = 1.0) -> Array:
    """One vector turned to a position: component i with i + half; those behind the rotary ones stay."""
    turned, half = vector.copy(), len(frequencies)
    for i, frequency in enumerate(frequencies):
        c, s = factor * math.cos(position * frequency), factor * math.sin(position * frequency)
        turned[i] = c * vector[i] - s * vector[i + half]
        turned[i + half] = c * vector[i + half] + s * vector[i]
    return turned


def expected_attention(
    unrotated: Array,
    keys: Array,
    values: Array,
    scale: float,
    rotate: Callable[[Array, int], Array],
    n_future: int = 512,
    sinks: int = 4,
    use_covariance: bool = True,
    use_vnorm: bool = True,
    epsilon: float = 0.0,
    logits: Array | None = None,
) -> Array:
    """(head, n) of queries before rotation; 0 for the sinks. `rotate` turns a vector to a position."""
    heads, n, d = unrotated.shape
    columns = [[rotate(unit, n + t) for t in range(n_future)] for unit in np.eye(d)]
    turn = np.array([[math.fsum(turned[i] for turned in column) / n_future for column in columns] for i in range(d)])
    found = np.zeros((heads, n))
    for h in range(heads):
        shared, queries = h // (heads // len(keys)), unrotated[h, sinks:]
        mean = np.array([math.fsum(queries[:, c]) / len(queries) for c in range(d)])
        covariance = np.array(
            [
                [math.fsum((queries[:, b] - mean[b]) * (queries[:, c] - mean[c])) / len(queries) for c in range(d)]
                for b in range(d)
            ]
        )
        exponents = []
        for k in keys[shared][sinks:]:
            later = scale * float(k @ turn @ mean)
            if use_covariance:
                later += scale**2 * float(k @ turn @ covariance @ turn.T @ k) / 2
            exponents.append(later)
        weights = softmax(exponents + ([] if logits is None else [float(logits[h])]))  # beside the head's sink
        for place, v in enumerate(values[shared][sinks:]):
            norm = math.sqrt(squared(v)) if use_vnorm else 1.0
            found[h, sinks + place] = (weights[place] + (epsilon if use_vnorm else 0.0)) * norm
    return found

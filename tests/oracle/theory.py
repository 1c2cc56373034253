"""Naive float64 reference of the method's quantities: loops over heads and entries, NumPy, nothing of perturbkv."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from operator import mul

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    powers = [math.exp(value - largest) for value in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]


def capped(logit: float, cap: float | None) -> float:
    """METHOD, soft caps: what stands in place of the logit."""
    return logit if cap is None else cap * math.tanh(logit / cap)


def head_slice(w_o: Array, head: int, d_head: int) -> Array:
    """W_O^h, (d_head, d_model)."""
    return w_o[:, head * d_head : (head + 1) * d_head].T


def projected_value_norms(value: Array, w_o: Array, heads: int, euclidean: bool = False) -> Array:
    """(head, key): the L1 norm of V_i W_O^h, or its L2 norm."""
    kv_heads, keys, d_head = value.shape
    norms = np.zeros((heads, keys))
    for head in range(heads):
        columns = head_slice(w_o, head, d_head).T.tolist()
        for entry, row in enumerate(value[head // (heads // kv_heads)].tolist()):
            projected = [math.fsum(map(mul, row, column)) for column in columns]
            total = math.fsum(x * x if euclidean else abs(x) for x in projected)
            norms[head, entry] = math.sqrt(total) if euclidean else total
    return norms


def window_attention(query: Array, key: Array, scale: float) -> Array:
    """(head, n − w): mean over the window's rows of their causal softmax, before the window."""
    heads, window, _ = query.shape
    kv_heads, n, _ = key.shape
    result = np.zeros((heads, n - window))
    for head in range(heads):
        keys = key[head // (heads // kv_heads)]
        for row in range(window):
            last = n - window + row
            weights = softmax([scale * math.fsum(query[head, row] * keys[entry]) for entry in range(last + 1)])
            for entry in range(n - window):
                result[head, entry] += weights[entry] / window
    return result


def pool(row: list[float], kind: str, kernel: int) -> list[float]:
    half = kernel // 2
    pooled = []
    for place in range(len(row)):
        inside = [row[i] for i in range(place - half, place + half + 1) if 0 <= i < len(row)]
        pooled.append({"none": row[place], "max": max(inside), "average": math.fsum(inside) / kernel}[kind])
    return pooled


def decode_attention(
    query: Array, key: Array, scale: float, sinks: Array | None = None, cap: float | None = None
) -> Array:
    """(head, key); with sinks, one more column behind the entries: the weight of an entry without a value."""
    heads = len(query)
    group = heads // len(key)
    logits = [
        [capped(scale * math.fsum(query[head] * entry), cap) for entry in key[head // group]] for head in range(heads)
    ]
    return np.array([softmax(row + ([] if sinks is None else [float(sinks[h])])) for h, row in enumerate(logits)])


def perturbation(attention: list[float], kept: list[bool], values: Array, projection: Array) -> float:
    """Paper, eq. 9, for one head: the d-vector is summed entry by entry."""
    full, evicted = head_output(attention, values, projection), evicted_output(attention, kept, values, projection)
    return l1(full - evicted)


def head_output(attention: list[float], values: Array, projection: Array) -> Array:
    """o_h: the d-vector, summed entry by entry."""
    output = np.zeros(projection.shape[1])
    for a, value in zip(attention, values, strict=True):
        output += a * (value @ projection)
    return output


def evicted_output(attention: list[float], kept: list[bool], values: Array, projection: Array) -> Array:
    """ô_h of this layer alone: the same with A' = N⊙A / ΣNA."""
    mass = math.fsum(a for a, n in zip(attention, kept, strict=True) if n)
    return head_output([a / mass if n else 0.0 for a, n in zip(attention, kept, strict=True)], values, projection)


def theta(attention: list[float], norms: list[float], kept: list[bool]) -> float:
    """Paper, eq. 10: the sum of |A_i − A'_i| ν_i itself, not the closed form."""
    mass = math.fsum(a for a, n in zip(attention, kept, strict=True) if n)
    terms = []
    for a, norm, n in zip(attention, norms, kept, strict=True):
        evicted = a / mass if n else 0.0
        terms.append(abs(a - evicted) * norm)
    return math.fsum(terms)


def theta_hat(attention: list[float], norms: list[float], kept: list[bool], stage1: list[bool]) -> float:
    """Paper, eqs. 14 and 15."""
    sigma = math.fsum(a for a, s in zip(attention, stage1, strict=True) if s)
    total = math.fsum(a * norm for a, norm in zip(attention, norms, strict=True))
    inside = math.fsum(a * norm for a, norm, n in zip(attention, norms, kept, strict=True) if n)
    return total - (2 - 1 / sigma) * inside


def theta_hat_relax(
    attention: list[float], norms: list[float], kept: list[bool], stage1: list[bool], smallest: float | None = None
) -> float:
    """Paper, eq. 18; `smallest` is min ν where not every one counts."""
    sigma = math.fsum(a for a, s in zip(attention, stage1, strict=True) if s)
    total = math.fsum(a * norm for a, norm in zip(attention, norms, strict=True))
    first = math.fsum(a * norm for a, norm, s in zip(attention, norms, stage1, strict=True) if s)
    second = math.fsum(a for a, n, s in zip(attention, kept, stage1, strict=True) if n and not s)
    return total - (2 - 1 / sigma) * first - (min(norms) if smallest is None else smallest) * (2 - 1 / sigma) * second


def mass(attention: list[float], kept: list[bool]) -> float:
    return math.fsum(a for a, n in zip(attention, kept, strict=True) if n)


def sigma_topk(attention: list[float], alpha: float, budget: int) -> float:
    return math.fsum(sorted(attention, reverse=True)[: math.floor(alpha * budget + 1e-9)])


def l1(vector: Array) -> float:
    return math.fsum(abs(component) for component in vector)


def kl(full: Array, evicted: Array) -> float:
    p, q = softmax(list(full)), softmax(list(evicted))
    return math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


def draft_acceptance(full: Array, evicted: Array) -> float:
    """Drawing each token from q, and taking it with probability min(1, p / q)."""
    p, q = softmax(list(full)), softmax(list(evicted))
    return math.fsum(b * min(1.0, a / b) for a, b in zip(p, q, strict=True) if b > 0)


def taken_in_a_row(acceptances: list[float], drafted: int) -> float:
    """Σ m · P(exactly m of the drafted are taken), mean over every run of that many steps."""
    means = []
    for first in range(len(acceptances) - drafted + 1):
        window, mean, before = acceptances[first : first + drafted], 0.0, 1.0
        for count, a in enumerate(window):
            mean += count * before * (1 - a)
            before *= a
        means.append(mean + drafted * before)
    return math.fsum(means) / len(means)


def log_probability(logits: Array, token: int) -> float:
    return math.log(softmax(list(logits))[token])


def l2(vector: Array) -> float:
    return math.sqrt(math.fsum(component * component for component in vector))


def cosine_distance(first: Array, second: Array) -> float:
    """1 − cos to the last digit, from the numbers as they are: 120 decimal digits leave nothing to cancel."""
    return _cosine_distance(_decimals(first), _decimals(second))


def cosine_of_sum(full: Array, moved: Array) -> float:
    """1 − cos of u and u + δ, whose sum a float need not hold."""
    with localcontext() as context:
        context.prec = 120
        u = _decimals(full)
        return _cosine_distance(u, [a + b for a, b in zip(u, _decimals(moved), strict=True)])


def _decimals(vector: Array) -> list[Decimal]:
    return [Decimal(float(component)) for component in vector]


def _cosine_distance(u: list[Decimal], v: list[Decimal]) -> float:
    with localcontext() as context:
        context.prec = 120
        inner = sum((a * b for a, b in zip(u, v, strict=True)), Decimal(0))
        lengths = sum((a * a for a in u), Decimal(0)).sqrt() * sum((b * b for b in v), Decimal(0)).sqrt()
        return float(1 - inner / lengths)


def floor(measured: float, scale: float, epsilon: float) -> float:
    """METHOD, protocol 4: at least machine epsilon times the quantity's scale."""
    return max(measured, epsilon * scale)

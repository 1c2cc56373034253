"""Naive LAVa, DefensiveKV, KVzip, R-KV, TriAttention, RandKV: scores by loops, kept sets by sorting every entry."""

from __future__ import annotations

import cmath
import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from tests.oracle.decoder import Decoder, Step
from tests.oracle.policies import whole
from tests.oracle.selection import top
from tests.oracle.theory import Array, capped, head_slice, pool, softmax


def lava(rows: Array, value: Array, kind: str, kernel: int, prefix: int) -> list[list[float]]:
    """Per query head, pooled; `rows` (head, voting query, n)."""
    heads, voting, _ = rows.shape
    found = []
    for head in range(heads):
        own = value[head * len(value) // heads]
        largest = max(math.fsum(map(abs, own[place])) for place in range(prefix))
        mean = [math.fsum(rows[head, :, place]) / voting for place in range(prefix)]
        found.append([largest * pooled for pooled in pool(mean, kind, kernel)])
    return found


def defensive(rows: Array, norms: Array, kv_heads: int, kind: str, kernel: int, prefix: int) -> list[list[float]]:
    """Per key/value head; `rows` (head, voting query, n)."""
    heads, voting, _ = rows.shape
    group = heads // kv_heads
    worst = [[0.0] * prefix for _ in range(kv_heads)]
    for head in range(heads):
        for query in range(voting):
            row = [float(weight) for weight in rows[head, query, :prefix]]
            pooled = pool(row, kind, kernel)
            for place in range(prefix):
                scaled = pooled[place] / math.fsum(pooled) * math.fsum(row)
                worst[head // group][place] = max(worst[head // group][place], scaled)
    mean = [[math.fsum(norms[h][j] for h in range(k * group, (k + 1) * group)) / group for j in range(prefix)]
            for k in range(kv_heads)]  # fmt: skip
    return [
        [
            max(worst[k][j], math.fsum(worst[k]) / prefix) * mean[k][j] / math.fsum(row[j] for row in mean)
            for j in range(prefix)
        ]
        for k in range(kv_heads)
    ]


def cosine(one: Array, other: Array) -> float:
    length = [math.sqrt(math.fsum(x * x for x in key)) + 1e-8 for key in (one, other)]
    return math.fsum(one * other) / (length[0] * length[1])


def r_kv(
    queries: Array,
    keys: Array,
    scale: float,
    window: int,
    weight: float = 0.07,
    threshold: float = 0.5,
    spared: int = 1,
    kind: str = "max",
    kernel: int = 7,
    silent: range = range(0),
    cap: float | None = None,
) -> list[list[float]]:
    """Per key/value head: importance and redundancy, weighed."""
    kv_heads, n, _ = keys.shape
    group, prefix = len(queries) // kv_heads, max(0, n - window)
    found = []
    for own in range(kv_heads):
        rows = []
        for i in range(prefix, n):
            if i not in silent:
                voters = [queries[head, i] for head in range(own * group, (own + 1) * group)]
                rows.append(softmax([max(capped(scale * math.fsum(q * keys[own, j]), cap) for q in voters)
                                     for j in range(prefix)]))  # fmt: skip
        importance = pool([math.fsum(row[j] for row in rows) / len(rows) for j in range(prefix)], kind, kernel)
        columns: list[list[float]] = [[] for _ in range(n)]
        for i in range(n):
            row = [0.0 if i == j else cosine(keys[own, i], keys[own, j]) for j in range(n)]
            similar = [j for j in range(n) if row[j] > threshold]
            left_out = similar[len(similar) - spared :] if len(similar) >= spared else [*similar, 0]
            for j in range(n):
                columns[j].append(0.0 if j in left_out else row[j])
        redundancy = softmax([math.fsum(column) / n for column in columns])
        found.append([weight * importance[j] - (1 - weight) * redundancy[j] for j in range(prefix)])
    return found


def triattention(
    queries: Array, keys: Array, frequencies: Array, rotary: float, n: int, prefix: int, farthest: int, normalise: bool
) -> list[list[float]]:
    """Per query head, from queries and keys before rotation; those at place p are turned by p times the frequencies.

    `rotary` is the factor of cosine and sine. Component i is paired with i + half; those behind the pairs are not
    turned.
    """
    pairs, found = len(frequencies), []
    turns = [2**power for power in range(farthest.bit_length())]
    for head in range(len(queries)):
        own = keys[head * len(keys) // len(queries)]
        each = [[complex(q[f], q[f + pairs]) for q in queries[head]] for f in range(pairs)]
        centre = [sum(values) / n for values in each]
        size = [math.fsum(map(abs, values)) / n for values in each]
        row = []
        for j in range(prefix):
            total = 0.0
            for f in range(pairs):
                key = complex(own[j, f], own[j, f + pairs])
                angle = cmath.phase(centre[f] * key.conjugate())
                for t in turns:
                    cosine = math.cos((n + t - j) * frequencies[f] + angle)
                    total += rotary**2 * abs(centre[f]) * abs(key) * cosine / len(turns)
                total += rotary**2 * (size[f] - abs(centre[f])) * abs(key)
            for c in range(2 * pairs, own.shape[1]):
                total += math.fsum(queries[head, :, c]) / n * own[j, c]
            row.append(total)
        mean = math.fsum(row) / prefix
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in row) / prefix)
        found.append([(value - mean) / deviation for value in row] if normalise else row)
    return found


def randkv(places: Sequence[int], count: int, seed: int, request: str, layer: int, head: int) -> list[int]:
    """`count` of the places, each taken out of a pool whose last one moves up."""
    words = [str(seed), "str", request, "0", str(layer), str(head)]
    digest = hashlib.blake2b(chr(31).join(words).encode(), digest_size=16).hexdigest()
    draw, left, taken = random.Random(int(digest, 16)), list(places), []
    for _ in range(count):
        place = draw.randrange(len(left))
        taken.append(left[place])
        left[place] = left[-1]
        left.pop()
    return taken


def stage1(
    mean: Sequence[Sequence[float]], window: int, mass: float, places: Sequence[int], most: int
) -> list[list[int]]:
    """Per kept set, its own stage 1 among `places`; `mean` are mean attention rows before the window."""
    bias = math.fsum(math.fsum(row[-window:]) for row in mean) / len(mean)
    found = []
    for row in mean:
        order = top({place: row[place] for place in places}, len(places))
        total, reached, taken = math.fsum(row[place] for place in places), 0.0, []
        for place in order:
            reached += row[place] / total
            if reached >= mass - bias or len(taken) == most:
                break
            taken.append(place)
        found.append(taken)
    return found


def entropy(scores: Sequence[Sequence[float]], places: Sequence[int]) -> float:
    flat = [row[place] for row in scores for place in places]
    total = math.fsum(flat)
    shares = [score / total for score in flat]
    return -math.fsum(share * math.log(share) for share in shares if share) / math.log(len(flat))


def lava_budgets(
    scores: Sequence[Sequence[Sequence[float]]], places: Sequence[int], mean: int, floor: str, floor_of: str
) -> list[list[int]]:
    """Entries of each layer's kept sets among `places`."""
    spread = [Fraction(entropy(layer, places)) for layer in scores]
    sets, count, share = len(scores[0]), len(scores), Fraction(floor)
    layers = whole([spread[i] / sum(spread) * mean * count for i in range(count)], mean * count, len(places))
    least = [mean if floor_of == "model" else own for own in layers]
    totals = whole(
        [sets * ((1 - share) * own + share * low) for own, low in zip(layers, least, strict=True)],
        sets * mean * count,
        sets * len(places),
    )
    found = []
    for layer, own, low, total in zip(scores, layers, least, totals, strict=True):
        order = sorted((-layer[head][place], place, head) for head in range(sets) for place in places)
        named = [head for _, _, head in order[: sets * own]]
        found.append(whole([(1 - share) * named.count(h) + share * low for h in range(sets)], total, len(places)))
    return found


def largest_of(scores: Sequence[Sequence[Sequence[float]]], places: Sequence[int], mean: int) -> list[list[int]]:
    """How many of the largest scores of all these layers each kept set has."""
    order = sorted(
        (-row[place], place, layer, head)
        for layer, rows in enumerate(scores)
        for head, row in enumerate(rows)
        for place in places
    )
    counts = [[0] * len(rows) for rows in scores]
    for _, _, layer, head in order[: mean * sum(map(len, scores))]:
        counts[layer][head] += 1
    return counts


def raised(scores: Sequence[Sequence[float]], first: Sequence[Sequence[int]]) -> list[list[float]]:
    """Stage 1 competes with the layer's largest score."""
    largest = max(max(row) for row in scores)
    return [
        [largest if place in own else score for place, score in enumerate(row)]
        for row, own in zip(scores, first, strict=True)
    ]


def two_stages(scores: Sequence[float], first: Sequence[int], places: Sequence[int], count: int) -> list[int]:
    """Stage 1, best first, and then the largest scores."""
    taken = list(first)[:count]
    return taken + top({place: scores[place] for place in places if place not in taken}, count - len(taken))


@dataclass
class Pass:
    """One pass of a replay, per layer: what it attends with and to."""

    part: range
    steps: list[Step]
    keys: list[Array]
    values: list[Array]
    inputs: list[list[Array]]


class Listening(Decoder):
    """Remembers what goes into each layer's attention."""

    heard: list[list[Array]]

    def _attention(self, layer: int, hidden: Array, *given: Any) -> Array:
        if layer in self.places:
            self.heard[self.places.index(layer)].append(hidden.copy())
        return super()._attention(layer, hidden, *given)


def replay(
    model: Any, context: Sequence[int], passes: Sequence[tuple[range, Sequence[int]]]
) -> tuple[Decoder, list[Pass]]:
    """Every pass from the context's own state."""
    decoder = Listening(model)
    decoder.heard = [[] for _ in range(decoder.layers)]
    for token in context:
        decoder.step(token)
    found = []
    for part, tokens in passes:
        again = decoder.copy()
        again.heard = [[] for _ in range(decoder.layers)]
        steps = [again.step(token) for token in tokens]
        keys, values = ([np.array(layer) for layer in held] for held in (again.keys, again.values))
        found.append(Pass(part, steps, keys, values, again.heard))
    return decoder, found


def kvzip(decoder: Decoder, seen: Pass, layer: int, n: int, sinks: int, plus: bool) -> list[list[float]]:
    """(head, entry of the part): the largest weight that any query of the pass gives it."""
    shown = [*range(min(sinks, seen.part.start)), *seen.part]
    w_o = decoder.w_o(layer)
    found = []
    for head in range(decoder.heads):
        kv_head = head * decoder.kv_heads // decoder.heads
        keys, largest = seen.keys[layer][kv_head], [0.0] * len(seen.part)
        projection = head_slice(w_o, head, decoder.d_head)
        norms = [float(np.linalg.norm(seen.values[layer][kv_head][entry] @ projection)) for entry in seen.part]
        for query, step in enumerate(seen.steps):
            entries = [*shown, *range(n, n + query + 1)]
            logits = [float(step.query[layer][head] @ keys[entry]) * decoder.scale for entry in entries]
            logits += [] if decoder.sinks(layer) is None else [float(decoder.sinks(layer)[head])]
            weights = dict(zip(entries, softmax(logits), strict=False))
            for place, entry in enumerate(seen.part):
                made = weights[entry]
                if plus:
                    made *= norms[place] / float(np.linalg.norm(seen.inputs[layer][query]))
                largest[place] = max(largest[place], made)
        found.append(largest)
    return found

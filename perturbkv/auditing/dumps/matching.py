"""Comparison of a layer's dumped entries with the plain model's, and what was done to those that differ.

Every entry has an expected place: a request's token. Where an entry is not that token's, it is looked for among all
tokens of all requests; then among other heads, layers, layouts and changes of its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.audit_trace import FLOORS, DumpFault
from perturbkv.auditing import changes
from perturbkv.auditing.dumps.dump_file import REMOVED
from perturbkv.cache.entries import rotate_keys
from perturbkv.cache.external_cache import NOWHERE, recover

NEAR = 0.1
"""Relative distance up to which an entry may be another token's, layer's or head's."""
LEVELS = 4
"""Number of a layer's typical distances up to which an entry is as far from the plain model's as all others."""
MOST_LEVEL = 0.3
"""Largest typical distance, of entries in few bits; above, entries are not the plain model's but for rounding."""
_WHOLE_BLOCK = 8
"""Least tokens of a block that is looked at by itself; of smaller ones neighbours are looked at together."""
_MOST_RUNS = 64
"""Runs of differing entries of a request whose change is looked for in each layer."""
_LEAST_FACTOR, _NEARER = 0.01, 0.8
"""Least difference of a common factor from 1, and most of the distance that is left without it."""
_Pair = tuple[Float[Tensor, "kv_head entry d_head"], Float[Tensor, "kv_head entry d_head"]]
Limits = tuple[float, float] | tuple[Float[Tensor, "kv_head entry"], Float[Tensor, "kv_head entry"]]
"""Largest distances of keys and of values that do not differ: one for all entries, or one for each."""


@dataclass(frozen=True)
class Entries:
    """The dumped entries of a request in one layer.

    Attributes:
        keys, values: as dumped, in float32.
        positions: the token that each entry stands for; `REMOVED` where there is no entry.
        blocks: id of the block that holds each entry; `REMOVED` in rows.
        block_size: tokens of a block; 0 in rows.
    """

    keys: Float[Tensor, "kv_head entry d_head"]
    values: Float[Tensor, "kv_head entry d_head"]
    positions: Int[Tensor, "kv_head entry"]
    blocks: Int[Tensor, " entry"]
    block_size: int = 0


@dataclass(frozen=True)
class Known:
    """The plain model's entries of all requests in one layer.

    Attributes:
        requests: request -> keys and values.
        finished: requests that have ended.
        others: index of another layer -> its entries, request by request.
        frequencies: of the rotation.
        alternatives: of a block, (layout in words, keys and values (kv_head, token, d_head)) in every other layout.
    """

    requests: Mapping[str, _Pair]
    finished: frozenset[str]
    others: Callable[[], Iterator[tuple[int, Mapping[str, _Pair]]]]
    frequencies: Float[Tensor, " frequency"]
    alternatives: Callable[[int], Iterator[tuple[str, Tensor, Tensor]]]


@dataclass(frozen=True)
class Distances:
    """The distances of a request's entries from the plain model's, over the root mean square norm of the head's.

    Attributes:
        key, value: infinite where the number is none.
        present: whether there is an entry.
    """

    key: Float[Tensor, "kv_head entry"]
    value: Float[Tensor, "kv_head entry"]
    present: Bool[Tensor, "kv_head entry"]


def distances(entries: Entries, known: _Pair) -> Distances:
    """Return the distances of entries from the plain model's entries of the tokens that they stand for."""
    present, index = entries.positions != REMOVED, entries.positions.clamp(min=0)
    key, value = (
        distance(own, full.float().gather(1, index.unsqueeze(-1).expand(-1, -1, full.shape[-1])), full)
        for own, full in zip((entries.keys, entries.values), known, strict=True)
    )
    return Distances(key.masked_fill(~present, 0), value.masked_fill(~present, 0), present)


def distance(own: Tensor, expected: Tensor, full: Tensor) -> Float[Tensor, "kv_head entry"]:
    """Return distances of entries, over the root mean square norm of all entries of the head."""
    unit = full.float().square().sum(dim=-1).mean(dim=-1, keepdim=True).sqrt()
    found = torch.linalg.vector_norm(own - expected, dim=-1) / unit.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(found.isfinite(), found, torch.inf)


def typical(measured: Sequence[Distances]) -> tuple[float, float]:
    """Return the medians of the distances of a layer's keys and of its values; 0 without entries."""
    medians = []
    for kind in ("key", "value"):
        every = torch.cat([getattr(each, kind)[each.present] for each in measured])
        medians.append(float(every.median()) if len(every) else 0.0)
    return medians[0], medians[1]


def tolerance(floor: float, level: float) -> float:
    """Return the largest distance of an entry that does not differ, from the noise floor and the typical distance."""
    return max(FLOORS * floor, LEVELS * level if level <= MOST_LEVEL else 0.0)


def common_factor(kind: int, entries: Mapping[str, Entries], known: Mapping[str, _Pair]) -> float:
    """Return the constant that all keys (`kind` 0) or values (1) of a layer were multiplied by; 1 without one."""
    own, expected = [], []
    for name, dumped in entries.items():
        index = dumped.positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, dumped.keys.shape[-1])
        there = dumped.positions != REMOVED
        own.append((dumped.keys, dumped.values)[kind][there])
        expected.append(known[name][kind].float().gather(1, index)[there])
    dumped_entries, full = torch.cat(own), torch.cat(expected)
    factor = float(((dumped_entries * full).sum(dim=-1) / full.square().sum(dim=-1)).nanmedian()) if len(full) else 1.0
    if not factor > 0 or abs(factor - 1) < _LEAST_FACTOR:
        return 1.0
    before, after = (
        torch.linalg.vector_norm(dumped_entries / scale - full, dim=-1).nanmedian() for scale in (1.0, factor)
    )
    return factor if bool(after < _NEARER * before) else 1.0


def duplicates(request: str, layer: int, entries: Entries) -> list[DumpFault]:
    """Return the tokens whose entries a layer holds several times, a fault per head."""
    found = []
    for head, row in enumerate(entries.positions):
        places, counts = row[row != REMOVED].unique(return_counts=True)
        if len(twice := places[counts > 1]):
            first, last = int(twice[0]), int(twice[-1])
            found.append(DumpFault(request, "duplicate", "cached several times", first, last, (), (layer,), (head,)))
    return found


@dataclass(frozen=True)
class _Run:
    """Neighbouring entries of some heads that differ, all of the same tokens.

    Attributes:
        heads: the heads' indices.
        keys, values: their entries.
        positions: the tokens that they stand for.
        block: id of their block; `REMOVED` in rows.
        offsets: the entries' places inside the block.
        index: the entries' places among all.
    """

    heads: tuple[int, ...]
    keys: Float[Tensor, "kv_head entry d_head"]
    values: Float[Tensor, "kv_head entry d_head"]
    positions: Int[Tensor, " entry"]
    block: int
    offsets: Int[Tensor, " entry"]
    index: Int[Tensor, " entry"]


def _limits_of(run: _Run, limits: Limits) -> tuple[float, float]:
    """Return the largest limits of the entries of a run."""
    key, value = (
        float(limit[list(run.heads)][:, run.index].amax()) if isinstance(limit, Tensor) else limit for limit in limits
    )
    return key, value


def _runs(entries: Entries, far: Bool[Tensor, "kv_head entry"]) -> Iterator[_Run]:
    """Yield the runs of differing entries, those of a large block by themselves; heads together where tokens agree."""
    same = bool((entries.positions == entries.positions[:1]).all())
    heads = [tuple(range(len(far)))] if same else [(head,) for head in range(len(far))]
    for group in heads:
        odd = far[list(group)]
        index = odd.any(dim=0).nonzero().squeeze(-1)
        if not len(index):
            continue
        new = index[1:] - index[:-1] > 1
        if entries.block_size >= _WHOLE_BLOCK:
            new = entries.blocks[index[1:]] != entries.blocks[index[:-1]]
        for run in torch.tensor_split(index, (new.nonzero().squeeze(-1) + 1).tolist())[:_MOST_RUNS]:
            chosen = tuple(head for head, row in zip(group, odd, strict=True) if bool(row[run].any()))
            rows = list(chosen)
            offsets = run % entries.block_size if entries.block_size else run
            yield _Run(
                chosen, entries.keys[rows][:, run], entries.values[rows][:, run], entries.positions[rows[0], run],
                int(entries.blocks[run[0]]), offsets, run,
            )  # fmt: skip


def faults(
    request: str, layer: int, entries: Entries, measured: Distances, known: Known, limits: Limits
) -> list[DumpFault]:
    """Return what was done to the entries of a request that are farther than `limits`, for keys and for values."""
    far_kinds = [measured.key > limits[0], measured.value > limits[1]]
    far = (far_kinds[0] | far_kinds[1]) & measured.present
    if not bool(far.any()):
        return []
    found = []
    for run in _runs(entries, far):
        kind, what = _Search(request, run, known, _limits_of(run, limits)).describe()
        first, last = int(run.positions.amin()), int(run.positions.amax())
        blocks = () if run.block == REMOVED else (run.block,)
        found.append(DumpFault(request, kind, what, first, last, blocks, (layer,), run.heads))
    return found


class _Search:
    """The search for what was done to a run of entries."""

    def __init__(self, request: str, run: _Run, known: Known, limits: tuple[float, float]) -> None:
        self.request, self.run, self.known, self.limits = request, run, known, limits
        self.near = max(NEAR, limits[0]), max(NEAR, limits[1])
        self.own: _Pair = (run.keys, run.values)
        full = known.requests[request]
        self.full: _Pair = (full[0].float(), full[1].float())
        self.expected = self._at(self.full, run.positions)

    def _at(self, full: _Pair, positions: Tensor, heads: Sequence[int] | None = None) -> _Pair:
        """Return the entries of these positions, of the run's heads or others."""
        rows = list(self.run.heads if heads is None else heads)
        return full[0][rows][:, positions].float(), full[1][rows][:, positions].float()

    def describe(self) -> tuple[str, str]:
        """Return the kind of the change, a key of `DUMP_FAULTS`, and its description."""
        if not all(bool(part.isfinite().all()) for part in self.own):
            return "infinite", "keys or values that are infinite or no numbers"
        if not any(bool(part.any()) for part in self.own):
            return "missing", "all zero: never written"
        tests = (self._rounded, self._scaled, self._rotated, self._swapped, self._moved, self._head,
                 self._in_other_layout, self._of_other_layer)  # fmt: skip
        return next((found for test in tests if (found := test())), None) or self._changed()

    def _far(self) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        """Yield (kind, name, entries, expected entries) of keys and of values, where they differ."""
        for kind, name in enumerate(("keys", "values")):
            own, expected = self.own[kind], self.expected[kind]
            if not self._is_near(own, expected, self.limits[kind]):
                yield kind, name, own, expected

    def _changed(self) -> tuple[str, str]:
        """Return how far entries are that are near those expected; else that they are of no token."""
        if not self._are_near(self.own, self.expected):
            return "unknown", "entries of no token of the dump"
        far = [f"{name} {100 * self._distance(own, expected):.2g} % away" for _, name, own, expected in self._far()]
        return "changed", " and ".join(far) or "a few components differ"

    def _distance(self, own: Tensor, expected: Tensor) -> float:
        """Return the median distance of entries from those expected, over their root mean square norm."""
        return float(_relative(own, expected).median())

    def _is_near(self, own: Tensor, expected: Tensor, limit: float) -> bool:
        """Return whether nearly all entries are those expected, up to `limit`."""
        return bool((_relative(own, expected) <= limit).float().mean() > 0.9)

    def _are_near(self, own: _Pair, expected: _Pair) -> bool:
        """Return whether nearly all keys and nearly all values are those expected."""
        return all(self._is_near(*each) for each in zip(own, expected, self.near, strict=True))

    def _swapped(self) -> tuple[str, str] | None:
        """Return whether keys stand for values and values for keys."""
        return (
            ("swapped", "keys where values belong, and values where keys do")
            if self._are_near(self.own, (self.expected[1], self.expected[0]))
            else None
        )

    def _scaled(self) -> tuple[str, str] | None:
        """Return the constant that keys or values were multiplied by."""
        words = []
        for kind, name, own, expected in self._far():
            factor = float((own * expected).sum() / expected.square().sum().clamp(min=torch.finfo(torch.float32).tiny))
            rest = max(self.limits[kind], 0.2 * self._distance(own, expected))
            if not factor or not self._is_near(own / factor, expected, rest):
                return None
            words.append(f"{name} multiplied by {factor:.3g}")
        return ("scale", " and ".join(words)) if words else None

    def _moved(self) -> tuple[str, str] | None:
        """Return the tokens whose entries these are."""
        if self._are_near(self.own, self.expected):
            return None
        names = list(self.known.requests)
        lengths = [self.known.requests[name][0].shape[1] for name in names]
        rows = list(self.run.heads)
        pool = [
            torch.cat([self.known.requests[name][kind][rows].float() for name in names], dim=1).unsqueeze(0)
            for kind in range(2)
        ]
        (match,) = recover([(self.own[0].unsqueeze(0), self.own[1].unsqueeze(0))], [(pool[0], pool[1])])
        index, key, value = (
            torch.stack(list(part)) for part in (match.positions, match.key_distance, match.value_distance)
        )
        same = (index != NOWHERE) & (key <= self.near[0]) & (value <= self.near[1])
        if float(same.float().mean()) <= 0.9:
            return None
        places = index.mode(dim=0).values
        ends = torch.tensor(lengths).cumsum(dim=0).to(places.device)
        owner = int(torch.searchsorted(ends, places, right=True).mode().values)
        first = int(ends[owner]) - lengths[owner]
        there = places[(places >= first) & (places < int(ends[owner]))] - first
        return self._describe_move(names[owner], there)

    def _describe_move(self, request: str, places: Int[Tensor, " entry"]) -> tuple[str, str] | None:
        """Return whose entries these are, given the request and its tokens."""
        tokens = _range(int(places.amin()), int(places.amax()))
        if request != self.request:
            if request in self.known.finished:
                return "stale", f"{tokens} of request {request}, which has ended"
            return "request", f"{tokens} of request {request}"
        if len(places) != len(self.run.positions):
            return "place", f"{tokens} of the same request"
        moved = places - self.run.positions
        if not bool(moved.any()):
            return None  # only a few of the entries differ
        if bool((moved == moved[0]).all()) and abs(int(moved[0])) < _WHOLE_BLOCK:
            return "shifted", f"entries of the token {abs(int(moved[0]))} {'later' if moved[0] > 0 else 'earlier'}"
        return "place", f"{tokens} of the same request"

    def _head(self) -> tuple[str, str] | None:
        """Return the heads whose entries these are."""
        heads = range(len(self.full[0]))
        sources = []
        for row, head in enumerate(self.run.heads):
            own = (self.own[0][row : row + 1], self.own[1][row : row + 1])
            source = next((h for h in heads if self._are_near(own, self._at(self.full, self.run.positions, [h]))), None)
            if source is None:
                return None
            sources.append((head, source))
        moved = [f"{source} in {head}" for head, source in sources if head != source]
        return ("head", f"entries of head {', of head '.join(moved)}") if moved else None

    def _rotated(self) -> tuple[str, str] | None:
        """Return how keys were rotated, where values are intact or moved."""
        if not self._is_near(self.own[1], self.expected[1], self.near[1]):
            return None
        most = 2 * max(int(self.full[0].shape[1]), 1)
        own, before = self.own[0][0], self.expected[0][0]
        shift = changes.describe_rotation(own, before, self.run.positions, self.known.frequencies, most)
        if not shift:
            shift = _describe_base(own, before, self.run.positions, self.known.frequencies)
        return ("rotation", f"keys {shift}") if shift else None

    def _in_other_layout(self) -> tuple[str, str] | None:
        """Return the layout in which the block holds what is expected."""
        if self.run.block == REMOVED:
            return None
        for words, keys, values in self.known.alternatives(self.run.block):
            rows = list(self.run.heads)
            if self._are_near((keys[rows][:, self.run.offsets], values[rows][:, self.run.offsets]), self.expected):
                return "layout", f"written as '{words}'"
        return None

    def _of_other_layer(self) -> tuple[str, str] | None:
        """Return the layer whose entries these are."""
        for layer, requests in self.known.others():
            if self._are_near(self.own, self._at(requests[self.request], self.run.positions)):
                return "layer", f"entries of layer {layer}"
        return None

    def _rounded(self) -> tuple[str, str] | None:
        """Return the coarser type, or the number of bits, that keys or values went through."""
        words = []
        for kind, name, own, expected in self._far():
            if not self._is_near(own, expected, 0.5):
                return None
            head = self.full[kind][self.run.heads[0]]
            found = changes.describe_rounding(own[0], expected[0]) or changes.describe_quantisation(
                own[0], expected[0], head
            )
            if not found:
                return None
            words.append(f"{name} {found}")
        return ("rounded", " and ".join(words)) if words else None


_BASES = tuple(10 ** (exponent / 100) for exponent in range(200, 801))
"""Rotary bases that are tried, a fortieth apart."""


def _describe_base(
    own: Float[Tensor, "entry d_head"],
    expected: Float[Tensor, "entry d_head"],
    positions: Int[Tensor, " entry"],
    frequencies: Float[Tensor, " frequency"],
) -> str:
    """Return the base that keys were rotated with instead of the model's; empty if none explains them."""
    pairs = len(frequencies)
    exponents = -torch.arange(pairs, dtype=torch.float64) / pairs
    model = float(frequencies[1].double() ** -pairs) if pairs > 1 else 0.0
    if not model or not torch.allclose(model**exponents, frequencies.cpu().double(), rtol=1e-3):
        return ""  # scaled for long contexts

    def distance(base: float) -> float:
        """Return how far the keys are from those expected, rotated with a base."""
        angle = positions.cpu().unsqueeze(-1) * (base**exponents - frequencies.cpu().double())
        return float(torch.linalg.vector_norm(rotate_keys(expected.cpu().double(), angle) - own.cpu().double()))

    best = min(_BASES, key=distance)
    for step in (1.005, 1.0005):
        best = min((best * step**count for count in range(-5, 6)), key=distance)
    explained = distance(best) <= 0.2 * distance(model) and abs(best / model - 1) > 0.002
    return f"rotated with base {float(f'{best:.3g}'):,.0f}, the model's is {model:,.0f}" if explained else ""


def _relative(own: Tensor, expected: Tensor) -> Float[Tensor, "kv_head entry"]:
    """Return the distances of entries from those expected, over their root mean square norm."""
    unit = expected.square().sum(dim=-1).mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    distance: Tensor = torch.linalg.vector_norm(own - expected, dim=-1) / unit
    return distance


def _range(first: int, last: int) -> str:
    """Return a range of tokens in words."""
    return f"token {first}" if first == last else f"tokens {first} to {last}"


def join(found: Sequence[DumpFault]) -> list[DumpFault]:
    """Return the faults, equal ones of several layers, blocks and heads joined; those in most layers first."""
    by_place: dict[tuple[object, ...], DumpFault] = {}
    for fault in found:
        place = (fault.request, fault.kind, fault.what, fault.first, fault.last)
        by_place[place] = _join_two(by_place[place], fault) if place in by_place else fault
    by_layers: dict[tuple[object, ...], DumpFault] = {}
    for fault in by_place.values():
        rest = (fault.request, fault.kind, fault.what, fault.layers, fault.heads)
        by_layers[rest] = _join_two(by_layers[rest], fault) if rest in by_layers else fault
    return sorted(by_layers.values(), key=lambda fault: (-len(fault.layers), fault.request, fault.first))


def _join_two(one: DumpFault, other: DumpFault) -> DumpFault:
    """Return two faults of the same kind as one."""
    return DumpFault(
        one.request, one.kind, one.what, min(one.first, other.first), max(one.last, other.last),
        tuple(dict.fromkeys([*one.blocks, *other.blocks])), tuple(sorted({*one.layers, *other.layers})),
        tuple(sorted({*one.heads, *other.heads})),
    )  # fmt: skip

"""What was done to dumped entries that differ from the plain model's.

Every entry has an expected place: a request's token. Where an entry is not that token's, it is looked for among all
tokens of all requests; then among other heads, layers, layouts and changes of its numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.analyses.audit.dump_verdict import DumpFault, token_range
from perturbkv.auditing.changes import (
    describe_base,
    describe_quantisation,
    describe_rotation,
    describe_rounding,
    find_base,
)
from perturbkv.auditing.dumps.dump_entries import LEAST_BLOCK, Entries, Limits, Pair
from perturbkv.auditing.dumps.dump_file import REMOVED, of_heads
from perturbkv.display import plural

NEAR = 0.1
"""Relative distance up to which an entry may be another token's, layer's or head's."""
_MOST_SEARCHED = 64
"""Entries of a run that are looked for among all tokens."""
_TIE = 0.1
"""Difference of two distances, in units of the limit, up to which an entry is as near to one token as to the other."""
_MOST_OWNERS = 2
"""Requests whose entries in a run are named."""
_BY_GRAVITY = ("stale", "request", "token")
"""Kinds of moved entries, the gravest first: it names a run that holds several."""
_NEARLY_ALL = 0.9
"""Share of entries that counts as all of them."""
_MOSTLY = 0.5
"""Share of entries that counts as most of them."""
_INFINITE = ("infinite", "keys or values that are infinite or NaN")
"""Kind and words of entries that are no numbers; others of their block that are of no token are counted with them."""
_FARTHEST_ROUNDED = 0.5
"""Relative distance up to which rounding may have moved an entry."""
_FEWEST_CLIPPED = 8
"""Fewest numbers of equal size that show where others were clipped."""
_MUCH_NEARER = 0.2
"""Largest share of a distance, up to 1, that an explanation may leave."""
_MOST_RUNS = 64
"""Runs of differing entries of a request whose change is looked for in each layer."""


@dataclass(frozen=True)
class LayerReference:
    """The plain model's entries of all requests in one layer.

    Attributes:
        references: request -> keys and values, those that its entries are compared with.
        known: request -> keys and values of the plain model, and those that it computed from dumped entries.
        finished: requests that have ended.
        other_layers: index of another layer -> its entries, request by request.
        frequencies: of the rotation.
        alternatives: of a block, (layout in words, keys and values (kv_head, token, width)) in every other layout.
        largest: of keys and of values, the type that they are stored in and its largest number, times the scale: () or
            (kv_head, 1).
    """

    references: Mapping[str, Pair]
    known: Mapping[str, Sequence[Pair]]
    finished: frozenset[str]
    other_layers: Callable[[], Iterator[tuple[int, Mapping[str, Pair]]]]
    frequencies: Float[Tensor, " frequency"]
    alternatives: Callable[[int], Iterator[tuple[str, Tensor, Tensor]]]
    largest: Sequence[tuple[str, Tensor]]


def duplicate_faults(request: str, layer: int, entries: Entries) -> list[DumpFault]:
    """Return a fault per head for the tokens, from first to last, whose entries a layer holds several times."""
    found = []
    for head, row in enumerate(entries.positions):
        tokens, counts = row[row != REMOVED].unique(return_counts=True)
        if len(repeated := tokens[counts > 1]):
            first, last = int(repeated[0]), int(repeated[-1])
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
        differing: which of them differ; the others are there for their neighbours' sake.
    """

    heads: tuple[int, ...]
    keys: Float[Tensor, "kv_head entry d_key"]
    values: Float[Tensor, "kv_head entry d_value"]
    positions: Int[Tensor, " entry"]
    block: int
    offsets: Int[Tensor, " entry"]
    differing: Bool[Tensor, "kv_head entry"]

    def plain_faults(self) -> dict[tuple[str, str], Bool[Tensor, "kv_head entry"]]:
        """Return (kind, words) -> which of the differing entries are no numbers, or have zero keys or values.

        Each entry is in one mask at most, the infinite ones in the first; empty masks are left out.
        """
        infinite = self.differing & ~(self.keys.isfinite() & self.values.isfinite()).all(dim=-1)
        zero_keys, zero_values = (self.differing & ~infinite & ~part.any(dim=-1) for part in (self.keys, self.values))
        masks = {
            _INFINITE: infinite,
            ("missing", "all zero: never written"): zero_keys & zero_values,
            ("missing", "keys all zero"): zero_keys & ~zero_values,
            ("missing", "values all zero"): zero_values & ~zero_keys,
        }
        return {words: mask for words, mask in masks.items() if bool(mask.any())}

    def select(self, mask: Bool[Tensor, "kv_head entry"]) -> _Run:
        """Return the run of the heads and tokens in which some entry is of the mask; those of the mask differ."""
        rows, columns = mask.any(dim=1), mask.any(dim=0)
        heads = tuple(head for head, chosen in zip(self.heads, rows.tolist(), strict=True) if chosen)
        return _Run(
            heads, self.keys[rows][:, columns], self.values[rows][:, columns], self.positions[columns], self.block,
            self.offsets[columns], mask[rows][:, columns],
        )  # fmt: skip


def _runs(entries: Entries, far: Bool[Tensor, "kv_head entry"]) -> Iterator[_Run]:
    """Yield the runs of differing entries, `far` from the plain model's, the first `_MOST_RUNS` of each head.

    A run is in one block, where blocks are large. Heads are taken together where their entries are of equal tokens.
    """
    same = bool((entries.positions == entries.positions[:1]).all())
    heads = [tuple(range(len(far)))] if same else [(head,) for head in range(len(far))]
    for group in heads:
        differing = far[list(group)]
        index = differing.any(dim=0).nonzero().squeeze(-1)
        if not len(index):
            continue
        begins = index[1:] - index[:-1] > 1  # where a run follows another
        if entries.block_size >= LEAST_BLOCK:
            begins = entries.blocks[index[1:]] != entries.blocks[index[:-1]]
        for run in torch.tensor_split(index, (begins.nonzero().squeeze(-1) + 1).tolist())[:_MOST_RUNS]:
            rows = [head for head, row in zip(group, differing, strict=True) if bool(row[run].any())]
            offsets = run % entries.block_size if entries.block_size else run
            yield _Run(
                tuple(rows), entries.keys[rows][:, run], entries.values[rows][:, run], entries.positions[rows[0], run],
                int(entries.blocks[run[0]]), offsets, far[rows][:, run],
            )  # fmt: skip


def find_faults(
    request: str,
    layer: int,
    entries: Entries,
    far: Bool[Tensor, "kv_head entry"],
    reference: LayerReference,
    limits: Limits,
) -> list[DumpFault]:
    """Return what was done to the entries of a request, in one layer, that are `far` from the plain model's.

    `limits` are the distances above which entries of this layer differ.
    """
    if not bool(far.any()):
        return []
    found = []
    head = int(far.sum(dim=1).argmax())
    chosen = far[head].nonzero().squeeze(-1)

    @cache
    def rotary_base() -> float:
        """Return the base of the rotation of all keys that differ in the head with most of them; 0 where none fits."""
        positions = entries.positions[head, chosen]
        full = reference.references[request][0][head, positions].float()
        return find_base(entries.keys[head, chosen], full, positions, reference.frequencies)

    search = partial(_FaultSearch, request, layer, reference, limits.together, rotary_base)
    for run in _runs(entries, far):
        described = run.plain_faults()
        rest = ~torch.stack([~run.differing, *described.values()]).any(dim=0)
        if bool(rest.any()):
            kind, what = search(run.select(rest)).describe()
            if kind == "unknown" and _INFINITE in described:  # counted with those of its block
                kind, what = _INFINITE
            described[kind, what] = described.get((kind, what), torch.zeros_like(rest)) | rest
        for (kind, what), mask in described.items():
            part = run.select(mask)
            first, last = int(part.positions.amin()), int(part.positions.amax())
            blocks = () if part.block == REMOVED else (part.block,)
            count = int(part.differing.sum())
            found.append(DumpFault(request, kind, what, first, last, blocks, (layer,), part.heads, count))
    return found


class _FaultSearch:
    """The search for what was done to a run of entries.

    Each `_find_…` returns a kind, a key of `DUMP_FAULTS`, and words; None where it does not explain the entries. These
    are finite, and neither their keys nor their values are zero.

    Attributes:
        request, layer: the request's id, and the layer's index.
        run: the entries.
        reference: the plain model's entries in this layer.
        limits: of keys and of values, distances up to which they do not differ.
        rotary_base: gives the base with which all keys of the layer were rotated; 0 where there is none.
        near: of keys and of values, distances up to which they may be others of the model's.
        own: the run's keys and values.
        full: those of the request's tokens in all heads, with which they are compared.
        expected: those that belong in the run's place.
    """

    def __init__(
        self,
        request: str,
        layer: int,
        reference: LayerReference,
        limits: tuple[float, float],
        rotary_base: Callable[[], float],
        run: _Run,
    ) -> None:
        self.request, self.layer, self.run, self.reference, self.limits = request, layer, run, reference, limits
        self.rotary_base = rotary_base
        self.near = max(NEAR, limits[0]), max(NEAR, limits[1])
        self.own: Pair = (run.keys, run.values)
        full = reference.references[request]
        self.full: Pair = (full[0].float(), full[1].float())
        self.expected = self._entries_at(self.full, run.positions)

    def _entries_at(self, full: Pair, positions: Tensor) -> Pair:
        """Return, of `full` (kv_head, token, width), the entries of the run's heads at these positions."""
        rows = list(self.run.heads)
        return full[0][rows][:, positions].float(), full[1][rows][:, positions].float()

    def describe(self) -> tuple[str, str]:
        """Return the kind of the change, a key of `DUMP_FAULTS`, and its description."""
        return (
            self._find_change("clipped", self._describe_clipping)
            or self._find_change("scale", self._describe_factor)
            or self._find_rotation()
            or self._find_tokens()
            or self._find_place()
            or self._find_change("rounded", self._describe_rounding)
            or self._find_layout()
            or self._describe_distance()
        )

    def _differing_kinds(self) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        """Yield (kind, name, entries, expected entries) of keys and of values, where they differ."""
        for kind, name in enumerate(("keys", "values")):
            own, expected = self.own[kind], self.expected[kind]
            if not self._is_near(own, expected, self.limits[kind]):
                yield kind, name, own, expected

    def _strange_kinds(self) -> list[int]:
        """Return whether keys (0) and values (1) are farther from those expected than other tokens' are from theirs."""
        return [kind for kind in range(2) if not self._is_near(self.own[kind], self.expected[kind], self.near[kind])]

    def _rest(self, kind: int) -> float:
        """Return the distance of keys (`kind` 0) or values (1) that an explanation may leave."""
        distance = self._distance(self.own[kind], self.expected[kind])
        return max(self.limits[kind], _MUCH_NEARER * min(1, distance))

    def _describe_distance(self) -> tuple[str, str]:
        """Return how far entries are that are near those expected; else that they are of no token."""
        differing = list(self._differing_kinds())
        if self._strange_kinds():
            what = differing[0][1] if len(differing) == 1 else "entries"
            return "unknown", f"{what} of no token of the dump"
        far = [f"{name} {100 * self._distance(own, expected):.2g} % away" for _, name, own, expected in differing]
        return "changed", " and ".join(far) or "a few components differ"

    def _distance(self, own: Tensor, expected: Tensor) -> float:
        """Return the median distance of entries from those expected, over their root mean square norm."""
        return float(_relative_distances(own, expected)[self.run.differing].median())

    def _is_near(self, own: Tensor, expected: Tensor, limit: float, heads: slice = slice(None)) -> bool:
        """Return whether nearly all entries that differ are those expected, up to the distance `limit`.

        `own` and `expected` are those of `heads`, places among the heads of the run.
        """
        near = _relative_distances(own, expected) <= limit
        return bool(near[self.run.differing[heads]].float().mean() > _NEARLY_ALL)

    def _find_change(self, fault: str, describe: Callable[[int, Tensor, Tensor], str]) -> tuple[str, str] | None:
        """Find what was done to all keys and to all values that differ, whichever do.

        `describe` returns it in words, empty where it does not explain them; given the kind, they, and those expected.
        """
        words = []
        for kind, name, own, expected in self._differing_kinds():
            if not (found := describe(kind, own, expected)):
                return None
            words.append(f"{name} {found}")
        return (fault, " and ".join(words)) if words else None

    def _describe_clipping(self, kind: int, own: Tensor, expected: Tensor) -> str:
        """Describe numbers that were clipped: at the largest one of the type that holds them, or at a smaller one."""
        dtype, largest = self.reference.largest[kind]
        sizes, expected_sizes = own.abs()[self.run.differing], expected.abs()[self.run.differing]
        own_largest = sizes.amax()
        beyond = expected_sizes >= own_largest
        cut = int((beyond & (sizes == own_largest)).sum())
        tried = {f"the largest number of {dtype}": of_heads(largest, list(self.run.heads))}
        if max(_FEWEST_CLIPPED, _NEARLY_ALL * int(beyond.sum())) <= cut <= _MOSTLY * beyond.numel():
            tried[f"{float(own_largest):.3g}"] = own_largest
        for words, most in tried.items():
            clipped = expected.clamp(min=-most, max=most)
            if not torch.equal(clipped, expected) and self._is_near(own, clipped, self._rest(kind)):
                return f"clipped at {words}"
        return ""

    def _describe_factor(self, kind: int, own: Tensor, expected: Tensor) -> str:
        """Describe a constant that they were multiplied by."""
        dumped, full = own[self.run.differing], expected[self.run.differing]
        factor = float((dumped * full).sum() / full.square().sum().clamp(min=torch.finfo(torch.float32).tiny))
        explains = factor and self._is_near(own / factor, expected, self._rest(kind))
        short = f"{factor:.3g}"
        return f"multiplied by {short if short != '1' else f'{factor:.6g}'}" if explains else ""

    def _describe_rounding(self, kind: int, own: Tensor, expected: Tensor) -> str:
        """Describe a coarser type, or a number of bits, that they went through."""
        if not self._is_near(own, expected, _FARTHEST_ROUNDED):
            return ""
        head = self.full[kind][self.run.heads[0]]
        return describe_rounding(own[0], expected[0]) or describe_quantisation(own[0], expected[0], head)

    def _find_tokens(self) -> tuple[str, str] | None:
        """Find tokens of any request whose entries, keys or values these are."""
        far = self._strange_kinds()
        if not far:
            return None
        if shifted := self._find_shift(far):
            return shifted
        names = sorted(  # entries that several requests share are its own, or those of one that has not ended
            self.reference.references, key=lambda name: (name != self.request, name in self.reference.finished)
        )
        some = torch.linspace(0, len(self.run.positions) - 1, min(_MOST_SEARCHED, len(self.run.positions))).long()
        distances = torch.stack([self._distances_to_tokens(kind, names, some) for kind in far]).amax(dim=0)
        lengths = [self.reference.references[name][0].shape[1] for name in names]
        parts = torch.split(distances, lengths, dim=-1)
        by_request = (part.min(dim=-1) for part in parts)
        nearest, tokens = (torch.stack(each) for each in zip(*by_request, strict=True))  # (request, kv_head, entry)
        differing = self.run.differing[:, some]
        strange = torch.stack(
            [_relative_distances(self.own[kind], self.expected[kind])[:, some] > self.near[kind] for kind in far]
        ).any(dim=0)
        matched = differing & (nearest.amin(dim=0) <= 1)
        if float(matched.sum()) <= _NEARLY_ALL * float(differing.sum()):
            return None
        if float((matched & strange).sum()) <= _MOSTLY * float(matched.sum()):
            return None  # most are changed, and in their place
        of_request = matched & (nearest <= nearest.amin(dim=0) + _TIE)
        what = "entries" if len(far) == 2 else ("keys", "values")[far[0]]
        positions = self.run.positions[some].expand_as(matched)
        found: list[tuple[str, str]] = []
        for _ in range(_MOST_OWNERS):  # requests that share a prefix have entries in common
            owner = int(of_request.sum(dim=(1, 2)).argmax())
            owned, name = of_request[owner].clone(), names[owner]
            if not bool(owned.any()):
                break
            of_request &= ~owned
            moved = _moved_tokens(tokens[owner], positions, parts[owner], owned)
            words = f"{what} of {token_range(int(moved.amin()), int(moved.amax()))}"
            if name in self.reference.finished:
                found.append(("stale", f"{words} of request {name}, which has ended"))
            elif name != self.request:
                found.append(("request", f"{words} of request {name}"))
            elif not torch.equal(moved, positions[owned]):  # else only a few of the entries differ
                found.append(("token", f"{words} of the same request"))
        others = ["others"] if bool(of_request.any()) else []
        gravest = min((kind for kind, _ in found), key=_BY_GRAVITY.index, default="")
        return (gravest, ", and ".join([*(words for _, words in found), *others])) if found else None

    def _find_shift(self, far: Sequence[int]) -> tuple[str, str] | None:
        """Find how many tokens away the keys (0) or values (1) `far` from those expected are: fewer than a block."""
        last, known = self.full[0].shape[1] - 1, self.reference.known[self.request]
        shifts = sorted(range(1 - LEAST_BLOCK, LEAST_BLOCK), key=abs)[1:]
        for shift, full in itertools.product(shifts, known):
            moved = self._entries_at(full, (self.run.positions + shift).clamp(min=0, max=last))
            if all(self._is_near(self.own[kind], moved[kind], self.near[kind]) for kind in far):
                what = "entries" if len(far) == 2 else ("keys", "values")[far[0]]
                words = f"{plural(abs(shift), 'position')} {'later' if shift > 0 else 'earlier'}"
                return "shifted", f"{what} of the token {words}"
        return None

    def _distances_to_tokens(
        self, kind: int, names: Sequence[str], some: Int[Tensor, " entry"]
    ) -> Float[Tensor, "kv_head entry token"]:
        """Return the distances of some keys (`kind` 0) or values (1) of the run to those of all tokens, over `near`.

        The tokens are those of the requests `names`, one after the other; the nearest of all that are known of each
        counts.
        """
        rows, own = list(self.run.heads), self.own[kind][:, some]
        most = max(len(self.reference.known[name]) for name in names)
        distances = []
        for reading in range(most):
            known = [self.reference.known[name] for name in names]
            every = torch.cat([pairs[min(reading, len(pairs) - 1)][kind][rows].float() for pairs in known], dim=1)
            unit = every.square().sum(dim=-1).mean(dim=-1).sqrt()[:, None, None]
            distances.append(torch.cdist(own, every) / (unit * self.near[kind]))
        return torch.stack(distances).amin(dim=0)

    def _find_place(self) -> tuple[str, str] | None:
        """Find the place in the model, of the same tokens, whose keys or values, or both, these are."""
        far = self._strange_kinds()
        found = [place for kind in far if (place := self._find_place_of(kind)) is not None]
        if not found or len(found) < len(far):
            return None
        fault, where = found[0]
        if len(found) == 2 and found[0] == found[1]:
            swapped = fault == "swapped"
            return fault, "keys where values belong, and values where keys do" if swapped else f"entries {where}"
        names = ("keys", "values")
        words = [
            f"{names[1 - kind]} where {names[kind]} belong" if name == "swapped" else f"{names[kind]} {place}"
            for kind, (name, place) in zip(far, found, strict=True)
        ]
        return fault, " and ".join(words)

    def _find_place_of(self, kind: int) -> tuple[str, str] | None:
        """Return the fault, and the place that the keys (`kind` 0) or values (1) are of, in words; None without one.

        Of swapped keys and values there is no place: they are the same tokens' values, or keys.
        """
        own, near, positions = self.own[kind], self.near[kind], self.run.positions
        for known in self.reference.known[self.request]:
            other = self._entries_at(known, positions)[1 - kind]
            if own.shape == other.shape and self._is_near(own, other, near):
                return "swapped", ""
            if moved := self._find_heads(kind, known):
                return "head", moved
        for layer, requests in self.reference.other_layers():
            if self._is_near(own, self._entries_at(requests[self.request], positions)[kind], near):
                return "layer", f"of layer n {'+' if layer > self.layer else '-'} {abs(layer - self.layer)} in layer n"
        return None

    def _find_heads(self, kind: int, known: Pair) -> str:
        """Return in words whose keys (`kind` 0) or values (1) every head of the run has; empty where not found."""
        full, moved = known[kind][:, self.run.positions].float(), list[str]()
        for row, head in enumerate(self.run.heads):
            one = slice(row, row + 1)
            sources = [
                source
                for source in range(len(full))
                if self._is_near(self.own[kind][one], full[source : source + 1], self.near[kind], one)
            ]
            if not sources:
                return ""
            moved += [f"{sources[0]} in head {head}"] if head not in sources else []
        return f"of head {', of head '.join(moved)}" if moved else ""

    def _find_rotation(self) -> tuple[str, str] | None:
        """Find a rotation of the keys in the run's first head, where values are those expected."""
        if not self._is_near(self.own[1], self.expected[1], self.near[1]):
            return None
        most = 2 * max(int(self.full[0].shape[1]), 1)
        frequencies = self.reference.frequencies
        keys = self.own[0][0], self.expected[0][0], self.run.positions, frequencies
        words = describe_rotation(*keys, most, near=self.limits[0])
        if not words:
            words = describe_base(find_base(*keys, self.rotary_base()), frequencies)
        return ("rotation", f"keys {words}") if words else None

    def _find_layout(self) -> tuple[str, str] | None:
        """Find a layout in which the whole block holds what is expected, and in which these entries are others."""
        if self.run.block == REMOVED:
            return None
        first, rows = int(self.run.positions[0] - self.run.offsets[0]), list(self.run.heads)
        for words, *both in self.reference.alternatives(self.run.block):
            full = [part[:, first : first + both[0].shape[1]] for part in self.full]
            moved = [part[rows][:, self.run.offsets] for part in both]
            if all(torch.equal(*each) for each in zip(moved, self.own, strict=True)):
                continue
            near = [
                _relative_distances(part[:, : known.shape[1]], known) <= limit
                for part, known, limit in zip(both, full, self.near, strict=True)
            ]
            if float(torch.stack(near).float().mean()) > _NEARLY_ALL:
                return "layout", f"written as '{words}'"
        return None


def _relative_distances(
    own: Float[Tensor, "kv_head entry width"], expected: Float[Tensor, "kv_head entry width"]
) -> Float[Tensor, "kv_head entry"]:
    """Return the distances of entries from those expected, over the root mean square norm of all those expected.

    They may be another head's, layer's or kind's, so that no whole head gives the unit.
    """
    unit = expected.square().sum(dim=-1).mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return cast("Tensor", torch.linalg.vector_norm(own - expected, dim=-1) / unit)


def _moved_tokens(
    tokens: Int[Tensor, "kv_head entry"],
    positions: Int[Tensor, "kv_head entry"],
    distances: Float[Tensor, "kv_head entry token"],
    owned: Bool[Tensor, "kv_head entry"],
) -> Int[Tensor, " owned"]:
    """Return the token whose entry each owned one is: the nearest of `tokens`, or one as near that moved as most did.

    In layer 0 equal tokens have equal entries, and several are nearest.
    """
    away = (tokens - positions)[owned].mode().values
    there = (positions + away).clamp(min=0, max=distances.shape[-1] - 1)
    as_near = distances.gather(-1, there.unsqueeze(-1)).squeeze(-1) <= distances.amin(dim=-1) + _TIE
    return torch.where(as_near, there, tokens)[owned]


def join_faults(found: Sequence[DumpFault], present: Mapping[str, float]) -> list[DumpFault]:
    """Return the faults, equal ones of several layers, blocks and heads joined; the lowest layer's earliest first.

    Clipped entries come behind others, if some other fault is of more of them.
    `present`: request -> number of its entries in a head of a layer. Where a fault is of nearly all of them, in every
    request, it is one of the whole dump.
    """
    for names in (("first", "last"), ("layers", "heads")):
        same: dict[tuple[object, ...], DumpFault] = {}
        for fault in found:
            key = attrgetter("request", "kind", "what", *names)(fault)
            same[key] = _join_two(same[key], fault) if key in same else fault
        found = list(same.values())
    by_kind: dict[tuple[object, ...], list[DumpFault]] = {}
    for fault in found:
        by_kind.setdefault((fault.kind, fault.what, fault.layers, fault.heads), []).append(fault)
    joined = [fault for alike in by_kind.values() for fault in _join_requests(alike, present)]
    most = max((one.count if one.request else math.inf for one in joined if one.kind != "clipped"), default=0)
    return sorted(
        joined,
        key=lambda one: (  # a store of few bits clips some entries that are right otherwise
            one.kind == "clipped" and one.count < most,
            min(one.layers, default=math.inf), one.first, -len(one.layers), one.request,
        ),
    )  # fmt: skip


def _join_requests(alike: Sequence[DumpFault], present: Mapping[str, float]) -> Sequence[DumpFault]:
    """Return equal faults of the same layers and heads as one where they are of nearly all entries of every request.

    `alike` has a fault or several of each request, `present` as in `join_faults`. One request alone stays as it is.
    """
    one, count = alike[0], sum(fault.count for fault in alike)
    least = {name: _NEARLY_ALL * entries * len(one.layers) * len(one.heads) for name, entries in present.items()}
    whole = {fault.request for fault in alike if fault.count >= max(least.get(fault.request, math.inf), 1)}
    if len(whole) < 2 or whole != present.keys():
        return alike
    return [DumpFault("", one.kind, one.what, layers=one.layers, heads=one.heads, count=count)]


def _join_two(one: DumpFault, other: DumpFault) -> DumpFault:
    """Return two faults of the same kind and request as one, of all their tokens, blocks, layers and heads."""
    return DumpFault(
        one.request, one.kind, one.what, min(one.first, other.first), max(one.last, other.last),
        tuple(dict.fromkeys([*one.blocks, *other.blocks])), tuple(sorted({*one.layers, *other.layers})),
        tuple(sorted({*one.heads, *other.heads})), one.count + other.count,
    )  # fmt: skip

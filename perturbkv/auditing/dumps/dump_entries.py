"""Dumped entries of a layer: read from blocks or rows, compared with the plain model's, judged by limits.

Blocks are read in the layout that the dump names, or in one that is found by content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from perturbkv.analyses.audit.dump_verdict import DumpFault
from perturbkv.auditing.changes import round_towards_zero
from perturbkv.auditing.dumps.dump_file import REMOVED, Dump, LayerDump, Request, machine_epsilon, of_heads
from perturbkv.auditing.dumps.layouts import Layout, candidates, reorderings
from perturbkv.auditing.reference import entry_distances
from perturbkv.cache.external_cache import NOWHERE, recover_positions
from perturbkv.devices import dtype_name
from perturbkv.errors import ConfigError, UnreadableCacheError

MEDIANS = 4
"""Multiple of a layer's median distance above which an entry differs."""
LARGEST_MEDIAN = 0.3
"""Largest median distance that rounding explains; above it only noise floors count."""
LEAST_BLOCK = 8
"""Smallest block, in tokens, that is judged by itself; smaller ones are judged in groups of 16 neighbours."""
_GROUP_FLOORS = 2
"""Noise floors up to which a block's median is right: decoded tokens beside equal ones need one."""
_ALIASES = {
    "fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Other names of torch's types."""
_ROUNDING = 0.35
"""Largest median distance that rounding to a floating-point type explains, in units of its ε; typical is 0.2."""
_BITS = {8: 0.015, 7: 0.03, 6: 0.05, 5: 0.1, 4: 0.2, 3: 0.3, 2: 0.3}
"""Bits -> largest median distance that rounding to whole numbers of so many bits, in blocks with a scale, explains."""
_IN_NAME = re.compile(r"(?<![a-z0-9])(?:i?q|u?int|nf)?([2-8])(?![0-9])")
_FARTHEST = 1e3
"""Distance at which an entry that is NaN or infinite counts."""
_LEAST_FACTOR = 0.01
"""Smallest difference of a common factor from 1 that is a fault."""
_NEARER = 0.8
"""Largest ratio of the median distance after division by a common factor to that before."""
_LEAST_ENTRIES = 32
"""Fewest entries from which a common factor is estimated."""
_FEWER_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that entries of 16 bits may have gone through."""
_NEARLY_ALL = 0.95
"""Share of numbers that counts as all of them."""
_TRUNCATED = 0.92
"""Least share of numbers that are those rounded towards zero; a factor of 0.955, rounded to e4m3, leaves 0.91."""
_LEAST_TRUNCATED = 0.2
"""Least share of numbers for which rounding towards zero and to the nearest differ."""
_TRIED = 64
"""Entries by which a layout is recognised."""
_DIRECTION, _SAME_DIRECTION = 0.95, 0.99
"""Least cosine of an entry with the model's, by which it is recognised; and with any of all the model's."""
_RECOGNISED, _SURE = 0.25, 0.9
"""Least share of tried entries that are recognised in a layout that may be right, and in one that is for certain."""
_TIE = 0.05
"""Difference of two such shares up to which the named layout is as good as another."""
Pair = tuple[Float[Tensor, "kv_head entry d_key"], Float[Tensor, "kv_head entry d_value"]]


@dataclass(frozen=True)
class Entries:
    """The dumped entries of a request in one layer.

    Attributes:
        keys, values: as dumped, in float32.
        positions: the token that each entry stands for; `REMOVED` where there is no entry.
        blocks: id of the block that holds each entry; `REMOVED` in rows.
        block_size: tokens of a block; 0 in rows.
    """

    keys: Float[Tensor, "kv_head entry d_key"]
    values: Float[Tensor, "kv_head entry d_value"]
    positions: Int[Tensor, "kv_head entry"]
    blocks: Int[Tensor, " entry"]
    block_size: int = 0

    @property
    def pair(self) -> Pair:
        """Keys and values."""
        return self.keys, self.values


@dataclass(frozen=True)
class EntryDistances:
    """The distances of a request's entries from the plain model's, over the root mean square norm of the head's.

    Attributes:
        distance: of keys and of values; infinite where an entry is NaN or infinite.
        present: whether there is an entry.
        norm: of the plain model's entries, over the same, at least 1.
    """

    distance: Float[Tensor, "kind kv_head entry"]
    present: Bool[Tensor, "kv_head entry"]
    norm: Float[Tensor, "kind kv_head entry"]


def measure_distances(entries: Entries, plain: Pair) -> EntryDistances:
    """Return the distances of entries from the plain model's entries of the tokens that they stand for.

    `plain` are keys and values (kv_head, token, width). The distance is 0 where there is no entry.
    """
    present, distances, norms = entries.positions != REMOVED, [], []
    for own, full in zip(entries.pair, plain, strict=True):
        expected = _at_positions(full, entries.positions)
        distances.append(entry_distances(own, expected, full).masked_fill(~present, 0))
        norms.append(entry_distances(expected, torch.zeros_like(expected), full).clamp(min=1))
    return EntryDistances(torch.stack(distances), present, torch.stack(norms))


def _at_positions(
    full: Float[Tensor, "kv_head token width"], positions: Int[Tensor, "kv_head entry"]
) -> Float[Tensor, "kv_head entry width"]:
    """Return the entries at these positions, per head; those of the first token where there is none."""
    return full.float().gather(1, positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, full.shape[-1]))


def mean_distance(entries: Entries, plain: Pair) -> float:
    """Return the mean distance of a request's keys and values from the plain model's; one above 1 counts as 1."""
    measured = measure_distances(entries, plain)
    return float(measured.distance[:, measured.present].clamp(max=1).mean())


def nearest_entries(entries: Entries, references: Sequence[Pair], typical: Sequence[float]) -> Pair:
    """Return, of each token, the keys and values of the reference that is nearest to its entries, over all heads.

    Each of the `references` has keys and values (kv_head, token, width) of all tokens. Keys, or values, much farther
    than is `typical` of right ones count all alike: the reference is that of the other ones.
    """
    if len(references) == 1:
        return references[0]
    distances = []
    for reference in references:
        distance = measure_distances(entries, reference).distance.clamp(max=_FARTHEST)
        both = (distance / (distance + distance.new_tensor(typical)[:, None, None])).sum(dim=0)
        by_token = both.new_zeros(len(both), reference[0].shape[1])
        distances.append(by_token.scatter_add(1, entries.positions.clamp(min=0), both).sum(dim=0))
    nearest = torch.stack(distances).argmin(dim=0)
    tokens = torch.arange(len(nearest), device=nearest.device)
    keys, values = (torch.stack([pair[kind] for pair in references])[nearest, :, tokens] for kind in range(2))
    return keys.transpose(0, 1), values.transpose(0, 1)


def median_distances(measured: Sequence[EntryDistances]) -> tuple[float, float]:
    """Return the medians of the distances of a layer's keys and of its values, over all requests; 0 without entries."""
    distances = torch.cat([one.distance[:, one.present] for one in measured], dim=1)
    keys, values = distances.median(dim=1).values if distances.numel() else (0.0, 0.0)
    return float(keys), float(values)


@dataclass(frozen=True)
class Limits:
    """The distances of a layer's keys, and of its values, above which they differ.

    Attributes:
        single: of one entry: one limit for all, or one for each.
        together: of the median of a block, or of 16 neighbours, in one head.
    """

    single: tuple[float | Float[Tensor, "kv_head entry"], float | Float[Tensor, "kv_head entry"]]
    together: tuple[float, float]

    @classmethod
    def of_layer(
        cls,
        floors: Sequence[float],
        medians: Sequence[float],
        allowed: int,
        explained: Sequence[float] = (0.0, 0.0),
    ) -> Self:
        """Return the limits of a layer's entries.

        Args:
            floors: noise floors of keys and of values.
            medians: median distances of keys and of values; one above `LARGEST_MEDIAN` is no rounding and not counted.
            allowed: how many noise floors an entry may differ by.
            explained: the largest medians that types explain; rounding moves no entry farther than ε/2.
        """
        by_median = [MEDIANS * median if median <= LARGEST_MEDIAN else 0.0 for median in medians]
        single = [
            max(allowed * floor, limit, most / _ROUNDING / 2)
            for floor, limit, most in zip(floors, by_median, explained, strict=True)
        ]
        together = [
            min(one, max(_GROUP_FLOORS * floor, limit))
            for one, floor, limit in zip(single, floors, by_median, strict=True)
        ]
        return cls((single[0], single[1]), (together[0], together[1]))

    def differing_entries(self, entries: Entries, measured: EntryDistances) -> Bool[Tensor, "2 kv_head entry"]:
        """Return which keys, and which values, differ, by themselves or with their block or neighbours.

        One limit for all is that of entries of up to the head's norm: rounding moves longer ones farther.
        """
        size = entries.block_size if entries.block_size >= LEAST_BLOCK else 2 * LEAST_BLOCK
        tokens = measured.present.shape[1]
        differing = []
        for kind, (single, together) in enumerate(zip(self.single, self.together, strict=True)):
            distance = measured.distance[kind]
            if not isinstance(single, Tensor):
                distance = distance / measured.norm[kind]
            present = distance.masked_fill(~measured.present, torch.nan)
            groups = nn.functional.pad(present, (0, -tokens % size), value=torch.nan).reshape(len(present), -1, size)
            many = groups.isfinite().sum(dim=-1) >= LEAST_BLOCK
            above = many & (groups.nanmedian(dim=-1).values > together)
            in_group = above.repeat_interleave(size, dim=-1)[:, :tokens] & (distance > together)
            differing.append(measured.present & ((distance > single) | in_group))
        return torch.stack(differing)


def common_factor(kind: int, entries: Mapping[str, Entries], plain: Mapping[str, Pair]) -> float:
    """Return the constant that all keys (`kind` 0) or values (1) of a layer were multiplied by; 1 without one.

    `entries` and `plain` are, per request, the dumped entries and the plain model's. 1, too, for too few entries and
    for a factor that is not positive or too near to 1 to be told.
    """
    dumped, full = _dumped_and_plain(kind, entries, plain)
    factor = float(((dumped * full).sum(dim=-1) / full.square().sum(dim=-1)).nanmedian()) if len(full) else 1.0
    if len(full) < _LEAST_ENTRIES or not factor > 0 or abs(factor - 1) < _LEAST_FACTOR:
        return 1.0
    before, after = (torch.linalg.vector_norm(dumped / scale - full, dim=-1).nanmedian() for scale in (1.0, factor))
    return factor if bool(after < _NEARER * before) else 1.0


def _dumped_and_plain(
    kind: int, entries: Mapping[str, Entries], plain: Mapping[str, Pair], heads: slice = slice(None)
) -> tuple[Float[Tensor, "entry width"], Float[Tensor, "entry width"]]:
    """Return all keys (`kind` 0) or values (1) of a layer, and the plain model's of the same tokens.

    They are those of all requests and of the given heads, one after the other.
    """
    dumped, expected = [], []
    for name, own in entries.items():
        positions = own.positions[heads]
        there = positions != REMOVED
        dumped.append(own.pair[kind][heads][there])
        expected.append(_at_positions(plain[name][kind][heads], positions)[there])
    return torch.cat(dumped), torch.cat(expected)


def truncated_heads(
    kind: int, entries: Mapping[str, Entries], plain: Mapping[str, Pair], layer: LayerDump
) -> tuple[int, ...]:
    """Return the heads whose keys (`kind` 0) or values (1) were all rounded towards zero to the type of the dump.

    Only heads in which that can be told from rounding to the nearest number.
    """
    dtype, scale = layer.tensors[kind][0].dtype, layer.scales[kind]
    found = []
    for head in range(len(next(iter(entries.values())).keys)):
        dumped, full = _dumped_and_plain(kind, entries, plain, slice(head, head + 1))
        head_scale = of_heads(scale, head)
        truncated, nearest = round_towards_zero(full / head_scale, dtype), (full / head_scale).to(dtype).float()
        differ = truncated != nearest
        if len(dumped) < LEAST_BLOCK or not bool(differ.float().mean() > _LEAST_TRUNCATED):
            continue
        equal = (truncated * head_scale == dumped).float()
        if min(float(equal[differ].mean()), float(equal.mean())) > _TRUNCATED:
            found.append(head)
    return tuple(found)


def coarser_type_of(layer: LayerDump, kind: int) -> str:
    """Return the type of 8 bits that all keys (`kind` 0) or values (1) in 16 bits went through; empty without one.

    Zeros do not count. Empty, too, where the dump's type has other than 16 bits.
    """
    tensors = layer.tensors[kind]
    numbers = torch.cat([tensor[tensor != 0] for tensor in tensors])
    if tensors[0].dtype.itemsize != 2 or not len(numbers):
        return ""
    shares = {dtype: (numbers.float().to(dtype).float() == numbers.float()).float().mean() for dtype in _FEWER_BITS}
    return next((dtype_name(dtype) for dtype, share in shares.items() if bool(share > _NEARLY_ALL)), "")


def is_complete(entries: Entries, tokens: int) -> bool:
    """Return whether each of so many tokens has an entry in every head, in order."""
    return torch.equal(entries.positions, torch.arange(tokens).expand(len(entries.positions), -1))


def explained_distance(dtype: torch.dtype | str) -> float:
    """Return the largest median distance that a type explains; 0 for a name that is not known.

    Of a floating-point type of torch, also under a name such as `bfloat16`, `bf16` or `fp8`: 0.35 ε. Of other names the
    bits that stand in them count: `q4_0`, `int8`.
    """
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    in_torch = getattr(torch, _ALIASES.get(name.lower(), name.lower()), None)
    if isinstance(in_torch, torch.dtype) and machine_epsilon(in_torch):  # of whole numbers the bits count
        return _ROUNDING * machine_epsilon(in_torch)
    bits = _IN_NAME.search(name.lower())
    return _BITS[int(bits[1])] if bits else 0.0


class DumpReader:
    """The reader of a dump's entries.

    Attributes:
        dump: the dump.
        live: the requests whose entries are read.
        layout: of its blocks; None before `recognise_layout` where it is not named, and in a dump of rows.
    """

    def __init__(self, dump: Dump, live: Sequence[Request]) -> None:
        self.dump: Dump = dump
        self.live: Sequence[Request] = live
        self.layout: Layout | None = dump.layout

    def entries(self, layer: LayerDump, plain: Mapping[str, Pair]) -> dict[str, Entries]:
        """Return the entries of all live requests in one layer, given the plain model's of each request.

        Raises UnreadableCacheError for blocks that do not fit the layout.
        """
        blocks = None
        if layer.block_tensors:
            assert self.layout is not None
            try:
                blocks = layer.split(self.layout, self.dump.sizes)
            except ConfigError as error:
                raise UnreadableCacheError(f"{self.dump.path}: {error}") from None
        return {request.id: self._request_entries(request, layer, blocks, plain) for request in self.live}

    def _request_entries(
        self, request: Request, layer: LayerDump, blocks: Pair | None, plain: Mapping[str, Pair]
    ) -> Entries:
        """Return a request's entries in one layer, from its blocks (block, token, head, dim) or its rows.

        The tokens that rows stand for are found by their content where they are not told.
        """
        if request.blocks is None or blocks is None:
            keys, values, positions = layer.rows[request.id]
            if positions is None:
                known = plain[request.id]
                own, full = (tuple(part.unsqueeze(0).float() for part in pair) for pair in ((keys, values), known))
                (kept,) = recover_positions([(own[0], own[1])], [(full[0], full[1])])
                positions = torch.stack(list(kept.positions))  # of entries of no token, their place
                in_order = torch.arange(positions.shape[1]).expand_as(positions).clamp(max=known[0].shape[1] - 1)
                positions = torch.where(positions == NOWHERE, in_order, positions)
            nowhere = torch.full((keys.shape[1],), REMOVED)
            return Entries(keys.float(), values.float(), positions, nowhere)
        tokens, size = len(request.token_ids), self.dump.block_size
        table = torch.tensor(request.blocks[: -(-tokens // size)], dtype=torch.int64)
        ids = table.repeat_interleave(size)[:tokens]  # the block of each token
        places = torch.arange(len(ids))
        order = layer.block_ids.argsort()
        index = order[torch.searchsorted(layer.block_ids[order], ids.clamp(min=0)).clamp(max=len(order) - 1)]
        keys, values = (part[index, places % size].transpose(0, 1) for part in blocks)
        positions = torch.where(ids != REMOVED, places, REMOVED).expand(self.dump.kv_heads, -1)
        return Entries(keys, values, positions, ids, size)

    def recognise_layout(self, layer: LayerDump, plain: Sequence[Mapping[str, Pair]]) -> list[DumpFault]:
        """Find the layout of the blocks where none is named, or where entries in the named one are none of the model's.

        `plain` are the plain model's entries of each request in every layer, this one's first. Returns the fault of
        another layout than the named one. Raises UnreadableCacheError where no layout of the tensors shows the model's
        entries, keys and values of every head; a named one may hold those of other places.
        """
        named = self.dump.layout
        share = float(self._recognised_shares(layer, named, plain[0]).mean()) if named else 0.0
        if share >= _SURE:
            return []
        in_one = len(layer.block_tensors) == 1
        both = [list(candidates(tensor.shape, self.dump.sizes, in_one)) for tensor in layer.block_tensors]
        pairs = [(groups, groups) for groups in both[0]] if in_one else product(*both)
        shares = {layout: self._recognised_shares(layer, layout, plain[0]) for layout in starmap(Layout, pairs)}
        best = self._best_layout(layer, shares, plain[0])
        if best is None:
            # infinite entries say nothing about a layout
            if named and (share >= _RECOGNISED or self._hold_others(layer, named, plain)):
                return []
            tried = f"'{named}' or any other layout" if named else "any layout"
            half = [
                f"{name} are found as '{found}', alone"
                for kind, name in enumerate(("keys", "values"))
                for found in shares
                if float(shares[found][kind].amin()) >= _SURE
            ]
            raise UnreadableCacheError(
                f"{self.dump.path}: nothing was compared: read as {tried}, its blocks hold none of the model's "
                f"entries of these tokens{': ' + half[0] if half else ''}; is it this model's cache?"
            )
        if named and share >= float(self._recognised_shares(layer, best, plain[0]).mean()) - _TIE:
            return []
        self.layout = best
        if not named:
            return []
        everywhere = tuple(range(self.dump.layers))
        return [DumpFault("", "layout", f"written as '{best}', named '{named}'", layers=everywhere)]

    def _best_layout(
        self, layer: LayerDump, shares: Mapping[Layout, Tensor], plain: Mapping[str, Pair]
    ) -> Layout | None:
        """Return the layout in which most entries are recognised, some in every head; None if there is none.

        Of one tensor, whose keys may be in another order than its values, also a layout of each.
        """
        found = [layout for layout, share in shares.items() if float(share.amin()) >= _RECOGNISED]
        if not found and shares and len(layer.block_tensors) == 1:
            by_kind = [{layout: float(share[kind].mean()) for layout, share in shares.items()} for kind in range(2)]
            keys, values = (max(each, key=each.__getitem__) for each in by_kind)
            mixed = Layout(keys.keys, values.values)
            return mixed if float(self._recognised_shares(layer, mixed, plain).amin()) >= _RECOGNISED else None
        return max(found, key=lambda layout: float(shares[layout].mean()), default=None)

    def _hold_others(self, layer: LayerDump, layout: Layout, plain: Sequence[Mapping[str, Pair]]) -> bool:
        """Return whether entries are infinite, or some have the direction of entries of the model at other places."""
        try:
            blocks = layer.split(layout, self.dump.sizes)
        except ConfigError:
            return False
        for request in self.live:
            own = self._request_entries(request, layer, blocks, plain[0])
            if not all(bool(part.isfinite().all()) for part in own.pair):
                return True
            known = [part.flatten(0, 1).float() for layer in plain for pair in layer.values() for part in pair]
            unit = nn.functional.normalize(torch.cat(known), dim=-1)
            for part in own.pair:
                some = part.flatten(0, 1)[torch.linspace(0, part[..., 0].numel() - 1, _TRIED).long()]
                cosines = (nn.functional.normalize(some, dim=-1) @ unit.T).amax(dim=-1)
                if float((cosines >= _SAME_DIRECTION).float().mean()) >= _RECOGNISED:
                    return True
        return False

    def _recognised_shares(
        self, layer: LayerDump, layout: Layout, plain: Mapping[str, Pair]
    ) -> Float[Tensor, "2 kv_head"]:
        """Return, of keys and values of every head, the share with the direction of the model's of the same tokens.

        Of some entries. Keys in the place of values, and values in that of keys, count too; lengths do not. 0 for a
        layout that does not fit, and without entries.
        """
        none = torch.zeros(2, self.dump.kv_heads)
        try:
            blocks = layer.split(layout, self.dump.sizes)
        except ConfigError:
            return none
        shares = []
        for request in self.live:
            own = self._request_entries(request, layer, blocks, plain)
            there = (own.positions[0] != REMOVED).nonzero().squeeze(-1)
            if not len(there):
                continue
            some = there[torch.linspace(0, len(there) - 1, min(_TRIED, len(there))).long()]
            dumped = own.keys[:, some], own.values[:, some]
            full = [part[:, own.positions[0, some]].float() for part in plain[request.id]]
            near = (
                torch.stack([torch.cosine_similarity(*pair, dim=-1) for pair in zip(dumped, both, strict=True)])
                for both in (full, full[::-1])  # as they are, and with keys and values in each other's place
            )
            shares.append(max(((one >= _DIRECTION).float().mean(dim=-1) for one in near), key=lambda one: one.mean()))
        return torch.stack(shares).mean(dim=0) if shares else none

    def alternatives(self, layer: LayerDump, block: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (axes, keys, values (kv_head, token, width)) of a block by its id, were its axes in another order."""
        assert self.layout is not None
        index = int((layer.block_ids == block).nonzero()[0])
        keys, values = (part[index] for part in layer.split(self.layout, self.dump.sizes))
        for words, *both in reorderings(self.layout.keys, keys, values):
            yield words, both[0].transpose(0, 1), both[1].transpose(0, 1)

"""Entries of a dump's requests, read from blocks in a layout that is named, or found by content, or from rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from perturbkv.audit_trace import DumpFault
from perturbkv.auditing.dumps.distances import Entries, Pair
from perturbkv.auditing.dumps.dump_file import REMOVED, Dump, LayerDump, Request
from perturbkv.auditing.dumps.layouts import Layout, candidates, reorderings
from perturbkv.cache.external_cache import NOWHERE, recover
from perturbkv.errors import ConfigError, UnreadableCacheError

_TRIED = 64
"""Entries by which a layout is recognised."""
_DIRECTION = 0.95
"""Least cosine of an entry with the model's, by which it is recognised."""
_RECOGNISED, _SURE = 0.25, 0.9
"""Least share of tried entries that are recognised in a layout that may be right, and in one that is for certain."""


class DumpReader:
    """The reader of a dump's entries.

    Attributes:
        layout: of its blocks; None before `recognise_layout` where it is not named, and in a dump of rows.
    """

    def __init__(self, dump: Dump, live: Sequence[Request]) -> None:
        self.dump: Dump = dump
        self.live: Sequence[Request] = live
        self.layout: Layout | None = dump.layout

    def entries(self, layer: LayerDump, known: Mapping[str, Pair]) -> dict[str, Entries]:
        """Return the entries of all live requests in one layer."""
        blocks = self._blocks(layer)
        return {request.id: self._entries(request, layer, blocks, known) for request in self.live}

    def _blocks(self, layer: LayerDump) -> Pair | None:
        """Return keys and values of all blocks in the dump's layout; None in a dump of rows."""
        if not layer.stored:
            return None
        assert self.layout is not None
        try:
            keys, values = layer.split(self.layout, self.dump.sizes)
        except ConfigError as error:
            raise UnreadableCacheError(f"{self.dump.path}: {error}") from None  # noqa: EM102
        return keys, values

    def _entries(self, request: Request, layer: LayerDump, blocks: Pair | None, known: Mapping[str, Pair]) -> Entries:
        """Return a request's entries in one layer, from its blocks or its rows."""
        tokens = len(request.token_ids)
        if request.blocks is None or blocks is None:
            keys, values, positions = layer.rows[request.id]
            if positions is None:
                positions = self._find_positions((keys, values), known[request.id])
            nowhere = torch.full((keys.shape[1],), REMOVED)
            return Entries(keys.float(), values.float(), positions, nowhere)
        size = self.dump.block_size
        table = torch.tensor(request.blocks[: -(-tokens // size)], dtype=torch.int64)
        order = layer.block_ids.argsort()
        ids = table.repeat_interleave(size)[:tokens]
        places = torch.arange(len(ids))
        there = ids != REMOVED
        chosen = order[torch.searchsorted(layer.block_ids[order], ids.clamp(min=0)).clamp(max=len(order) - 1)]
        keys, values = (part[chosen, places % size].transpose(0, 1) for part in blocks)
        positions = torch.where(there, places, REMOVED).expand(self.dump.kv_heads, -1)
        return Entries(keys, values, positions, ids, size)

    def _find_positions(self, own: Pair, full: Pair) -> Tensor:
        """Return the tokens that rows stand for, found by their content; of those of no token, their place."""
        matched = [tuple(part.unsqueeze(0).float() for part in pair) for pair in (own, full)]
        (kept,) = recover([(matched[0][0], matched[0][1])], [(matched[1][0], matched[1][1])])
        positions = torch.stack(list(kept.positions))
        in_order = torch.arange(positions.shape[1]).expand_as(positions)
        return torch.where(positions == NOWHERE, in_order.clamp(max=full[0].shape[1] - 1), positions)

    def recognise_layout(self, layer: LayerDump, known: Mapping[str, Pair]) -> list[DumpFault]:
        """Find the layout of the blocks where none is named, or where entries in the named one are none of the model's.

        Returns the fault of another layout than the named one; none in a dump of rows.
        Raises UnreadableCacheError where no layout of the tensors shows the model's entries.
        """
        named = self.dump.layout
        shares = {named: self._recognised(layer, named, known)} if named else {}
        if named and shares[named] >= _SURE:
            return []
        for layout in self._all_layouts(layer):
            shares[layout] = self._recognised(layer, layout, known)
        best = max(shares, key=lambda layout: shares[layout], default=None)
        if best is None or shares[best] < _RECOGNISED:
            if named and not self._are_finite(layer, named, known):
                return []
            tried = f"'{named}' or any other layout" if named else "any layout"
            raise UnreadableCacheError(
                f"{self.dump.path}: nothing was compared: read as {tried}, its blocks hold none of the model's "
                "entries of these tokens; is it this model's cache?"
            )
        if named and shares[named] >= _RECOGNISED and shares[named] >= shares[best] - 0.05:
            return []
        self.layout = best
        if named:
            everywhere = tuple(range(self.dump.layers))
            return [DumpFault("", "layout", f"written as '{best}', named '{named}'", layers=everywhere)]
        return []

    def _are_finite(self, layer: LayerDump, layout: Layout, known: Mapping[str, Pair]) -> bool:
        """Return whether all numbers of the live requests' entries are finite, or the layout does not fit."""
        try:
            blocks = layer.split(layout, self.dump.sizes)
        except ConfigError:
            return True
        entries = [self._entries(request, layer, (blocks[0], blocks[1]), known) for request in self.live]
        return all(bool(part.isfinite().all()) for own in entries for part in (own.keys, own.values))

    def _all_layouts(self, layer: LayerDump) -> Iterator[Layout]:
        """Yield all layouts that fit the block tensors."""
        sizes = self.dump.sizes
        both = [list(candidates(tensor.shape, sizes, len(layer.stored) == 1)) for tensor in layer.stored]
        if len(both) == 1:
            yield from (Layout(groups, groups) for groups in both[0])
            return
        yield from (Layout(keys, values) for keys in both[0] for values in both[1])

    def _recognised(self, layer: LayerDump, layout: Layout, known: Mapping[str, Pair]) -> float:
        """Return the share of some entries that have the direction of the model's entries of the same tokens.

        Keys in the place of values, and values in that of keys, count too; lengths do not.
        """
        try:
            blocks = layer.split(layout, self.dump.sizes)
        except ConfigError:
            return 0.0
        tried: list[float] = []
        for request in self.live:
            own = self._entries(request, layer, (blocks[0], blocks[1]), known)
            there = (own.positions[0] != REMOVED).nonzero().squeeze(-1)
            if not len(there):
                continue
            some = there[torch.linspace(0, len(there) - 1, min(_TRIED, len(there))).long()]
            parts = own.keys[:, some], own.values[:, some]
            full = [part[:, own.positions[0, some]].float() for part in known[request.id]]
            ways = (
                [torch.cosine_similarity(one, other, dim=-1) for one, other in zip(parts, both, strict=True)]
                for both in (full, full[::-1])
            )
            tried.append(max(float((torch.stack(way) >= _DIRECTION).float().mean()) for way in ways))
        return float(np.mean(tried)) if tried else 0.0

    def alternatives(self, layer: LayerDump, block: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (axes, keys, values (kv_head, token, d_head)) of one block, were it written in another order."""
        assert self.layout is not None
        index = int((layer.block_ids == block).nonzero()[0])
        keys, values = (part[index] for part in layer.split(self.layout, self.dump.sizes))
        for words, *both in reorderings(self.layout.keys, keys, values):
            yield words, both[0].transpose(0, 1), both[1].transpose(0, 1)

"""The audit of a dump: every request's entries against the plain model's, layer by layer (METHOD: Engines' caches)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from perturbkv import memory, theory
from perturbkv.audit_trace import FLOORS, DumpedRequest, DumpFault, DumpTrace, Floats, Integers
from perturbkv.auditing import loss, reference
from perturbkv.auditing.audit import provenance
from perturbkv.auditing.dumps import matching
from perturbkv.auditing.dumps.dump_file import REMOVED, Dump, LayerDump, Request
from perturbkv.auditing.dumps.layouts import Layout, candidates, reorderings
from perturbkv.auditing.dumps.matching import Distances, Entries, Known, Limits
from perturbkv.auditing.dumps.plain_entries import PlainEntries
from perturbkv.cache.external_cache import NOWHERE, recover
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt, check_length, check_vocabulary
from perturbkv.devices import full_precision
from perturbkv.errors import ConfigError, UnreadableCacheError
from perturbkv.models.adapter import Adapter

_DEFAULT = Resources()
_TOKENS_PER_PASS = 256
_TRIED = 64
"""Entries by which a layout is recognised."""
_DIRECTION = 0.95
"""Least cosine of an entry with the model's, by which it is recognised."""
_RECOGNISED, _SURE = 0.25, 0.9
"""Least share of tried entries that are recognised in a layout that may be right, and in one that is for certain."""
_LOGPROB_LEAST, _MOST_LOGPROB = 1e-3, 2.0
"""Least noise floor of a log-probability, and its largest difference in nats that coarser entries explain."""
_FARTHER = 2
"""Ratio of a layer's typical distance to the one that the engine's rounding gives, above which the type is another."""
_Pair = tuple[Tensor, Tensor]


@torch.inference_mode()
@memory.translate_allocation_errors()
@full_precision()
def audit_dump(
    adapter: Adapter,
    dump: Dump,
    *,
    losses: bool = True,
    resources: Resources = _DEFAULT,
    progress: Callable[[], object] = lambda: None,
) -> DumpTrace:
    """Compare a dump with the plain model's cache of the same tokens, and return the measurements.

    In memory are the plain model's entries of all requests and one layer of the dump. `losses`: whether the loss is
    measured where entries are removed; `progress` is called per layer.

    Raises UnreadableCacheError for a dump of another model's shape, DatasetError for tokens that the model lacks.
    """
    reference.check(adapter)
    _check_shape(adapter, dump)
    for request in dump.requests:
        check_vocabulary(_prompt(request), int(adapter.config.vocab_size), adapter.name)
        check_length(_prompt(request), int(adapter.config.max_position_embeddings), 0)
    plain = PlainEntries(adapter, dump)
    comparison = _Comparison(adapter, dump, plain)
    for index in range(dump.layers):
        comparison.add_layer(index)
        progress()
    trace = comparison.trace()
    removed = [request for request in trace.requests if request.kept]
    if losses and removed and not any(fault.kind != "decoding" for fault in trace.faults):
        by_id = {request.id: _prompt(request) for request in dump.requests}
        measured = loss.measure(adapter, [by_id[one.name] for one in removed], [one.kept for one in removed], resources)
        trace = replace(trace, losses=measured.losses)
    return trace


def _prompt(request: Request) -> Prompt:
    """Return a request's tokens as a prompt."""
    return Prompt(request.id, request.token_ids, 0)


def _check_shape(adapter: Adapter, dump: Dump) -> None:
    """Raise UnreadableCacheError where the dump's model has another shape."""
    d_head = adapter.d_head
    for name, found, expected in (
        ("layers", dump.layers, len(adapter.layers)), ("key/value heads", dump.kv_heads, adapter.kv_heads),
        ("components a head", dump.head_size, d_head),
    ):  # fmt: skip
        if found != expected:
            msg = f"{dump.path} is of a model with {found} {name}, and {adapter.name} has {expected}"
            raise UnreadableCacheError(msg)


class _Comparison:
    """The comparison of a dump, layer by layer."""

    def __init__(self, adapter: Adapter, dump: Dump, plain: PlainEntries) -> None:
        self.adapter, self.dump, self.plain = adapter, dump, plain
        self.live = [request for request in dump.requests if not request.finished]
        self.layout: Layout | None = dump.layout
        self.faults: list[DumpFault] = []
        self.typical: list[tuple[float, float]] = []
        self.compared = dict.fromkeys((request.id for request in self.live), 0)
        self.differing = dict(self.compared)
        self.removed = dict(self.compared)
        self.distance: dict[str, list[tuple[float, float]]] = {request.id: [] for request in self.live}
        self.kept: dict[str, list[tuple[Integers, ...]]] = {request.id: [] for request in self.live}
        self.perturbation: dict[str, list[Floats]] = {request.id: [] for request in self.live}
        self.stored = ""
        self.coarse: set[int] = set()

    def add_layer(self, index: int) -> None:
        """Compare one layer's entries."""
        layer = self.dump.layer(index)
        known_entries = self.plain.layer(index)
        if index == 0:
            kinds = {str(tensor.dtype) for tensor in (*layer.stored, *(row[0] for row in layer.rows.values()))}
            self.stored = self.dump.dtype or ", ".join(sorted(kind.removeprefix("torch.") for kind in kinds))
            if layer.stored:
                self._recognise_layout(layer, known_entries)
        blocks = self._blocks(layer)
        entries = {request.id: self._entries(request, layer, blocks, known_entries) for request in self.live}
        scaled = self._undo_scales(index, entries, known_entries)
        measured = {name: matching.distances(own, known_entries[name]) for name, own in entries.items()}
        typical = matching.typical(list(measured.values()))
        self.typical.append(typical)
        floors, explained = [float(floor) for floor in self.plain.floors[index]], self._explained_distance(layer)
        if max(typical) > max(FLOORS * max(floors), explained):
            self.coarse.add(index)
        self._add_too_coarse(index, typical, floors)
        levels = (explained / 2, explained / 2) if index in self.coarse else typical
        limits = tuple(matching.tolerance(floor, level) for floor, level in zip(floors, levels, strict=True))
        known = Known(
            known_entries, frozenset(request.id for request in self.dump.requests if request.finished),
            lambda: self._other_layers(index), self.adapter.frequencies, lambda block: self._alternatives(layer, block),
        )  # fmt: skip
        for name, own in entries.items():
            expected = self.plain.expected.get(name)
            allowed = (limits[0], limits[1]) if expected is None else expected[index].limits(own.positions, limits)
            self._add(name, index, own, measured[name], known, allowed)
            self.differing[name] = self.compared[name] if scaled else self.differing[name]
        if layer.through:
            self.faults.append(DumpFault("", "rounded", " and ".join(layer.through), layers=(index,)))

    def _undo_scales(self, index: int, entries: dict[str, Entries], known: Mapping[str, _Pair]) -> bool:
        """Divide a layer's keys, and values, by a constant factor that all of them have, and record it as a fault.

        What is left is compared as if there were none. Returns whether there was one.
        """
        factors = [matching.common_factor(kind, entries, known) for kind in range(2)]
        for name, factor in zip(("keys", "values"), factors, strict=True):
            if factor != 1:
                self.faults.append(DumpFault("", "scale", f"all {name} multiplied by {factor:.2g}", layers=(index,)))
        for name, own in entries.items():
            entries[name] = replace(own, keys=own.keys / factors[0], values=own.values / factors[1])
        return factors != [1, 1]

    def _add_too_coarse(self, index: int, typical: Sequence[float], floors: Sequence[float]) -> None:
        """Record a layer whose entries are farther from the plain model's than its engine's rounding puts them."""
        for kind, name in enumerate(("keys", "values")):
            expected = self.plain.expected_distance(index, kind)
            if expected is not None and typical[kind] > max(FLOORS * floors[kind], _FARTHER * expected):
                self.faults.append(
                    DumpFault("", "coarse", f"{name} farther away than {self.stored} explains", layers=(index,))
                )

    def _explained_distance(self, layer: LayerDump) -> float:
        """Return the largest median distance that the dump's types explain; 0 where they are the plain model's.

        Rounding to a type of torch moves entries by about a fifth of its ε. Other types' rounding is not known. Where
        the engine's is, each entry has its own limit (`plain_entries.Expected`).
        """
        if self.plain.expected:
            return 0.0
        tensors = [*layer.stored, *(row[0] for row in layer.rows.values())]
        named = [getattr(torch, name, None) for name in (self.dump.dtype, self.dump.compute) if name]
        known = [dtype for dtype in named if isinstance(dtype, torch.dtype)]
        if len(known) < len(named):
            return matching.MOST_LEVEL
        coarsest = max(torch.finfo(dtype).eps for dtype in (*(tensor.dtype for tensor in tensors), *known))
        return coarsest / 2 if coarsest > torch.finfo(self.adapter.dtype).eps else 0.0

    def _add(self, name: str, index: int, own: Entries, measured: Distances, known: Known, limits: Limits) -> None:
        """Add one request's comparison in one layer."""
        present = measured.present
        far = ((measured.key > limits[0]) | (measured.value > limits[1])) & present
        near = present & ~far
        self.compared[name] += int(present.sum())
        self.differing[name] += int(far.sum())
        key, value = (float(kind[near].amax()) if bool(near.any()) else 0.0 for kind in (measured.key, measured.value))
        self.distance[name].append((key, value))
        tokens = len(next(request for request in self.live if request.id == name).token_ids)
        kept = tuple(np.unique(row[row != REMOVED].cpu().numpy()) for row in own.positions)
        self.kept[name].append(kept)
        self.removed[name] += sum(tokens - len(positions) for positions in kept)
        self.perturbation[name].append(self._perturbation(name, index, own, known.requests[name]))
        self.faults += matching.duplicates(name, index, own)
        self.faults += matching.faults(name, index, own, measured, known, limits)

    def _perturbation(self, name: str, index: int, own: Entries, full: _Pair) -> Floats:
        """Return the relative perturbation (head,) of the last token's outputs; NaN where entries are gone."""
        everything = torch.arange(full[0].shape[1]).expand(len(full[0]), -1)
        query = self.plain.queries.get(name, {}).get(index)
        if query is None or not torch.equal(own.positions, everything):
            return np.full(self.adapter.heads, np.nan)
        slices = theory.head_slices(self.adapter.output_projection(index), self.adapter.heads)
        plain, dumped = (
            theory.project_outputs(
                theory.attention_output(query, keys, values, self.adapter.scale(index), self.adapter.sinks(index)),
                slices,
            )
            for keys, values in (full, (own.keys.to(query.device), own.values.to(query.device)))
        )
        return ((dumped - plain).abs().sum(dim=-1) / plain.abs().sum(dim=-1)).cpu().numpy()

    def _blocks(self, layer: LayerDump) -> _Pair | None:
        """Return keys and values of all blocks in the dump's layout; None in a dump of rows."""
        if not layer.stored:
            return None
        assert self.layout is not None
        try:
            keys, values = layer.split(self.layout, self.dump.sizes)
        except ConfigError as error:
            raise UnreadableCacheError(f"{self.dump.path}: {error}") from None  # noqa: EM102
        return keys, values

    def _entries(self, request: Request, layer: LayerDump, blocks: _Pair | None, known: Mapping[str, _Pair]) -> Entries:
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
        known_index = torch.full((int(layer.block_ids.amax()) + 1,), REMOVED)
        known_index[layer.block_ids] = torch.arange(len(layer.block_ids))
        ids = table.repeat_interleave(size)[:tokens]
        places = torch.arange(len(ids))
        there = ids != REMOVED
        chosen = known_index[ids.clamp(min=0)]
        keys, values = (part[chosen, places % size].transpose(0, 1) for part in blocks)
        positions = torch.where(there, places, REMOVED).expand(self.dump.kv_heads, -1)
        return Entries(keys, values, positions, ids, size)

    def _find_positions(self, own: _Pair, full: _Pair) -> Tensor:
        """Return the tokens that rows stand for, found by their content; of those of no token, their place."""
        matched = [tuple(part.unsqueeze(0).float() for part in pair) for pair in (own, full)]
        (kept,) = recover([(matched[0][0], matched[0][1])], [(matched[1][0], matched[1][1])])
        positions = torch.stack(list(kept.positions))
        in_order = torch.arange(positions.shape[1]).expand_as(positions)
        return torch.where(positions == NOWHERE, in_order.clamp(max=full[0].shape[1] - 1), positions)

    def _recognise_layout(self, layer: LayerDump, known: Mapping[str, _Pair]) -> None:
        """Find the layout of the blocks where none is named, or where entries in the named one are none of the model's.

        Raises UnreadableCacheError where no layout of the tensors shows the model's entries.
        """
        named = self.dump.layout
        shares = {named: self._recognised(layer, named, known)} if named else {}
        if named and shares[named] >= _SURE:
            return
        for layout in self._all_layouts(layer):
            shares[layout] = self._recognised(layer, layout, known)
        best = max(shares, key=lambda layout: shares[layout], default=None)
        if best is None or shares[best] < _RECOGNISED:
            if named and not self._are_finite(layer, named, known):
                return
            tried = f"'{named}' or any other layout" if named else "any layout"
            msg = (
                f"{self.dump.path}: nothing was compared: read as {tried}, its blocks hold none of the model's "
                "entries of these tokens; is it this model's cache?"
            )
            raise UnreadableCacheError(msg)
        if named and shares[named] >= _RECOGNISED and shares[named] >= shares[best] - 0.05:
            return
        self.layout = best
        if named:
            everywhere = tuple(range(self.dump.layers))
            self.faults.append(DumpFault("", "layout", f"written as '{best}', named '{named}'", layers=everywhere))

    def _are_finite(self, layer: LayerDump, layout: Layout, known: Mapping[str, _Pair]) -> bool:
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

    def _recognised(self, layer: LayerDump, layout: Layout, known: Mapping[str, _Pair]) -> float:
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

    def _alternatives(self, layer: LayerDump, block: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (axes, keys, values (kv_head, token, d_head)) of one block, were it written in another order."""
        assert self.layout is not None
        index = int((layer.block_ids == block).nonzero()[0])
        keys, values = (part[index] for part in layer.split(self.layout, self.dump.sizes))
        for words, *both in reorderings(self.layout.keys, keys, values):
            yield words, both[0].transpose(0, 1), both[1].transpose(0, 1)

    def _other_layers(self, index: int) -> Iterator[tuple[int, Mapping[str, _Pair]]]:
        """Yield (index, entries) of the other layers of the plain model, the nearest first."""
        for other in sorted(range(self.dump.layers), key=lambda layer: abs(layer - index)):
            if other != index:
                yield other, self.plain.layer(other)

    def trace(self) -> DumpTrace:
        """Return the measurements of all layers."""
        requests, faults = [], [*self._join_coarse(), *self._missing()]
        for request in self.dump.requests:
            name = request.id
            if request.finished:
                requests.append(DumpedRequest(name, len(request.token_ids)))
                continue
            distance, floor = self._logprobs(request)
            if distance > max(FLOORS * floor, min(FLOORS * floor * self._coarseness, _MOST_LOGPROB)):
                words = f"log-probabilities differ by up to {distance:.3g}, rounding gives {floor:.3g}"
                faults.append(DumpFault(name, "decoding", words, 0, len(request.token_ids) - 1))
            requests.append(
                DumpedRequest(
                    name, len(request.token_ids), self.compared[name], self.differing[name],
                    np.array(self.distance[name]), self.removed[name],
                    tuple(self.kept[name]) if self.removed[name] else (), np.array(self.perturbation[name]),
                    distance, floor,
                )
            )  # fmt: skip
        dump = self.dump
        return DumpTrace(
            str(dump.path), dump.engine, provenance(self.adapter, {}, len(dump.requests)), dump.layers, dump.kv_heads,
            tuple(requests), tuple(matching.join(faults)), str(self.layout or ""), str(dump.layout or ""), self.stored,
            self.plain.floors, np.array(self.typical),
        )  # fmt: skip

    def _join_coarse(self) -> Iterator[DumpFault]:
        """Yield the faults, with those of entries that are all a little too far away as one."""
        changed: set[int] = set()
        for fault in self.faults:
            if fault.kind == "changed" and not self.plain.expected and self.coarse.issuperset(fault.layers):
                changed |= set(fault.layers)
            else:
                yield fault
        if changed:
            keys, values = np.median(np.array(self.typical)[sorted(changed)], axis=0)
            words = (
                f"keys typically {100 * keys:.2g} % away, values {100 * values:.2g} %, and the dump names no such type"
            )
            yield DumpFault("", "coarse", words, layers=tuple(sorted(changed)))

    @cached_property
    def _coarseness(self) -> float:
        """Ratio of the typical distances of entries to the noise floors; at least 1."""
        return max(1.0, float((np.array(self.typical) / self.plain.floors).max()))

    def _missing(self) -> Iterator[DumpFault]:
        """Yield the requests whose block table is too short for their tokens."""
        for request in self.live:
            held = len(request.blocks or ()) * self.dump.block_size
            if request.blocks is not None and held < len(request.token_ids):
                everywhere = tuple(range(self.dump.layers))
                yield DumpFault(
                    request.id, "missing", "in no block of the table", held, len(request.token_ids) - 1, (), everywhere
                )

    def _logprobs(self, request: Request) -> tuple[float, float]:
        """Return the largest difference of the dump's log-probabilities from the plain model's, and its noise floor."""
        known = [index for index, value in enumerate(request.logprobs) if value is not None and index]
        if not known:
            return np.nan, np.nan
        engine = torch.tensor([request.logprobs[index] for index in known], dtype=torch.float64)
        plain, other = (
            token_logprobs(self.adapter, request.token_ids, tokens)[known] for tokens in (_TOKENS_PER_PASS, 96)
        )
        floor = max(_LOGPROB_LEAST, float((plain - other).abs().amax()))
        return float((engine - plain).abs().nan_to_num(torch.inf).amax()), floor


def token_logprobs(adapter: Adapter, token_ids: Sequence[int], at_once: int) -> Float[Tensor, " token"]:
    """Return each token's log-probability after those before it; 0 for the first. Reads `at_once` tokens at a time."""
    cache, found, last = DynamicCache(), [], None
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    for first in range(0, ids.shape[1], at_once):
        part = ids[:, first : first + at_once]
        logits = adapter.model(input_ids=part, past_key_values=cache, use_cache=True).logits[0].double()
        before = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
        targets = part[0, 1:] if last is None else part[0]
        found.append(before.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1).cpu())
        last = logits[-1:]
    return torch.cat([torch.zeros(1, dtype=torch.float64), *found])

"""The audit of a dump: every request's entries against the plain model's, layer by layer (METHOD: Engines' caches)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from perturbkv import memory, theory
from perturbkv.audit_trace import DumpedRequest, DumpFault, DumpTrace, Floats, Integers, dump_floors
from perturbkv.auditing import loss, reference
from perturbkv.auditing.audit import provenance
from perturbkv.auditing.dumps import distances, matching
from perturbkv.auditing.dumps.distances import Distances, Entries, Limits, Pair, explained_distance
from perturbkv.auditing.dumps.dump_entries import DumpReader
from perturbkv.auditing.dumps.dump_file import REMOVED, Dump, LayerDump, Request
from perturbkv.auditing.dumps.matching import Known
from perturbkv.auditing.dumps.plain_entries import (
    PlainEntries,
    StoredCache,
    by_token,
    token_logprobs,
    unrotate_to_tokens,
)
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt, check_length, check_vocabulary
from perturbkv.devices import dtype_name, full_precision
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter

_DEFAULT = Resources()
_PARTS = (1, 2, 3)
"""Numbers of parts in which tokens are read for the noise floor of their log-probabilities."""
_LEAST_LOGPROB_FLOOR = 1e-3
"""Least noise floor of a log-probability, in nats."""
_MOST_LOGPROB = 2.0
"""Largest difference of a log-probability that coarser entries explain, in nats."""
_FARTHER = 2
"""Ratio of a layer's median distance to the one that the engine's rounding gives, above which the type is another."""


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

    Memory holds the plain model's entries of all requests and one layer of the dump; for requests with coarser types or
    faults also their dumped entries and up to two more caches. `losses`: whether the loss is measured where entries are
    removed; `progress` is called per layer.

    Raises UnreadableCacheError for a dump of another model's shape, DatasetError for tokens that the model lacks.
    """
    reference.check(adapter)
    _check_shape(adapter, dump)
    if all(request.finished for request in dump.requests):
        raise UnreadableCacheError(f"{dump.path}: nothing was compared: every request has ended")
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
            raise UnreadableCacheError(
                f"{dump.path} is of a model with {found} {name}, and {adapter.name} has {expected}"
            )


def _largest(each: Sequence[Tensor], chosen: Tensor) -> tuple[float, float]:
    """Return the largest of the chosen distances of keys, and of values; NaN where none is chosen."""
    keys, values = (
        float(own[one].amax()) if bool(one.any()) else np.nan for own, one in zip(each, chosen, strict=True)
    )
    return keys, values


class _Comparison:
    """The comparison of a dump, layer by layer."""

    def __init__(self, adapter: Adapter, dump: Dump, plain: PlainEntries) -> None:
        self.adapter, self.dump, self.plain = adapter, dump, plain
        self.live = [request for request in dump.requests if not request.finished]
        self.reader = DumpReader(dump, self.live)
        self.faults: list[DumpFault] = []
        self.typical: list[tuple[float, float]] = []
        self.limits: list[tuple[float, float]] = []
        self.compared = dict.fromkeys((request.id for request in self.live), 0)
        self.differing = dict(self.compared)
        self.removed = dict(self.compared)
        self.distance: dict[str, list[tuple[float, float]]] = {request.id: [] for request in self.live}
        self.differing_distance: dict[str, list[tuple[float, float]]] = {request.id: [] for request in self.live}
        self.kept: dict[str, list[tuple[Integers, ...]]] = {request.id: [] for request in self.live}
        self.perturbation: dict[str, list[Floats]] = {request.id: [] for request in self.live}
        self.floors_allowed = dump_floors(dtype_name(adapter.dtype))
        self.stored = ""
        self.unexplained_layers: set[int] = set()
        self.moved: dict[str, bool] = {}
        self.reread: dict[str, tuple[tuple[StoredCache, Tensor], ...]] = {}

    def add_layer(self, index: int) -> None:
        """Compare one layer's entries."""
        layer = self.dump.layer(index)
        references = self.plain.layer(index)
        explained = self._explained_distances(layer)
        if index == 0:
            kinds = {dtype_name(tensor.dtype) for tensors in layer.tensors for tensor in tensors}
            self.stored = self.dump.dtype or ", ".join(sorted(kinds))
            if layer.stored:
                self.faults += self.reader.recognise_layout(layer, references)
            if any(explained):
                self._read_stored({request.id for request in self.live}, layer)
        entries = self._entries(index, layer)
        references = self._nearest(index, entries, references)
        truncated = self._check_rounding(layer, index, entries, references, explained)
        stored = dict(entries)
        scaled = self._remove_factors(index, entries, references, truncated)
        measured = {name: distances.measure(own, references[name]) for name, own in entries.items()}
        typical = distances.medians(list(measured.values()))
        self.typical.append(typical)
        floors = [float(floor) for floor in self.plain.floors[index]]
        explained = (explained[0] * (1 + truncated[0]), explained[1] * (1 + truncated[1]))
        unexplained = [
            far > max(self.floors_allowed * max(floors), most) for far, most in zip(typical, explained, strict=True)
        ]
        if any(unexplained):
            self.unexplained_layers.add(index)
        self._add_too_coarse(index, typical, floors)
        medians = [most / 2 if odd else far for far, most, odd in zip(typical, explained, unexplained, strict=True)]
        limits = Limits.of_layer(floors, medians, self.floors_allowed)
        known = Known(
            references, self.plain.layer(index),
            frozenset(request.id for request in self.dump.requests if request.finished),
            lambda: self._other_layers(index), self.adapter.frequencies,
            lambda block: self.reader.alternatives(layer, block),
        )  # fmt: skip
        self.limits.append(
            (np.nan, np.nan) if self.plain.expected else (float(limits.single[0]), float(limits.single[1]))
        )
        for name, own in entries.items():
            expected = self.plain.expected.get(name)
            allowed = limits if expected is None else expected[index].limits(own.positions, limits)
            far = allowed.differing(own, measured[name])
            self._add(name, index, own, measured[name].present)
            self.faults += matching.faults(name, index, own, far.any(dim=0), known, allowed)
            far |= measured[name].present & torch.tensor(scaled, device=far.device)[:, None, None]
            self._add_distances(name, index, measured[name], far, distances.measure(stored[name], references[name]))
            self.perturbation[name].append(self._perturbation(name, index, stored[name], self.plain.layer(index)[name]))
        if layer.rounded_before:
            self.faults.append(DumpFault("", "rounded", " and ".join(layer.rounded_before), layers=(index,)))
        self._read_stored({name for name, count in self.differing.items() if count}, layer)

    def _read_stored(self, names: set[str], layer: LayerDump) -> None:
        """Let the model read requests once more, attending to the dumped entries.

        An engine attends to its own entries: with fewer bits they differ more from layer to layer, and after a fault
        so do all layers above.
        """
        stored: dict[str, list[Pair]] = {name: [] for name in sorted(names - self.reread.keys())}
        if not stored:
            return
        like = torch.empty(0, dtype=self.adapter.dtype, device=self.adapter.device)
        tokens = {request.id: request.token_ids for request in self.live}
        for index in range(self.dump.layers):
            entries = self._entries(index, self.dump.layer(index))
            for name, layers in stored.items():
                layers.append(by_token(entries[name], len(tokens[name]), like))
        dtype = layer.tensors[0][0].dtype
        for name, layers in stored.items():
            for replace_outliers in (False, True):
                cache = StoredCache(layers, dtype, replace_outliers)
                logprobs = token_logprobs(self.adapter, tokens[name], cache=cache)
                if cache.replaced or not replace_outliers:
                    self.reread[name] = (*self.reread.get(name, ()), (cache, logprobs))

    def _entries(self, index: int, layer: LayerDump) -> dict[str, Entries]:
        """Return the entries of all live requests in one layer, keys at their tokens' positions."""
        known = self.plain.layer(index)
        entries = self.reader.entries(layer, known)
        for name, own in entries.items():
            back = unrotate_to_tokens(own, self.adapter.frequencies)
            if name not in self.moved and not torch.equal(back.keys, own.keys):
                gone = own.positions.shape[1] < known[name][0].shape[1] or bool((own.positions == REMOVED).any())
                nearer = distances.mean_distance(back, known[name]) < distances.mean_distance(own, known[name])
                self.moved[name] = gone and nearer
            entries[name] = back if self.moved.get(name) else own
        return entries

    def _nearest(self, index: int, entries: Mapping[str, Entries], plain: Mapping[str, Pair]) -> Mapping[str, Pair]:
        """Return the model's entries, of each token the plain ones or those given the dumped ones, the nearest."""
        nearest = dict(plain)
        for name, given in self.reread.items():
            every = [plain[name], *(cache.computed(index) for cache, _ in given)]
            nearest[name] = distances.nearest(entries[name], every)
        return nearest

    def _check_rounding(
        self,
        layer: LayerDump,
        index: int,
        entries: Mapping[str, Entries],
        known: Mapping[str, Pair],
        explained: Sequence[float],
    ) -> list[bool]:
        """Record keys, or values, that were all rounded towards zero or to fewer bits than the dump's type.

        Returns whether keys, and values, of some head were rounded towards zero.
        """
        truncated = [False, False]
        for kind, name in enumerate(("keys", "values")):
            heads = distances.truncated_heads(kind, entries, known, layer) if explained[kind] else ()
            if heads:
                truncated[kind] = True
                every = "all " if len(heads) == self.dump.kv_heads else ""
                words = f"{every}{name} rounded towards zero"
                fault = DumpFault("", "rounded", words, layers=(index,), heads=() if every else heads)
                self.faults.append(fault)
            if not self.dump.dtype and (found := distances.fewer_bits(layer, kind)):
                self.faults.append(DumpFault("", "rounded", f"all {name} rounded to {found}", layers=(index,)))
        return truncated

    def _remove_factors(
        self, index: int, entries: dict[str, Entries], known: Mapping[str, Pair], truncated: Sequence[bool]
    ) -> list[bool]:
        """Divide a layer's keys, and values, by a constant factor that all of them have; return which of them had one.

        It is a fault, but for numbers that were rounded towards zero, which explains it. What is left is compared.
        """
        factors = [distances.common_factor(kind, entries, known) for kind in range(2)]
        for kind, (name, factor) in enumerate(zip(("keys", "values"), factors, strict=True)):
            if factor != 1 and not truncated[kind]:
                self.faults.append(DumpFault("", "scale", f"all {name} multiplied by {factor:.2g}", layers=(index,)))
        for name, own in entries.items():
            entries[name] = replace(own, keys=own.keys / factors[0], values=own.values / factors[1])
        return [factor != 1 for factor in factors]

    def _add_too_coarse(self, index: int, typical: Sequence[float], floors: Sequence[float]) -> None:
        """Record a layer whose entries are farther from the plain model's than its engine's rounding puts them."""
        for kind, name in enumerate(("keys", "values")):
            expected = self.plain.expected_distance(index, kind)
            if expected is not None and typical[kind] > max(self.floors_allowed * floors[kind], _FARTHER * expected):
                words = f"{name} farther from the plain model's than rounding to {self.stored} moves them"
                self.faults.append(DumpFault("", "coarse", words, layers=(index,)))

    def _explained_distances(self, layer: LayerDump) -> tuple[float, float]:
        """Return the largest median distances of keys and of values that the dump's types explain; 0 for the model's.

        Rounding to a floating-point type moves entries by about a fifth of its ε. Where the engine's own rounding is
        known, each entry has its own limit (`plain_entries.Expected`).
        """
        if self.plain.expected:
            return 0.0, 0.0
        named = [explained_distance(name) for name in (self.dump.dtype, self.dump.compute)]
        own = explained_distance(self.adapter.dtype)
        keys, values = (max(*named, *(explained_distance(one.dtype) for one in tensors)) for tensors in layer.tensors)
        return keys if keys > own else 0.0, values if values > own else 0.0

    def _add(self, name: str, index: int, own: Entries, present: Tensor) -> None:
        """Add which entries of a request there are in one layer, (kv_head, entry)."""
        self.compared[name] += int(present.sum())
        tokens = len(next(request for request in self.live if request.id == name).token_ids)
        kept = tuple(np.unique(row[row != REMOVED].cpu().numpy()) for row in own.positions)
        self.kept[name].append(kept)
        self.removed[name] += sum(tokens - len(positions) for positions in kept)
        self.faults += matching.duplicates(name, index, own)

    def _add_distances(self, name: str, index: int, measured: Distances, far: Tensor, stored: Distances) -> None:
        """Add the largest distances of a request's keys and values in one layer.

        `far`: (kind, kv_head, entry), which differ, whose distances are those of `stored`.
        """
        self.differing[name] += int(far.any(dim=0).sum())
        near = measured.present & ~far
        pairs = [(measured.key, stored.key), (measured.value, stored.value)]
        self.distance[name].append(_largest([own for own, _ in pairs], near))
        self.differing_distance[name].append(_largest([own for _, own in pairs], far))

    def _perturbation(self, name: str, index: int, own: Entries, full: Pair) -> Floats:
        """Return the relative perturbation (head,) of the last token's outputs; NaN where entries are gone."""
        query = self.plain.queries.get(name, {}).get(index)
        if query is None or not distances.is_complete(own, full[0].shape[1]):
            return np.full(self.adapter.heads, np.nan)
        slices = theory.head_slices(self.adapter.output_projection(index), self.adapter.heads)
        plain, dumped = (
            theory.project_outputs(
                theory.attention_output(query, keys, values, self.adapter.scale(index), self.adapter.sinks(index)),
                slices,
            )
            for keys, values in (full, (own.keys.to(query.device), own.values.to(query.device)))
        )
        moved = (dumped - plain).abs().sum(dim=-1) / plain.abs().sum(dim=-1)
        return moved.nan_to_num(nan=torch.inf, posinf=torch.inf).cpu().numpy()

    def _other_layers(self, index: int) -> Iterator[tuple[int, Mapping[str, Pair]]]:
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
            distance, floor, token = self._logprobs(request)
            leeway = 1.0 if name in self.reread else self._coarseness
            if distance > max(self.floors_allowed * floor, min(self.floors_allowed * floor * leeway, _MOST_LOGPROB)):
                times = f"{distance / floor:.3g} noise floors"
                words = f"its log-probability differs by {distance:.3g} nats, {times}: the most of the request"
                faults.append(DumpFault(name, "decoding", words, token, token))
            requests.append(
                DumpedRequest(
                    name, len(request.token_ids), self.compared[name], self.differing[name],
                    np.array(self.distance[name]), np.array(self.differing_distance[name]), self.removed[name],
                    tuple(self.kept[name]) if self.removed[name] else (), np.array(self.perturbation[name]),
                    distance, floor, self.moved.get(name, False),
                )
            )  # fmt: skip
        dump = self.dump
        heads = dump.layers * dump.kv_heads
        faults = matching.join(faults, {name: count / heads for name, count in self.compared.items()})
        return DumpTrace(
            str(dump.path), dump.engine, provenance(self.adapter, {}, len(dump.requests)), dump.layers,
            tuple(requests), tuple(faults), str(self.reader.layout or ""), str(dump.layout or ""),
            self.stored, self.plain.floors, np.array(self.typical), np.array(self.limits),
        )  # fmt: skip

    def _join_coarse(self) -> Iterator[DumpFault]:
        """Yield the faults, with those of entries that are all a little too far away as one."""
        changed: set[int] = set()
        for fault in self.faults:
            if fault.kind == "changed" and not self.plain.expected and self.unexplained_layers.issuperset(fault.layers):
                changed |= set(fault.layers)
            else:
                yield fault
        if changed:
            keys, values = np.median(np.array(self.typical)[sorted(changed)], axis=0)
            away = f"keys typically {100 * keys:.2g} % away, values {100 * values:.2g} %"
            words = f"{away}: more than the dump's types explain"
            yield DumpFault("", "coarse", words, layers=tuple(sorted(changed)))

    @cached_property
    def _coarseness(self) -> float:
        """Ratio of the typical distances of entries to the noise floors; at least 1."""
        return max(1.0, float((np.array(self.typical) / self.plain.floors).max()))

    def _missing(self) -> Iterator[DumpFault]:
        """Yield the requests whose block table is too short for their tokens, and those without an entry in a layer."""
        for request in self.live:
            tokens = len(request.token_ids)
            empty = [layer for layer, kept in enumerate(self.kept[request.id]) if not any(map(len, kept))]
            if empty:
                yield DumpFault(request.id, "missing", "no entry at all", 0, tokens - 1, (), tuple(empty))
            held = len(request.blocks or ()) * self.dump.block_size
            if request.blocks is not None and held < len(request.token_ids):
                everywhere = tuple(range(self.dump.layers))
                yield DumpFault(
                    request.id, "missing", "beyond the block table", held, len(request.token_ids) - 1, (), everywhere
                )

    def _logprobs(self, request: Request) -> tuple[float, float, int]:
        """Return the largest difference of a log-probability from the plain model's, its noise floor, and its token."""
        known = [index for index, value in enumerate(request.logprobs) if value is not None and index]
        if not known:
            return np.nan, np.nan, 0
        engine = torch.tensor([request.logprobs[index] for index in known], dtype=torch.float64)
        plain, *others = (token_logprobs(self.adapter, request.token_ids, parts)[known] for parts in _PARTS)
        floor = max(_LEAST_LOGPROB_FLOOR, *(float((plain - other).abs().amax()) for other in others))
        every = torch.stack([plain, *(logprobs[known] for _, logprobs in self.reread.get(request.id, ()))])
        far = torch.maximum(engine - every.amax(dim=0), every.amin(dim=0) - engine).clamp(min=0).nan_to_num(torch.inf)
        return float(far.amax()), floor, known[int(far.argmax())]

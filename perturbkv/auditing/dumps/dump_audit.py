"""The audit of a dump: every request's entries against the plain model's, layer by layer (METHOD: Engines' caches)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from perturbkv import memory, theory
from perturbkv.analyses.audit.cache_entries import Integers
from perturbkv.analyses.audit.dump_verdict import DumpAudit, DumpedRequest, DumpFault, dump_floors
from perturbkv.analyses.measurements import Floats
from perturbkv.auditing.changes import excess_angles
from perturbkv.auditing.dumps.dump_entries import (
    LEAST_BLOCK,
    DumpReader,
    Entries,
    EntryDistances,
    Limits,
    Pair,
    coarser_type_of,
    common_factor,
    explained_distance,
    is_complete,
    mean_distance,
    measure_distances,
    median_distances,
    nearest_entries,
    truncated_heads,
)
from perturbkv.auditing.dumps.dump_file import REMOVED, Dump, LayerDump, Request, of_heads
from perturbkv.auditing.dumps.matching import LayerReference, duplicate_faults, find_faults, join_faults
from perturbkv.auditing.dumps.plain_entries import (
    Computation,
    LayerReached,
    PlainEntries,
    StoredCache,
    StoredEntries,
    arrange_by_token,
    by_token,
    token_logprobs,
    unrotate_to_tokens,
)
from perturbkv.auditing.dumps.query_heads import describe_read_heads, find_read_heads, own_heads
from perturbkv.auditing.eviction_audit import provenance
from perturbkv.auditing.loss import measure_losses
from perturbkv.auditing.reference import check_attention
from perturbkv.configs.audit_settings import IN_CACHE, ORIGINAL
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt, check_length, check_vocabulary
from perturbkv.devices import dtype_name, full_precision
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache

_DEFAULT = Resources()
_TYPES = ("bfloat16", "float16")
"""Types that an engine computes in, and the plain model can, too."""
_PARTS = (1, 2, 3)
"""Numbers of parts in which tokens are read for the noise floor of their log-probabilities."""
_LEAST_LOGPROB_FLOOR = 1e-3
"""Least noise floor of a log-probability, in nats."""
_MOST_LOGPROB = 2.0
"""Largest difference of a log-probability that coarser entries explain, in nats."""
_UNEXPLAINED = 0.1
"""Largest share of entries that differ which an explanation of all may leave."""
_WITHOUT_CAUSE = {"changed", "unknown"}
"""Kinds of faults that name no cause."""
_CONTEXT = "right in layer 0, from layer 1 on computed after other text"
_SAME_SCALE = 0.02
"""Relative difference up to which two scales may be the same."""
_FEWEST_SCALES = 4
"""Fewest scales from which it is told where all come from."""
_MOST_READ = 64
"""Tokens that differ by which a wrong scale is looked for."""
_EQUAL, _MORE_EQUAL = 0.8, 0.1
"""Least share of numbers that are computed to the bit with the scale that was read; others give less by so much."""
_MOVED = 0.8
"""Least share of the tokens of a run that were moved, where all were computed after other text; tokens after it attend
to them, and a few are moved, too."""
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
) -> DumpAudit:
    """Compare a dump with the plain model's cache of the same tokens.

    Memory holds the plain model's entries of all requests and one layer of the dump; for requests with coarser types or
    faults also their dumped entries and up to eight more caches. `losses`: whether the loss is measured where entries
    are removed; `progress` is called per layer.

    Raises UnreadableCacheError for a dump of another model's shape, and of an engine that computed in a coarser type
    than the model; DatasetError for tokens that the model lacks.
    """
    if dump.compute in _TYPES and explained_distance(dump.compute) > explained_distance(adapter.dtype):
        raise UnreadableCacheError(
            f"{dump.path}: the engine computed in {dump.compute}, whose rounding would look like faults beside the "
            f"plain model in {dtype_name(adapter.dtype)}: use --dtype {dump.compute}"
        )
    check_attention(adapter)
    adapter.check_plain_layers("an audit of a dump")
    adapter.check_no_latents("an audit of a dump")
    for name, found, expected in (
        ("layers", dump.layers, len(adapter.layers)), ("key/value heads", dump.kv_heads, adapter.kv_heads),
        ("components a head", dump.head_size, adapter.d_key),
        ("components a value", dump.head_size, adapter.d_value),
    ):  # fmt: skip
        if found != expected:
            raise UnreadableCacheError(
                f"{dump.path} is of a model with {found} {name}, and {adapter.name} has {expected}"
            )
    if all(request.finished for request in dump.requests):
        raise UnreadableCacheError(f"{dump.path}: nothing was compared: every request has ended")
    prompts = {request.id: Prompt(request.id, request.token_ids, 0) for request in dump.requests}
    for prompt in prompts.values():
        check_vocabulary(prompt, int(adapter.config.vocab_size), adapter.name)
        check_length(prompt, int(adapter.config.max_position_embeddings), 0)
    comparison = _DumpComparison(adapter, dump, PlainEntries(adapter, dump))
    for index in range(dump.layers):
        comparison.add_layer(index)
        progress()
    audit = comparison.result()
    cut = {request.request: request.kept for request in audit.requests if request.kept}
    if losses and cut and not any(fault.kind != "decoding" for fault in audit.faults):
        measured = measure_losses(adapter, [prompts[name] for name in cut], list(cut.values()), resources)
        audit = replace(audit, losses=measured["losses"])
    return audit


@dataclass(frozen=True)
class _Reading:
    """A reading of a request's tokens by the model whose attention reads the dumped entries.

    Attributes:
        layers: keys and values (kv_head, token, width) that it computed for each layer.
        logprobs: the tokens' log-probabilities.
        faultless: whether entries that differ were replaced by computed ones.
    """

    layers: Sequence[Pair]
    logprobs: Tensor
    faultless: bool


def _run_of(chosen: Bool[Tensor, " token"]) -> tuple[int, int]:
    """Return the first and last token of the run with most more tokens that are chosen than others."""
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), (2 * chosen.long() - 1).cumsum(dim=0)])
    lowest, begins = sums[:-1].cummin(dim=0)
    last = int((sums[1:] - lowest).argmax())
    return int(begins[last]), last


def _name_context(found: Sequence[DumpFault], first: int, last: int) -> list[DumpFault]:
    """Return the faults, those without a cause among tokens that were computed after other text as one of them all."""
    return [
        replace(fault, kind="context", what=_CONTEXT, first=first, last=last)
        if first <= fault.first <= fault.last <= last and fault.kind in _WITHOUT_CAUSE
        else fault
        for fault in found
    ]


def _same_scale(one: Tensor, other: Tensor) -> bool:
    """Return whether two scales may be the same."""
    return bool(((one - other).abs() <= _SAME_SCALE * other.abs()).all())


@dataclass(frozen=True)
class _ReadScale:
    """Scales that attention multiplies stored entries by instead of a layer's own.

    Attributes:
        layer: the layer whose scales they are; None: 1.
        kinds: of keys (0), of values (1), or of both.
    """

    layer: int | None
    kinds: tuple[int, ...]

    def ratios(self, scales: Mapping[int, tuple[Tensor, Tensor]], layer: int) -> tuple[Tensor, Tensor]:
        """Return what a layer's keys and values are read as too large by; `scales` are those of the dump, by layer."""
        own, read = scales[layer], (torch.ones(()), torch.ones(())) if self.layer is None else scales[self.layer]
        keys, values = (
            of_heads(read[kind]) / of_heads(own[kind]) if kind in self.kinds else torch.ones(()) for kind in range(2)
        )
        return keys, values

    def ratios_above(
        self, scales: Mapping[int, tuple[Tensor, Tensor]], first: int
    ) -> Iterator[Mapping[int, tuple[Tensor, Tensor]]]:
        """Yield by layer: in the `first` alone, in all from it on, and in these each with the layer's as far away."""
        layers = range(first, len(scales))
        yield {first: self.ratios(scales, first)}
        yield {layer: self.ratios(scales, layer) for layer in layers}
        if self.layer is not None:
            step = self.layer - first
            yield {
                layer: replace(self, layer=layer + step).ratios(scales, layer)
                for layer in layers
                if layer + step in scales
            }


@dataclass
class _RequestComparison:
    """The comparison of a request's entries, layer by layer.

    Attributes:
        request: the request.
        compared, differing: numbers of entries so far.
        distances, differing_distances, perturbations, kept: per layer, as in `DumpedRequest`.
        in_cache: whether keys stand at 0, 1, … in the cache; None where no key has shown it.
        stored: the dumped entries of all layers, where they were read once more.
        replaced: layer -> keys and values that differ (kind, kv_head, token).
        readings: those of the tokens from the dumped entries.
        faults: those found so far.
        context: first and last of the tokens that were computed after other text; None where none were.
    """

    request: Request
    compared: int = 0
    differing: int = 0
    distances: list[tuple[float, float]] = field(default_factory=list)
    differing_distances: list[tuple[float, float]] = field(default_factory=list)
    perturbations: list[Floats] = field(default_factory=list)
    kept: list[tuple[Integers, ...]] = field(default_factory=list)
    in_cache: bool | None = None
    stored: StoredEntries = field(default_factory=StoredEntries)
    replaced: dict[int, Tensor] = field(default_factory=dict)
    readings: list[_Reading] = field(default_factory=list)
    faults: list[DumpFault] = field(default_factory=list)
    context: tuple[int, int] | None = None

    def known(self, index: int, plain: Pair, faultless: bool = False) -> list[Pair]:
        """Return the plain model's keys and values of a layer, then those of the readings; `faultless` ones alone."""
        return [plain, *(one.layers[index] for one in self.readings if one.faultless or not faultless)]

    def add_layer(self, positions: Tensor, measured: EntryDistances, stored: EntryDistances, far: Tensor) -> None:
        """Add one layer's entries.

        Args:
            positions: tokens that they stand for (kv_head, entry).
            measured: their distances after a common factor was removed; recorded of those that do not differ.
            stored: their distances as they were dumped; recorded of those that differ.
            far: which keys and which values differ (kind, kv_head, entry).
        """
        self.compared += int(measured.present.sum())
        self.differing += int(far.any(dim=0).sum())
        self.kept.append(tuple(np.unique(row[row != REMOVED].cpu().numpy()) for row in positions))
        for by_layer, distance, chosen in (
            (self.distances, measured.distance, measured.present & ~far),
            (self.differing_distances, stored.distance, far),
        ):
            keys, values = (
                float(one[mask].amax()) if bool(mask.any()) else np.nan
                for one, mask in zip(distance, chosen, strict=True)
            )
            by_layer.append((keys, values))

    def result(self, logprobs: float, logprobs_floor: float) -> DumpedRequest:
        """Return the request's record, given its log-probabilities' largest distance and noise floor."""
        tokens = len(self.request.token_ids)
        removed = sum(tokens - len(positions) for layer in self.kept for positions in layer)
        return DumpedRequest(
            request=self.request.id, tokens=tokens, compared=self.compared, differing=self.differing, removed=removed,
            distances=np.array(self.distances), differing_distances=np.array(self.differing_distances),
            perturbations=np.array(self.perturbations), logprobs=logprobs, logprobs_floor=logprobs_floor,
            positions=IN_CACHE if self.in_cache else ORIGINAL, kept=tuple(self.kept) if removed else (),
        )  # fmt: skip


class _DumpComparison:
    """The comparison of a dump, layer by layer.

    Attributes:
        adapter, dump, plain: the model, the dump, and the model's entries of the same tokens.
        requests: id -> the comparison of a live request.
        reader: of the dump's entries.
        faults: those found so far.
        typical: of each layer, the median distances of its keys and of its values.
        limits: of each layer, the distances above which a key or a value differs; NaN where each entry has its own.
        floors_allowed: how many noise floors an entry may differ by.
        stored: names of the types that entries are stored in.
        unexplained_layers: layers with median distances that the types do not explain.
        following: layers with entries that follow from faults below.
        coarse: whether entries have fewer bits than the model's.
        factors: (layer, kind) -> the constant that all keys, or values, were multiplied by, where that is a fault.
        read_heads: layer -> the key/value heads that its query heads read, where they are others than their own.
    """

    def __init__(self, adapter: Adapter, dump: Dump, plain: PlainEntries) -> None:
        self.adapter, self.dump, self.plain = adapter, dump, plain
        live = [request for request in dump.requests if not request.finished]
        self.requests = {request.id: _RequestComparison(request) for request in live}
        self.reader = DumpReader(dump, live)
        self.faults: list[DumpFault] = []
        self.typical: list[tuple[float, float]] = []
        self.limits: list[tuple[float, float]] = []
        self.floors_allowed = dump_floors(dtype_name(adapter.dtype))
        self.stored = ""
        self.unexplained_layers: set[int] = set()
        self.following: set[int] = set()
        self.coarse = False
        self.factors: dict[tuple[int, int], float] = {}
        self.read_heads: dict[int, tuple[int, ...]] = {}

    def add_layer(self, index: int) -> None:
        """Compare the entries of the next layer, which is number `index`."""
        layer, plain = self.dump.layer(index), self.plain.layer(index)
        explained = self._explained_distances(layer)
        if index == 0:
            dtypes = {dtype_name(tensor.dtype) for tensors in layer.tensors for tensor in tensors}
            self.stored = self.dump.dtype or ", ".join(sorted(dtypes))
            if layer.block_tensors:
                every = [self.plain.layer(other) for other in range(self.dump.layers)]
                self.faults += self.reader.recognise_layout(layer, every)
            self.coarse = any(explained) or bool(self.plain.expected)
            self._read_again(self.requests if any(explained) else [])
        stored = self._entries(index, layer)
        rounded = (self.plain.expected_distance(index, kind) or 0.0 for kind in range(2))
        floors = (self.floors_allowed * float(floor) for floor in self.plain.floors[index])
        typical = [max(three) for three in zip(explained, rounded, floors, strict=True)]  # what explains a distance
        references = self._nearest_references(index, stored, plain, typical)
        truncated = self._record_rounding(layer, index, stored, references, explained)
        entries, scaled = self._divide_by_factors(index, layer, stored, references, truncated)
        if any(scaled):  # too large, an entry is nearer to another reference
            references = self._nearest_references(index, entries, plain, typical)
        measured = {name: measure_distances(own, references[name]) for name, own in entries.items()}
        # rounding towards zero moves numbers twice as far as rounding to the nearest
        explained = (explained[0] * (1 + truncated[0]), explained[1] * (1 + truncated[1]))
        limits = self._layer_limits(index, median_distances(list(measured.values())), explained)
        nearest = sorted({*range(self.dump.layers)} - {index}, key=lambda other: (abs(other - index), other))
        reference = LayerReference(
            references, {name: self._known(name, index, full) for name, full in plain.items()},
            frozenset(request.id for request in self.dump.requests if request.finished),
            lambda: ((other, self.plain.layer(other)) for other in nearest), self.adapter.frequencies,
            lambda block: self.reader.alternatives(layer, block), layer.largest,
        )  # fmt: skip
        right = []
        for name, own in entries.items():
            allowed = self.plain.limits(name, index, limits, own.positions)
            far = allowed.differing_entries(own, measured[name])
            if bool(far.any()) and (raised := self.plain.raised_limits(name, index, limits, own, measured[name])):
                allowed, far = raised, raised.differing_entries(own, measured[name])
            right.append(replace(measured[name], present=measured[name].present & ~far.any(dim=0)))
            request = self.requests[name]
            if request.differing:
                faultless = request.known(index, plain[name], faultless=True)
                without = measure_distances(own, nearest_entries(own, faultless, typical))
                if bool((allowed.differing_entries(own, without) & ~far).any()):
                    self.following.add(index)
            found = [
                *duplicate_faults(name, index, own), *find_faults(name, index, own, far.any(dim=0), reference, allowed)
            ]  # fmt: skip
            request.faults += self._find_computation(request, index, own, far, found, allowed)
            differing = far.clone()
            far |= measured[name].present & torch.tensor(scaled, device=far.device)[:, None, None]
            request.add_layer(own.positions, measured[name], measure_distances(stored[name], references[name]), far)
            request.perturbations.append(self._output_perturbation(name, index, stored[name], plain[name]))
            if bool(far.any()):
                self._read_faults(request, index, own, references[name], differing, limits.together[0])
        self._record_coarse(index, right)
        if layer.earlier_rounding:
            self.faults.append(DumpFault("", "rounded", " and ".join(layer.earlier_rounding), layers=(index,)))

    def _known(self, name: str, index: int, plain: Pair) -> list[Pair]:
        """Return what is known of a request's keys and values in a layer, the plain model's first."""
        return self.requests[name].known(index, plain) if name in self.requests else [plain]

    def _read_again(self, names: Iterable[str]) -> None:
        """Recompute requests, unless done before, with the dumped entries in place of the model's own.

        An engine attends to its own entries: with fewer bits they differ more from layer to layer, and after a fault
        so do all layers above.
        """
        requests = [self.requests[name] for name in sorted(names) if not self.requests[name].readings]
        like = torch.empty(0, dtype=self.adapter.dtype, device=self.adapter.device)
        for index in range(self.dump.layers if requests else 0):
            layer = self.dump.layer(index)
            entries = self._entries(index, layer)
            for request in requests:
                own, tokens = entries[request.request.id], len(request.request.token_ids)
                request.stored.layers.append(arrange_by_token(own, tokens, like))
                request.stored.scales.append(layer.scales)
                request.stored.dtype = layer.tensors[0][0].dtype
        for request in requests:
            self._read(request)

    def _read(
        self, request: _RequestComparison, computation: Computation | None = None, faultless: bool = False
    ) -> _Reading:
        """Read a request's tokens from its dumped entries, computed as told, and record the reading."""
        cache = StoredCache(request.stored, request.replaced if faultless else {}, computation or Computation())
        with computation.attention(self.adapter) if computation else nullcontext():
            logprobs = token_logprobs(self.adapter, request.request.token_ids, cache=cache)[0]
        layers = [cache.computed_entries(index) for index in range(self.dump.layers)]
        request.readings.append(_Reading(layers, logprobs, faultless))
        return request.readings[-1]

    def _read_faults(
        self, request: _RequestComparison, index: int, own: Entries, reference: Pair, far: Tensor, near: float
    ) -> None:
        """Read a request again after a layer with entries that are `far` from its reference.

        `own` are without a common factor; `near` is what rounding leaves of a key. With the dumped entries in place;
        with keys and queries that are rotated as these keys are, in this layer or from it on; and, where something
        follows from rounding or from faults, without the entries that differ.
        """
        self._read_again([request.request.id])
        tokens = len(request.request.token_ids)
        request.stored.divided[index] = arrange_by_token(own, tokens, request.stored.layers[index][0])
        empty = torch.zeros(far.shape[1], tokens, dtype=torch.bool, device=far.device)
        request.replaced[index] = torch.stack([by_token(kind, own.positions, empty.clone()) for kind in far])
        rotated = [fault for fault in request.faults if fault.kind == "rotation"]
        if {fault.layers for fault in rotated} == {(index,)}:  # the first layer of such a fault
            head = rotated[0].heads[0]
            there = own.positions[head] != REMOVED
            positions = own.positions[head][there]
            excess = excess_angles(
                own.keys[head][there], reference[0][head][positions].float(), positions, self.adapter.frequencies, near
            )
            if excess is not None:
                angles = excess.new_zeros(tokens, excess.shape[-1]).index_copy(0, positions, excess)
                for layers, copied in self._faulty_layers(index):
                    self._read(request, Computation(layers, angles, copied=copied))
        if self.coarse or self.following:
            request.readings = [one for one in request.readings if not one.faultless]
            self._read(request, faultless=True)

    def _faulty_layers(self, index: int) -> Iterator[tuple[frozenset[int], bool]]:
        """Return layers that compute otherwise, this one or all from it on, and whether attention reads no rounding."""
        layers = frozenset({index}), frozenset(range(index, self.dump.layers))
        return product(layers, (False, True) if self.coarse else (False,))

    def _find_computation(
        self,
        request: _RequestComparison,
        index: int,
        own: Entries,
        far: Bool[Tensor, "2 kv_head entry"],
        found: list[DumpFault],
        limits: Limits,
    ) -> list[DumpFault]:
        """Return the faults found in a layer; where they have no cause, with that in the computation below it.

        Such a cause is looked for above layers without any fault.
        """
        if request.context:
            return _name_context(found, *request.context)
        if index == 0 or not found or request.faults or {fault.kind for fault in found} - _WITHOUT_CAUSE - {"token"}:
            return found
        matched = sum(fault.count for fault in found if fault.kind == "token")  # a few are near another's by chance
        if matched > _UNEXPLAINED * sum(fault.count for fault in found):
            return found
        if words := self._find_read_heads(request, index, own, far, limits):
            return [replace(fault, kind="grouping", what=words) for fault in found]
        if words := self._find_read_scale(request, index, own, far, limits):
            return [replace(fault, kind="scale", what=words) for fault in found]
        if index == 1 or request.request.id in self.plain.expected:  # rounding may hide them all in layer 1
            request.context = self._find_context(request, own, far)
        return _name_context(found, *request.context) if request.context else found

    def _find_read_heads(
        self,
        request: _RequestComparison,
        index: int,
        own: Entries,
        far: Bool[Tensor, "2 kv_head entry"],
        limits: Limits,
    ) -> str:
        """Return in words which key/value heads query heads of the layer below read, others than their own.

        Empty where none are found that explain the entries that are `far`. Where they are, their readings are recorded.
        """
        if not 1 < self.adapter.kv_heads < self.adapter.heads:
            return ""
        self._read_again([request.request.id])
        below, tokens, readings = index - 1, request.request.token_ids, list(request.readings)

        def candidates() -> Iterator[tuple[int, ...]]:
            """Yield mappings to try: i mod H_kv first, then that of an earlier request, or one that is searched for."""
            yield tuple(head % self.adapter.kv_heads for head in range(self.adapter.heads))
            if below in self.read_heads:
                yield self.read_heads[below]
                return
            arranged = arrange_by_token(own, len(tokens), request.stored.layers[index][0])
            if found := find_read_heads(self.adapter, tokens, request.stored, arranged, below):
                yield found

        for heads in candidates():
            left = []
            for layers, copied in self._faulty_layers(below):
                computed = self._read(request, Computation(layers, heads=heads, copied=copied)).layers[index]
                left.append(int(limits.differing_entries(own, measure_distances(own, computed)).sum()))
            if min(left) <= _UNEXPLAINED * int(far.sum()):
                self.read_heads[below] = heads
                return describe_read_heads(heads, own_heads(self.adapter).tolist(), below)
            request.readings = list(readings)
        return ""

    def _find_context(
        self, request: _RequestComparison, own: Entries, far: Bool[Tensor, "2 kv_head entry"]
    ) -> tuple[int, int] | None:
        """Return the first and last of the tokens that were computed after other text; None without any.

        They are all in one run, with right ones beside it; `own` and `far` are of the lowest layer with faults. The
        engine's rounding hides many of them: where it is known, their values have to be none that it gives in layer 1,
        and those that it gives in layer 0.
        """
        name, count = request.request.id, len(request.request.token_ids)
        tokens = torch.unique(own.positions[far.any(dim=0)])
        first, last = int(tokens[0]), int(tokens[-1])
        if name in self.plain.expected:
            if not is_complete(own, count):
                return None
            moved = [
                self.plain.moved_values(name, index, self._entries(index, self.dump.layer(index))[name])
                for index in range(2)
            ]
            run = _run_of(moved[1])
            place = torch.arange(count)
            before, inside = place < run[0], (place >= run[0]) & (place <= run[1])
            strange = torch.stack([inside & ~moved[1], before & moved[1], inside & moved[0]]).sum(dim=1)
            if not run[0] <= first <= last <= run[1] or int(strange.max()) > (1 - _MOVED) * int(inside.sum()):
                return None
            first, last = run
        elif not last + 1 - first - LEAST_BLOCK < len(tokens) >= LEAST_BLOCK:
            return None
        return (first, last) if min(last - first + 1, max(first, count - 1 - last)) >= LEAST_BLOCK else None

    def _find_read_scale(
        self,
        request: _RequestComparison,
        index: int,
        own: Entries,
        far: Bool[Tensor, "2 kv_head entry"],
        limits: Limits,
    ) -> str:
        """Return in words by whose scale attention in the layer below multiplied what it read, its own being another.

        Empty where no scale, or more than one, explains the entries that are `far`: with the right one nearly all of
        their stored numbers are computed to the bit. Where one is found, its readings are recorded.
        """
        below = index - 1
        alike: dict[tuple[float, ...], list[_ReadScale]] = {}
        for layer, kinds in product([None, *range(self.dump.layers)], ((0, 1), (0,), (1,))):
            source = _ReadScale(layer, kinds)
            parts = [part.expand(self.dump.kv_heads, 1, 1).flatten() for part in source.ratios(self._scales, below)]
            alike.setdefault(tuple(torch.cat(parts).tolist()), []).append(source)
        sources = [found for numbers, found in alike.items() if set(numbers) != {1.0}]
        if not sources or not is_complete(own, len(request.request.token_ids)):
            return ""
        self._read_again([request.request.id])
        tokens = far.any(dim=0).any(dim=0).nonzero().squeeze(-1)[:_MOST_READ]
        shares = [
            self._share_of_equal(request, index, {below: found[0].ratios(self._scales, below)}, tokens)
            for found in sources
        ]
        best, *others = sorted(range(len(sources)), key=shares.__getitem__, reverse=True)
        least = max([_EQUAL, *(shares[other] + _MORE_EQUAL for other in others)])
        if shares[best] < least or len(sources[best]) > 1:
            return ""
        (source,) = sources[best]
        readings = list(request.readings)
        for ratios in source.ratios_above(self._scales, below):
            computed = self._read(request, Computation(ratios=ratios)).layers[index]
            left = limits.differing_entries(own, measure_distances(own, computed)) & far
            if int(left.sum()) > _UNEXPLAINED * int(far.sum()):
                request.readings = readings
                return ""
        what = " and ".join(("keys", "values")[kind] for kind in source.kinds)
        whose = "out a" if source.layer is None else f" layer {source.layer}'s"
        return f"layer {below} read its {what} with{whose} scale"

    def _share_of_equal(
        self,
        request: _RequestComparison,
        index: int,
        ratios: Mapping[int, tuple[Tensor, Tensor]],
        tokens: Int[Tensor, " token"],
    ) -> float:
        """Return the share of some tokens' stored numbers in a layer that attention gives which reads with `ratios`."""
        cache = StoredCache(request.stored, {}, Computation(ratios=ratios), last=index)
        ids = torch.tensor([request.request.token_ids[: int(tokens[-1]) + 1]], device=self.adapter.device)
        with suppress(LayerReached):
            run_with_cache(self.adapter.base, ids, cache)
        equal = [
            (request.stored.round(index, kind, computed[:, tokens]) == stored[:, tokens]).float().mean()
            for kind, (computed, stored) in enumerate(
                zip(cache.computed_entries(index), request.stored.layers[index], strict=True)
            )
        ]
        return float(torch.stack(equal).mean())

    def _entries(self, index: int, layer: LayerDump) -> dict[str, Entries]:
        """Return the entries of all live requests in one layer, keys at their tokens' positions.

        Where it is not known yet, record whether a request's keys stand at 0, 1, … in the cache instead.
        """
        plain = self.plain.layer(index)
        entries = self.reader.entries(layer, plain)
        for name, own in entries.items():
            request, at_tokens = self.requests[name], unrotate_to_tokens(own, self.adapter.frequencies)
            if request.in_cache is None and not torch.equal(at_tokens.keys, own.keys):
                gone = own.positions.shape[1] < plain[name][0].shape[1] or bool((own.positions == REMOVED).any())
                request.in_cache = gone and mean_distance(at_tokens, plain[name]) < mean_distance(own, plain[name])
            entries[name] = at_tokens if request.in_cache else own
        return entries

    def _nearest_references(
        self, index: int, entries: Mapping[str, Entries], plain: Mapping[str, Pair], typical: Sequence[float]
    ) -> Mapping[str, Pair]:
        """Return, per request and token, the reference that is nearest to the dumped entries.

        References are the plain model's entries, and those that it computed from dumped entries, where it did.
        `typical` are distances of keys and of values that are right.
        """
        return {
            name: nearest_entries(entries[name], self._known(name, index, full), typical) if name in entries else full
            for name, full in plain.items()
        }

    def _record_rounding(
        self,
        layer: LayerDump,
        index: int,
        entries: Mapping[str, Entries],
        references: Mapping[str, Pair],
        explained: Sequence[float],
    ) -> list[bool]:
        """Record keys, or values, that were all rounded towards zero or to fewer bits than the dump's type.

        Returns whether keys, and values, of some head were rounded towards zero, which only types coarser than the
        model's show.
        """
        truncated = [False, False]
        for kind, name in enumerate(("keys", "values")):
            heads = truncated_heads(kind, entries, references, layer) if explained[kind] else ()
            if heads:
                truncated[kind] = True
                every = "all " if len(heads) == self.dump.kv_heads else ""
                words = f"{every}{name} rounded towards zero"
                self.faults.append(DumpFault("", "rounded", words, layers=(index,), heads=() if every else heads))
            if not self.dump.dtype and (found := coarser_type_of(layer, kind)):
                self.faults.append(DumpFault("", "rounded", f"all {name} rounded to {found}", layers=(index,)))
        return truncated

    def _divide_by_factors(
        self,
        index: int,
        layer: LayerDump,
        entries: Mapping[str, Entries],
        references: Mapping[str, Pair],
        truncated: Sequence[bool],
    ) -> tuple[dict[str, Entries], list[bool]]:
        """Return a layer's entries without the constant that all keys, or values, were multiplied by; and which were.

        Such a constant is recorded as a fault, but for numbers that were rounded towards zero, which explains it.
        Numbers that the type cuts off are none.
        """
        factors = [1.0, 1.0]
        for _ in range(2):  # a wrong scale cuts off at another number than it says
            most = [of_heads(largest) / factor for (_, largest), factor in zip(layer.largest, factors, strict=True)]
            cut = {
                name: (keys.clamp(min=-most[0], max=most[0]), values.clamp(min=-most[1], max=most[1]))
                for name, (keys, values) in references.items()
            }
            factors = [common_factor(kind, entries, cut) for kind in range(2)]
        for kind, factor in enumerate(factors):
            if factor != 1 and not truncated[kind]:
                self.factors[index, kind] = factor
        divided = {
            name: replace(own, keys=own.keys / factors[0], values=own.values / factors[1])
            for name, own in entries.items()
        }
        return divided, [factor != 1 for factor in factors]

    @cached_property
    def _scales(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Scales of keys and of values, by layer."""
        return {index: self.dump.layer(index).scales for index in range(self.dump.layers)}

    def _scale_faults(self) -> Iterator[DumpFault]:
        """Yield a fault for keys, or values, of each layer that were multiplied by a constant, with its owner."""
        owner = self._owner_of_all()
        for (index, kind), factor in self.factors.items():
            scales = [both[kind] for both in self._scales.values()]
            same = [layer for layer, scale in enumerate(scales) if torch.equal(scale, scales[index])]
            right = [layer for layer in same if (layer, kind) not in self.factors]
            whose = f", their scale is layer {right[0]}'s" if len(right) == 1 and len(same) < len(scales) else ""
            words = owner or f"multiplied by {factor:.{3 if factor > 1 else 2}g}{whose}"
            yield DumpFault("", "scale", f"all {('keys', 'values')[kind]} {words}", layers=(index,))

    def _owner_of_all(self) -> str:
        """Return in words where the scales come from that all wrong keys and values were multiplied by.

        A scale that is right is the one that the dump gives, over the factor that is left. Empty where none or several
        explain all of them, or where they are too few to tell.
        """
        right = {
            (index, kind): both[kind] / self.factors.get((index, kind), 1)
            for index, both in self._scales.items()
            for kind in range(2)
        }
        steps = (step for step in range(1 - self.dump.layers, self.dump.layers) if step)
        sources = {
            f"read with the scale of layer n {'+' if step > 0 else '-'} {abs(step)} in layer n": {
                (index, kind): (index + step, kind) for index, kind in self.factors
            }
            for step in steps
        }
        sources["read with the other's scale: those of keys and of values are swapped"] = {
            (index, kind): (index, 1 - kind) for index, kind in self.factors
        }
        found = []
        for words, source in sources.items():
            pairs = [(place, other) for place, other in source.items() if other in right]
            told = [(self._scales[index][kind], self._scales[other[0]][other[1]]) for (index, kind), other in pairs]
            explained = [_same_scale(own, right[other]) for (own, _), (_, other) in zip(told, pairs, strict=True)]
            if all(explained) and sum(not _same_scale(*both) for both in told) >= _FEWEST_SCALES:
                found.append(words)
        return found[0] if len(found) == 1 else ""

    def _layer_limits(self, index: int, typical: tuple[float, float], explained: Sequence[float]) -> Limits:
        """Return the limits of a layer's entries, given their median distances and those that the types explain.

        Both are of keys and of values. Records the medians and limits, and a layer that the types do not explain.
        """
        floors = [float(floor) for floor in self.plain.floors[index]]
        unexplained = [
            median > max(self.floors_allowed * max(floors), most)
            for median, most in zip(typical, explained, strict=True)
        ]
        if any(unexplained):
            self.unexplained_layers.add(index)
        medians = [  # of a layer that the types do not explain, what they do explain counts
            most / 2 if odd else median for median, most, odd in zip(typical, explained, unexplained, strict=True)
        ]
        limits = Limits.of_layer(floors, medians, self.floors_allowed, explained)
        single = (np.nan, np.nan) if self.plain.expected else (float(limits.single[0]), float(limits.single[1]))
        self.typical.append(typical)
        self.limits.append(single)
        return limits

    def _record_coarse(self, index: int, others: Sequence[EntryDistances]) -> None:
        """Record a layer whose entries are farther from the plain model's than the engine's rounding puts them.

        All of them, or those that do not differ by themselves, which `others` has as present, if they are not too few.
        """
        for kind, name in enumerate(("keys", "values")):
            expected = self.plain.expected_distance(index, kind)
            if expected is None:
                continue
            most = max(self.floors_allowed * float(self.plain.floors[index, kind]), _FARTHER * expected)
            share = sum(int(one.present.sum()) for one in others) / max(sum(one.present.numel() for one in others), 1)
            rest = median_distances(others)[kind] if share > _UNEXPLAINED else np.inf
            if min(self.typical[index][kind], rest) > most:
                words = f"{name} farther from the plain model's than rounding to {self.stored} moves them"
                self.faults.append(DumpFault("", "coarse", words, layers=(index,)))

    def _explained_distances(self, layer: LayerDump) -> tuple[float, float]:
        """Return the largest median distances of keys and of values that the dump's types explain.

        Rounding to a floating-point type moves entries by about a fifth of its ε. 0 for types that are not coarser than
        the model's, and where the engine's own rounding is known: each entry then has its own limit
        (`plain_entries.ExpectedDistances`).
        """
        if self.plain.expected:
            return 0.0, 0.0
        named = [explained_distance(name) for name in (self.dump.dtype, self.dump.compute)]
        model = explained_distance(self.adapter.dtype)
        keys, values = (max(*named, *(explained_distance(one.dtype) for one in tensors)) for tensors in layer.tensors)
        return keys if keys > model else 0.0, values if values > model else 0.0

    def _output_perturbation(self, name: str, index: int, own: Entries, full: Pair) -> Floats:
        """Return the relative perturbation (head,) of the last token's outputs by the dumped entries.

        NaN where entries are gone or the token's query is not known, infinite where an output is NaN.
        """
        query = self.plain.queries.get(name, {}).get(index)
        if query is None or not is_complete(own, full[0].shape[1]):
            return np.full(self.adapter.heads, np.nan)
        projection = theory.gated_projection(self.adapter.output_projection(index), self.plain.gates[name].get(index))
        slices = theory.head_slices(projection, self.adapter.heads)
        plain, dumped = (
            theory.project_outputs(theory.attention_output(query, keys, values, self.adapter.softmax(index)), slices)
            for keys, values in (full, (own.keys.to(query.device), own.values.to(query.device)))
        )
        moved = (dumped - plain).abs().sum(dim=-1) / plain.abs().sum(dim=-1)
        return moved.nan_to_num(nan=torch.inf, posinf=torch.inf).cpu().numpy()

    def result(self) -> DumpAudit:
        """Return the audit of all layers."""
        requests, faults = [], [*self._join_coarse(), *self._missing_faults(), *self._scale_faults()]
        coarseness = max(1.0, float((np.array(self.typical) / self.plain.floors).max()))
        for name, request in self.requests.items():
            distance, floor, token = self._largest_logprob_distance(request)
            limit = self.floors_allowed * floor
            leeway = 1.0 if request.readings else coarseness  # readings from the dumped entries are as coarse
            if distance > max(limit, min(limit * leeway, _MOST_LOGPROB)):
                times = f"{distance / floor:.3g} noise floors"
                words = f"its log-probability differs by {distance:.3g} nats, {times}: the most of the request"
                faults.append(DumpFault(name, "decoding", words, token, token))
            if request.compared:
                requests.append(request.result(distance, floor))
        dump, heads = self.dump, self.dump.layers * self.dump.kv_heads
        following = self.following.difference(*(fault.layers for fault in faults))
        faults = join_faults(faults, {name: request.compared / heads for name, request in self.requests.items()})
        return DumpAudit(
            dump=str(dump.path), engine=dump.engine, about=provenance(self.adapter, {}, len(dump.requests)),
            layers=dump.layers, requests=tuple(requests), faults=tuple(faults), layout=str(self.reader.layout or ""),
            named_layout=str(dump.layout or ""), stored=self.stored, typical=np.array(self.typical),
            floors=self.plain.floors, limits=np.array(self.limits),
            following=tuple(sorted(following)),
        )  # fmt: skip

    def _join_coarse(self) -> Iterator[DumpFault]:
        """Yield the faults, with those of changed entries in layers that the types do not explain as one."""
        changed: set[int] = set()
        for fault in (*self.faults, *(fault for request in self.requests.values() for fault in request.faults)):
            if fault.kind == "changed" and not self.plain.expected and self.unexplained_layers.issuperset(fault.layers):
                changed |= set(fault.layers)
            else:
                yield fault
        if changed:
            keys, values = np.median(np.array(self.typical)[sorted(changed)], axis=0)
            away = f"keys typically {100 * keys:.2g} % away, values {100 * values:.2g} %"
            words = f"{away}: more than the dump's types explain"
            yield DumpFault("", "coarse", words, layers=tuple(sorted(changed)))

    def _missing_faults(self) -> Iterator[DumpFault]:
        """Yield a fault for a request without an entry in some layers, and for one whose block table is too short."""
        for name, comparison in self.requests.items():
            request, tokens = comparison.request, len(comparison.request.token_ids)
            empty = [layer for layer, kept in enumerate(comparison.kept) if not any(map(len, kept))]
            if empty:
                yield DumpFault(name, "missing", "no entry at all", 0, tokens - 1, (), tuple(empty))
            held = len(request.blocks or ()) * self.dump.block_size
            if request.blocks is not None and held < tokens:
                everywhere = tuple(range(self.dump.layers))
                yield DumpFault(name, "missing", "beyond the block table", held, tokens - 1, (), everywhere)

    def _largest_logprob_distance(self, comparison: _RequestComparison) -> tuple[float, float, int]:
        """Return the largest distance of a log-probability from the model's range, its noise floor, and its token.

        The range is that of the plain model's log-probability of the token and of those from the dumped entries. The
        distance from it, in nats, is 0 inside and infinite for a NaN. The token is given by its index in the request.
        NaN, NaN and 0 where the engine gave no log-probability after the first token.
        """
        request = comparison.request
        given = [index for index, value in enumerate(request.logprobs) if value is not None and index > 0]
        if not given:
            return np.nan, np.nan, 0
        engine = torch.tensor([request.logprobs[index] for index in given], dtype=torch.float64)
        told = [token_logprobs(self.adapter, request.token_ids, parts) for parts in _PARTS]
        plain, *others = (values[given] for values, _ in told)
        floor = max(_LEAST_LOGPROB_FLOOR, told[0][1], *(float((plain - other).abs().amax()) for other in others))
        model = torch.stack([plain, *(one.logprobs[given] for one in comparison.readings)])
        above, below = engine - model.amax(dim=0), model.amin(dim=0) - engine
        distances = torch.maximum(above, below).clamp(min=0).nan_to_num(torch.inf)
        return float(distances.amax()), floor, given[int(distances.argmax())]

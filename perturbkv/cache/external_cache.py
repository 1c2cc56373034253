"""Positions that an external cache keeps, found by matching its entries with the full cache's (METHOD: Audit, 1).

Bitwise equality comes first, by a hash of each entry's key and value. Every other entry is matched with the nearest
one, and its distance is reported, separately for keys and values: a key that was rotated again still has its value, a
value of another head still its key. A cache is given as transformers' `Cache` or as pairs of tensors per layer;
unreadable ones are refused here, in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from perturbkv.errors import UnreadableCacheError

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys (batch, kv_head, entry, d_key) and values (batch, kv_head, entry, d_value) of each layer."""
LayerEntries = tuple[Tensor, Tensor]
"""Keys (kv_head, entry, d_key) and values (kv_head, entry, d_value) of one row of a layer."""


def layer_tensors(cache: Cache | Layers, numbers: Sequence[int] = ()) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values (batch, kv_head, entry, …) per layer.

    Of a transformers cache the layers with these `numbers` are looked at, by default all. Raises UnreadableCacheError
    where a layer is missing, has no `keys` and `values`, or has empty ones and reports entries.
    """
    if not isinstance(cache, Cache):
        return [(keys, values) for keys, values in cache]
    if not (layers := getattr(cache, "layers", None)):
        _refuse(f"no keys to look at: {type(cache).__name__} has no layers")
    numbers = numbers or range(len(layers))
    if max(numbers) >= len(layers):
        _refuse(f"it has {len(layers)} layers, and none for layer {max(numbers)} of the model")
    found = []
    for index in numbers:
        layer, kind = layers[index], type(layers[index]).__name__
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not (isinstance(keys, Tensor) and isinstance(values, Tensor)):
            _refuse(f"no keys to look at: layer {index} ({kind}) has no tensors `keys` and `values`")
        reported = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
        if keys.numel() == 0 and reported:
            _refuse(f"no keys to look at: layer {index} ({kind}) says {reported} entries and its `keys` are empty")
        found.append((keys, values))
    return found


def pair_layers(
    external: Cache | Layers, full: Cache | Layers, row: int = 0, numbers: Sequence[int] = ()
) -> list[tuple[LayerEntries, LayerEntries]]:
    """Return, per layer, the entries of one row in the external and in the full cache, after checking their shapes.

    A full cache of one row is used for every row; `numbers` are those of its layers in the external cache and in
    messages, by default from 0 on. Raises UnreadableCacheError for incompatible shapes.
    """
    external_layers, full_layers = layer_tensors(external, numbers), layer_tensors(full)
    if len(external_layers) != len(full_layers):
        _refuse(f"it has {len(external_layers)} layers, the full cache {len(full_layers)}")
    pairs = list(zip(external_layers, full_layers, strict=True))
    numbers = numbers or range(len(pairs))
    for index, (external_layer, full_layer) in zip(numbers, pairs, strict=True):
        _check_shape(index, external_layer, full_layer, row)
    if isinstance(external, Cache):  # what it reports, and its layers contradict
        reported = {int(external.get_seq_length(index)) for index in numbers}
        lengths = {index: keys.shape[2] for index, (keys, _) in zip(numbers, external_layers, strict=True)}
        wrong = [index for index, length in lengths.items() if length not in reported]
        if len(reported) == 1 and reported != {full_layers[0][0].shape[2]} and wrong:
            _refuse(
                "lengths differ between layers where the cache says that they do not: it says "
                f"{reported.pop()} entries in every layer, and layer {wrong[0]} holds {lengths[wrong[0]]}"
            )
    return [(_select_row(external_layer, row), _select_row(full_layer, row)) for external_layer, full_layer in pairs]


def _select_row(layer: tuple[Tensor, Tensor], row: int) -> LayerEntries:
    """Return one row's keys and values; row 0's if the layer has a single row."""
    index = row if len(layer[0]) > 1 else 0
    return layer[0][index], layer[1][index]


def _check_shape(index: int, layer: tuple[Tensor, Tensor], full: tuple[Tensor, Tensor], row: int) -> None:
    """Raise UnreadableCacheError for a layer of an external cache whose shape does not match the full cache's.

    Args:
        index: number of the layer, for the message.
        layer: its keys and values.
        full: keys and values of the layer in the full cache.
        row: row of the batch that is asked for.
    """
    keys, values = layer
    if {keys.ndim, values.ndim} != {4} or keys.shape[:3] != values.shape[:3]:
        shapes = f"keys {tuple(keys.shape)} and values {tuple(values.shape)}"
        _refuse(f"expected keys and values (batch, kv_head, entry) of one shape in layer {index}, got {shapes}")
    (batch, heads, entries), (_, full_heads, full_entries) = keys.shape[:3], full[0].shape[:3]
    if row >= batch:
        _refuse(f"row {row} of a batch was asked for, and layer {index} holds {batch}")
    if heads != full_heads:
        times, rest = divmod(heads, full_heads)
        why = f"; each {times} times, as `repeat_kv` before caching makes them?" if times > 1 and not rest else ""
        _refuse(f"layer {index} holds {heads} key/value heads, the model has {full_heads}{why}")
    for kind, own, known in zip(("keys", "values"), layer, full, strict=True):
        if own.shape[3] != known.shape[3]:
            _refuse(f"{kind} of layer {index} have {own.shape[3]} components, the model's {known.shape[3]}")
    if entries > full_entries:
        _refuse(f"layer {index} keeps {entries} entries, more than the {full_entries} that there were")


def _refuse(reason: str) -> NoReturn:
    """Raise UnreadableCacheError for the given reason."""
    raise UnreadableCacheError(reason)


def bit_patterns(tensor: Tensor) -> Tensor:
    """Return the bit pattern of each number, as an integer of equal size."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


NOWHERE = -1
"""The position of an entry without a position in the prompt."""
STRANGE_DISTANCE = 0.5
"""Relative distance of both key and value from the nearest entry's above which an entry has no position."""
_LARGER_DISTANCE_WEIGHT = 0.25
"""Weight of the larger of the distances of key and value in the search for the nearest entry."""
_BESIDE_EQUAL_WEIGHT = 0.01
"""The same weight where the other distance is 0: a key or a value to the bit tells the entry by itself."""
_ALTERED_KEY = 0.1
"""Distance of a key from every known one above which it was altered: rounding leaves it nearer to its own."""
_BESIDE_ALTERED_KEY_WEIGHT = 5e-4
"""The weight of the key's distance where the value is equal and the key is no known one: it was altered."""
_BY_VALUE = 0.1
"""What an entry is farther by whose value is near and whose key is not: with another's value it is its key's."""
_CLEARLY_FARTHER = 2
"""Ratio of costs above which one entry is clearly farther than another."""
_TIE_TOLERANCE = 1e-3
"""Difference of distances below which two entries are equally near."""
_FARTHEST = 1e30
"""Distance of entries that are not finite."""
_CHUNK_BYTES = 64 * 2**20
"""Working memory of the search for the nearest entries."""


@dataclass(frozen=True, eq=False)
class RecoveredLayer:
    """The entries of one layer of an external cache per key/value head, in the cache's own order.

    Attributes:
        positions: (entry,) position in the prompt; `NOWHERE` for padding and for an entry that resembles none.
        key_distance, value_distance: (entry,) ‖k − k_j‖₂ relative to the root mean square norm of the head's keys, and
            likewise for values; 0 where bitwise equal.
    """

    positions: tuple[Tensor, ...]
    key_distance: tuple[Tensor, ...]
    value_distance: tuple[Tensor, ...]

    @property
    def duplicate_counts(self) -> list[int]:
        """Number of entries per head that repeat the position of an earlier entry."""
        known = [position[position != NOWHERE] for position in self.positions]
        return [len(position) - len(set(position.tolist())) for position in known]

    @property
    def stranger_counts(self) -> list[int]:
        """Number of entries per head that match no position, padding included."""
        return [int((position == NOWHERE).sum()) for position in self.positions]

    @property
    def ascending(self) -> list[bool]:
        """One flag per head: its entries are in ascending order of position, those that match none left out."""
        known = [position[position != NOWHERE] for position in self.positions]
        return [bool((position[1:] >= position[:-1]).all()) for position in known]

    def mask(self, tokens: int) -> Bool[Tensor, "kv_head key"]:
        """Return the mask, True for kept positions, in a prompt of `tokens` tokens."""
        mask = torch.zeros(len(self.positions), tokens, dtype=torch.bool, device=self.positions[0].device)
        for row, position in zip(mask, self.positions, strict=True):
            row[position[position != NOWHERE]] = True
        return mask


@torch.inference_mode()
def recover_positions(
    external: Cache | Layers,
    full: Cache | Layers,
    row: int = 0,
    padding: int = 0,
    numbers: Sequence[int] = (),
    *,
    count_padding: bool = False,
) -> list[RecoveredLayer]:
    """Return, per layer, the prompt positions of an external cache's entries, found by comparison with the full cache.

    Args:
        external: transformers' `Cache`, or keys and values (batch, kv_head, entry, …) per layer.
        full: cache of the same prompt before eviction.
        row: row of the batch; a full cache of a single row is used for every row.
        padding: entries of padding before the prompt in the full cache's row; an entry that equals one of them and one
            of the prompt is the prompt's. Positions are counted after them, and an entry of padding has none.
        numbers: the layers' numbers in the external cache and in messages, by default from 0 on.
        count_padding: whether positions are counted from the padding's first entry on instead.

    Raises UnreadableCacheError for a cache without keys, layers whose lengths contradict the cache's own report, more
    entries than the prompt has, and shapes other than the full cache's.
    """
    layers: list[RecoveredLayer] = []
    hints: list[Tensor] = []
    for external_layer, full_layer in reversed(pair_layers(external, full, row, numbers)):
        rolled = [entries.roll(-padding, dims=1) for entries in full_layer] if padding else full_layer
        entries, heads = external_layer[0].shape[1], len(external_layer[0])
        whole = entries == full_layer[0].shape[1]
        if [len(hint) for hint in hints] != [entries] * heads:
            places = torch.arange(entries, device=external_layer[0].device)
            hints = [(places - padding) % entries if whole else torch.full_like(places, NOWHERE)] * heads
        matched = [_match_head(*head, whole=whole) for head in zip(*external_layer, *rolled, hints, strict=True)]
        hints = [index for index, _, _ in matched]
        tokens = full_layer[0].shape[1]  # of the full cache, whose padding comes last, and is nowhere unless counted
        positions = tuple(
            torch.where(index >= 0, (index + padding) % tokens, NOWHERE)
            if count_padding
            else torch.where(index < tokens - padding, index, NOWHERE)
            for index in hints
        )
        layers.append(RecoveredLayer(positions, *(tuple(head[kind] for head in matched) for kind in (1, 2))))
    return layers[::-1]


def _match_head(
    key: Float[Tensor, "entry d_key"],
    value: Float[Tensor, "entry d_value"],
    full_key: Float[Tensor, "full_entry d_key"],
    full_value: Float[Tensor, "full_entry d_value"],
    hints: Int[Tensor, " entry"],
    *,
    whole: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (entry,) the index of the full-cache entry of each entry of a head, and its key and value distances.

    An entry that resembles none is `NOWHERE`. Of full-cache entries that are equally near, the one of `hints` is
    taken, which the layer after it has at the same place, else the first. In a `whole` cache, that holds as many
    entries as there were, it is taken unless another is much nearer, or some other entry's.
    """
    indices = _equal_indices(key, value, full_key, full_value, hints)
    distances = [torch.zeros(len(key), device=key.device) for _ in range(2)]
    unmatched = (indices == NOWHERE).nonzero().squeeze(-1)
    if len(unmatched):
        scaled, full_scaled = _scale(key[unmatched], value[unmatched], full_key, full_value)
        free = torch.ones(len(full_key), dtype=torch.bool, device=key.device)
        free[indices[indices != NOWHERE]] = False
        nearest = _Nearest(scaled, full_scaled, free, hints[unmatched], whole=whole).indices()
        strange = torch.fmin(*_distances(scaled, full_scaled, nearest)) > STRANGE_DISTANCE
        nothing = ~(key[unmatched].any(dim=-1) | value[unmatched].any(dim=-1))  # resembles nothing
        indices[unmatched] = nearest.masked_fill(strange | nothing, NOWHERE)
        if whole:
            _fill_places(indices, hints, unmatched[strange & ~nothing], unmatched[nothing])
        nearest = torch.where(indices[unmatched] == NOWHERE, nearest, indices[unmatched])
        for distance, found in zip(distances, _distances(scaled, full_scaled, nearest), strict=True):
            distance[unmatched] = found
    return indices, distances[0], distances[1]


def _distances(scaled: Sequence[Tensor], full_scaled: Sequence[Tensor], index: Int[Tensor, " entry"]) -> list[Tensor]:
    """Return the distances of [keys, values] from the full cache's entries at the given indices."""
    return [torch.linalg.vector_norm(own - full[index], dim=-1) for own, full in zip(scaled, full_scaled, strict=True)]


def _fill_places(indices: Tensor, hints: Tensor, strange: Int[Tensor, " strange"], nothing: Tensor) -> None:
    """Assign places that are left to entries that resemble none: their own if it is free, else the next free one.

    `indices` are changed; `strange` are these entries, `nothing` zero ones, which get none and whose own stay free.
    """
    own = strange[~torch.isin(hints[strange], indices) & (_cumulative_count(hints[strange]) == 0)]
    indices[own] = hints[own]
    left = strange[indices[strange] == NOWHERE]
    places = torch.arange(len(indices), device=indices.device)
    taken = torch.cat([indices, hints[nothing]])
    indices[left] = places[~torch.isin(places, taken)][: len(left)]


def _equal_indices(
    key: Tensor, value: Tensor, full_key: Tensor, full_value: Tensor, hints: Int[Tensor, " entry"]
) -> Int[Tensor, " entry"]:
    """Return, per entry, the index of the bitwise equal entry in the full cache, else `NOWHERE`.

    Entries that are equal to each other get different indices as far as the full cache has as many, those of `hints`
    where these are equal too.
    """
    nowhere = torch.full((len(key),), NOWHERE, device=key.device)
    if key.dtype != full_key.dtype or value.dtype != full_value.dtype or not len(key):
        return nowhere
    entries, full_entries = torch.cat([key, value], dim=-1), torch.cat([full_key, full_value], dim=-1)
    hashes = _hash(entries)
    ordered, order = _hash(full_entries).sort(stable=True)
    begin, end = torch.searchsorted(ordered, hashes), torch.searchsorted(ordered, hashes, right=True)
    index = order[torch.minimum(begin + _cumulative_count(hashes), end - 1).clamp(min=0)]
    bits, full_bits = bit_patterns(entries), bit_patterns(full_entries)
    equal = (end > begin) & (bits == full_bits[index]).all(dim=-1)  # equal hashes are no proof
    hinted = equal & (hints != NOWHERE) & (bits == full_bits[hints]).all(dim=-1)
    preferred = torch.where(hinted, hints, index)
    if len(set(preferred[equal].tolist())) == len(set(index[equal].tolist())):
        index = preferred
    return torch.where(equal, index, nowhere)


def _hash(entries: Float[Tensor, "entry component"]) -> Int[Tensor, " entry"]:
    """Return an integer hash of each entry's bits."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (entries.shape[-1],), generator=generator) | 1
    return (bit_patterns(entries).to(torch.int64) * factors.to(entries.device)).sum(dim=-1)


def _cumulative_count(numbers: Int[Tensor, " entry"]) -> Int[Tensor, " entry"]:
    """Return, per number, the count of earlier equal numbers, as pandas' `cumcount`."""
    ordered, order = numbers.sort(stable=True)
    first = torch.searchsorted(ordered, ordered)
    counts = torch.arange(len(numbers), device=numbers.device) - first
    return torch.empty_like(counts).scatter_(0, order, counts)


def _scale(key: Tensor, value: Tensor, full_key: Tensor, full_value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return [keys, values] of the external and of the full cache, divided by the RMS norm of the full cache's kind."""
    scaled, full_scaled = [], []
    for vectors, full_vectors in ((key, full_key), (value, full_value)):
        unit = full_vectors.float().square().sum(dim=-1).mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        scaled.append(vectors.float() / unit)
        full_scaled.append(full_vectors.float() / unit)
    return scaled, full_scaled


class _Nearest:
    """The nearest full-cache entry of each entry of a head; none is taken twice, but by entries that are one.

    Args:
        scaled, full_scaled: [keys, values] of the entries, and of the full cache, scaled.
        free: (full_entry,) True for the full cache's entries that may be taken.
        hints: (entry,) the full-cache entry to prefer where several are equally near; `NOWHERE` for none.
        whole: whether it is to be preferred where it is nearly as near, too.
    """

    def __init__(
        self,
        scaled: Sequence[Tensor],
        full_scaled: Sequence[Tensor],
        free: Tensor,
        hints: Tensor,
        *,
        whole: bool = False,
    ) -> None:
        self.slack = _CLEARLY_FARTHER if whole else 1
        self.scaled, self.full_scaled, self.free, self.hints = scaled, full_scaled, free.clone(), hints
        self.taken = [kind.clone() for kind in full_scaled]
        """[keys, values] of the entries that took each of the full cache's."""
        hinted = full_scaled[1][hints.clamp(min=0)]
        same_values = torch.linalg.vector_norm(scaled[1] - hinted, dim=-1) <= _TIE_TOLERANCE
        self.values_agree = bool(((hints != NOWHERE) & same_values).all())
        """Whether every entry has the value of its hint: this layer then holds the entries of the one after it."""

    def indices(self) -> Int[Tensor, " entry"]:
        """Return, per entry, the index of its full-cache entry.

        Where several want the same one, the nearest gets it, and the others the next nearest that is free; but one with
        the winner's key or value, and to which no free one is nearly as near, is that entry once more.
        """
        waiting = torch.arange(len(self.scaled[0]), device=self.free.device)
        cost, index = self._search(waiting, torch.ones_like(self.free))
        while True:
            ranked = waiting[cost[waiting].argsort(stable=True)]
            wins = (_cumulative_count(index[ranked]) == 0) & self.free[index[ranked]]
            for kind, own in zip(self.taken, self.scaled, strict=True):
                kind[index[ranked[wins]]] = own[ranked[wins]]
            self.free[index[ranked[wins]]] = False
            waiting = ranked[~wins].sort().values
            if not len(waiting) or not bool(self.free.any()):
                return index
            next_cost, next_index = self._search(waiting, self.free)
            keys, values = (  # which have the key or the value of the one that took theirs; rounded ones both
                (own[waiting] == kind[index[waiting]]).all(dim=-1)
                for own, kind in zip(self.scaled, self.taken, strict=True)
            )
            again = torch.where(cost[waiting] > _BY_VALUE, keys & values, keys | values)
            again &= next_cost > _CLEARLY_FARTHER * cost[waiting] + _TIE_TOLERANCE
            waiting, next_cost = waiting[~again], next_cost[~again]
            cost[waiting], index[waiting] = next_cost, next_index[~again]
            waiting = waiting[next_cost <= 2 * STRANGE_DISTANCE]  # the others are like none, whichever is nearest
            if not len(waiting):
                return index

    def _search(self, entries: Int[Tensor, " chosen"], among: Bool[Tensor, " full_entry"]) -> tuple[Tensor, Tensor]:
        """Return the costs and the indices of the nearest full-cache entries of some entries.

        Of those that are equally near the hinted one is chosen, else a free one, in the prompt's order. Where every
        entry has its hint's value, those with altered keys get the hinted one however far its key is.
        """
        size = max(1, _CHUNK_BYTES // (24 * len(among)))  # six float32 matrices
        costs, indices, free = [], [], self.free.clone()
        for chosen in torch.split(entries, size):
            distances = [
                torch.cdist(own[chosen], full) for own, full in zip(self.scaled, self.full_scaled, strict=True)
            ]
            smaller, larger = torch.fmin(*distances), torch.fmax(*distances)  # leave out NaN
            altered = distances[0].amin(dim=-1) > _ALTERED_KEY
            equal_value = altered.unsqueeze(-1) & (distances[1] <= _TIE_TOLERANCE)
            weight = torch.where(smaller <= _TIE_TOLERANCE, _BESIDE_EQUAL_WEIGHT, _LARGER_DISTANCE_WEIGHT)
            cost = smaller + larger * weight.masked_fill(equal_value, _BESIDE_ALTERED_KEY_WEIGHT)
            cost += _BY_VALUE * (~equal_value & (distances[0] > distances[1] + STRANGE_DISTANCE / 2))
            cost = cost.nan_to_num(nan=_FARTHEST, posinf=_FARTHEST).masked_fill(~among, torch.inf)
            best = cost.amin(dim=-1, keepdim=True)
            ties, hints = cost <= best + _TIE_TOLERANCE, self.hints[chosen]
            both = (smaller + _LARGER_DISTANCE_WEIGHT * larger).nan_to_num(nan=_FARTHEST, posinf=_FARTHEST)
            both = both.masked_fill(~ties, torch.inf)
            ties &= both <= both.amin(dim=-1, keepdim=True) + _TIE_TOLERANCE  # near in key and value
            index = ties.to(torch.uint8).argmax(dim=-1)
            place = _cumulative_count(index)
            later = (place + 1 > free[index].long()).nonzero().squeeze(-1)  # the first tie is another one's
            reached = (ties[later] & free).cumsum(dim=-1, dtype=torch.int32) == place[later].unsqueeze(-1) + 1
            index[later] = torch.where(reached.any(dim=-1), reached.to(torch.uint8).argmax(dim=-1), index[later])
            of_hint = cost.gather(1, hints.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            hinted = (hints != NOWHERE) & (of_hint <= self.slack * best.squeeze(-1) + _TIE_TOLERANCE)
            if self.values_agree:
                hinted |= altered & among[hints]
            costs.append(best.squeeze(-1))
            indices.append(torch.where(hinted, hints, index))
            free[indices[-1]] = False
        return torch.cat(costs), torch.cat(indices)

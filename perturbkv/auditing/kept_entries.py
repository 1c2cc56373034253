"""Finding a foreign cache's entries among the prompt's, and naming how they were changed (METHOD: Audit, 1 and 2).

Entries are matched at every forward pass. An entry that differs from the full cache's is tested for known changes: a
rotation, a quantisation, another head's entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from perturbkv.audit_trace import CacheEntries, Integers
from perturbkv.auditing.reference import EntryFloors, Seen, visible
from perturbkv.auditing.situations import Situation
from perturbkv.cache.external_cache import NOWHERE, LayerKept, Layers, recover
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter


@dataclass
class Reading:
    """The entries of one eviction's caches in one situation, pass by pass.

    Attributes:
        full: the plain model's entries of the prompts.
        masks: per forward pass and layer (row, kept_head, entry) True where an entry of a prompt, or one decoded
            before, is attended to; padding left out.
        first: per row and layer the entries at the first pass.
        attended: per row and layer (kept_head, entry) which of those entries the attention sees.
        held: per layer the cache's own keys and values.
        changed: per row, passes at which entries went or changed.
    """

    adapter: Adapter
    situation: Situation
    full: Layers
    masks: list[list[Tensor]] = field(default_factory=list)
    first: list[list[LayerKept]] = field(default_factory=list)
    attended: list[list[Tensor]] = field(default_factory=list)
    held: Layers = field(default_factory=list)
    changed: list[list[int]] = field(default_factory=list)
    _own: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    _last: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def take(self, seen: Seen) -> None:
        """Read the entries that one forward pass attended to. Raises UnreadableCacheError."""
        layers = range(len(self.full))
        theirs = [seen.before(layer) for layer in layers]
        shown = [_shown(seen, layer) for layer in layers]
        if self._is_unchanged(theirs) and all(one is None for one in shown):
            self.masks.append([_append_new(mask, self._new) for mask in self.masks[-1]])
        else:
            self._read(theirs, shown)
        self._own.append([seen.own(layer) for layer in layers])
        self._last = [(seen.key[layer], seen.value[layer]) for layer in layers]

    @property
    def _new(self) -> int:
        """The number of tokens of the pass that was read last."""
        return int(self._own[-1][0][0].shape[2])

    def _is_unchanged(self, theirs: Layers) -> bool:
        """Return whether every layer holds exactly the entries of the previous pass and its tokens."""
        return bool(self._last) and all(
            torch.equal(one, last) for now, before in zip(theirs, self._last, strict=True)
            for one, last in zip(now, before, strict=True)
        )  # fmt: skip

    def _read(self, theirs: Layers, shown: Sequence[Tensor | None]) -> None:
        """Match every entry with the prompt's and those decoded since."""
        if len(heads := {keys.shape[1] for keys, _ in theirs}) > 1:
            msg = f"layers hold different numbers of heads: {', '.join(map(str, sorted(heads)))}"
            raise UnreadableCacheError(msg)
        whole = self._all_entries(theirs)
        rows = [recover(theirs, whole, row) for row in range(self.situation.rows)]
        masks, looked = [], []
        for layer, (keys, _) in enumerate(theirs):
            seen = shown[layer]
            attended = list(torch.ones_like(keys[..., 0], dtype=torch.bool) if seen is None else seen)
            masks.append(self._mask([one[layer] for one in rows], attended, whole[layer][0].shape[2]))
            looked.append(attended)
        if self.first:
            self._note_change(masks)
        else:
            self.first, self.held, self.changed = rows, theirs, [[] for _ in rows]
            self.attended = [list(layers) for layers in zip(*looked, strict=True)]
        self.masks.append(masks)

    def _all_entries(self, theirs: Layers) -> list[tuple[Tensor, Tensor]]:
        """Return the prompts' entries and those decoded since, with as many heads as the foreign cache has."""
        found = []
        for layer, (keys, values) in enumerate(self.full):
            both = [(keys, values), *(per_heads(one[layer], keys.shape[1]) for one in self._own)]
            joined = tuple(torch.cat(kind, dim=2) for kind in zip(*both, strict=True))
            found.append(repeated((joined[0], joined[1]), theirs[layer][0].shape[1]))
        return found

    def _mask(self, rows: Sequence[LayerKept], attended: Sequence[Tensor], entries: int) -> Tensor:
        """Return one layer's mask (row, kept_head, entry), without padding."""
        masks = []
        for one, seen, padding in zip(rows, attended, self.situation.padding, strict=True):
            mask = torch.zeros(len(one.positions), entries, dtype=torch.bool, device=seen.device)
            for own, places, looked in zip(mask, one.positions, seen, strict=True):
                own[places[looked & (places >= padding)]] = True
            masks.append(mask)
        return torch.stack(masks)

    def _note_change(self, masks: Sequence[Tensor]) -> None:
        """Record the rows in which entries went or came back."""
        for row, changed in enumerate(self.changed):
            before = [_append_new(mask[row : row + 1], self._new) for mask in self.masks[-1]]
            if any(not torch.equal(one, mask[row : row + 1]) for one, mask in zip(before, masks, strict=True)):
                changed.append(len(self.masks))


def repeated(layer: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values repeated per query head, where the cache has as many heads."""
    times = max(1, heads // layer[0].shape[1])
    if times * layer[0].shape[1] != heads:
        return layer
    return layer[0].repeat_interleave(times, dim=1), layer[1].repeat_interleave(times, dim=1)


def per_heads(layer: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Return the first head of each group, where a cache stores keys and values once per query head."""
    every = max(1, layer[0].shape[1] // heads)
    return layer[0][:, ::every], layer[1][:, ::every]


def _append_new(mask: Tensor, new: int) -> Tensor:
    return torch.cat([mask, mask.new_ones(*mask.shape[:2], new)], dim=-1)


def _shown(seen: Seen, layer: int) -> Bool[Tensor, "row kept_head entry"] | None:
    """Return which entries before the new tokens any of them sees; None where all are."""
    rows, heads, entries = seen.key[layer].shape[:3]
    new, hidden = seen.query[layer].shape[2], seen.hidden_keys[layer]
    allowed = visible(seen.mask[layer], entries, new)
    if allowed is None and hidden is None:
        return None
    found = torch.ones(rows, heads, entries - new, dtype=torch.bool, device=seen.key[layer].device)
    if allowed is not None:
        by_mask = allowed.any(dim=-2)[..., : entries - new]
        found &= by_mask[:, :: max(1, by_mask.shape[1] // heads)]
    if hidden is not None:
        found[tuple(torch.as_tensor(places, device=found.device) for places in hidden)] = False
    return None if bool(found.all()) else found


_MOST = 32
"""Entries of a head that are tested for a rotation."""
_NEAR = 0.02
"""Largest remaining distance, over the entry's length, at which a rotation or a quantisation explains an entry."""
_BITS = (8, 4, 2)


def rotations(
    found: Float[Tensor, "entry d_head"],
    full: Float[Tensor, "entry d_head"],
    frequencies: Float[Tensor, " frequency"],
    most: int,
) -> Int[Tensor, " entry"] | None:
    """Return by how many positions, −most to most, each key was rotated in excess; None where no rotation explains it.

    Component i pairs with i + frequencies, as in `perturbkv.cache.entries.rotate_keys`.
    """
    half = len(frequencies)
    one, other = _pairs(found, half), _pairs(full, half)
    cross = one * other.conj()
    shifts = torch.arange(-most, most + 1, device=found.device)
    angles = shifts.double().unsqueeze(-1) * frequencies.to(found.device).double()
    matched = angles.cos() @ cross.real.T + angles.sin() @ cross.imag.T
    best = matched.argmax(dim=0)
    turned = other * torch.polar(torch.ones_like(angles[best]), angles[best])
    length = torch.linalg.vector_norm(full.double(), dim=-1)
    rest = torch.linalg.vector_norm(found[:, 2 * half :].double() - full[:, 2 * half :].double(), dim=-1)
    left = torch.hypot(torch.linalg.vector_norm(one - turned, dim=-1), rest)
    return shifts[best] if bool((left <= _NEAR * length).all()) else None


def _pairs(keys: Float[Tensor, "entry d_head"], half: int) -> Tensor:
    """Return rotary components as complex numbers (entry, frequency)."""
    work = keys.double()
    return torch.complex(work[:, :half], work[:, half : 2 * half])


def rotation(
    found: Float[Tensor, "entry d_head"],
    full: Float[Tensor, "entry d_head"],
    places: Int[Tensor, " entry"],
    frequencies: Float[Tensor, " frequency"],
    most: int,
) -> str:
    """Return in words the rotation by which keys differ; empty where there is none.

    `found` are a head's keys in the cache's order, `full` those of the full cache at `places`.
    """
    chosen = torch.linspace(0, len(found) - 1, min(len(found), _MOST), device=found.device).round().long()
    turned = rotations(found[chosen], full[chosen], frequencies, most)
    if turned is None or not bool(turned.any()):
        return ""
    own = places[chosen]
    if bool((turned == own).all()):
        return "rotated again, each by its own position"
    if bool((turned == turned[0]).all()):
        return f"rotated by {int(turned[0])} more positions"
    if bool((turned == chosen - own).all()):
        return "moved to their places inside the cache"
    return "rotated, each by a number of positions of its own"


def quantised(
    found: Float[Tensor, "entry d_head"],
    full: Float[Tensor, "entry d_head"],
    whole: Float[Tensor, "place d_head"],
) -> str:
    """Return in words the quantisation that turns `full` into `found`; empty where none does.

    Scales are taken per entry, per channel and per head, of the entries that stay and of the `whole` head, from the
    largest magnitude or from the range.
    """
    for bits in _BITS:
        for words, like in _quantisations(full.float(), whole.float(), bits):
            off = torch.linalg.vector_norm(found.float() - like, dim=-1)
            plain = torch.linalg.vector_norm(full.float() - like, dim=-1)
            if bool((off <= torch.maximum(0.2 * plain, _rounding(found))).float().mean() > 0.95):
                return f"quantised to {bits} bits {words}"
    return ""


def _rounding(found: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(found.float(), dim=-1)
    return 2 * torch.finfo(found.dtype).eps * length


def _quantisations(full: Tensor, whole: Tensor, bits: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries under each quantisation with `bits` bits, with its name."""
    for words, scaled in (("per entry", full), ("per channel", whole), ("per channel", full), ("per head", whole),
                          ("per head", full)):  # fmt: skip
        low, high = _ends(scaled, words)
        largest = torch.maximum(high, -low)
        for step, zero in (
            (largest / (2 ** (bits - 1) - 1), torch.zeros_like(low)),
            (largest / 2 ** (bits - 1), torch.zeros_like(low)),
            ((high - low) / (2**bits - 1), low),
        ):
            safe = step.clamp(min=torch.finfo(torch.float32).tiny)
            yield words, ((full - zero) / safe).round() * safe + zero


def _ends(values: Tensor, words: str) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of each group that shares a scale."""
    if words == "per head":
        return values.amin(), values.amax()
    dim = -1 if words == "per entry" else 0
    return values.amin(dim=dim, keepdim=True), values.amax(dim=dim, keepdim=True)


def matching_head(found: Float[Tensor, "entry d_head"], full: Float[Tensor, "kv_head entry d_head"]) -> int | None:
    """Return the head whose entries at the same positions are bit-equal to these; None where no head's are."""
    return next((head for head, entries in enumerate(full) if torch.equal(entries.to(found.dtype), found)), None)


FLOORS = 4
"""A difference exceeds this many noise floors (METHOD: Audit)."""
_KEYS = 0


class Judge:
    """Comparison of one row's entries, as they were at the first forward pass, with the full cache's."""

    def __init__(self, reading: Reading, row: int, floors: EntryFloors) -> None:
        self.reading, self.row, self.floors = reading, row, floors
        self.found, self.attended = reading.first[row], reading.attended[row]
        self.padding = reading.situation.padding[row]

    def entries(self) -> CacheEntries:
        """Return everything that METHOD's points 1 and 2 ask for."""
        layers = range(len(self.found))
        return CacheEntries(
            kept=tuple(tuple(self._sets(layer, self._kept)) for layer in layers),
            padded=self._numbers(lambda layer: self._sets(layer, self._padding_count)),
            strangers=self._numbers(lambda layer: self._sets(layer, _unknown_count)),
            duplicates=self._numbers(lambda layer: self._sets(layer, _duplicate_count)),
            unordered=self._numbers(lambda layer: self.found[layer].ascending) == 0,
            key_distance=self._numbers(lambda layer: self._largest_distances(layer, self.found[layer].key_distance)),
            value_distance=self._numbers(
                lambda layer: self._largest_distances(layer, self.found[layer].value_distance)
            ),
            key_floor=self.floors.key.double().numpy(),
            value_floor=self.floors.value.double().numpy(),
            altered=tuple(tuple(self._altered(layer)) for layer in layers),
            repeated=tuple(layer for layer in layers if self._is_repeated(layer)),
            changed=tuple(self.reading.changed[self.row]),
        )

    def _numbers(self, of: Callable[[int], Any]) -> NDArray[Any]:
        return np.array([list(of(layer)) for layer in range(len(self.found))])

    def _sets(self, layer: int, of: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        pairs = zip(self.found[layer].positions, self.attended[layer], strict=True)
        return [of(places, seen) for places, seen in pairs]

    def _largest_distances(self, layer: int, distances: Sequence[Tensor]) -> list[float]:
        """Return the largest distance of each head's attended entries."""
        pairs = zip(distances, self.attended[layer], strict=True)
        return [float(one[seen].amax()) if bool(seen.any()) else 0.0 for one, seen in pairs]

    def _kept(self, places: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> Integers:
        own = places[seen & (places >= self.padding)] - self.padding
        return np.unique(own.cpu().numpy())

    def _padding_count(self, places: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> int:
        return int(((places >= 0) & (places < self.padding) & seen).sum())

    def _is_repeated(self, layer: int) -> bool:
        """Return whether a layer stores every entry once per query head, and all heads of a group keep the same."""
        adapter, positions = self.reading.adapter, self.found[layer].positions
        group = adapter.heads // adapter.kv_heads
        if group == 1 or len(positions) != adapter.heads:
            return False
        return all(torch.equal(one, positions[head - head % group]) for head, one in enumerate(positions))

    def _altered(self, layer: int) -> list[str]:
        """Return in words how each head's keys and values were changed."""
        found = self.found[layer]
        kinds = (
            ("keys", self._largest_distances(layer, found.key_distance), self.floors.key),
            ("values", self._largest_distances(layer, found.value_distance), self.floors.value),
        )
        said = []
        for head in range(len(found.positions)):
            far = [kind for kind, (_, distance, floor) in enumerate(kinds) if distance[head] > FLOORS * floor[layer]]
            if far and self._mismatched(layer, head):
                said.append("values of other entries than their keys")
            else:
                said.append(", ".join(f"{kinds[k][0]} {self._words(layer, head, k) or 'changed'}" for k in far))
        return said

    def _mismatched(self, layer: int, head: int) -> bool:
        """Return whether all keys and all values are bit-equal to the full cache's but come from different entries."""
        seen = self.attended[layer][head]
        alone = [
            recover([(_single(theirs[self.row, head, seen]),) * 2], [(_single(self._own(full, layer, head)),) * 2])[0]
            for theirs, full in zip(self.reading.held[layer], self.reading.full[layer], strict=True)
        ]
        exact = not any(bool(one.key_distance[0].any()) for one in alone)
        return exact and not torch.equal(alone[0].positions[0], alone[1].positions[0])

    def _own(self, full: Tensor, layer: int, head: int) -> Tensor:
        """Return the full cache's entries (entry, d_head) of a kept set's head."""
        return full[self.row][head * full.shape[1] // len(self.found[layer].positions)]

    def _words(self, layer: int, head: int, kind: int) -> str:
        """Return the known change of a head's keys or values; empty where none is known."""
        places = self.found[layer].positions[head]
        theirs = self.reading.held[layer][kind][self.row, head]
        placed = (places >= 0) & self.attended[layer][head]
        theirs, places = theirs[placed], places[placed]
        if not len(places):
            return ""
        full = self.reading.full[layer][kind][self.row]
        own = self._own(self.reading.full[layer][kind], layer, head)
        other = matching_head(theirs, full[:, places])
        if other is not None:
            return f"of head {other}"
        if kind == _KEYS and (turned := self._rotation(theirs, own[places], places)):
            return turned
        return quantised(theirs, own[places], own)

    def _rotation(self, theirs: Tensor, own: Tensor, places: Int[Tensor, " entry"]) -> str:
        frequencies, most = self.reading.adapter.frequencies, 2 * self.reading.situation.entries
        return rotation(theirs, own, places - self.padding, frequencies, most)


def _unknown_count(places: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> int:
    return int((places[seen] == NOWHERE).sum())


def _duplicate_count(places: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> int:
    placed = places[seen & (places != NOWHERE)]
    return len(placed) - len(set(placed.tolist()))


def _single(entries: Float[Tensor, "entry d_head"]) -> Float[Tensor, "1 1 entry d_head"]:
    return entries[None, None]

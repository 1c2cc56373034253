"""Matching of an external cache's entries with the prompt's, and what was changed in them (METHOD: Audit, 1 and 2).

Entries are matched at every forward pass. An entry that differs from the full cache's is tested for known changes: a
rotation, a quantisation, another head's entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from perturbkv.audit_trace import FLOORS, IN_CACHE, ORIGINAL, CacheEntries, Change, Integers
from perturbkv.auditing import changes
from perturbkv.auditing.positions import (
    Held,
    convention_distances,
    describe_wrong_rotation,
    held_entries,
    match_all_at_zero,
)
from perturbkv.auditing.reference import EntryFloors, ForwardPass, boolean_mask
from perturbkv.auditing.situations import Situation
from perturbkv.cache.external_cache import NOWHERE, STRANGE, LayerKept, Layers, recover
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter


@dataclass
class EntryTracker:
    """The entries of an eviction's caches in one situation, matched pass by pass.

    Attributes:
        full: the plain model's entries of the prompts.
        masks: per forward pass and layer (row, kept_head, entry) True where an entry of a prompt, or one decoded
            before, is attended to; padding left out.
        first: per row and layer the entries at the first pass.
        attended: per row and layer (kept_head, entry) True where the attention sees that entry.
        cached: per layer the keys and values of the cache at the first pass.
        changed: per row, passes at which entries went or changed.
        hidden: row, layer and kept_head -> entries of the prompt that the cache holds and a mask hides.
        unmoved: `full` with keys at the prompt's own positions, where those of `full` are moved to places in the cache.
        held: per pass the entries that the cache holds, where those of `full` are moved.
        rolls: whether keys are moved to their places in the cache again after entries went while decoding.
        masks_itself: whether the eviction says that it masks entries instead of removing them.
    """

    adapter: Adapter
    situation: Situation
    full: Layers
    masks: list[list[Tensor]] = field(default_factory=list)
    first: list[list[LayerKept]] = field(default_factory=list)
    attended: list[list[Tensor]] = field(default_factory=list)
    cached: Layers = field(default_factory=list)
    changed: list[list[int]] = field(default_factory=list)
    hidden: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)
    unmoved: Layers | None = None
    held: list[Held] = field(default_factory=list)
    rolls: bool = False
    masks_itself: bool = False
    _decoded: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    _last: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add_pass(self, record: ForwardPass) -> list[Bool[Tensor, "row kept_head entry"]]:
        """Match the entries attended to in a forward pass with the prompt's, and return which are attended to.

        Raises UnreadableCacheError where they cannot be matched.
        """
        layers = range(len(self.full))
        entries = [record.previous_entries(layer) for layer in layers]
        attended = [_attended_entries(record, layer) for layer in layers]
        if self._is_unchanged(entries) and all(seen is None for seen in attended):
            self.masks.append([_append_new(mask, self._new_count) for mask in self.masks[-1]])
            self.held += [self._held_with_new(self.held[-1])] if self.held else []
        else:
            self._match(entries, attended)
        self._decoded.append([record.new_entries(layer) for layer in layers])
        self._last = [(record.key[layer], record.value[layer]) for layer in layers]
        return [
            torch.ones_like(keys[..., 0], dtype=torch.bool) if seen is None else seen.all
            for (keys, _), seen in zip(entries, attended, strict=True)
        ]

    @property
    def _new_count(self) -> int:
        """Number of new tokens in the last pass."""
        return int(self._decoded[-1][0][0].shape[2])

    def _is_unchanged(self, entries: Layers) -> bool:
        """Return whether all layers hold exactly the previous pass's entries, those of its new tokens included."""
        return bool(self._last) and all(
            torch.equal(tensor, previous) for layer, last in zip(entries, self._last, strict=True)
            for tensor, previous in zip(layer, last, strict=True)
        )  # fmt: skip

    def _match(self, entries: Layers, attended: Sequence[Attended | None]) -> None:
        """Match all entries with those of the prompt and the decoded tokens, and add the masks of the pass."""
        if len(heads := {keys.shape[1] for keys, _ in entries}) > 1:
            raise UnreadableCacheError(f"layers hold different numbers of heads: {', '.join(map(str, sorted(heads)))}")
        known = self._all_entries(self.full, entries)
        rows = [
            recover(entries, known, row, padding, count_padding=True)
            for row, padding in enumerate(self.situation.padding)
        ]
        if self.unmoved is not None:
            rows = self._match_in_cache(self.unmoved, entries, known, rows)
        masks, by_layer = [], []
        for layer, (keys, _) in enumerate(entries):
            seen = attended[layer]
            if seen is not None and not self.masks_itself:
                self._record_hidden(layer, [layers[layer] for layers in rows], seen)
            by_row = list(torch.ones_like(keys[..., 0], dtype=torch.bool) if seen is None else seen.all)
            masks.append(self._mask([layers[layer] for layers in rows], by_row, known[layer][0].shape[2]))
            by_layer.append(by_row)
        if self.first:
            self._record_changes(masks)
        else:
            self.first, self.cached, self.changed = rows, entries, [[] for _ in rows]
            self.attended = [list(layers) for layers in zip(*by_layer, strict=True)]
        self.masks.append(masks)

    def _record_hidden(self, layer: int, rows: Sequence[LayerKept], seen: Attended) -> None:
        """Record the entries of the prompts that a layer's cache holds and its mask hides from all new tokens."""
        for row, (kept, padding) in enumerate(zip(rows, self.situation.padding, strict=True)):
            for head, positions in enumerate(kept.positions):
                shown = seen.by_mask[row, head]
                if bool(shown.all()):
                    continue
                hidden = set(positions[~shown].tolist()) - set(positions[seen.all[row, head]].tolist())
                if hidden := {position - padding for position in hidden if position >= padding}:
                    self.hidden.setdefault((row, layer, head), set()).update(hidden)

    def convention_distances(self, layer: tuple[Tensor, Tensor]) -> dict[str, float]:
        """Return how far a first layer's keys, before the next pass, are from each convention of positions."""
        fixed, known = (self._all_entries(full[:1], [layer])[0] for full in (self.full, self.unmoved or self.full))
        return self._distances(layer, fixed, known)

    def _distances(
        self, layer: tuple[Tensor, Tensor], fixed: tuple[Tensor, Tensor], known: tuple[Tensor, Tensor]
    ) -> dict[str, float]:
        """Return `convention_distances` of a first layer, given the known entries of `full` and of `unmoved`."""
        rotation = self._known_positions(), self.situation.padding, self.adapter.frequencies
        return convention_distances(layer, fixed, known, *rotation)

    def _match_in_cache(
        self, unmoved: Layers, entries: Layers, known: Layers, rows: list[list[LayerKept]]
    ) -> list[list[LayerKept]]:
        """Return the matches of a pass by the places in the cache of now, where these fit better than `rows`."""
        everything = self._all_entries(unmoved, entries)
        before_pass = len(self.held[-1][0][0][0]) + self._new_count if self.held else (self.situation.cached or (0,))[0]
        if self.rolls or entries[0][0].shape[2] < before_pass:  # keys may have moved up
            distances = self._distances(entries[0], known[0], everything[0])
            if distances[IN_CACHE] < distances[ORIGINAL]:
                rotation = self.situation.padding, self._known_positions(), self.adapter.frequencies
                rows, self.rolls = match_all_at_zero(entries, everything, *rotation), True
        self.held.append(held_entries(rows))
        return rows

    def _held_with_new(self, held: Held) -> Held:
        """Return what is held after a pass, given what was held before it: the same, then the new tokens."""
        known, new = self._known_positions().shape[1], self._new_count
        added = torch.arange(known - new, known, device=self._decoded[-1][0][0].device)
        return [[[torch.cat([own, added]) for own in layer] for layer in layers] for layers in held]

    def _known_positions(self) -> Int[Tensor, "row entry"]:
        """Return the positions of the prompts' tokens and of those decoded so far."""
        decoded = [self.situation.positions(chunk) for chunk in range(len(self._decoded))]
        return torch.cat([self.situation.prompt_positions(), *decoded], dim=-1)

    def _all_entries(self, full: Layers, cached: Layers) -> list[tuple[Tensor, Tensor]]:
        """Return all entries of the prompts and the decoded tokens per layer, with as many heads as the cache."""
        layers = []
        for layer, (keys, values) in enumerate(full):
            parts = [(keys, values), *(first_of_groups(new[layer], keys.shape[1]) for new in self._decoded)]
            joined = tuple(torch.cat(kind, dim=2) for kind in zip(*parts, strict=True))
            layers.append(repeat_heads((joined[0], joined[1]), cached[layer][0].shape[1]))
        return layers

    def _mask(self, rows: Sequence[LayerKept], attended: Sequence[Tensor], entries: int) -> Tensor:
        """Return the mask (row, kept_head, entry) of a layer, True for attended entries other than padding."""
        masks = []
        for kept, seen, padding in zip(rows, attended, self.situation.padding, strict=True):
            mask = torch.zeros(len(kept.positions), entries, dtype=torch.bool, device=seen.device)
            for head, positions, attended_by_head in zip(mask, kept.positions, seen, strict=True):
                head[positions[attended_by_head & (positions >= padding)]] = True
            masks.append(mask)
        return torch.stack(masks)

    def evicted(self, row: int) -> int:
        """Return the number of the prompt's entries that a row lacks, summed over kept sets, the most of all passes."""
        tokens, padding = self.situation.entries, self.situation.padding[row]
        return max(sum(int((~mask[row, :, padding:tokens]).sum()) for mask in masks) for masks in self.masks)

    def _record_changes(self, masks: Sequence[Tensor]) -> None:
        """Record the rows in which entries disappeared or reappeared."""
        for row, changed in enumerate(self.changed):
            expected = [_append_new(mask[row : row + 1], self._new_count) for mask in self.masks[-1]]
            if any(not torch.equal(old, mask[row : row + 1]) for old, mask in zip(expected, masks, strict=True)):
                changed.append(len(self.masks))


def repeat_heads(layer: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values, repeated per query head for a cache with `heads` query heads."""
    times = max(1, heads // layer[0].shape[1])
    if times * layer[0].shape[1] != heads:
        return layer
    return layer[0].repeat_interleave(times, dim=1), layer[1].repeat_interleave(times, dim=1)


def first_of_groups(layer: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the first head in each group, for a cache that stores entries once per query head."""
    group = max(1, layer[0].shape[1] // heads)
    return layer[0][:, ::group], layer[1][:, ::group]


def _append_new(mask: Tensor, new: int) -> Tensor:
    """Return the mask (row, kept_head, entry) extended by `new` entries that are True."""
    return torch.cat([mask, mask.new_ones(*mask.shape[:2], new)], dim=-1)


@dataclass(frozen=True, eq=False)
class Attended:
    """The earlier entries of a layer that any new token attends to, as masks (row, kept_head, entry).

    Attributes:
        all: by everything that hides entries.
        by_mask: by the attention mask alone.
    """

    all: Bool[Tensor, "row kept_head entry"]
    by_mask: Bool[Tensor, "row kept_head entry"]


def _attended_entries(record: ForwardPass, layer: int) -> Attended | None:
    """Return the earlier entries attended to by any new token; None if all are attended to."""
    rows, heads, entries = record.key[layer].shape[:3]
    new, hidden = record.query[layer].shape[2], record.hidden_keys[layer]
    allowed = boolean_mask(record.mask[layer], entries, new)
    if allowed is None and hidden is None:
        return None
    by_mask = torch.ones(rows, heads, entries - new, dtype=torch.bool, device=record.key[layer].device)
    if allowed is not None:
        seen = allowed.any(dim=-2)[..., : entries - new]
        by_mask = by_mask & seen[:, :: max(1, seen.shape[1] // heads)]
    attended = by_mask.clone()
    if hidden is not None:
        attended[tuple(torch.as_tensor(index, device=attended.device) for index in hidden)] = False
    return None if bool(attended.all()) else Attended(attended, by_mask)


_KEYS = 0


class EntryComparison:
    """A comparison of one row's entries, at the first forward pass, with those of the full cache."""

    def __init__(self, tracker: EntryTracker, row: int, floors: EntryFloors) -> None:
        self.tracker = tracker
        self.row = row
        self.floors = floors
        self.layers: list[LayerKept] = tracker.first[row]
        self.attended: list[Tensor] = tracker.attended[row]
        self.padding: int = tracker.situation.padding[row]

    def entries(self) -> CacheEntries:
        """Return the kept sets, distances and changes of the row's entries (METHOD: Audit, 1 and 2)."""
        layers = range(len(self.layers))
        return CacheEntries(
            kept=tuple(tuple(self._per_head(layer, self._kept_set)) for layer in layers),
            padded=self._per_layer(self._padding_counts),
            strangers=self._per_layer(lambda layer: self._per_head(layer, _unknown_count)),
            duplicates=self._per_layer(lambda layer: self._per_head(layer, _duplicate_count)),
            duplicated=self._per_layer(lambda layer: self._per_head(layer, self._first_duplicate)),
            hidden=self._per_layer(lambda layer: [len(positions) for positions in self._hidden(layer)]),
            first_hidden=self._per_layer(
                lambda layer: [min(positions, default=-1) for positions in self._hidden(layer)]
            ),
            unordered=self._per_layer(lambda layer: self.layers[layer].ascending) == 0,
            key_distance=self._per_layer(lambda layer: self._largest_distances(layer, self.layers[layer].key_distance)),
            value_distance=self._per_layer(
                lambda layer: self._largest_distances(layer, self.layers[layer].value_distance)
            ),
            key_floor=self.floors.key.double().numpy(),
            value_floor=self.floors.value.double().numpy(),
            altered=tuple(tuple(self._describe_changes(layer)) for layer in layers),
            repeated=tuple(layer for layer in layers if self._is_repeated(layer)),
            changed=tuple(self.tracker.changed[self.row]),
            evicted=self.tracker.evicted(self.row),
        )

    def _per_layer(self, function: Callable[[int], Any]) -> NDArray[Any]:
        """Return an array (layer, head) of the values that `function` returns per layer."""
        return np.array([list(function(layer)) for layer in range(len(self.layers))])

    def _per_head(self, layer: int, function: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        """Return the value of `function` per head of a layer, given its entries' positions and attended mask."""
        pairs = zip(self.layers[layer].positions, self.attended[layer], strict=True)
        return [function(positions, seen) for positions, seen in pairs]

    def _largest_distances(self, layer: int, distances: Sequence[Tensor]) -> list[float]:
        """Return the largest distance per head over its attended entries."""
        pairs = zip(distances, self.attended[layer], strict=True)
        return [float(distance[seen].amax()) if bool(seen.any()) else 0.0 for distance, seen in pairs]

    def _kept_set(self, positions: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> Integers:
        """Return a head's kept set: the distinct prompt positions of attended entries, ascending."""
        kept = positions[seen & (positions >= self.padding)] - self.padding
        return np.unique(kept.cpu().numpy())

    def _padding_counts(self, layer: int) -> list[int]:
        """Return, per head, how many attended entries are padding, in both keys and values."""
        kept = self.layers[layer]
        heads = zip(kept.positions, kept.key_distance, kept.value_distance, self.attended[layer], strict=True)
        return [
            int(((places >= 0) & (places < self.padding) & (torch.maximum(key, value) <= STRANGE) & seen).sum())
            for places, key, value, seen in heads
        ]

    def _is_repeated(self, layer: int) -> bool:
        """Return whether a layer stores entries once per query head, with equal kept sets within each group."""
        adapter, positions = self.tracker.adapter, self.layers[layer].positions
        group = adapter.heads // adapter.kv_heads
        if group == 1 or len(positions) != adapter.heads:
            return False
        return all(torch.equal(own, positions[head - head % group]) for head, own in enumerate(positions))

    def _first_duplicate(self, positions: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> int:
        """Return the first position in the prompt that several of a head's attended entries have; −1 without one."""
        known = positions[seen & (positions >= self.padding)].sort().values
        twice = known[1:][known[1:] == known[:-1]]
        return int(twice[0]) - self.padding if len(twice) else -1

    def _hidden(self, layer: int) -> list[set[int]]:
        """Return per head the positions of the prompt's entries that a mask hides."""
        heads = range(len(self.layers[layer].positions))
        return [self.tracker.hidden.get((self.row, layer, head), set()) for head in heads]

    def _describe_changes(self, layer: int) -> list[tuple[Change, ...]]:
        """Return per head the changes to its keys and values; none if they are intact."""
        entries = self.layers[layer]
        kinds = (
            (self._largest_distances(layer, entries.key_distance), self.floors.key),
            (self._largest_distances(layer, entries.value_distance), self.floors.value),
        )
        found: list[tuple[Change, ...]] = []
        for head in range(len(entries.positions)):
            far = [kind for kind, (distance, floor) in enumerate(kinds) if not distance[head] <= FLOORS * floor[layer]]
            found.append(self._changes_of_head(layer, head, far) if far else ())
        return found

    def _changes_of_head(self, layer: int, head: int, far: Sequence[int]) -> tuple[Change, ...]:
        """Return the changes to a head's keys (0) and values (1), given those that are not the full cache's."""
        if (row := self._row_of_entries(layer, head)) is not None:
            return (Change("row", f"entries of row {row} of the batch", -1),)
        if self._is_mismatched(layer, head):
            return (
                Change("mismatch", "values of other entries than their keys", self._first_changed(layer, head, far)),
            )
        return tuple(self._change(layer, head, kind) for kind in far)

    def _first_changed(self, layer: int, head: int, kinds: Sequence[int]) -> int:
        """Return the position in the prompt of the first entry whose key or value differs; −1 without a position."""
        kept = self.layers[layer]
        floors = (self.floors.key[layer], self.floors.value[layer])
        distances = ((kept.key_distance, kept.value_distance)[kind][head] / floors[kind] for kind in kinds)
        differs = torch.stack([~(distance <= FLOORS) for distance in distances]).any(dim=0)
        positions = kept.positions[head][differs & self.attended[layer][head] & (kept.positions[head] >= self.padding)]
        return int(positions.amin()) - self.padding if len(positions) else -1

    def _row_of_entries(self, layer: int, head: int) -> int | None:
        """Return the other row of the batch whose full cache holds all of a head's entries; None if there is none."""
        seen = self.attended[layer][head]
        keys, values = (kind[self.row, head, seen] for kind in self.tracker.cached[layer])
        for row in range(self.tracker.situation.rows):
            full = [self._full_entries(kind, layer, head, row) for kind in self.tracker.full[layer]]
            if row != self.row and all(
                changes.holds(known, own) for known, own in zip(full, (keys, values), strict=True)
            ):
                return row
        return None

    def _is_mismatched(self, layer: int, head: int) -> bool:
        """Return whether a head's keys and values are bit-equal to the full cache's, but of different entries."""
        seen = self.attended[layer][head]
        separate = []
        for cached, full in zip(self.tracker.cached[layer], self.tracker.full[layer], strict=True):
            own, known = (
                changes.single_head(cached[self.row, head, seen]),
                changes.single_head(self._full_entries(full, layer, head)),
            )
            separate.append(recover([(own, own)], [(known, known)])[0])
        exact = not any(bool(kept.key_distance[0].any()) for kept in separate)
        return exact and not torch.equal(separate[0].positions[0], separate[1].positions[0])

    def _full_entries(self, full: Tensor, layer: int, head: int, row: int | None = None) -> Tensor:
        """Return the full cache's entries (entry, d_head) for a head of the external cache, by default in its row."""
        return full[self.row if row is None else row][self._full_head(full, layer, head)]

    def _full_head(self, full: Tensor, layer: int, head: int) -> int:
        """Return the head of the full cache that a head of the external cache belongs to."""
        return head * full.shape[1] // len(self.layers[layer].positions)

    def _change(self, layer: int, head: int, kind: int) -> Change:
        """Return the change to a head's keys (`kind` 0) or values (1)."""
        name, first = ("keys", "values")[kind], self._first_changed(layer, head, (kind,))
        positions = self.layers[layer].positions[head]
        known = (positions >= 0) & self.attended[layer][head]
        entries, positions = self.tracker.cached[layer][kind][self.row, head][known], positions[known]
        full, floor = self.tracker.full[layer][kind], float((self.floors.key, self.floors.value)[kind][layer])
        if not len(positions) or int(positions.amax()) >= full.shape[2]:
            return Change("changed", f"{name} changed", first)
        if not bool(entries.isfinite().all()):
            return Change("infinite", f"{name} not finite", first)
        head_entries = self._full_entries(full, layer, head)
        own = head_entries[positions]
        frequencies, most = self.tracker.adapter.frequencies, 2 * self.tracker.situation.entries
        tests: list[tuple[str, Callable[[], str]]] = [
            ("head", lambda: changes.describe_head(entries, full[self.row], self._full_head(full, layer, head))),
            ("scale", lambda: changes.describe_scale(entries, own, floor)),
            ("rounded", lambda: changes.describe_rounding(entries, own)),
            ("quantised", lambda: changes.describe_quantisation(entries, own, head_entries)),
        ]
        if kind == _KEYS:
            index = known.nonzero().squeeze(-1)
            before = self._full_entries((self.tracker.unmoved or self.tracker.full)[layer][kind], layer, head)[
                positions
            ]
            other = lambda: describe_wrong_rotation(  # noqa: E731
                entries, before, positions - self.padding, index, frequencies, changes.NEAR
            )
            tests.insert(1, ("rotation", other))
            shift = lambda: changes.describe_rotation(entries, own, positions - self.padding, frequencies, most)  # noqa: E731
            tests.insert(1, ("rotation", shift))
        return next(
            (Change(kind_name, f"{name} {words}", first) for kind_name, test in tests if (words := test())),
            Change("changed", f"{name} changed", first),
        )


def _unknown_count(positions: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> int:
    """Return the number of a head's attended entries without a match in the full cache."""
    return int((positions[seen] == NOWHERE).sum())


def _duplicate_count(positions: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> int:
    """Return the number of a head's attended entries that duplicate another attended entry."""
    known = positions[seen & (positions != NOWHERE)]
    return len(known) - len(set(known.tolist()))

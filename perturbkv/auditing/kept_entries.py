"""Matching of an external cache's entries with the prompt's, and what was changed in them (METHOD: Audit, 1 and 2).

Entries are matched at every forward pass. An entry that differs from the full cache's is tested for known changes: a
rotation, a quantisation, another head's entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.analyses.audit.cache_entries import FLOORS, MOST_ROUNDED, Alteration, CacheEntries, Integers
from perturbkv.analyses.measurements import Floats
from perturbkv.auditing.changes import (
    NEAR,
    ROTATED_NEARER,
    are_among,
    are_of_others,
    are_rounded,
    are_rounded_from,
    describe_clipping,
    describe_head,
    describe_quantisation,
    describe_rotation,
    describe_rounded_scale,
    describe_rounding,
    describe_scale,
)
from perturbkv.auditing.forward_passes import ForwardPass, Situation, boolean_mask
from perturbkv.auditing.positions import (
    HeldPositions,
    base_of,
    convention_distances,
    describe_wrong_rotation,
    frequencies_of,
    held_positions,
    match_all_at_zero,
)
from perturbkv.auditing.reference import PromptEntries
from perturbkv.cache.external_cache import NOWHERE, STRANGE_DISTANCE, Layers, RecoveredLayer, recover_positions
from perturbkv.configs.audit_settings import IN_CACHE, ORIGINAL
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter

_KEYS = 0
"""Index of keys in pairs of keys and values."""
_MOST_OF_ONE = 0.5
"""Share of a head's rounded entries near one of the full cache's, above which they are no mixture."""
_WORSE, _LEAST_WORSE = 2, 0.25
"""How many times the largest distance at first, and at least of which distance, is much farther."""


@dataclass
class EntryTracker:
    """The entries of an eviction's caches in one situation, matched pass by pass.

    Attributes:
        adapter: the plain model.
        situation: the situation, with positions counted as the eviction counts them.
        prompts: the plain model's entries of the prompts.
        masks: per forward pass and layer (row, kept_head, entry) True where an entry of a prompt, or one decoded
            before, is attended to; padding left out.
        first_matches: per row and layer the entries at the first pass.
        attended: per row and layer (kept_head, entry) True where the attention sees that entry.
        first_entries: per layer the keys and values of the cache at the first pass.
        changed: per row, passes at which entries disappeared or reappeared.
        hidden: row, layer and kept_head -> entries of the prompt that the cache holds and a mask hides.
        original: `prompts` with keys at the prompt's own positions, where `prompts` has them at places in the cache.
        held: per pass the known entries that the cache holds, where keys of `prompts` are moved; else empty.
        keys_move: whether keys are moved to their places in the cache again after entries went while decoding.
        masks_itself: whether the eviction says that it masks entries instead of removing them.
        worse: row -> the first later pass and layer whose entries are much farther from the known ones than at first.
    """

    adapter: Adapter
    situation: Situation
    prompts: PromptEntries
    masks: list[list[Tensor]] = field(default_factory=list)
    first_matches: list[list[RecoveredLayer]] = field(default_factory=list)
    attended: list[list[Tensor]] = field(default_factory=list)
    first_entries: Layers = field(default_factory=list)
    changed: list[list[int]] = field(default_factory=list)
    hidden: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)
    original: PromptEntries | None = None
    held: list[HeldPositions] = field(default_factory=list)
    keys_move: bool = False
    masks_itself: bool = False
    worse: dict[int, tuple[int, int]] = field(default_factory=dict)
    _decoded: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    _last: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _seen: list[Tensor] = field(default_factory=list)

    def add_pass(self, record: ForwardPass) -> list[Bool[Tensor, "row kept_head entry"]]:
        """Match the entries attended to in a forward pass with the prompt's, and return which are attended to.

        Raises UnreadableCacheError where they cannot be matched.
        """
        layers = range(len(self.prompts.full))
        entries = [record.previous_entries(layer) for layer in layers]
        attended, by_mask = zip(*(_attended_entries(record, layer) for layer in layers), strict=True)
        is_unchanged = bool(self._last) and all(map(torch.equal, attended, self._seen))
        if is_unchanged and all(
            torch.equal(tensor, previous) for layer, last in zip(entries, self._last, strict=True)
            for tensor, previous in zip(layer, last, strict=True)
        ):  # fmt: skip
            self.masks.append([F.pad(mask, (0, self._new_count), value=True) for mask in self.masks[-1]])
            if self.held:  # what was held before, then the new tokens
                known = self._known_positions().shape[1]
                added = torch.arange(known - self._new_count, known, device=entries[0][0].device)
                self.held.append(
                    [[[torch.cat([own, added]) for own in layer] for layer in row] for row in self.held[-1]]
                )
        else:
            self._match(entries, attended, by_mask)
        self._decoded.append([record.new_entries(layer) for layer in layers])
        self._last = [(record.key[layer], record.value[layer]) for layer in layers]
        self._seen = [F.pad(seen, (0, self._new_count), value=True) for seen in attended]
        return list(attended)

    @property
    def _new_count(self) -> int:
        """Number of new tokens in the last pass."""
        return int(self._decoded[-1][0][0].shape[2])

    def _match(self, entries: Layers, attended: Sequence[Tensor], by_mask: Sequence[Tensor]) -> None:
        """Match all entries with those of the prompt and the decoded tokens, and add the masks of the pass.

        `attended` and `by_mask` say per layer which entries are attended to, as `_attended_entries` does. Raises
        UnreadableCacheError for layers with different numbers of heads, and where entries cannot be matched.
        """
        if len(heads := {keys.shape[1] for keys, _ in entries}) > 1:
            raise UnreadableCacheError(f"layers hold different numbers of heads: {', '.join(map(str, sorted(heads)))}")
        known = self._all_entries(self.prompts.full, entries)
        rows = [
            recover_positions(entries, known, row, padding, count_padding=True)
            for row, padding in enumerate(self.situation.padding)
        ]
        if self.original is not None:
            rows = self._rematch_in_cache(self.original.full, entries, rows)
        masks = []
        for layer, seen in enumerate(attended):
            by_row = [layers[layer] for layers in rows]
            if not self.masks_itself:
                self._record_hidden(layer, by_row, seen, by_mask[layer])
            mask = torch.zeros(*seen.shape[:2], known[layer][0].shape[2], dtype=torch.bool, device=seen.device)
            for row, (kept, padding) in enumerate(zip(by_row, self.situation.padding, strict=True)):
                for head, positions in enumerate(kept.positions):
                    mask[row, head, positions[seen[row, head] & (positions >= padding)]] = True
            masks.append(mask)
        if self.first_matches:
            self._record_changes(masks)
            self._record_worse(rows)
        else:
            self.first_matches, self.first_entries, self.changed = rows, entries, [[] for _ in rows]
            self.attended = [list(by_layer) for by_layer in zip(*attended, strict=True)]
        self.masks.append(masks)

    def _record_hidden(self, layer: int, rows: Sequence[RecoveredLayer], attended: Tensor, by_mask: Tensor) -> None:
        """Record the entries of the prompts that a layer's cache holds and its mask hides from all new tokens."""
        for row, (kept, padding) in enumerate(zip(rows, self.situation.padding, strict=True)):
            for head, positions in enumerate(kept.positions):
                masked = positions[~by_mask[row, head]]
                if not len(masked):
                    continue
                unseen = set(masked.tolist()) - set(positions[attended[row, head]].tolist())
                if hidden := {position - padding for position in unseen if position >= padding}:
                    self.hidden.setdefault((row, layer, head), set()).update(hidden)

    def convention_distances(self, layer: tuple[Tensor, Tensor]) -> dict[str, float]:
        """Return how far a first layer's keys, before the next pass, are from each convention of positions."""
        fixed, known = (
            self._all_entries(full[:1], [layer])[0]
            for full in (self.prompts.full, (self.original or self.prompts).full)
        )
        rotation = self._known_positions(), self.situation.padding, frequencies_of(self.adapter)
        return convention_distances(layer, fixed, known, *rotation)

    def _rematch_in_cache(
        self, original: Layers, entries: Layers, rows: list[list[RecoveredLayer]]
    ) -> list[list[RecoveredLayer]]:
        """Return the matches of a pass, and add what the cache holds by them to `held`.

        `rows` are the matches with known entries whose keys stand where they stood before. Where entries went, and the
        keys are nearer to the `original` ones rotated to their present places in the cache, these are matched instead.
        """
        so_far = len(self.held[-1][0][0][0]) + self._new_count if self.held else (self.situation.cached or (0,))[0]
        if self.keys_move or entries[0][0].shape[2] < so_far:  # keys may have moved up
            distances = self.convention_distances(entries[0])
            if distances[IN_CACHE] < distances[ORIGINAL]:
                rotation = self.situation.padding, self._known_positions(), frequencies_of(self.adapter)
                known = self._all_entries(original, entries)
                rows, self.keys_move = match_all_at_zero(entries, known, *rotation), True
        self.held.append(held_positions(rows))
        return rows

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

    def _record_worse(self, rows: Sequence[Sequence[RecoveredLayer]]) -> None:
        """Record the pass in which entries of a row are first much farther from the known ones than they all began."""
        for row, layers in enumerate(rows):
            for layer, kept in enumerate(layers):
                for name in ("key_distance", "value_distance"):
                    before, now = (torch.cat(getattr(one, name)) for one in (self.first_matches[row][layer], kept))
                    most = max(float(before.amax()) if len(before) else 0.0, _LEAST_WORSE)
                    if len(now) and not float(now.amax()) <= _WORSE * most:
                        self.worse.setdefault(row, (len(self.masks), layer))

    def evicted_count(self, row: int, first: int) -> int:
        """Return the number of entries from `first` on that a row lacks, of all kept sets, the most of all passes."""
        return max(sum(int((~mask[row, :, first:]).sum()) for mask in masks) for masks in self.masks)

    def _record_changes(self, masks: Sequence[Tensor]) -> None:
        """Record the rows in which entries disappeared or reappeared, given the masks per layer of the present pass."""
        for row, changed in enumerate(self.changed):
            expected = [F.pad(mask[row : row + 1], (0, self._new_count), value=True) for mask in self.masks[-1]]
            if any(not torch.equal(old, mask[row : row + 1]) for old, mask in zip(expected, masks, strict=True)):
                changed.append(len(self.masks))  # the number of this pass


def repeat_heads(layer: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values, repeated per query head for a cache with `heads` query heads.

    Unrepeated where `heads` is no multiple of the layer's.
    """
    times = max(1, heads // layer[0].shape[1])
    if times * layer[0].shape[1] != heads:
        return layer
    return layer[0].repeat_interleave(times, dim=1), layer[1].repeat_interleave(times, dim=1)


def first_of_groups(layer: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the first head in each group, of a cache that may store entries once per query head.

    `heads` is the number of groups.
    """
    group = max(1, layer[0].shape[1] // heads)
    return layer[0][:, ::group], layer[1][:, ::group]


def _attended_entries(
    record: ForwardPass, layer: int
) -> tuple[Bool[Tensor, "row kept_head entry"], Bool[Tensor, "row kept_head entry"]]:
    """Return which earlier entries any new token attends to: by everything that hides entries, by the mask alone."""
    rows, heads, entries = record.key[layer].shape[:3]
    new, hidden = record.query[layer].shape[2], record.hidden_keys[layer]
    by_mask = torch.ones(rows, heads, entries - new, dtype=torch.bool, device=record.key[layer].device)
    allowed = boolean_mask(record.mask[layer], entries, new)
    if allowed is not None:
        seen = allowed.any(dim=-2)[..., : entries - new]
        by_mask = by_mask & seen[:, :: max(1, seen.shape[1] // heads)]
    attended = by_mask.clone()
    if hidden is not None:
        attended[tuple(torch.as_tensor(index, device=attended.device) for index in hidden)] = False
    return attended, by_mask


class EntryComparison:
    """A comparison of one row's entries, at the first forward pass, with those of the full cache.

    Attributes:
        tracker: the matched entries of all rows.
        row: the row.
        floors: noise floors of keys and of values.
        layers, attended: the row's `first_matches` and `attended` of the tracker.
        padding: entries of padding before the row's prompt.
    """

    def __init__(self, tracker: EntryTracker, row: int) -> None:
        self.tracker = tracker
        self.row = row
        self.floors: Float[Tensor, "kind layer"] = tracker.prompts.floors
        self.layers: list[RecoveredLayer] = tracker.first_matches[row]
        self.attended: list[Tensor] = tracker.attended[row]
        self.padding: int = tracker.situation.padding[row]

    def entries(self) -> CacheEntries:
        """Return the kept sets, distances and changes of the row's entries (METHOD: Audit, 1 and 2)."""
        shape = len(self.layers), len(self.layers[0].positions)  # (layer, kept_head)
        padded, strangers, zeros, duplicates, hidden = (np.zeros(shape, dtype=np.int64) for _ in range(5))
        first_duplicate, first_hidden = np.full(shape, -1), np.full(shape, -1)
        distance = np.zeros((2, *shape))
        kept_sets: list[tuple[Integers, ...]] = []
        altered: list[Alteration] = []
        for layer, entries in enumerate(self.layers):
            sets = []
            for head, (positions, seen) in enumerate(zip(entries.positions, self.attended[layer], strict=True)):
                place, both = (layer, head), (entries.key_distance[head], entries.value_distance[head])
                matched = positions[seen & (positions != NOWHERE)]
                in_prompt = (positions[seen & (positions >= self.padding)] - self.padding).sort().values
                twice = in_prompt[1:][in_prompt[1:] == in_prompt[:-1]]
                masked = self.tracker.hidden.get((self.row, *place), set())
                sets.append(np.unique(in_prompt.cpu().numpy()))
                is_near = torch.maximum(*both) <= STRANGE_DISTANCE
                padded[place] = int(((positions >= 0) & (positions < self.padding) & is_near & seen).sum())
                own = [kind[self.row, head] for kind in self.tracker.first_entries[layer]]
                nothing = ~torch.cat(own, dim=-1).any(dim=-1)
                zeros[place] = int((nothing & seen & (positions == NOWHERE)).sum())
                strangers[place] = int((positions[seen] == NOWHERE).sum()) - zeros[place]
                duplicates[place] = len(matched) - len(set(matched.tolist()))
                first_duplicate[place] = int(twice[0]) if len(twice) else -1
                hidden[place], first_hidden[place] = len(masked), min(masked, default=-1)
                distance[:, layer, head] = [float(F.pad(one[seen], (0, 1)).amax()) for one in both]  # 0 of none
                changes = [*self._changes(layer, head, distance[:, layer, head])]
                if any(change.kind in ("row", "head", "mismatch") for change in changes):
                    strangers[place] = 0  # they are somebody's
                if any(change.kind == "head" for change in changes):
                    sets[-1] = self._positions_in_nearest_head([kind[seen] for kind in own], layer)
                if duplicates[place] and any(change.kind in ("changed", "rotation") for change in changes):
                    # Positions are not sure there, and only equal rows are repeats.
                    rows = torch.cat(own, dim=-1)[seen & (positions != NOWHERE)]
                    duplicates[place] = min(duplicates[place], len(rows) - len({tuple(row) for row in rows.tolist()}))
                altered += changes
            kept_sets.append(tuple(sets))
        adapter, layers = self.tracker.adapter, range(shape[0])
        unsure = {(one.layer, one.head) for one in altered}  # their positions may be others
        unordered = {
            layer
            for layer, entries in enumerate(self.layers)
            for head, is_ascending in enumerate(entries.ascending)
            if not is_ascending and (layer, head) not in unsure
        }
        return CacheEntries(
            kept_sets=tuple(kept_sets), tokens=self.tracker.situation.entries - self.padding, kv_heads=adapter.kv_heads,
            padded=padded, strangers=strangers, zeros=zeros, duplicates=duplicates, first_duplicate=first_duplicate,
            hidden=hidden, first_hidden=first_hidden,
            unordered=tuple(sorted(unordered)),
            distances=distance, floors=self.floors.double().numpy(),
            altered=tuple(altered), repeated=tuple(layer for layer in layers if self._is_repeated(layer)),
            changed=tuple(self.tracker.changed[self.row]), evicted=self.tracker.evicted_count(self.row, self.padding),
            evicted_new=self.tracker.evicted_count(self.row, self.tracker.situation.entries),
        )  # fmt: skip

    def _positions_in_nearest_head(self, own: Sequence[Float[Tensor, "entry width"]], layer: int) -> Integers:
        """Return the prompt's positions of keys and values, in the full cache's head that holds most of them."""
        entries, found = [part[None, None] for part in own], list[Tensor]()
        for head in range(self.tracker.prompts.full[layer][0].shape[1]):
            known = [part[self.row, head][None, None] for part in self.tracker.prompts.full[layer]]
            (kept,) = recover_positions([(entries[0], entries[1])], [(known[0], known[1])], padding=self.padding)
            found.append(torch.unique(kept.positions[0][kept.positions[0] != NOWHERE]))
        return np.asarray(max(found, key=len).cpu().numpy())

    def _is_repeated(self, layer: int) -> bool:
        """Return whether a layer stores entries once per query head, with equal kept sets within each group."""
        adapter, positions = self.tracker.adapter, self.layers[layer].positions
        group = adapter.heads // adapter.kv_heads
        if group == 1 or len(positions) != adapter.heads:
            return False
        return all(torch.equal(own, positions[head - head % group]) for head, own in enumerate(positions))

    def _changes(self, layer: int, head: int, distance: Floats) -> Iterator[Alteration]:
        """Yield the changes to a head's keys and values, given the largest distance (kind,) of each; none if intact."""
        far = [kind for kind in range(2) if not float(distance[kind]) <= FLOORS * self.floors[kind, layer]]
        if not far:
            return
        if (row := self._row_of_entries(layer, head)) is not None:
            yield Alteration(layer, head, "row", f"entries of row {row} of the batch", -1)
        elif mismatch := self._mismatch(layer, head):
            key, value = mismatch
            what = f"values of other entries than their keys: entry {key}'s key, entry {value}'s value"
            yield Alteration(layer, head, "mismatch", what, key)
        else:
            for kind in far:
                explained = ((change, words) for change, words in self._explanations(layer, head, kind) if words)
                change, words = next(explained, ("changed", "changed"))
                kept, matched = self.layers[layer], self.layers[layer].positions[head]
                in_floors = (kept.key_distance, kept.value_distance)[kind][head] / self.floors[kind, layer]
                differs = ~(in_floors <= FLOORS) & self.attended[layer][head] & (matched >= self.padding)
                entry = -1
                if bool(differs.any()):  # without a cause the entry that is farthest off
                    far_off = in_floors.masked_fill(~differs, -1).argmax()
                    entry = int(matched[far_off] if change == "changed" else matched[differs].amin()) - self.padding
                yield Alteration(layer, head, change, f"{('keys', 'values')[kind]} {words}", entry)

    def _row_of_entries(self, layer: int, head: int) -> int | None:
        """Return the other row of the batch whose full cache holds all of a head's entries; None if there is none."""
        seen = self.attended[layer][head]
        keys, values = (kind[self.row, head, seen] for kind in self.tracker.first_entries[layer])
        for row in (other for other in range(self.tracker.situation.rows) if other != self.row):
            full = [self._full_entries(kind, layer, head, row) for kind in self.tracker.prompts.full[layer]]
            exact = all(are_among(own, known) for own, known in zip((keys, values), full, strict=True))
            own_row = [self._full_entries(kind, layer, head) for kind in self.tracker.prompts.full[layer]]
            together = [
                torch.cat([kind.float() for kind in kinds], dim=-1) for kinds in ((keys, values), full, own_row)
            ]
            if exact or are_rounded_from(*together):
                return row
        return None

    def _mismatch(self, layer: int, head: int) -> tuple[int, int] | None:
        """Return the positions in the prompt of the first key and value that are of different entries.

        None where a head's keys and values belong together. Of intact ones a single one counts, of rounded ones most.
        """
        seen = self.attended[layer][head]
        pairs = [
            (cached[self.row, head, seen], self._full_entries(full, layer, head))
            for cached, full in zip(self.tracker.first_entries[layer], self.tracker.prompts.full[layer], strict=True)
        ]
        separate = [recover_positions([(own[None, None],) * 2], [(known[None, None],) * 2])[0] for own, known in pairs]
        of_keys, of_values = (kept.positions[0] for kept in separate)
        apart = ((of_keys != of_values) & (of_values != NOWHERE)).nonzero().squeeze(-1)
        exact = all(
            bool((kept.key_distance[0] <= FLOORS * self.floors[kind, layer]).all())
            for kind, kept in enumerate(separate)
        )
        matched, (values, known) = self.layers[layer], pairs[1]
        together = torch.maximum(matched.key_distance[head], matched.value_distance[head])[seen] <= MOST_ROUNDED
        apart_by_most = bool((of_keys != NOWHERE).all()) and are_of_others(values, known, of_keys)
        others = exact or (apart_by_most and float(together.float().mean()) <= _MOST_OF_ONE)
        if not len(apart) or not others:
            return None
        first = apart[of_keys[apart].argmin()]
        return int(of_keys[first]) - self.padding, int(of_values[first]) - self.padding

    def _full_entries(self, full: Tensor, layer: int, head: int, row: int | None = None) -> Tensor:
        """Return the full cache's entries (entry, width) for a head of the external cache, by default in its row."""
        return full[self.row if row is None else row][self._full_head(full, layer, head)]

    def _full_head(self, full: Tensor, layer: int, head: int) -> int:
        """Return the head of the full cache that a head of the external cache belongs to."""
        return head * full.shape[1] // len(self.layers[layer].positions)

    def _explanations(self, layer: int, head: int, kind: int) -> Iterator[tuple[str, str]]:
        """Yield (kind of change, words) for every test of a head's keys (`kind` 0) or values (1).

        The words are empty where the test explains nothing. No test is made where no entry has a position.
        """
        tracker, matches = self.tracker, self.layers[layer].positions[head]
        seen = self.attended[layer][head]
        matched, own_entries = (matches >= 0) & seen, tracker.first_entries[layer][kind][self.row, head]
        entries, positions = own_entries[matched], matches[matched]
        full, floor = tracker.prompts.full[layer][kind], float(self.floors[kind, layer])
        if bool(own_entries[seen].isfinite().all()):
            name = "head" if len(self.layers[layer].positions) == full.shape[1] else "key/value head"
            yield "head", describe_head(own_entries[seen], full[self.row], self._full_head(full, layer, head), name)
        if not len(positions) or int(positions.amax()) >= full.shape[2]:
            return
        if not bool(entries.isfinite().all()):
            yield "infinite", "not finite"
            return
        head_entries = self._full_entries(full, layer, head)
        own, places = head_entries[positions], positions - self.padding
        if kind == _KEYS:
            frequencies, index = frequencies_of(tracker.adapter), matched.nonzero().squeeze(-1)
            most, rotary = 2 * tracker.situation.entries, (frequencies, NEAR, base_of(tracker.adapter))
            # rules for all keys first: with another base each is off by a number of its own
            yield "rotation", describe_rotation(entries, own, places, frequencies, most, varied=False)
            before = self._full_entries((tracker.original or tracker.prompts).full[layer][kind], layer, head)[positions]
            yield "rotation", describe_wrong_rotation(entries, before, places, index, *rotary)
            yield "rotation", describe_rotation(entries, own, places, frequencies, most)
        yield "scale", describe_scale(entries, own, floor)
        if kind == _KEYS:
            yield "rotation", describe_rotation(entries, own, places, frequencies, most, rounded=True)
            yield "rotation", describe_wrong_rotation(entries, before, places, index, *rotary, ROTATED_NEARER)
        yield "clipped", describe_clipping(entries, own)
        yield "scale", describe_rounded_scale(entries, own)
        both = [cached[self.row, head][matched] for cached in tracker.first_entries[layer]]
        known = [self._full_entries(of_kind, layer, head) for of_kind in tracker.prompts.full[layer]]
        if rounded := are_rounded(both, known, positions, kind, floor):
            yield "rounded", describe_rounding(entries, own)
        yield "quantised", describe_quantisation(entries, own, head_entries, exactly=not rounded)
        if rounded:
            yield "rounded", "rounded"

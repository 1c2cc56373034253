"""What a foreign cache keeps, pass by pass of decoding: entries found among the prompt's (METHOD: Audit, 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from perturbkv.auditing.observing import Seen, visible
from perturbkv.auditing.situations import Situation
from perturbkv.cache.external_cache import LayerKept, recover
from perturbkv.cache.foreign import Layers
from perturbkv.errors import UnreadableError
from perturbkv.models.adapter import Adapter


@dataclass
class Reading:
    """Reads one eviction's caches in one situation.

    Attributes:
        full: what the plain model holds of the prompts.
        masks: per forward pass and layer (row, kept_head, entry) True where an entry of a prompt, or one decoded
            before, is attended to; padding left out.
        first: per row and layer what was found at the first pass.
        attended: per row and layer (kept_head, entry) which of those entries the attention sees.
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
        """Read what one forward pass attended to. Raises UnreadableError."""
        layers = range(len(self.full))
        theirs = [seen.before(layer) for layer in layers]
        shown = [_shown(seen, layer) for layer in layers]
        if self._goes_on(theirs) and all(one is None for one in shown):
            self.masks.append([_with_new(mask, self._new) for mask in self.masks[-1]])
        else:
            self._read(theirs, shown)
        self._own.append([seen.own(layer) for layer in layers])
        self._last = [(seen.key[layer], seen.value[layer]) for layer in layers]

    @property
    def _new(self) -> int:
        """Tokens of the pass that was read last."""
        return int(self._own[-1][0][0].shape[2])

    def _goes_on(self, theirs: Layers) -> bool:
        """Whether every layer holds exactly what it held and was given in the pass before."""
        return bool(self._last) and all(
            torch.equal(one, last) for now, before in zip(theirs, self._last, strict=True)
            for one, last in zip(now, before, strict=True)
        )  # fmt: skip

    def _read(self, theirs: Layers, shown: Sequence[Tensor | None]) -> None:
        """Find every entry among the prompt's and those decoded since."""
        if len(heads := {keys.shape[1] for keys, _ in theirs}) > 1:
            msg = f"layers hold different numbers of heads: {', '.join(map(str, sorted(heads)))}"
            raise UnreadableError(msg)
        whole = self._whole(theirs)
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

    def _whole(self, theirs: Layers) -> list[tuple[Tensor, Tensor]]:
        """The prompts' entries and those decoded since, as many heads of each as the foreign cache holds."""
        found = []
        for layer, (keys, values) in enumerate(self.full):
            both = [(keys, values), *(per_heads(one[layer], keys.shape[1]) for one in self._own)]
            joined = tuple(torch.cat(kind, dim=2) for kind in zip(*both, strict=True))
            found.append(repeated((joined[0], joined[1]), theirs[layer][0].shape[1]))
        return found

    def _mask(self, rows: Sequence[LayerKept], attended: Sequence[Tensor], entries: int) -> Tensor:
        """(row, kept_head, entry) of one layer; nothing of the padding."""
        masks = []
        for one, seen, padding in zip(rows, attended, self.situation.padding, strict=True):
            mask = torch.zeros(len(one.positions), entries, dtype=torch.bool, device=seen.device)
            for own, places, looked in zip(mask, one.positions, seen, strict=True):
                own[places[looked & (places >= padding)]] = True
            masks.append(mask)
        return torch.stack(masks)

    def _note_change(self, masks: Sequence[Tensor]) -> None:
        """Remember the rows in which entries that were there are gone, or others came back."""
        for row, changed in enumerate(self.changed):
            before = [_with_new(mask[row : row + 1], self._new) for mask in self.masks[-1]]
            if any(not torch.equal(one, mask[row : row + 1]) for one, mask in zip(before, masks, strict=True)):
                changed.append(len(self.masks))


def repeated(layer: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """A layer's keys and values as often as a cache that holds them per query head has them."""
    times = max(1, heads // layer[0].shape[1])
    if times * layer[0].shape[1] != heads:
        return layer
    return layer[0].repeat_interleave(times, dim=1), layer[1].repeat_interleave(times, dim=1)


def per_heads(layer: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """The first of each group, where a cache holds keys and values once per query head."""
    every = max(1, layer[0].shape[1] // heads)
    return layer[0][:, ::every], layer[1][:, ::every]


def _with_new(mask: Tensor, new: int) -> Tensor:
    return torch.cat([mask, mask.new_ones(*mask.shape[:2], new)], dim=-1)


def _shown(seen: Seen, layer: int) -> Bool[Tensor, "row kept_head entry"] | None:
    """Entries before the new tokens that any of them sees; None where all of them are."""
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

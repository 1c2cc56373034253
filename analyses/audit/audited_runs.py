"""The runs of an audit: a prompt in a situation, its decoding, its first difference (METHOD: Audit, 1 to 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.audit.cache_entries import (
    CHANGES,
    FLOORS,
    MOST_ROUNDED,
    ROUNDING,
    UNMEASURED,
    Alteration,
    CacheEntries,
)
from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.measurements import Floats
from perturbkv.configs.audit_settings import ORIGINAL, SITUATIONS, UNKNOWN
from perturbkv.escaping import escape_line

_LARGE = 1e4
"""Noise floors from which on their number is written as a power of ten."""
KINDS: Mapping[str, str] = {
    "model": "the eviction changed the model, so that nothing can be compared any more",
    "reading": "the prompt is read otherwise than by the plain model: through its own eviction",
    "uneven": "a layer was not evicted, and the others were",
    "empty": "a layer keeps no entry of the prompt",
    "row": CHANGES["row"],
    "padding": "padding is attended to",
    "repeated": "every entry is cached once per query head",
    "zeros": "entries of nothing: neither key nor value",
    "foreign": "entries like none of the prompt's",
    **{kind: meaning for kind, meaning in CHANGES.items() if kind not in ("row", "changed")},
    "duplicate": "an entry is cached several times",
    "hidden": "a mask hides entries that the cache holds",
    "unexpected": "a kept set is not the one that was meant",
    UNMEASURED: "the window or state of a layer that is not measured was changed",
    "positions": "new tokens stand at wrong positions",
    "mask": "the mask of a block does not fit",
    "raised": "reading or decoding raises an error",
    "changed": CHANGES["changed"],
    "decoding": "decoding differs, for no reason that was looked for",
}
"""Kind of a fault -> its meaning, the most telling first."""
UNMATCHED = ("foreign", "changed")
"""Kinds of differences that say only that entries are not known."""
_OF_DECODING = ("positions", "mask", "decoding")
"""Kinds of differences that are found by decoding, and not by looking at entries."""


def floors_text(floors: float, _: Any = None) -> str:
    """Return a number of noise floors as text: '0.7', '120', '3e6'; a dash for NaN.

    The second argument is the interval that a column's text is given; floors have none.
    """
    if isnan(floors):
        return "–"
    if floors >= _LARGE:
        return f"{floors:.0e}".replace("e+0", "e")
    return f"{floors:,.1f}" if floors < 100 else f"{floors:,.0f}"


@record
class Fault(Record):
    """The first difference of one prompt in one situation."""

    sample: str = column("of the prompt")
    situation: str = column("single, block or batch")
    row: int = column("of the batch")
    kind: str = column(f"kind of the difference: {', '.join(KINDS)}")
    what: str = column("what is wrong")
    layer: int = column("the first that differs, from 0; −1 where it is of none", default=-1)
    head: int = column(
        "a kept set of the cache where its entries differ, else a query head; −1 where it is of none", default=-1
    )
    step: int = column("forward pass after the eviction, from 0; −1 where it is of none", default=-1)
    entry: int = column("position in the prompt of the first entry concerned; −1 where it is of none", default=-1)
    floors: float = column(
        "noise floors between decoding and its reference in that layer at that step; null where none was measured",
        default=nan,
    )

    def location(self) -> str:
        """Return layer, head, entry and step as text, without unknown parts: 'layer 3, head 1'."""
        parts = (("layer", self.layer), ("head", self.head), ("entry", self.entry), ("step", self.step))
        return ", ".join(f"{name} {index}" for name, index in parts if index >= 0)

    def place_and_cause(self) -> str:
        """Return where it is, if anywhere, and what is wrong, as text."""
        return f"{self.location()}: {self.what}" if self.location() else self.what

    def sort_key(self) -> tuple[int, int, int]:
        """Return the sort key of an audit's faults: the most telling kind first, then by situation and row."""
        return list(KINDS).index(self.kind), list(SITUATIONS).index(self.situation), self.row

    def sort_key_in_run(self) -> tuple[int, int, int, int]:
        """Return the sort key of a run's differences: by step, layer, kind and head."""
        return self.step, self.layer, list(KINDS).index(self.kind), self.head


@record
class DecodingStep(Record):
    """A forward pass after the eviction, against the masked reference, in noise floors.

    Distances are relative, ‖measured − reference‖₂ / ‖reference‖₂, the largest over the tokens of the pass; floors are
    the same distance between runs of the plain model that keep the same entries and round otherwise.

    Attributes:
        head_floors: (layer, head) distance of the head's output before the output projection, over the larger of its
            own norm and the layer's root mean square norm; NaN where only logits are known.
        fewer: whether the attention got fewer entries than the cache held with the new tokens'.
        new_error: (kind, layer) largest distance of a new token's key and value, over the reference's norm; empty where
            they are not known.
    """

    step: int = column("forward pass after the eviction, from 0", heading="#step", json=False)
    tokens: int = column("of the forward pass", heading="#tokens")
    head_floors: Floats
    hidden: Floats = column("distance of the residual stream after the layer, in noise floors", dims=("layer",))
    logits: float = column(
        "distance of the logits, each less their mean, in noise floors", heading="#logits", text=floors_text
    )
    same_token: bool = column(
        "whether the most likely token is the reference's",
        heading="token",
        text=lambda same: "same" if same else "another",
    )
    behind: float = column("positions that the new tokens stand too early; null where their keys are rotated otherwise")
    fewer: bool = False
    new_error: Floats = field(default_factory=lambda: np.zeros((2, 0)))

    @derived(dims=("layer",))
    def heads(self) -> Floats:
        """Distance of the worst head from the masked reference, in noise floors."""
        return np.asarray(self.head_floors.max(axis=-1))

    @derived(heading="#heads", json=False, text=floors_text)
    def worst_head(self) -> float:
        """Distance of the worst head of all layers, in noise floors."""
        return float(self.heads.max())

    @derived(heading="#hidden", json=False, text=floors_text)
    def worst_hidden(self) -> float:
        """Distance of the residual stream where it is largest, in noise floors."""
        return float(self.hidden.max())

    @property
    def layer_floors(self) -> Floats:
        """Each layer's distance, (layer,): the larger of its worst head's and its stream's."""
        return np.asarray(np.fmax(self.heads, self.hidden))


def worst_floors(steps: tuple[DecodingStep, ...]) -> float:
    """Return the largest distance in noise floors over all steps, of layers and logits; NaN is passed over."""
    return float(np.nanmax([[*step.layer_floors, step.logits] for step in steps]))


@record
class AuditedRun(Record):
    """The audit of one prompt in one situation: its entries, decoding steps and first difference.

    Attributes:
        own_steps: distances of decoding from the plain model whose attention gets the cache's own entries; empty where
            it cannot.
        allowed: keys of `ALLOWED`.
        failed_layer: the layer that explains the error, as it was not evicted; −1 without one.
        damage: what the eviction changed in the model, in words; empty where it is as before.
        sees_later: whether a token of a block attends to later tokens.
        hides: whether a token of a block misses an entry that the last token attends to.
        parts: number of parts in which the prompt was read, later ones through what was left of earlier ones; else 1.
        reads_rounded: whether the prompt's own attention got rounded entries.
        worse: a later pass and layer whose entries are much farther from the known ones than at first; None for none.
        others: differences beside those of entries: how the prompt was read, changes to windows and states of layers
            that are not measured (by their numbers in the model), the first kept set that is not the meant one.
        numbers: the measured layers' numbers in the model; empty where these are all.
        next_position: where the cache says that the next token stands, which a plain call of the model follows; None
            where it does not say it.
    """

    sample: str = column("of the prompt")
    situation: str = column("single, block or batch")
    row: int = column("of the batch")
    tokens: int = column("tokens of the prompt (n), padding not counted", heading="#tokens")
    padding: int = column("entries of padding before the prompt")
    positions: str = column("original, or in-cache: keys at 0, 1, … and new tokens after them", default=ORIGINAL)
    failed: str = column("what the eviction or its decoding raised, and where", default="")
    refused: str = column("what an eviction that does not take this situation said", default="")
    entries: CacheEntries | None = column("what the cache keeps", default=None)
    steps: tuple[DecodingStep, ...] = column("forward passes after the eviction", default=())
    own_steps: tuple[DecodingStep, ...] = ()
    allowed: tuple[str, ...] = ()
    failed_layer: int = -1
    damage: str = ""
    sees_later: bool = False
    hides: bool = False
    parts: int = 1
    reads_rounded: bool = False
    worse: tuple[int, int] | None = None
    others: tuple[Alteration, ...] = ()
    numbers: tuple[int, ...] = ()
    next_position: int | None = None

    @derived(heading="#floors", json=False, text=floors_text)
    def worst(self) -> float | None:
        """Distance from the reference in noise floors, the worst of heads, layers and steps."""
        return worst_floors(self.compared_steps) if self.steps else None

    @derived(heading="#cache\nshare", json=False)
    def cache_share(self) -> float | None:
        """Entries over those of the full cache."""
        return None if self.entries is None else self.entries.cache_share

    @derived(heading="keys and values", json=False)
    def alterations(self) -> str | None:
        """Kept keys and values: intact, as in the full cache, or altered in how many kept sets."""
        if self.entries is None:
            return None
        altered = {(change.layer, change.head) for change in self.entries.altered}
        if altered:
            return f"{len(altered)} of {self.entries.set_count} sets altered"
        return "new tokens' rounded" if self.rounds_new_tokens else "intact"

    @derived(heading="first difference", json=False)
    def difference(self) -> str:
        """The first difference from the reference."""
        if self.fault is None:
            return f"refused: {self.refused}" if self.refused else "none"
        return self.fault.place_and_cause()

    @property
    def name(self) -> str:
        """The prompt, the situation and the row of a batch, as text."""
        return f"{escape_line(self.sample)}: {self.situation}{f', row {self.row}' if self.situation == 'batch' else ''}"

    @derived(json=False)
    def fault(self) -> Fault | None:
        """The first difference from the reference that is no rounding.

        Where entries differ, decoding is compared with the plain model on the same entries.
        """
        if self.damage:
            return self._fault("model", f"{self.damage}, and {self.failed}" if self.failed else self.damage)
        first = self._first_difference()
        if self.failed and (first is None or first.kind == "decoding"):  # a kind without a cause
            first = self._fault("uneven" if self.failed_layer >= 0 else "raised", self.failed, self.failed_layer)
        if first is None or not 0 <= first.step < len(self.steps) or first.kind == UNMEASURED:
            return first
        step = (self.compared_steps if first.kind in _OF_DECODING else self.steps)[first.step]
        layer = self.numbers.index(first.layer) if first.layer in self.numbers else first.layer
        return replace(first, floors=float(step.logits if layer < 0 else step.layer_floors[layer]))

    def layer_number(self, layer: int) -> int:
        """Return the number in the model of a measured layer; −1 stays."""
        return self.numbers[layer] if self.numbers and layer >= 0 else layer

    def _first_difference(self) -> Fault | None:
        """Return the first difference of entries or decoding that is a fault; None without any.

        Rounding is none. Entries that match none are passed over where these are allowed and nothing else differs, and
        where something does that the plain model on the same entries does not do.
        """
        wrong = self._wrong_differences()
        passed = bool(self.own_steps) if wrong else UNKNOWN in self.allowed
        unmatched = [] if passed else self._unmatched
        return min([*wrong, *unmatched], key=Fault.sort_key_in_run, default=None)

    @property
    def is_unknown(self) -> bool:
        """True where entries match none of the prompt's, and nothing else differs."""
        return bool(self._unmatched) and not self.damage and not self.failed and not self._wrong_differences()

    @property
    def is_rounded(self) -> bool:
        """True where entries of the prompt or of new tokens are rounded, whatever else differs."""
        altered = self.entries is not None and any(change.kind in ROUNDING for change in self.entries.altered)
        return altered or self.rounds_new_tokens or self.reads_rounded

    @property
    def compared_steps(self) -> tuple[DecodingStep, ...]:
        """Decoding against the masked reference, or against the plain model with the same entries if these differ."""
        own = self.own_steps and (self.is_rounded or self._unmatched)
        return self.own_steps if own else self.steps

    @property
    def rounds_new_tokens(self) -> bool:
        """True where entries of new tokens are off by more than noise, at the right positions, near their originals."""
        if self.entries is None or not self.own_steps:
            return False
        errors = [step.new_error for step in self.own_steps]
        right = all(step.behind == 0 for step in self.own_steps) and bool((np.array(errors) < MOST_ROUNDED).all())
        return right and any(bool((error > FLOORS * self.entries.floors).any()) for error in errors)

    @property
    def _unmatched(self) -> list[Fault]:
        """The differences of entries that match none of the prompt's, or are not nearly the new tokens' own."""
        strange = self._all_entry_differences
        if self.own_steps and (self.is_rounded or any(fault.kind in UNMATCHED for fault in strange)):
            strange += self._strange_new_tokens()
        return [fault for fault in strange if fault.kind in UNMATCHED]

    @property
    def first_unmatched(self) -> Fault:
        """The first of the entries that match none of the prompt's, of which there is one."""
        return min(self._unmatched, key=Fault.sort_key_in_run)

    @property
    def _all_entry_differences(self) -> list[Fault]:
        """All differences between the cache's entries and the full cache's."""
        return [] if self.entries is None else [*self._entry_differences(self.entries)]

    def _wrong_differences(self) -> list[Fault]:
        """Return the differences that neither rounding nor unmatched entries explain."""
        wrong = [fault for fault in self._all_entry_differences if fault.kind not in (*ROUNDING, *UNMATCHED)]
        for one in self.others:
            step = -1 if one.kind == "reading" else 0
            number = one.layer if one.kind == UNMEASURED else self.layer_number(one.layer)
            wrong.append(replace(self._fault(one.kind, one.what, -1, one.head, step, one.entry), layer=number))
        compared = self.compared_steps
        if self.worse and compared is self.own_steps:
            step, layer = self.worse
            wrong.append(self._fault("changed", "entries change while it decodes", layer, step=step))
        if compared is self.own_steps:
            wrong += [fault for fault in self._strange_new_tokens() if fault.kind not in UNMATCHED]
        return [*wrong, *self._decoding_difference(compared)]

    def _strange_new_tokens(self) -> Iterator[Fault]:
        """Yield a fault per step whose new tokens' entries are not the tokens' own, nor these rounded."""
        for step in self.own_steps:
            if step.behind:
                kind, what = self._cause(step)
                yield self._fault(kind, what, 0, step=step.step)
                return
            if len(strange := np.argwhere(~(step.new_error < MOST_ROUNDED))):
                of, layer = map(int, strange[strange[:, 1].argmin()])
                what = f"{('keys', 'values')[of]} of new tokens are not the tokens' own"
                nearly = bool((step.new_error < 2 * MOST_ROUNDED).all())
                yield self._fault("changed" if nearly else "decoding", what, layer, step=step.step)

    def _fault(self, kind: str, what: str, layer: int = -1, head: int = -1, step: int = -1, entry: int = -1) -> Fault:
        """Return a fault of this run, without its distance."""
        return Fault(self.sample, self.situation, self.row, kind, what, self.layer_number(layer), head, step, entry)

    def _entry_differences(self, entries: CacheEntries) -> Iterator[Fault]:
        """Yield all differences between a cache's entries and the full cache's, kind by kind."""
        for layer in entries.repeated:
            sets = entries.kept_sets[entries.repeated[0]]  # the first such layer stands for all
            same = [np.array_equal(kept_set, sets[0]) for kept_set in sets]
            times = same.index(False) if False in same else len(sets)
            what = f"every entry is cached {times} times, once per query head (repeat_kv before caching)"
            yield self._fault("repeated", what, layer, 0, 0)
        for layer, kept in enumerate(entries.kept):
            others = (entries.strangers, entries.padded, entries.hidden)
            if not any(kept) and not any(counts[layer].any() for counts in others):
                yield self._fault("empty", "no entry of the prompt is kept", layer, step=0)
        for change in entries.altered:
            yield self._fault(change.kind, change.what, change.layer, change.head, 0, change.entry)
        unknown = np.full_like(entries.padded, -1)  # neither padding nor foreign entries have a position in the prompt
        for kind, counts, first, words in (
            ("padding", entries.padded, unknown, "{} of padding attended to"),
            ("zeros", entries.zeros, unknown, "{} of nothing: zeros"),
            ("foreign", entries.strangers, unknown, "{} like none of the prompt's"),
            ("duplicate", entries.duplicates, entries.first_duplicate, "{} kept twice"),
            ("hidden", entries.hidden, entries.first_hidden, "a mask hides {} that the cache holds"),
        ):
            for layer, head in np.argwhere(counts > 0):
                count = int(counts[layer, head])
                what = words.format(f"{count:,} {'entry' if count == 1 else 'entries'}")
                if kind == "duplicate" and count > 1:  # of one entry or of several
                    what = f"{count:,} repeats of kept entries"
                yield self._fault(kind, what, int(layer), int(head), 0, int(first[layer, head]))

    def _decoding_difference(self, steps: tuple[DecodingStep, ...]) -> Iterator[Fault]:
        """Yield one fault at most: the first step, layer and head where decoding differs from the reference.

        Heads are looked at first, then the residual stream, then the logits.
        """
        for name, words in (
            ("head_floors", ""),
            ("hidden", "the residual stream differs from the reference's"),
            ("logits", "the logits differ from the reference's"),
        ):
            differs: NDArray[np.int64] = np.argwhere(np.array([getattr(step, name) for step in steps]) > FLOORS)
            if not len(differs):
                continue
            step, layer, head = (*map(int, differs[0]), -1, -1)[:3]  # −1 for an axis that the array does not have
            kind, what = ("decoding", words) if words else self._cause((self.own_steps or steps)[step])
            yield self._fault(kind, what, layer, head, step)
            return

    def _cause(self, step: DecodingStep) -> tuple[str, str]:
        """Return the cause of a decoding difference as its kind and as text: positions, masks, or unknown."""
        behind = step.behind
        if isnan(behind) and step.fewer:
            return "decoding", "entries are removed before the new tokens attend to them"
        if isnan(behind):
            return "positions", "no rotation explains the keys of new tokens"
        if behind:
            count, side = abs(behind), "early" if behind > 0 else "late"
            return "positions", f"new tokens stand {count:,.0f} {'position' if count == 1 else 'positions'} too {side}"
        if self.sees_later:
            return "mask", "the mask of a block lets its tokens see those behind them"
        if self.hides:
            return "mask", "the mask of a block hides kept entries from some of its tokens"
        entries = "" if self.entries and self.entries.altered else ", its entries do not"
        return "decoding", f"decoding differs from the masked reference{entries}"

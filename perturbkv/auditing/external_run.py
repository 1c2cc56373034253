"""Runs of an eviction in one situation: prefill, decoding at explicit positions, comparison with a masked reference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import Cache

from perturbkv.analyses.audit.audited_runs import AuditedRun, DecodingStep
from perturbkv.analyses.audit.cache_entries import FLOORS, MOST_ROUNDED, Alteration, CacheEntries
from perturbkv.auditing.changes import excess_rotations
from perturbkv.auditing.forward_passes import (
    ForwardPass,
    Situation,
    attends_to_later,
    hides_entries,
    record_pass,
    record_reading,
)
from perturbkv.auditing.kept_entries import EntryComparison, EntryTracker, first_of_groups, repeat_heads
from perturbkv.auditing.positions import (
    UNROTATED,
    decode_moving,
    frequencies_of,
    held_positions,
    keys_can_move,
    match_all_at_zero,
    match_at_zero,
    move_to_cache_positions,
)
from perturbkv.auditing.prompt_reading import PromptReading, reading_of
from perturbkv.auditing.reference import (
    ARRANGEMENTS,
    Arrange,
    Distances,
    PromptEntries,
    decode,
    decode_chunk,
    entry_distances,
    floors_between,
    masked_attention,
    noise_floors,
    pass_distances,
    prompt_entries,
    read_prompts,
)
from perturbkv.auditing.unmeasured import (
    UnmeasuredLayers,
    cache_numbers,
    fill_cache,
    find_changes,
    measured_numbers,
    read_contents,
    window_distances,
)
from perturbkv.cache.external_cache import Layers, layer_tensors, pair_layers, recover_positions
from perturbkv.cache.model_state import ModelState, describe_damage
from perturbkv.configs.audit_settings import IN_CACHE, ORIGINAL, AuditSettings
from perturbkv.configs.plugins import external_code
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.selection.external_eviction import Eviction, FailedError, RefusedError, eviction_code

_MOST_SHIFT = 4096
"""Largest number of positions that keys of new tokens are tested to lag behind."""
_CLEAR_RATIO = 10
"""Ratio of the distances from two conventions of positions above which rounding does not explain which is nearer."""
_ENOUGH_KEYS = 4
"""Least number of keys of new tokens, over heads, whose common rotation under rounding is no chance."""
_DEFAULT = AuditSettings()


def run_eviction(
    adapter: Adapter,
    eviction: Eviction,
    situation: Situation,
    prompts: PromptEntries,
    before: ModelState,
    settings: AuditSettings = _DEFAULT,
) -> ExternalRun:
    """Return the measurements of an eviction in a situation, including any exception that it raises.

    `prompts` are the entries of the plain model, `before` is the model before any eviction ran, which is put back.
    Raises UnreadableCacheError where the cache does not show its entries.
    """
    tracker = EntryTracker(adapter, situation, prompts, masks_itself=eviction.masks)
    external = ExternalRun(adapter, eviction, settings, tracker, before)
    try:
        external.read_and_decode()
    except RefusedError as error:
        external.refused = str(error)
    except FailedError as error:
        external.failed = str(error)
    finally:
        external.damage = describe_damage(before.restore())
    return external


@dataclass
class ExternalRun:
    """The measurements of an eviction in a situation.

    Attributes:
        adapter: the model.
        eviction: the eviction.
        settings: of the audit.
        tracker: the kept entries of the cache, with the situation and the plain model's entries.
        before: the model before any eviction ran.
        passes: the completed forward passes.
        given: what the attention of each pass got: per layer keys and values, on the CPU, and which of the entries
            before the new ones are attended to; empty where the cache holds other numbers of heads than the model.
        failed, failed_layer, refused, damage: as in `AuditedRun`; a damaged model has no reference.
        hides_all: whether the cache shows fewer entries than its attention gets, which are all.
        unmeasured: per row, what the eviction changed in layers that are not measured.
        reading: how the eviction read the prompts.
        next_position: as in `AuditedRun`.
    """

    adapter: Adapter
    eviction: Eviction
    settings: AuditSettings
    tracker: EntryTracker
    before: ModelState
    passes: list[ForwardPass] = field(default_factory=list)
    given: list[tuple[Layers, list[Tensor]]] = field(default_factory=list)
    failed: str = ""
    failed_layer: int = -1
    refused: str = ""
    damage: str = ""
    hides_all: bool = False
    unmeasured: dict[int, list[Alteration]] = field(default_factory=dict)
    reading: PromptReading | None = None
    next_position: int | None = None

    @property
    def places(self) -> tuple[int, ...]:
        """Numbers in a cache of the layers whose entries the measured ones read; empty where these are all."""
        return cache_numbers(self.adapter)

    def read_and_decode(self) -> None:
        """Run the eviction's reading of the prompts and the decoding.

        Raises RefusedError or FailedError for what the eviction raises.
        """
        with record_reading(self.adapter) as calls:
            cache = self.eviction.read(
                self.adapter.model, self.tracker.situation.ids, self.tracker.situation.attention_mask
            )
        with suppress(FailedError), external_code("", FailedError):
            self.next_position = int(cache.get_seq_length())
        with external_code("looking at its cache raises", FailedError):  # its methods are not ours
            layers = self._attended_layers(cache)
            self._count_padding_as_the_eviction(cache, layers)
            self.reading = reading_of(self.adapter, self.tracker.situation, self.tracker.prompts, calls, self.before)
            calls.clear()
            self.tracker.prompts = self.reading.prompts
            self._expect_keys_in_cache(layers)
            self._check_layers(cache)
            least = torch.finfo(self.adapter.dtype).eps
            evicted = self.adapter.layer_indices if self.adapter.holds_latents else ()
            for row, padding in enumerate(self.tracker.situation.padding):
                self.unmeasured[row] = [*find_changes(cache, self.tracker.prompts.rests, row, padding, least, evicted)]
        lengths = self._layer_lengths(cache)
        for chunk in range(len(self.tracker.situation.chunks)):
            record = ForwardPass()
            try:
                with external_code("looking at its cache raises", FailedError):
                    held = self._layer_lengths(cache)
                    if chunk and self.tracker.situation.cached is not None:
                        self._expect_new_tokens_after(self._entries_before(cache, chunk))
                with record_pass(self.adapter, record):
                    record.logits = self._logits(cache, chunk)
            except FailedError as error:
                self._record_failure(str(error), lengths)
                return
            record.fewer = bool(held) and record.entries.get(0, 0) < held[0] + len(self.tracker.situation.chunks[chunk])
            hides = (*self.tracker.situation.hides_padding, record.hides_padding)
            self.tracker.situation = replace(self.tracker.situation, hides_padding=hides)
            self._add_pass(record, cache)

    def results(self, sample: str) -> list[AuditedRun]:
        """Return the audited run of each row of the situation's batch; `sample` is the prompt's id.

        Without entries and steps where no pass was completed or the model is damaged.
        """
        masks = [] if self.damage else self.tracker.masks
        completed = replace(self.tracker.situation, chunks=self.tracker.situation.chunks[: len(self.passes)])
        reference, noise = self._reference(completed, masks) if masks else ([], None)
        own, own_noise = self._decode_given() if noise else [], noise
        if noise and own:  # rounded entries may be worse conditioned than the plain model's
            others, layers = map(self._decode_given, ARRANGEMENTS), len(self.tracker.prompts.full)
            floors = floors_between(self.adapter, own, others, completed.rows, layers)
            if bool(floors.logits.isfinite()):  # NaN among the entries is no noise
                own_noise = noise.maximum(floors)
        compared = [EntryComparison(self.tracker, row).entries() if noise else None
                    for row in range(self.tracker.situation.rows)]  # fmt: skip
        return [
            AuditedRun(
                sample=sample, situation=self.tracker.situation.name, row=row, padding=padding,
                positions=ORIGINAL if self.tracker.situation.cached is None else IN_CACHE,
                tokens=self.tracker.situation.entries - padding, failed=self.failed, refused=self.refused,
                entries=compared[row],
                steps=self._compare_steps(row, reference, noise) if noise else (),
                own_steps=self._compare_steps(row, own, own_noise, rounds=_may_round(compared[row]))
                if own_noise else (),
                allowed=self.settings.allow, failed_layer=self.failed_layer, damage=self.damage,
                sees_later=any(map(attends_to_later, self.passes)), hides=any(map(hides_entries, self.passes)),
                parts=self.reading.parts if self.reading else 1,
                reads_rounded=bool(self.reading and self.reading.rounded), worse=self.tracker.worse.get(row),
                others=(*(self.reading.misread if self.reading else ()), *self.unmeasured.get(row, ())),
                numbers=measured_numbers(self.adapter), next_position=self.next_position,
            )
            for row, padding in enumerate(self.tracker.situation.padding)
        ]  # fmt: skip

    def _expect_new_tokens_after(self, entries: int) -> None:
        """Expect the new tokens of the forward pass that comes, or just came, after that many entries of the cache."""
        before = (self.tracker.situation.cached or ())[: len(self.passes)]
        self.tracker.situation = replace(self.tracker.situation, cached=(*before, entries))

    def _reference(
        self, situation: Situation, masks: Sequence[Sequence[Tensor]]
    ) -> tuple[list[ForwardPass], Distances]:
        """Return the masked reference's forward passes and their noise floors.

        `situation` has the completed passes only, `masks` a mask (row, kept_head, entry) for each pass and layer.
        """
        if self.tracker.original is not None and self.tracker.keys_move:
            return decode_moving(self.adapter, self.tracker.original, situation, masks, self.tracker.held)
        passes = list(
            decode(self.adapter, fill_cache(self.adapter, self.tracker.prompts.readings[0]), situation, masks)
        )
        return passes, noise_floors(self.adapter, passes, self.tracker.prompts, situation, masks)

    def _compare_steps(
        self, row: int, reference: Sequence[ForwardPass], noise: Distances, *, rounds: bool = False
    ) -> tuple[DecodingStep, ...]:
        """Return the distances between a row's forward passes and those of a reference, in units of `noise`.

        `rounds`: whether the entries of new tokens may be rounded. Empty for an empty reference.
        """
        steps, layers = [], len(self.tracker.prompts.full)
        for step, (record, expected) in enumerate(zip(self.passes, reference, strict=bool(reference))):
            distances = pass_distances(record, expected, row, layers)
            steps.append(
                DecodingStep(
                    step=step, tokens=len(self.tracker.situation.chunks[step]),
                    head_floors=(distances.head.cpu() / noise.head).numpy(),
                    hidden=(distances.hidden.cpu() / noise.hidden).numpy(),
                    logits=float(distances.logits.cpu() / noise.logits),
                    same_token=bool(record.logits[row, -1].argmax() == expected.logits[row, -1].argmax()),
                    behind=self._position_lag(record, expected, row, rounds=rounds), fewer=record.fewer,
                    new_error=_new_entry_errors(record, expected, row, self.tracker.prompts.full),
                )
            )  # fmt: skip
        return tuple(steps)

    def _position_lag(self, record: ForwardPass, reference: ForwardPass, row: int, *, rounds: bool = False) -> float:
        """Return the number of positions by which a row's new keys lag behind the reference's in the first layer.

        It is 0 where the keys are the reference's up to rounding, and NaN where no single number of positions explains
        the keys of all heads and tokens. Where the first attention is not measured, or keys are rotated otherwise, it
        is that of the positions that the decoder is given. Keys that no rotation explains tell nothing where a layer
        before them has a state, as their token's may have been another one.
        """
        if self.adapter.rotary is None or self.adapter.layer_indices[0] > min(self.adapter.every_attention):
            if record.positions is None or reference.positions is None:
                return 0.0
            lags = (reference.positions - record.positions.expand_as(reference.positions))[row]
            return float(lags[0]) if bool((lags == lags[0]).all()) else float("nan")
        reference_keys = reference.new_entries(0)[0]
        expected = reference_keys[row]
        keys = first_of_groups(record.new_entries(0), reference_keys.shape[1])[0][row]
        length = torch.linalg.vector_norm(expected.float(), dim=-1)
        distance = torch.linalg.vector_norm(keys.float() - expected.float(), dim=-1) / length
        if float(distance.amax()) <= FLOORS * float(self.tracker.prompts.floors[0, 0]):
            return self._lag_above(record, reference, row) if rounds else 0.0
        if lag := self._common_shift(keys, expected, rounds=rounds):
            return -lag
        if rounds and float(distance.median()) <= 2 * MOST_ROUNDED:  # above once, they are unknown
            return self._lag_above(record, reference, row)
        before = self.adapter.facts.layers[: self.adapter.layer_indices[0]]
        return 0.0 if any(layer.state for layer in before) else float("nan")

    def _lag_above(self, record: ForwardPass, reference: ForwardPass, row: int) -> float:
        """Return by how many positions a row's new keys lag behind the reference's in the first layer where they do.

        The reference decodes from the same entries, so that its new keys are to be the same in every layer.
        """
        for layer in range(1, len(self.tracker.prompts.full)):
            expected = reference.new_entries(layer)[0]
            keys = first_of_groups(record.new_entries(layer), expected.shape[1])[0][row]
            if lag := self._common_shift(keys, expected[row], rounds=keys.shape[:2].numel() >= _ENOUGH_KEYS):
                return -lag
        return 0.0

    def _common_shift(
        self, keys: Float[Tensor, "head new d_key"], expected: Float[Tensor, "head new d_key"], *, rounds: bool
    ) -> float:
        """Return the number of positions by which all keys are rotated too far; 0 where no single one explains them.

        `rounds`: whether they may be rounded, too.
        """
        most, frequencies = min(2 * self.tracker.situation.entries, _MOST_SHIFT), frequencies_of(self.adapter)
        for by_rounding in (False, True)[: 1 + rounds]:
            shifts = excess_rotations(
                keys.flatten(0, 1), expected.flatten(0, 1), frequencies, most, rounded=by_rounding
            )
            if shifts is not None and bool((shifts == shifts[0]).all()):
                return float(shifts[0])
        return 0.0

    def _attended_layers(self, cache: Cache) -> Layers:
        """Return the entries that new tokens attend to.

        They are those that the cache holds, unless it does not show them, or its keys are without positions: then the
        eviction reads the prompts once more and decodes a token, and they are those that the attention gets.
        """
        layers: Layers = []
        entries = self.tracker.situation.entries
        shows_fewer = min(self._layer_lengths(cache), default=entries) != entries
        hides = self.adapter.holds_latents or (shows_fewer and self._said_length(cache) == entries)
        with suppress(UnreadableCacheError):
            layers = [] if self.adapter.holds_latents else layer_tensors(cache, self.places)
            if layers and not _fit_full_cache(layers, self.tracker.prompts.full):
                return layers
            distances = self.tracker.convention_distances(layers[0]) if layers and not hides else {}
            if distances and min(distances[IN_CACHE], distances[ORIGINAL]) <= distances[UNROTATED]:
                return layers
        record = ForwardPass()
        trial = self.eviction.read(
            self.adapter.model, self.tracker.situation.ids, self.tracker.situation.attention_mask
        )
        with record_pass(self.adapter, record):
            self._logits(trial, 0, "decoding token 0")
        if record.is_complete(len(self.tracker.prompts.full)):
            seen = [record.previous_entries(layer) for layer in range(len(self.tracker.prompts.full))]
            self.hides_all = all(keys.shape[2] == self.tracker.situation.entries for keys, _ in seen)
            if hides and layers and not self.hides_all:  # it counts what went, too
                return layers
            layers = seen
            if _fit_full_cache(layers, self.tracker.prompts.full):
                self._check_not_relative(layers[0])
        return layers

    def _check_not_relative(self, layer: tuple[Tensor, Tensor]) -> None:
        """Raise UnreadableCacheError for first-layer keys that stand right before the new tokens, wherever these are.

        Such keys are much nearer to the full cache's at those places than at either convention's.
        """
        situation, full = self.tracker.situation, self.tracker.prompts.full[0]
        places = torch.arange(-layer[0].shape[2], 0, device=layer[0].device) + situation.positions(0)[0, 0]
        before, frequencies = situation.prompt_positions(), frequencies_of(self.adapter)
        (kept,) = match_at_zero([layer], [full], 0, situation.padding[0], before, frequencies, places)
        relative = sum(float(distance.sum()) for distance in kept.key_distance)
        distances = self.tracker.convention_distances(layer)
        if _CLEAR_RATIO * relative < min(distances[ORIGINAL], distances[IN_CACHE]):
            raise UnreadableCacheError(
                f"its keys follow the new tokens: they stand at {int(places[0])} … {int(places[-1])}, as these stand "
                f"at {int(places[-1]) + 1}, which an audit does not judge; hand them out at 0, 1, …, for new tokens "
                "after them"
            )

    def _count_padding_as_the_eviction(self, cache: Cache, layers: Layers) -> None:
        """Count positions from the first entry on, padding or not, if the cache's first layer shows that it does so.

        Plain calls of a model count them so. Windows of layers that are not measured show it, too.
        """
        padding = self.tracker.situation.padding[-1]

        def distance(full: Layers, rest: UnmeasuredLayers) -> float:
            """Return how far windows and keys of the first layer, if any, are in the last row, the padded one."""
            windows = sum(window_distances(cache, rest, padding))
            try:
                first = layers[0]
                (kept,) = recover_positions(
                    [first], [repeat_heads(full[0], first[0].shape[1])], row=len(full[0][0]) - 1
                )
            except (UnreadableCacheError, IndexError):
                return windows
            return float(torch.cat(kept.key_distance).sum()) + windows

        if not padding or not (original := distance(self.tracker.prompts.full, self.tracker.prompts.rests[0])):
            return
        counted = replace(self.tracker.situation, counts_padding=True)
        read = read_prompts(self.adapter, counted)
        if distance(*read) < original:
            self.tracker.situation, self.tracker.prompts = counted, prompt_entries(self.adapter, counted, read)

    def _expect_keys_in_cache(self, layers: Layers) -> None:
        """Expect keys at 0, 1, … and new tokens after them where the user says so, or the first layer shows it."""
        full, situation = self.tracker.prompts.full, self.tracker.situation
        fits = keys_can_move(self.adapter) and _fit_full_cache(layers, full)
        if self.settings.positions == ORIGINAL or not fits:
            return
        distances = self.tracker.convention_distances(layers[0])
        if self.settings.positions == IN_CACHE or distances[IN_CACHE] < distances[ORIGINAL]:
            before = situation.prompt_positions()
            rotation = situation.padding, before, frequencies_of(self.adapter)
            held = held_positions(match_all_at_zero(layers, full, *rotation))
            self.tracker.original = self.tracker.prompts
            self.tracker.prompts = move_to_cache_positions(self.adapter, held, self.tracker.prompts, situation, before)
            self._expect_new_tokens_after(layers[0][0].shape[2])

    def _check_layers(self, cache: Cache) -> None:
        """Raise UnreadableCacheError for layers that contradict the cache's reported length, or exceed the full cache.

        A cache without keys as attributes may still pass them to the attention, and is not checked.
        """
        layers = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", None) or ()]
        layers = [layers[index] for index in self.places or range(len(layers)) if index < len(layers)]
        shown = [keys for keys in layers if isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel()]
        if not shown or len(shown) < len(layers) or self.adapter.holds_latents:
            return
        full = [
            repeat_heads(layer, keys.shape[1]) for layer, keys in zip(self.tracker.prompts.full, shown, strict=False)
        ]
        for row in range(self.tracker.situation.rows):
            pair_layers(cache, full, row, self.places)

    def _entries_before(self, cache: Cache, chunk: int) -> int:
        """Return the number of entries after which a chunk's tokens stand, where positions are those in the cache.

        It is the number so far, those decoded since included. An eviction while decoding lowers it to what the cache
        holds where the keys stand at their places in the cache, or have no positions.
        """
        so_far, lengths = int(self.tracker.situation.positions(chunk)[0, 0]), self._layer_lengths(cache)
        if not lengths or lengths[0] >= so_far:
            return so_far
        distances = self.tracker.convention_distances(layer_tensors(cache, self.places)[0])
        return lengths[0] if min(distances[IN_CACHE], distances[UNROTATED]) < distances[ORIGINAL] else so_far

    def _record_failure(self, error: str, lengths: Sequence[int]) -> None:
        """Record an exception, after what caused it: a layer that was not evicted, or layers of several lengths.

        `lengths` are the numbers of entries of the layers after the prompt was read.
        """
        self.failed = error
        whole = [layer for layer, length in enumerate(lengths) if length == self.tracker.situation.entries]
        if whole and len(whole) < len(lengths):
            self.failed_layer = whole[0]
            others = min(lengths)
            self.failed = f"it was not evicted: it holds all {max(lengths)} entries, others {others}; {error}"
        elif len(set(lengths)) > 1 and self.eviction.decode is None:
            self.failed = (
                f"its layers hold {min(lengths)} to {max(lengths)} entries, but a plain call of the model makes one "
                f"mask for all; give it a `decode` of its own; {error}"
            )

    def _add_pass(self, record: ForwardPass, cache: Cache) -> None:
        """Add a forward pass; its entries, as large as the cache, are matched at once and then freed.

        Raises UnreadableCacheError where the pass was not made by the model's attention, or not of all new tokens at
        once.
        """
        full, chunk = self.tracker.prompts.full, len(self.passes)
        if not record.is_complete(len(full)):
            raise UnreadableCacheError(
                f"no keys to look at: the attention of the model was not used by {type(cache).__name__}'s decoding"
            )
        given = self.tracker.situation.new_tokens(chunk).shape
        if (seen := record.query[0].shape[::2]) != given:  # (row, new), of the last call where there were several
            one, all_at_once = (f"{rows} × {tokens}" for rows, tokens in (seen, given))
            raise UnreadableCacheError(
                f"its decoding gives the model {one} tokens in a call, expected {all_at_once} at once"
            )
        attended = self.tracker.add_pass(record)
        if self.tracker.keys_move:
            self._expect_new_tokens_after(record.entries[0] - record.query[0].shape[2])
        entries = [record.previous_entries(layer) for layer in range(len(full))]
        if entries[0][0].shape[1] == full[0][0].shape[1]:
            layers = range(len(full))
            self.given.append(([(record.key[layer].cpu(), record.value[layer].cpu()) for layer in layers], attended))
        record.forget_entries()
        self.passes.append(record)

    def _decode_given(self, arrange: Arrange | None = None) -> list[ForwardPass]:
        """Return the plain model's passes whose attention gets the keys and values that the eviction's got.

        Those of the new tokens, too, which may be rounded when they are written. `arrange` puts all into another order.
        Windows and states are of the plain model's own passes.
        """
        passes, rest = list[ForwardPass](), self.tracker.prompts.rests[0]
        for chunk, (layers, attended) in enumerate(self.given):
            given = [(keys.to(self.adapter.device), values.to(self.adapter.device)) for keys, values in layers]
            new = len(self.tracker.situation.chunks[chunk])
            before = [(keys[:, :, :-new], values[:, :, :-new]) for keys, values in given]
            cache = fill_cache(self.adapter, (before, rest))
            attend = masked_attention(self.adapter, attended, arrange, given)
            passes.append(decode_chunk(self.adapter, cache, self.tracker.situation, chunk, attend))
            passes[-1].forget_entries()
            _, rest = read_contents(self.adapter, cache)
        return passes

    def _layer_lengths(self, cache: Cache) -> list[int]:
        """Return the number of entries in each measured layer of a cache; empty where it does not show them."""
        try:
            return [keys.shape[2] for keys, _ in layer_tensors(cache, self.places) if keys.ndim == 4]
        except UnreadableCacheError:
            return []

    def _said_length(self, cache: Cache) -> int:
        """Return the number of entries that a cache, or its first measured layer, says it holds."""
        return int((cache.layers[self.places[0]] if self.places else cache).get_seq_length())

    def _logits(self, cache: Cache, chunk: int, what: str = "") -> Tensor:
        """Return the logits (row, new, vocab) of a chunk's forward pass, by the eviction's own decoding if it has any.

        Raises FailedError for an exception; its text begins with `what`, by default with what the chunk is.
        """
        ids, decoded = self.tracker.situation.new_tokens(chunk), sum(map(len, self.tracker.situation.chunks[:chunk]))
        what = what or ("a block of tokens" if ids.shape[1] > 1 else f"decoding token {decoded}")
        if self.eviction.decode is not None:
            return self.eviction.logits(self.adapter.model, cache, ids, decoded, what)
        hides: dict[str, Any] = {}
        with eviction_code(f"{what} raises"):  # the cache is not ours
            entries, more = self.tracker.situation.entries + decoded, decoded + ids.shape[1]
            holds_all = set(self._layer_lengths(cache)) == {entries}
            if any(self.tracker.situation.padding) and (
                holds_all or (self.hides_all and self._said_length(cache) == entries)
            ):
                hides = {"attention_mask": F.pad(self.tracker.situation.attention_mask, (0, more), value=1)}
            output = run_with_cache(
                self.adapter.model, ids, cache, position_ids=self.tracker.situation.positions(chunk), **hides
            )
        return output.logits  # type: ignore[no-any-return]


def _may_round(entries: CacheEntries | None) -> bool:
    """Return whether keys of new tokens may be rounded: of the prompt's no head's keys alone are changed otherwise."""
    if entries is None:
        return False
    values = {(change.layer, change.head) for change in entries.altered if change.what.startswith("values")}
    changed = [change for change in entries.altered if change.kind == "changed"]
    return all((change.layer, change.head) in values for change in changed)


def _new_entry_errors(record: ForwardPass, reference: ForwardPass, row: int, full: Layers) -> np.ndarray:
    """Return how far the entries of a row's new tokens are from a reference's, (kind, layer), in units of the prompt's.

    The unit is the root mean square norm of a head's entries in the `full` cache.
    """
    errors = np.zeros((2, len(full)))
    for layer, known in enumerate(full):
        expected = reference.new_entries(layer)
        own = first_of_groups(record.new_entries(layer), expected[0].shape[1])
        for kind in range(2):
            of_row = known[kind][row if len(known[kind]) > 1 else 0]
            errors[kind, layer] = float(entry_distances(own[kind][row], expected[kind][row], of_row).amax())
    return errors


def _fit_full_cache(layers: Layers, full: Layers) -> bool:
    """Return whether the layers have the full cache's key/value heads and, each, some but no more entries than it."""
    return len(layers) == len(full) and all(
        keys.ndim == 4 and keys.shape[1] == known.shape[1] and 0 < keys.shape[2] <= known.shape[2]
        for (keys, _), (known, _) in zip(layers, full, strict=True)
    )

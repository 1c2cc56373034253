"""Runs of an eviction in one situation: prefill, decoding at explicit positions, comparison with a masked reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from perturbkv.audit_trace import AUTO, FLOORS, IN_CACHE, ORIGINAL, AuditRun, DecodeDistances
from perturbkv.auditing import changes
from perturbkv.auditing.evictions import Eviction, FailedError, RefusedError
from perturbkv.auditing.kept_entries import EntryComparison, EntryTracker, first_of_groups, repeat_heads
from perturbkv.auditing.model_state import ModelState, describe_damage
from perturbkv.auditing.positions import (
    UNROTATED,
    decode_moving,
    held_entries,
    match_all_at_zero,
    match_at_zero,
    move_to_cache_positions,
)
from perturbkv.auditing.reference import (
    Distance,
    Floors,
    ForwardPass,
    PromptEntries,
    attends_to_later,
    compare,
    decode,
    decode_from,
    floors,
    hides_entries,
    prompt_entries,
    read,
    record_pass,
)
from perturbkv.auditing.situations import Situation
from perturbkv.cache.external_cache import Layers, layer_tensors, matching_rows, recover
from perturbkv.configs.plugins import external_code
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter

_MOST_SHIFT = 4096
_CLEARLY = 10
"""How many times nearer one convention of positions is than others where it is told from rounding."""


@dataclass
class ExternalRun:
    """The measurements of an eviction in a situation.

    Attributes:
        adapter: the model.
        situation: the situation, with positions counted as the eviction counts them.
        prompts: the entries of the plain model.
        tracker: the kept entries of the cache.
        passes: the completed forward passes.
        own_passes: the same by the plain model from the cache's own entries; empty unless changes are allowed.
        unmoved: `prompts` at the prompt's own positions, where keys of `prompts` are moved to places in the cache.
        failed, failed_layer, refused, damage: as in `AuditRun`; a damaged model has no reference.
    """

    adapter: Adapter
    situation: Situation
    prompts: PromptEntries
    tracker: EntryTracker
    passes: list[ForwardPass] = field(default_factory=list)
    own_passes: list[ForwardPass] = field(default_factory=list)
    unmoved: PromptEntries | None = None
    failed: str = ""
    failed_layer: int = -1
    refused: str = ""
    damage: str = ""

    def results(self, sample: str) -> list[AuditRun]:
        """Return the audited run of each row of the situation's batch; `sample` is the prompt's id."""
        masks = [] if self.damage else self.tracker.masks
        completed = replace(self.situation, chunks=self.situation.chunks[: len(self.passes)])
        reference, noise = self._reference(completed, masks) if masks else ([], None)
        lengths, own = tuple(len(chunk) for chunk in self.situation.chunks), self.own_passes
        return [
            AuditRun(
                sample=sample, situation=self.situation.name, row=row, padding=padding,
                positions=ORIGINAL if self.situation.cached is None else IN_CACHE,
                tokens=self.situation.entries - padding, forwards=lengths[: len(self.passes)],
                entries=EntryComparison(self.tracker, row, self.prompts.floors).entries() if noise else None,
                decoded=self._decode_distances(row, reference, noise) if noise else None,
                on_own_entries=self._decode_distances(row, own, noise) if noise and own else None,
                failed=self.failed, failed_layer=self.failed_layer, refused=self.refused,
                damage=self.damage,
            )
            for row, padding in enumerate(self.situation.padding)
        ]  # fmt: skip

    def expect_after(self, entries: int) -> None:
        """Expect the new tokens of the forward pass that comes, or just came, after that many entries of the cache."""
        self.situation = replace(self.situation, cached=(*(self.situation.cached or ())[: len(self.passes)], entries))
        self.tracker.situation = self.situation

    def _reference(self, situation: Situation, masks: Sequence[Sequence[Tensor]]) -> tuple[list[ForwardPass], Floors]:
        """Return the masked reference's forward passes and their noise floors."""
        if self.unmoved is not None and self.tracker.rolls:
            return decode_moving(self.adapter, self.unmoved, situation, masks, self.tracker.held)
        passes = list(decode(self.adapter, self.prompts.full, situation, masks))
        return passes, floors(self.adapter, passes, self.prompts, situation, masks)

    def _decode_distances(self, row: int, reference: Sequence[ForwardPass], noise: Floors) -> DecodeDistances:
        """Return the distances between a row's forward passes and the masked reference's."""
        layers, pairs = len(self.prompts.full), list(zip(self.passes, reference, strict=True))
        distances = [compare(record, masked, row, layers) for record, masked in pairs]
        agrees = [bool(record.logits[row, -1].argmax() == masked.logits[row, -1].argmax()) for record, masked in pairs]
        lags = [self._position_lag(record, masked, row) for record, masked in pairs]
        return DecodeDistances(
            head=_stack_field(distances, "head"), head_floor=_to_numpy(noise.head),
            hidden=_stack_field(distances, "hidden"), hidden_floor=_to_numpy(noise.hidden),
            logits=_stack_field(distances, "logits"), logits_floor=float(noise.logits),
            agrees=np.array(agrees), behind=np.array(lags), sees_later=any(map(attends_to_later, self.passes)),
            hides=any(map(hides_entries, self.passes)),
        )  # fmt: skip

    def _position_lag(self, record: ForwardPass, reference: ForwardPass, row: int) -> float:
        """Return the number of positions by which keys of new tokens lag behind the reference in the first layer.

        It is 0 where the keys are the reference's, NaN where the number differs between heads or tokens.
        """
        expected = reference.new_entries(0)[0]
        keys, expected = first_of_groups(record.new_entries(0), expected.shape[1])[0][row], expected[row]
        length = torch.linalg.vector_norm(expected.float(), dim=-1)
        distance = torch.linalg.vector_norm(keys.float() - expected.float(), dim=-1) / length
        if float(distance.amax()) <= FLOORS * float(self.prompts.floors.key[0]):
            return 0.0
        most = min(2 * self.situation.entries, _MOST_SHIFT)
        shifts = changes.excess_rotations(keys.flatten(0, 1), expected.flatten(0, 1), self.adapter.frequencies, most)
        return float("nan") if shifts is None or not bool((shifts == shifts[0]).all()) else -float(shifts[0])


def run_eviction(
    adapter: Adapter,
    eviction: Eviction,
    situation: Situation,
    prompts: PromptEntries,
    before: ModelState,
    own_entries: bool = False,
    positions: str = AUTO,
) -> ExternalRun:
    """Return the measurements of an eviction in a situation, including any exception that it raises.

    `prompts` are the entries of the plain model, `before` is the model before any eviction ran, which is put back; with
    `own_entries` the plain model decodes from the cache's own entries, too; `positions` is a key of `POSITIONS`.
    Raises UnreadableCacheError where the cache does not show its entries.
    """
    tracker = EntryTracker(adapter, situation, prompts.full, masks_itself=eviction.masks)
    external = ExternalRun(adapter, situation, prompts, tracker)
    try:
        _read_and_decode(external, eviction, own_entries, positions)
    finally:
        external.damage = describe_damage(before.restore())
    return external


def _read_and_decode(external: ExternalRun, eviction: Eviction, own_entries: bool, positions: str) -> None:
    """Run the eviction's reading of the prompts and the decoding; record an exception of either in `external`."""
    situation = external.situation
    try:
        cache = eviction.read(external.adapter.model, situation.ids, situation.attention_mask)
    except RefusedError as error:
        external.refused = str(error)
        return
    except FailedError as error:
        external.failed = str(error)
        return
    try:
        with external_code("looking at its cache raises", FailedError):  # its methods are not ours
            layers = _attended_layers(external, eviction, cache)
            _adopt_position_counting(external, layers)
            _adopt_positions_in_cache(external, layers, positions)
            _check_keys(cache, external)
    except FailedError as error:
        external.failed = str(error)
        return
    _decode(external, eviction, cache, own_entries)


def _attended_layers(external: ExternalRun, eviction: Eviction, cache: Cache) -> Layers:
    """Return the entries that new tokens attend to; empty where a cache does not show them.

    Those are what the cache holds. From one that holds keys without positions, another one decodes a token for a trial.
    """
    try:
        layers = layer_tensors(cache)
    except UnreadableCacheError:
        return []
    situation, full = external.situation, external.prompts.full
    if not _has_layers_of(layers, full):
        return layers
    distances = external.tracker.convention_distances(layers[0])
    if min(distances[IN_CACHE], distances[ORIGINAL]) <= distances[UNROTATED]:
        return layers
    record = ForwardPass()
    trial = eviction.read(external.adapter.model, situation.ids, situation.attention_mask)
    with record_pass(external.adapter, record):
        _logits(external, eviction, trial, 0, situation.new_tokens(0), 0, "decoding token 0")
    if record.is_complete(len(full)):
        layers = [record.previous_entries(layer) for layer in range(len(full))]
        _check_not_relative(external, layers[0])
    return layers


def _check_not_relative(external: ExternalRun, layer: tuple[Tensor, Tensor]) -> None:
    """Raise UnreadableCacheError for keys of a first layer that end where the new tokens begin, wherever that is."""
    situation, full = external.situation, external.prompts.full[0]
    places = torch.arange(-layer[0].shape[2], 0, device=layer[0].device) + situation.positions(0)[0, 0]
    before, frequencies = situation.prompt_positions(), external.adapter.frequencies
    kept = match_at_zero(layer, full, 0, situation.padding[0], before, frequencies, places)
    relative = sum(float(distance.sum()) for distance in kept.key_distance)
    distances = external.tracker.convention_distances(layer)
    if _CLEARLY * relative < min(distances[ORIGINAL], distances[IN_CACHE]):
        raise UnreadableCacheError(
            f"its keys follow the new tokens: they stand at {int(places[0])} … {int(places[-1])}, as these stand at "
            f"{int(places[-1]) + 1}, which an audit does not judge; hand them out at 0, 1, …, for new tokens after them"
        )


def _has_layers_of(layers: Layers, full: Layers) -> bool:
    """Return whether the layers have the full cache's key/value heads, and at most as many entries."""
    return len(layers) == len(full) and all(
        keys.ndim == 4 and keys.shape[1] == known.shape[1] and 0 < keys.shape[2] <= known.shape[2]
        for (keys, _), (known, _) in zip(layers, full, strict=True)
    )


def _adopt_position_counting(external: ExternalRun, layers: Layers) -> None:
    """Count positions from the padding's end on if the cache's first layer shows that the eviction counts so.

    Plain calls of a model count them so.
    """
    if not any(external.situation.padding) or not (distance := _key_distance(layers, external.prompts.full)):
        return
    counted = replace(external.situation, counts_padding=True)
    full = read(external.adapter, counted)
    if _key_distance(layers, full) < distance:
        external.situation, external.prompts = counted, prompt_entries(external.adapter, counted, full)
        external.tracker = replace(external.tracker, situation=counted, full=full)


def _adopt_positions_in_cache(external: ExternalRun, layers: Layers, positions: str) -> None:
    """Expect keys at 0, 1, … and new tokens after them where the user says so, or where the first layer shows it."""
    full, situation, adapter = external.prompts.full, external.situation, external.adapter
    if positions == ORIGINAL or not _has_layers_of(layers, full):
        return
    distances = external.tracker.convention_distances(layers[0])
    if positions == IN_CACHE or distances[IN_CACHE] < distances[ORIGINAL]:
        before = situation.prompt_positions()
        held = held_entries(match_all_at_zero(layers, full, situation.padding, before, adapter.frequencies))
        external.unmoved = external.prompts
        external.prompts = move_to_cache_positions(adapter, held, external.prompts, situation, before)
        external.tracker = replace(external.tracker, full=external.prompts.full, unmoved=full)
        external.expect_after(layers[0][0].shape[2])


def _key_distance(layers: Layers, full: Layers) -> float:
    """Return the first-layer distance of the last row's keys from the full cache's; 0 for a cache without keys."""
    try:
        first = layers[0]
        (kept,) = recover([first], [repeat_heads(full[0], first[0].shape[1])], row=len(full[0][0]) - 1)
    except (UnreadableCacheError, IndexError):
        return 0.0
    return float(torch.cat(kept.key_distance).sum())


def _decode(external: ExternalRun, eviction: Eviction, cache: Cache, own_entries: bool) -> None:
    """Run the situation's forward passes up to the first exception, which is recorded."""
    lengths = _layer_lengths(cache)
    for chunk, tokens in enumerate(external.situation.chunks):
        record, ids = ForwardPass(), external.situation.new_tokens(chunk)
        decoded = sum(map(len, external.situation.chunks[:chunk]))
        try:
            if chunk and external.situation.cached is not None:
                with external_code("looking at its cache raises", FailedError):
                    external.expect_after(_cached_before(external, cache, chunk))
            with record_pass(external.adapter, record):
                what = "a block of tokens" if len(tokens) > 1 else f"decoding token {decoded}"
                record.logits = _logits(external, eviction, cache, chunk, ids, decoded, what)
        except FailedError as error:
            external.failed = str(error)
            _explain_failure(external, eviction, lengths)
            return
        _add_pass(external, record, cache, chunk if own_entries else None)


def _cached_before(external: ExternalRun, cache: Cache, chunk: int) -> int:
    """Return the number of entries after which a chunk's tokens stand, where positions are those in the cache.

    An eviction while decoding lowers it where the keys stand at their places in the cache, or have no positions.
    """
    positions, lengths = external.situation.positions(chunk), _layer_lengths(cache)
    fixed = int(positions[0, 0])
    if not lengths or lengths[0] >= fixed:
        return fixed
    distances = external.tracker.convention_distances(layer_tensors(cache)[0])
    return lengths[0] if min(distances[IN_CACHE], distances[UNROTATED]) < distances[ORIGINAL] else fixed


def _layer_lengths(cache: Cache) -> list[int]:
    """Return the number of entries in each layer of a cache; empty where it does not show them."""
    try:
        return [keys.shape[2] for keys, _ in layer_tensors(cache)]
    except UnreadableCacheError:
        return []


def _explain_failure(external: ExternalRun, eviction: Eviction, lengths: Sequence[int]) -> None:
    """Name the layer that was not evicted, or layers of several lengths, before the exception that this causes."""
    whole = [layer for layer, length in enumerate(lengths) if length == external.situation.entries]
    if whole and len(whole) < len(lengths):
        external.failed_layer = whole[0]
        others = min(lengths)
        external.failed = f"it was not evicted: it holds all {max(lengths)} entries, others {others}; {external.failed}"
    elif len(set(lengths)) > 1 and eviction.decode is None:
        external.failed = (
            f"its layers hold {min(lengths)} to {max(lengths)} entries, but a plain call of the model makes one "
            f"mask for all; give it a `decode` of its own; {external.failed}"
        )


def _add_pass(external: ExternalRun, record: ForwardPass, cache: Cache, own: int | None) -> None:
    """Add a forward pass to the run; its entries, as large as the cache, are matched at once and then freed.

    With `own`, the index of the chunk, the plain model decodes from the same entries.
    """
    if not record.is_complete(len(external.prompts.full)):
        raise UnreadableCacheError(
            f"no keys to look at: the attention of the model was not used by {type(cache).__name__}'s decoding"
        )
    given = external.situation.new_tokens(len(external.passes)).shape
    if (seen := record.query[0].shape[::2]) != given:  # of the last call, where there were several
        one, all_at_once = (f"{rows} × {tokens}" for rows, tokens in (seen, given))
        raise UnreadableCacheError(
            f"its decoding gives the model {one} tokens in a call, expected {all_at_once} at once"
        )
    attended = external.tracker.add_pass(record)
    if external.tracker.rolls:
        external.expect_after(record.entries[0] - record.query[0].shape[2])
    layers = range(len(external.prompts.full))
    entries = [record.previous_entries(layer) for layer in layers]
    if own is not None and entries[0][0].shape[1] == external.prompts.full[0][0].shape[1]:
        plain = decode_from(external.adapter, entries, external.situation, own, attended)
        plain.forget_entries()
        external.own_passes.append(plain)
    record.forget_entries()
    external.passes.append(record)


def _logits(
    external: ExternalRun, eviction: Eviction, cache: Cache, chunk: int, ids: Tensor, decoded: int, what: str
) -> Tensor:
    """Return the logits (row, new, vocab) of a forward pass, by the eviction's own decoding if it has any."""
    if eviction.decode is not None:
        return eviction.logits(external.adapter.model, cache, ids, decoded, what)
    with external_code(f"{what} raises", FailedError):  # the cache is not ours
        output = external.adapter.model(
            input_ids=ids, position_ids=external.situation.positions(chunk), past_key_values=cache, use_cache=True
        )
    return output.logits  # type: ignore[no-any-return]


def _check_keys(cache: Cache, external: ExternalRun) -> None:
    """Raise UnreadableCacheError for layers that contradict the cache's reported length, or exceed the full cache.

    A cache without keys as attributes may still pass them to the attention, and is not checked.
    """
    layers = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", None) or ()]
    shown = [keys for keys in layers if isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel()]
    if not shown or len(shown) < len(layers):
        return
    full = [repeat_heads(layer, keys.shape[1]) for layer, keys in zip(external.prompts.full, shown, strict=False)]
    for row in range(external.situation.rows):
        matching_rows(cache, full, row)


def _stack_field(distances: Sequence[Distance], name: str) -> np.ndarray:
    """Return the named field of all distances as an array, passes first."""
    return np.stack([_to_numpy(getattr(distance, name)) for distance in distances])


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a float64 array."""
    return tensor.detach().cpu().double().numpy()

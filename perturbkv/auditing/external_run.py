"""Runs of an external eviction in one situation: prefill, decoding at explicit positions, comparison.

The comparison is with the masked reference. The plain use of the evicted cache is run too: a call of the model and
`generate`, where transformers chooses the positions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from perturbkv.audit_trace import AuditRun, DecodeDistances, PlainUse
from perturbkv.auditing import kept_entries
from perturbkv.auditing.evictions import Eviction
from perturbkv.auditing.kept_entries import FLOORS, EntryComparison, EntryTracker, first_of_groups, repeat_heads
from perturbkv.auditing.reference import (
    Distance,
    EntryFloors,
    Floors,
    ForwardPass,
    compare,
    decode,
    floors,
    hides,
    read,
    record_pass,
    sees_later,
    with_padding_counted,
)
from perturbkv.auditing.situations import Situation
from perturbkv.cache.external_cache import Layers, layer_tensors, matching_rows, recover
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import Observer, capture
from perturbkv.pipeline.variants.presses import restore_model

_MOST_SHIFT = 4096


@dataclass
class ExternalRun:
    """The measurements of an eviction in a situation.

    Attributes:
        adapter: the model.
        situation: with positions counted as the eviction counts them.
        full: the entries of the plain model.
        tracker: the kept entries of the cache.
        entry_floors: noise floors of these entries.
        passes: the completed forward passes.
        failed, refused: as in `Audited`.
    """

    adapter: Adapter
    situation: Situation
    full: Layers
    tracker: EntryTracker
    entry_floors: EntryFloors
    passes: list[ForwardPass] = field(default_factory=list)
    failed: str = ""
    refused: str = ""

    def results(self, sample: str) -> list[AuditRun]:
        """Return the result of each row."""
        masks = self.tracker.masks
        noise = floors(self.adapter, self.full, self.situation) if masks else None
        reference = list(decode(self.adapter, self.full, self._completed(), masks)) if masks else []
        lengths = tuple(len(chunk) for chunk in self.situation.chunks)
        return [
            AuditRun(
                sample=sample, situation=self.situation.name, row=row, padding=padding,
                tokens=self.situation.entries - padding, forwards=lengths[: len(self.passes)],
                entries=EntryComparison(self.tracker, row, self.entry_floors).entries() if noise else None,
                decoded=self._decoded(row, reference, noise) if noise else None,
                failed=self.failed, refused=self.refused,
            )
            for row, padding in enumerate(self.situation.padding)
        ]  # fmt: skip

    def _completed(self) -> Situation:
        """Return the situation with the completed forward passes alone."""
        chunks = self.situation.chunks[: len(self.passes)]
        return Situation(
            self.situation.name, self.situation.ids, self.situation.attention_mask, chunks,
            self.situation.counts_padding,
        )  # fmt: skip

    def _decoded(self, row: int, reference: Sequence[ForwardPass], noise: Floors) -> DecodeDistances:
        layers, pairs = len(self.full), list(zip(self.passes, reference, strict=True))
        distances = [compare(one, other, row, layers) for one, other in pairs]
        agrees = [bool(one.logits[row, -1].argmax() == other.logits[row, -1].argmax()) for one, other in pairs]
        behind = [self._position_lag(one, other, row) for one, other in pairs]
        return DecodeDistances(
            head=_stack(distances, "head"), head_floor=_array(noise.head), hidden=_stack(distances, "hidden"),
            hidden_floor=_array(noise.hidden), logits=_stack(distances, "logits"), logits_floor=float(noise.logits),
            agrees=np.array(agrees), behind=np.array(behind), sees_later=any(map(sees_later, self.passes)),
            hides=any(map(hides, self.passes)),
        )  # fmt: skip

    def _position_lag(self, record: ForwardPass, reference: ForwardPass, row: int) -> float:
        """Return the number of positions by which the first layer rotates the new tokens' keys too little.

        NaN where that is not one number for all heads and tokens.
        """
        expected = reference.new_entries(0)[0]
        keys, expected = first_of_groups(record.new_entries(0), expected.shape[1])[0][row], expected[row]
        length = torch.linalg.vector_norm(expected.float(), dim=-1)
        distance = torch.linalg.vector_norm(keys.float() - expected.float(), dim=-1) / length
        if float(distance.amax()) <= FLOORS * float(self.entry_floors.key[0]):
            return 0.0
        most = min(2 * self.situation.entries, _MOST_SHIFT)
        shifts = kept_entries.rotations(keys.flatten(0, 1), expected.flatten(0, 1), self.adapter.frequencies, most)
        return float("nan") if shifts is None or not bool((shifts == shifts[0]).all()) else -float(shifts[0])


def run(
    adapter: Adapter, eviction: Eviction, situation: Situation, entry_floors: EntryFloors, full: Layers | None = None
) -> ExternalRun:
    """Run the eviction in a situation and record its exceptions.

    `full` are the entries of the plain model, where they are known. Raises UnreadableCacheError where the cache does
    not show its entries.
    """
    full = read(adapter, situation) if full is None else full
    external = ExternalRun(adapter, situation, full, EntryTracker(adapter, situation, full), entry_floors)
    with restore_model(adapter):
        _read_and_decode(external, eviction)
    return external


def _read_and_decode(external: ExternalRun, eviction: Eviction) -> None:
    """Evict, then decode; record an exception of either."""
    situation = external.situation
    try:
        cache = eviction.read(external.adapter.model, situation.ids, situation.attention_mask)
    except UnreadableCacheError:
        raise
    except NotImplementedError as error:
        external.refused = _message(error)
        return
    except Exception as error:
        external.failed = f"reading the prompt raises {_message(error)}"
        return
    _match_counting(external, cache)
    _decode(external, eviction, cache)


def _match_counting(external: ExternalRun, cache: Cache) -> None:
    """Count positions from the padding on where the first layer of the cache shows that its eviction does so."""
    if not any(external.situation.padding) or not (distance := _key_distance(cache, external.full)):
        return
    other = with_padding_counted(external.situation)
    counted = read(external.adapter, other)
    if _key_distance(cache, counted) < distance:
        external.situation, external.full = other, counted
        external.tracker = EntryTracker(external.adapter, other, counted)


def _key_distance(cache: Cache, full: Layers) -> float:
    """Return the distance of the last row's first-layer keys from the full cache's; 0 where the cache has no keys."""
    try:
        first = layer_tensors(cache)[0]
        (kept,) = recover([first], [repeat_heads(full[0], first[0].shape[1])], row=len(full[0][0]) - 1)
    except UnreadableCacheError:
        return 0.0
    return float(torch.cat(kept.key_distance).sum())


def _decode(external: ExternalRun, eviction: Eviction, cache: Cache) -> None:
    """Run the forward passes up to the first that raises an exception."""
    _check_keys(cache, external)
    for chunk, tokens in enumerate(external.situation.chunks):
        record, ids = ForwardPass(), external.situation.new_tokens(chunk)
        decoded = sum(len(one) for one in external.situation.chunks[:chunk])
        try:
            with record_pass(external.adapter, record):
                record.logits = _logits(external, eviction, cache, chunk, ids, decoded)
        except Exception as error:
            what = "a block of tokens" if len(tokens) > 1 else f"decoding token {decoded}"
            external.failed = f"{what} raises {_message(error)}"
            return
        _add_pass(external, record, cache)


def _add_pass(external: ExternalRun, record: ForwardPass, cache: Cache) -> None:
    """Add a forward pass; its entries, as large as the cache, are matched at once and freed."""
    if not record.is_complete(len(external.full)):
        msg = f"no keys to look at: the attention of the model was not used by {type(cache).__name__}'s decoding"
        raise UnreadableCacheError(msg)
    external.tracker.add_pass(record)
    record.forget_entries()
    external.passes.append(record)


def _logits(external: ExternalRun, eviction: Eviction, cache: Cache, chunk: int, ids: Tensor, decoded: int) -> Tensor:
    """Return the logits (row, new, vocab) of a forward pass, by the eviction's own decoding where it has one."""
    if eviction.decode is not None:
        logits = eviction.decode(external.adapter.model, cache, ids, decoded)
        return logits if logits.ndim == 3 else logits.unsqueeze(1)
    output = external.adapter.model(
        input_ids=ids, position_ids=external.situation.positions(chunk), past_key_values=cache, use_cache=True
    )
    return output.logits  # type: ignore[no-any-return]


def _check_keys(cache: Cache, external: ExternalRun) -> None:
    """Raise UnreadableCacheError for layers that contradict what the cache reports, or have more than the full cache.

    A cache without keys as attributes may still pass them to the attention, and is not checked.
    """
    layers = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", None) or ()]
    shown = [keys for keys in layers if isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel()]
    if not shown or len(shown) < len(layers):
        return
    full = [repeat_heads(layer, keys.shape[1]) for layer, keys in zip(external.full, shown, strict=False)]
    for row in range(external.situation.rows):
        matching_rows(cache, full, row)


def _message(error: Exception) -> str:
    """Return an exception as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _stack(distances: Sequence[Distance], name: str) -> np.ndarray:
    return np.stack([_array(getattr(one, name)) for one in distances])


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def plain_use(adapter: Adapter, eviction: Eviction, situation: Situation) -> PlainUse:
    """Return how `model` and `generate` use the cache after the prompt of a `single` situation.

    Each gets a new cache; exceptions are recorded.
    """
    lengths: list[int] = []

    def new_cache() -> Cache:
        return eviction.read(adapter.model, situation.ids, situation.attention_mask)

    def generate_from_prompt() -> None:
        _generate(adapter, new_cache(), _extended_prompt(situation), lengths)

    with restore_model(adapter):
        return PlainUse(
            position=_position(new_cache()),
            expected=situation.entries,
            failed=_failure(generate_from_prompt),
            fed=lengths[0] if lengths else 0,
            continued=_failure(lambda: _generate(adapter, new_cache(), situation.new_tokens(0)[:, :1], [])),
        )


def _extended_prompt(situation: Situation) -> Tensor:
    """Return the ids of the prompt and the first new one, as a user of `generate` passes them."""
    ids = situation.ids.new_empty(1, situation.entries + 1)
    ids[:, :-1], ids[:, -1] = situation.ids, situation.new_tokens(0)[0, 0]
    return ids


def _position(cache: Cache) -> int | None:
    """Return the position that `model(token, past_key_values=cache)` gives the next token; None where it fails."""
    try:
        return int(cache.get_seq_length())
    except Exception:
        return None


def _generate(adapter: Adapter, cache: Cache, ids: Tensor, lengths: list[int]) -> None:
    """Generate one token; append the lengths of the forward passes to `lengths`."""

    def count(layer: int, hidden: Tensor) -> None:
        if layer == 0:
            lengths.append(hidden.shape[1])

    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    with warnings.catch_warnings(), capture(adapter, Observer(hidden=count)):
        warnings.simplefilter("ignore")
        adapter.model.generate(ids, past_key_values=cache, **options)


def _failure(call: Callable[[], object]) -> str:
    """Return the exception of a call as one line; empty where it succeeds."""
    try:
        call()
    except Exception as error:
        return _message(error)
    return ""

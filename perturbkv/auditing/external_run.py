"""Runs of a foreign eviction in one situation: it reads, decodes at explicit positions, and is compared.

The comparison is with the masked reference. The eviction's plain use is run too: what transformers does with the
evicted cache where no positions are given, in a call of the model and in `generate`.
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
from perturbkv.auditing.kept_entries import FLOORS, Judge, Reading, per_heads, repeated
from perturbkv.auditing.reference import (
    Distance,
    EntryFloors,
    Floors,
    Seen,
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
from perturbkv.cache.external_cache import Layers, layer_tensors, recover, rows
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import Observer, capture
from perturbkv.pipeline.variants.presses import left_as_it_was

_WIDEST_TURN = 4096


@dataclass
class ForeignRun:
    """The measurements of an eviction in a situation.

    Attributes:
        adapter: the model.
        situation: with positions counted as the eviction counts them.
        full: the plain model's entries.
        reading: the cache's kept entries.
        entry_floors: noise floors of these entries.
        seen: the completed forward passes.
        failed, refused: as in `Audited`.
    """

    adapter: Adapter
    situation: Situation
    full: Layers
    reading: Reading
    entry_floors: EntryFloors
    seen: list[Seen] = field(default_factory=list)
    failed: str = ""
    refused: str = ""

    def audited(self, sample: str) -> list[AuditRun]:
        """Return one document per row."""
        judged = bool(self.reading.masks)
        found = floors(self.adapter, self.full, self.situation) if judged else None
        reference = list(decode(self.adapter, self.full, self._completed(), self.reading.masks)) if judged else []
        lengths = tuple(len(chunk) for chunk in self.situation.chunks)
        return [
            AuditRun(
                sample=sample, situation=self.situation.name, row=row, padding=padding,
                tokens=self.situation.entries - padding, forwards=lengths[: len(self.seen)],
                entries=None if found is None else Judge(self.reading, row, self.entry_floors).entries(),
                decoded=None if found is None else self._decoded(row, reference, found),
                failed=self.failed, refused=self.refused,
            )
            for row, padding in enumerate(self.situation.padding)
        ]  # fmt: skip

    def _completed(self) -> Situation:
        """Return the situation with the completed forward passes alone."""
        chunks = self.situation.chunks[: len(self.seen)]
        return Situation(
            self.situation.name, self.situation.ids, self.situation.attention_mask, chunks,
            self.situation.counts_padding,
        )  # fmt: skip

    def _decoded(self, row: int, reference: Sequence[Seen], found: Floors) -> DecodeDistances:
        layers = len(self.full)
        apart = [compare(one, other, row, layers) for one, other in zip(self.seen, reference, strict=True)]
        agrees = [
            bool(one.logits[row, -1].argmax() == other.logits[row, -1].argmax())
            for one, other in zip(self.seen, reference, strict=True)
        ]
        behind = [self._position_lag(one, other, row) for one, other in zip(self.seen, reference, strict=True)]
        return DecodeDistances(
            head=_stacked(apart, "head"), head_floor=_array(found.head), hidden=_stacked(apart, "hidden"),
            hidden_floor=_array(found.hidden), logits=_stacked(apart, "logits"), logits_floor=float(found.logits),
            agrees=np.array(agrees), behind=np.array(behind), sees_later=any(map(sees_later, self.seen)),
            hides=any(map(hides, self.seen)),
        )  # fmt: skip

    def _position_lag(self, seen: Seen, reference: Seen, row: int) -> float:
        """Return by how many positions the first layer rotates the new tokens' keys too little.

        NaN where that is not one number for all heads and tokens.
        """
        full = per_heads(seen.own(0), reference.own(0)[0].shape[1])[0][row]
        own = reference.own(0)[0][row]
        length = torch.linalg.vector_norm(own.float(), dim=-1)
        far = torch.linalg.vector_norm(full.float() - own.float(), dim=-1) / length
        if float(far.amax()) <= FLOORS * float(self.entry_floors.key[0]):
            return 0.0
        most = min(2 * self.situation.entries, _WIDEST_TURN)
        turned = kept_entries.rotations(full.flatten(0, 1), own.flatten(0, 1), self.adapter.frequencies, most)
        return float("nan") if turned is None or not bool((turned == turned[0]).all()) else -float(turned[0])


def run(
    adapter: Adapter, eviction: Eviction, situation: Situation, entry_floors: EntryFloors, full: Layers | None = None
) -> ForeignRun:
    """Run the eviction in a situation and record its exceptions.

    `full` are the plain model's entries, where they were read already. Raises UnreadableCacheError where the cache does
    not show its entries.
    """
    whole = read(adapter, situation) if full is None else full
    made = ForeignRun(adapter, situation, whole, Reading(adapter, situation, whole), entry_floors)
    with left_as_it_was(adapter):
        _read_and_decode(made, eviction)
    return made


def _read_and_decode(made: ForeignRun, eviction: Eviction) -> None:
    """Evict, then decode; record an exception."""
    situation = made.situation
    try:
        cache = eviction.read(made.adapter.model, situation.ids, situation.attention_mask)
    except UnreadableCacheError:
        raise
    except NotImplementedError as error:
        made.refused = _message(error)
        return
    except Exception as error:
        made.failed = f"reading the prompt raises {_message(error)}"
        return
    _match_counting(made, cache)
    _decode(made, eviction, cache)


def _match_counting(made: ForeignRun, cache: Cache) -> None:
    """Count positions from the padding on, where the cache's first layer shows that its eviction does."""
    if not any(made.situation.padding) or not (far := _key_distance(cache, made.full)):
        return
    other = with_padding_counted(made.situation)
    counted = read(made.adapter, other)
    if _key_distance(cache, counted) < far:
        made.situation, made.full = other, counted
        made.reading = Reading(made.adapter, other, counted)


def _key_distance(cache: Cache, full: Layers) -> float:
    """Return the distance of the last row's first-layer keys from the full cache's; 0 where they are not shown."""
    try:
        theirs = layer_tensors(cache)[0]
        (found,) = recover([theirs], [repeated(full[0], theirs[0].shape[1])], row=len(full[0][0]) - 1)
    except UnreadableCacheError:
        return 0.0
    return float(torch.cat(found.key_distance).sum())


def _decode(made: ForeignRun, eviction: Eviction, cache: Cache) -> None:
    """Run all forward passes; the first that raises is the last."""
    _check_shown(cache, made)
    for chunk, tokens in enumerate(made.situation.chunks):
        seen, ids = Seen(), made.situation.fed(chunk)
        before = sum(len(one) for one in made.situation.chunks[:chunk])
        try:
            with record_pass(made.adapter, seen):
                seen.logits = _logits(made, eviction, cache, chunk, ids, before)
        except Exception as error:
            what = "a block of tokens" if len(tokens) > 1 else f"decoding token {before}"
            made.failed = f"{what} raises {_message(error)}"
            return
        _record(made, seen, cache)


def _record(made: ForeignRun, seen: Seen, cache: Cache) -> None:
    """Record a forward pass; its attended entries, as large as the cache, are read at once and freed."""
    if not seen.whole(len(made.full)):
        msg = f"no keys to look at: the attention of the model was not used by {type(cache).__name__}'s decoding"
        raise UnreadableCacheError(msg)
    made.reading.take(seen)
    seen.forget_entries()
    made.seen.append(seen)


def _logits(made: ForeignRun, eviction: Eviction, cache: Cache, chunk: int, ids: Tensor, before: int) -> Tensor:
    """Return the logits (row, new, vocab) of a forward pass, by the eviction's own decoding where it has one."""
    if eviction.decode is not None:
        own = eviction.decode(made.adapter.model, cache, ids, before)
        return own if own.ndim == 3 else own.unsqueeze(1)
    logits: Tensor = made.adapter.model(
        input_ids=ids, position_ids=made.situation.positions(chunk), past_key_values=cache, use_cache=True
    ).logits
    return logits


def _check_shown(cache: Cache, made: ForeignRun) -> None:
    """Raise UnreadableCacheError for layers that contradict the cache's report, or are longer than the full cache.

    A cache that shows no keys itself may still hand them to the attention.
    """
    held = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", None) or ()]
    shown = [keys for keys in held if isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel()]
    if not shown or len(shown) < len(held):
        return
    whole = [repeated(layer, keys.shape[1]) for layer, keys in zip(made.full, shown, strict=False)]
    for row in range(made.situation.rows):
        rows(cache, whole, row)


def _message(error: Exception) -> str:
    """Return an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _stacked(apart: Sequence[Distance], name: str) -> np.ndarray:
    return np.stack([_array(getattr(one, name)) for one in apart])


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def plain_use(adapter: Adapter, eviction: Eviction, situation: Situation) -> PlainUse:
    """Return what `model` and `generate` do with the cache after the prompt of a `single` situation.

    Each gets a cache of its own; exceptions are recorded.
    """
    fed: list[int] = []

    def fresh() -> Cache:
        return eviction.read(adapter.model, situation.ids, situation.attention_mask)

    def whole() -> None:
        _generate(adapter, fresh(), _extended_prompt(situation), fed)

    with left_as_it_was(adapter):
        return PlainUse(
            position=_position(fresh()),
            expected=situation.entries,
            failed=_failure(whole),
            fed=fed[0] if fed else 0,
            continued=_failure(lambda: _generate(adapter, fresh(), situation.fed(0)[:, :1], [])),
        )


def _extended_prompt(situation: Situation) -> Tensor:
    """Return the prompt's ids and the first new one, as a user of `generate` passes them."""
    ids = situation.ids.new_empty(1, situation.entries + 1)
    ids[:, :-1], ids[:, -1] = situation.ids, situation.fed(0)[0, 0]
    return ids


def _position(cache: Cache) -> int | None:
    """Return the position at which `model(token, past_key_values=cache)` puts the next token; None where it fails."""
    try:
        return int(cache.get_seq_length())
    except Exception:
        return None


def _generate(adapter: Adapter, cache: Cache, ids: Tensor, fed: list[int]) -> None:
    """Generate one token; `fed` gets the lengths of the forward passes."""

    def count(layer: int, hidden: Tensor) -> None:
        if layer == 0:
            fed.append(hidden.shape[1])

    asked: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    with warnings.catch_warnings(), capture(adapter, Observer(hidden=count)):
        warnings.simplefilter("ignore")
        adapter.model.generate(ids, past_key_values=cache, **asked)


def _failure(call: Callable[[], object]) -> str:
    """Return the exception of a call in one line; empty where it succeeds."""
    try:
        call()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
    return ""

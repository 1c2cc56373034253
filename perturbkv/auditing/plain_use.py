"""What transformers does with an evicted cache where nobody says positions: a call of the model, and `generate`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache

from perturbkv.audit_trace import PlainUse
from perturbkv.auditing.evictions import Eviction
from perturbkv.auditing.situations import Situation
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import Observer, capture
from perturbkv.pipeline.variants.presses import left_as_it_was


def plain_use(adapter: Adapter, eviction: Eviction, situation: Situation) -> PlainUse:
    """Each way on a cache of its own, behind the prompt of a `single` situation; nothing that fails is raised."""
    fed: list[int] = []

    def fresh() -> Cache:
        return eviction.read(adapter.model, situation.ids, situation.attention_mask)

    def whole() -> None:
        _generate(adapter, fresh(), _with_first(situation), fed)

    with left_as_it_was(adapter):
        return PlainUse(
            position=_position(fresh()),
            expected=situation.entries,
            failed=_failure(whole),
            fed=fed[0] if fed else 0,
            continued=_failure(lambda: _generate(adapter, fresh(), situation.fed(0)[:, :1], [])),
        )


def _with_first(situation: Situation) -> Tensor:
    """The prompt's ids and the first new one: what a user of `generate` holds."""
    ids = situation.ids.new_empty(1, situation.entries + 1)
    ids[:, :-1], ids[:, -1] = situation.ids, situation.fed(0)[0, 0]
    return ids


def _position(cache: Cache) -> int | None:
    """Where `model(token, past_key_values=cache)` puts the next token."""
    try:
        return int(cache.get_seq_length())
    except Exception:
        return None


def _generate(adapter: Adapter, cache: Cache, ids: Tensor, fed: list[int]) -> None:
    """One token; `fed` gets the lengths of the forward passes."""

    def count(layer: int, hidden: Tensor) -> None:
        if layer == 0:
            fed.append(hidden.shape[1])

    asked: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    with warnings.catch_warnings(), capture(adapter, Observer(hidden=count)):
        warnings.simplefilter("ignore")
        adapter.model.generate(ids, past_key_values=cache, **asked)


def _failure(call: Callable[[], object]) -> str:
    """What a call raises, in one line; empty where it does not."""
    try:
        call()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
    return ""

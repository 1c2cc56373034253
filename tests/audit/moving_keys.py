"""Evictions that move keys at every step, right ones and wrong ones; each says where its fault is planted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from tests.audit.planted import RECENT, SINKS, Streaming, StreamingLayer, decode_early, moved


def _turn(keys: Tensor, places: Tensor, base: float) -> Tensor:
    """Keys rotated by `places` positions more, in all their components."""
    half = keys.shape[-1] // 2
    angle = places.float().unsqueeze(-1) * base ** (-torch.arange(half) / half)
    cosine, sine = (one.to(keys.dtype) for one in (angle.cos(), angle.sin()))
    first, second = keys.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class UnrotatedLayer(StreamingLayer):
    """Caches keys without positions, and hands them out at 0, 1, …: where they lie now, at every step."""

    def __init__(self, sinks: int, recent: int, base: float) -> None:
        super().__init__(sinks, recent)
        self.base = base

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        held = self.get_seq_length()
        plain = _turn(key_states, -torch.arange(held, held + key_states.shape[2]), 1e4)
        keys, values = super().update(plain, value_states, *args, **kwargs)
        return _turn(keys, torch.arange(keys.shape[2]), self.base), values


class Unrotated(Cache):
    """A right cache class, StreamingLLM as it was published: sinks stay, a window slides, gaps close at every step."""

    def __init__(self, layers: int = 3, base: float = 1e4) -> None:
        super().__init__(layers=[UnrotatedLayer(SINKS, RECENT, base) for _ in range(layers)])


class RollingLayer(StreamingLayer):
    """Caches keys at 0, 1, …, and moves those behind a gap up as soon as it opens."""

    def __init__(self, sinks: int, recent: int, base: float) -> None:
        super().__init__(sinks, recent)
        self.base = base

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if gap := keys.shape[2] - self.keys.shape[2]:
            behind = _turn(self.keys[:, :, self.sinks :], torch.tensor([-gap]), self.base)
            self.keys = torch.cat([self.keys[:, :, : self.sinks], behind], dim=2)
        return keys, values


class Rolling(Cache):
    """A right cache class: sinks stay, a window slides, and its keys are rotated back by as much as it slides."""

    def __init__(self, layers: int = 3, base: float = 1e4) -> None:
        super().__init__(layers=[RollingLayer(SINKS, RECENT, base) for _ in range(layers)])


def _decode_after(model: Any, cache: Any, token: Tensor, step: int, early: int = 0) -> Tensor:
    """Decoding at the cache's length, or so many positions too early."""
    places = cache.get_seq_length() - early + torch.arange(token.shape[1]).unsqueeze(0)
    return model(input_ids=token, position_ids=places, past_key_values=cache).logits


def _decode_one_early(model: Any, cache: Any, token: Tensor, step: int) -> Tensor:
    return _decode_after(model, cache, token, step, 1)


class UnrotatedWithAnotherBase(Unrotated):
    """Hands its keys out rotated by a base that is not the model's."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__(layers, 5e5)


class UnrotatedEarly(Unrotated):
    """New tokens stand on the last entry's position."""

    decode = staticmethod(_decode_one_early)


class RollingWithAnotherBase(Rolling):
    """Moves its keys up by a base that is not the model's."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__(layers, 5e5)


class RollingEarly(Rolling):
    """New tokens stand on the last entry's position."""

    decode = staticmethod(_decode_one_early)


class StillLayer(RollingLayer):
    """Moves its keys up after the prompt, and leaves them where they are from then on."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        prompt = not self.is_initialized
        found = super().update(key_states, value_states, *args, **kwargs)
        if prompt:
            return found
        self.keys = torch.cat([self.keys[:, :, : self.sinks], found[0][:, :, -self.recent :]], dim=2)
        return found


class RollingThenStill(Cache):
    """Moves its keys up after the prompt and never again, though new tokens stand at the cache's length."""

    decode = staticmethod(_decode_after)

    def __init__(self, layers: int = 3) -> None:
        super().__init__(layers=[StillLayer(SINKS, RECENT, 1e4) for _ in range(layers)])


class RelativeLayer(UnrotatedLayer):
    """Hands its keys out right before the new tokens, at as many positions as tokens were seen."""

    seen = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = torch.arange(self.seen, self.seen + key_states.shape[2])
        self.seen += len(new)
        keys, values = StreamingLayer.update(self, _turn(key_states, -new, self.base), value_states)
        return _turn(keys, torch.arange(self.seen - keys.shape[2], self.seen), self.base), values


class Relative(Cache):
    """Right, in a way that an audit does not follow: gaps are closed from the new tokens on backwards."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__(layers=[RelativeLayer(SINKS, RECENT, 1e4) for _ in range(layers)])


class OwnPositionsLayer(RelativeLayer):
    """Caches keys without positions, and hands them out at the prompt's own."""

    places = torch.arange(0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = torch.arange(self.seen, self.seen + key_states.shape[2])
        self.seen += len(new)
        keys, values = StreamingLayer.update(self, _turn(key_states, -new, self.base), value_states)
        places = torch.cat([self.places, new])
        self.places = torch.cat([places[: self.sinks], places[self.sinks :][-self.recent :]])
        return _turn(keys, places, self.base), values


class OwnPositions(Cache):
    """A right cache class, without positions inside and with the prompt's own outside."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__(layers=[OwnPositionsLayer(SINKS, RECENT, 1e4) for _ in range(layers)])


def sliding_early(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """A window that slides at the prompt's own positions; new tokens stand one position too early."""
    cache = Streaming()
    model(input_ids=input_ids, past_key_values=cache)
    cache.tokens = attention_mask.sum(dim=-1)  # type: ignore[attr-defined]
    return cache


sliding_early.decode = decode_early  # type: ignore[attr-defined]


def _decode_shifting(model: Any, cache: Any, token: Tensor, step: int, early: int = 0) -> Tensor:
    """Makes room before it decodes: the oldest entries behind the sinks go, and those behind them move up."""
    new = token.shape[1]
    for layer in cache.layers:
        behind = _turn(layer.keys[:, :, SINKS + new :], torch.tensor([-new]), 1e4)
        layer.keys = torch.cat([layer.keys[:, :, :SINKS], behind], dim=2)
        layer.values = torch.cat([layer.values[:, :, :SINKS], layer.values[:, :, SINKS + new :]], dim=2)
    return _decode_after(model, cache, token, step, early)


def shifting(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """As many entries at every step, new tokens included; its own decoding makes room for them."""
    return moved(model, input_ids, attention_mask)


shifting.decode = _decode_shifting  # type: ignore[attr-defined]


def shifting_early(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """The same, with new tokens on the last entry's position."""
    return moved(model, input_ids, attention_mask)


shifting_early.decode = lambda *inputs: _decode_shifting(*inputs, early=1)  # type: ignore[attr-defined]

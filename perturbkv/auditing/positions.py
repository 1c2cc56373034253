"""Positions inside an evicted cache: keys rotated to 0, 1, …, and new tokens after them (METHOD: Audit, 2).

StreamingLLM, token dropping in LMCache, TensorRT-LLM and some presses of kvpress close the gaps that eviction leaves.
Such a cache is right where the plain model agrees that holds the same entries at those positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.auditing.reference import EntryFloors, PromptEntries, entry_floors
from perturbkv.auditing.situations import Situation
from perturbkv.cache.entries import rotate_keys
from perturbkv.cache.external_cache import NOWHERE, LayerKept, Layers, recover
from perturbkv.models.adapter import Adapter
from perturbkv.theory import WORK

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Keys (entry, d_head), positions from and to (entry,), frequencies (frequency,) → rotated keys."""


def uses_cache_positions(cache: Layers, full: Layers, situation: Situation, frequencies: Tensor) -> bool:
    """Return whether the first layer's keys are nearer to the full cache's at 0, 1, … than at their own positions."""
    original, moved = 0.0, 0.0
    for row, padding in enumerate(situation.padding):
        (kept,) = recover(cache[:1], full[:1], row, padding)
        in_cache = _match_at_zero(cache[0], full[0], row, situation, frequencies)
        original += sum(float(distance.sum()) for distance in kept.key_distance)
        moved += sum(float(distance.sum()) for distance in in_cache.key_distance)
    return moved < original


def _match_at_zero(
    own: tuple[Tensor, Tensor], known: tuple[Tensor, Tensor], row: int, situation: Situation, frequencies: Tensor
) -> LayerKept:
    """Return the prompt's entries that a layer's cache holds, found by keys that are rotated back to position 0.

    Equal tokens have equal keys there in the first layer, and get their positions in the prompt's order.
    """
    index, padding = torch.arange(own[0].shape[2], device=own[0].device), situation.padding[row]
    before = situation.prompt_positions()[row, padding:]
    at_zero = [
        (_rotate_to_zero(keys, positions, frequencies).unsqueeze(0), values.unsqueeze(0))
        for keys, values, positions in (
            (own[0][row], own[1][row], index), (known[0][row, :, padding:], known[1][row, :, padding:], before)
        )
    ]  # fmt: skip
    (kept,) = recover(at_zero[:1], at_zero[1:])
    return kept


def _rotate_to_zero(
    keys: Float[Tensor, "kv_head entry d_head"], positions: Int[Tensor, " entry"], frequencies: Tensor
) -> Tensor:
    """Return the keys of all heads rotated from their positions to 0."""
    zero = torch.zeros_like(positions)
    return torch.stack([_rotate(head, positions, zero, frequencies) for head in keys])


def move_to_cache_positions(
    adapter: Adapter, cache: Layers, prompts: PromptEntries, situation: Situation
) -> PromptEntries:
    """Return the entries of the prompts with the keys of the entries that a cache holds at their places in it.

    They are rotated in float64 by the model's own angles; one of the other readings in the type of the keys, by the
    difference of positions, so that the floors hold what that rounds.
    """
    rotations: Sequence[Rotate] = (_rotate, _rotate, _rotate_by_difference)
    full, *others = (
        _move_layers(layers, cache, prompts.full, situation, adapter.frequencies, rotate)
        for layers, rotate in zip((prompts.full, *prompts.others), rotations, strict=True)
    )
    floors: EntryFloors = entry_floors(full, others, situation, torch.finfo(adapter.dtype).eps)
    return PromptEntries(full, tuple(others), floors)


def _move_layers(
    layers: Layers, cache: Layers, full: Layers, situation: Situation, frequencies: Tensor, rotate: Rotate
) -> Layers:
    """Return layers of entries with the keys of those that the cache holds rotated to their places in it."""
    moved = []
    for (keys, values), own, known in zip(layers, cache, full, strict=True):
        keys = keys.clone()
        for row, (before, padding) in enumerate(zip(situation.prompt_positions(), situation.padding, strict=True)):
            kept = _match_at_zero(own, known, row, situation, frequencies)
            for head, positions in enumerate(kept.positions):
                index = (positions != NOWHERE).nonzero().squeeze(-1)
                place = positions[index] + padding
                keys[row, head, place] = rotate(keys[row, head, place], before[place], index, frequencies)
        moved.append((keys, values))
    return moved


def _rotate(keys: Tensor, before: Tensor, after: Tensor, frequencies: Tensor) -> Float[Tensor, "entry d_head"]:
    """Return keys rotated from one position to another, by angles rounded as in the model."""
    exact = frequencies.to(keys.device, torch.float32)
    angles = [(position.float().unsqueeze(-1) * exact).to(WORK) for position in (before, after)]
    return rotate_keys(keys, angles[1] - angles[0])


def _rotate_by_difference(keys: Tensor, before: Tensor, after: Tensor, frequencies: Tensor) -> Tensor:
    """Return keys rotated by the difference of positions, with sines, cosines and products in the keys' type."""
    angle = (after - before).float().unsqueeze(-1) * frequencies.to(keys.device, torch.float32)
    half, cosine, sine = angle.shape[-1], angle.cos().to(keys.dtype), angle.sin().to(keys.dtype)
    first, second, rest = torch.split(keys, [half, half, keys.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)


_EXPLAINED = 0.5
"""Share of moved keys above which a rotation explains them: the first layer's equal tokens are easily mistaken."""
_SAME_BASE = 0.01
"""Largest relative difference of two bases that are one."""
_BASES = (1e4, 1e5, 5e5, 1e6)
"""Rotary bases that models have, 10,000 the one that code falls back to."""


def describe_wrong_rotation(
    keys: Float[Tensor, "entry d_head"],
    before: Float[Tensor, "entry d_head"],
    positions: Int[Tensor, " entry"],
    index: Int[Tensor, " entry"],
    frequencies: Float[Tensor, " frequency"],
    near: float,
) -> str:
    """Return how keys were moved to their places in a cache by other frequencies than the model's; empty if not so.

    `before` are the full cache's keys at `positions`, `index` the places in the cache, `near` the largest relative
    distance at which a rotation explains a key.
    """
    half, d_head = len(frequencies), keys.shape[-1]
    length = torch.linalg.vector_norm(before.double(), dim=-1)
    base = float(frequencies[1].double() ** -half) if half > 1 else _BASES[0]
    candidates = {
        **{
            f"with base {other:,.0f}, the model's is {base:,.0f}": (other, half)
            for other in _BASES
            if abs(other / base - 1) > _SAME_BASE
        },  # fmt: skip
        "without the model's scaling of long contexts": (base, half),
        "in all components, the model rotates a part of them": (base, d_head // 2),
    }
    for words, (other, pairs) in candidates.items():
        angles = other ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        if pairs == half and torch.allclose(angles, frequencies.cpu().double(), rtol=1e-3):
            continue
        moved = _rotate(before, positions, index, angles)
        distance = torch.linalg.vector_norm(keys.double() - moved.double(), dim=-1)
        turned = index != positions
        if bool(turned.any()) and float((distance <= near * length)[turned].float().mean()) > _EXPLAINED:
            return f"moved to their places inside the cache {words}"
    return ""

"""Positions inside an evicted cache: keys rotated to 0, 1, …, and new tokens after them (METHOD: Audit, 2).

StreamingLLM, token dropping in LMCache, TensorRT-LLM and some presses of kvpress close the gaps that eviction leaves,
once or at every step. Such a cache is right where the plain model agrees that holds the same entries at those
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.auditing.forward_passes import ForwardPass, Situation
from perturbkv.auditing.reference import Distances, PromptEntries, decode, entry_floors, noise_floors
from perturbkv.auditing.unmeasured import fill_cache, read_contents
from perturbkv.cache.entries import rotate_keys
from perturbkv.cache.external_cache import NOWHERE, Layers, RecoveredLayer, recover_positions
from perturbkv.configs.audit_settings import IN_CACHE, ORIGINAL
from perturbkv.models.adapter import Adapter
from perturbkv.theory import WORK

HeldPositions = Sequence[Sequence[Sequence[Int[Tensor, " entry"]]]]
"""Per row, layer and key/value head the known entries that a cache holds, in its order; `NOWHERE` for others."""
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Keys (entry, d_key), positions from and to (entry,), frequencies (frequency,) → rotated keys."""
UNROTATED = "unrotated"
"""The convention of keys that a cache holds without positions."""
_EXPLAINED = 0.5
"""Share of moved keys above which a rotation explains them: the first layer's equal tokens are easily mistaken."""
_SAME_BASE = 0.01
"""Largest relative difference of two bases that are one."""
_BASES = (1e4, 1e5, 5e5, 1e6)
"""Rotary bases that models have, 10,000 the one that code falls back to."""


def frequencies_of(adapter: Adapter) -> Float[Tensor, " frequency"]:
    """Return the rotary frequencies of measured layers; none where their keys have no rotations by such pairs."""
    return torch.empty(0, device=adapter.device) if adapter.rotary is None else adapter.frequencies


def base_of(adapter: Adapter) -> float:
    """Return the rotary base of measured layers, before any scaling for long contexts; 0 where none is known."""
    rotations = getattr(adapter.config, "rope_parameters", None) or {}
    for kind in adapter.rotary_kind:
        rotations = rotations.get(kind, rotations)
    return float(rotations.get("rope_theta") or 0)


def keys_can_move(adapter: Adapter) -> bool:
    """Return whether keys may stand at 0, 1, … in the cache: they are rotated, and in no window at other places."""
    return adapter.rotary is not None and len(adapter.every_attention) == len(adapter.layers)


def convention_distances(
    own: tuple[Tensor, Tensor],
    fixed: tuple[Tensor, Tensor],
    known: tuple[Tensor, Tensor],
    known_positions: Int[Tensor, "row entry"],
    padding: Sequence[int],
    frequencies: Tensor,
) -> dict[str, float]:
    """Return how far the first layer's keys are from each convention: `original`, `in-cache`, and `UNROTATED`.

    A distance is the sum over rows, heads and entries of the key's from the nearest known one.

    Args:
        own: keys and values of the cache (row, kv_head, entry, width).
        fixed: the known entries, with keys at the positions that they have unless the cache moves them.
        known: the known entries at `known_positions`.
        known_positions: positions of the prompts' tokens and of those decoded so far.
        padding: entries of padding before each row's.
        frequencies: (frequency,) of the rotation.
    """
    distances = dict.fromkeys((ORIGINAL, IN_CACHE, UNROTATED), 0.0)
    zeros = torch.zeros(own[0].shape[2], dtype=torch.int64, device=own[0].device)
    for row, first in enumerate(padding):
        kept = {
            ORIGINAL: recover_positions([own], [fixed], row, first)[0],
            IN_CACHE: match_at_zero([own], [known], row, first, known_positions, frequencies)[0],
            UNROTATED: match_at_zero([own], [known], row, first, known_positions, frequencies, zeros)[0],
        }
        for convention, layer in kept.items():
            distances[convention] += sum(float(distance.sum()) for distance in layer.key_distance)
    return distances


def match_at_zero(
    own: Layers,
    known: Layers,
    row: int,
    padding: int,
    known_positions: Int[Tensor, "row entry"],
    frequencies: Tensor,
    places: Int[Tensor, " entry"] | None = None,
) -> list[RecoveredLayer]:
    """Return per layer the known entries that a cache holds in a row, found by keys rotated back to position 0.

    `own` and `known` are keys and values (row, kv_head, entry, width) of the cache, which stand at `places`, by
    default at 0, 1, …, and of the plain model, at `known_positions`. Equal tokens have equal keys at position 0 in the
    first layer, and are those of the layers after it; positions are counted after the row's `padding`.
    """
    at_zero: list[list[tuple[Tensor, Tensor]]] = []
    for layers, positions in ((own, places), (known, known_positions[row])):
        at_zero.append([])
        for keys, values in layers:
            places = torch.arange(keys.shape[2], device=keys.device) if positions is None else positions
            rotated = [_rotate(head, places, torch.zeros_like(places), frequencies) for head in keys[row]]
            at_zero[-1].append((torch.stack(rotated).unsqueeze(0), values[row].unsqueeze(0)))
    return recover_positions(at_zero[0], at_zero[1], padding=padding)


def match_all_at_zero(
    cache: Layers, full: Layers, padding: Sequence[int], known_positions: Int[Tensor, "row entry"], frequencies: Tensor
) -> list[list[RecoveredLayer]]:
    """Return per row and layer the known entries that a cache holds, as `match_at_zero` finds them.

    Their positions are counted from the first entry of each row's padding on.
    """
    return [
        [
            replace(kept, positions=tuple(found.where(found == NOWHERE, found + first) for found in kept.positions))
            for kept in match_at_zero(cache, full, row, first, known_positions, frequencies)
        ]
        for row, first in enumerate(padding)
    ]


def held_positions(rows: Sequence[Sequence[RecoveredLayer]]) -> HeldPositions:
    """Return the known entries that a cache holds, from the matches `rows` per row and layer."""
    return [[kept.positions for kept in layers] for layers in rows]


def move_to_cache_positions(
    adapter: Adapter,
    held: HeldPositions,
    prompts: PromptEntries,
    situation: Situation,
    before: Int[Tensor, "row entry"],
) -> PromptEntries:
    """Return the entries of the prompts with the keys of those held rotated to their places in the cache.

    `before` are the positions of all entries until then. Keys are rotated in float64 by the model's own angles; in one
    of the other readings in the type of the keys, by the difference of positions, so that the noise floors include the
    rounding of both.
    """
    rotations: Sequence[Rotate] = (_rotate, _rotate, _rotate_by_difference)
    readings = [[(keys.clone(), values) for keys, values in layers] for layers in (prompts.full, *prompts.others)]
    for row, layers in enumerate(held):
        for layer, heads in enumerate(layers):
            for head, positions in enumerate(heads):
                places = (positions != NOWHERE).nonzero().squeeze(-1)
                known = positions[places]
                for moved, rotate in zip(readings, rotations, strict=True):
                    keys = moved[layer][0][row, head]
                    keys[known] = rotate(keys[known], before[row, known], places, frequencies_of(adapter))
    full, *others = readings
    floors = entry_floors(full, others, situation, torch.finfo(adapter.dtype).eps)
    return PromptEntries(full, tuple(others), floors, prompts.rests)


def decode_moving(
    adapter: Adapter,
    prompts: PromptEntries,
    situation: Situation,
    kept: Sequence[Sequence[Tensor]],
    held: Sequence[HeldPositions],
) -> tuple[list[ForwardPass], Distances]:
    """Return the masked reference's forward passes where keys move to their places at every pass, and its noise floors.

    `prompts` are the entries at the prompt's own positions; `kept` has a mask (row, kept_head, entry) per pass and
    layer, `held` the entries of each pass. Entries of tokens decoded before are the reference's own, and so are states.
    """
    passes: list[ForwardPass] = []
    noise: list[Distances] = []
    before = situation.prompt_positions()
    for chunk, (masks, entries) in enumerate(zip(kept, held, strict=True)):
        single = replace(situation, chunks=situation.chunks[chunk : chunk + 1], cached=(situation.cached or ())[chunk:])
        moved = move_to_cache_positions(adapter, entries, prompts, situation, before)
        cache = fill_cache(adapter, moved.readings[0])
        passed = list(decode(adapter, cache, single, [masks]))
        noise.append(noise_floors(adapter, passed, moved, single, [masks]))
        passes += passed
        new = [passed[0].new_entries(layer) for layer in range(len(prompts.full))]
        prompts = replace(
            prompts,
            full=_append_entries(prompts.full, new),
            others=tuple(_append_entries(layers, new) for layers in prompts.others),
            rests=tuple(read_contents(adapter, cache)[1] for _ in prompts.rests),
        )
        before = torch.cat([before, situation.positions(chunk)], dim=-1)
    return passes, Distances(
        *(torch.stack([getattr(one, name) for one in noise]).amax(dim=0) for name in ("head", "hidden", "logits"))
    )


def _append_entries(layers: Layers, new: Layers) -> Layers:
    """Return layers of entries with new ones behind them."""
    return [
        (torch.cat([keys, new_keys], dim=2), torch.cat([values, new_values], dim=2))
        for (keys, values), (new_keys, new_values) in zip(layers, new, strict=True)
    ]


def _rotate(keys: Tensor, before: Tensor, after: Tensor, frequencies: Tensor) -> Float[Tensor, "entry d_key"]:
    """Return keys rotated from the positions `before` to `after`, by angles that are rounded as in the model."""
    single = frequencies.to(keys.device, torch.float32)
    angles = [(positions.float().unsqueeze(-1) * single).to(WORK) for positions in (before, after)]
    return rotate_keys(keys, angles[1] - angles[0])


def _rotate_by_difference(keys: Tensor, before: Tensor, after: Tensor, frequencies: Tensor) -> Tensor:
    """Return keys rotated by the difference of positions, with sines, cosines and products in the keys' type."""
    angle = (after - before).float().unsqueeze(-1) * frequencies.to(keys.device, torch.float32)
    half, cosine, sine = angle.shape[-1], angle.cos().to(keys.dtype), angle.sin().to(keys.dtype)
    first, second, rest = torch.split(keys, [half, half, keys.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)


def describe_wrong_rotation(
    keys: Float[Tensor, "entry d_key"],
    before: Float[Tensor, "entry d_key"],
    positions: Int[Tensor, " entry"],
    index: Int[Tensor, " entry"],
    frequencies: Float[Tensor, " frequency"],
    near: float,
    base: float = 0,
    rounded: float = 0,
) -> str:
    """Return in words how keys were moved to their places in a cache by other frequencies than the model's.

    Empty if no such rotation explains most keys that moved. `before` are the full cache's keys at `positions`, `index`
    the places in the cache, `near` the largest relative distance at which a rotation explains a key, `base` the
    model's, or 0 where it follows from the frequencies. With `rounded` it explains a key, too, whose distance it leaves
    below so many times the distance of the model's own rotation and of none.
    """
    half, d_key = len(frequencies), keys.shape[-1]
    length = torch.linalg.vector_norm(before.double(), dim=-1)
    moved = index != positions
    if not bool(moved.any()):
        return ""
    base = base or (float(frequencies[1].double() ** -half) if half > 1 else _BASES[0])
    own = torch.stack([_rotate(before, positions, target, frequencies) for target in (index, positions)])
    least = rounded * torch.linalg.vector_norm(keys.double() - own.double(), dim=-1).amin(dim=0)
    candidates = {
        "without the model's scaling of long contexts": (base, half),
        **{
            f"with base {other:,.0f}, the model's is {base:,.0f}": (other, half)
            for other in _BASES
            if abs(other / base - 1) > _SAME_BASE
        },  # fmt: skip
        "in all components, the model rotates a part of them": (base, d_key // 2),
    }
    found = {}
    for words, (other, pairs) in candidates.items():
        others = other ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        if pairs == half and torch.allclose(others, frequencies.cpu().double(), rtol=1e-3):
            continue  # the model's own
        candidate = _rotate(before, positions, index, others)
        distance = torch.linalg.vector_norm(keys.double() - candidate.double(), dim=-1)
        if float((distance <= torch.maximum(near * length, least))[moved].float().mean()) > _EXPLAINED:
            found[f"moved to their places inside the cache {words}"] = float(distance[moved].mean())
    return f"{min(found, key=found.__getitem__)}{', and rounded' if rounded else ''}" if found else ""

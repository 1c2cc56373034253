"""Positions inside an evicted cache (StreamingLLM, section 3.2): kept keys as if they stood at 0 … b − 1.

Rotations compose: a key that was cached as R(p) k becomes R(j) k by R(j − p), whatever factor its length carries beside
(YaRN's). Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.gather import Kept
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.layer_types import FULL, is_mixed
from perturbkv.errors import ModelError
from perturbkv.selection.policies import registry
from perturbkv.theory import WORK

COMPOSING = ("default", "linear", "llama3", "yarn")
"""transformers' `rope_type`s whose frequencies are the same at every length of the text."""


def check(configs: Iterable[EvictionConfig], model_config: Any, name: str) -> None:
    """Raise ModelError where a configuration moves keys and the model's rotations do not compose."""
    if not any(registry.build(config.policy).in_cache for config in configs):
        return
    rotations = model_config.rope_parameters
    if is_mixed(model_config) and FULL not in rotations:
        msg = (
            f"positions=in-cache expects rotations of the evicted layers' own, got those of model '{name}', which its "
            "sliding layers share; use positions=kept"
        )
        raise ModelError(msg)
    if (kind := rotations.get(FULL, rotations)["rope_type"]) not in COMPOSING:
        msg = (
            f"positions=in-cache expects rotary frequencies of the type {', '.join(COMPOSING)}, got '{kind}' of "
            f"model '{name}', which change with the length of the text; use positions=kept"
        )
        raise ModelError(msg)


def behind(configs: Iterable[EvictionConfig], n: int) -> list[int]:
    """By how much each configuration's next position lies before n: n − min(b, n) in the cache, else 0."""
    return [n - config.kept_entries(n) if registry.build(config.policy).in_cache else 0 for config in configs]


def in_cache(kept: Kept, configs: Sequence[EvictionConfig], frequencies: Float[Tensor, " frequency"]) -> Kept:
    """The same entries, the keys of configurations that ask for it turned to where they stand in their cache.

    `frequencies` are the model's own, in radians per position. `position` stays the prompt's.
    """
    pieces = torch.split(kept.position, [sum(kept.entries[place].lengths) for place in kept.order])
    moved = {
        place: move(kept.entries[place], position, frequencies)
        for place, position in zip(kept.order, pieces, strict=True)
        if registry.build(configs[place].policy).in_cache
    }
    return replace(kept, entries=kept.entries | moved)


def move(entries: KeptEntries, position: Int[Tensor, " kept"], frequencies: Float[Tensor, " frequency"]) -> KeptEntries:
    """Copies of the entries of kept sets of one length, as StreamingLLM's are, from `position` to 0, 1, … in each."""
    stands = torch.arange(entries.lengths[0], device=position.device).repeat(len(entries.lengths))
    angle = _angles(stands, frequencies) - _angles(position, frequencies)
    index = torch.arange(len(position), device=position.device)
    keys = turned(entries.keys[entries.index], angle)
    return KeptEntries(keys, entries.values[entries.index], index, entries.lengths)


def _angles(position: Int[Tensor, " kept"], frequencies: Tensor) -> Float[Tensor, "kept frequency"]:
    """Angles of rotation, rounded as the model rounds them, so that their difference is what lies between two keys."""
    work = torch.promote_types(frequencies.dtype, torch.float32)
    own = frequencies.to(position.device, work, non_blocking=True)
    return (position.to(work).unsqueeze(-1) * own).to(WORK)


def turned(keys: Float[Tensor, "entry d_head"], angle: Float[Tensor, "entry frequency"]) -> Tensor:
    """Keys rotated by angles in radians, component i with i + frequencies, as transformers pairs them (`rotate_half`).

    Components behind those stay as they are: Phi-3's, where only a part of a head is rotary.
    """
    half, cosine, sine = angle.shape[-1], angle.cos(), angle.sin()
    first, second, rest = torch.split(keys, [half, half, keys.shape[-1] - 2 * half], dim=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat([*(piece.to(keys.dtype) for piece in rotated), rest], dim=-1)

"""What was done to an entry that is not the full cache's any more: a rotation, a quantisation, another head's entry."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

_MOST = 32
"""Entries of a head that are looked at for a rotation."""
_NEAR = 0.02
"""A rotation or a quantisation explains an entry that it brings this near, relative to the entry's length."""
_BITS = (8, 4, 2)


def rotations(
    found: Float[Tensor, "entry d_head"],
    full: Float[Tensor, "entry d_head"],
    frequencies: Float[Tensor, " frequency"],
    most: int,
) -> Int[Tensor, " entry"] | None:
    """By how many positions, −most to most, each key was rotated beyond its place; None where no rotation explains it.

    Component i goes with i + frequencies, as in `perturbkv.cache.positions.turned`.
    """
    half = len(frequencies)
    one, other = _pairs(found, half), _pairs(full, half)
    cross = one * other.conj()
    shifts = torch.arange(-most, most + 1, device=found.device)
    angles = shifts.double().unsqueeze(-1) * frequencies.to(found.device).double()
    matched = angles.cos() @ cross.real.T + angles.sin() @ cross.imag.T
    best = matched.argmax(dim=0)
    turned = other * torch.polar(torch.ones_like(angles[best]), angles[best])
    length = torch.linalg.vector_norm(full.double(), dim=-1)
    rest = torch.linalg.vector_norm(found[:, 2 * half :].double() - full[:, 2 * half :].double(), dim=-1)
    left = torch.hypot(torch.linalg.vector_norm(one - turned, dim=-1), rest)
    return shifts[best] if bool((left <= _NEAR * length).all()) else None


def _pairs(keys: Float[Tensor, "entry d_head"], half: int) -> Tensor:
    """Rotary components as complex numbers (entry, frequency)."""
    work = keys.double()
    return torch.complex(work[:, :half], work[:, half : 2 * half])


def rotation(
    found: Float[Tensor, "entry d_head"],
    full: Float[Tensor, "entry d_head"],
    places: Int[Tensor, " entry"],
    frequencies: Float[Tensor, " frequency"],
    most: int,
) -> str:
    """The rotation that keys of these places differ by, in words; empty where there is none.

    `found` are a head's keys in the cache's order, `full` those of the full cache at `places`.
    """
    chosen = torch.linspace(0, len(found) - 1, min(len(found), _MOST), device=found.device).round().long()
    turned = rotations(found[chosen], full[chosen], frequencies, most)
    if turned is None or not bool(turned.any()):
        return ""
    own = places[chosen]
    if bool((turned == own).all()):
        return "rotated again, each by its own position"
    if bool((turned == turned[0]).all()):
        return f"rotated by {int(turned[0])} more positions"
    if bool((turned == chosen - own).all()):
        return "moved to their places inside the cache"
    return "rotated, each by a number of positions of its own"


def quantised(
    found: Float[Tensor, "entry d_head"],
    full: Float[Tensor, "entry d_head"],
    whole: Float[Tensor, "place d_head"],
) -> str:
    """The quantisation that makes `found` of `full`, in words; empty where none does.

    Scales are taken per entry, per channel and per head, of the entries that stay and of the `whole` head, from the
    largest magnitude or from the range.
    """
    for bits in _BITS:
        for words, like in _quantisations(full.float(), whole.float(), bits):
            off = torch.linalg.vector_norm(found.float() - like, dim=-1)
            plain = torch.linalg.vector_norm(full.float() - like, dim=-1)
            if bool((off <= torch.maximum(0.2 * plain, _rounding(found))).float().mean() > 0.95):
                return f"quantised to {bits} bits {words}"
    return ""


def _rounding(found: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(found.float(), dim=-1)
    return 2 * torch.finfo(found.dtype).eps * length


def _quantisations(full: Tensor, whole: Tensor, bits: int) -> Iterator[tuple[str, Tensor]]:
    """What quantisations of a kind make of the entries, each with its name."""
    for words, scaled in (("per entry", full), ("per channel", whole), ("per channel", full), ("per head", whole),
                          ("per head", full)):  # fmt: skip
        low, high = _ends(scaled, words)
        largest = torch.maximum(high, -low)
        for step, zero in (
            (largest / (2 ** (bits - 1) - 1), torch.zeros_like(low)),
            (largest / 2 ** (bits - 1), torch.zeros_like(low)),
            ((high - low) / (2**bits - 1), low),
        ):
            safe = step.clamp(min=torch.finfo(torch.float32).tiny)
            yield words, ((full - zero) / safe).round() * safe + zero


def _ends(values: Tensor, words: str) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each group that shares a scale."""
    if words == "per head":
        return values.amin(), values.amax()
    dim = -1 if words == "per entry" else 0
    return values.amin(dim=dim, keepdim=True), values.amax(dim=dim, keepdim=True)


def of_head(found: Float[Tensor, "entry d_head"], full: Float[Tensor, "kv_head entry d_head"]) -> int | None:
    """The head whose entries at these places these are, to the bit; None where no head's are."""
    return next((head for head, entries in enumerate(full) if torch.equal(entries.to(found.dtype), found)), None)

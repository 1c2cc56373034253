"""Rotations, quantisations and other heads' entries, made here by hand, and noise that is none of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perturbkv.auditing import changes
from tests.support.models import tiny_model

FREQUENCIES = 1e4 ** (-torch.arange(0, 16, 2) / 16)
PLACES = torch.tensor([0, 3, 9, 17, 30, 41])


def entries(seed: int = 0, count: int = 6) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def turned(keys: Tensor, by: Tensor) -> Tensor:
    """Component i goes with i + 8, one pair after the other."""
    found = keys.double().clone()
    for entry in range(len(keys)):
        for pair in range(8):
            angle = float(by[entry]) * float(FREQUENCIES[pair])
            cosine, sine = torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))
            one, other = keys[entry, pair].double(), keys[entry, pair + 8].double()
            found[entry, pair], found[entry, pair + 8] = one * cosine - other * sine, other * cosine + one * sine
    return found.float()


@pytest.mark.parametrize(
    ("by", "words"),
    [
        (PLACES, "rotated again, each by its own position"),
        (torch.full((6,), -1), "rotated by -1 more positions"),
        (torch.arange(6) - PLACES, "moved to their places inside the cache"),
        (torch.tensor([0, 4, 1, 1, 2, 7]), "rotated, each by a number of positions of its own"),
        (torch.tensor([0, 3, 3, 0, 3, 3]), "rotated by 3 more positions, but for some"),
        (torch.zeros(6), ""),
    ],
)
def test_a_rotation_is_named_by_what_it_turns_by(by: Tensor, words: str) -> None:
    keys = entries()
    assert changes.describe_rotation(turned(keys, by), keys, PLACES, FREQUENCIES, 100) == words
    few_digits = turned(keys, by).bfloat16()
    assert changes.describe_rotation(few_digits, keys.bfloat16(), PLACES, FREQUENCIES, 100) == words


def test_the_hand_made_rotation_is_the_models() -> None:
    model = tiny_model("llama", d_head=16)
    assert torch.allclose(model.model.rotary_emb.inv_freq, FREQUENCIES)
    cosine, sine = model.model.rotary_emb(entries(), PLACES.unsqueeze(0))
    first, second = entries().chunk(2, dim=-1)
    own = entries() * cosine[0] + torch.cat([-second, first], dim=-1) * sine[0]
    assert torch.allclose(turned(entries(), PLACES), own, atol=1e-4)


def test_noise_is_no_rotation_and_no_quantisation() -> None:
    keys, whole = entries(), entries(1, 60)
    for size in (1e-3, 1e-2, 0.3):
        noisy = keys + size * entries(2)
        assert changes.describe_quantisation(noisy, keys, whole) == ""
        if size > 0.1:
            assert changes.describe_rotation(noisy, keys, PLACES, FREQUENCIES, 100) == ""


def symmetric(values: Tensor, bits: int, dim: int | None) -> Tensor:
    largest = values.abs().amax() if dim is None else values.abs().amax(dim=dim, keepdim=True)
    step = largest / (2 ** (bits - 1) - 1)
    return (values / step).round() * step


def by_range(values: Tensor, bits: int, dim: int) -> Tensor:
    low, high = values.amin(dim=dim, keepdim=True), values.amax(dim=dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return ((values - low) / step).round() * step + low


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_quantisation_is_named_by_bits_and_scale(bits: int) -> None:
    whole = torch.cat([entries(), entries(1, 54)])
    made = {
        "per entry": [symmetric(whole, bits, -1), by_range(whole, bits, -1)],
        "per channel": [symmetric(whole, bits, 0), by_range(whole, bits, 0)],
        "per head": [symmetric(whole, bits, None)],
    }
    for words, kinds in made.items():
        for kind in kinds:
            assert changes.describe_quantisation(kind[:6], whole[:6], whole) == f"quantised to {bits} bits {words}"


def test_another_heads_entries_are_found_rounded_or_not() -> None:
    heads = torch.stack([entries(seed) for seed in range(3)])
    assert changes.describe_head(heads[2].clone(), heads, 0) == "of head 2"
    assert changes.describe_head(heads[2].flip(0)[:3], heads, 0) == "of head 2"
    assert changes.describe_head(heads[2] + 1e-6, heads, 0) == "of head 2, and rounded"
    assert changes.describe_head(entries(7), heads, 0) == ""
    assert changes.describe_head(heads[2], heads, 2) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_round_trip_through_a_coarser_type_is_named(dtype: torch.dtype) -> None:
    rounded = entries().to(dtype).float()
    assert changes.describe_rounding(rounded, entries()) == f"rounded to {str(dtype).removeprefix('torch.')}"
    assert changes.describe_rounding(entries(), entries().to(dtype).float()) == ""
    assert changes.describe_rounding(entries() + 1e-3 * entries(1), entries()) == ""


def test_a_scale_is_named_with_its_factor() -> None:
    assert changes.describe_scale(1.5 * entries(), entries(), 1e-6) == "multiplied by 1.5"
    assert changes.describe_scale(-entries(), entries(), 1e-6) == "multiplied by -1"
    for other in (entries(), (1 + 1e-6) * entries(), entries() * (1 + 0.1 * entries(1).sign()), entries(1)):
        assert changes.describe_scale(other, entries(), 1e-6) == ""

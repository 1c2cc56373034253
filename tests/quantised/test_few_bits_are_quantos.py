"""Our arithmetic of few bits against optimum-quanto's, which transformers' QuantizedCache uses, where both apply."""

from __future__ import annotations

import pytest
import torch
from optimum.quanto import MaxOptimizer, qfloat8_e4m3fn, qint2, qint4, quantize_activation, quantize_weight

from perturbkv.cache.codecs import as_fp8, as_integers, group_lengths

QTYPES = {4: qint4, 2: qint2}
ENTRIES, D_HEAD, GROUP = 96, 64, 32


def theirs(data: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Groups of min–max with their scale and minimum in 16 bits, as ours are."""
    scale, shift = MaxOptimizer()(data, QTYPES[bits], axis, GROUP)
    scale, shift = (kind.to(torch.float16).to(torch.float32) for kind in (scale, shift))
    found = quantize_weight(data, QTYPES[bits], axis, scale, shift, group_size=GROUP, optimized=False)
    return found.dequantize()


@pytest.fixture(params=[1e-3, 1.0, 50.0])
def data(request: pytest.FixtureRequest) -> torch.Tensor:
    torch.manual_seed(0)
    return request.param * (torch.randn(ENTRIES, D_HEAD) + torch.randn(D_HEAD))


@pytest.mark.parametrize("bits", QTYPES)
def test_keys_per_channel_are_the_same_numbers(data: torch.Tensor, bits: int) -> None:
    found = as_integers(data, group_lengths(ENTRIES, GROUP), bits)
    assert torch.equal(found, theirs(data, bits, axis=-1))
    assert not torch.equal(found, theirs(data, bits, axis=0)), "another grouping gives other numbers"


@pytest.mark.parametrize("bits", QTYPES)
def test_values_per_entry_are_the_same_numbers(data: torch.Tensor, bits: int) -> None:
    assert torch.equal(as_integers(data.mT, group_lengths(D_HEAD, GROUP), bits).mT, theirs(data, bits, axis=0))


@pytest.mark.parametrize("bits", QTYPES)
def test_scales_in_32_bits_lie_near(data: torch.Tensor, bits: int) -> None:
    """Rounding scale and minimum to 16 bits moves a number by far less than rounding it to a code does."""
    scale, shift = MaxOptimizer()(data, QTYPES[bits], -1, GROUP)
    whole = quantize_weight(data, QTYPES[bits], -1, scale, shift, group_size=GROUP, optimized=False).dequantize()
    found = as_integers(data, group_lengths(ENTRIES, GROUP), bits)
    assert float((found - whole).abs().mean()) < 0.02 * float((whole - data).abs().mean())


def test_fp8_with_one_scale_has_the_same_numbers(data: torch.Tensor) -> None:
    scale = data.abs().max() / 448
    assert torch.equal(as_fp8(data, [ENTRIES]), quantize_activation(data, qfloat8_e4m3fn, scale).dequantize())


def test_their_layout_holds_no_kept_sets() -> None:
    """A length that is no multiple of the group is refused; 8 bits go without groups."""
    with pytest.raises(ValueError, match="must be a divisor"):
        MaxOptimizer()(torch.randn(70, D_HEAD), qint4, -1, GROUP)

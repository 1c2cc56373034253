"""Rotated codebooks against tiny-turboquant 0.18.0's TurboQuant, given the same map and the same levels."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_turboquant.quantizer import TinyQuantizer

from perturbkv.cache.codecs import as_rotated, normal_levels, rotation_map

ENTRIES = 200


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_map_and_levels_in_common_give_the_same_vectors(bits: int, width: int, seed: int) -> None:
    """Its MSE-optimal class; norms in 16 bits, as ours are stored. Products of another order may change a last bit."""
    torch.manual_seed(bits)
    data = 5 * torch.randn(ENTRIES, width) + torch.randn(width)
    theirs = TinyQuantizer(width, bits, device="cpu")
    theirs.rotation = torch.from_numpy(rotation_map(width, seed)).float()
    theirs.rotation_t = theirs.rotation.mT
    theirs.codebook = torch.from_numpy(normal_levels(bits)).float() / math.sqrt(width)
    codes, norms = theirs.quantize(data)
    expected = theirs.dequantize(codes, norms.half().float())
    torch.testing.assert_close(as_rotated(data, bits, seed), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_of_its_own_lose_more(bits: int) -> None:
    """Its levels are means of equally probable cells, which Lloyd and Max's are not: their error is larger."""
    data = torch.randn(ENTRIES, 128, generator=torch.Generator().manual_seed(0))
    theirs = TinyQuantizer(128, bits, device="cpu")
    codes, norms = theirs.quantize(data)
    both = as_rotated(data, bits, 0), theirs.dequantize(codes, norms)
    lost = [float((found - data).square().sum()) for found in both]
    assert lost[0] < lost[1]

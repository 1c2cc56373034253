"""The device's codes of kept sets are those that a reader knows, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perturbkv import kept_codec
from perturbkv.cache.entries import encode_kept_sets

SHARES = [(0.0,), (1.0,), (0.01,), (0.12,), (0.5,), (0.0, 0.02, 0.1, 0.3, 1.0)]


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 129, 1000, 20_000])
def test_codes_are_the_codecs(tokens: int, shares: tuple[float, ...]) -> None:
    draw = np.random.default_rng(tokens)
    kept = np.stack([draw.random(tokens) < shares[row % len(shares)] for row in range(11)])
    masks, counts = np.packbits(kept, axis=1), kept.sum(axis=1)
    expected, expected_lengths = kept_codec.encode_masks(masks, counts)
    position = torch.from_numpy(kept.nonzero()[1].astype(np.int32))
    codes, lengths = (part.numpy() for part in encode_kept_sets(position, counts.tolist(), torch.from_numpy(masks)))
    np.testing.assert_array_equal(lengths, expected_lengths)
    np.testing.assert_array_equal(codes[np.arange(codes.shape[1]) < lengths[:, np.newaxis]], expected)


def test_gaps_of_every_width_are_coded() -> None:
    """One to five bytes, at the ends of each."""
    ends = [0, 127, 128, 2**14 - 1, 2**14, 2**21 - 1, 2**21, 2**22]
    position = torch.tensor(np.cumsum(ends), dtype=torch.int32)
    masks = torch.zeros(1, 2**21, dtype=torch.uint8)
    codes, lengths = encode_kept_sets(position, [len(ends)], masks)
    found = kept_codec.decode_positions(codes[0, : int(lengths[0])].numpy(), 2**24)
    assert found.tolist() == position.tolist()
    assert int(lengths[0]) == 1 + 1 + 2 + 2 + 3 + 3 + 4 + 4

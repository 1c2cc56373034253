"""A fault is a fault under rounding, too: planted ones are found in caches of 8, 4 and 3 bits, rotated or not."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from perturbkv.auditing.changes import describe_clipping
from tests.audit import planted
from tests.audit.test_every_fault_has_its_kind_and_place import FAULTS
from tests.audit.test_planted_faults_are_told_apart import audited

CODECS = {"8 bits": (8, False), "4 bits": (4, False), "4 bits, rotated": (4, True), "3 bits": (3, False)}
FOUND = (
    "off_by_one", "late", "at_cache_length", "rotated_again", "shifted", "swapped_values", "exchanged_heads",
    "values_of_others", "other_row", "scaled", "scaled_values", "twice", "with_padding", "masked_sink", "wrong_mask",
)  # fmt: skip
TOO_COARSE = ("shifted", "3 bits")
"""Three positions' rotation lies within what three bits leave of a key: unknown, and so no pass."""


def rounded(vectors: Tensor, bits: int, turned: bool) -> Tensor:
    """Vectors in so many bits each, with a scale per vector, in a basis of their own or not."""
    width = vectors.shape[-1]
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator))[0] if turned else torch.eye(width)
    turn = turn.to(vectors.dtype)
    scale = (vectors @ turn).abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((vectors @ turn / scale).round() * scale) @ turn.T


def under(fault: str, codec: str) -> Any:
    """The eviction with that fault, whose cache is then rounded."""
    plain = getattr(planted, fault)

    def evict(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        cache = plain(model, input_ids, attention_mask)
        for layer in cache.layers:
            layer.keys, layer.values = (rounded(one, *CODECS[codec]) for one in (layer.keys, layer.values))
        return cache

    if hasattr(plain, "decode"):
        evict.decode = plain.decode  # type: ignore[attr-defined]
    return evict


@pytest.mark.parametrize("codec", CODECS)
def test_a_right_eviction_in_few_bits_is_lossy(codec: str) -> None:
    result = audited("llama", under("right", codec), allow=["lossy"], situations=["single"])
    assert (result.verdict, result.exit_code) == ("lossy", 0), result.conclusion()


@pytest.mark.parametrize(
    ("fault", "codec"),
    [
        pytest.param(*one, marks=() if one[1] == "4 bits" else pytest.mark.slow)
        for one in product(FOUND, CODECS)
        if one != TOO_COARSE
    ],
)
def test_a_fault_under_rounding_has_its_kind_and_layer(fault: str, codec: str) -> None:
    kind, where, layer, *_ = FAULTS[fault]
    result = audited("llama", under(fault, codec), allow=["lossy"], situations=sorted(where, reverse=True)[:1])
    first = result.faults[0]
    assert (result.verdict, result.exit_code) == ("differs", 1)
    assert (first.kind, first.layer, first.step) == (kind, layer, 0), result.conclusion()


def test_what_bits_hide_is_no_pass() -> None:
    result = audited("llama", under(*TOO_COARSE), allow=["lossy"], situations=["single"])
    assert (result.verdict, result.exit_code) == ("unknown", 1)


@pytest.mark.parametrize(("share", "verdict"), [(1, "lossy"), (0.99, "differs"), (0.8, "differs")])
def test_numbers_that_are_cut_off_are_no_rounding(share: float, verdict: str) -> None:
    """Values in 8 bits, scaled so that this share of them is within the type."""

    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        cache = planted.right(loaded, input_ids, attention_mask)
        for layer in cache.layers:
            scale = 448 / layer.values.abs().flatten().quantile(share)
            layer.values = (layer.values * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
        return cache

    result = audited("llama", evict, situations=["single"])
    assert result.verdict == verdict
    assert [fault.kind for fault in result.faults] == ["clipped"] * (verdict == "differs")
    assert ("values clipped at" in result.conclusion()) == (verdict == "differs")


def test_two_numbers_at_a_limit_tell_it_and_one_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    full = 100 * torch.randn(40, 16, generator=generator)
    full[3, 5], full[30, 2] = 500, -900
    entries = full.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert describe_clipping(entries, full) == "clipped at 448"
    assert describe_clipping(entries / 2, full / 2) == "clipped at 224"
    assert describe_clipping(full.clamp(-600, 600).to(torch.float8_e5m2).float(), full) == ""  # one number alone

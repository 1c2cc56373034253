"""nexusquant-kv 0.6.3 rounds to a lattice; its eviction leaves zeros that are attended to, or closes the gaps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from nexusquant import nexusquant_evict
from torch import Tensor
from transformers import DynamicCache

from perturbkv.analyses.audit.audit import Audit
from tests.packages.conftest import TOKENS, tiny
from tests.packages.evictions import E8QuantizedCache, compressed, read, truncated, zeroed
from tests.packages.truth import decoding_error, errors, nearest, plain_entries, rounding, spied

GONE, SETS = 28, 6
"""Of 80 tokens the last 32 stay, and of the others, as is asked, 40 %."""


@torch.no_grad()
def test_a_prompt_compressed_after_reading_is_lossy(audited: Callable[..., Audit], ids: Tensor) -> None:
    known, cache = plain_entries(tiny().model, ids), compressed(tiny().model, ids, torch.ones_like(ids))
    own = {index: (layer.keys, layer.values) for index, layer in enumerate(cache.layers)}
    assert (nearest(own, known) == np.arange(TOKENS)).all()
    result = audited("compressed", "single", "block")
    assert result.verdict == "lossy"
    assert f"of the prompt by at most {rounding(*(errors(own, known, kind) for kind in range(2)))}" in result.summary
    assert audited("compressed").verdict == "lossy"  # in a batch, too


@pytest.mark.parametrize("bits", [(3, 2), (3, 3), (4, 4)])
def test_every_entry_stays_nearest_to_its_own(ids: Tensor, bits: tuple[int, int]) -> None:
    keys, values, own = _written(ids, *bits)
    assert (own == np.arange(TOKENS)).all()
    assert keys.max() < 0.3
    assert (values.max() > 0.5) == (bits == (3, 2))


@torch.no_grad()
def test_a_token_is_decoded_from_what_is_handed_out(ids: Tensor) -> None:
    model = tiny().model
    with spied(cache := E8QuantizedCache.from_model(model)) as seen:
        model(input_ids=ids, past_key_values=cache)
    assert decoding_error(model, cache, seen.returned, ids[:, :1]) < 1e-5


@pytest.mark.parametrize("bits", [3, 4])
def test_what_its_cache_rounds_as_it_is_written_is_lossy(audited: Callable[..., Audit], ids: Tensor, bits: int) -> None:
    keys, values, _ = _written(ids, bits, bits)
    result = audited(f"lattice(keys={bits},values={bits})")
    assert result.verdict == "lossy"
    assert f"of the prompt by at most {rounding(keys, values)}, of new tokens by" in result.conclusion()


def test_its_default_evicts_nothing(audited: Callable[..., Audit]) -> None:
    result = audited("lattice", "single")
    assert result.verdict in ("lossy", "unknown")
    assert [run.entries.evicted for run in result.runs if run.entries] == [0]
    assert "goes" not in result.conclusion()


@torch.no_grad()
def test_zeros_of_evicted_tokens_are_attended_to(audited: Callable[..., Audit], ids: Tensor) -> None:
    model = tiny(torch.bfloat16).model
    with nexusquant_evict(model, quality="balanced", verbose=False) as compressor:
        read(model, DynamicCache(), ids, torch.ones_like(ids))
    cache = zeroed(model, ids, torch.ones_like(ids))
    assert int((compressor.last_mask == 0).sum()) == GONE
    assert all(torch.equal(layer.keys[0].any(-1).float(), compressor.last_mask.expand(2, -1)) for layer in cache.layers)
    (fault,) = audited("zeroed", "single", dtype=torch.bfloat16).faults
    assert (fault.kind, fault.what) == ("zeros", f"{GONE} entries of nothing: zeros")


@torch.no_grad()
def test_its_truncation_moves_keys_to_their_places(ids: Tensor) -> None:
    model = tiny(torch.float16).model
    cache, known = truncated(model, ids, torch.ones_like(ids)), plain_entries(model, ids)
    values = [one[0, 0].double() for one in (cache.layers[1].values, known[1][1])]
    held = torch.cdist(*values).argmin(dim=-1).numpy()
    assert len(held) == TOKENS - GONE
    assert (np.diff(held) > 0).all()
    angles = (np.arange(len(held)) - held)[:, None] * 1e4 ** (-np.arange(16) / 16)
    for layer in range(3):
        own, plain = cache.layers[layer].keys[0].double().numpy(), known[layer][0][0, :, held].double().numpy()
        unit = np.sqrt(np.square(plain).sum(-1).mean())
        assert np.linalg.norm(own - _rotate(plain, angles), axis=-1).max() < 0.2 * unit


def test_a_truncated_prompt_is_lossy_at_its_places(audited: Callable[..., Audit]) -> None:
    result = audited("truncated", "single", "block", dtype=torch.float16)
    assert result.verdict == "lossy"
    assert "keys stand at their places in the cache, new tokens after them" in result.conclusion()
    assert [run.entries.evicted for run in result.runs if run.entries] == [SETS * GONE] * 2


@torch.no_grad()
def _written(ids: Tensor, keys: int, values: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how far keys and values are off what was written, and the nearest one to each, (layer, head, entry)."""
    cache = E8QuantizedCache.from_model(tiny().model, key_bits=keys, value_bits=values)
    with spied(cache) as seen:
        tiny().model(input_ids=ids, past_key_values=cache)
    own, known = seen.returned, seen.given
    return errors(own, known, 0), errors(own, known, 1), nearest(own, known)


def _rotate(keys: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Return keys (head, entry, width) rotated by angles (entry, width / 2)."""
    first, second = np.split(keys, 2, axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

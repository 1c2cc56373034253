"""tiny-turboquant 0.18.0 rounds all but a window, per channel of keys and per token of values, and evicts nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from perturbkv.analyses.audit.audit import Audit
from tests.packages.conftest import TOKENS, tiny
from tests.packages.evictions import TinyKVCache
from tests.packages.truth import decoding_error, errors, nearest, rounding, spied

WINDOW = "residual_len=16,block_size=16"
COARSE = "aggressive"
"""Three bits for keys and two for values."""


def written(ids: Tensor, preset: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how far keys and values are off what was written, and the nearest one to each, (layer, head, entry)."""
    cache = TinyKVCache(compression=preset, residual_len=16, block_size=16)
    with torch.no_grad(), spied(cache) as seen:
        tiny().model(input_ids=ids, past_key_values=cache)
    own, known = seen.returned, seen.given
    return errors(own, known, 0), errors(own, known, 1), nearest(own, known)


@pytest.mark.parametrize("preset", ["safe", "balanced", "compact", COARSE])
def test_every_entry_stays_nearest_to_its_own(ids: Tensor, preset: str) -> None:
    keys, values, own = written(ids, preset)
    assert (own == np.arange(TOKENS)).all()
    assert keys.max() < 0.2
    assert (values.max() > 0.5) == (preset == COARSE)
    assert not (keys[..., -16:].any() or values[..., -16:].any()), "the window is not rounded"


@torch.no_grad()
@pytest.mark.parametrize("preset", ["safe", COARSE])
def test_a_token_is_decoded_from_what_is_handed_out(ids: Tensor, preset: str) -> None:
    model, cache = tiny().model, TinyKVCache(compression=preset, residual_len=16, block_size=16)
    with spied(cache) as seen:
        model(input_ids=ids, past_key_values=cache)
    assert decoding_error(model, cache, seen.returned, ids[:, :1]) < 1e-5


@pytest.mark.parametrize("preset", ["safe", "balanced", "compact"])
def test_it_is_lossy_by_as_much_as_was_rounded(audited: Callable[..., Audit], ids: Tensor, preset: str) -> None:
    keys, values, _ = written(ids, preset)
    result = audited(f"TinyKVCache(compression={preset},{WINDOW})", "single", "block")
    assert result.verdict == "lossy"
    assert f"of the prompt by at most {rounding(keys, values)}" in result.conclusion()
    assert not any(run.entries.evicted for run in result.runs if run.entries)


@pytest.mark.parametrize("tokens", [77, 78])
def test_what_it_rounds_while_it_decodes_is_no_fault(audited: Callable[..., Audit], tokens: int) -> None:
    """The third and the second new token fill a block of the window, which is rounded then."""
    result = audited(f"TinyKVCache(compression=safe,{WINDOW})", "single", tokens=tokens)
    assert (result.verdict, result.faults) == ("lossy", ())


def test_coarse_rounding_evicts_nothing(audited: Callable[..., Audit]) -> None:
    result = audited(f"TinyKVCache(compression={COARSE},{WINDOW})", "single")
    assert result.verdict in ("lossy", "unknown")
    assert [run.entries.evicted for run in result.runs if run.entries] == [0]
    assert "goes" not in result.conclusion()


def test_keys_of_a_whole_prompt_were_not_moved(audited: Callable[..., Audit]) -> None:
    lines = [audited(f"TinyKVCache(compression=safe,{WINDOW})", "single", tokens=tokens).conclusion()
             for tokens in (TOKENS, TOKENS - 2)]  # fmt: skip
    assert not any("places in the cache" in line for line in lines), lines


def test_padding_of_a_whole_cache_is_the_mask_s_to_hide(audited: Callable[..., Audit]) -> None:
    """Within its first 256 entries it rounds nothing: a DynamicCache, for which the verdict is `did nothing`."""
    result = audited("TinyKVCache", "batch")
    assert (result.verdict, [fault.what for fault in result.faults]) == ("did nothing", [])

"""kvquant-plus-plus 0.1.17 rounds rotated keys and values, and its estimator of inner products keys by much."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from perturbkv.analyses.audit.audit import Audit
from tests.packages.conftest import TOKENS, tiny
from tests.packages.evictions import rotated
from tests.packages.truth import errors, nearest, plain_entries, rounding


@torch.no_grad()
def off(ids: Tensor, *, inner: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how far keys and values are off the plain ones, and the nearest one to each, (layer, head, entry)."""
    cache, known = rotated(tiny().model, ids, torch.ones_like(ids), inner), plain_entries(tiny().model, ids)
    own = {index: (layer.keys, layer.values) for index, layer in enumerate(cache.layers)}
    return errors(own, known, 0), errors(own, known, 1), nearest(own, known)


def test_entries_stay_nearest_to_their_own_but_one_pair_of_equal_tokens(ids: Tensor) -> None:
    """Every number is rounded where it stands; the estimator's keys are off by more than equal tokens' keys differ."""
    keys, values, own = off(ids, inner=False)
    assert (own == np.arange(TOKENS)).all()
    assert max(keys.max(), values.max()) < 0.3
    keys, values, own = off(ids, inner=True)
    assert values.max() < 0.3 < np.median(keys) < keys.max() < 0.8
    assert np.argwhere(own != np.arange(TOKENS)).tolist() == [[0, 0, 46], [0, 1, 47]]
    assert ids[0, 46] == ids[0, 47]


def test_what_it_generates_from_is_lossy_by_as_much(audited: Callable[..., Audit], ids: Tensor) -> None:
    keys, values, _ = off(ids, inner=False)
    result = audited("rotated", "single", "block")
    assert result.verdict == "lossy"
    assert f"of the prompt by at most {rounding(keys, values)}" in result.conclusion()
    assert audited("rotated").verdict == "lossy"  # in a batch, too


def test_its_estimator_keeps_no_entry_twice(audited: Callable[..., Audit]) -> None:
    result = audited("rotated(inner=true)", "single")
    assert result.verdict in ("lossy", "unknown")
    assert not any(fault.kind == "duplicate" for fault in result.faults)


def test_its_cache_of_codes_is_no_cache_of_transformers(audited: Callable[..., Audit]) -> None:
    result = audited("compact", "single")
    assert result.exit_code == 2
    assert result.conclusion().startswith("unreadable: expected")
    assert result.conclusion().endswith("to return a transformers Cache, got CompactKVCache")

"""KVzip's and KVzip+'s scores and kept sets are those of kvpress 0.5.5 but for ties, in one part and in several.

Ours always keeps the last entry, as every configuration has a window; their scores are given the same before they
choose. Run as `test_kept_sets_equal_kvpress.py` is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvpress.presses import kvzip_press
from kvpress.presses.kvzip_press import KVzipPress
from torch import Tensor

from perturbkv.configs.resources import Resources
from perturbkv.models.loading import ByteTokenizer
from perturbkv.selection.grid import configuration
from tests.kvpress.test_kept_sets_equal_kvpress import HEADS, keys, press_keeps, tiny, we_keep
from tests.support.models import token_ids
from tests.support.resolved import asked, prefill

TOKENS, BUDGET = 512, 128
RTOL = 2e-4


class Bytes(ByteTokenizer):
    """As kvpress asks a tokenizer."""

    @classmethod
    def from_pretrained(cls, *given: Any) -> Bytes:
        return cls()

    def encode(self, text: str, **given: Any) -> Tensor:
        return torch.tensor([list(text.encode())])


class Watched(KVzipPress):
    """Remembers its scores, and keeps the last entry of every head."""

    seen: Tensor

    def compress_post(self, model: Any) -> None:
        self.seen = self.score_val.clone()
        self.score_val[..., -1] = self.score_val.amax() + 1
        super().compress_post(model)


def assert_equal_but_for_ties(kept: Tensor, expected: Tensor, scores: Tensor) -> None:
    """All are (layer, kv_head, key). Where they differ, entries of equal scores were exchanged.

    Both sides add in float32, in another order on each processor.
    """
    ours, theirs = (scores[one & ~other].sort().values for one, other in ((kept, expected), (expected, kept)))
    torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=0)
    assert int((kept != expected).sum()) <= 4


@pytest.mark.parametrize("policy", ["kvzip", "kvzip-plus"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layer"])
@pytest.mark.parametrize("chunk", [2048, 200])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_scores_and_kept_sets(
    heads: tuple[int, int], chunk: int, layerwise: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvzip_press, "AutoTokenizer", Bytes)
    adapter, ids = tiny(*heads), token_ids(TOKENS, seed=3)
    chosen = configuration(
        BUDGET, policy=policy, preset="kvpress", selection="attention", chunk=chunk, wording="kvpress",
        across="layer" if layerwise else "model",
    )  # fmt: skip
    press = Watched(
        1 - BUDGET / TOKENS, layerwise=layerwise, chunk_size=chunk, kvzip_plus_normalization=policy == "kvzip-plus"
    )
    theirs = press_keeps(adapter, press, ids, keys(adapter, ids))
    scores = prefill(adapter, ids, [chosen], Resources(), "s").statistics.scored[asked(chosen)]
    for rows, expected in zip(scores, press.seen[:, 0], strict=True):
        largest = rows.view(heads[1], -1, TOKENS - 1).amax(dim=1)
        torch.testing.assert_close(largest.float(), expected[:, :-1], rtol=RTOL, atol=1e-7)
    (ours,) = we_keep(adapter, [chosen], ids)
    kept, expected_kept = (torch.stack(rows)[..., :-1] for rows in (ours, theirs))
    assert_equal_but_for_ties(kept, expected_kept, press.seen[:, 0, :, :-1])
    assert sum(int(rows.sum()) for rows in ours) == len(ours) * heads[1] * BUDGET

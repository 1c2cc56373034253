"""randkv 0.1.0 keeps a prompt whole and evicts generated tokens; of a block some go before they are attended to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perturbkv.analyses.audit.audit import Audit
from tests.packages.conftest import STEPS, TOKENS, tiny
from tests.packages.evictions import randkv
from tests.packages.truth import plain_entries, spied
from tests.support.models import token_ids

BLOCK = 8
KEPT = 3
"""Of the block's tokens: one of the budget, two of the buffer."""


@torch.no_grad()
def test_one_by_one_it_is_exact_and_as_many_go_as_its_own_positions_say(
    audited: Callable[..., Audit], ids: Tensor
) -> None:
    model = tiny().model
    cache = randkv(model, ids, torch.ones_like(ids))
    gone = []
    for step in range(STEPS):
        (expected,) = {cache.get_mask_sizes(1, layer)[0] for layer in range(3)}
        with spied(cache) as seen:
            model(input_ids=ids[:, :1], past_key_values=cache)
        assert {keys.shape[2] for keys, _ in seen.returned.values()} == {expected}, "no mask hides or shows too much"
        held = [head for layer in cache.layers for head in layer.positions]
        assert all(head[:TOKENS] == tuple(range(TOKENS)) for head in held)
        gone.append(sum(TOKENS + step + 1 - len(head) for head in held))
    result = audited("randkv", "single", "batch")
    assert result.verdict == "exact"
    assert f"of generated tokens {max(gone)} entries went" in result.conclusion()
    assert all("batch size 1 only" in run.refused for run in result.runs if run.situation == "batch")


@torch.no_grad()
def test_of_a_block_most_tokens_go_before_they_are_attended_to(audited: Callable[..., Audit], ids: Tensor) -> None:
    lost, keys, known = _decoded_block(ids)
    assert lost == [BLOCK - KEPT] * 6
    torch.testing.assert_close(keys, known, rtol=1e-5, atol=1e-5)  # at their positions
    assert audited("randkv", "block").verdict == "differs"


def test_the_cause_in_a_block_is_no_rotation(audited: Callable[..., Audit]) -> None:
    (fault,) = audited("randkv", "block").faults
    assert fault.kind != "positions", fault.what


def _decoded_block(ids: Tensor) -> tuple[list[int], Tensor, Tensor]:
    """Return how many of a block's tokens each head lost, and the first layer's other keys with the plain model's."""
    model, block = tiny().model, torch.tensor([token_ids(BLOCK, seed=1)])
    cache = randkv(model, ids, torch.ones_like(ids))
    model(input_ids=block, past_key_values=cache)
    plain = plain_entries(model, torch.cat([ids, block], dim=-1))[0][0]
    held = [head[TOKENS:] for layer in cache.layers for head in layer.positions]
    first = [torch.tensor(head) for head in held[:2]]
    keys = torch.stack([cache.layers[0].keys[0, head, TOKENS:] for head in range(2)])
    return [BLOCK - len(head) for head in held], keys, torch.stack([plain[0, i, one] for i, one in enumerate(first)])

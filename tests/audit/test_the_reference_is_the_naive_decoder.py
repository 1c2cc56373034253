"""The masked reference against a decoder that loops over heads and entries in float64, and how far rounding reaches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from perturbkv.auditing import reference
from perturbkv.auditing.forward_passes import boolean_mask, make_situation, token_count
from perturbkv.auditing.unmeasured import fill_cache
from perturbkv.models import recurrent_states
from tests.oracle.decoder import Decoder
from tests.pipeline.test_recurrent_layers_keep_their_state import N as PROMPT
from tests.pipeline.test_recurrent_layers_keep_their_state import masked
from tests.support.caches import kept_positions
from tests.support.hybrids import hybrid_adapter
from tests.support.models import exact_adapter, tiny_adapter, token_ids

TOKENS = 20


def kept_sets(layers: int, heads: int, seed: int = 0) -> torch.Tensor:
    """(layer, kv_head, entry) of a prompt, half of it."""
    return torch.rand(layers, heads, TOKENS, generator=torch.Generator().manual_seed(seed)) < 0.5


@pytest.mark.parametrize(
    ("family", "atol"),
    [*((family, 1e-9) for family in ("llama", "qwen3", "gemma3_text", "gpt_oss")), ("gemma2", 1e-5)],  # float32 softmax
)
def test_masks_of_the_kept_entries_give_what_the_naive_decoder_gives(family: str, atol: float) -> None:
    adapter = exact_adapter(family, 4, 2, layers=3)
    ids, more = token_ids(TOKENS), (7, 9)
    kept = kept_sets(3, 2)
    situation = make_situation("single", torch.tensor(ids), torch.tensor(more), 2)
    grown = torch.cat([kept, torch.ones(3, 2, 1, dtype=torch.bool)], dim=-1)
    masks = [[mask.unsqueeze(0) for mask in one] for one in (kept, grown)]
    with torch.inference_mode():
        cache = fill_cache(adapter, reference.read_prompts(adapter, situation))
        passes = list(reference.decode(adapter, cache, situation, masks))
    naive = Decoder(adapter.model)
    for token in ids:
        naive.step(token)
    for step, (token, seen) in enumerate(zip(more, passes, strict=True)):
        own = np.ones((3, 4, TOKENS + step), dtype=bool)
        own[..., :TOKENS] = kept.repeat_interleave(2, dim=1).numpy()
        found = naive.step(token, kept=list(own))
        for layer in range(3):
            np.testing.assert_allclose(seen.head_output[layer][0, -1], found.head_output[layer], atol=atol)
            after = found.hidden[adapter.layer_indices[layer]]
            np.testing.assert_allclose(seen.hidden[layer][0, -1], after, atol=atol)
        np.testing.assert_allclose(seen.logits[0, -1], found.logits, atol=atol)


@pytest.mark.skipif(recurrent_states.LAYER is None, reason="no states in caches")
@pytest.mark.parametrize("family", ["lfm2", "granitemoehybrid", "falcon_h1"])
def test_states_go_on_as_in_a_model_whose_attention_is_computed_by_hand(family: str) -> None:
    adapter, more = hybrid_adapter(family), torch.tensor([7, 9])
    positions = [kept_positions((9, 9), 1), kept_positions((25, 3), 2)]
    situation = make_situation("single", torch.tensor(token_ids(PROMPT)), more, 2)
    kept = torch.zeros(2, 2, PROMPT + 1, dtype=torch.bool)
    kept[..., PROMPT] = True
    for layer, heads in enumerate(positions):
        for head, places in enumerate(heads):
            kept[layer, head, places] = True
    masks = [[mask.unsqueeze(0) for mask in one] for one in (kept[..., :PROMPT], kept)]
    with torch.inference_mode():
        cache = fill_cache(adapter, reference.read_prompts(adapter, situation))
        passes = list(reference.decode(adapter, cache, situation, masks))
    by_hand = masked(adapter, [more[:1, None], more[1:, None]], positions)
    np.testing.assert_allclose(torch.cat([one.logits[0] for one in passes]), by_hand, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_floors_are_rounding_of_the_type_and_never_0(dtype: torch.dtype) -> None:
    adapter = tiny_adapter(layers=3, dtype=dtype)
    ids = torch.tensor(token_ids(60))
    situation = make_situation("single", ids, torch.tensor([7, 9]), 2)
    kept = torch.cat([kept_sets(3, 2), torch.ones(3, 2, 60 - TOKENS, dtype=torch.bool)], dim=-1)
    grown = torch.cat([kept, torch.ones(3, 2, 1, dtype=torch.bool)], dim=-1)
    masks = [[mask.unsqueeze(0) for mask in one] for one in (kept, grown)]
    with torch.inference_mode():
        prompts = reference.prompt_entries(adapter, situation)
        passes = list(reference.decode(adapter, fill_cache(adapter, prompts.readings[0]), situation, masks))
        found = reference.noise_floors(adapter, passes, prompts, situation, masks)
    least = torch.finfo(dtype).eps
    for floors in (found.head, found.hidden, found.logits, *prompts.floors):
        assert (floors >= least).all()
        assert (floors < 40 * least).all()
    assert (found.head[:, 0].diff() >= 0).all()


@pytest.mark.parametrize("arrange", [reference._reverse, reference._gather])
def test_entries_in_another_order_or_gathered_give_the_same_in_float64(arrange: reference.Arrange) -> None:
    adapter = exact_adapter("llama", 4, 2, layers=3)
    situation = make_situation("single", torch.tensor(token_ids(TOKENS)), torch.tensor([7]), 1)
    masks = [[mask.unsqueeze(0) for mask in kept_sets(3, 2)]]
    with torch.inference_mode():
        full = reference.read_prompts(adapter, situation)
        plain, arranged = (
            next(reference.decode(adapter, fill_cache(adapter, full), situation, masks, order)).logits
            for order in (None, arrange)
        )
    np.testing.assert_allclose(arranged, plain, atol=1e-12)


def test_the_greedy_continuation_reads_the_prompt_as_the_reference_does() -> None:
    adapter, ids = tiny_adapter(layers=3), torch.tensor(token_ids(TOKENS))
    with torch.inference_mode():
        tokens, (entries, _) = reference.decode_greedily(adapter, ids, 3)
        known, _ = reference.read_prompts(adapter, make_situation("single", ids, tokens, 3))
    assert tokens.shape == (3,)
    for layer, read in zip(entries, known, strict=True):
        assert all(torch.equal(own, other) for own, other in zip(layer, read, strict=True))


def test_arrangements_are_the_opposite_order_and_only_what_is_visible() -> None:
    keys, values = torch.randn(2, 1, 2, 5, 4)
    visible = torch.tensor([[True, False, True, False, True], [False, False, True, False, True]])
    mask = visible.repeat_interleave(2, dim=0)[None, :, None]
    for own, reversed_ in zip((keys, values, mask), reference._reverse(keys, values, mask), strict=True):
        assert torch.equal(own.flip(-1 if own is mask else 2), reversed_)
    gathered, gathered_values, shown = reference._gather(keys, values, mask)
    assert torch.equal(gathered[0, 0], keys[0, 0, [0, 2, 4]])
    assert torch.equal(gathered_values[0, 1, :2], values[0, 1, [2, 4]])
    assert shown is not None
    assert shown[0, :, 0].tolist() == [[True] * 3] * 2 + [[True, True, False]] * 2
    assert reference._gather(keys, values, torch.ones(1, 4, 1, 5, dtype=torch.bool))[2] is None


def test_a_prompt_is_read_in_parts_and_by_another_kernel_to_the_same_entries() -> None:
    adapter = tiny_adapter(layers=3)
    batch = make_situation("batch", torch.tensor(token_ids(40)), torch.tensor([1]), 1)
    assert reference._doubling_parts(40) == [1, 2, 4, 8, 16, 9]
    assert sum(reference._doubling_parts(2000)) == 2000
    assert max(reference._doubling_parts(2000)) == 256
    with torch.inference_mode():
        full, _ = reference.read_prompts(adapter, batch)
        other, _ = reference.read_prompts(adapter, batch, reference._doubling_parts(40), "eager")
    assert adapter.config._attn_implementation == "sdpa"
    for layer, changed in zip(full, other, strict=True):
        for kind in range(2):
            for row, padding in enumerate(batch.padding):
                np.testing.assert_allclose(changed[kind][row, :, padding:], layer[kind][row, :, padding:], atol=1e-4)


def test_the_shorter_row_of_a_batch_is_the_prompt_without_its_beginning() -> None:
    ids = torch.tensor(token_ids(24))
    batch = make_situation("batch", ids, torch.tensor([1, 2, 3]), 3)
    assert batch.padding == [0, 3]
    assert batch.prompt_positions()[1].tolist() == [0, 0, 0, *range(21)]
    assert [batch.positions(chunk).tolist() for chunk in range(3)] == [[[24], [21]], [[25], [22]], [[26], [23]]]
    counted = replace(batch, counts_padding=True)
    assert counted.positions(1).tolist() == [[25], [25]]
    block = make_situation("block", ids, torch.arange(10), 3)
    assert [len(chunk) for chunk in block.chunks] == [8, 1, 1]
    assert token_count(3, ["single", "block"]) == 10


def test_masks_are_read_whether_they_are_truths_or_summands() -> None:
    truths = torch.tensor([[[[True, False, True]]]])
    assert boolean_mask(None, 3, 1) is None
    for mask in (truths, torch.where(truths, 0.0, torch.finfo(torch.float32).min)):
        read = boolean_mask(mask, 3, 1)
        assert read is not None
        assert torch.equal(read, truths)

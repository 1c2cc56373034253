"""From a foreign cache and the full one of the same prompt: which positions each head of each layer keeps."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from perturbkv.cache import external_cache
from perturbkv.cache.external_cache import NOWHERE, RecoveredLayer, recover_positions
from perturbkv.errors import UnreadableCacheError
from tests.support.models import tiny_adapter, token_ids

HEADS, N, D = 2, 40, 8
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def whole(seed: int = 0, layers: int = 3, batch: int = 1, dtype: torch.dtype = torch.float32) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(batch, HEADS, N, D, generator=generator).to(dtype),
         torch.randn(batch, HEADS, N, D, generator=generator).to(dtype))
        for _ in range(layers)
    ]  # fmt: skip


def taken(full: Pairs, places: list[list[list[int]]]) -> Pairs:
    """places[layer][head]"""
    return [
        tuple(torch.stack([kind[0, head, own] for head, own in enumerate(heads)]).unsqueeze(0) for kind in layer)
        for layer, heads in zip(full, places, strict=True)
    ]  # type: ignore[return-value]


def exact(layer: RecoveredLayer) -> bool:
    """Return whether every entry is bitwise equal to an entry of the full cache, each at a position of its own."""
    differs = any(bool(distance.any()) for distance in (*layer.key_distance, *layer.value_distance))
    return not differs and not any(layer.duplicate_counts) and not any(layer.stranger_counts)


def listed(found: list[RecoveredLayer]) -> list[list[list[int]]]:
    return [[one.tolist() for one in layer.positions] for layer in found]


PLACES = [[[0, 3, 9], [1, 2, 39]], [[5, 4, 38], [7, 8, 9]], [[11, 12, 13], [0, 1, 2]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_entries_equal_to_the_bit_are_found_in_their_order(dtype: torch.dtype) -> None:
    full = whole(dtype=dtype)
    found = recover_positions(taken(full, PLACES), full)
    assert listed(found) == PLACES
    assert all(exact(layer) for layer in found)
    assert [layer.ascending for layer in found] == [[True, True], [False, True], [True, True]]
    kept = found[0].mask(N)
    assert kept.shape == (HEADS, N) and kept[1].nonzero().squeeze(-1).tolist() == [1, 2, 39]


def test_a_cache_of_transformers_is_read() -> None:
    adapter, ids = tiny_adapter(), torch.tensor([token_ids(N)])
    cut, full = DynamicCache(), DynamicCache()
    with torch.inference_mode():
        for cache in (cut, full):
            adapter.model(input_ids=ids, past_key_values=cache)
    for layer in cut.layers:
        layer.keys, layer.values = layer.keys[:, :, 10:25], layer.values[:, :, 10:25]
    assert listed(recover_positions(cut, full)) == [[list(range(10, 25))] * 2] * 2


@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_an_entry_keeps_its_place_by_what_is_left_of_it(which: int) -> None:
    """A key that is another one altogether leaves the value, and the other way round."""
    full = whole()
    cut = [tuple(kind.clone() for kind in layer) for layer in taken(full, PLACES)]
    other = torch.randn(3, D, generator=torch.Generator().manual_seed(9))
    cut[1][which][0, 0] = other
    found = recover_positions(cut, full)
    assert listed(found) == PLACES and not exact(found[1]) and exact(found[0])
    unit = full[1][which][0, 0].square().sum(dim=-1).mean().sqrt()
    wanted = (other - full[1][which][0, 0, PLACES[1][0]]).norm(dim=-1) / unit
    far, near = (found[1].key_distance, found[1].value_distance)[:: 1 if which == 0 else -1]
    torch.testing.assert_close(far[0], wanted)
    assert not near[0].any() and not far[1].any()


def test_what_is_equal_counts_more_than_what_is_near() -> None:
    """A value that is another entry's to the bit tells the place, though a third one is rather like key and value."""
    full = whole(layers=1)
    (keys, values) = full[0]
    generator = torch.Generator().manual_seed(4)
    values[0, 0, 8] = values[0, 0, 3] + 0.5 * torch.randn(D, generator=generator)
    cut = taken(full, [[[3], [0]]])
    cut[0][0][0, 0, 0] = keys[0, 0, 8] + 0.3 * torch.randn(D, generator=generator)
    (found,) = recover_positions(cut, full)
    assert found.positions[0].tolist() == [3] and not found.value_distance[0].any()


def test_what_was_rounded_is_found_with_its_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    full = whole()
    rounded = [tuple((kind * 16).round() / 16 for kind in layer) for layer in taken(full, PLACES)]
    for size in (external_cache._CHUNK_BYTES, 16 * N):  # all at once, and entry by entry
        monkeypatch.setattr(external_cache, "_CHUNK_BYTES", size)
        found = recover_positions(rounded, full)  # type: ignore[arg-type]
        assert listed(found) == PLACES
        assert all(0 < float(one.max()) < 0.05 for layer in found for one in layer.key_distance)


def test_other_precision_is_found_and_is_not_exact() -> None:
    full = whole()
    half = [tuple(kind.to(torch.bfloat16) for kind in layer) for layer in taken(full, PLACES)]
    found = recover_positions(half, full)  # type: ignore[arg-type]
    assert listed(found) == PLACES and not any(exact(layer) for layer in found)


def test_equal_entries_take_a_place_each() -> None:
    """Three entries of the prompt that are alike: two of them kept, bit-equal or rounded alike, are no duplicate."""
    full = whole(layers=1)
    for kind in full[0]:
        kind[0, 0, [7, 20]] = kind[0, 0, 3].clone()
    cut = taken(full, [[[3, 20, 30], [1, 2, 3]]])
    (found,) = recover_positions(cut, full)
    assert found.duplicate_counts == [0, 0] and set(found.positions[0].tolist()[:2]) <= {3, 7, 20}
    (found,) = recover_positions([tuple(kind * 1.001 for kind in cut[0])], full)  # type: ignore[list-item]
    assert found.duplicate_counts == [0, 0] and set(found.positions[0].tolist()[:2]) <= {3, 7, 20}


def test_an_entry_that_is_there_twice_is_said() -> None:
    full = whole()
    (found, *_) = recover_positions(taken(full, [[[3, 3, 9], [1, 2, 2]], *PLACES[1:]]), full)
    assert found.duplicate_counts == [1, 1] and not exact(found)
    assert found.positions[0].tolist() == [3, 3, 9]
    (found, *_) = recover_positions(
        [tuple(kind * 1.001 for kind in layer) for layer in taken(full, [[[3, 3], [1, 2]]] * 3)], full
    )  # type: ignore[misc]
    assert found.duplicate_counts == [1, 0]


def test_an_entry_that_is_like_none_has_no_position() -> None:
    full = whole()
    cut = taken(full, PLACES)
    cut[2][0][0, 1, 1], cut[2][1][0, 1, 1] = 9.0, -9.0
    found = recover_positions(cut, full)[2]
    assert found.positions[1].tolist() == [0, NOWHERE, 2] and found.stranger_counts == [0, 1] and not exact(found)
    assert found.mask(N)[1].sum() == 2


def test_a_row_of_a_padded_batch_counts_from_behind_its_padding() -> None:
    full = whole(batch=2)
    cut = [tuple(kind[:, :, [0, 4, 5, 39]] for kind in layer) for layer in full]
    assert listed(recover_positions(cut, full, row=1, padding=5)) == [[[NOWHERE, NOWHERE, 0, 34]] * 2] * 3  # type: ignore[arg-type]
    alone = [tuple(kind[1:] for kind in layer) for layer in full]
    assert listed(recover_positions(cut, alone, row=1)) == [[[0, 4, 5, 39]] * 2] * 3  # type: ignore[arg-type]


def test_nothing_kept_is_read_as_nothing() -> None:
    full = whole()
    found = recover_positions(taken(full, [[[], []]] * 3), full)
    assert listed(found) == [[[], []]] * 3 and not found[0].mask(N).any() and exact(found[0])


class OneLength(DynamicCache):
    """Says the first layer's length of every layer."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(super().get_seq_length(0))


def cache_of(pairs: Pairs, kind: type[DynamicCache] = DynamicCache) -> DynamicCache:
    cache = kind()
    for place, (keys, values) in enumerate(pairs):
        cache.update(keys, values, place)
    return cache


def test_lengths_that_the_cache_denies_are_unreadable() -> None:
    full = whole()
    uneven = [tuple(kind[:, :, : 12 - place] for kind in layer) for place, layer in enumerate(full)]
    assert [len(layer.positions[0]) for layer in recover_positions(cache_of(uneven), full)] == [12, 11, 10]  # type: ignore[arg-type]
    with pytest.raises(UnreadableCacheError, match="says 12 entries in every layer, and layer 1 holds 11"):
        recover_positions(cache_of(uneven, OneLength), full)  # type: ignore[arg-type]


class Seen(DynamicCache):
    """Says how many tokens it saw, evicted ones included, as a cache must for positions to go on."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return N


def test_a_cache_that_says_what_it_saw_is_read() -> None:
    full = whole()
    uneven = [tuple(kind[:, :, : 12 - place] for kind in layer) for place, layer in enumerate(full)]
    assert len(recover_positions(cache_of(uneven, Seen), full)) == 3  # type: ignore[arg-type]


def test_what_cannot_be_read_is_said_in_one_line() -> None:
    full = whole()
    emptied = cache_of(full)
    emptied.layers[1].keys = None
    wordy = cache_of(full)
    wordy.layers[2].keys, wordy.layers[2].get_seq_length = torch.zeros(0), lambda: N
    longer = [tuple(torch.cat([kind, kind[:, :, :1]], dim=2) for kind in layer) for layer in full]
    repeated = [tuple(kind.repeat_interleave(2, dim=1) for kind in layer) for layer in full]
    narrow = [(keys[..., :4], values[..., :4]) for keys, values in full]
    odd = [(keys[:, :, :5], values[:, :, :6]) for keys, values in full]
    cases = [
        (DynamicCache(), 0, "no keys to look at: DynamicCache has no layers"),
        (emptied, 0, r"no keys to look at: layer 1 \(DynamicLayer\) has no tensors `keys`"),
        (wordy, 0, "layer 2 .* says 40 entries and its `keys` are empty"),
        (longer, 0, "layer 0 keeps 41 entries, more than the 40 that there were"),
        (full[:2], 0, "it has 2 layers, the full cache 3"),
        (repeated, 0, "holds 4 key/value heads, the model has 2; each 2 times, as `repeat_kv`"),
        ([(keys[:, :1], values[:, :1]) for keys, values in full], 0, "holds 1 key/value heads, the model has 2$"),
        (narrow, 0, "have 4 components, the model's 8"),
        (odd, 0, r"one shape in layer 0, got keys \(1, 2, 5, 8\) and values \(1, 2, 6, 8\)"),
        (full, 1, "row 1 of a batch was asked for, and layer 0 holds 1"),
    ]
    for cache, row, reason in cases:
        with pytest.raises(UnreadableCacheError, match=reason) as caught:
            recover_positions(cache, full, row)  # type: ignore[arg-type]
        assert str(caught.value).startswith("unreadable cache: ") and "\n" not in str(caught.value)


def test_an_equal_value_outweighs_a_nearer_key() -> None:
    """A key that was rotated lies nearer to another entry's, whose value is nearly the same."""
    keys, values = torch.randn(2, 1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    values[0, 0, 1] = 1.02 * values[0, 0, 2]
    moved = 0.5 * keys[:, :, 2:3] + 0.5 * keys[:, :, 1:2] - 0.3 * (keys[:, :, 2:3] - keys[:, :, 1:2])
    (found,) = external_cache.recover_positions([(moved, values[:, :, 2:3])], [(keys, values)])
    assert found.positions[0].tolist() == [2]


@pytest.mark.parametrize("same_sets", [True, False])
def test_where_keys_were_altered_an_equal_value_tells_the_entry_and_the_layer_after_it_among_equal_ones(
    same_sets: bool,
) -> None:
    """Keys look like other tokens', as after a rotation; in the first layer half of the values are equal ones."""
    full = whole(layers=2)
    full[0][1][0, :, ::2] = full[0][1][0, :, :1]
    first, second = [0, 4, 7, 8, 13], [0, 4, 7, 8, 13] if same_sets else [20, 1, 3, 5, 9]
    cache = taken(full, [[first, first], [second, second]])
    for layer, (keys, values) in enumerate(cache):
        near = full[layer][0][:, :, [30, 31, 32, 33, 34]]  # keys of other tokens, nearly
        cache[layer] = (near + 0.3 * keys, values)
    found = listed(recover_positions(cache, full))
    assert found[1] == [second, second]
    if same_sets:
        assert found[0] == [first, first]
    else:  # equal values are taken once each
        assert all(len(set(one)) == 5 and [one[2], one[4]] == [7, 13] for one in found[0])


def test_rounded_keys_tell_which_of_equal_values_is_held_whatever_the_layer_after_it_holds() -> None:
    full = whole(layers=2)
    full[0][1][:] = full[0][1][:, :, :1]  # a text of one token
    first, second = [0, 4, 7, 8, 13], [20, 1, 3, 5, 9]
    cache = taken(full, [[first, first], [second, second]])
    cache[0] = ((cache[0][0] * 50).round() / 50, cache[0][1])
    assert listed(recover_positions(cache, full)) == [[first, first], [second, second]]

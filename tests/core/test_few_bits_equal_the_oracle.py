"""Quantised numbers, group by group, and the bytes that they take, against loops written from METHOD."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from perturbkv.cache.codecs import as_integers, group_lengths
from perturbkv.cache.entries import KeptEntries, borrow
from perturbkv.cache.quantisation import quantise_entries
from perturbkv.configs.choice import Choice, parse
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import check_precisions, entries_in_bytes, stored_bits
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.selection.grid import configuration, grid
from tests.oracle import quantisation as naive

WINDOW = 4


def config(precision: str, budget: float = 30, window: int = WINDOW, **more: Any) -> EvictionConfig:
    return configuration(budget, precision=precision, window=window, granularity="kv", **more)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape) * [[3], [0.02], [40]][seed])


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_group_has_a_scale_and_a_minimum_of_its_own(bits: int, seed: int) -> None:
    data, groups = numbers(11, 3, seed=seed), [4, 4, 3]
    found = as_integers(data, groups, bits)
    for column in range(3):
        for begin, length in zip((0, 4, 8), groups, strict=True):
            group = data[begin : begin + length, column].tolist()
            assert found[begin : begin + length, column].tolist() == naive.group_of(group, bits)
    assert found.dtype == data.dtype


@pytest.mark.parametrize("offset", [1000.3, -1000.3, 30_000.0])
def test_no_code_lies_outside_its_bits(offset: float) -> None:
    """In 16 bits the minimum lies above the least number, or far below it: codes end at 0 and at the last."""
    data = offset + torch.linspace(0, 0.7, 9, dtype=torch.float64).unsqueeze(-1)
    found = as_integers(data, [9], 2).squeeze(-1)
    assert found.tolist() == naive.group_of(data.squeeze(-1).tolist(), 2)
    assert len(found.unique()) <= 4 and found.min() >= float(np.float16(offset))


def test_a_group_of_one_value_is_that_value() -> None:
    """No scale tells its numbers apart; what is left is the minimum in 16 bits, and no NaN."""
    data = torch.tensor([[0.5, -3.25, 0.0, 1e-9]]).expand(7, 4)
    assert torch.equal(as_integers(data, [4, 3], 2), torch.tensor([[0.5, -3.25, 0.0, 0.0]]).expand(7, 4))
    close = torch.tensor([[1.0], [1.0 + 2**-23]])
    assert as_integers(close, [2], 8).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("length", "window", "group", "d_head"), [(9, 4, 4, 8), (30, 0, 7, 5), (5, 5, 2, 8), (12, 3, 99, 6)]
)
def test_keys_go_by_channel_and_values_by_entry(length: int, window: int, group: int, d_head: int) -> None:
    """In kept sets of different lengths, each for itself, and the window of each as it was."""
    lengths, chosen = [length, length + 3], config(f"quantise(bits=2, group={group})", 40, max(window, 1))
    window = chosen.window
    keys, values = (torch.from_numpy(np.random.default_rng(s).normal(size=(2 * length + 3, d_head))) for s in (1, 2))
    entries = KeptEntries.of(torch.split(keys, lengths), torch.split(values, lengths))
    for place, (found_keys, found_values) in enumerate(quantise_entries(entries, chosen, 0).sets()):
        own_keys, own_values = (torch.split(kind, lengths)[place].numpy() for kind in (keys, values))
        few = lengths[place] - window
        expected = np.array([*naive.keys(list(own_keys[:few]), 2, group), *own_keys[few:]])
        np.testing.assert_array_equal(found_keys.numpy(), expected)
        expected = np.array([*naive.values(list(own_values[:few]), 2, group), *own_values[few:]])
        np.testing.assert_array_equal(found_values.numpy(), expected)


def test_what_is_borrowed_stays_as_it_is() -> None:
    keys, values = torch.randn(2, 10, 4), torch.randn(2, 10, 4)
    before = keys.clone(), values.clone()
    found = quantise_entries(borrow(keys, values), config("quantise(bits=2)"), 0)
    assert found.rectangle is None
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])
    assert not torch.equal(found.keys.view(2, 10, 4)[:, :6], keys[:, :6])
    assert torch.equal(found.keys.view(2, 10, 4)[:, 6:], keys[:, 6:])


def test_more_bits_lose_less() -> None:
    data = torch.randn(64, 16)
    lost = [float((as_integers(data, group_lengths(64, 32), bits) - data).abs().mean()) for bits in (8, 4, 2)]
    assert lost[0] < lost[1] / 10 < lost[2] / 30


def test_bytes_by_hand() -> None:
    """100 entries of 64 numbers, 32 of them the window, in 4 bits: keys have ⌈68 / 32⌉ groups of each channel."""
    codes, window = 2 * 68 * 64 * 4, 32 * 64 * 2 * 16
    scales = 3 * 64 * 32 + 68 * 2 * 32
    assert stored_bits(config("quantise").precision, [100], 32, 64, 64) == codes + window + scales == 110_848
    assert stored_bits(config("full").precision, [100], 32, 64, 64) == 100 * 64 * 2 * 16
    assert stored_bits(config("quantise").precision, [20], 32, 64, 64) == 20 * 64 * 2 * 16, "the window is whole"


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("group", "d_head"), [(32, 64), (32, 80), (16, 8), (5, 12)])
def test_a_budget_of_bytes_is_filled(bits: int, group: int, d_head: int) -> None:
    precision = config(f"quantise(bits={bits}, group={group}, fill={d_head})").precision
    asked = SimpleNamespace(bits=bits, group=group, window=32, by_layer="")
    held = [naive.bits_held(asked, kept, 400, d_head) for kept in range(401)]
    for budget in (33, 64, 150, 399):
        room, found = budget * 2 * 16 * d_head, entries_in_bytes(precision, budget, 32, 400)
        assert held[found] <= room and (found == 400 or held[found + 1] > room)


def test_without_a_head_size_a_budget_counts_entries() -> None:
    assert config("quantise(bits=2)", 50).kept_entries(400) == 50
    assert config("quantise(bits=2, fill=64)", 50).kept_entries(400) > 50
    assert config("quantise(bits=2, fill=64)", 0.4).kept_entries(400) == 400


@pytest.mark.parametrize(
    ("choices", "error", "said"),
    [
        ({"precision": "quantise(bits=3)"}, UnknownNameError, "unknown bits '3'; nearest of 19 known: "),
        ({"precision": "quantise(group=0)"}, ConfigError, "group of precision 'quantise' must be at least 1, got 0"),
        ({"precision": "quantise(bits=4.0)"}, UnknownNameError, "unknown bits '4.0'"),
        ({"precision": "full(group=32)"}, ConfigError, "precision 'full' has no option 'group'; its options: none"),
        ({"group": 32}, ConfigError, "group has no effect here: it needs precision quantise; leave it out"),
        ({"bits": 4}, ConfigError, "bits has no effect here: it needs precision quantise; leave it out"),
        ({"precision": "int4"}, UnknownNameError, "unknown precision 'int4'; known: full, quantise"),
        ({"policy": "given:x", "precision": "quantise"}, ConfigError, "expected precision full, got quantise"),
    ],
)
def test_what_cannot_be_asked_for(choices: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        grid(64, **choices)
    assert said in str(raised.value)


def test_bytes_are_those_of_the_models_heads() -> None:
    fits = config("quantise(fill=64)").precision
    check_precisions([fits, Choice("full")], [0], 64, 64, "m")
    with pytest.raises(ConfigError, match="must be the size of a head, 128 in model 'm', or 0, .* got 64"):
        check_precisions([fits], [0], 128, 128, "m")


def test_a_sweep_names_bits_once() -> None:
    found = grid(64, precision=("full", "quantise"), bits=(8, 2))
    assert [one.bits for one in found] == [16, 8, 2]
    assert [one.label().partition("query")[2] for one in found] == ["", " quantise(bits=8)", " quantise(bits=2)"]


def test_full_precision_is_not_said_and_may_be_absent() -> None:
    """So that what knows no precision reads what has none, and older files are read."""
    chosen, few = configuration(64), configuration(64, precision="quantise(group=16)")
    assert "precision" not in chosen.to_document() and "full" not in chosen.label()
    assert EvictionConfig.from_document(chosen.to_document()) == chosen
    assert few.to_document()["precision"] == "quantise(bits=4, group=16)"
    assert EvictionConfig.from_document(few.to_document()) == few != chosen
    assert few.label_parts()["bits"] == "bits=4" and few.flat()["precision_group"] == 16
    assert parse(str(few.precision)) == Choice("quantise", {"bits": 4, "group": 16})


def test_a_wrong_precision_in_a_document_is_refused() -> None:
    document = configuration(64, precision="quantise").to_document()
    document["precision_options"] = {**document["precision_options"], "bits": 3}
    with pytest.raises(UnknownNameError, match="unknown keys '3'"):
        EvictionConfig.from_document(document)

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbkv.errors import TraceError
from perturbkv.schema import PREFILLS
from perturbkv.storage.run.sample_parts import code_bytes, join_parts, merged_shapes, single_complete_part
from perturbkv.trace import SampleTrace
from tests.support.traces import cut, ragged, sample_trace

FLOORS = ("noise_floor", "noise_floor_isolated", "hidden_noise_floor", "final_noise_floor", "logit_kl_noise_floor")
CODE = np.arange(9, dtype=np.uint8)
"""Bytes that no code need be: parts are joined as they are."""


def assert_equal(found: SampleTrace, expected: SampleTrace) -> None:
    assert set(found.arrays) == set(expected.arrays)
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
        assert found.arrays[name].dtype == array.dtype, name


def names(configs: list[int]) -> list[str]:
    return [f"c{config}" for config in configs]


def with_arrays(sample: SampleTrace, **arrays: object) -> SampleTrace:
    changed = {name: np.asarray(array) for name, array in arrays.items()}
    return replace(sample, arrays={**sample.arrays, **changed})


def quieter(parts: list[SampleTrace], seed: int) -> list[SampleTrace]:
    """Every element of every noise floor lowered in all parts but one."""
    draw = np.random.default_rng(seed)
    lowered: list[dict[str, object]] = [{} for _ in parts]
    for name in FLOORS:
        loudest = draw.integers(0, len(parts), parts[0].arrays[name].shape)
        for place, part in enumerate(parts):
            lowered[place][name] = np.where(loudest == place, part.arrays[name], part.arrays[name] / 2)
    return [with_arrays(part, **floors) for part, floors in zip(parts, lowered, strict=True)]


@st.composite
def splits(draw: st.DrawFn) -> list[list[int]]:
    """Configurations in any order, split into parts that hold at least one each."""
    order = draw(st.permutations(range(draw(st.integers(1, 6)))))
    ends = sorted(draw(st.sets(st.integers(1, max(1, len(order) - 1))))) if len(order) > 1 else []
    return [list(order[start:end]) for start, end in zip([0, *ends], [*ends, len(order)], strict=True)]


@settings(max_examples=60, deadline=None)
@given(splits(), st.randoms(use_true_random=False), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 99))
def test_any_split_in_any_order_joins_to_what_was_split(split, random, sharing: int, optional: bool, seed: int) -> None:  # type: ignore[no-untyped-def]
    configs = sorted(config for part in split for config in part)
    full = sample_trace(configs=len(configs), steps=2, layers=2, heads=4, seed=seed, optional=optional)
    whole = ragged(full, seed, sharing)
    wanted = random.sample(configs, len(configs))
    parts = quieter([cut(whole, part) for part in split], seed)
    labelled = [(part, names(part_configs)) for part, part_configs in zip(parts, split, strict=True)]
    found = join_parts(labelled, names(wanted))
    assert_equal(found, cut(whole, wanted))
    shapes = merged_shapes([{name: array.shape for name, array in part.arrays.items()} for part in parts])
    assert shapes == {name: array.shape for name, array in found.arrays.items()}


def test_equal_offsets_stay_equal_whatever_heads_share_them() -> None:
    places = np.array([[[0, 3], [0, 3]], [[3, 5], [5, 0]]])  # shared by heads, layers and configurations
    lengths = np.array([[[3, 2], [3, 2]], [[2, 1], [1, 3]]])
    full = with_arrays(sample_trace(), kept_offset=places, kept_length=lengths, kept_count=lengths, kept_code=CODE[:6])
    other = ragged(cut(sample_trace(), [0]), seed=3)
    found = join_parts([(full, ["a", "b"]), (other, ["c"])], ["b", "c", "a"])
    offsets = found.arrays["kept_offset"]
    assert offsets[0].tolist() == [[0, 2], [2, 3]]
    assert offsets[2, :, 1].tolist() == [0, 0]  # b's first place
    assert offsets[2, :, 0].tolist() == [3, 3]  # b's last place
    for config, place in ((0, 1), (2, 0)):
        for where in np.ndindex(2, 2):
            start, length = offsets[config][where], lengths[place][where]
            code = found.arrays["kept_code"][start : start + length]
            assert code.tolist() == list(range(places[place][where], places[place][where] + length))


def test_a_sample_in_one_part_is_not_copied_unless_it_has_to_be() -> None:
    whole = ragged(sample_trace(configs=3, steps=1, layers=2, heads=4), 1, 2)
    assert single_complete_part([(whole, ["a", "b", "c"])], ["a", "b", "c"]) is whole
    assert single_complete_part([(whole, ["a", "b", "c"])], ["b", "a", "c"]) is None
    assert single_complete_part([(cut(whole, [0]), ["a"]), (cut(whole, [1, 2]), ["b", "c"])], ["a", "b", "c"]) is None
    code = np.append(whole.arrays["kept_code"], CODE[:2])
    assert single_complete_part([(with_arrays(whole, kept_code=code), ["a", "b", "c"])], ["a", "b", "c"]) is None


def test_bytes_that_are_no_heads_code_are_left_behind_and_not_counted() -> None:
    sample = sample_trace(configs=1, layers=1, heads=2)
    offsets, counts = np.array([[[4, 1]]]), np.array([[[2, 3]]])
    spread = with_arrays(sample, kept_offset=offsets, kept_length=counts, kept_count=counts, kept_code=CODE)
    found = join_parts([(spread, ["a"])], ["a"])
    assert found.arrays["kept_code"].tolist() == [4, 5, 1, 2, 3]
    assert found.arrays["kept_offset"].tolist() == [[[0, 2]]]
    assert code_bytes(spread.arrays) == 5


def test_places_that_overlap_keep_what_each_of_them_holds() -> None:
    sample = sample_trace(configs=1, layers=1, heads=3)
    offsets, counts = np.array([[[0, 0, 1]]]), np.array([[[2, 3, 2]]])
    spread = with_arrays(sample, kept_offset=offsets, kept_length=counts, kept_count=counts, kept_code=CODE[:3])
    found = join_parts([(spread, ["a"])], ["a"])
    assert found.arrays["kept_code"].tolist() == [0, 1, 0, 1, 2, 1, 2]
    assert found.arrays["kept_offset"].tolist() == [[[0, 2, 5]]]
    assert code_bytes(spread.arrays) == 7


def test_the_larger_noise_floor_the_sum_of_bytes_and_the_first_full_run_are_kept() -> None:
    first = sample_trace(optional=True, seed=1)
    one = np.asarray(first.arrays["noise_floor"])
    second = with_arrays(
        first, noise_floor=one + [[[1, -1], [-1, 1]]], cache_bytes=7, output_norm=first.arrays["output_norm"] + 1
    )
    found = join_parts([(with_arrays(first, cache_bytes=5), ["a", "b"]), (second, ["c", "d"])], ["a", "b", "c", "d"])
    np.testing.assert_array_equal(found.arrays["noise_floor"], one + [[[1, 0], [0, 1]]])
    np.testing.assert_array_equal(found.arrays["output_norm"], first.arrays["output_norm"])
    assert found.arrays["cache_bytes"] == 12
    assert found.arrays["cache_bytes"].dtype == np.int64


def test_a_variable_that_a_part_lacks_is_left_out() -> None:
    first, second = sample_trace(optional=True), sample_trace()
    second = with_arrays(second, **{name: first.arrays[name] for name in ("token_id", "prompt_tokens", "cut_tokens")})
    labels = ["a", "b", "c", "d"]
    for parts in ((first, second), (second, first)):
        found = join_parts([(part, labels[2 * place :][:2]) for place, part in enumerate(parts)], labels)
        filled = {*PREFILLS, "perturbation_eviction", "perturbation_change", "own_entries"}
        assert set(found.arrays) == {*second.arrays, *filled}, "what prefills took and what eviction alone costs stay"


def test_a_part_that_only_evicts_costs_what_eviction_costs() -> None:
    """Whole and eviction alone are one, and nothing is changed beside it, whichever part comes first."""
    plain, moved = sample_trace(), sample_trace(seed=1)
    same = {name: plain.arrays[name] for name in ("token_id", "prompt_tokens", "cut_tokens")}
    apart = {"perturbation_eviction": 2.0, "perturbation_change": 3.0}
    whole = moved.arrays["perturbation_isolated"]
    moved = with_arrays(moved, **same, **{name: np.full_like(whole, number) for name, number in apart.items()})
    for parts in ([(plain, ["a", "b"]), (moved, ["c", "d"])], [(moved, ["c", "d"]), (plain, ["a", "b"])]):
        found = join_parts(parts, ["a", "b", "c", "d"]).arrays
        np.testing.assert_array_equal(found["perturbation_eviction"][:2], plain.arrays["perturbation_isolated"])
        assert (found["perturbation_change"][:2] == 0).all()
        assert (found["perturbation_eviction"][2:] == 2).all()
        assert (found["perturbation_change"][2:] == 3).all()


def test_what_prefills_took_is_filled_with_nothing() -> None:
    first, second = sample_trace(optional=True), sample_trace()
    same = {name: first.arrays[name] for name in ("token_id", "prompt_tokens", "cut_tokens")}
    first = with_arrays(first, prefill_seconds=np.array([1.5, np.nan]), prefill_seconds_full=np.array(0.5))
    found = join_parts([(with_arrays(second, **same), ["a", "b"]), (first, ["c", "d"])], ["c", "a", "b", "d"]).arrays
    np.testing.assert_array_equal(found["prefill_seconds"], [1.5, np.nan, np.nan, np.nan])
    assert found["prefill_seconds_full"] == 0.5
    without = join_parts([(second, ["a", "b"]), (second, ["c", "d"])], ["a", "b", "c", "d"])
    assert set(PREFILLS).isdisjoint(without.arrays)


@pytest.mark.parametrize("name", ["token_id", "prompt_tokens", "question_tokens", "cut_tokens"])
def test_parts_of_different_full_runs_are_refused(name: str) -> None:
    first = sample_trace(optional=True)
    second = with_arrays(first, **{name: first.arrays[name] + 1})
    with pytest.raises(
        TraceError, match=f"full-cache run of 's0' .* got another {name}, .* another --output to measure all"
    ):
        join_parts([(first, ["a", "b"]), (second, ["c", "d"])], ["a", "b", "c", "d"])


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ([["a", "b"], ["b", "c"]], ["a", "b", "c"]),
        ([["a", "b"], ["c", "d"]], ["a", "b", "c"]),
        ([["a", "b"]], ["a", "b", "c"]),
        ([["a", "b", "c"]], ["a", "b", "c"]),
        ([["a"]], ["a"]),
    ],
)
def test_parts_that_do_not_hold_each_configuration_once_are_refused(held: list[list[str]], wanted: list[str]) -> None:
    with pytest.raises(TraceError, match="every one of . configurations once"):
        join_parts([(sample_trace(), labels) for labels in held], wanted)

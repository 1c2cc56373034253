"""A page holds what there is room for, the most telling first, and says what it left out."""

from __future__ import annotations

import dataclasses
import json
import time
from functools import cache
from typing import Any

import numpy as np
import pytest

from perturbkv.reporting import page_blocks, sides
from perturbkv.reporting.page_blocks import LIBRARY_BYTES, Blocks, Payload, blocks_limit
from perturbkv.reporting.payload import payload
from tests.support.decoded import array, bundle, inflated, numbers, trace_of
from tests.support.paged import configs, paged

SMALL, LARGE = 4_600_000, 23_000_000
"""Bytes of a page of 8 samples, 24 configurations and 270 heads, and of 32 samples and 1,024 heads."""


@cache
def made() -> Payload:
    return payload([paged()])


def in_base64(page: Payload) -> int:
    return sum(-(-len(block) // 3) * 4 for block in page.blocks.values())


@pytest.mark.slow
def test_a_usual_trace_fills_its_page_and_no_more() -> None:
    told = trace_of(made())
    assert SMALL * 0.95 < in_base64(made()) + LIBRARY_BYTES <= SMALL
    assert len(json.dumps(made().document)) < 60_000
    held = told["held_heads"]
    assert held["of"] == 8 * 270 and 8 * 20 < held["held"] < held["of"] and "--full" in held["why"]
    each = [len(prompt["held"]) for prompt in told["prompts"].values()]
    assert sum(each) == held["held"] and min(each) > 0.5 * max(each)
    assert told["arrays"]["sample"]["measures"] == list(range(13)) and "samples" not in told["lacks"]
    assert all(prompt["text"] and prompt["share"] for prompt in told["prompts"].values())


@pytest.mark.slow
def test_answers_take_of_the_room_for_heads() -> None:
    trace = paged()
    long = np.array([[f"{sample} {config} " * 400 for config in range(24)] for sample in range(8)], dtype=object)
    texts = {"answer_full": long[:, 0], "answer": long}
    page = payload([dataclasses.replace(trace, arrays={**trace.arrays, **texts})])
    taken = len(json.dumps(trace_of(page)["answers"], ensure_ascii=False))
    assert taken > 300_000
    assert SMALL * 0.95 < in_base64(page) + LIBRARY_BYTES + taken <= SMALL
    assert trace_of(page)["held_heads"]["held"] < trace_of(made())["held_heads"]["held"]


def test_a_bound_that_four_bytes_cannot_hold_is_infinite(recwarn: pytest.WarningsRecorder) -> None:
    blocks = Blocks("t")
    blocks.put_floats("mean", np.array([1e300, 1.0]))
    assert inflated(Payload("", (), {}, blocks.blocks), "t-mean") == bytes([0, 0, 0, 0, 128, 128, 127, 63])
    assert not recwarn.list


@pytest.mark.slow
def test_the_heads_that_change_most_are_those_that_are_held() -> None:
    trace, told = paged(), trace_of(made())
    pairs = [pair for pair in told["pairs"] if {told["configs"][one]["side"] for one in pair} == {0, 1}]
    assert len(pairs) == 3
    moved = trace.arrays["perturbation_isolated"][5, :, 0] / trace.arrays["output_norm"][5, 0]
    change = np.max([abs(moved[second] - moved[first]) for first, second in pairs], axis=0).reshape(-1)
    first, *held = told["prompts"]["5"]["held"]
    expected = [place for place in np.argsort(-change, kind="stable").tolist() if place != first]
    assert held == expected[: len(held)]
    layer, head = divmod(held[-1], 9)
    assert bundle(made(), 5, layer, head)["kept"][17] == trace.kept(5, 17, layer, head).tolist()


def test_full_pages_hold_every_head() -> None:
    page = payload([paged(3, configs(4, (0.1, 0.2)), 4, 8, 300)], full=True)
    told = trace_of(page)
    assert told["held_heads"] == {"of": 96, "held": 96, "why": ""}
    assert told["arrays"]["sample"]["dtype"] == "f4"
    assert sorted(told["prompts"]["2"]["held"]) == list(range(32))


@pytest.mark.slow
def test_a_large_trace_leaves_out_single_samples_of_bounds_before_those_of_perturbations() -> None:
    """As large as 32 samples × 24 configurations × 1,024 heads, in which nothing is like anything else."""
    begin = time.perf_counter()
    page = payload([paged(32, None, 32, 32, 4000, kept=False)])
    assert time.perf_counter() - begin < 60
    told = trace_of(page)
    assert in_base64(page) + LIBRARY_BYTES <= LARGE
    keys = [told["measures"][place]["key"] for place in told["arrays"]["sample"]["measures"]]
    assert {"isolated", "propagated", "retained_mass", "sigma_stage1"} <= set(keys)
    assert told["arrays"]["sample"]["shape"] == [len(keys), 32, 24, 32, 32]
    assert "--full" in told["lacks"]["samples"]


@pytest.mark.slow
def test_many_sides_leave_out_pairs_of_the_last_ones() -> None:
    of = tuple(configs(8, tuple(n / 100 for n in range(10, 30))))
    told = trace_of(page := payload([paged(2, of, 1, 2, 400)]))
    assert len(told["pairs"]) == 400 and told["pairs_left_out"] == 20 * 28 - 400
    assert {tuple(told["configs"][one]["side"] for one in pair) for pair in told["pairs"]} >= {(0, 1), (0, 2), (1, 2)}
    assert array(page, "pair_sum").shape == (13, 400, 2, 3)


def test_the_pair_that_is_shown_first_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = paged(2, configs(8, (0.1,))[::-1], 1, 2, 400).run  # the usual sides come last
    monkeypatch.setattr(sides, "MOST_PAIRS", 3)
    found = sides.run_sides(run)
    start = sides.first_choice(run, found)
    first, second = (found.config(side, start.budget) for side in (start.baseline, start.treatment))
    assert {run.configs[one].selection.name for one in (first, second)} == {"attention", "two-stage"}
    assert (min(first, second), max(first, second)) in found.pairs


@pytest.mark.parametrize("values", [0, 51_840, 400_000, 786_432])
def test_room_grows_with_the_values_of_a_trace(values: int) -> None:
    expected = np.interp(values, [51_840, 786_432], [SMALL, LARGE]) - LIBRARY_BYTES
    assert blocks_limit(values) == pytest.approx(expected, abs=1)


LOGARITHMIC = np.array([0.0, 1e-30, 3e-12, 0.7, 1.0, 1234.5, 1e20, np.inf, np.nan])


@pytest.mark.parametrize("values", [LOGARITHMIC, np.zeros(3), np.array([np.nan, np.inf]), np.array([5.0])])
def test_logarithms_keep_to_a_thousandth_and_zero_stays_zero(values: Any) -> None:
    scale = page_blocks.log_scale(values)
    np.testing.assert_allclose(numbers(page_blocks.encode(values, scale), vars(scale)), values, rtol=1e-3)


@pytest.mark.parametrize("values", [np.linspace(0, 1, 999), np.array([0.5, np.nan, np.inf]), np.array([0.1, 11.9])])
def test_shares_keep_to_a_ten_thousandth(values: Any) -> None:
    scale = page_blocks.linear_scale(values)
    np.testing.assert_allclose(numbers(page_blocks.encode(values, scale), vars(scale)), values, rtol=0, atol=1e-4)


def test_what_rounding_makes_negative_is_nothing() -> None:
    values = np.array([-1e-17, 2.0])
    assert page_blocks.encode(values, page_blocks.log_scale(values)).tolist()[0] == 0

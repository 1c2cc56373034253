"""What a page says of texts of several tokens: effects on log p, kinds of tokens, perplexity, and what was missed."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.reporting.html import page
from perturbkv.reporting.page_blocks import Blocks
from perturbkv.reporting.payload import payload
from perturbkv.reporting.text_parts import missed_part
from perturbkv.schema import AT_CHOSEN_STEPS, VARIABLES
from perturbkv.trace import Trace
from tests.support.decoded import array, inflated, trace_of
from tests.support.paged import compressed_again, configs, paged

SAMPLES, STEPS, SINGLE = 6, 4, 1e-6
NAMES = ("effect_isolated", "effect_propagated")
FLOORS = ("effect_noise_floor_isolated", "effect_noise_floor")
FORMATTING, NUMBER = 2, 3


def having(trace: Trace, **arrays: Any) -> Trace:
    return dataclasses.replace(trace, arrays={**trace.arrays, **arrays})


def without(trace: Trace, *names: str) -> Trace:
    return dataclasses.replace(trace, arrays={name: held for name, held in trace.arrays.items() if name not in names})


@cache
def trace() -> Trace:
    """Texts of four tokens: effects of either sign, some within rounding of another side's; two kinds of tokens."""
    made = paged(SAMPLES, configs(2, (0.1, 0.2)), layers=2, heads=3, tokens=203, steps=STEPS)
    draw = np.random.default_rng(1)
    effects = {name: draw.normal(0, 1e-4, (SAMPLES, 4, STEPS, 2, 3)) for name in NAMES}
    for each in effects.values():
        each[:, 1, :, 1, 2] = each[:, 0, :, 1, 2] + 1.5e-7
    floors = {name: np.full((SAMPLES, STEPS, 2, 3), 1e-7) for name in FLOORS}
    kinds = np.tile([FORMATTING, NUMBER, NUMBER, NUMBER], (SAMPLES, 1)).astype(np.uint8)
    log_p = -draw.lognormal(size=(SAMPLES, 4, STEPS))
    regular = without(made, "first_logp", "first_logp_full")
    return having(
        regular, **effects, **floors, token_kind=kinds, next_token_id=np.full((SAMPLES, STEPS), 7), text_logp=log_p,
        text_logp_full=log_p.max(axis=1) / 2,
    )  # fmt: skip


def gains(each: Any, pair: list[int]) -> Any:
    """(sample, layer, head) treatment − baseline of (sample, config, layer, head) means over steps.

    0 in the first layer of the first pair, whose sides keep the same there.
    """
    found = each[:, pair[1]] - each[:, pair[0]]
    if pair == [0, 1]:
        found[:, 0] = 0
    return found


def place(told: dict[str, Any], key: str) -> int:
    return [one["key"] for one in told["measures"]].index(key)


@pytest.mark.parametrize("name", NAMES)
def test_effects_are_signed_means_over_steps_and_samples(name: str) -> None:
    made = payload([trace()])
    told = trace_of(made)
    at, each = place(told, name), trace().arrays[name].mean(axis=2)
    assert (each.mean(axis=0) < 0).any() and (each.mean(axis=0) > 0).any()
    np.testing.assert_allclose(array(made, "mean")[at], each.mean(axis=0), rtol=SINGLE, atol=1e-12)
    np.testing.assert_allclose(array(made, "total")[at, :, 0], each.mean(axis=(0, 2, 3)), rtol=SINGLE)
    for number, pair in enumerate(told["pairs"]):
        expected = gains(each, pair).mean()
        found = array(made, "pair_sum")[at, number]
        np.testing.assert_allclose(found[:, 0], [expected, -expected], rtol=1e-5)
        assert (found[:, 1] < found[:, 0]).all() and (found[:, 0] < found[:, 2]).all()
    stored = told["arrays"]["sample"]["measures"].index(at)
    np.testing.assert_allclose(array(made, "sample")[stored], each, atol=np.ptp(each) / 131_000)
    stepped = array(made, "step_mean")[told["stepped"].index(name)]
    by_step = trace().arrays[name].mean(axis=0)
    np.testing.assert_allclose(stepped, by_step, atol=np.ptp(by_step) / 131_000)


@pytest.mark.parametrize(("name", "floor"), list(zip(NAMES, FLOORS, strict=True)))
def test_a_head_that_costs_the_text_less_is_better_and_rounding_ties(name: str, floor: str) -> None:
    told = trace_of(made := payload([trace()]))
    tie = told["measures"][place(told, name)]["ties"]
    assert told["measures"][place(told, name)]["less"] is False
    np.testing.assert_allclose(array(made, "floor")[tie], trace().arrays[floor].mean(axis=(0, 1)), rtol=SINGLE)
    number = told["pairs"].index([0, 1])
    verdict = array(made, "verdict")[tie, number]
    each = gains(trace().arrays[name].mean(axis=2), [0, 1])
    for layer in range(2):
        for head in range(3):
            for row, gain in enumerate([each[:, layer, head].mean(), *each[:, layer, head]]):
                assert verdict[row, layer, head] == (0 if abs(gain) <= 2e-7 else 1 if gain > 0 else -1)
    assert set(verdict.reshape(-1).tolist()) == {-1, 0, 1}
    assert not array(made, "verdict")[tie, number, :, 1, 2].any()


def test_texts_of_a_single_token_are_left_out_of_effects_and_counted() -> None:
    following = np.full((SAMPLES, STEPS), 7)
    following[[0, 3]] = -1
    told = trace_of(made := payload([having(trace(), next_token_id=following)]))
    at, tie = place(told, NAMES[0]), told["measures"][place(told, NAMES[0])]["ties"]
    each = trace().arrays[NAMES[0]][[1, 2, 4, 5]].mean(axis=2)
    np.testing.assert_allclose(array(made, "mean")[at], each.mean(axis=0), rtol=SINGLE, atol=1e-12)
    gain = gains(each, [0, 1])
    assert array(made, "pair_sum")[at, told["pairs"].index([0, 1]), 0, 0] == pytest.approx(gain.mean(), rel=1e-5)
    assert not array(made, "verdict")[tie, :, [1, 4]].any()
    better = array(made, "pair_better")[tie, told["pairs"].index([0, 1]), 0, 0]
    assert better == pytest.approx(float((gain > 2e-7).mean()), rel=SINGLE)
    assert "Δ log p leaves out 2 samples whose text is one token." in told["warnings"]
    nothing = trace_of(payload([having(trace(), next_token_id=np.full_like(following, -1))]))
    assert not any(one["kind"] == "effect" for one in nothing["measures"]) and "perplexity" not in nothing
    assert not any("Δ log p" in one for one in nothing["warnings"])


def ends(found: Any) -> list[Any]:
    return [None, None, "none"] if found is None else [found.low, found.high, found.kind]


def test_kinds_of_tokens_are_those_of_comparing_heads() -> None:
    told = trace_of(payload([trace()]))
    names = [one["label"] for one in told["configs"]]
    found = pk.compare_heads(trace(), "attention", "two-stage")
    assert len(told["kinds"]) == len(found) == 2
    for pair in found:
        rows = told["kinds"]["-".join(str(names.index(one.label())) for one in (pair.baseline, pair.treatment))]["rows"]
        own = [one for one in found.token_kinds if one.treatment == pair.treatment]
        assert [(row["kind"], row["samples"], row["steps"]) for row in rows] == [
            ("formatting", SAMPLES, SAMPLES), ("number", SAMPLES, 3 * SAMPLES)
        ]  # fmt: skip
        for row, one in zip(rows, own, strict=True):
            assert row["isolated"] == [one.isolated_ratio, *ends(one.isolated_ratio_interval)]
            assert row["propagated"] == [one.propagated_ratio, *ends(one.propagated_ratio_interval)]
            assert row["rest"] == [one.rest_ratio, *ends(one.rest_ratio_interval)]


def test_a_kind_that_makes_the_sign_is_told() -> None:
    moved = trace().arrays["perturbation_propagated"].copy()
    moved[:, 1] = moved[:, 0] * 0.9
    moved[:, 1, 0] = moved[:, 0, 0] + 100 * moved[:, 0].sum(axis=1)
    told = trace_of(payload([having(trace(), perturbation_propagated=moved)]))
    assert told["kinds"]["0-1"]["note"].startswith("Kinds of tokens differ: ")
    assert "without formatting tokens" in told["kinds"]["0-1"]["note"] and told["kinds"]["2-3"]["note"] == ""


def test_perplexity_is_that_of_the_analysis() -> None:
    shown, found = trace_of(payload([trace()]))["perplexity"], pk.perplexity(trace())
    assert (shown["title"], shown["conclusion"]) == (found.title(), found.conclusion())
    assert shown["full"] == [found.full, *ends(found.full_interval)]
    for row, one in zip(shown["configs"], found.configs, strict=True):
        assert row["perplexity"] == [one.perplexity, *ends(one.perplexity_interval)]
        assert row["ratio"] == [one.ratio, *ends(one.ratio_interval)]
        first = None if one.over_baseline is None else [one.over_baseline, *ends(one.over_baseline_interval)]
        assert row["over_baseline"] == first
    assert [row["over_baseline"] is None for row in shown["configs"]] == [True, False, True, False]


ADDED = ("kinds", "perplexity")


def test_what_a_trace_does_not_hold_leaves_no_box() -> None:
    whole, bare = trace(), without(trace(), *NAMES, *FLOORS, "token_kind", "text_logp", "text_logp_full")
    shown, markup = trace_of(payload([bare])), page(payload([bare]))
    assert not set(ADDED) & set(shown) and not any(one["kind"] == "effect" for one in shown["measures"])
    assert not any(f'<section id="{one}"' in markup for one in ADDED) and "<dt>Δ log p</dt>" not in markup
    markup = page(payload([whole]))
    assert all(f'<section id="{one}"' in markup for one in ADDED) and "<dt>Δ log p</dt>" in markup
    alike = having(whole, token_kind=np.full((SAMPLES, STEPS), NUMBER, dtype=np.uint8))
    assert "kinds" not in trace_of(payload([alike]))


@pytest.mark.parametrize("with_text", [True, False], ids=["text", "ids"])
def test_what_was_missed_is_told_of_every_sample_whose_text_may_end_early(with_text: bool) -> None:
    held = compressed_again(trace())
    held = dataclasses.replace(held, failures={held.sample_ids[0]: "broke"})
    made = payload([held if with_text else without(held, "token_text")])
    told, arrays = trace_of(made)["missed"], held.arrays
    assert told["places"] == ["sink", "prompt", "own text", "recent"]
    assert len(told["blocks"]) == SAMPLES - 1
    for sample, block in enumerate(told["blocks"], 1):
        steps = slice(STEPS - 1 if sample == SAMPLES - 1 else STEPS)
        read = json.loads(inflated(made, block))
        assert read["has_text"] == with_text
        pieces = arrays["token_text" if with_text else "token_id"][sample, steps]
        assert read["pieces"] == [str(piece) for piece in pieces]
        assert read["compressions"] == [[0, 2]] * 4
        for name, expected in (
            ("missed", arrays["missed_attention"][sample, :, steps]),
            ("held", arrays["held_entries"][sample, :, steps].mean(axis=(2, 3))),
            ("gone", arrays["gone_attention"][sample, :, steps].mean(axis=(1, 2, 3), dtype=np.float64)),
        ):
            np.testing.assert_allclose(read[name], expected, rtol=1e-5)


def test_heads_of_each_step_are_those_that_every_step_has() -> None:
    held = compressed_again(trace())
    known = {name: held.arrays[name].copy() for name in AT_CHOSEN_STEPS if name in held.arrays}
    for name, numbers in known.items():
        np.moveaxis(numbers, VARIABLES[name].axes.index("step"), 0)[1] = np.nan
    chosen = having(dataclasses.replace(held, run=dataclasses.replace(held.run, isolated_every=2)), **known)
    stepped = trace_of(payload([held]))["stepped"]
    assert {"isolated", "propagated"} <= {*stepped}
    made = trace_of(payload([chosen]))
    assert made["stepped"] == [key for key in stepped if key not in ("isolated", "retained_mass", "sigma_stage1")]


def test_what_was_missed_leaves_no_box_without_compressions_and_no_block_without_room() -> None:
    held = compressed_again(trace())
    assert '<section id="missed"' in page(payload([held])) and '<section id="missed"' not in page(payload([trace()]))
    assert "missed" not in trace_of(payload([trace()]))
    assert missed_part(held, Blocks("t0", room=10))["missed"]["blocks"] == [None] * SAMPLES


def test_a_cache_that_others_compress_has_no_numbers_of_what_was_missed() -> None:
    held = compressed_again(trace())
    arrays = {name: held.arrays[name].copy() for name in ("missed_attention", "gone_attention", "perturbation_carried")}
    for one in arrays.values():
        one[:, 1] = np.nan
    made = payload([having(held, **arrays)])
    read = json.loads(inflated(made, trace_of(made)["missed"]["blocks"][0]))
    assert (set(read["missed"][1]), set(read["gone"][1]), read["compressions"][1]) == ({None}, {None}, [])
    assert None not in {*read["missed"][0], *read["gone"][0]}

"""Every array of a page, decoded by hand, beside the result of the analysis that a notebook would ask."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.ablation.ingredients import settings
from perturbkv.analyses.bounds import assumption
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.layers import drift as layers
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.reporting.page_blocks import Payload
from perturbkv.reporting.payload import payload
from perturbkv.trace import Trace
from tests.support.decoded import array, bundle, shares, trace_of
from tests.support.paged import configs, paged

SINGLE = 1e-6
"""Relative error of a float in four bytes."""


@cache
def trace() -> Trace:
    """Six samples, four sides at two budgets; the first layer of the first two configurations keeps the same."""
    found = paged(6, configs(4, (0.1, 0.2)), layers=3, heads=4, tokens=203, attention=True)
    loud = {name: found.arrays[name] * 3e5 for name in found.arrays if name.startswith("noise_floor")}
    return dataclasses.replace(found, arrays={**found.arrays, **loud})


@cache
def page(full: bool = False) -> Payload:
    return payload([trace()], full=full)


@cache
def told() -> dict[str, Any]:
    return trace_of(page())


def keys() -> list[str]:
    return [one["key"] for one in told()["measures"]]


def ties() -> list[str]:
    return [one["key"] for one in told()["measures"] if one["ties"] is not None]


def interval(found: Any) -> list[float]:
    return [np.nan, np.nan] if found is None else [found.low, found.high]


KINDS = [(kind, distance) for distance in DISTANCES for kind in ("isolated", "propagated")]


@pytest.mark.parametrize(("kind", "distance"), KINDS)
def test_every_pair_is_what_comparing_heads_says(kind: str, distance: str) -> None:
    key = kind + DISTANCES[distance].suffix
    place, tie = keys().index(key), ties().index(key)
    mean, verdict = array(page(), "mean")[place], array(page(), "verdict")[tie]
    sums, better = array(page(), "pair_sum")[place], array(page(), "pair_better")[tie]
    floor, run = array(page(), "floor")[tie], trace().run
    seen = set()
    for number, (first, second) in enumerate(told()["pairs"]):
        for way, (one, other) in enumerate(((first, second), (second, first))):
            found = getattr(head_comparison.summarise(trace(), run.configs[one], run.configs[other], 0, distance), kind)
            np.testing.assert_allclose(mean[one], found.baseline_mean, rtol=SINGLE)
            np.testing.assert_allclose(floor, found.noise_floor, rtol=SINGLE)
            np.testing.assert_array_equal(verdict[number, 0] * (1, -1)[way], found.verdict)
            expected = [found.sum_ratio, *interval(found.sum_ratio_interval)]
            np.testing.assert_allclose(sums[number, way], expected, rtol=SINGLE)
            expected = [found.better_share, *interval(found.better_share_interval)]
            np.testing.assert_allclose(better[number, way], expected, rtol=SINGLE)
            np.testing.assert_array_equal(verdict[number, 1:] * (1, -1)[way], np.sign(found.differences))
        seen |= set(verdict[number].reshape(-1).tolist())
    assert seen == {-1, 0, 1}


def test_equal_kept_sets_are_tied_whatever_was_measured() -> None:
    verdict = array(page(), "verdict")
    pair = told()["pairs"].index([0, 1])
    assert not verdict[:, pair, :, 0].any() and verdict[:, pair, :, 1:].any()
    others = [place for place in range(len(told()["pairs"])) if place != pair]
    assert all(verdict[:, place, :, 0].any() for place in others)


def test_means_of_every_measure_are_those_over_samples() -> None:
    mean = array(page(), "mean")
    for variable, key in [("theta", "theta"), ("theta_hat", "theta_hat"), ("theta_hat_relax", "theta_hat_relax")]:
        np.testing.assert_allclose(mean[keys().index(key)], trace().arrays[variable][:, :, 0].mean(axis=0), rtol=SINGLE)
    isolated, kept = (trace().arrays[name][:, :, 0] for name in ("perturbation_isolated", "retained_mass"))
    gone = (isolated / (1 - kept)).mean(axis=0)
    np.testing.assert_allclose(mean[keys().index("gone_distance")], gone, rtol=SINGLE)


@pytest.mark.parametrize("side", ["attention", "two-stage"])
def test_sigma_is_that_of_the_assumption(side: str) -> None:
    for found in assumption.sigmas(trace(), side, 0):
        place = trace().run.configs.index(found.config)
        for name, reading in found.readings.items():
            np.testing.assert_allclose(array(page(), "mean")[keys().index(name), place], reading.mean, rtol=SINGLE)
            shown = array(page(), "sample")[keys().index(name), :, place]
            assert abs(shown - trace().arrays[name][:, place, 0]).max() <= 1e-4


@pytest.mark.parametrize("distance", DISTANCES)
def test_drift_is_that_of_the_layers(distance: str) -> None:
    at, run = told()["distances"].index(distance), trace().run
    drift, over, floor = (array(page(), name)[at] for name in ("drift", "drift_ratio", "drift_floor"))
    for number, (first, second) in enumerate(told()["pairs"]):
        for way, (one, other) in enumerate(((first, second), (second, first))):
            found = layers.summarise(trace(), run.configs[one], run.configs[other], distance)
            ends = found.baseline_drift_interval, found.ratio_interval
            assert ends[0] is not None and ends[1] is not None and found.noise_floor is not None
            expected = np.stack([found.baseline_drift, ends[0].low, ends[0].high], axis=-1)
            np.testing.assert_allclose(drift[one], expected, rtol=SINGLE)
            expected = np.stack([found.ratio, ends[1].low, ends[1].high], axis=-1)
            np.testing.assert_allclose(over[number, way], expected, rtol=SINGLE)
            np.testing.assert_allclose(floor, found.noise_floor, rtol=SINGLE)
    each = array(page(), "drift_sample")[at]
    np.testing.assert_allclose(each, trace().arrays[f"hidden_drift_{distance}"][:, :, 0], rtol=1e-3)


def test_kl_and_the_next_token_are_those_of_the_budget_curves() -> None:
    kl, top1 = array(page(), "kl"), array(page(), "top1")
    curves = pk.budget_curves(trace(), "attention", ["two-stage", "attention-unpooled", "two-stage-uniform"])
    assert told()["kl_floor"] == curves.kl_floor
    for curve in curves:
        for at, config in enumerate(curve.configs):
            place = trace().run.configs.index(config)
            for found, name in ((kl, "kl"), (top1, "top1")):
                band = getattr(curve.intervals, name)
                assert band is not None
                expected = [getattr(curve.medians, name)[at], band.low[at], band.high[at]]
                np.testing.assert_allclose(found[place], expected, rtol=SINGLE)


def test_totals_are_sums_over_sums_of_norms() -> None:
    total = array(page(), "total")
    for key, variable, norm in (
        ("propagated", "perturbation_propagated", "output_norm"),
        ("isolated_l2", "perturbation_isolated_l2", "output_norm_l2"),
        ("theta", "theta", "output_norm"),
    ):
        expected = trace().arrays[variable].sum(axis=(0, 2, 3, 4)) / trace().arrays[norm].sum()
        found = total[keys().index(key)]
        np.testing.assert_allclose(found[:, 0], expected, rtol=SINGLE)
        assert (found[:, 1] < found[:, 0]).all() and (found[:, 0] < found[:, 2]).all()
    shares = trace().arrays["retained_mass"].mean(axis=(0, 2, 3, 4))
    np.testing.assert_allclose(total[keys().index("retained_mass"), :, 0], shares, rtol=SINGLE)


def test_quantised_samples_keep_to_their_errors_and_full_ones_to_four_bytes() -> None:
    coarse, fine = array(page(), "sample"), array(page(full=True), "sample")
    assert told()["arrays"]["sample"]["measures"] == list(range(len(keys())))
    for number, one in enumerate(told()["measures"]):
        if one["kind"] == "share":
            assert abs(coarse[number] - fine[number]).max() <= 1e-4
        else:
            np.testing.assert_allclose(coarse[number], fine[number], rtol=1e-3)
    np.testing.assert_allclose(fine[0], trace().arrays["perturbation_isolated"][:, :, 0], rtol=SINGLE)


@pytest.mark.parametrize("sample", ["p0", "p4"])
def test_a_head_keeps_and_loses_what_its_tokens_say(sample: str) -> None:
    place = trace().sample_ids.index(sample)
    for layer, head in ((0, 0), (1, 3), (2, 2)):
        shown = bundle(page(), place, layer, head)
        found = pk.tokens(trace(), sample, layer, head)
        first, second = (trace().run.configs.index(one) for one in (found.baseline, found.treatment))
        fates = {
            (True, True): "both", (True, False): "baseline", (False, True): "treatment", (False, False): "neither",
        }  # fmt: skip
        kept = [set(shown["kept"][one]) for one in (first, second)]
        assert tuple(fates[one in kept[0], one in kept[1]] for one in range(203)) == found.fates
        assert found.losses is not None
        for config, losses in zip((first, second), found.losses, strict=True):
            assert shown["lost"][config].tolist() == [one.position for one in losses]
            expected = np.array([one.share for one in losses])
            np.testing.assert_allclose(shown["share"][config], np.minimum(expected, 1), rtol=3e-4)
        attention = trace().arrays["attention_full"][place, 0, layer, head, :203]
        np.testing.assert_allclose(shown["attention"], attention, rtol=0.041)


def test_the_share_of_heads_that_keep_a_token_is_that_of_their_sets() -> None:
    for config in (0, 5):
        assert abs(shares(page(), 2)[config] - trace().kept_masks(2, config).mean(axis=(0, 1))).max() <= 0.5 / 255


def test_the_head_that_changes_most_is_where_a_page_begins_and_is_held_of_every_sample() -> None:
    mean = trace().arrays["perturbation_propagated"][:, :, 0].mean(axis=0)
    first, second = (told()["sides"].index(name) for name in ("attention", "two-stage"))
    assert (told()["start"]["baseline"], told()["start"]["treatment"], told()["start"]["budget"]) == (first, second, 0)
    moved = abs(mean[1] - mean[0])
    assert told()["start"]["head"] == list(np.unravel_index(moved.argmax(), moved.shape))
    flat = told()["start"]["head"][0] * 4 + told()["start"]["head"][1]
    assert all(prompt["held"][0] == flat for prompt in told()["prompts"].values())


def test_conclusions_are_the_sentences_of_comparing_heads() -> None:
    names = [one["label"] for one in told()["configs"]]
    for found in pk.compare_heads(trace(), "attention", ["two-stage", "two-stage-uniform"]):
        pair = "-".join(str(names.index(side.label())) for side in (found.baseline, found.treatment))
        alone = pk.compare_heads(trace(), "attention", found.treatment.selection.name)
        single = next(alone[n : n + 1] for n in range(len(alone)) if alone[n].treatment == found.treatment)
        assert told()["conclusions"][pair] == single.conclusion()


def test_the_ablation_is_the_analysis_rows() -> None:
    for shown, found in zip(told()["ablation"], settings(trace()), strict=True):
        assert [row["name"] for row in shown["rows"]] == [row.title for row in found.rows]
        for part, rows in (("rows", found.rows), ("brings", found.brings)):
            for one, row in zip(shown[part], rows, strict=True):
                kind = row.propagated
                assert one["propagated"] == [kind.sum_ratio, *interval(kind.sum_ratio_interval)]


def test_caches_at_equal_bytes_are_those_of_the_analysis() -> None:
    """Twice the bytes at twice the budget; where all take the same bytes the page has no such section."""
    budgets = np.array([one.budget.value for one in trace().run.configs], dtype=float)
    held = {"held_bytes": np.tile(1000 * budgets, (6, 1)), "resident_bytes": np.full((6, len(budgets)), np.nan)}
    held["full_bytes"] = np.full(6, 1000.0)
    sized = dataclasses.replace(trace(), arrays={**trace().arrays, **held})
    shown, found = trace_of(payload([sized]))["equal_bytes"], pk.equal_bytes(sized)
    assert shown["conclusion"] == found.conclusion()
    for one, point in zip(shown["points"], found.points, strict=True):
        kind = "none" if point.relative_interval is None else point.relative_interval.kind
        assert one["loss"] == [point.relative, *interval(point.relative_interval), kind]
        assert (one["packed"]["share"], one["packed"]["verdict"]) == (point.packed.share, point.packed.verdict)
        assert one["packed"]["on_line"] == (point in found.least_losses("packed"))
        assert (one["resident"]["share"], one["resident"]["verdict"]) == (None, "")
    assert "equal_bytes" not in trace_of(payload([sized.sel(where=lambda config: config.budget.value == 0.1)]))

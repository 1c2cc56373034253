"""Numbers of a trace of several decode steps: means over those that each sample has, or one step alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.layers.budget_curves import budget_curve
from perturbkv.analyses.measurements import Measurements, select_texts_that_go_on
from perturbkv.analyses.stats import intervals
from perturbkv.errors import BoundError, TraceError
from perturbkv.trace import SampleTrace, Trace
from tests.support.traces import sample_trace, trace

STEPS, COUNTS = 3, (3, 1, 3, 3, 2, 3)
"""Steps of the trace, and those that each sample has before its text ends."""


def made(**changed: Any) -> Trace:
    """Six samples whose texts end after different steps, with the bounds in their order at each step."""
    samples = []
    for place, count in enumerate(COUNTS):
        arrays = dict(sample_trace(f"s{place}", steps=STEPS, seed=place, optional=True).arrays)
        del arrays["own_entries"]
        arrays["steps_measured"], arrays["evicted"] = np.asarray(count), np.ones(2, dtype=np.uint8)
        for name in ("sigma_stage1", "sigma_topk", "retained_mass"):
            arrays[name] = np.random.default_rng(place).uniform(0.2, 0.9, arrays[name].shape)
        for factor, name in enumerate(("theta", "theta_hat", "theta_hat_relax"), start=2):
            arrays[name] = factor * arrays["perturbation_isolated"]
        samples.append(SampleTrace(f"s{place}", arrays | {name: make(arrays) for name, make in changed.items()}))
    return trace(*samples, steps=STEPS)


def by_hand(found: Trace, name: str, where: tuple[int, ...]) -> list[float]:
    """Of each sample the mean over its steps, at a configuration and what follows the step."""
    config, *rest = where
    return [
        sum(found.arrays[name][(sample, config, step, *rest)] for step in range(count)) / count
        for sample, count in enumerate(COUNTS)
    ]


def test_a_samples_number_is_the_mean_over_the_steps_that_it_has() -> None:
    found = made()
    mean = Measurements(found, "heads")["perturbation_propagated"]
    for config, layer, head in np.ndindex(2, 2, 2):
        expected = by_hand(found, "perturbation_propagated", (config, layer, head))
        np.testing.assert_allclose(mean[:, config, layer, head], expected, rtol=1e-12)
    heads = pk.compare_heads(found)
    np.testing.assert_allclose(heads[0].propagated.baseline_mean, mean[:, 0].mean(axis=0), rtol=1e-12)
    drift = pk.layer_drift(found)[0][0].treatment_drift
    np.testing.assert_allclose(drift[1], np.mean(by_hand(found, "hidden_drift_l1", (1, 1))), rtol=1e-12)
    assert heads[0].step is None and heads[0].samples == 6
    told = "mean over up to 3 steps"  # as some texts end before
    assert told in heads.conclusion() and told in heads.identity.run_line()
    assert "mean over 3 steps" in pk.compare_heads(made().sel(sample=["s0", "s2"])).conclusion()


ANALYSES = [
    pk.compare_heads,
    pk.layer_drift,
    pk.last_layer,
    pk.budget_curves,
    pk.bound_tightness,
    pk.assumption,
    pk.ablation,
]


@pytest.mark.parametrize("analysis", ANALYSES, ids=lambda one: one.__name__)
def test_the_first_step_stands_beside_the_mean_and_is_what_looking_at_it_alone_gives(
    analysis: Callable[..., Any],
) -> None:
    beside, alone = analysis(made()), analysis(made(), step=0)
    claimed, _, scope = beside.identity.first_step.rpartition(" (")
    terms = scope.removesuffix(").").split("; ")
    assert claimed and alone.conclusion().startswith(claimed)
    assert "first step alone" in terms and all(term in alone.conclusion() for term in terms)
    assert beside.notes().startswith(beside.identity.first_step) and alone.identity.first_step == ""
    assert beside.identity.samples == 6 and analysis(made(), step=2).identity.samples == 4


def test_a_trace_of_one_step_has_no_other_numbers() -> None:
    found = trace(sample_trace("s0"), sample_trace("s1", seed=1))
    heads, first = pk.compare_heads(found), pk.compare_heads(found, step=0)
    assert heads.to_dict() == first.to_dict()
    assert heads[0].step == 0 and heads.identity.steps == heads.identity.first_step == ""


def test_a_trace_whose_texts_all_end_after_the_first_step_has_no_other_numbers() -> None:
    found = dataclasses.replace(made(), arrays={**made().arrays, "steps_measured": np.ones(6, dtype=np.int64)})
    heads = pk.compare_heads(found)
    assert heads.to_dict() == pk.compare_heads(found, step=0).to_dict()
    assert heads.identity.first_step == "" and "first step alone" in heads.conclusion()


def test_sigma_is_counted_by_the_share_of_steps() -> None:
    found = made()
    above = [
        np.mean(found.arrays["sigma_stage1"][sample, 1, :count] > 0.5, axis=0) for sample, count in enumerate(COUNTS)
    ]
    reading = pk.assumption(found).configs[0].sigma_stage1
    assert reading.share == pytest.approx(float(np.mean(above)), rel=1e-12)
    np.testing.assert_allclose(reading.layer_share, np.mean(above, axis=(0, 2)), rtol=1e-12)
    np.testing.assert_array_equal(reading.below, (np.array(above) < 0.5).sum(axis=0))


def test_bounds_are_checked_at_every_step() -> None:
    def loud(arrays: dict[str, Any]) -> Any:
        theta = 2 * arrays["perturbation_isolated"]
        theta[0, 1, 0, 0] = 0.5 * arrays["perturbation_isolated"][0, 1, 0, 0]
        theta[0, 0, 0, 0] *= 1e6
        return theta

    checked = pk.bound_tightness(made()).inequalities_checked
    assert checked["L ≤ θ"] == sum(COUNTS) * 2 * 2 * 2
    with pytest.raises(BoundError):
        pk.bound_tightness(made(theta=loud, theta_hat=lambda a: a["perturbation_isolated"] * 1e9,
                                theta_hat_relax=lambda a: a["perturbation_isolated"] * 2e9))  # fmt: skip


def test_bounds_are_evidence_where_sigma_exceeds_one_half_at_every_step() -> None:
    """Where it does not at a step, θ̂ exceeds θ̂_relax there, and the means may, too."""

    def sigma(arrays: dict[str, Any]) -> Any:
        held = np.full(arrays["sigma_stage1"].shape, 0.9)
        held[:, 1, 0] = 0.3
        return held

    def relaxed(arrays: dict[str, Any]) -> Any:
        bound = 2 * arrays["theta_hat"]
        bound[:, 1, 0] = 1e-3 * arrays["theta_hat"][:, 1, 0]
        return bound

    shown = pk.bound_tightness(made(sigma_stage1=sigma, theta_hat_relax=relaxed)).configs[0]
    assert shown.spreads["θ̂/θ̂_relax"].evidence.max() <= 1
    np.testing.assert_allclose(shown.flagged_heads, [[5 / 6] * 2, [0] * 2])  # one text ends after the first step


def test_agreement_over_steps_is_a_share_of_each_sample() -> None:
    found = made()
    measured = Measurements(found, "layers")
    shares = np.array(by_hand(found, "top1_agreement", (0,)))
    assert set(shares) - {0, 1}
    curve = budget_curve(measured, "attention", [0], "l1")
    assert curve.medians.top1[0] == pytest.approx(shares.mean())
    expected = intervals.of_mean(shares, intervals.share_kind(0))
    assert expected is not None
    assert (curve.intervals.top1.low[0], curve.intervals.top1.high[0]) == (expected.low, expected.high)


@pytest.mark.parametrize(("text", "told"), [("answer", "an accepted answer"), ("given", "the given text")])
def test_a_text_that_is_not_the_full_runs_own_is_named(text: str, told: str) -> None:
    found = made()
    read = dataclasses.replace(found, run=dataclasses.replace(found.run, text=text))
    assert f"mean over up to 3 steps of {told}" in pk.compare_heads(read).conclusion()
    assert f"first step alone of {told}" in pk.layer_drift(read, step=0).identity.run_line()
    once = trace(sample_trace("s0"), sample_trace("s1", seed=1))
    once = dataclasses.replace(once, run=dataclasses.replace(once.run, text=text))
    assert f"first step of {told}" in pk.compare_heads(once).conclusion()


def test_texts_of_which_no_token_is_predicted_have_no_effect() -> None:
    following = np.full((6, STEPS), -1)
    following[[0, 2], 0] = 7
    found = dataclasses.replace(made(), arrays={**made().arrays, "next_token_id": following})
    assert select_texts_that_go_on(found, "heads").sample_ids == ("s0", "s2")
    none = dataclasses.replace(found, arrays={**found.arrays, "next_token_id": np.full((6, STEPS), -1)})
    with pytest.raises(TraceError, match="heads needs a text of at least two tokens"):
        select_texts_that_go_on(none, "heads")

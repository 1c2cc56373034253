"""All flagged, all zero, one layer, one head, 1,024 heads, one sample, a failed one: a figure and a note, no crash."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from perturbkv.analyses.ablation import ingredients
from perturbkv.analyses.ablation.ablation import Ablation
from perturbkv.analyses.bounds import assumption, bound_tightness
from perturbkv.analyses.identity import identity
from perturbkv.analyses.layers import budget_curves, drift
from perturbkv.analyses.layers.layers import DriftSeries, SampleSeries
from perturbkv.analyses.sides import series
from perturbkv.figures import ablation as ablation_figure
from perturbkv.figures import bounds as assumption_figure
from perturbkv.figures import bounds as bounds_figure
from perturbkv.figures import layers as budgets_figure
from perturbkv.figures import layers as layers_figure
from perturbkv.figures import layers as samples_figure
from perturbkv.trace import Trace
from tests.support.artists import render, words
from tests.support.every_figure import result_of
from tests.support.measured import config, hand_made, last_layer

NAMES = ("attention", "two-stage-uniform", "two-stage")
CONFIGS = [config(name, budget) for budget in (64, 128) for name in NAMES]


def made(samples: int = 2, layers: int = 2, heads: int = 2, failed: int = 0, **fill: float) -> Trace:
    """Two budgets of three selections; L, θ and the rest rise from one to the next, or are what `fill` says."""
    draw = np.random.default_rng(0)
    size = (samples, len(CONFIGS), layers, heads)
    perturbation = draw.uniform(1, 2, size)
    arrays: dict[str, Any] = {
        "perturbation_isolated": perturbation,
        "perturbation_propagated": perturbation * 2,
        "theta": perturbation * 3,
        "theta_hat": perturbation * 4,
        "theta_hat_relax": perturbation * 5,
        "sigma_stage1": draw.uniform(0.51, 1, size),
        "sigma_topk": draw.uniform(0.51, 1, size),
        "retained_mass": draw.uniform(0.51, 1, size),
        "prompt_tokens": np.full(samples, 500),
        "kept_count": np.broadcast_to(np.repeat([64, 128], 3)[:, None, None], size),
    }
    arrays |= {name: np.full_like(arrays[name], value) for name, value in fill.items() if name in arrays}
    others = {
        "hidden_drift_l1": size[:3],
        "hidden_noise_floor": (samples, layers),
        "noise_floor": (samples, layers, heads),
        "noise_floor_isolated": (samples, layers, heads),
        "logit_kl": size[:2],
        "top1_agreement": size[:2],
    }
    arrays |= {name: np.full(shape, fill[name]) for name, shape in others.items() if name in fill}
    return hand_made(CONFIGS, arrays, layers, heads, failures={f"f{place}": "broke" for place in range(failed)})


def figures(trace: Trace, width: int) -> Iterator[Figure]:
    """Every figure of a trace."""
    (pairs,) = series(trace.run, "attention", "two-stage")
    shown = identity(trace, [config for pair in pairs for config in pair])
    bounds = bound_tightness.bound_tightness(trace, "two-stage")
    yield bounds_figure.draw_bound_tightness(bounds, width)
    yield bounds_figure.draw_heads(bounds, width)
    yield assumption_figure.draw_assumption(assumption.assumption(trace), width)
    yield layers_figure.draw_layers(DriftSeries(tuple(drift.summarise(trace, *pair) for pair in pairs), shown), width)
    yield samples_figure.draw_last_layer(SampleSeries(tuple(last_layer(trace, *pair) for pair in pairs), shown), width)
    yield budgets_figure.draw_budget_curves(budget_curves.summarise(trace, list(NAMES)), width)
    yield ablation_figure.draw_ablation(Ablation(ingredients.settings(trace), 0, shown, ()), width)


ZERO = dict.fromkeys(
    ("perturbation_isolated", "perturbation_propagated", "theta", "theta_hat", "theta_hat_relax", "hidden_drift_l1",
     "noise_floor", "noise_floor_isolated", "hidden_noise_floor", "logit_kl", "top1_agreement"), 0.0)  # fmt: skip
ODD: dict[str, Callable[[], Trace]] = {
    "one sample": lambda: made(samples=1),
    "one layer, one head": lambda: made(layers=1, heads=1),
    "1,024 heads": lambda: made(layers=32, heads=32),
    "a failed sample": lambda: made(failed=1),
    "all flagged": lambda: made(sigma_stage1=0.2, sigma_topk=0.2, theta_hat_relax=0.1),
    "all zero": lambda: made(**ZERO),
}


@pytest.mark.parametrize("width", [84, pytest.param(174, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "1,024 heads" else []) for name in ODD]
)
def test_every_figure_is_drawn(name: str, width: int) -> None:
    drawn = [render(figure) for figure in figures(ODD[name](), width)]
    assert len(drawn) == 7
    assert min(len(image) for image in drawn) > 1000


def test_zeros_on_log_axes_are_noted() -> None:
    said = [words(figure) for figure in figures(ODD["all zero"](), 174)]
    assert "8 drifts of 0 not drawn" in said[3]
    assert "4 drifts of 0 not drawn" in said[4]
    assert "6 values of 0 not drawn" in said[5]
    assert "attention or row is 0" in said[6]


@pytest.mark.parametrize("times", [1, 2], ids=["shared panels", "a column for each budget"])
def test_no_tick_stands_beyond_the_last_layer(times: int) -> None:
    trace = made(layers=30)
    (pairs,) = series(trace.run, "attention", "two-stage")
    drifts = [drift.summarise(trace, *pair) for pair in pairs] * times
    figure = layers_figure.draw_layers(DriftSeries(tuple(drifts), drifts[0].identity), 174)
    figure.canvas.draw()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert shown and set(shown) <= set(range(30))


def test_panels_that_hold_nothing_say_why() -> None:
    zero = words(next(figures(ODD["all zero"](), 174)))
    assert "no ratio: nothing went, or the bounds are 0" in zero
    assert "no bin of S holds 10 values" in zero
    assert "have heads that count" in words(next(figures(ODD["all flagged"](), 174)))


def test_bands_of_medians_say_their_own_level() -> None:
    """Of eight the second and the seventh: 1 − 2 · 9/256."""
    said = [" ".join(words(figure).split()) for figure in figures(made(samples=8), 174)]
    for drawn in (said[3], said[5]):
        assert "95 % intervals (medians: 93 %) over n = 8 samples" in drawn
    assert "medians:" not in said[6]


def test_a_failed_sample_is_in_every_foot() -> None:
    assert all("2 samples · 1 failed" in words(figure) for figure in figures(ODD["a failed sample"](), 174))


@pytest.mark.parametrize("name", ["MethodRanking", "Restriction"])
def test_three_settings_leave_the_fourth_panel_blank(name: str) -> None:
    result = result_of(name)
    figure = dataclasses.replace(result, settings=(result.settings[0],) * 3).plot(174)
    assert [axes.axison for axes in figure.axes] == [True, True, True, False]

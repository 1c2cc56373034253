"""Configurations that have little in common, and presses with long names: no text lies on another, at any width."""

from __future__ import annotations

import numpy as np
import pytest

from perturbkv.analyses.bounds.bound_tightness import BoundTightness, bound_tightness
from perturbkv.analyses.heads.heads import HeadComparisons, compare_heads
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace
from tests.support.artists import overlapping
from tests.support.measured import config, hand_made

SELECTIONS = ("attention", "two-stage-uniform", "two-stage")
POLICIES = {
    "snapkv": 64, "adakv(floor=0.1)": 128, "adakv(caote(pool=max), floor=0.3)": 0.1, "pyramidkv(beta=14)": 96,
    "h2o(recent=0.3)": 160, "expected-attention(n_future=256)": 0.25, "scissorhands(history=200)": 64,
}  # fmt: skip
INNER = Choice("SnapKVPress", {"window_size": 64}, frozenset())
PRESSES = (
    Choice("kvpress:SnapKVPress", INNER.options, frozenset()),
    Choice("kvpress:CriticalKVPress", {"press": INNER}, frozenset()),
)


def measured(configs: list[EvictionConfig]) -> Trace:
    draw = np.random.default_rng(0)
    size = (8, len(configs), 3, 4)
    moved = draw.uniform(1, 2, size)
    arrays = {
        "perturbation_isolated": moved, "perturbation_propagated": 2 * moved, "theta": 3 * moved,
        "theta_hat": 4 * moved, "theta_hat_relax": 5 * moved, "sigma_stage1": draw.uniform(0.51, 1, size),
        "sigma_topk": draw.uniform(0.51, 1, size), "retained_mass": draw.uniform(0.51, 1, size),
        "held_share": np.broadcast_to(np.linspace(0.1, 0.5, len(configs)), size[:2]),
    }  # fmt: skip
    return hand_made(configs, arrays, 3, 4)


def bounds() -> BoundTightness:
    return bound_tightness(
        measured([config(name, budget, policy=policy) for policy, budget in POLICIES.items() for name in SELECTIONS])
    )


def heads(budgets: tuple[int, ...]) -> HeadComparisons:
    ours = [config("attention", budget, granularity="kv") for budget in budgets]
    theirs = [EvictionConfig(budget, press, "given", 0, "kv") for budget in budgets for press in PRESSES]
    trace = measured([*ours, *theirs])
    if len(budgets) == 1:
        return compare_heads(trace, PRESSES[0].name, PRESSES[1].name)
    return compare_heads(trace, "snapkv:attention", [press.name for press in PRESSES])


@pytest.mark.slow
@pytest.mark.parametrize("width", [84, 174])
def test_bounds_of_seven_unlike_configurations_are_numbered_and_named_below(width: int) -> None:
    figure = bounds().plot(width)
    assert overlapping(figure) == []
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == list("1234567")
    assert [tick.get_text() for tick in figure.axes[2].get_xticklabels()] == list("1234567")
    key = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "1  64 snapkv w=32 max7" in key
    assert any("adakv w=32 floor=0.3 by=caote(pool=max)" in name for name in key)


@pytest.mark.slow
@pytest.mark.parametrize("width", [84, 174])
def test_maps_of_seven_unlike_configurations_have_room_for_their_names(width: int) -> None:
    assert overlapping(bounds().plot_heads(width)) == []


@pytest.mark.parametrize("width", [84, 174])
@pytest.mark.parametrize("budgets", [(64,), (64, 128)], ids=["one pair", "four pairs"])
def test_heads_of_presses_have_room_for_their_names(budgets: tuple[int, ...], width: int) -> None:
    assert overlapping(heads(budgets).plot(width)) == []

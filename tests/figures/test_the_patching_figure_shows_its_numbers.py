"""Shapley values with both errors, greedy curves and mixtures by name: the artists hold the result's numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from matplotlib.figure import Figure

from perturbkv.analyses.patching.patching import Patching, patching_result
from perturbkv.analyses.stats import coalition as shapley
from perturbkv.analyses.stats.coalition import GreedyPath
from perturbkv.configs.patching import Coalition, PatchingConfig
from tests.analyses.test_patching_by_hand import game_of, store_of
from tests.support.artists import artist, artists, overlapping, render, words

WIDTHS = pytest.mark.parametrize("width", [84, 174])
LAYERS, SAMPLES = 6, 6


def value(coalition: Coalition) -> np.ndarray:
    drawn = np.random.default_rng(1).normal(0, 1, (LAYERS, SAMPLES))
    return 20 + drawn[sorted(coalition)].sum(axis=0) - 0.3 * len(coalition) ** 2 * (0 in coalition)


def made(**asked: object) -> Patching:
    question = PatchingConfig(baseline_in=((0,), (2, 3)), **asked)  # type: ignore[arg-type]
    game = game_of(question, LAYERS)
    store = store_of(value, game, samples=SAMPLES)
    halves = (np.arange(3), np.arange(3, 6))
    paths = [GreedyPath(*halves, [0, 2, 1]), GreedyPath(*halves[::-1], [3, 0, 1])]
    orders = None if question.permutations is None else shapley.draw_orders(LAYERS, question.permutations, 0)
    return patching_result(store, game, question, orders, [] if question.greedy == 0 else paths)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@WIDTHS
def test_all_panels_hold_their_numbers(width: int) -> None:
    result = made(permutations=8)
    figure = result.plot(width)
    assert result.shapley is not None and result.greedy is not None and result.shapley.interval is not None
    np.testing.assert_allclose(artist(figure, 0, "values").get_ydata(), result.shapley.value)
    assert figure.axes[0].get_xlim() == (-0.5, LAYERS - 0.5), "no tick stands beyond the layers, however many they are"
    ends = np.array([segment[:, 1] for segment in artist(figure, 0, "samples").get_segments()])
    np.testing.assert_allclose(ends, np.stack([result.shapley.interval.low, result.shapley.interval.high], axis=1))
    ends = np.array([segment[:, 1] for segment in artist(figure, 0, "orders").get_segments()])
    np.testing.assert_allclose(ends[:, 1] - ends[:, 0], 2 * result.shapley.sampling, atol=1e-12)
    for name in ("chosen", "judged"):
        np.testing.assert_allclose(artist(figure, 1, name).get_ydata(), getattr(result.greedy, name))
    assert len(artists(figure, 1, "judged band")) == 1
    lines = [" ".join(label.get_text().split()) for label in figure.axes[2].get_yticklabels()]
    assert lines == [one.name for one in result.named]
    for one in result.named:
        (drift,) = artists(figure, 2, f"drift {one.name}")[0].get_xdata()
        assert drift == pytest.approx(one.drift_ratio)
    assert f"orders: ± {100 * result.shapley.sampling.max():.1f} % at most" in legend(figure)
    assert overlapping(figure) == []
    assert len(render(figure)) > 1000


@WIDTHS
@pytest.mark.parametrize("asked", [{"permutations": 0, "greedy": 0}, {"greedy": 0}, {"permutations": 0}])
def test_what_was_not_asked_for_has_no_panel(width: int, asked: dict[str, int]) -> None:
    result = made(**asked)
    figure = result.plot(width)
    assert len(figure.axes) == 1 + (result.shapley is not None) + (result.greedy is not None)
    assert overlapping(figure) == []
    assert ("all subsets: no error" in legend(figure)) == ("permutations" not in asked)


def test_random_weights_are_said() -> None:
    result = made(permutations=8)
    stamped = dataclasses.replace(result, identity=dataclasses.replace(result.identity, random_weights=True))
    figure = stamped.plot(84)
    assert "random weights" in words(figure)
    assert overlapping(figure) == []

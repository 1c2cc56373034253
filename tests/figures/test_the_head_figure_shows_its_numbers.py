from __future__ import annotations

import numpy as np
import pytest

from perturbkv.analyses.heads import HeadComparison, summarise
from perturbkv.figures import style
from perturbkv.figures.heads import draw
from perturbkv.trace import SampleTrace
from tests.support.artists import artist, render, words
from tests.support.traces import run_config, sample_trace, trace


def comparison(
    layers: int = 3, heads: int = 4, samples: int = 2, random_weights: bool = False, **arrays: np.ndarray
) -> HeadComparison:
    made = [sample_trace(f"s{i}", layers=layers, heads=heads, seed=i) for i in range(samples)]
    made = [SampleTrace(sample.sample_id, {**sample.arrays, **arrays}) for sample in made]
    return summarise(trace(*made, random_weights=random_weights), *run_config().configs)


def test_points_are_the_means_of_the_heads() -> None:
    result = comparison()
    figure = draw(result)
    for panel, kind in enumerate((result.isolated, result.propagated)):
        shown = kind.verdict != 0
        expected = np.stack([kind.baseline_mean[shown], kind.treatment_mean[shown]], axis=1)
        np.testing.assert_allclose(artist(figure, panel, "heads").get_offsets(), expected)
        layers = np.broadcast_to(np.arange(3)[:, None], (3, 4))[shown]
        np.testing.assert_array_equal(artist(figure, panel, "heads").get_array(), layers)
        ties = np.stack([kind.baseline_mean[~shown], kind.treatment_mean[~shown]], axis=1)
        np.testing.assert_allclose(artist(figure, panel, "ties").get_offsets(), ties)
        x, y = artist(figure, panel, "diagonal").get_data()
        np.testing.assert_array_equal(x, y)
        assert f"{kind.improved_count} better" in figure.axes[panel].get_title(loc="left")


def test_flagged_heads_are_ringed() -> None:
    sigma = np.full((2, 1, 3, 4), 0.9)
    sigma[:, :, 0, :2] = 0.3
    figure = draw(comparison(sigma_stage1=sigma))
    assert len(artist(figure, 0, "flagged").get_offsets()) == 2


def test_the_foot_names_the_run() -> None:
    result = comparison()
    assert "0123456789ab" in words(draw(result))
    assert "snapkv b=64 a=0.25 w=32 max7 query · attention | two-stage" in words(draw(result))
    assert "random weights" not in words(draw(result)).lower()


def test_random_weights_are_said_in_the_figure() -> None:
    figure = draw(comparison(random_weights=True))
    assert figure.get_suptitle() == "random weights"
    assert "RANDOM WEIGHTS" in words(figure)


def test_it_is_as_wide_as_one_column_or_two() -> None:
    assert draw(comparison()).get_figwidth() == pytest.approx(174 / 25.4)
    assert draw(comparison(), 84).get_figwidth() == pytest.approx(84 / 25.4)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_text_stays_text_and_metadata_names_the_run(suffix: str) -> None:
    result = comparison()
    drawn = render(draw(result), suffix, metadata=style.metadata(result.identity, suffix))
    encoding = "utf-16-be" if suffix == "pdf" else "ascii"
    assert "0123456789ab".encode(encoding) in drawn
    if suffix == "svg":
        assert b">layer<" in drawn


ZERO, TINY = np.zeros((2, 1, 3, 4)), np.full((2, 1, 3, 4), 1e-9)


@pytest.mark.parametrize(
    "result",
    [
        comparison(layers=1, heads=1),
        comparison(layers=1, heads=8),
        comparison(layers=32, heads=32),
        comparison(samples=1),
        comparison(perturbation_isolated=ZERO),
        comparison(perturbation_isolated=np.concatenate([ZERO[:1], TINY[:1]])),
        comparison(perturbation_propagated=TINY),
        comparison(sigma_stage1=TINY),
    ],
    ids=["one head", "one layer", "1024 heads", "one sample", "all zero", "zero baseline", "all tied", "all flagged"],
)
def test_odd_data_give_a_figure(result: HeadComparison) -> None:
    assert len(render(draw(result))) > 1000


def test_heads_at_zero_are_drawn_on_the_edge_and_counted() -> None:
    values = np.full((2, 1, 3, 4), 2.0)
    values[0, 0, 1, 1] = 0
    assert "1 head below" in words(draw(comparison(perturbation_isolated=values)))

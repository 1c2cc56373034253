from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from perturbkv.analyses.heads.head_comparison import HeadComparison, summarise
from perturbkv.analyses.heads.heads import HeadComparisons
from perturbkv.analyses.identity import identity
from perturbkv.figures import style
from perturbkv.figures.heads import draw_pair
from perturbkv.figures.heads import draw_panels as draw_pairs
from perturbkv.trace import SampleTrace
from tests.support.artists import artist, render, words
from tests.support.measured import config, hand_made
from tests.support.traces import run_config, sample_trace, trace


def comparison(
    layers: int = 3, heads: int = 4, samples: int = 2, random_weights: bool = False, **arrays: np.ndarray
) -> HeadComparison:
    made = [sample_trace(f"s{i}", layers=layers, heads=heads, seed=i) for i in range(samples)]
    made = [SampleTrace(sample.sample_id, {**sample.arrays, **arrays}) for sample in made]
    return summarise(trace(*made, random_weights=random_weights), *run_config().configs)


def test_points_are_the_means_of_the_heads() -> None:
    result = comparison()
    figure = draw_pair(result)
    for panel, kind in enumerate((result.isolated, result.propagated)):
        low, high = figure.axes[panel].get_xlim()
        both = np.stack([kind.baseline_mean, kind.treatment_mean])
        inside = ((both >= low) & (both <= high)).all(axis=0)
        assert (~inside).sum() <= 1
        shown, tied = inside & (kind.verdict != 0), inside & (kind.verdict == 0)
        expected = np.stack([kind.baseline_mean[shown], kind.treatment_mean[shown]], axis=1)
        np.testing.assert_allclose(artist(figure, panel, "heads").get_offsets(), expected)
        layers = np.broadcast_to(np.arange(3)[:, None], (3, 4))[shown]
        np.testing.assert_array_equal(artist(figure, panel, "heads").get_array(), layers)
        ties = np.stack([kind.baseline_mean[tied], kind.treatment_mean[tied]], axis=1)
        np.testing.assert_allclose(artist(figure, panel, "ties").get_offsets(), ties)
        x, y = artist(figure, panel, "diagonal").get_data()
        np.testing.assert_array_equal(x, y)
        assert f"{kind.improved} better" in figure.axes[panel].get_title(loc="left")


def test_flagged_heads_are_ringed() -> None:
    sigma = np.full((2, 1, 3, 4), 0.9)
    sigma[:, :, 0, :2] = 0.3
    figure = draw_pair(comparison(sigma_stage1=sigma))
    assert len(artist(figure, 0, "flagged").get_offsets()) == 2


def test_the_foot_names_the_run() -> None:
    result = comparison()
    assert "0123456789ab" in words(draw_pair(result))
    assert "snapkv b=64 a=0.25 w=32 max7 query · attention | two-stage" in words(draw_pair(result))
    assert "random weights" not in words(draw_pair(result)).lower()


def test_random_weights_are_said_in_the_figure() -> None:
    figure = draw_pair(comparison(random_weights=True))
    assert figure.legends[0].get_title().get_text() == "random weights"
    assert "RANDOM WEIGHTS" in words(figure)


def test_it_is_as_wide_as_one_column_or_two() -> None:
    assert draw_pair(comparison()).get_figwidth() == pytest.approx(174 / 25.4)
    assert draw_pair(comparison(), 84).get_figwidth() == pytest.approx(84 / 25.4)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_text_stays_text_and_metadata_names_the_run(suffix: str) -> None:
    result = comparison()
    drawn = render(draw_pair(result), suffix, metadata=style.metadata(result.identity, suffix))
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
    assert len(render(draw_pair(result))) > 1000


def test_heads_at_zero_are_drawn_on_the_edge_and_counted() -> None:
    values = np.full((2, 1, 3, 4), 2.0)
    values[0, 0, 1, 1] = 0
    figure = draw_pair(comparison(perturbation_isolated=values))
    assert "1 head outside (triangle)" in words(figure)
    (edge,) = artist(figure, 0, "outside").get_offsets()
    assert edge[0] == figure.axes[0].get_xlim()[0]


def spread(*far: float) -> np.ndarray:
    """(config, step, layer, head): heads from 1 to 10, the first of them as `far` says, both sides alike."""
    heads = np.geomspace(1, 10, 120)
    heads[: len(far)] = far
    return np.stack([heads, heads * 0.9]).reshape(2, 1, 10, 12)


def decades(panel: int, *far: float) -> tuple[float, int]:
    """How many decades a panel's axis spans, and how many heads lie outside."""
    figure = draw_pair(comparison(10, 12, perturbation_isolated=spread(*far), perturbation_propagated=spread(*far)))
    low, high = figure.axes[panel].get_xlim()
    outside = [points for points in figure.axes[panel].collections if points.get_gid() == "outside"]
    return np.log10(high / low), sum(len(points.get_offsets()) for points in outside)


@pytest.mark.parametrize("panel", [0, 1])
def test_one_far_head_does_not_empty_the_axes(panel: int) -> None:
    alone, _ = decades(panel)
    assert alone < 1.3
    assert decades(panel, 0.05) == (pytest.approx(alone, abs=0.05), 1)
    assert decades(panel, 400.0) == (pytest.approx(alone, abs=0.1), 1)
    span, outside = decades(panel, 0.05, 0.06, 0.07)  # more than one in a hundred heads: the axes hold them
    assert (span > 2, outside) == (True, 0)
    assert decades(panel, 0.8)[1] == 0  # it takes less than a seventh of the axes


def test_the_axes_name_the_selections_and_the_title_holds_the_sum() -> None:
    result = comparison()
    figure = draw_pair(result)
    assert figure.axes[0].get_xlabel() == "attention, isolated perturbation (L1)"
    assert figure.axes[0].get_ylabel() == "two-stage, isolated perturbation (L1)"
    said = words(figure)
    assert "baseline" not in said
    assert "treatment" not in said
    assert f"Σ L1 over attention's: {result.isolated.sum_ratio:.2f} (" in said  # two samples: a range


def pairs(width: int = 174) -> tuple[list[HeadComparison], Figure]:
    """Two budgets of 800 tokens: 0.2 keeps 160 of them, 128 fewer; given in the order that their labels sort."""
    configs = [config(name, budget) for budget in (0.2, 128) for name in ("attention", "two-stage")]
    size = (2, 4, 3, 4)
    arrays = {"perturbation_isolated": np.random.default_rng(0).uniform(1, 2, size),
              "held_share": np.broadcast_to([0.6, 0.6, 0.48, 0.48], (2, 4))}  # fmt: skip
    arrays["perturbation_propagated"] = arrays["perturbation_isolated"] * np.array([1, 1, 50, 50])[:, None, None]
    trace = hand_made(configs, arrays, 3, 4)
    results = [summarise(trace, *configs[:2]), summarise(trace, *configs[2:])]
    return results, draw_pairs(HeadComparisons(tuple(results), identity(trace, configs)), width)


@pytest.mark.parametrize("width", [84, 174])
def test_pairs_stand_side_by_side_in_order_of_what_they_hold(width: int) -> None:
    results, figure = pairs(width)
    for panel, result in enumerate(reversed(results)):
        title, kinds = figure.axes[panel].get_title(loc="left"), (result.isolated, result.propagated)
        assert title.startswith(f"b={['128', '0.2'][panel]}\ncache share {result.cache_shares[0]:.2f}\n")
        assert all(f"{100 * kind.better_share:.0f} %" in title for kind in kinds)
        assert all(f"{kind.sum_ratio:.2f}" in title for kind in kinds)
        points = artist(figure, panel, "heads").get_offsets()
        kind, shown = result.propagated, result.propagated.verdict != 0
        np.testing.assert_allclose(points, np.stack([kind.baseline_mean[shown], kind.treatment_mean[shown]], axis=1))
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert figure.axes[0].get_xlim()[0] < 1.1
    assert figure.axes[0].get_xlim()[1] > 90


def test_pairs_say_once_what_all_share() -> None:
    _, figure = pairs()
    assert "a=0.25 w=32 max7 query" in " ".join(figure.legends[0].get_title().get_text().split())
    assert not any("max7" in axes.get_title(loc="left") for axes in figure.axes)


@pytest.mark.slow
@pytest.mark.parametrize("width", [84, 174])
def test_twelve_pairs_fit_a_page(width: int) -> None:
    results, _ = pairs()
    figure = draw_pairs(HeadComparisons(tuple(results * 6), results[0].identity), width)
    assert figure.get_figheight() * 25.4 <= 240
    assert len(render(figure)) > 1000


def test_pairs_are_a_file() -> None:
    assert len(render(pairs(84)[1])) > 1000

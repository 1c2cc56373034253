"""Heat maps of retrieval, levels of perturbation, curves over steps: their artists hold the result's numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from perturbkv.analyses.horizon import horizon
from perturbkv.analyses.horizon.growth import KINDS
from perturbkv.analyses.needle import needle
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.configs.entry_counts import Budget
from perturbkv.figures import horizon as horizon_figure
from perturbkv.figures import needle as depths_figure
from perturbkv.figures import needle as needle_figure
from perturbkv.figures import needle as retrieval_figure
from perturbkv.trace import Trace
from tests.analyses.test_needle_and_horizon_by_hand import MOVED, growing, made, ranked
from tests.analyses.test_needle_and_horizon_by_hand import SCORES as RANKED
from tests.support.artists import artist, artists, render, words

WIDTHS = pytest.mark.parametrize("width", [84, 174])
SCORES = [[1, 0], [1, 1], [0, 0], [0, 1], [0, 0], [0, 0]]
LEVELS = [[0.1, 0.9], [0.2, 0.3], [0.8, 0.7], [0.5, 0.2], [0.4, 0.6], [0.7, 0.8]]


def answered() -> Trace:
    return made(SCORES, [1, 1, 1, 1, 0, 1], LEVELS)


@WIDTHS
def test_a_map_per_method_holds_its_grid(width: int) -> None:
    result = needle.needle(answered())
    figure = needle_figure.draw_needle(result, width)
    digits = needle_figure.draw_digits(result, width)
    for panel, method in enumerate((result.full, *result.methods)):
        np.testing.assert_allclose(artist(figure, panel, "map").get_array(), method.grid)
        np.testing.assert_allclose(artist(digits, panel, "map").get_array(), method.digits_grid)
        assert [label.get_text() for label in figure.axes[panel].get_xticklabels()] == ["100", "200"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "1"]
    said = words(figure)
    assert "Needle in noise, regular" in said
    assert "full cache\n83 %" in said
    assert "attention\n33 %" in said
    assert "attention\n67 %" in words(digits)
    assert len(render(figure)) > 1000


@WIDTHS
def test_cells_hold_two_decimals(width: int) -> None:
    figure = needle_figure.draw_needle(needle.needle(answered()), width)
    cells = [text.get_text() for text in figure.axes[0].texts]
    assert "1.00" in cells
    assert all(len(cell) == 4 for cell in cells if cell)


@WIDTHS
def test_a_dot_per_method_and_depth_is_the_share_found_over_all_lengths(width: int) -> None:
    """Six prompts run through two depths and two lengths in turns: the depth is 0, 1, 0, 1, …"""
    trace = answered()
    figure = depths_figure.draw_needle_depths(needle.needle(trace), width)
    scores = np.column_stack([[1, 1, 1, 1, 0, 1], SCORES])  # (sample, method), the full cache first
    for depth in range(2):
        expected = scores[depth::2].mean(axis=0)
        boxes = [box for box in figure.axes[depth].containers if box.lines[0].get_gid() == "score"]
        np.testing.assert_allclose([float(box.lines[0].get_xdata()[0]) for box in boxes], expected)
        assert [text.get_text() for text in figure.axes[depth].texts] == [f"{share:.2f}" for share in expected]
        assert figure.axes[depth].get_title(loc="left") == f"depth {depth}"
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["full cache", "attention", "two-stage"]


@WIDTHS
def test_when_all_is_lost_the_panel_says_so(width: int) -> None:
    trace = ranked([[0, 0, 0]] * 4, [1, 1, 1, 1], MOVED)
    trace.arrays["digits"][:] = 0  # type: ignore[index]
    figure = retrieval_figure.draw_retrieval(needle.needle(trace), width)
    assert "whole number: every method lost all" in words(figure)
    assert "leading digits: every method lost all" in words(figure)
    trace.arrays["digits"][:] = [0.1, 0.3, 0.6]  # type: ignore[index]
    figure = retrieval_figure.draw_retrieval(needle.needle(trace), width)
    axes = figure.axes[0]
    assert "\nwhole number: every method lost all" in axes.get_title(loc="left")
    assert [text.get_text() for text in axes.texts] == ["circular: nearly the score"]  # nothing over the points


@WIDTHS
def test_words_of_the_correlations_touch_no_point(width: int) -> None:
    trace = ranked(RANKED, [1, 1, 1, 0], MOVED)
    figure = retrieval_figure.draw_retrieval(needle.needle(trace), width)
    render(figure)
    axes = figure.axes[0]
    (words_,) = [text.get_window_extent() for text in axes.texts if "circular" in text.get_text()]
    rows = sorted({float(box.lines[0].get_ydata()[0]) for box in axes.containers})
    heights = [axes.transData.transform((0, row))[1] for row in rows]
    assert not any(words_.y0 - 3 < height < words_.y1 + 3 for height in heights)


@WIDTHS
def test_each_budget_shows_the_rank_correlations_of_its_measures(width: int) -> None:
    trace = ranked(RANKED, [1, 1, 1, 0], MOVED)
    trace.arrays["held_share"] = np.tile([0.48, 0.48, 0.51], (4, 1))  # type: ignore[index]
    result = needle.needle(trace)
    figure = retrieval_figure.draw_retrieval(result, width)
    (link,) = result.correlation.budgets
    drawn = {box.lines[0].get_gid(): float(box.lines[0].get_xdata()[0]) for box in figure.axes[0].containers}
    told = {f"{one.measure} {one.outcome}": one.rho for one in (*link.correlations, *link.circular)}
    assert drawn == pytest.approx(told)
    said = words(figure)
    assert "b=64, 3 methods; cache share 0.48 to 0.51\nn = 2 (number), 2 (digits)" in said
    assert "circular: nearly the score" in said
    assert "deciding ones of the 3 prompts that the full cache answers" in " ".join(said.split())


@WIDTHS
def test_curves_and_maps_of_growth(width: int) -> None:
    result = horizon.horizon(growing(7), ["attention", "two-stage"])
    figure = horizon_figure.draw(result, width)
    for panel, kind in enumerate(KINDS):
        for line, config in zip(artists(figure, panel, kind), result.configs, strict=True):
            np.testing.assert_allclose(line.get_ydata(), config.curves[kind].relative)
    assert "everything kept: 1.0e-02" in words(figure)
    for line, config in zip(artists(figure, 2, "kl"), result.configs, strict=True):
        np.testing.assert_allclose(line.get_ydata(), config.kl)
    maps = horizon_figure.draw_heads(result, width)
    for panel in range(2):
        np.testing.assert_allclose(artist(maps, panel, "map").get_array(), [[1, -1], [0, 0]])
        np.testing.assert_array_equal(artist(maps, panel, "marks").get_offsets(), [[0.5, 0.5]])
    assert "grows 1, shrinks 1" in words(maps)
    assert "4 heads" in words(maps)


def budgets_of(count: int) -> horizon.Horizon:
    """Both selections at so many budgets, the largest first, with a band of 0.1 to 3 nat around every KL."""
    result = horizon.horizon(growing(7), ["attention", "two-stage"])
    many = [
        dataclasses.replace(
            config,
            config=dataclasses.replace(config.config, budget=Budget(2**power)),
            cache_share=0.1 * power,
            kl_interval=Interval(np.full(result.steps, 0.1), np.full(result.steps, 3.0)),
        )
        for power in reversed(range(6, 6 + count))
        for config in result.configs
    ]
    return dataclasses.replace(result, configs=tuple(many))


def test_colour_tells_the_selection_and_dash_the_budget() -> None:
    figure = horizon_figure.draw(budgets_of(3), 174)
    lines = artists(figure, 0, "propagated")
    looks = [(line.get_color(), line.get_linestyle()) for line in lines]
    assert len(set(looks)) == 6
    assert len({colour for colour, _ in looks}) == 2
    assert len({dash for _, dash in looks}) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "attention", "two-stage", "b=64", "b=128", "b=256",
    ]  # fmt: skip


@WIDTHS
def test_more_budgets_than_dashes_get_a_row_of_panels_each_in_order_of_what_they_hold(width: int) -> None:
    figure = horizon_figure.draw(budgets_of(4), width)
    assert len(figure.axes) == 12
    firsts = [axes.get_title(loc="left").split(":")[0] for axes in figure.axes[::3]]
    assert firsts == ["b=64", "b=128", "b=256", "b=512"]
    assert len({axes.get_ylim() for axes in figure.axes[2::3]}) == 1


def test_kl_has_a_band() -> None:
    bands = artists(horizon_figure.draw(budgets_of(1), 174), 2, "kl band")
    assert len(bands) == 2
    corners = bands[0].get_paths()[0].vertices[:, 1]
    assert (corners.min(), corners.max()) == (0.1, 3.0)


def test_the_mean_kl_has_an_interval_at_each_step_that_holds_it() -> None:
    for config in horizon.horizon(growing(7), ["attention", "two-stage"]).configs:
        ends = config.kl_interval
        assert ends is not None
        assert ((ends.low <= config.kl) & (config.kl <= ends.high)).all()


def test_growth_is_on_a_signed_map_whose_clipped_ends_are_arrows() -> None:
    result = budgets_of(1)
    curve = result.configs[0].curves["propagated"]
    for growth, extend in ((9.0, "max"), (0.1, "min"), (3.9, "neither")):
        grown = dataclasses.replace(curve, head_growth=np.array([[growth, 1.0], [1.0, 1.0]]))
        config = dataclasses.replace(result.configs[0], curves={**result.configs[0].curves, "propagated": grown})
        figure = horizon_figure.draw_heads(dataclasses.replace(result, configs=(config,)), 174)
        assert artist(figure, 0, "map").colorbar.extend == extend
    assert artist(figure, 0, "map").get_clim() == (-2, 2)
    red, green, blue, _ = artist(figure, 0, "map").cmap(0.5)
    assert min(red, green, blue) > 0.9  # no growth is nearly white


@pytest.mark.slow
@WIDTHS
def test_odd_runs_are_drawn(width: int) -> None:
    nothing = made([[1, 0]], [0], [[0.1, 0.2]])
    figure = retrieval_figure.draw_retrieval(needle.needle(nothing), width)
    assert "no budget of three methods or more" in words(figure)
    three = ranked([[1, 1, 1]], [1], [[0.1, 0.2, 0.3]])
    alike = retrieval_figure.draw_retrieval(needle.needle(three), width)
    assert "whole number: no method lost any" in words(alike)
    zero = made([[1, 0]], [1], [[0.0, 0.0]])
    for trace in (nothing, zero):
        render(needle_figure.draw_needle(needle.needle(trace), width))
        render(retrieval_figure.draw_retrieval(needle.needle(trace), width))
    one = growing(1)
    render(horizon_figure.draw(horizon.horizon(one, ["attention"]), width))
    for name in ("perturbation_propagated", "perturbation_isolated", "noise_floor", "logit_kl"):
        one.arrays[name][:] = 0  # type: ignore[index]
    result = horizon.horizon(one, ["attention"])
    render(horizon_figure.draw(result, width))
    render(horizon_figure.draw_heads(result, width))

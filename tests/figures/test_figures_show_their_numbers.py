"""Each figure's artists hold the numbers of the result that it was drawn from, for one column and for two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.figure import Figure

from perturbkv.analyses.ablation import ingredients
from perturbkv.analyses.ablation.ablation import Ablation, ablation
from perturbkv.analyses.bounds import assumption, bound_tightness
from perturbkv.analyses.bounds.assumption import READINGS
from perturbkv.analyses.bounds.ratios import LEVELS, MASS_EDGES, RATIOS
from perturbkv.analyses.identity import identity
from perturbkv.analyses.layers import budget_curves
from perturbkv.analyses.layers import drift as layers
from perturbkv.analyses.layers.layers import DriftSeries, SampleSeries
from perturbkv.analyses.sides import series
from perturbkv.figures import ablation as ablation_figure
from perturbkv.figures import bounds as assumption_figure
from perturbkv.figures import bounds as bounds_figure
from perturbkv.figures import layers as budgets_figure
from perturbkv.figures import layers as layers_figure
from perturbkv.figures import layers as samples_figure
from perturbkv.storage.trace.trace_file import read_trace
from tests.support import measured
from tests.support.artists import artist, artists, render, words

TRACE = read_trace(measured.MEASURED)
PAIRS, _ = series(TRACE.run, "attention", "two-stage")
SHOWN = identity(TRACE, [config for pair in PAIRS for config in pair])
WIDTHS = pytest.mark.parametrize("width", [84, 174])
MEDIAN = LEVELS.index(0.5)


@WIDTHS
def test_assumption_maps_hold_sigma_and_dots_where_it_is_at_most_a_half(width: int) -> None:
    result = assumption.assumption(TRACE)
    figure = assumption_figure.draw_assumption(result, width)
    readings = list(READINGS)
    order = (
        [(config, name) for config in result.configs for name in readings]
        if width == 84
        else [(config, name) for name in readings for config in result.configs]
    )
    assert figure.get_figwidth() == pytest.approx(width / 25.4)
    for panel, (config, name) in enumerate(order):
        reading = config.readings[name]
        np.testing.assert_allclose(artist(figure, panel, "map").get_array(), reading.mean)
        dots = artist(figure, panel, "marks").get_offsets()
        np.testing.assert_array_equal(dots, np.argwhere(reading.is_weak)[:, ::-1] + 0.5)
        assert f"{100 * reading.share:.0f} %" in figure.axes[panel].get_title(loc="left")


@WIDTHS
def test_ratios_are_medians_with_flagged_ones_beside(width: int) -> None:
    result = bound_tightness.bound_tightness(TRACE, "attention-unpooled")
    figure = bounds_figure.draw_bound_tightness(result, width)
    for name in RATIOS:
        for gid, kind in ((name, "evidence"), (f"flagged {name}", "flagged")):
            medians = [getattr(config.spreads[name], kind)[MEDIAN] for config in result.shown]
            drawn = [float(line.get_ydata()[0]) for line in artists(figure, 0, gid)]
            np.testing.assert_allclose(drawn, [median for median in medians if median > 0])


def test_tightness_against_mass_is_drawn_where_bins_are_full() -> None:
    result = bound_tightness.bound_tightness(TRACE, "random")
    figure = bounds_figure.draw_bound_tightness(replace(result, agreements=()), 174)
    for config in result.shown:
        x, y = artist(figure, 1, f"mass {config.config.label()}").get_data()
        np.testing.assert_allclose(x, (MASS_EDGES[:-1] + MASS_EDGES[1:]) / 2)
        full = config.mass.count >= 10
        np.testing.assert_allclose(y[full], config.mass.quantiles[MEDIAN][full])
        assert np.isnan(y[~full]).all()
    assert "needs two-stage beside attention" in words(figure)


@WIDTHS
def test_the_bounds_foot_tells_spreads_from_intervals(width: int) -> None:
    result = bound_tightness.bound_tightness(TRACE, "two-stage")
    drawn = words(bounds_figure.draw_bound_tightness(result, width))
    assert max(map(len, drawn.splitlines())) <= width  # a character of the foot is a millimetre wide, or less
    foot = " ".join(drawn.split())
    assert "median, quartiles (bars) over samples and heads" in foot
    assert "third: bars, bands and brackets: ranges of single samples over n = 3 samples" in foot


def test_bounds_in_one_column_are_at_most_170_mm_tall_and_carry_few_bars() -> None:
    result = bound_tightness.bound_tightness(TRACE, "two-stage")
    figure = bounds_figure.draw_bound_tightness(result, 84)
    assert figure.get_figheight() * 25.4 <= 170
    bars = [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) == 2]
    assert len(bars) <= 1 + len(result.shown) * len(RATIOS)  # the line at 1, and a bar per ratio


def test_symbols_are_typeset_without_underscores() -> None:
    result = bound_tightness.bound_tightness(TRACE, "two-stage")
    figure = bounds_figure.draw_bound_tightness(result, 174)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert r"$\hat{\mathrm{θ}}$/$\hat{\mathrm{θ}}_{\mathrm{relax}}$" in labels
    assert not any("θ̂_relax" in label for label in labels)


@pytest.mark.slow
@WIDTHS
def test_counts_of_heads_stand_clear_of_axes_lines_and_each_other(width: int) -> None:
    """Five budgets with five digits each: every label lies within the panel and below the line at a half."""
    result = bound_tightness.bound_tightness(TRACE, "two-stage")
    one = result.agreements[0]
    many = [replace(found, values=10_286, samples=40, share=0.9) for found in one.pairs]
    budgets = (0.025, 0.05, 0.1, 0.2, 0.4)
    five = [
        replace(one, configs=(measured.config("attention", budget, window=8),), pairs=tuple(many)) for budget in budgets
    ]
    figure = bounds_figure.draw_bound_tightness(replace(result, agreements=tuple(five)), width)
    render(figure)  # lays it out
    axes = figure.axes[2]
    boxes = [text.get_window_extent() for text in axes.texts if "in 40" in text.get_text()]
    frame, half = axes.get_window_extent(), axes.transData.transform((0, 0.5))[1]
    assert len(boxes) == 5
    assert boxes[0].x0 > frame.x0
    assert boxes[-1].x1 < frame.x1
    assert all(box.y1 < half for box in boxes)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_budgets_stand_in_order_of_what_they_hold() -> None:
    """A budget of 0.2 of 800 tokens keeps more than 128."""
    configs = [measured.config(name, budget) for budget in (0.2, 128) for name in ("attention", "two-stage")]
    held = np.broadcast_to([0.6, 0.6, 0.48, 0.48], (2, 4))
    trace = measured.hand_made(configs, {"held_share": held, "theta": np.full((2, 4, 2, 2), 1e6)}, 2, 2)
    shown = assumption_figure.draw_assumption(assumption.assumption(trace)).axes
    assert [axes.get_title(loc="left").split()[0].strip(",") for axes in shown[:2]] == ["b=128", "b=0.2"]
    (together,) = series(trace.run, "attention", "two-stage")
    figure = samples_figure.draw_last_layer(
        SampleSeries(tuple(measured.last_layer(trace, *pair) for pair in together), SHOWN)
    )
    assert [axes.get_title(loc="left").split(",")[0] for axes in figure.axes] == ["b=128", "b=0.2"]


def test_picks_of_one_stage_1_are_filled_with_every_bound_and_those_against_attention_hollow() -> None:
    names = ("attention", "two-stage-uniform", "two-stage", "random")
    size = (5, len(names), 2, 2)
    draw = np.random.default_rng(1)
    arrays = {name: draw.uniform(low, low + 1, size) for name, low in
              (("perturbation_isolated", 1), ("theta", 3), ("theta_hat", 5), ("theta_hat_relax", 7))}  # fmt: skip
    arrays |= {name: draw.uniform(0.6, 1, size) for name in ("sigma_stage1", "retained_mass")}
    trace = measured.hand_made([measured.config(name) for name in names], arrays, layers=2, heads=2)
    result = bound_tightness.bound_tightness(trace)
    (agreement,) = result.agreements
    figure = bounds_figure.draw_bound_tightness(result, 174)
    lines = {box.lines[0].get_gid(): box.lines[0] for box in figure.axes[2].containers}
    filled, hollow = ({f"{name} {bound}" for bound in bounds} for name, bounds in
                      (("one stage 1", ("θ", "θ̂", "1 − S")), ("attention", ("θ", "1 − S"))))  # fmt: skip
    assert set(lines) == filled | hollow
    for pair in agreement.pairs:
        if pair.second == "two-stage":
            name = "one stage 1" if pair.first == "two-stage-uniform" else "attention"
            line = lines[f"{name} {pair.bound}"]
            assert float(line.get_ydata()[0]) == pair.share
            assert (line.get_markerfacecolor() == "white") == (name == "attention")
    assert "20\nin 5" in words(figure)
    trace.arrays["sigma_stage1"][0] = 0.4  # type: ignore[index]
    figure = bounds_figure.draw_bound_tightness(bound_tightness.bound_tightness(trace), 174)
    assert {box.lines[0].get_gid() for box in figure.axes[2].containers} == hollow  # which need no σ
    assert "16\nin 4" in words(figure)


@WIDTHS
def test_heads_of_theorem_2_are_mapped(width: int) -> None:
    result = bound_tightness.bound_tightness(TRACE, "random")
    figure = bounds_figure.draw_heads(result, width)
    for panel, config in enumerate(result.shown):
        np.testing.assert_allclose(artist(figure, panel, "map").get_array(), config.spreads["L/θ"].by_head[1])
        marks = artist(figure, panel, "marks").get_offsets()
        assert len(marks) == (config.flagged_heads > 0.5).sum()


@WIDTHS
def test_layers_show_both_drifts_and_their_ratio(width: int) -> None:
    results = [layers.summarise(TRACE, *pair) for pair in PAIRS]
    figure = layers_figure.draw_layers(DriftSeries(tuple(results), SHOWN), width)
    for result in results:
        np.testing.assert_allclose(
            artist(figure, 0, f"baseline {result.baseline.label()}").get_ydata(), result.baseline_median_drift
        )
        drawn = artist(figure, 1, f"percent {result.baseline.label()}").get_ydata()
        np.testing.assert_allclose(drawn, 100 * result.ratio)
    assert figure.axes[1].get_yscale() == "log"
    for axes in figure.axes:  # two layers: none lies between them
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [0, 1]


@WIDTHS
def test_many_budgets_are_small_multiples_on_one_scale(width: int) -> None:
    first = layers.summarise(TRACE, *PAIRS[0])
    results = [
        replace(first, baseline=measured.config("attention", budget), cache_shares=(held, held))
        for budget, held in ((0.2, 0.6), (128, 0.48), (0.4, 1.2))
    ]
    results[0] = replace(results[0], ratio=results[0].ratio * 3)
    figure = layers_figure.draw_layers(DriftSeries(tuple(results), SHOWN), width)
    above, below = figure.axes[:3], figure.axes[3:6]
    assert [axes.get_title(loc="left") for axes in above] == ["b=128", "b=0.2", "b=0.4"]
    for column, result in enumerate((results[1], results[0], results[2])):
        drawn = artist(figure, column, f"treatment {result.baseline.label()}").get_ydata()
        np.testing.assert_allclose(drawn, result.treatment_median_drift)
        assert len([line for line in above[column].get_lines() if line.get_gid()]) == 2  # no other budget's lines
        drawn = artist(figure, 3 + column, f"percent {result.baseline.label()}").get_ydata()
        np.testing.assert_allclose(drawn, 100 * result.ratio)
    for row in (above, below):
        assert len({axes.get_ylim() for axes in row}) == 1
    assert below[0].get_ylabel() == "% of attention's, log"
    assert "cache share of b=128: 0.48, b=0.2: 0.60, b=0.4: 1.20" in " ".join(words(figure).split())


@WIDTHS
def test_samples_are_pairs_of_drifts_on_one_scale_and_ties_are_crosses(width: int) -> None:
    results = [measured.last_layer(TRACE, *pair) for pair in PAIRS]
    results[0] = replace(results[0], verdict=np.array([1, 0, -1]))
    figure = samples_figure.draw_last_layer(SampleSeries(tuple(results), SHOWN), width)
    for panel, result in enumerate(results):
        tied = result.verdict == 0
        for gid, drift in (("baseline", result.baseline_drift), ("treatment", result.treatment_drift)):
            np.testing.assert_allclose(artist(figure, panel, gid).get_offsets()[:, 1], drift[~tied])
        ties = artist(figure, panel, "ties").get_offsets()
        np.testing.assert_allclose(ties[:, 1], result.treatment_drift[tied])
        title = figure.axes[panel].get_title(loc="left")
        assert "cache share " in title
        assert f"mean × {result.treatment_drift.sum() / result.baseline_drift.sum():.2f} (" in title
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert "tied" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("shares", [(0.0296, 1.2), (0.05, 0.11), (0.3, 0.3), (0.028, 0.51)])
def test_budget_ticks_are_round_percentages(shares: tuple[float, float]) -> None:
    result = budget_curves.summarise(TRACE, ["attention"])
    curve = result[0]
    held = np.linspace(*shares, len(curve.budgets))
    figure = budgets_figure.draw_budget_curves(replace(result, members=(replace(curve, cache_shares=held),)), 174)
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert len(shown) >= 2
    for tick in shown:
        assert f"{tick:.1e}"[0:3] in ("1.0", "2.0", "2.5", "3.0", "4.0", "5.0")
    labels = [axes.xaxis.get_major_formatter()(tick) for tick in (2.5, 5, 10)]
    assert labels == ["2.5", "5", "10"]


@WIDTHS
def test_budget_curves_hold_drift_kl_and_agreement(width: int) -> None:
    result = budget_curves.summarise(TRACE, ["attention", "random"])
    figure = budgets_figure.draw_budget_curves(result, width)
    known = not any(np.isnan(curve.cache_shares).any() for curve in result)
    for panel, quantity in enumerate(("drift", "kl", "top1")):
        for curve in result:
            x, y = artist(figure, panel, f"{quantity} {curve.name}").get_data()
            np.testing.assert_allclose(x, 100 * (curve.cache_shares if known else curve.kept))
            np.testing.assert_allclose(y, getattr(curve.medians, quantity))


@WIDTHS
def test_ablation_points_are_ratios_to_the_baseline(width: int) -> None:
    found = ablation(TRACE)
    figure = ablation_figure.draw_ablation(found, width)
    for panel, result in enumerate(found.settings):
        for kind in ("isolated", "propagated"):
            ratios = [getattr(row, kind).sum_ratio for row in result.rows]
            boxes = [box for box in figure.axes[panel].containers if box.lines[0].get_gid() == kind]
            np.testing.assert_allclose([float(box.lines[0].get_xdata()[0]) for box in boxes], ratios)
            medians = [getattr(row, kind).median_ratio for row in result.rows]
            drawn = [float(line.get_xdata()[0]) for line in artists(figure, panel, f"median {kind}")]
            np.testing.assert_allclose(drawn, medians)
    assert "not measured" in words(figure)


@WIDTHS
@pytest.mark.parametrize("ratio", [0.8, 0.97, 5.0])
def test_an_ablation_of_two_rows_has_ticks_with_a_scale(width: int, ratio: float) -> None:
    (result, *_) = ingredients.settings(TRACE)
    kind = replace(result.rows[0].isolated, sum_ratio=ratio, median_ratio=ratio, sum_ratio_interval=None)
    rows = tuple(replace(row, isolated=kind, propagated=kind) for row in result.rows[:2])
    figure = ablation_figure.draw_ablation(Ablation((replace(result, rows=rows),), 0, SHOWN, ()), width)
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    shown = [axes.xaxis.get_major_formatter()(tick) for tick in axes.get_xticks() if low <= tick <= high]
    assert len({label for label in shown if label}) >= 3


@WIDTHS
def test_sigma_is_on_colours_that_part_at_a_half_and_dots_cover_little(width: int) -> None:
    figure = assumption_figure.draw_assumption(assumption.assumption(TRACE), width)
    colours = artist(figure, 0, "map").cmap
    assert artist(figure, 0, "map").get_clim() == (0, 1)
    assert min(colours(0.5)[:3]) > 0.9
    assert colours(0.2)[0] > colours(0.2)[2] + 0.3  # orange below
    assert colours(0.8)[2] > colours(0.8)[0] + 0.1  # purple above
    assert artist(figure, 0, "marks").get_sizes().max() <= 1


DRAWN: dict[str, tuple[Callable[[], Figure], list[str]]] = {
    "assumption": (
        lambda: assumption_figure.draw_assumption(assumption.assumption(TRACE)),
        ["layer", "head", "σ or S (attention mass), mean over samples", "S: all that is kept", "cache share"],
    ),
    "bounds": (
        lambda: bounds_figure.draw_bound_tightness(bound_tightness.bound_tightness(TRACE, "two-stage")),
        ["ratio (1 = tight)", "retained mass S (attention)", "share of heads (%)", "budget b (entries)"],
    ),
    "bounds by head": (
        lambda: bounds_figure.draw_heads(bound_tightness.bound_tightness(TRACE, "two-stage")),
        ["layer", "head", "L/θ, median over samples"],
    ),
    "layers": (
        lambda: layers_figure.draw_layers(DriftSeries(tuple(layers.summarise(TRACE, *pair) for pair in PAIRS), SHOWN)),
        ["decoder layer", "drift of the residual stream (L1)", "% of attention's drift (log axis)"],
    ),
    "samples": (
        lambda: samples_figure.draw_last_layer(
            SampleSeries(tuple(measured.last_layer(TRACE, *pair) for pair in PAIRS), SHOWN)
        ),
        ["sample, by attention", "last layer's drift (L1)"],
    ),
    "budgets": (
        lambda: budgets_figure.draw_budget_curves(budget_curves.summarise(TRACE, ["attention", "two-stage"])),
        ["(%)", "medians over samples", "last layer's drift (L1)", "KL(full ‖ evicted) (nat)", "share of samples"],
    ),
    "ablation": (
        lambda: ablation_figure.draw_ablation(Ablation(ingredients.settings(TRACE), 0, SHOWN, ())),
        ["Σ L1 over attention's (log axis)"],
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_axes_name_quantity_and_unit_and_the_foot_its_run(name: str) -> None:
    draw, labels = DRAWN[name]
    figure = draw()
    said = words(figure)
    for label in labels:
        assert label in said
    assert f"trace {TRACE.digest}" in said
    assert "n = 3 samples" in said  # each says of how many samples its intervals, or its ranges, are
    assert "3 samples · 1 failed" in said
    assert "random weights" in said

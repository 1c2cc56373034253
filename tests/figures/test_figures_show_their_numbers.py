"""Each figure's artists hold the numbers of the result that it was drawn from, for one column and for two."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.figure import Figure

from perturbkv.analyses import ablation, assumption, bound_tightness, budgets, last_layer, layers, rank_agreement
from perturbkv.analyses.bound_tightness import LEVELS, MASS_EDGES
from perturbkv.analyses.identity import identity
from perturbkv.analyses.pairing import series
from perturbkv.figures import ablation as ablation_figure
from perturbkv.figures import assumption as assumption_figure
from perturbkv.figures import bound_tightness as bounds_figure
from perturbkv.figures import budgets as budgets_figure
from perturbkv.figures import last_layer as samples_figure
from perturbkv.figures import layers as layers_figure
from perturbkv.storage.trace_file import read_trace
from tests.support import measured
from tests.support.artists import artist, artists, words

TRACE = read_trace(measured.MEASURED)
(PAIRS,) = series(TRACE.run, "attention", "two-stage")
SHOWN = identity(TRACE, [config for pair in PAIRS for config in pair])
WIDTHS = pytest.mark.parametrize("width", [84, 174])
MEDIAN = LEVELS.index(0.5)


@WIDTHS
def test_assumption_maps_hold_sigma_and_dots_where_it_is_at_most_a_half(width: int) -> None:
    result = assumption.summarise(TRACE)
    figure = assumption_figure.draw(result, width)
    readings = list(assumption.READINGS)
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
        np.testing.assert_array_equal(dots, np.argwhere(reading.failing)[:, ::-1] + 0.5)
        assert f"{100 * reading.share:.0f} %" in figure.axes[panel].get_title(loc="left")


@WIDTHS
def test_ratios_are_medians_with_flagged_ones_beside(width: int) -> None:
    result = bound_tightness.summarise(TRACE).of("attention-unpooled")
    figure = bounds_figure.draw(result, rank_agreement.summarise(TRACE), width)
    for name in bound_tightness.RATIOS:
        for gid, kind in ((name, "evidence"), (f"flagged {name}", "flagged")):
            medians = [getattr(config.spreads[name], kind)[MEDIAN] for config in result.configs]
            drawn = [float(line.get_ydata()[0]) for line in artists(figure, 0, gid)]
            np.testing.assert_allclose(drawn, [median for median in medians if median > 0])


def test_tightness_against_mass_is_drawn_where_bins_are_full() -> None:
    result = bound_tightness.summarise(TRACE).of("random")
    figure = bounds_figure.draw(result, (), 174)
    for config in result.configs:
        x, y = artist(figure, 1, f"mass {config.config.label()}").get_data()
        np.testing.assert_allclose(x, (MASS_EDGES[:-1] + MASS_EDGES[1:]) / 2)
        full = config.mass.count >= 10
        np.testing.assert_allclose(y[full], config.mass.quantiles[MEDIAN][full])
        assert np.isnan(y[~full]).all()
    assert "needs three or more selections" in words(figure)


@WIDTHS
def test_the_bounds_foot_tells_spreads_from_intervals(width: int) -> None:
    result = bound_tightness.summarise(TRACE).of("two-stage")
    drawn = words(bounds_figure.draw(result, rank_agreement.summarise(TRACE), width))
    assert max(map(len, drawn.splitlines())) <= width  # a character of the foot is a millimetre wide, or less
    foot = " ".join(drawn.split())
    assert "quartiles (thick), 5–95 % (thin) over samples and heads" in foot
    assert "third: bars, bands and brackets: ranges of single samples over n = 3 samples" in foot


def test_rank_correlations_are_filled_for_contenders_and_hollow_for_all() -> None:
    names = ("attention", "two-stage-uniform", "two-stage", "random")
    size = (5, len(names), 2, 2)
    draw = np.random.default_rng(1)
    arrays = {name: draw.uniform(low, low + 1, size) for name, low in
              (("perturbation_isolated", 1), ("theta", 3), ("theta_hat", 5), ("theta_hat_relax", 7))}  # fmt: skip
    arrays |= {name: draw.uniform(0.6, 1, size) for name in ("sigma_stage1", "retained_mass")}
    trace = measured.hand_made([measured.config(name) for name in names], arrays, layers=2, heads=2)
    (agreement,) = rank_agreement.summarise(trace)
    figure = bounds_figure.draw(bound_tightness.summarise(trace).of("two-stage"), [agreement], 174)
    lines = {box.lines[0].get_gid(): box.lines[0] for box in figure.axes[2].containers}
    assert len(lines) == len(agreement.correlations) == 6
    for ranked in agreement.correlations:
        line = lines[f"{'all' if 'random' in ranked.selections else 'contenders'} {ranked.bound}"]
        assert float(line.get_ydata()[0]) == ranked.evidence_mean
        assert (line.get_markerfacecolor() == "white") == ("random" in ranked.selections)
    assert "n=20\nin 5" in words(figure)
    trace.arrays["sigma_stage1"][0] = 0.4  # type: ignore[index]
    (few,) = rank_agreement.summarise(trace)
    figure = bounds_figure.draw(bound_tightness.summarise(trace).of("two-stage"), [few], 174)
    assert not figure.axes[2].containers
    assert "n=16\nin 4" in words(figure)
    assert "fewer than 5 samples have a head" in words(figure)


@WIDTHS
def test_heads_of_theorem_2_are_mapped(width: int) -> None:
    result = bound_tightness.summarise(TRACE).of("random")
    figure = bounds_figure.draw_heads(result, width)
    for panel, config in enumerate(result.configs):
        np.testing.assert_allclose(artist(figure, panel, "map").get_array(), config.spreads["L/θ"].by_head[1])
        marks = artist(figure, panel, "marks").get_offsets()
        assert len(marks) == (config.flagged_heads > 0.5).sum()


@WIDTHS
def test_layers_show_both_drifts_and_their_ratio(width: int) -> None:
    results = [layers.summarise(TRACE, *pair) for pair in PAIRS]
    figure = layers_figure.draw(results, SHOWN, width)
    for result in results:
        np.testing.assert_allclose(
            artist(figure, 0, f"baseline {result.baseline.label()}").get_ydata(), result.baseline_median
        )
        np.testing.assert_allclose(
            artist(figure, 0, f"treatment {result.baseline.label()}").get_ydata(), result.treatment_median
        )
        drawn = artist(figure, 1, f"reduction {result.baseline.label()}").get_ydata()
        np.testing.assert_allclose(drawn, result.ratio)
    assert figure.axes[1].yaxis_inverted()  # above is better
    for axes in figure.axes:  # two layers: none lies between them
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [0, 1]
    labels = [figure.axes[1].yaxis.get_major_formatter()(ratio) for ratio in (0.5, 1, 1.5)]
    assert labels == ["+50", "0", "−50"]


@WIDTHS
def test_samples_are_pairs_of_drifts(width: int) -> None:
    results = [last_layer.summarise(TRACE, *pair) for pair in PAIRS]
    figure = samples_figure.draw(results, SHOWN, width)
    for panel, result in enumerate(results):
        for gid, drift in (("baseline", result.baseline_drift), ("treatment", result.treatment_drift)):
            np.testing.assert_allclose(artist(figure, panel, gid).get_offsets()[:, 1], drift)
        assert "held / full " in figure.axes[panel].get_title(loc="left")


@WIDTHS
def test_budget_curves_hold_drift_kl_and_agreement(width: int) -> None:
    result = budgets.summarise(TRACE, ["attention", "random"])
    figure = budgets_figure.draw(result, width)
    known = not any(np.isnan(curve.held).any() for curve in result.curves)
    for panel, quantity in enumerate(("drift", "kl", "top1")):
        for curve in result.curves:
            x, y = artist(figure, panel, f"{quantity} {curve.name}").get_data()
            np.testing.assert_allclose(x, 100 * (curve.held if known else curve.kept))
            np.testing.assert_allclose(y, curve.medians[quantity])


@WIDTHS
def test_ablation_points_are_ratios_to_the_baseline(width: int) -> None:
    results = ablation.summarise(TRACE)
    figure = ablation_figure.draw(results, identity(TRACE, TRACE.run.configs), width)
    for panel, result in enumerate(results):
        for kind in ("isolated", "propagated"):
            ratios = [getattr(row.compared, kind).sum_ratio for row in result.rows]
            boxes = [box for box in figure.axes[panel].containers if box.lines[0].get_gid() == kind]
            np.testing.assert_allclose([float(box.lines[0].get_xdata()[0]) for box in boxes], ratios)
            medians = [getattr(row.compared, kind).median_ratio for row in result.rows]
            drawn = [float(line.get_xdata()[0]) for line in artists(figure, panel, f"median {kind}")]
            np.testing.assert_allclose(drawn, medians)
    assert "not measured" in words(figure) if width == 174 else "not measured" not in words(figure)


DRAWN: dict[str, tuple[Callable[[], Figure], list[str]]] = {
    "assumption": (
        lambda: assumption_figure.draw(assumption.summarise(TRACE)),
        ["layer", "head", "σ or S (attention mass), mean over samples", "S: all that is kept", "held /"],
    ),
    "bounds": (
        lambda: bounds_figure.draw(bound_tightness.summarise(TRACE).of("two-stage"), rank_agreement.summarise(TRACE)),
        ["ratio of bounds (1 = tight)", "retained mass S (attention)", "Spearman's ρ with L", "budget b (entries)"],
    ),
    "bounds by head": (
        lambda: bounds_figure.draw_heads(bound_tightness.summarise(TRACE).of("two-stage")),
        ["layer", "head", "L/θ, median over samples"],
    ),
    "layers": (
        lambda: layers_figure.draw([layers.summarise(TRACE, *pair) for pair in PAIRS], SHOWN),
        ["decoder layer", "drift of the residual stream (L1)", "reduction of drift (%, log ratio)"],
    ),
    "samples": (
        lambda: samples_figure.draw([last_layer.summarise(TRACE, *pair) for pair in PAIRS], SHOWN),
        ["sample, sorted by the baseline", "last layer's drift (L1)"],
    ),
    "budgets": (
        lambda: budgets_figure.draw(budgets.summarise(TRACE, ["attention", "two-stage"])),
        ["(%)", "medians over samples", "last layer's drift (L1)", "KL(full ‖ evicted) (nat)", "share of samples"],
    ),
    "ablation": (lambda: ablation_figure.draw(ablation.summarise(TRACE), SHOWN), ["L1 over the baseline's"]),
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
    assert "random weights" in figure.get_suptitle()

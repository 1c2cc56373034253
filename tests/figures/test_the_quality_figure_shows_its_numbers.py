"""Scores against what caches hold, and answers that part: every point, bar and line is a number of the result."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses.quality.divergence import divergence
from perturbkv.analyses.quality.quality import Quality, quality
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.figures.quality import drawn_columns
from perturbkv.selection.grid import configuration
from tests.analyses.test_answers_part_by_hand import ROWS
from tests.support.answers import row, written
from tests.support.artists import artist, artists, overlapping, render, words
from tests.support.graded import graded
from tests.support.measured import config

BUDGETS, HELD = (0.1, 0.2, 0.4), (0.1, 0.2, 0.4)
CONFIGS = tuple(config(selection, budget) for budget in BUDGETS for selection in ("attention", "two-stage"))
MANY = ("qasper", "narrativeqa", "musique", "hotpotqa", "trec", "triviaqa", "lcc")


def made(*names: str, held: bool = True) -> Quality:
    found = []
    for seed, name in enumerate(names):
        draw = np.random.default_rng(seed)
        found.append(
            graded(name, draw.random(6), draw.random((6, 6)), CONFIGS, held=np.repeat(HELD, 2) if held else ())
        )
    return quality(found)


def panel_of(figure: Figure, name: str) -> Axes:
    (found,) = [one for one in figure.axes if one.get_title(loc="left").startswith(name)]
    return found


@pytest.mark.parametrize("width", [84, 174])
def test_every_score_and_its_interval_is_drawn_where_its_cache_is(width: int) -> None:
    result = made("qasper", "multi_news")
    figure = result.plot(width)
    for column in drawn_columns(result):
        panel = panel_of(figure, column.name)
        for side, name in enumerate(("attention", "two-stage")):
            (drawn,) = [one for one in panel.containers if one[0].get_gid() == name]
            line, _, (bars,) = drawn
            means = [column.methods[2 * place + side] for place in range(3)]
            np.testing.assert_allclose(line.get_ydata(), [100 * mean.score for mean in means])
            np.testing.assert_allclose(line.get_xdata(), 100 * np.array(HELD))
            for mean, segment in zip(means, bars.get_segments(), strict=True):
                assert mean.score_interval is not None
                np.testing.assert_allclose(
                    segment[:, 1], [100 * mean.score_interval.low, 100 * mean.score_interval.high]
                )
        (full,) = [one for one in panel.get_lines() if one.get_gid() == "full cache"]
        np.testing.assert_allclose(full.get_ydata(), [100 * column.full] * 2)


def test_many_data_sets_are_drawn_by_kind_with_the_average_last() -> None:
    result = made(*MANY)
    names = [one.name for one in drawn_columns(result)]
    assert names == ["single-document QA", "multi-document QA", "few-shot", "code", "average"]
    assert [one.name for one in drawn_columns(made("needle"))] == ["needle"]
    figure = result.plot()
    assert sum(panel.axison for panel in figure.axes) == 5


def test_a_trace_that_tells_no_shares_is_drawn_by_budget() -> None:
    figure = made("qasper", held=False).plot()
    assert figure.axes[0].get_xlabel() == "budget × 100"
    np.testing.assert_allclose(figure.axes[0].containers[0][0].get_xdata(), 100 * np.array(BUDGETS))


@pytest.mark.parametrize("width", [84, 174])
def test_caches_of_one_size_stand_beside_each_other_where_they_are(width: int) -> None:
    configs = tuple(config(side, 0.4) for side in ("attention", "two-stage", "random", "value"))
    result = quality(graded("qasper", [1.0] * 6, np.full((6, 4), 0.5), configs, held=[1.2] * 4))
    figure = result.plot(width)
    render(figure)
    (panel,) = figure.axes
    low, high = panel.get_xlim()
    assert (low, high) == pytest.approx((60, 240))
    drawn = [one[0].get_transform().transform((120, 50))[0] for one in panel.containers]
    apart = np.diff(drawn) / figure.dpi * 72
    np.testing.assert_allclose(apart, 2)  # points
    assert np.mean(drawn) == pytest.approx(panel.transData.transform((120, 50))[0])
    for one in panel.containers:
        np.testing.assert_allclose(
            one[2][0].get_transform().transform((120, 50))[0], drawn[panel.containers.index(one)]
        )


def test_scores_of_nothing_are_drawn_on_the_whole_scale() -> None:
    none = quality(graded("qasper", [0.0], [[0.0] * 6], CONFIGS, held=np.repeat(HELD, 2)))
    assert none.plot().axes[0].get_ylim() == (0, 100)
    assert made("qasper").plot().axes[0].get_ylim()[0] <= 0


@pytest.mark.parametrize("width", [84, 174])
def test_the_foot_names_metric_and_cut(width: int) -> None:
    result = quality(graded("own.jsonl", [0.5] * 6, np.full((6, 6), 0.5), CONFIGS, max_tokens=1500,
                            dataset_options={"metrics": ["rouge-l"]}))  # fmt: skip
    foot = " ".join(words(result.plot(width)).split())
    assert "means of rouge-l, n = 6. Answers: at most 8 tokens. Prompts: cut to at most 1,500 tokens." in foot


def test_a_single_sample_has_points_without_bars() -> None:
    figure = quality(graded("qasper", [0.5], [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]], CONFIGS)).plot()
    assert all(not drawn[2] for drawn in figure.axes[0].containers)


@pytest.mark.parametrize("width", [84, 174])
def test_the_legend_lies_within_the_figure_whatever_methods_are_called(width: int) -> None:
    names = ("expected-attention(n_future=512)", "obcache-joint", "defensive-layer", "caote")
    configs = tuple(EvictionConfig(b, name, "attention", granularity="kv") for b in BUDGETS for name in names)
    draw = np.random.default_rng(0)
    figure = quality([graded("needle", draw.random(6), draw.random((6, len(configs))), configs)]).plot(width)
    render(figure)
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1


def test_few_sizes_of_caches_are_marked_on_the_axis() -> None:
    figure = made("needle").plot(174)
    render(figure)
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["10", "20", "40"]


@pytest.mark.parametrize("width", [84, 174])
@pytest.mark.parametrize("names", [("needle",), ("qasper", "multi_news", "lcc"), MANY], ids=len)
def test_nothing_that_is_written_lies_on_anything_else(names: tuple[str, ...], width: int) -> None:
    assert overlapping(made(*names).plot(width)) == []


WIDTHS = pytest.mark.parametrize("width", [84, 174])
TWELVE = tuple(
    configuration(budget, policy=policy, selection=selection)
    for budget in (64, 128, 256) for policy in ("snapkv", "adakv") for selection in ("attention", "two-stage")
)  # fmt: skip


@WIDTHS
def test_both_panels_hold_their_curves_and_bands(width: int) -> None:
    result = divergence(written(*ROWS))
    figure = result.plot(width)
    for one in result.configs:
        assert one.forced is not None
        alike, kl = (
            artist(figure, panel, f"{kind} {one.config.label()}") for panel, kind in enumerate(("alike", "kl"))
        )
        np.testing.assert_allclose(alike.get_ydata(), one.equal_prefix_shares(6)[0])
        np.testing.assert_allclose(kl.get_ydata(), one.forced.curve)
        np.testing.assert_allclose(kl.get_xdata(), range(6))
    assert len(artists(figure, 0, "alike band")) == len(artists(figure, 1, "kl band")) == 2
    assert "everything kept: 1.0e-09" in words(figure)
    assert overlapping(figure) == []
    assert len(render(figure)) > 1000


@pytest.mark.slow
@WIDTHS
def test_many_configurations_have_room_and_one_sample_without_kl_a_panel(width: int) -> None:
    rows = [row(f"s{place}", range(80), [[1]] * 12, [[0.1] * 80] * 12, TWELVE) for place in range(6)]
    figure = divergence(written(*rows, configs=TWELVE)).plot(width)
    assert artists(figure, 0, "alike band") == []
    assert overlapping(figure) == []
    alone = divergence(written(row("a", [1], [[2], [1]]))).plot(width)
    assert len(alone.axes) == 1
    assert overlapping(alone) == []
    empty = divergence(written(row("a", [], [[], []], [[], []]))).plot(width)
    assert len(render(empty)) > 1000

"""What stands in a figure is text that is read: foreign names, plain ticks, room for long names, a stamp on nothing."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from perturbkv.analyses.bounds.bound_tightness import BoundTightness, bound_tightness
from perturbkv.analyses.heads.heads import HeadComparisons, compare_heads
from perturbkv.analyses.quality.divergence import divergence
from perturbkv.analyses.tokens.tokens import tokens
from perturbkv.cli.saving import save_figure
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.figures import style
from perturbkv.figures.labels import sort_by_cache_share
from perturbkv.figures.style import symbols_to_tex, typeset
from perturbkv.trace import Trace
from tests.analyses.test_answers_part_by_hand import ROWS
from tests.figures.test_figures_show_their_numbers import DRAWN
from tests.figures.test_the_quality_figure_shows_its_numbers import made as graded_by
from tests.support import prompts
from tests.support.answers import written
from tests.support.artists import overlapping, words
from tests.support.measured import config, hand_made

WORDS = [r"$\frac{1", "$x_1^2$ $", r"a_b^c\d{e}~#%", "\x1b]0;owned\x07", "<b>&]]>--", "a\nb", "\ud800", "_hidden"]


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_every_format_holds_a_foreign_name_as_text(tmp_path: Path, word: str) -> None:
    trace = prompts.made(prompts.sample(word), model=word, dataset=word)
    results = [compare_heads(trace, "attention", ["two-stage"]), tokens(trace)]
    for number, result in enumerate(results):
        saved = save_figure(result.plot(), result.identity, tmp_path / str(number), ["png", "svg", "pdf"])
        (svg,) = [path for path in saved if path.endswith(".svg")]
        words = "".join("".join(ET.parse(svg).getroot().itertext()).split())
        shown = word.encode("unicode_escape").decode() if not word.isprintable() else word
        assert "".join(shown.split()) in words
        assert all(Path(path).stat().st_size > 1000 for path in saved)
    assert b"/Title" in (tmp_path / "0.pdf").read_bytes()


def test_only_symbols_of_ours_are_typeset() -> None:
    with style.use():
        axes = style.figure(84, 60).subplots()
        ours, theirs = axes.set_title(symbols_to_tex("θ̂ / L")), axes.set_xlabel(symbols_to_tex("θ̂ of $5"))
        plain = axes.set_ylabel("$5 and $6")
    assert not any(text.get_parse_math() for text in (ours, theirs, plain))
    typeset([ours, theirs])
    assert [text.get_parse_math() for text in (ours, theirs, plain)] == [True, False, False]


def shown(low: float, high: float) -> list[str]:
    """Labels of every tick, major and minor, of a log axis between two ends."""
    axes = Figure().subplots()
    axes.plot([0, 1], [low, high])
    style.set_log_axes(axes, y=True)
    axes.set_ylim(low, high)
    found = []
    for places, formatter in (
        (axes.yaxis.get_majorticklocs(), axes.yaxis.get_major_formatter()),
        (axes.yaxis.get_minorticklocs(), axes.yaxis.get_minor_formatter()),
    ):
        found += [formatter(place) for place in places if low <= place <= high]
    return [label for label in found if label]


@pytest.mark.parametrize(
    ("low", "high"), [(3.5, 8.5), (0.97, 1.04), (0.2, 14), (250, 6000), (0.004, 300), (1e-12, 1e6), (99, 101)]
)
def test_a_log_axis_has_three_to_nine_different_labels(low: float, high: float) -> None:
    labels = shown(low, high)
    assert 3 <= len(set(labels)) == len(labels) <= 9


def test_labels_are_numbers_without_powers_of_ten_where_these_are_short() -> None:
    assert not any("10" in label and "^" in label for label in shown(3.5, 8.5) + shown(250, 6000) + shown(0.02, 3))
    assert "1,000" in shown(250, 6000)


def test_large_and_small_numbers_are_powers() -> None:
    assert shown(1e6, 1e9) == ["10⁶", "10⁷", "10⁸", "10⁹"]
    assert {"10⁻⁵", "3×10⁻⁵"} <= set(shown(9e-6, 1.1e-4))


def test_symbols_have_no_underscore_of_their_own() -> None:
    assert symbols_to_tex("θ̂/θ̂_relax") == r"$\hat{\mathrm{θ}}$/$\hat{\mathrm{θ}}_{\mathrm{relax}}$"
    assert symbols_to_tex("Σ L / Σ ‖o_h‖₁") == r"Σ L / Σ $\Vert o_h\Vert_1$"


def test_what_holds_least_comes_first_and_nothing_moves_where_it_is_not_told() -> None:
    assert sort_by_cache_share([0.6, 0.48, 1.2], float) == [0.48, 0.6, 1.2]
    assert sort_by_cache_share(["b", "a"], lambda name: float("nan")) == ["b", "a"]


@pytest.mark.parametrize("width", [84, 174])
def test_no_line_of_the_foot_leaves_the_figure(width: int) -> None:
    words = " ".join(["share: mean of samples; tied: within two noise floors, or the same entries kept"] * 3)
    for line in style._wrap(f"a · {words} · b", width / 25.4):
        assert len(line) <= width  # a character of the foot is a millimetre wide, or less


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
    foot = " ".join(words(figure).split())
    assert "1 64 snapkv w=32 max7" in foot
    assert "adakv w=32 floor=0.3 by=caote(pool=max)" in foot


@pytest.mark.slow
@pytest.mark.parametrize("width", [84, 174])
def test_maps_of_seven_unlike_configurations_have_room_for_their_names(width: int) -> None:
    assert overlapping(bounds().plot_heads(width)) == []


@pytest.mark.parametrize("width", [84, 174])
@pytest.mark.parametrize("budgets", [(64,), (64, 128)], ids=["one pair", "four pairs"])
def test_heads_of_presses_have_room_for_their_names(budgets: tuple[int, ...], width: int) -> None:
    assert overlapping(heads(budgets).plot(width)) == []


def stamped(result: Any, width: int) -> Figure:
    return replace(result, identity=replace(result.identity, random_weights=True)).plot(width)


RESULTS: dict[str, Callable[[], Any]] = {
    "quality": lambda: graded_by("qasper", "multi_news"),
    "quality of one": lambda: graded_by("needle"),
    "divergence": lambda: divergence(written(*ROWS)),
}


@pytest.mark.parametrize("width", [84, 174])
@pytest.mark.parametrize("name", RESULTS)
def test_the_stamp_lies_on_nothing(name: str, width: int) -> None:
    result = RESULTS[name]()
    figure = stamped(result, width)
    assert "random weights" in words(figure)
    assert overlapping(figure) == []
    assert "random weights" not in words(result.plot(width))


@pytest.mark.parametrize("name", DRAWN)
def test_nor_in_the_figures_of_a_trace(name: str) -> None:
    figure = DRAWN[name][0]()
    assert "random weights" in words(figure)
    assert [pair for pair in overlapping(figure) if any("random weights" in text for text in pair)] == []

"""A log axis has ticks that a reader reads: plain numbers, at least three, not crowded, whatever it spans."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from perturbkv.figures import style
from perturbkv.figures.labels import sort_by_cache_share
from perturbkv.figures.style import symbols_to_tex


def shown(low: float, high: float) -> list[str]:
    """Labels of every tick, major and minor, of a log axis between two ends."""
    axes = Figure().subplots()
    axes.plot([0, 1], [low, high])
    style.log_axes(axes, y=True)
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

"""Every figure for a paper and for a talk: sizes of it and of its text, nothing cut off, its notes in the caption."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

import perturbkv as pk
from perturbkv.captions import CaptionedFigure, panel_sentence, to_latex
from perturbkv.errors import ConfigError, NarrowFigureError, UnknownNameError
from perturbkv.figures import FIGURES, STYLE_NAMES, style
from perturbkv.figures.finishing import MOST_FIGURE_MM, MOST_ROW_MM, finish
from tests.support.artists import words
from tests.support.every_figure import NAMES, plain, plot, result_of

MM, SLIDE_MM = 25.4, 338.7
LONG = ("Audit", "BudgetCurves", "Correlation", "Horizon", "Horizon.plot_heads", "Needle", "Needle.plot_digits",
        "Restriction")  # fmt: skip
"""Figures that take long to draw, or whose result does."""
SLIDES = ("BoundTightness", "Cliffs")
PAPER = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in NAMES]
TALK = [pytest.param(name, marks=() if name in SLIDES else pytest.mark.slow) for name in NAMES]
FOOT = ("95 % intervals", "single samples", "perturbkv")
"""What notes and the run's identity say."""


@cache
def laid_out(name: str, look: str, width_mm: float | None = None) -> CaptionedFigure:
    """A figure after its layout, each drawn once."""
    figure = plot(name, width_mm, look)
    figure.draw_without_rendering()
    return figure


def texts(figure: Figure) -> Iterator[Text]:
    """Every visible text with letters, once."""
    seen: set[int] = set()
    hidden = {id(text) for axes in figure.axes if not axes.axison for text in axes.findobj(Text)}
    kept = {id(text) for axes in figure.axes for text in axes.texts}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and id(text) not in seen | (hidden - kept):
            seen.add(id(text))
            yield text


def shown(figure: Figure) -> list[Text]:
    """The texts that are drawn: without ticks beyond an axis' ends."""
    beyond = set()
    for axes in figure.axes:
        for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(ends)
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            away = [tick for tick in ticks if not low <= tick.get_loc() <= high]
            beyond |= {id(label) for tick in away for label in (tick.label1, tick.label2)}
    return [text for text in texts(figure) if id(text) not in beyond]


def cut_off(figure: Figure) -> list[str]:
    """Texts beyond the figure's edge."""
    width, height = figure.bbox.width + 1.5, figure.bbox.height + 1.5
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown(figure)]
    return [text for text, box in boxes if min(box.x0, box.y0) < -1.5 or box.x1 > width or box.y1 > height]


def on_one_another(figure: Figure) -> list[tuple[str, str]]:
    """Texts that lie on another one."""
    boxes = [(text.get_text(), text.get_window_extent().padded(-1.5)) for text in shown(figure)]
    boxes = [(text, box) for text, box in boxes if box.width > 0 < box.height]
    return [(text, other) for place, (text, box) in enumerate(boxes) for other, second in boxes[place + 1 :]
            if box.overlaps(second)]  # fmt: skip


def rows(figure: Figure) -> int:
    """Number of rows of panels, by their middles."""
    boxes = [axes.get_position() for axes in figure.axes if axes.axison and not hasattr(axes, "_colorbar")]
    count, lowest = 0, 2.0
    for box in sorted(boxes, key=lambda box: -box.y1):
        if (box.y0 + box.y1) / 2 < lowest:
            count, lowest = count + 1, box.y0
    return max(1, count)


def check(figure: CaptionedFigure, least: float, most: float) -> None:
    """Text of these sizes, inside the figure, on no other text; notes are in the caption alone."""
    sizes = [round(text.get_fontsize(), 2) for text in shown(figure)]
    assert least <= min(sizes) and max(sizes) <= most, sizes
    assert cut_off(figure) == []
    assert on_one_another(figure) == []
    written = words(figure)
    assert not any(note in written for note in FOOT), written
    assert all("perturbkv" in text for text in figure.caption_texts().values())
    assert "\n" not in figure.caption and figure.caption.endswith(".")


@pytest.mark.parametrize("name", PAPER)
def test_a_paper_figure_is_84_mm_wide_low_and_legible(name: str) -> None:
    figure = laid_out(name, "paper", 84)
    assert figure.get_figwidth() * MM == pytest.approx(84)
    assert figure.get_figheight() * MM <= MOST_ROW_MM * rows(figure)
    assert figure.get_suptitle() in ("", "random weights")
    whole = {axes: title.split("\n") for axes, title in figure.titles.items()}
    assert all(" ".join(lines[:2]).split() == axes.get_title(loc="left").split()
               for axes, lines in whole.items() if axes.get_title(loc="left"))  # fmt: skip
    begun = (FIGURES[name][1], " ".join(figure.conclusion.split())[:40] or FIGURES[name][1])
    assert figure.caption.lower().startswith(tuple(text.lower() for text in begun))
    if rows(figure) <= 3:
        assert figure.get_figheight() * MM <= MOST_FIGURE_MM + 0.1
    check(figure, 7, 8)


@pytest.mark.parametrize("name", TALK)
def test_a_slide_has_large_text_where_it_fills_one_and_its_headline_on_top(name: str) -> None:
    figure = laid_out(name, "talk")
    assert figure.get_figwidth() * MM == pytest.approx(style.WIDE_MM)
    assert 9 / 16 - 1e-6 <= figure.get_figheight() / figure.get_figwidth() <= 1
    tops = [figure.get_suptitle(), *(legend.get_title().get_text() for legend in figure.legends)]
    assert [top for top in tops if top] in ([FIGURES[name][1]], [f"{FIGURES[name][1]} · random weights"])
    check(figure, 14 * style.WIDE_MM / SLIDE_MM, 17.5 * style.WIDE_MM / SLIDE_MM)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_paper_figure_of_two_columns_is_174_mm_wide(name: str) -> None:
    figure = laid_out(name, "paper")
    assert figure.get_figwidth() * MM == pytest.approx(174)
    assert figure.get_figheight() * MM <= MOST_ROW_MM * rows(figure)
    check(figure, 7, 8)


def test_what_is_too_large_or_beyond_or_on_another_text_is_found() -> None:
    with style.use(style.STYLES["paper"]):
        figure = style.figure(84, 40)
        figure.text(0.9, 0.5, "a text that goes on and on", fontsize=7)
        figure.text(0.85, 0.5, "another", fontsize=7)
    assert cut_off(figure) == ["a text that goes on and on"]
    assert on_one_another(figure) == [("a text that goes on and on", "another")]


def test_the_picture_of_a_screen_holds_its_notes_and_its_caption_says_them_too() -> None:
    figure = plot("Cliffs")
    assert "intervals (medians" in words(figure)
    assert "intervals (medians" in figure.caption


def test_numbers_are_the_same_in_every_style() -> None:
    drawn = [plot("Cliffs", None, "screen"), laid_out("Cliffs", "paper", 84), laid_out("Cliffs", "talk")]
    lines = [[line.get_xydata().tolist() for line in figure.axes[0].lines if str(line.get_gid()).startswith("median")]
             for figure in drawn]  # fmt: skip
    assert lines[0] and lines[0] == lines[1] == lines[2]


def luminance(colour: object) -> float:
    """Relative luminance of a colour."""
    red, green, blue = to_rgb(colour)  # type: ignore[arg-type]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_curves_of_a_paper_figure_are_told_apart_without_colour() -> None:
    lines = [line for line in laid_out("Cliffs", "paper", 84).axes[0].lines if str(line.get_gid()).startswith("median")]
    assert len({line.get_marker() for line in lines}) == len(lines)
    assert abs(luminance(lines[0].get_color()) - luminance(lines[1].get_color())) > 0.1


def test_an_unknown_style_is_one_line_with_the_known_ones() -> None:
    assert tuple(style.STYLES) == STYLE_NAMES
    with pytest.raises(UnknownNameError, match="unknown style 'papr'; known: paper, .*screen"):
        result_of("Cliffs").plot(style="papr")


@pytest.mark.parametrize(
    ("width_mm", "look", "said"),
    [(40, "paper", "76 to 2000, got 40"), (84, "talk", r"174 to 2000, got 84"), (5, "screen", "60 to 2000, got 5")],
)
def test_a_width_below_the_styles_least_is_refused_before_drawing(width_mm: float, look: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"width_mm of style {look} must be {said}"):
        result_of("Cliffs").plot(width_mm, look)


def test_a_figure_without_room_says_a_width_that_has() -> None:
    with style.use(style.STYLES["paper"]):
        figure = style.figure(84, 60)
        figure.subplots(1, 7)
        with pytest.raises(
            NarrowFigureError, match="width_mm=84 is too small for this figure; it needs .* mm or more"
        ) as told:
            finish(figure, 84)
    assert 84 < told.value.needed_mm < 174


TEXTS = {
    "95 % of b_1 & c": r"95~\% of b\_1 \& c",
    "θ̂_relax ≤ θ": r"$\hat{\theta}_{\mathrm{relax}}$~$\le$~$\theta$",
    "a#b{c}~d^e\\f$": r"a\#b\{c\}\textasciitilde{}d\textasciicircum{}e\textbackslash{}f\$",
    "--policy, --- why?` no!` ``a'' ,,b \"'": "-{}-policy, -{}-{}- why?{}` no!{}` `{}`a'{}' ,{},b ''{}'",
    "9 % [−4, 14] of n = 8": r"9~\% [$-$4,~14] of n~=~8",
    "1–2 “a”": "1--2 ``a''",
    "a\x07\x1b[2Jb": r"a\textbackslash{}x07\textbackslash{}x1b[2Jb",
    "Σ L / Σ ‖o_h‖₁ → 10⁻³": r"$\Sigma$ L / $\Sigma$ $\Vert o_h\Vert_1$ $\to$ 10$^{-}$$^{3}$",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_caption_is_text_that_latex_reads(text: str) -> None:
    assert to_latex(text) == TEXTS[text]


@pytest.mark.parametrize("name", PAPER)
def test_every_letter_of_a_caption_is_one_that_latex_has(name: str) -> None:
    latex = to_latex(laid_out(name, "paper", 84).caption)
    assert latex.isascii(), sorted({letter for letter in latex if not letter.isascii()})
    assert not re.search(r"(?<!\\)[%&#]", latex)


def heads_of_one_pair() -> CaptionedFigure:
    """The paper's figure of `heads` with a panel per kind."""
    figure: CaptionedFigure = pk.compare_heads(plain(), "attention", "two-stage")[:1].plot(84, "paper")
    figure.draw_without_rendering()
    return figure


def test_heads_of_one_pair_and_its_caption_fit_a_column_of_a_plain_article() -> None:
    figure = heads_of_one_pair()
    millimetres, column, lines = figure.get_figheight() * MM, 229.5, len(figure.caption) / 42 + 1
    assert millimetres <= 120
    assert len(figure.caption) <= 480
    assert millimetres * column / 84 + 12 * lines + 20 <= 550  # points: columnwidth, baselineskip, textheight
    panels = [axes for axes in figure.axes if not hasattr(axes, "_colorbar")]
    assert len(panels) == 2
    assert all(axes.get_position().width > 0.6 for axes in panels)
    check(figure, 7, 8)


def test_heads_of_one_pair_says_the_same_of_both_panels_and_explains_what_is_drawn() -> None:
    figure = heads_of_one_pair()
    titles = [axes.get_title(loc="left") for axes in figure.axes[:2]]
    assert all(
        re.search(r"% \[\d+, \d+\] of heads better\nΣ L1 over attention's: [\d.]+ \[", title) for title in titles
    )
    assert figure.caption.startswith("Whether two-stage perturbs less than attention is undecided: ")
    assert "Points: heads (colour: layer), better below the line; " in figure.caption
    assert "budget 64, α 0.25, window 32, max-pooling of 7, per query head" in figure.caption
    for unseen in ("bars", "bands", "tied", "a=0.25", "▼"):
        assert unseen not in figure.caption


@pytest.mark.parametrize(
    ("title", "remarks", "said"),
    [
        (
            "isolated: 87 % better\nΣ over: 0.81",
            ["1 head outside"],
            "Isolated: 87 % better, Σ over 0.81, 1 head outside",
        ),
        ("drift", ["all kept: 0.1"], "Drift, all kept: 0.1"),
        ("attention, b=64: 3", [""], "For attention, b=64: 3"),
        ("KL", ["a · b"], "KL: a; b"),
    ],
)
def test_a_panel_is_a_sentence_with_one_colon_and_a_capital(title: str, remarks: list[str], said: str) -> None:
    assert panel_sentence(title, remarks, ("attention",)) == said


def test_a_caption_explains_the_marks_that_are_drawn_and_says_n_once() -> None:
    figure = CaptionedFigure()
    axes = figure.subplots()
    figure.notes = [style.interval_note(8)]
    assert figure.caption == "n = 8 samples."
    axes.errorbar([1], [1], yerr=[1])
    assert figure.caption == "Bars: 95 % intervals over n = 8 samples."
    axes.fill_between([0, 1], [0, 1], [1, 2])
    figure.conclusion = "Less (n = 8 samples)."
    assert figure.caption == "Less (n = 8 samples). Bars and bands: 95 % intervals."


def test_a_sentence_that_asks_or_calls_has_its_own_end() -> None:
    figure = CaptionedFigure()
    figure.headline, figure.subtitle, figure.notes = "Which head?", "All of them!", ["Means.", "n = 8"]
    assert figure.caption == "Which head? All of them! Means. n = 8."


@pytest.mark.parametrize("name", ["x.PDF", "x.eps", "x.svgz", "x"])
def test_a_caption_is_named_as_its_picture_whatever_its_format(name: str, tmp_path: Path) -> None:
    figure = CaptionedFigure()
    assert {path.name for path in figure.save_caption(tmp_path / name)} == {"x.caption.txt", "x.caption.tex"}


def test_a_caption_stands_beside_its_picture_as_text_and_as_latex(tmp_path: Path) -> None:
    figure = laid_out("Cliffs", "paper", 84)
    text, latex = figure.save_caption(tmp_path / "cliff.v2.pdf")
    assert (text.name, latex.name) == ("cliff.v2.caption.txt", "cliff.v2.caption.tex")
    assert text.read_text() == f"{figure.caption}\n\nTrace 0123456789ab, perturbkv.\n"
    comment, line = latex.read_text().splitlines()
    assert comment == "% Caption by perturbkv: trace 0123456789ab, perturbkv"
    assert line == f"{to_latex(figure.caption)}%"

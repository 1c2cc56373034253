"""Many head-wise scatters side by side, on one scale: a panel per pair, propagated perturbation (paper, fig. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.heads.heads import HeadComparisons
from perturbkv.analyses.naming import common, folded, short, sides
from perturbkv.figures import heads, style
from perturbkv.figures.head_points import limits, outside, scatter
from perturbkv.figures.labels import by_held, held_sides

_LINE_MM, _AROUND_MM, _BAR_MM, _AXIS_MM = 2.9, 28.0, 12.0, 8.0
"""Of a title's line, all around the panels, the bar below them, an axis' name where the last row is not full."""
_MANY, _WIDE_MANY = 6, 9
"""More pairs than these stand closer, in one column and in two, so that the figure stays on its page."""

_SAID = "in the titles: isolated / propagated · ▼: heads outside the axes"


@dataclass(frozen=True)
class _Grid:
    """How panels stand.

    Attributes:
        columns: of panels; `panel_mm` the height of one without its title.
        font: size of a title's letters; `letters` how many fit a line.
        scale: of the points' areas.
        split: whether a title's numbers of both kinds stand on a line each.
    """

    columns: int
    panel_mm: float
    font: float
    letters: int
    scale: float
    split: bool


def _grid(pairs: int, width_mm: float) -> _Grid:
    if width_mm < style.WIDE_MM:
        return _Grid(2, 42.0, 5.8, 28, 0.5, split=True) if pairs <= _MANY else _Grid(3, 29.0, 5.0, 22, 0.3, split=True)
    if pairs <= _WIDE_MANY:
        return _Grid(3, 46.0, 5.8, 38, 0.5, split=False)
    return _Grid(4, 36.0, 5.4, 28, 0.4, split=True)


def draw(result: HeadComparisons, width_mm: float = style.WIDE_MM) -> Figure:
    """The pairs of one baseline together, baselines that hold least first; each title holds both kinds' numbers.

    A single pair has the figure of `heads`, a panel per kind.
    """
    if len(result) == 1:
        return heads.draw(result[0], width_mm)
    with style.use():
        narrow = width_mm < style.WIDE_MM
        grid, ordered = _grid(len(result), width_mm), _ordered(result.members)
        titles = _titles(ordered, grid)
        rows = -(-len(ordered) // grid.columns)
        height = grid.panel_mm + _LINE_MM * max(title.count("\n") + 1 for title in titles)
        shared, said = _shared(ordered), f"{_SAID} · {heads.told(ordered[0])}"
        further = style.long_foot_mm(result.identity, said, width_mm) + style.long_title_mm(shared, width_mm)
        further += _AXIS_MM if rows > 1 and len(ordered) % grid.columns else 0
        figure = style.figure(width_mm, rows * height + _AROUND_MM + further + (_BAR_MM if narrow else 0))
        axes = figure.subplots(rows, grid.columns, squeeze=False, sharex=True, sharey=True)
        ends = limits([one.propagated for one in ordered])
        for panel, one, title in zip(axes.flat, ordered, titles, strict=False):
            _panel(panel, one, ends, grid.scale)
            panel.set_title(title, loc="left", fontsize=grid.font)
        for panel in axes.flat[len(ordered) :]:
            panel.set_axis_off()
        _name_axes(axes.ravel().tolist(), ordered, grid.columns)
        axes[0, 0].legend(handles=_legend(ordered), loc="upper left", fontsize=0.95 * grid.font, handletextpad=0.3,
                          handlelength=1.2, borderaxespad=0.1, labelspacing=0.2)  # fmt: skip
        style.layer_bar(figure, list(axes.flat), ordered[0].flagged.shape[0], "bottom" if narrow else "right",
                        result.identity.layer)  # fmt: skip
        style.title(figure, shared)
        style.foot(figure, result.identity, said)
    return figure


def _ordered(results: Sequence[HeadComparison]) -> list[HeadComparison]:
    baselines = list(dict.fromkeys(result.baseline for result in results))
    together = sorted(results, key=lambda result: baselines.index(result.baseline))
    return by_held(together, lambda result: result.held[0])


def _panel(axes: Axes, result: HeadComparison, ends: tuple[float, float], scale: float) -> None:
    scatter(axes, result.propagated, result.flagged, ends, scale)
    beyond = int(outside(result.propagated, ends).sum())
    if beyond:
        style.note(axes, f"{beyond} ▼")


def _name_axes(axes: Sequence[Axes], results: Sequence[HeadComparison], columns: int) -> None:
    """Axes are named and numbered on the left and below alone."""
    unit = DISTANCES[results[0].distance].unit
    baselines, treatments = _sides(results)
    named = treatments[0] if len(treatments) == 1 else "the second named" if len(baselines) > 1 else "named above"
    for place, panel in enumerate(axes[: len(results)]):
        last, first = place + columns >= len(results), place % columns == 0
        panel.tick_params(labelbottom=last, labelleft=first)
        panel.set_xlabel(f"{baselines[0] if len(baselines) == 1 else 'the first named'} ({unit})" if last else "")
        panel.set_ylabel(f"{named} ({unit})" if first else "")


def _sides(results: Sequence[HeadComparison]) -> tuple[list[str], list[str]]:
    """The names of all baselines and of all treatments."""
    names = [sides(result.baseline, result.treatment) for result in results]
    return list(dict.fromkeys(first for first, _ in names)), list(dict.fromkeys(second for _, second in names))


def _shared(results: Sequence[HeadComparison]) -> str:
    """What is compared, and what all configurations share."""
    baselines, treatments = _sides(results)
    shared = common([side for result in results for side in (result.baseline, result.treatment)])
    return f"Propagated, {' or '.join(baselines)} → {', '.join(treatments)}: {shared}"


def _legend(results: Sequence[HeadComparison]) -> list[object]:
    """Of the panel with the most entries; how many heads are flagged differs from panel to panel."""
    handles = max((heads.legend(result) for result in results), key=len)
    handles[1].set_label("σ ≤ 0.5")
    return list(handles)


def _named(result: HeadComparison, baselines: bool, treatments: bool) -> str:
    """The sides that are not the same in all panels."""
    first, second = sides(result.baseline, result.treatment)
    return f"{first} → {second}" if baselines else second if treatments else ""


def _titles(results: Sequence[HeadComparison], grid: _Grid) -> list[str]:
    """What tells a pair from the others; of both kinds the heads that are better, and Σ over the baseline's."""
    apart = short([result.baseline for result in results], "selection")
    baselines, treatments = _sides(results)
    found = []
    for result, words in zip(results, apart, strict=True):
        kinds = (result.isolated, result.propagated)
        shares = [style.percent(kind.better_share, kind.better_share_interval) for kind in kinds]
        ratios = [style.ratio(kind.sum_ratio, kind.sum_ratio_interval) for kind in kinds]
        name = " ".join(part for part in (_named(result, len(baselines) > 1, len(treatments) > 1), words) if part)
        between = " /\n  " if grid.split else " / "
        lines = [folded(name, grid.letters), f"held / full {held_sides(result.held)}",
                 f"better {between.join(shares)}", f"Σ × {between.join(ratios)}"]  # fmt: skip
        found.append("\n".join(line for line in lines if line))
    return found

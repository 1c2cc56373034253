"""Many head-wise scatters side by side, on one scale: a panel per pair, propagated perturbation (paper, fig. 2)."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.heads import HeadComparison
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.naming import common, counted, folded, setting, short
from perturbkv.figures import style
from perturbkv.figures.head_points import limits, outside, scatter
from perturbkv.figures.heads import legend, told
from perturbkv.figures.labels import by_held, held_sides, sides

_WIDE, _NARROW = 3, 2
_PANEL_MM = {_WIDE: 46.0, _NARROW: 42.0}
_LINE_MM, _AROUND_MM, _FONT = 2.9, 26.0, 5.8


def draw(results: Sequence[HeadComparison], identity: RunIdentity, width_mm: float = style.WIDE_MM) -> Figure:
    """The pairs of one baseline together, baselines that hold least first; each title holds both kinds' numbers."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        columns = _NARROW if narrow else _WIDE
        ordered = _ordered(results)
        titles = _titles(ordered, narrow)
        rows = -(-len(ordered) // columns)
        height = _PANEL_MM[columns] + _LINE_MM * max(title.count("\n") + 1 for title in titles)
        figure = style.figure(width_mm, rows * height + _AROUND_MM + (12 if narrow else 0))
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        ends = limits([result.propagated for result in ordered])
        for panel, result, title in zip(axes.flat, ordered, titles, strict=False):
            _panel(panel, result, title, ends)
        for panel in axes.flat[len(ordered) :]:
            panel.set_axis_off()
        _name_axes(axes.ravel().tolist(), ordered, columns)
        axes[0, 0].legend(handles=_legend(ordered), loc="upper left", fontsize=5.5, handletextpad=0.3, handlelength=1.2,
                          borderaxespad=0.1, labelspacing=0.2)  # fmt: skip
        style.layer_bar(figure, list(axes.flat), ordered[0].flagged.shape[0], "bottom" if narrow else "right")
        style.title(figure, _shared(ordered))
        style.foot(figure, identity, f"in the titles: isolated / propagated · {told(ordered[0])}")
    return figure


def _ordered(results: Sequence[HeadComparison]) -> list[HeadComparison]:
    baselines = list(dict.fromkeys(result.baseline for result in results))
    together = sorted(results, key=lambda result: baselines.index(result.baseline))
    return by_held(together, lambda result: result.held[0])


def _panel(axes: Axes, result: HeadComparison, title: str, ends: tuple[float, float]) -> None:
    scatter(axes, result.propagated, result.flagged, ends, scale=0.5)
    axes.set_title(title, loc="left", fontsize=_FONT)
    beyond = int(outside(result.propagated, ends).sum())
    if beyond:
        style.note(axes, f"{counted(beyond, 'head')} outside (▼)")


def _name_axes(axes: Sequence[Axes], results: Sequence[HeadComparison], columns: int) -> None:
    """Axes are named and numbered on the left and below alone."""
    unit = DISTANCES[results[0].distance]
    baselines, treatments = _sides(results)
    named = treatments[0] if len(treatments) == 1 else "named above"
    for place, panel in enumerate(axes[: len(results)]):
        last, first = place + columns >= len(results), place % columns == 0
        panel.tick_params(labelbottom=last, labelleft=first)
        panel.set_xlabel(f"{baselines[0] if len(baselines) == 1 else 'baseline'} ({unit})" if last else "")
        panel.set_ylabel(f"{named} ({unit})" if first else "")


def _sides(results: Sequence[HeadComparison]) -> tuple[list[str], list[str]]:
    """The names of all baselines and of all treatments."""
    names = [sides(result.baseline, result.treatment) for result in results]
    return list(dict.fromkeys(first for first, _ in names)), list(dict.fromkeys(second for _, second in names))


def _shared(results: Sequence[HeadComparison]) -> str:
    """What is compared, and what all configurations share."""
    baselines, treatments = _sides(results)
    shared = common([setting(result.baseline) for result in results])
    return f"Propagated, {' or '.join(baselines)} → {', '.join(treatments)}: {shared}"


def _legend(results: Sequence[HeadComparison]) -> list[object]:
    """Of the panel with the most entries; how many heads are flagged differs from panel to panel."""
    handles = max((legend(result) for result in results), key=len)
    handles[1].set_label("σ ≤ 0.5")
    return list(handles)


def _titles(results: Sequence[HeadComparison], narrow: bool) -> list[str]:
    """What tells a pair from the others; of both kinds the heads that are better, and Σ over the baseline's."""
    apart = short([setting(result.baseline) for result in results])
    several = len(_sides(results)[1]) > 1
    found = []
    for result, words in zip(results, apart, strict=True):
        kinds = (result.isolated, result.propagated)
        shares = [style.percent(kind.better_share, kind.better_share_interval) for kind in kinds]
        ratios = [style.ratio(kind.sum_ratio, kind.sum_ratio_interval) for kind in kinds]
        name = " ".join(
            part for part in (sides(result.baseline, result.treatment)[1] if several else "", words) if part
        )
        between = " /\n  " if narrow else " / "
        lines = [folded(name, 28 if narrow else 38), f"held / full {held_sides(result.held)}",
                 f"better {between.join(shares)}", f"Σ × {between.join(ratios)}"]  # fmt: skip
        found.append("\n".join(line for line in lines if line))
    return found

"""Where a gain comes from: each ingredient's perturbation over plain attention's, isolated and propagated."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses.ablation.ablation import Ablation
from perturbkv.analyses.ablation.ingredients import BASELINE, INGREDIENTS, MEAN_OF_PRODUCTS, Setting
from perturbkv.analyses.naming import short
from perturbkv.figures import style
from perturbkv.figures.labels import by_held
from perturbkv.figures.ratio_points import legend, point

_WIDE, _LINE_MM, _AROUND_MM = 2, 4.2, 21


def draw(result: Ablation, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per setting; left of 1 an ingredient perturbs less than the baseline."""
    with style.use():
        ordered = by_held(result.settings, lambda one: one.rows[0].compared.held[0])
        names = _names(ordered)
        columns = 1 if width_mm < style.WIDE_MM else min(_WIDE, len(ordered))
        chunks = [ordered[start : start + columns] for start in range(0, len(ordered), columns)]
        titles = [_titles(chunk) for chunk in chunks]
        heights = [len(rows) * _LINE_MM + _AROUND_MM for rows in titles]
        figure = style.figure(width_mm, sum(heights) + 10)
        axes = figure.subplots(len(chunks), columns, squeeze=False, sharex=True, height_ratios=heights)
        for row, chunk, rows in zip(axes, chunks, titles, strict=True):
            for place, panel in enumerate(row):
                if place < len(chunk):
                    _panel(panel, chunk[place], names.pop(0), rows, named=place == 0)
                else:
                    panel.set_axis_off()
        figure.legend(handles=legend(), loc="outside upper left", ncols=2 if columns < _WIDE else 3)
        style.foot(figure, result.identity, style.about(result.identity.samples))
    return figure


def _names(results: Sequence[Setting]) -> list[str]:
    """What tells a setting from the others; of a single one all of it."""
    if len(results) == 1:
        return [results[0].setting]
    return [name or "alike" for name in short([result.baseline for result in results], "alpha")]


def _titles(results: Sequence[Setting]) -> dict[str, str]:
    """The rows that panels side by side share, with their ingredients: the baseline, then each at each α."""
    named = {row.title: row.name for result in results for row in result.rows}
    order = list(INGREDIENTS)
    return {BASELINE: BASELINE} | dict(sorted(named.items(), key=lambda item: order.index(item[1])))


def _panel(axes: Axes, result: Setting, name: str, titles: dict[str, str], *, named: bool) -> None:
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    rows = {row.title: row.compared for row in result.rows}
    for place, title in enumerate(titles):
        if title in rows:
            for kind, measured in (("isolated", rows[title].isolated), ("propagated", rows[title].propagated)):
                point(axes, place, kind, measured, f"{BASELINE} or row is 0")
        elif title != BASELINE:
            grouped = titles[title] == MEAN_OF_PRODUCTS and result.granularity == "query"
            axes.text(1, place, " no group" if grouped else " not measured", fontsize=5.5, color="0.5", va="center")
    shown = [f"{title} (= 1)" if title == BASELINE else title for title in titles]
    axes.set_yticks(range(len(titles)), shown if named else [""] * len(titles))
    axes.set(ylim=(len(titles) - 0.5, -0.5), xlabel=f"Σ L1 over {BASELINE}'s (log axis)")
    style.log_axes(axes, x=True)
    axes.tick_params(labelbottom=True)
    axes.grid(visible=True, axis="x")
    axes.set_title(f"{name}\nheld / full {_held(result)}", loc="left")


def _held(result: Setting) -> str:
    """What the rows' caches hold, once where they hold the same."""
    shares = [style.number(share) for row in result.rows for share in row.compared.held]
    return " to ".join(dict.fromkeys((min(shares), max(shares))))

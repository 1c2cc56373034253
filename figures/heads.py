"""Head-wise scatter: a point per head, one selection against another, below the diagonal is better (paper, fig. 2)."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.heads.head_kind import HeadKind
from perturbkv.analyses.naming import counted, folded, sides
from perturbkv.figures import style
from perturbkv.figures.head_points import FLAG_COLOUR, limits, outside, scatter
from perturbkv.figures.labels import held_sides

_HEIGHT_MM, _NARROW_MM, _LINE_MM = 103, 92, 3.2
_LETTERS, _TITLE_LINES = 40, 4
"""Of a title's or an axis' line, and lines of a usual title."""


def draw(result: HeadComparison, width_mm: float = style.WIDE_MM) -> Figure:
    """Two log-log panels, isolated and propagated; points coloured by layer, heads with σ ≤ 0.5 ringed."""
    with style.use():
        narrow, height = width_mm < style.WIDE_MM, _LINE_MM * _further_lines(result)
        figure = style.figure(width_mm, (_NARROW_MM + height) * 2 if narrow else _HEIGHT_MM + height)
        axes = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
        for panel, name in zip(axes, ("isolated", "propagated"), strict=True):
            _panel(panel, result, name)
        style.layer_bar(figure, list(axes), result.flagged.shape[0], "bottom" if narrow else "right",
                        result.identity.layer)  # fmt: skip
        axes[1].legend(handles=legend(result), loc="upper left", handletextpad=0.3, borderaxespad=0.2)
        style.foot(figure, result.identity, f"held / full {held_sides(result.held)} · {told(result)}")
    return figure


def told(result: HeadComparison) -> str:
    """What shares, counts, ties and brackets are."""
    flips = result.propagated.decided.flips
    return (
        "share: mean of samples; counts: by heads' means; Σ: over heads and samples · tied: within 2 noise floors, or "
        f"the same entries kept · beyond chance: {flips:,} flips of samples' signs, Benjamini–Hochberg at 5 % · "
        f"{style.about(result.identity.samples)}"
    )


def _panel(axes: Axes, result: HeadComparison, name: str) -> None:
    kind: HeadKind = getattr(result, name)
    unit = DISTANCES[result.distance].unit
    baseline, treatment = sides(result.baseline, result.treatment)
    ends = limits([kind])
    scatter(axes, kind, result.flagged, ends)
    axes.set_xlabel(_axis(baseline, name, unit))
    axes.set_ylabel(_axis(treatment, name, unit))
    axes.set_title(_title(kind, name, f"Σ {unit} over {baseline}'s"), loc="left", fontsize=7.5)
    beyond = int(outside(kind, ends).sum())
    if beyond:
        style.note(axes, f"{counted(beyond, 'head')} outside (▼)")


def _title(kind: HeadKind, name: str, over: str) -> str:
    share = style.percent(kind.better_share, kind.better_share_interval)
    counts = f"{kind.improved_count} better, {kind.worsened_count} worse, {kind.tied_count} tied"
    beyond = f"beyond chance: {kind.decided.better} better, {kind.decided.worse} worse"
    ratio = style.ratio(kind.sum_ratio, kind.sum_ratio_interval)
    lines = [f"{name}: {share} of heads better", f"{over}: {ratio}", counts, beyond]
    return "\n".join(folded(line, _LETTERS) for line in lines)


def _axis(side: str, name: str, unit: str) -> str:
    return folded(f"{side}, {name} perturbation ({unit})", _LETTERS)


def _further_lines(result: HeadComparison) -> int:
    """How many lines long names take beyond a figure of short ones: of the title and of the axis below."""
    baseline, _ = sides(result.baseline, result.treatment)
    unit = DISTANCES[result.distance].unit
    title = _title(result.propagated, "propagated", f"Σ {unit} over {baseline}'s")
    return title.count("\n") + 1 - _TITLE_LINES + _axis(baseline, "propagated", unit).count("\n")


def legend(result: HeadComparison) -> list[Line2D]:
    """The diagonal, rings, and crosses where there are ties."""
    entries = [
        Line2D([], [], color="0.55", linewidth=0.8, label="equal"),
        Line2D([], [], linestyle="", marker="o", markersize=5, markerfacecolor="none", markeredgewidth=0.6,
               markeredgecolor=FLAG_COLOUR, label=f"σ ≤ 0.5 ({counted(int(result.flagged.sum()), 'head')})"),
    ]  # fmt: skip
    if result.isolated.tied_count or result.propagated.tied_count:
        entries.append(Line2D([], [], linestyle="", marker="x", markersize=3, color="0.5", label="tied"))
    return entries

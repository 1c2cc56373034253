"""Figures of `heads`: a point per head, one selection against another, alone or a panel per pair (paper, fig. 2).

Below the diagonal is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.heads.head_comparison import HeadComparison, HeadKind
from perturbkv.analyses.heads.heads import HeadComparisons
from perturbkv.analyses.heads.token_kinds import TokenKind
from perturbkv.analyses.names import common_text, fold, short_names
from perturbkv.analyses.verdicts import distance_of
from perturbkv.display import plural
from perturbkv.figures import style
from perturbkv.figures.labels import cache_shares_text, draw_legend, sort_by_cache_share
from perturbkv.figures.panels import (
    KIND_MARKERS,
    draw_sum_ratio,
    finish_ratio_panel,
    label_outer,
    marker_entries,
    panel_grid,
)

NO_BREAK = "\u00a0"
"""Space at which no line is folded."""
FLAG_COLOUR = "#c1272d"
_FAR_BELOW = 1000.0
"""A head whose smaller mean is more than this factor below the median one does not set the lower end of the axes."""
_FEW, _EMPTY = 0.01, 0.15
"""Heads at one end are left outside the axes where at most this share of all heads, or one, would take this share of
the axes."""
_MARGIN = 0.04
"""Margin of the axes beyond the outermost heads, as a share of their span."""


def draw_scatter(
    axes: Axes, kind: HeadKind, flagged: NDArray[np.bool_], ends: tuple[float, float], scale: float = 1.0,
    square: bool = True,
) -> None:  # fmt: skip
    """Draw a point per head: ties as crosses, flagged heads ringed, heads outside the axes as triangles on their edge.

    `scale` multiplies the points' areas, for small panels; a panel that is not `square` fills its place.
    """
    layers = np.broadcast_to(np.arange(flagged.shape[0])[:, None], flagged.shape)
    colours: dict[str, Any] = {
        "cmap": style.layer_colours(),
        "norm": BoundaryNorm(np.arange(flagged.shape[0] + 1) - 0.5, 256),
    }
    low, high = ends
    x, y = (np.clip(mean, low, high) for mean in (kind.baseline_mean, kind.treatment_mean))
    outside, tied, size = outside_axes(kind, ends), kind.verdict == 0, scale * (14.0 if x.size <= 400 else 7.0)
    axes.plot([low, high], [low, high], color="0.55", linewidth=0.8, zorder=1, gid="diagonal")
    crossed, shown = tied & ~outside, ~tied & ~outside
    axes.scatter(x[crossed], y[crossed], s=9 * scale, marker="x", color="0.5", linewidths=0.6, zorder=2, gid="ties")
    axes.scatter(x[shown], y[shown], s=size, c=layers[shown], linewidths=0, zorder=3, gid="heads", **colours)
    axes.scatter(x[flagged], y[flagged], s=size + 14 * scale, facecolors="none", edgecolors=FLAG_COLOUR, linewidths=0.6,
                 zorder=4, gid="flagged")  # fmt: skip
    baselines, treatments = kind.baseline_mean, kind.treatment_mean
    sides = {"v": treatments < ends[0], "^": treatments > ends[1]}
    sides |= {"<": (baselines < ends[0]) & ~sides["v"], ">": (baselines > ends[1]) & ~sides["^"]}
    for marker, there in ((marker, there) for marker, there in sides.items() if there.any()):
        axes.scatter(x[there], y[there], s=size + 10 * scale, c=layers[there], marker=marker, linewidths=0, zorder=5,
                     clip_on=False, gid="outside", **colours)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal" if square else "auto")
    style.set_log_axes(axes, x=True, y=True)
    axes.grid(visible=True, which="major")


def outside_axes(kind: HeadKind, ends: tuple[float, float]) -> NDArray[np.bool_]:
    """Return (layer, head) True where the baseline's or the treatment's mean is outside the axes."""
    both = np.stack([kind.baseline_mean, kind.treatment_mean])
    return np.asarray(((both < ends[0]) | (both > ends[1])).any(axis=0))


def axis_limits(kinds: Sequence[HeadKind]) -> tuple[float, float]:
    """Return axis ends for the heads of all panels, without outliers that would leave the axes empty."""
    inside = [ends for ends in map(_log_ends, kinds) if ends]
    if not inside:
        return 0.1, 10.0
    low, high = min(low for low, _ in inside), max(high for _, high in inside)
    margin = _MARGIN * (high - low) + 0.03
    return float(10 ** (low - margin)), float(10 ** (high + margin))


def _log_ends(kind: HeadKind) -> tuple[float, float] | None:
    """Return log₁₀ of the axis ends that hold a kind's means, without far outliers; None where all means are 0."""
    both = np.stack([kind.baseline_mean, kind.treatment_mean]).reshape(2, -1)  # (side, head)
    both = both[:, ~np.isnan(both).any(axis=0)]  # somebody's cache may have no isolated perturbation
    positive = both[both > 0]
    if not positive.size:
        return None
    smaller, larger = both.min(axis=0), both.max(axis=0)
    inside = smaller >= np.median(positive) / _FAR_BELOW
    lows = np.sort(np.log10(smaller[inside])) if inside.any() else np.log10(positive[:1])
    highs = np.sort(np.log10(larger[larger > 0]))
    most = max(1, int(_FEW * both.shape[1]))
    low = lows[_outlier_count(lows - lows[0], highs[-1] - lows[0], most)]
    high = highs[-1 - _outlier_count(highs[-1] - highs[::-1], highs[-1] - low, most)]
    return float(min(low, high)), float(max(low, high))


def _outlier_count(inwards: NDArray[np.float64], span: float, most: int) -> int:
    """Return the number of heads before the last wide gap at one end of the axis, at most `most`.

    `inwards`: sorted distances of the heads from that end, of which the first is 0; `span`: length of the axis.
    """
    gaps = np.diff(inwards[: most + 1])
    wide = np.flatnonzero(gaps > _EMPTY * span)
    return int(wide[-1]) + 1 if wide.size else 0


_HEIGHT_MM, _NARROW_MM, _LOW_MM, _LINE_MM = 103, 92, 58, 3.2
_KINDS_MM, _KIND_MM = 22.0, 6.0
"""Heights of the panel of kinds of tokens: around its rows and the row of all tokens, and of each row."""
_LETTERS, _TITLE_LINES = 40, 4
"""Letters per line of a title or an axis label, and lines of a usual title."""


def draw_pair(result: HeadComparison, width_mm: float = style.WIDE_MM, token_kinds: Sequence[TokenKind] = ()) -> Figure:
    """Draw one pair of configurations, isolated and propagated; points coloured by layer, heads with σ ≤ 0.5 ringed.

    Below stand the ratios by kind of decoded token, where `token_kinds` has any. Without notes in the picture, panels
    are low and as wide as there is room.
    """
    narrow, panel_mm = width_mm < style.WIDE_MM, _LOW_MM
    if style.current_style().notes:
        panel_mm = _NARROW_MM if narrow else _HEIGHT_MM
    rows: list[Any] = [["isolated"], ["propagated"]] if narrow else [["isolated", "propagated"]]
    heights = [float(panel_mm)] * len(rows)
    if token_kinds:
        rows.append(["kinds"] * len(rows[0]))
        heights.append(_KINDS_MM + _KIND_MM * len(token_kinds))
    figure = style.figure(width_mm, sum(heights))
    panels = figure.subplot_mosaic(rows, height_ratios=heights)
    axes = [panels["isolated"], panels["propagated"]]
    for panel, name in zip(axes, ("isolated", "propagated"), strict=True):
        _draw_kind(panel, result, name)
    lines = axes[1].get_title(loc="left").count("\n") + 1 + axes[1].get_xlabel().count("\n")
    style.grow(figure, _LINE_MM * (lines - _TITLE_LINES) * (len(axes) if narrow else 1))
    style.draw_layer_bar(figure, axes, result.flagged.shape[0], "right", result.identity.layer)
    draw_legend(figure, _legend([result]))
    if token_kinds:
        _draw_token_kinds(panels["kinds"], result, token_kinds)
    shares = f"cache share {cache_shares_text(result.cache_shares)}"
    outside = [int(outside_axes(kind, axis_limits([kind])).sum()) for kind in (result.isolated, result.propagated)]
    by_kind = ["lowest panel: sums at the steps of each kind of decoded token, n samples"] if token_kinds else []
    note, caption = f"{shares} · {foot_text(result)}", [_caption_key([result], outside), *by_kind, shares]
    return style.describe_run(figure, result.identity, note, caption, sides=False)


def _draw_token_kinds(axes: Axes, result: HeadComparison, kinds: Sequence[TokenKind]) -> None:
    """Draw a row per kind of decoded token below that of all: ratios of sums, with the number of samples."""
    names = ["all tokens", *(f"{one.kind} (n = {one.samples})" for one in kinds)]
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    for name in KIND_MARKERS:
        whole: HeadKind = getattr(result, name)
        draw_sum_ratio(axes, 0, name, whole.sum_ratio, whole.sum_ratio_interval)
        for row, one in enumerate(kinds, start=1):
            draw_sum_ratio(axes, row, name, getattr(one, f"{name}_ratio"), getattr(one, f"{name}_ratio_interval"))
    unit, (baseline, _) = distance_of(result.distance).unit, result.sides
    finish_ratio_panel(axes, names, "by kind of decoded token")
    axes.set_xlabel(f"Σ {unit} over {baseline}'s (log axis)")
    axes.legend(handles=marker_entries((marker, name) for name, (marker, _) in KIND_MARKERS.items()), loc="best")


def _caption_key(results: Sequence[HeadComparison], outside: Sequence[int]) -> str:
    """Return the caption's sentence on points, and on rings, crosses, triangles and intervals where there are any.

    `outside`: number of heads outside the axes of each panel.
    """
    flagged = any(result.flagged.any() for result in results)
    tied = any(kind.tied for result in results for kind in (result.isolated, result.propagated))
    alike = len(outside) > 1 == len(set(outside))
    count = str(outside[0]) if alike else text.join_names([str(number) for number in outside])
    heads = f"{count} {'head' if max(outside) == 1 else 'heads'} outside" + (" in each panel" if alike else "")
    parts = [
        "points: heads (colour: layer), better below the line",
        "rings: σ ≤ 0.5, where Theorem 3 is silent" if flagged else "",
        "crosses: tied, within 2 noise floors or the same entries kept" if tied else "",
        f"triangles: {heads}" if any(outside) else "",
        style.interval_note(results[0].identity.samples),
    ]
    return "; ".join(filter(None, parts))


def foot_text(result: HeadComparison) -> str:
    """Return the foot's text on cache shares, counts, ties and brackets."""
    flips = result.propagated.sign_flips.flips
    return (
        "share: mean of samples; counts: by heads' means; Σ: over heads and samples · tied: within 2 noise floors, or "
        f"the same entries kept · beyond chance: {flips:,} flips of samples' signs, Benjamini–Hochberg at 5 % · "
        f"{style.interval_note(result.identity.samples)}"
    )


def _draw_kind(axes: Axes, result: HeadComparison, name: str) -> None:
    """Draw the heads of one kind, "isolated" or "propagated", with title and axis labels."""
    kind: HeadKind = getattr(result, name)
    unit = distance_of(result.distance).unit
    baseline, treatment = result.sides
    ends = axis_limits([kind])
    draw_scatter(axes, kind, result.flagged, ends, square=style.current_style().notes)
    axes.set_xlabel(_axis_label(baseline, name, unit))
    axes.set_ylabel(_axis_label(treatment, name, unit))
    axes.set_title(_kind_title(kind, name, f"Σ {unit} over {baseline}'s"), loc="left", fontsize=style.points(7.5))
    outside = int(outside_axes(kind, ends).sum())
    if outside and style.current_style().notes:
        style.draw_note(axes, f"{plural(outside, 'head')} outside (triangle)")


def _kind_title(kind: HeadKind, name: str, ratio_name: str) -> str:
    """Return a panel's title: share of better heads, ratio of sums, and with notes counts, and heads beyond chance."""
    share = text.percent(kind.better_share, kind.better_share_interval)
    counts = f"{kind.improved} better, {kind.worsened} worse, {kind.tied} tied"
    beyond = f"beyond chance: {kind.sign_flips.above} better, {kind.sign_flips.below} worse"
    ratio = text.decimal(kind.sum_ratio, kind.sum_ratio_interval)
    lines = [f"{name}: {share} of heads better", f"{ratio_name}: {ratio}", counts, beyond]
    if not kind.is_known:
        lines = [f"{name}: none, the prompt was read", "otherwise, or attention is its own"]
    if not style.current_style().notes:
        return "\n".join(lines[:2])
    return "\n".join(fold(line, _LETTERS) for line in lines)


def _axis_label(side: str, name: str, unit: str) -> str:
    """Return '<side>, <kind> perturbation (<unit>)', folded, the unit on one line; `name` is the kind's."""
    return fold(f"{side}, {name} perturbation ({unit.replace(' ', NO_BREAK)})", _LETTERS)


def _legend(results: Sequence[HeadComparison]) -> list[Line2D]:
    """Return the legend entries: diagonal, rings (of a single pair with their number) and crosses, if any head ties."""
    count = f" ({plural(int(results[0].flagged.sum()), 'head')})" if len(results) == 1 else ""
    entries = [
        Line2D([], [], color="0.55", linewidth=0.8, label="equal"),
        Line2D([], [], linestyle="", marker="o", markersize=5, markerfacecolor="none", markeredgewidth=0.6,
               markeredgecolor=FLAG_COLOUR, label=f"σ ≤ 0.5{count}"),
    ]  # fmt: skip
    if any(result.isolated.tied or result.propagated.tied for result in results):
        entries.append(Line2D([], [], linestyle="", marker="x", markersize=3, color="0.5", label="tied"))
    return entries


_HEAD_PANELS_LINE_MM, _AROUND_MM, _BAR_MM = 2.9, 28.0, 12.0
"""Heights: a title's line, all margins, the colour bar."""
_MANY, _WIDE_MANY = 6, 9
"""Most pairs with large panels, in one column and in two; of more, panels are smaller, so that the figure fits its
page."""
_LARGE_MM, _SPLIT_MM, _SQUARE, _LETTERS_PER_MM = 40.0, 50.0, 0.85, 0.66
"""Width of a panel that has large titles, and of one with the numbers of both kinds on one line; height of a panel over
its width; letters of a title."""
_NOTE = "two numbers: isolated / propagated"


def draw_panels(result: HeadComparisons, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw all pairs together, propagated, smallest caches first; each title has both kinds' numbers.

    A single pair has a panel per kind of perturbation, and one by kind of token where kinds differ.
    """
    if len(result) == 1:
        differ = any(one.remarks() for one in result.token_kinds)
        return draw_pair(result[0], width_mm, result.token_kinds if differ else ())
    ordered, narrow = _sort_pairs(result.members), width_mm < style.WIDE_MM
    columns = (2 if len(ordered) <= _MANY else 3) if narrow else (3 if len(ordered) <= _WIDE_MANY else 4)
    panel_mm = width_mm / columns
    titles, font = _panel_titles(ordered, panel_mm), style.points(5.8 if panel_mm > _LARGE_MM else 5.2)
    row_mm = _SQUARE * panel_mm + _HEAD_PANELS_LINE_MM * max(title.count("\n") + 1 for title in titles)
    figure, panels = panel_grid(len(ordered), columns, width_mm, row_mm, _AROUND_MM + (_BAR_MM if narrow else 0),
                                sharex=True, sharey=True)  # fmt: skip
    ends = axis_limits([one.propagated for one in ordered])
    outside = [int(outside_axes(one.propagated, ends).sum()) for one in ordered]
    for panel, one, title, count in zip(panels, ordered, titles, outside, strict=True):
        draw_scatter(panel, one.propagated, one.flagged, ends, panel_mm / 100)
        panel.set_title(title, loc="left", fontsize=font)
        if count and style.current_style().notes:
            style.draw_note(panel, f"{count} outside")
    label_outer(panels, *_axis_names(ordered))
    draw_legend(figure, _legend(ordered))
    style.draw_layer_bar(figure, panels, ordered[0].flagged.shape[0], "bottom" if narrow else "right",
                    result.identity.layer)  # fmt: skip
    baselines, treatments = _side_names(ordered)
    shared = common_text([side for result in ordered for side in (result.baseline, result.treatment)])
    title_text = f"Propagated, {' or '.join(baselines)} → {', '.join(treatments)}: {shared}"
    triangles = " · triangles: heads outside the axes" if any(outside) else ""
    style.set_title(figure, title_text, title_text.partition(":")[0])
    key = f"{_NOTE}; Σ ×: sum over heads and samples over the first named's"
    note = f"{_NOTE}{triangles} · {foot_text(ordered[0])}"
    return style.describe_run(figure, result.identity, note, [key, _caption_key(ordered, outside)])


def _sort_pairs(results: Sequence[HeadComparison]) -> list[HeadComparison]:
    """Return the pairs sorted by the baseline's cache share, or by baseline where a share is unknown."""
    baselines = list(dict.fromkeys(result.baseline for result in results))
    by_baseline = sorted(results, key=lambda result: baselines.index(result.baseline))
    return sort_by_cache_share(by_baseline, lambda result: result.cache_shares[0])


def _axis_names(results: Sequence[HeadComparison]) -> tuple[str, str]:
    """Return the names of the x and the y axis: both sides, as far as panels share them, with the unit."""
    unit = distance_of(results[0].distance).unit
    baselines, treatments = _side_names(results)
    first = baselines[0] if len(baselines) == 1 else "the first named"
    second = treatments[0] if len(treatments) == 1 else "the second named" if len(baselines) > 1 else "named above"
    return f"{first} ({unit})", f"{second} ({unit})"


def _side_names(results: Sequence[HeadComparison]) -> tuple[list[str], list[str]]:
    """Return the distinct names of all baselines and of all treatments."""
    names = [result.sides for result in results]
    return list(dict.fromkeys(first for first, _ in names)), list(dict.fromkeys(second for _, second in names))


def _panel_titles(results: Sequence[HeadComparison], panel_mm: float) -> list[str]:
    """Return a title per pair: a distinct name, cache shares, share of better heads, and ratio of sums."""
    names = short_names([result.baseline for result in results], "selection")
    baselines, treatments = _side_names(results)
    titles = []
    for result, setting in zip(results, names, strict=True):
        kinds = (result.isolated, result.propagated)
        shares = [text.percent(kind.better_share, kind.better_share_interval) for kind in kinds]
        ratios = [text.decimal(kind.sum_ratio, kind.sum_ratio_interval) for kind in kinds]
        first, second = result.sides  # without those that all panels share
        sides = f"{first} → {second}" if len(baselines) > 1 else second if len(treatments) > 1 else ""
        name = " ".join(part for part in (sides, setting) if part)
        between = " /\n  " if panel_mm < _SPLIT_MM else " / "
        lines = [fold(name, int(_LETTERS_PER_MM * panel_mm)), f"cache share {cache_shares_text(result.cache_shares)}",
                 f"better {between.join(shares)}", f"Σ × {between.join(ratios)}"]  # fmt: skip
        titles.append("\n".join(line for line in lines if line))
    return titles

"""Scores against what the caches hold, a line per method, beside the full cache's (paper, figure 1).

Free answers that have not left the full cache's yet, and KL over the full cache's answer, token by token.

What a judge thinks: mean scores of every cache, or wins, ties and losses against the full cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from perturbkv.analyses.pairing import SIDE, apart, counted, folded, short_names
from perturbkv.analyses.quality.divergence import Divergence
from perturbkv.analyses.quality.divergence_point import Parting
from perturbkv.analyses.quality.judge import OUTCOMES, Judged, Preferences
from perturbkv.analyses.quality.quality import Quality
from perturbkv.analyses.quality.score_columns import FULL, Column, Mean, lines
from perturbkv.analyses.quality.score_tables import about_scores
from perturbkv.analyses.stats.intervals import LEAST, Band, median_level
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.figures import labels, style
from perturbkv.figures.labels import by_held

_MOST = 6
"""Panels of data sets; of more of them, kinds are shown."""
_WIDE, _NARROW = 3, 2
_ROW_MM, _AROUND_MM, _LEGEND_MM = 46, 12, 4
_TITLE = {style.COLUMN_MM: 44, style.WIDE_MM: 100}
"""Letters of a line of titles, by width."""
Curves = dict[str, list[tuple[int, float]]]
"""Method -> place and budget of each of its configurations."""
_APART, _SPREAD = 2.0, 12.0
"""Points between methods of one budget, and between the first and the last of many: drawn apart, where they are."""
_MARGIN = 0.12
"""Of the x axis beside its ends, so that what is drawn aside has room."""
_ALIKE = 1.25
"""Largest cache over the smallest of a panel whose caches are of one size."""
_MARKS, _WHOLE = 6, 5
"""Sizes of caches that are marked, each by itself; per cent above which they are marked as whole numbers."""


def draw_quality(result: Quality, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per data set, or per kind of task where there are many, and one of the average."""
    with style.use():
        shown, curves, narrow = panels(result), _curves(result), width_mm < style.WIDE_MM
        columns = min(_NARROW if narrow else _WIDE, len(shown))
        rows = -(-len(shown) // columns)
        beside = labels.legend_columns([FULL, *curves], width_mm, 2 if narrow else 4)
        legend_mm = -(-(len(curves) + 1) // beside) * _LEGEND_MM
        said = f"{about_scores(result.datasets)} {_bars(result)}"
        foot_mm = style.long_foot_mm(result.identity, said, width_mm)
        figure = style.figure(width_mm, rows * _ROW_MM + _AROUND_MM + legend_mm + foot_mm)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for place, panel in enumerate(axes[: len(shown)]):
            _panel(panel, shown[place], curves, title=_TITLE[style.COLUMN_MM if narrow else style.WIDE_MM] // columns)
            panel.set_ylabel("score × 100" if place % columns == 0 else "")
            panel.set_xlabel(_axis(result) if place + columns >= len(shown) else "")
        for panel in axes[len(shown) :]:
            panel.set_axis_off()
        figure.legend(handles=_legend(curves), loc="outside upper left", ncols=beside)
        style.foot(figure, result.identity, said)
    return figure


def panels(result: Quality) -> list[Column]:
    """What is drawn: the average last, where it is not the only one."""
    first = result.datasets if len(result.datasets) <= _MOST else result.kinds
    return [*first, result.average] if len(first) > 1 else list(first)


def _curves(result: Quality) -> Curves:
    """Method -> its configurations, that which holds least first."""
    found: Curves = {}
    for line in lines(result.configs, [result.average]):
        if line.place is not None:
            found.setdefault(line.method, []).append((line.place, float(line.budget)))
    return {name: by_held(some, lambda one: float(result.average.held[one[0]])) for name, some in found.items()}


def _panel(axes: Axes, column: Column, curves: Curves, title: int) -> None:
    _full(axes, column.full)
    places = np.arange(len(curves)) - (len(curves) - 1) / 2
    apart = min(_APART, _SPREAD / max(1, len(curves) - 1))
    drawn = zip(curves.items(), _looks(len(curves)), apart * places, strict=True)
    for (name, some), (colour, marker), points in drawn:
        means = [column.evicted[place] for place, _ in some]
        made = axes.errorbar(100 * np.array([_share(column, *one) for one in some]),
                             np.array([100 * mean.value for mean in means]),
                             yerr=_reach(means), color=colour, marker=marker, markersize=2.6, markerfacecolor="none",
                             linewidth=0.9, elinewidth=0.6, gid=name)  # fmt: skip
        _aside(axes, made, points)
    axes.set_title(folded(f"{column.name}, n\u00a0=\u00a0{column.samples}", title), loc="left")
    _ends(axes, [_share(column, *one) for some in curves.values() for one in some])
    axes.grid(visible=True, axis="y")


def _aside(axes: Axes, made: ErrorbarContainer, points: float) -> None:
    """Draw a curve beside its place: its numbers stay what they are."""
    shift = ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)
    for artist in made.get_children():
        artist.set_transform(axes.transData + shift)


def _ends(axes: Axes, shares: Sequence[float]) -> None:
    """A logarithmic x axis, wide where caches are of one size; scores from 0, to 100 where there is nothing else."""
    axes.margins(x=_MARGIN)
    style.log_axes(axes, x=True)
    _marks(axes, sorted({round(100 * share, 1) for share in shares}))
    if max(shares) < _ALIKE * min(shares):
        axes.set_xlim(100 * min(shares) / 2, 100 * max(shares) * 2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low) if high > 1 else 0.0, high if high > 1 else 100.0)


def _marks(axes: Axes, sizes: Sequence[float]) -> None:
    """Mark the caches' own sizes on the x axis where they are few and lie apart."""
    if len(sizes) <= _MARKS and all(after > _ALIKE * before for before, after in pairwise(sizes)):
        axes.set_xticks(sizes, [f"{size:.{0 if size > _WHOLE else 1}f}" for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())


def _share(column: Column, place: int, budget: float) -> float:
    """What a cache of this data set holds over the full one; where a trace does not tell, its budget."""
    return budget if np.isnan(column.held[place]) else float(column.held[place])


def _full(axes: Axes, full: Mean) -> None:
    """The full cache's score as a line, its interval as a band."""
    axes.axhline(100 * full.value, color="0.35", linestyle="--", linewidth=0.9, zorder=1, gid=FULL)
    if full.interval is not None:
        axes.axhspan(100 * full.interval.low, 100 * full.interval.high, color="0.5", alpha=0.12, linewidth=0, zorder=0)


def _reach(means: Sequence[Mean]) -> Any:
    """(2, budget) from each score to the ends of its interval; None where there are none."""
    bars = [bar for bar in (style.bars(mean.value, mean.interval) for mean in means) if bar is not None]
    return 100 * np.hstack(bars) if len(bars) == len(means) else None


def _looks(count: int) -> list[tuple[Any, str]]:
    """Colour and marker of each method."""
    markers = cycle("os^Dvp<>hX")
    return [(colour, next(markers)) for colour in style.category_colours(count)]


def _axis(result: Quality) -> str:
    """What stands below the panels."""
    told = not any(np.isnan(column.held).any() for column in result.datasets)
    return "held / full cache (%)" if told else "budget × 100"


def _legend(curves: Curves) -> list[Line2D]:
    full = Line2D([], [], color="0.35", linestyle="--", linewidth=0.9, label=FULL)
    looks = zip(curves, _looks(len(curves)), strict=True)
    return [full, *(Line2D([], [], color=colour, marker=marker, markersize=3, markerfacecolor="none", label=name)
                    for name, (colour, marker) in looks)]  # fmt: skip


def _bars(result: Quality) -> str:
    """What bars and bands are; methods of one budget stand apart to be seen."""
    sizes = [one.samples for one in result.datasets]
    kind = "95 % intervals" if min(sizes) >= LEAST else f"95 % intervals, of fewer than {LEAST} samples ranges"
    return f"Bars and bands: {kind} over samples; methods of equal caches are drawn side by side"


_PANEL_MM, _DIVERGENCE_AROUND_MM, _DIVERGENCE_LEGEND_MM = 52, 22, 3.4
_BANDS = 4
"""More bands than these hide one another: of more configurations the lines alone are drawn."""
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")
_WIDEST, _WIDTH = 2.6, 1.0


def draw_divergence(result: Divergence, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel of shares of answers that are still alike, and where KL was measured one of KL, with bands.

    A colour per policy and selection, a dash per what else tells the configurations apart.
    """
    with style.use():
        configs = by_held(result.configs, lambda one: one.held)
        narrow, panels = width_mm < style.WIDE_MM, 2 if result.noise_floor.size else 1
        columns = 1 if narrow else 2
        legend = _DIVERGENCE_LEGEND_MM * -(-len(configs) // columns)
        figure = style.figure(width_mm, _PANEL_MM * (panels if narrow else 1) + _DIVERGENCE_AROUND_MM + legend)
        axes = list(figure.subplots(*((panels, 1) if narrow else (1, panels)), squeeze=False).flat)
        handles = [
            _config(axes, result, one, name, look, bands=len(configs) <= _BANDS)
            for one, name, look in zip(configs, _names(result, configs), _divergence_looks(configs), strict=True)
        ]
        _finish(axes, result)
        figure.legend(handles=handles, loc="outside upper left", ncols=columns)
        style.foot(figure, result.identity, _told(result, len(configs)))
    return figure


def _names(result: Divergence, configs: Sequence[Parting]) -> list[str]:
    """What tells each from the others, and what its cache holds."""
    names = [name or "evicted" for name in short_names([one.config for one in configs])]
    start = " at the start" if result.compress_every else ""
    return [f"{name} (held {style.number(one.held)}{start})" for name, one in zip(names, configs, strict=True)]


def _divergence_looks(configs: Sequence[Parting]) -> list[dict[str, Any]]:
    """Colour, dash and width of each: what is drawn first is the widest, so that it is seen under its equals."""
    told = apart([one.config for one in configs])
    sides, others = (
        [" ".join(word for choice, word in words.items() if (choice in SIDE) == of_side) for words in told]
        for of_side in (True, False)
    )
    colours = dict(zip(dict.fromkeys(sides), style.category_colours(len(set(sides))), strict=True))
    dashes = dict(zip(dict.fromkeys(others), cycle(_DASHES), strict=False))
    widths = np.linspace(_WIDEST if 1 < len(configs) <= _BANDS else _WIDTH, _WIDTH, len(configs))
    return [
        {"color": colours[side], "linestyle": dashes[other], "linewidth": float(width)}
        for side, other, width in zip(sides, others, widths, strict=True)
    ]


def _config(
    axes: Sequence[Axes], result: Divergence, one: Parting, name: str, look: dict[str, Any], *, bands: bool
) -> Line2D:
    alike, band = one.free.alike_after(max(result.lengths))
    curves: list[tuple[Axes, Any, Any, Band, str]] = [(axes[0], np.arange(len(alike)), alike, band, "alike")]
    if one.forced is not None:
        middles = (np.arange(len(one.forced.curve)) + 0.5) * result.span - 0.5
        curves.append((axes[1], middles, one.forced.curve, one.forced.curve_interval, "kl"))
    for panel, places, values, ends, kind in curves:
        panel.plot(places, values, gid=f"{kind} {one.config.label()}",
                   drawstyle="steps-post" if kind == "alike" else "default", **look)  # fmt: skip
        if ends is not None and bands:
            panel.fill_between(places, ends.low, ends.high, color=look["color"], alpha=0.13, linewidth=0,
                               gid=f"{kind} band", step="post" if kind == "alike" else None)  # fmt: skip
    return Line2D([], [], label=name, **look)


def _finish(axes: Sequence[Axes], result: Divergence) -> None:
    axes[0].set(ylim=(-0.03, 1.03), ylabel="share of samples", xlabel="tokens of the answer")
    axes[0].set_title("Own answers: no token differs yet", loc="left")
    if len(axes) > 1:
        axes[1].set(ylim=(0, None), ylabel="KL, nat", xlabel="token of the full cache's answer")
        axes[1].set_title("Next token's distribution", loc="left")
        style.note(axes[1], f"everything kept: {np.nanmax(result.noise_floor):.1e}")
    for panel in axes:
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        panel.set_xlim(0, max(1, *result.lengths))


def _told(result: Divergence, configs: int) -> str:
    """n, what the bands are, and how many steps make a point."""
    samples = len(result.samples)
    means = f", each one's means over {result.span} tokens" if result.span > 1 else ""
    points = f" · KL: medians over samples{means}" if result.noise_floor.size else ""
    if configs > _BANDS or samples < 2:
        return f"n = {counted(samples, 'sample')}{points}"
    level = f"{100 * median_level(samples):.0f} % intervals" if samples >= LEAST else ""
    kind = level or "ranges of single samples"
    return f"bands: shares have exact 95 % intervals, KL {kind}, over n = {samples} samples{points}"


_JUDGED_ROW_MM, _JUDGED_AROUND_MM, _LETTERS_MM = 6.5, 30, 2.6
_COLOURS = {"win": "#0173b2", "tie": "0.75", "loss": "#de8f05"}


def draw_judged(result: Judged, width_mm: float = style.WIDE_MM) -> Figure:
    """A dot per configuration with its interval, and the full cache's as a line with its own."""
    with style.use():
        configs = by_held(result.configs, lambda one: one.held)
        named = [(one.config, one.held) for one in configs if one.config]
        figure, axes = _rows(_judged_names(named, result.compress_every, width_mm), width_mm)
        full = float(result.full.scores.mean())
        axes.axvline(full, color="0.35", linewidth=0.9, gid="full")
        if result.full.interval is not None:
            axes.axvspan(result.full.interval.low, result.full.interval.high, color="0.35", alpha=0.12, linewidth=0)
        for row, one in enumerate(configs):
            mean = float(one.scores.mean())
            axes.errorbar([mean], [row], xerr=style.bars(mean, one.interval), color=_COLOURS["win"], marker="o",
                          markersize=3.2, linewidth=0.9, gid="mean")  # fmt: skip
        axes.set_xlabel(f"mean score (line: full cache, {style.number(full)})")
        style.title(figure, "What the judge gives")
        style.foot(figure, result.identity, style.about(len(result.samples)))
    return figure


def draw_preferred(result: Preferences, width_mm: float = style.WIDE_MM) -> Figure:
    """A bar per configuration: shares of samples won, tied and lost; the exact interval of the losses."""
    with style.use():
        configs = by_held(result.configs, lambda one: one.held)
        named = [(one.config, one.held) for one in configs]
        figure, axes = _rows(_judged_names(named, result.compress_every, width_mm), width_mm)
        for row, one in enumerate(configs):
            left = 0.0
            for outcome in reversed(OUTCOMES):
                axes.barh(row, one.shares[outcome], left=left, height=0.62, color=_COLOURS[outcome], gid=outcome,
                          label=f"{outcome} of the evicted cache" if row == 0 else None)  # fmt: skip
                left += one.shares[outcome]
            loss = one.shares["loss"]
            axes.errorbar([loss], [row], xerr=style.bars(loss, one.intervals["loss"]), color="0.15", linewidth=0.8,
                          capsize=1.5, gid="interval")  # fmt: skip
        axes.set(xlim=(0, 1), xlabel="share of samples")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left",
                      ncols=1 if width_mm < style.WIDE_MM else 3)  # fmt: skip
        first = f"the answer shown first won {style.number(result.first)} of {counted(result.pairs, 'decided pair')}"
        samples = len(result.samples)
        kind = "bars: exact 95 % intervals of losses" if samples > 1 else "no intervals"
        style.foot(figure, result.identity, f"{kind}, n = {counted(samples, 'sample')} · {first}")
    return figure


def _rows(names: Sequence[str], width_mm: float) -> tuple[Figure, Axes]:
    """One panel with a named row per configuration, the first one on top."""
    lines = np.array([name.count("\n") + 1 for name in names])
    figure = style.figure(width_mm, float(np.maximum(_JUDGED_ROW_MM, lines * _LETTERS_MM).sum()) + _JUDGED_AROUND_MM)
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    return figure, axes


def _judged_names(configs: Sequence[tuple[EvictionConfig, float]], limit: int | None, width_mm: float) -> list[str]:
    """What tells each from the others, and what its cache holds; `limit`: above it caches were compressed again."""
    room, start = 24 if width_mm < style.WIDE_MM else 48, " at the start" if limit else ""
    names = short_names([config for config, _ in configs])
    return [
        folded(f"{name or 'evicted'} (held {style.number(share)}{start})", room)
        for name, (_, share) in zip(names, configs, strict=True)
    ]

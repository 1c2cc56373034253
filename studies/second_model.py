"""Two models on the same prompts, for results/second_model.md: `python docs/scripts/second_model.py FOLDER FOLDER`.

Each folder is one model's, as `make second-model` leaves it. Every table of the analyses stands once, with a row's
numbers for one model beside those for the other; `--figures FOLDER` draws the ablation of both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from needle import answer_places, digits_held
from numpy.typing import NDArray
from tables import TABLES, Ends, Made, analyses, number, percent, table

from perturbkv.analyses import names
from perturbkv.analyses.heads.head_comparison import compared_perturbation
from perturbkv.analyses.heads.heads import compare_heads
from perturbkv.analyses.json_values import parse_config_object
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import OptionalInterval, share_kind
from perturbkv.figures import style
from perturbkv.schema import MEASURED_LAYERS
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace

PARTS = ("heads", "ablation", "shares", "horizon")
"""Folders of a model's runs that have a summary of analyses."""
NEWS, SHARES, NEEDLE = Path("heads", "trace.h5"), Path("shares", "trace.h5"), Path("needle", "needle", "trace.h5")
SHOWN = {
    "heads": (
        ("setting", "treatment"),
        ("cache share", "isolated: share", "isolated: Σ", "propagated: share", "propagated: Σ"),
    ),
    "layers": (
        ("treatment, budget",),
        ("after the first measured layer", "after the last measured layer", "samples better"),
    ),
    "bound-tightness": (("budget", "σ"), ("share", "L/θ", "L/θ̂", "θ̂/θ̂_relax")),
    "rank agreement": (("budget", ""), ("θ", "θ̂", "1 − S", "θ̂ less 1 − S, points")),
    "assumption": (("budget",), ("top ⌊αb⌋: > 0.5", "stage 1: > 0.5", "S: > 0.5", "first layer, others (stage 1)")),
    "ablation": (
        ("", "α"),
        ("cache share", "isolated Σ", "isolated better", "propagated Σ", "propagated better"),
    ),
    "horizon, over": (("selection",), ("first third", "last third")),
    "horizon": (("selection", ""), ("first third", "last third", "growth")),
}
"""How a table's title begins -> the columns that name a row, and those that are shown of each model."""
KINDS = ("isolated", "propagated")
WINDOW = 512
"""Tokens that a sliding layer of the second model sees: a number farther back is seen by its full layers alone."""


@dataclass(frozen=True)
class Model:
    """One model's runs, under the name that tables call it."""

    name: str
    folder: Path

    def trace(self, part: Path) -> Trace:
        """Return a run of this model."""
        return read_trace(self.folder / part)

    def tables(self, part: str) -> list[Made]:
        """Return the tables of all analyses of one folder."""
        found = analyses(self.folder / part / "summary.json")
        return [made for name in TABLES if name in found for made in TABLES[name](found[name])]


def main() -> None:
    """Print every table, and draw the figure where a folder for it is given."""
    given = asked()
    models = [Model(name, folder) for name, folder in zip(given.names, given.folders, strict=True)]
    table("models", ["", *given.names], about(models))
    for part in PARTS:
        for pair in zip(*(model.tables(part) for model in models), strict=True):
            table(*beside(pair, given.names))
    table("two-stage over attention, by layer", *by_layer(models))
    table("needle", *needle(models))
    if given.figures:
        settings = [per_query(model.folder / "ablation" / "summary.json") for model in models]
        drawn = draw(given.names, [setting["rows"] for setting in settings], foot(models, settings[0]))
        drawn.savefig(given.figures / "second-model.png", dpi=200)


def asked() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs=2)
    parser.add_argument("--names", nargs=2, default=("SmolLM2", "Gemma 3"))
    parser.add_argument("--figures", type=Path)
    return parser.parse_args()


def about(models: Sequence[Model]) -> list[list[str]]:
    """Return the rows on the layers and heads that were measured, and on the length of the prompts for each model."""
    columns = []
    for model in models:
        news, hidden = model.trace(NEWS), model.trace(NEEDLE)
        layers, heads = news.arrays["theta"].shape[-2:]
        columns.append([
            f"`{news.run.model}`",
            news.attrs["weights_stored"] if "weights_stored" in news.attrs else news.attrs["weights"],
            measured(news),
            f"{layers * heads} of {layers} layers",
            *(told(trace) for trace in (news, hidden)),
        ])  # fmt: skip
    rows = ["model", "weights", "layers measured", "heads", "news prompts", "needle prompts"]
    return [[row, *cells] for row, *cells in zip(rows, *columns, strict=True)]


def measured(trace: Trace) -> str:
    """Return which layers were measured."""
    return str(trace.attrs.get(MEASURED_LAYERS) or f"all {trace.arrays['theta'].shape[-2]}")


def told(trace: Trace) -> str:
    """Return how many prompts there are, and how many tokens they have."""
    tokens = trace.arrays["prompt_tokens"][trace.ok]
    return f"{len(tokens)}: {tokens.min():,} to {tokens.max():,} tokens, {tokens.mean():,.0f} on average"


def beside(pair: Sequence[Made], names: Sequence[str]) -> Made:
    """Return one table of two models, of the same rows. Raises ValueError where their rows differ."""
    (title, heads, _), (_, others, _) = pair
    titles = dict.fromkeys(made[0] for made in pair)
    keys, shown = next(kept for start, kept in SHOWN.items() if title.startswith(start))
    named = [[[row[heads.index(key)] for key in keys] for row in rows] for _, heads, rows in pair]
    if heads != others or named[0] != named[1]:
        raise ValueError(
            f"expected the two models' tables of '{title}' to have the same rows, got {named[0]} and {named[1]}"
        )
    cells = [[[row[heads.index(column)] for column in shown] for row in rows] for _, heads, rows in pair]
    joined = [[*key, *first, *second] for key, first, second in zip(named[0], *cells, strict=True)]
    return " | ".join(titles), [*keys, *(f"{name}: {column}" for name in names for column in shown)], joined


def by_layer(models: Sequence[Model]) -> tuple[list[str], list[list[str]]]:
    """Return two-stage's sums over attention's in the first measured layer, and in all others."""
    columns = [layer_ratios(model.trace(NEWS)) | layer_ratios(model.trace(SHARES)) for model in models]
    heads = [f"{model.name}: {kind} Σ" for model in models for kind in KINDS]
    rows = [[*key, *(cell for column in columns for cell in column[key])] for key in columns[0]]
    return ["setting", "layers", *heads], rows


def layer_ratios(trace: Trace) -> dict[tuple[str, str], list[str]]:
    """Return (setting, layers) -> the ratios of both kinds of perturbation, with their intervals."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in compare_heads(trace, "attention", "two-stage"):
        pair = (trace.config_index(one.baseline.label()), trace.config_index(one.treatment.label()))
        for kind in KINDS:
            both, _ = compared_perturbation(Measurements(trace, "heads"), kind, "l1", pair)
            for name, layers in (("first measured", slice(0, 1)), ("all others", slice(1, None))):
                sums = [side[:, layers].sum(axis=(1, 2)) for side in both]
                found.setdefault((names.setting_name(one.baseline), name), []).append(over(*sums))
    return found


def over(baseline: Floats, treatment: Floats) -> str:
    """Return the ratio of two sums over samples."""

    def ratio(weights: Floats) -> Floats:
        return np.asarray((weights @ treatment) / (weights @ baseline))

    interval = intervals.of_statistic(ratio, len(baseline), intervals.RATIO)
    return number(float(treatment.sum() / baseline.sum()), ends(interval))


def needle(models: Sequence[Model]) -> tuple[list[str], list[list[str]]]:
    """Return what every cache finds of the hidden numbers, and how much of a number its heads keep."""
    traces = [model.trace(NEEDLE) for model in models]
    places = [answer_places(trace) for trace in traces]
    zones = zones_of(traces, places)
    columns = [
        [finding(trace, place, held, zones) for place in range(-1, len(trace.run.configs))]
        for trace, held in zip(traces, places, strict=True)
    ]
    labels = ["full cache", *names.short_names(traces[0].run.configs)]
    counts = [f"digits, {name} (n = {chosen.sum()})" for name, chosen in zones.items()]
    heads = ["cache share", "whole number", *counts, "tokens kept"]
    named = [f"{model.name}: {head}" for model in models for head in heads]
    rows = [[label, *first, *second] for label, first, second in zip(labels, *columns, strict=True)]
    return ["", *named], rows


def zones_of(traces: Sequence[Trace], places: Sequence[Sequence[range]]) -> dict[str, NDArray[np.bool_]]:
    """Return which numbers are in reach of a sliding layer for both models, and which lie farther from the end.

    A number in the window, which every configuration keeps, is in neither.
    """
    ends = [trace.arrays["prompt_tokens"] for trace in traces]
    behind = np.array([[end - place.start for end, place in zip(*both, strict=True)]
                       for both in zip(ends, places, strict=True)])  # fmt: skip
    kept = max(config.window for trace in traces for config in trace.run.configs)
    near, far = ((behind > kept) & (behind <= WINDOW)).all(axis=0), (behind > WINDOW).all(axis=0)
    return {"near": near, "far": far}


def finding(trace: Trace, config: int, places: Sequence[range], zones: dict[str, NDArray[np.bool_]]) -> list[str]:
    """Return a row's numbers for one model; −1 is the full cache."""
    full = config < 0
    score, digits = (trace.arrays[f"{name}_full"] if full else trace.arrays[name][:, config]
                     for name in ("score", "digits"))  # fmt: skip
    cells = ["1.00" if full else number(float(Measurements(trace, "needle").cache_shares[config]))]
    cells += [shown(score, intervals.of_share(score > 0))]
    cells += [shown(digits[chosen], intervals.of_mean(digits[chosen], share_kind(0))) for chosen in zones.values()]
    if full:
        return [*cells, f"{len(places[0])} of {len(places[0])}"]
    chosen = {sample: places[sample] for sample in np.flatnonzero(np.any(list(zones.values()), axis=0))}
    kept, _ = digits_held(trace, config, chosen)
    return [*cells, number(kept)]


def shown(values: NDArray[np.float64], interval: OptionalInterval) -> str:
    """Return a mean share with its interval."""
    return percent(float(values.mean()) if len(values) else None, ends(interval))


def ends(interval: OptionalInterval) -> Ends:
    """Return an interval as summary.json has it."""
    return interval and {"low": interval.low, "high": interval.high, "kind": interval.kind}


def per_query(summary: Path) -> dict[str, Any]:
    """Return the ablation with a kept set per query head."""
    settings: list[dict[str, Any]] = analyses(summary)["ablation"]["settings"]
    return next(one for one in settings if one["baseline"]["granularity"] == "query")


def foot(models: Sequence[Model], setting: dict[str, Any]) -> str:
    """Return the figure's foot: n, the setting, and each model's layers."""
    traces = [model.trace(NEWS) for model in models]
    layers = ", ".join(f"{model.name} {measured(trace)}" for model, trace in zip(models, traces, strict=True))
    said = names.setting_name(parse_config_object(setting["baseline"]), "alpha")
    return f"{style.interval_legend(int(traces[0].ok.sum()))} · {said} · layers measured: {layers}"


def draw(names: Sequence[str], rows: Sequence[Sequence[dict[str, Any]]], foot: str) -> Figure:
    """Return the figure of isolated and propagated sums over attention's; `rows` are each model's ablation."""
    with style.use():
        figure = style.figure(style.WIDE_MM, 92)
        panels = figure.subplots(1, 2, sharey=True)
        for panel, kind in zip(panels, ("isolated", "propagated"), strict=True):
            for place, (name, own) in enumerate(zip(names, rows, strict=True)):
                _points(panel, name, [row[kind] for row in own], place)
            _axes(panel, kind, [_title(row) for row in rows[0]])
        panels[0].legend(loc="lower right")
        style.lay_out_above(figure, 5)
        figure.text(0.008, 0.006, foot, fontsize=5, color="0.35")
    return figure


def _title(row: dict[str, Any]) -> str:
    return row["name"] if row["alpha"] is None else f"{row['name']}, α = {row['alpha']:g}"


def _points(axes: Axes, name: str, kinds: Sequence[dict[str, Any]], place: int) -> None:
    """Draw one model's row of points, each with its interval."""
    colour, ratios = style.category_colours(2)[place], [kind["sum_ratio"] for kind in kinds]
    ends = [kind["sum_ratio_interval"] or dict.fromkeys(("low", "high"), kind["sum_ratio"]) for kind in kinds]
    bars = [[ratio - end["low"] for ratio, end in zip(ratios, ends, strict=True)],
            [end["high"] - ratio for ratio, end in zip(ratios, ends, strict=True)]]  # fmt: skip
    heights = np.arange(len(kinds)) + (-0.15, 0.15)[place]
    axes.errorbar(ratios, heights, xerr=bars, linestyle="", color=colour, marker="os"[place], markersize=3.2,
                  linewidth=0.9, label=name)  # fmt: skip


def _axes(axes: Axes, kind: str, titles: Sequence[str]) -> None:
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    axes.set_yticks(range(len(titles)), titles)
    axes.set(ylim=(len(titles) - 0.5, -0.5), xlabel="Σ L1 over attention's (log axis)")
    axes.set_title(kind, loc="left")
    style.log_axes(axes, x=True)
    axes.grid(visible=True, axis="x")


if __name__ == "__main__":
    main()

"""Two models on the same whole prompts, for docs/results/second_model.md; `make second-model` runs all of it.

`python studies/second_model.py prompts LONGBENCH FOLDER` writes the prompts. `news.jsonl`: those of LongBench's first
`multi_news` samples that neither model's tokenizer makes longer than `--longest` tokens, so that nothing is cut and
both models read the same text. `needle.jsonl`: needle prompts, made once, with the first model's tokens. No chat
template: the second model has none.

`python studies/second_model.py tables FOLDER FOLDER`, where each folder is one model's runs on these prompts, prints
every table of the analyses once, with a row's numbers for one model beside those for the other, and draws the ablation
of both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Floats, Table, configuration, perturbation_of, setting_name, short_names
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from needle import answer_places, kept_digits
from numpy.typing import NDArray
from tables import TABLES, Made, analyses, number, percent

import perturbkv as pk

intervals = pk.stats.intervals
MODELS = ("smollm2-135m-q4_1", "gemma-3-270m-q4_k_m")
NEWS_SAMPLES, LONGEST = 40, 2100
"""Samples that are looked at, and tokens that neither model's prompt may exceed."""
DEPTHS, NEEDLES, LENGTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), 36, (600, 1000, 1500)
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
COLOURS = ("#0173B2", "#DE8F05")
"""Of both models, safe for colour-blind readers."""
WINDOW = 512
"""Tokens that a sliding layer of the second model sees: a number farther back is seen by its full layers alone."""


def write_prompts(asked: argparse.Namespace) -> None:
    """Write both files of prompts, and tell how many tokens the prompts have for each model."""
    models = [pk.load_model(name) for name in asked.models]
    news = pk.load_prompts("multi_news", models[0], samples=asked.news, data_dir=asked.folders[0], chat_template=False)
    texts = {"news": prompt_rows(news, models[0])}
    texts["news"] = [row for row in texts["news"] if max(token_counts(row, models)) <= asked.longest]
    needles = pk.load_prompts(
        "needle", models[0], samples=asked.needles, lengths=asked.lengths, depths=DEPTHS, chat_template=False
    )
    texts["needle"] = prompt_rows(needles, models[0])
    rows = []
    for name, made in texts.items():
        asked.written.append(asked.folders[1] / f"{name}.jsonl")
        asked.written[-1].parent.mkdir(parents=True, exist_ok=True)
        asked.written[-1].write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), "utf-8")
        for model, counts in zip(asked.models, np.transpose([token_counts(row, models) for row in made]), strict=True):
            rows.append([name, str(model), f"{len(counts)}: {lengths_text(counts)}"])
    common.write_tables(asked, [("prompts", ["", "model", "prompts"], rows)])


def prompt_rows(prompts: Sequence[pk.Prompt], model: Any) -> list[dict[str, Any]]:
    """Return the prompts as rows of a jsonl file, each under its own name; needle's with what grades an answer."""
    rows = []
    for prompt in prompts:
        text = model.tokenizer.decode(prompt.token_ids, skip_special_tokens=True)
        if prompt.task != "needle":
            rows.append({"id": prompt.sample_id, "prompt": text})
            continue
        question, _, begun = text.rpartition("\n")
        answer = {"answer_prefix": begun, "answers": list(prompt.answers), "metric": "exact-number"}
        rows.append({"id": prompt.sample_id, "prompt": question, **answer})
    return rows


def token_counts(row: dict[str, Any], models: Sequence[Any]) -> list[int]:
    """Return the number of tokens of a row's whole prompt for each model."""
    text = "\n".join(row[name] for name in ("prompt", "answer_prefix") if name in row)
    return [len(pk.Prompt.from_text(text, model, chat_template=False).token_ids) for model in models]


def lengths_text(counts: NDArray[Any]) -> str:
    """Return '300 to 2,000 tokens, 1,200 on average'."""
    return f"{counts.min():,} to {counts.max():,} tokens, {counts.mean():,.0f} on average"


@dataclass(frozen=True)
class Model:
    """One model's runs, under the name that tables call it."""

    name: str
    folder: Path

    def trace(self, part: Path) -> pk.Trace:
        """Return a run of this model."""
        return pk.read_trace(self.folder / part)

    def tables(self, part: str) -> list[Made]:
        """Return the tables of all analyses of one folder."""
        found = analyses(self.folder / part / "summary.json")
        return [made for name in TABLES if name in found for made in TABLES[name](found[name])]


def tables(models: Sequence[Model]) -> Iterator[Table]:
    """Yield every table."""
    names = [model.name for model in models]
    yield "models", ["", *names], model_rows(models)
    for part in PARTS:
        for pair in zip(*(model.tables(part) for model in models), strict=True):
            yield join_tables(pair, names)
    yield "two-stage over attention, by layer", *layer_rows(models)
    yield "needle", *needle_rows(models)


def study(asked: argparse.Namespace) -> None:
    """Write the prompts, or the tables and the picture of two models' runs."""
    if asked.work == "prompts":
        write_prompts(asked)
        return
    models = [Model(name, folder) for name, folder in zip(asked.names, asked.folders, strict=True)]
    settings = [per_query_ablation(model.folder / "ablation" / "summary.json") for model in models]
    figure = draw(asked.names, [setting["rows"] for setting in settings], foot_text(models, settings[0]))
    common.write_tables(asked, tables(models), figure)


def model_rows(models: Sequence[Model]) -> list[list[str]]:
    """Return the rows on the layers and heads that were measured, and on the length of the prompts for each model."""
    columns = []
    for model in models:
        news, hidden = model.trace(NEWS), model.trace(NEEDLE)
        layers, heads = news.arrays["theta"].shape[-2:]
        columns.append([
            f"`{news.run.model}`",
            news.attrs["weights_stored"] if "weights_stored" in news.attrs else news.attrs["weights"],
            measured_layers_text(news),
            f"{layers * heads} of {layers} layers",
            *(prompts_text(trace) for trace in (news, hidden)),
        ])  # fmt: skip
    rows = ["model", "weights", "layers measured", "heads", "news prompts", "needle prompts"]
    return [[row, *cells] for row, *cells in zip(rows, *columns, strict=True)]


def measured_layers_text(trace: pk.Trace) -> str:
    """Return which layers a trace measured: '5 11 17 of 18', or 'all 30'."""
    return str(trace.attrs.get("measured_layers") or f"all {trace.arrays['theta'].shape[-2]}")


def prompts_text(trace: pk.Trace) -> str:
    """Return how many prompts a trace has, and how many tokens these have."""
    counts = trace.arrays["prompt_tokens"][trace.ok]
    return f"{len(counts)}: {lengths_text(counts)}"


def join_tables(pair: Sequence[Made], names: Sequence[str]) -> Made:
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


def layer_rows(models: Sequence[Model]) -> tuple[list[str], list[list[str]]]:
    """Return two-stage's sums over attention's in the first measured layer, and in all others."""
    columns = [layer_ratios(model.trace(NEWS)) | layer_ratios(model.trace(SHARES)) for model in models]
    heads = [f"{model.name}: {kind} Σ" for model in models for kind in KINDS]
    rows = [[*key, *(cell for column in columns for cell in column[key])] for key in columns[0]]
    return ["setting", "layers", *heads], rows


def layer_ratios(trace: pk.Trace) -> dict[tuple[str, str], list[str]]:
    """Return (setting, layers) -> the ratios of both kinds of perturbation, with their intervals."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in pk.compare_heads(trace, "attention", "two-stage"):
        pair = (trace.config_index(one.baseline.label()), trace.config_index(one.treatment.label()))
        for kind in KINDS:
            both = perturbation_of(trace, kind, *pair)
            for name, layers in (("first measured", slice(0, 1)), ("all others", slice(1, None))):
                sums = [side[:, layers].sum(axis=(1, 2)) for side in both]
                found.setdefault((setting_name(one.baseline), name), []).append(ratio_text(*sums))
    return found


def ratio_text(baseline: Floats, treatment: Floats) -> str:
    """Return the ratio of two sums over samples."""
    value = float(treatment.sum() / baseline.sum())
    return number(value, common.to_json(intervals.of_ratio(treatment, baseline)))


def needle_rows(models: Sequence[Model]) -> tuple[list[str], list[list[str]]]:
    """Return what every cache finds of the hidden numbers, and how much of a number its heads keep."""
    traces = [model.trace(NEEDLE) for model in models]
    places = [answer_places(trace) for trace in traces]
    zones = number_zones(traces, places)
    columns = [
        [needle_cells(trace, place, held, zones) for place in range(-1, len(trace.run.configs))]
        for trace, held in zip(traces, places, strict=True)
    ]
    labels = ["full cache", *short_names(traces[0].run.configs)]
    counts = [f"digits, {name} (n = {chosen.sum()})" for name, chosen in zones.items()]
    heads = ["cache share", "whole number", *counts, "tokens kept"]
    named = [f"{model.name}: {head}" for model in models for head in heads]
    rows = [[label, *first, *second] for label, first, second in zip(labels, *columns, strict=True)]
    return ["", *named], rows


def number_zones(traces: Sequence[pk.Trace], places: Sequence[Sequence[range]]) -> dict[str, NDArray[np.bool_]]:
    """Return which numbers are in reach of a sliding layer for both models, and which lie farther from the end.

    A number in the window, which every configuration keeps, is in neither.
    """
    ends = [trace.arrays["prompt_tokens"] for trace in traces]
    behind = np.array([[end - place.start for end, place in zip(*both, strict=True)]
                       for both in zip(ends, places, strict=True)])  # fmt: skip
    kept = max(config.window for trace in traces for config in trace.run.configs)
    near, far = ((behind > kept) & (behind <= WINDOW)).all(axis=0), (behind > WINDOW).all(axis=0)
    return {"near": np.asarray(near), "far": np.asarray(far)}


def needle_cells(
    trace: pk.Trace, config: int, places: Sequence[range], zones: dict[str, NDArray[np.bool_]]
) -> list[str]:
    """Return a configuration's cells of the needle table for one model; index −1 is the full cache."""
    full = config < 0
    arrays = (trace.arrays[f"{name}_full"] if full else trace.arrays[name][:, config] for name in ("score", "digits"))
    score, digits = (np.asarray(array, dtype=np.float64) for array in arrays)
    cells = ["1.00" if full else number(float(common.cache_shares(trace)[config]))]
    cells += [share_text(score, intervals.of_share(score > 0))]
    cells += [
        share_text(digits[chosen], intervals.of_mean(digits[chosen], intervals.share_kind(0)))
        for chosen in zones.values()
    ]
    if full:
        return [*cells, f"{len(places[0])} of {len(places[0])}"]
    inside = np.any(list(zones.values()), axis=0)
    chosen = {sample: place for sample, place in enumerate(places) if inside[sample]}
    kept, _ = kept_digits(trace, config, chosen)
    return [*cells, number(kept)]


def share_text(values: Floats, interval: Any) -> str:
    """Return the mean of (sample,) shares with its interval in percent; a dash without samples."""
    return percent(float(values.mean()) if len(values) else None, common.to_json(interval))


def per_query_ablation(summary: Path) -> dict[str, Any]:
    """Return the ablation with a kept set per query head."""
    settings: list[dict[str, Any]] = analyses(summary)["ablation"]["settings"]
    return next(one for one in settings if one["baseline"]["granularity"] == "query")


def foot_text(models: Sequence[Model], setting: dict[str, Any]) -> str:
    """Return the figure's foot: n, the setting, and each model's layers."""
    traces = [model.trace(NEWS) for model in models]
    layers = ", ".join(
        f"{model.name} {measured_layers_text(trace)}" for model, trace in zip(models, traces, strict=True)
    )
    said = setting_name(configuration(setting["baseline"]), "alpha")
    samples = int(traces[0].ok.sum())
    kind = "95 % intervals" if samples >= intervals.MIN_SAMPLES else "ranges of single samples"
    return f"bars: {kind} over n = {samples} samples · {said} · layers measured: {layers}"


def draw(names: Sequence[str], rows: Sequence[Sequence[dict[str, Any]]], foot: str) -> Figure:
    """Return the figure of isolated and propagated sums over attention's; `rows` are each model's ablation."""
    figure = common.page_figure(92)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, kind in zip(panels, KINDS, strict=True):
        for place, (name, own) in enumerate(zip(names, rows, strict=True)):
            _draw_points(panel, name, [row[kind] for row in own], place)
        _label_axes(panel, kind, [_row_label(row) for row in rows[0]])
    panels[0].legend(loc="lower right")
    figure.supxlabel(foot, x=0.008, ha="left", fontsize=5, color="0.35")
    return figure


def _row_label(row: dict[str, Any]) -> str:
    """Return the label of a row of the ablation, with its α where it has one."""
    return row["name"] if row["alpha"] is None else f"{row['name']}, α = {row['alpha']:g}"


def _draw_points(axes: Axes, name: str, kinds: Sequence[dict[str, Any]], place: int) -> None:
    """Draw one model's points, each with its interval; `place` is 0 or 1, the model's place in each row."""
    ratios = [kind["sum_ratio"] for kind in kinds]
    ends = [kind["sum_ratio_interval"] or dict.fromkeys(("low", "high"), kind["sum_ratio"]) for kind in kinds]
    bars = [[ratio - end["low"] for ratio, end in zip(ratios, ends, strict=True)],
            [end["high"] - ratio for ratio, end in zip(ratios, ends, strict=True)]]  # fmt: skip
    heights = np.arange(len(kinds)) + (-0.15, 0.15)[place]
    axes.errorbar(ratios, heights, xerr=bars, linestyle="", color=COLOURS[place], marker="os"[place], markersize=3.2,
                  linewidth=0.9, label=name)  # fmt: skip


def _label_axes(axes: Axes, kind: str, titles: Sequence[str]) -> None:
    """Label a panel's axes: a title per row, ratios on a logarithmic axis with a line at 1."""
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    axes.set_yticks(range(len(titles)), titles)
    axes.set(ylim=(len(titles) - 0.5, -0.5), xlabel="Σ L1 over attention's (log axis)")
    axes.set_title(kind, loc="left")
    common.plain_log(axes, "x")
    axes.grid(visible=True, axis="x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("prompts", "tables"))
    parser.add_argument("folders", type=Path, nargs=2, help="LongBench's and the prompts'; or each model's runs")
    parser.add_argument("--names", nargs=2, default=("SmolLM2", "Gemma 3"), help="of the models in the tables")
    parser.add_argument("--models", nargs=2, default=MODELS, help="whose tokenizers count")
    parser.add_argument("--news", type=int, default=NEWS_SAMPLES, help="news samples that are looked at")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a news prompt, in either model's")
    parser.add_argument("--needles", type=int, default=NEEDLES, help="needle prompts")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a needle prompt")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document and the picture")
    common.main(study, parser)

"""The tables of docs/results/one_model.md, from what the commands of `make tables` left.

`python studies/tables.py SUMMARY.json …` prints those of every analysis in each summary. Other studies of such runs
take their tables and the text of their numbers from here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import common
from common import configuration, setting_name

import perturbkv as pk

BOUNDS = ("θ", "θ̂", "1 − S")
CONTENDERS = 4
"""Selections that rank by the window's attention; the others are controls."""
Cells = list[list[str]]
Made = tuple[str, list[str], Cells]
"""A table: its title, its heads, its rows."""
Ends = dict[str, Any] | None
"""An interval as summary.json has it: low, high, and whether it is an `interval` or a `range`."""


def number(value: float | None, ends: Ends = None, digits: int = 2) -> str:
    """Return '0.71 [0.65, 0.78]', or of a range '0.71 (0.65 … 0.78)'."""
    return "–" if value is None else f"{value:z.{digits}f}{_interval_text(ends, f'z.{digits}f')}".replace("-", "−")


def percent(value: float | None, ends: Ends = None) -> str:
    """Return '72 % [58, 82]', or of a range '72 % (58 … 82)'."""
    hundred = ends and {**ends, "low": 100 * ends["low"], "high": 100 * ends["high"]}
    return "–" if value is None else f"{100 * value:z.0f} %{_interval_text(hundred, 'z.0f')}".replace("-", "−")


def points(value: float | None, ends: Ends = None) -> str:
    """Return a difference of shares in points: '4.4 [3.5, 5.3]'."""
    hundred = ends and {**ends, "low": 100 * ends["low"], "high": 100 * ends["high"]}
    return number(None if value is None else 100 * value, hundred, 1)


def _interval_text(ends: Ends, shown: str) -> str:
    """Return ' [0.65, 0.78]', or a range ' (0.65 … 0.78)', with numbers in the format `shown`; empty for None."""
    if not ends:
        return ""
    low, high = (f"{ends[end]:{shown}}" for end in ("low", "high"))
    return f" ({low} … {high})" if ends["kind"] == "range" else f" [{low}, {high}]"


def interval_at(band: dict[str, Any] | None, place: int) -> Ends:
    """Return the interval at an index of an array of them; None where there is none."""
    if band is None or band["low"][place] is None:
        return None
    return {"low": band["low"][place], "high": band["high"][place], "kind": band["kind"]}


def selection_name(config: dict[str, Any]) -> str:
    """Return a configuration's selection, without its options."""
    return str(config["selection"]).partition("(")[0]


def bound_tightness(found: dict[str, Any]) -> list[Made]:
    """Return the two-stage selection's ratios, then rank agreement."""
    return [_ratio_table(found), _agreement_table(found)]


def _ratio_table(found: dict[str, Any]) -> Made:
    """Return the quantiles of L over the bounds, of two-stage, per budget: heads with σ > ½, then the others."""
    rows = []
    for config in found["configurations"]:
        if selection_name(config["config"]) != "two-stage":
            continue
        for where, name in (("evidence", "> 0.5"), ("sigma_at_most_half", "≤ 0.5")):
            share = config["sigma_at_most_half_share"]
            spreads = [spread[where] for spread in config["ratios"].values()]
            cells = [f"{number(low)}–{number(high)}" for low, _, _, _, high in spreads]  # quantiles 5 to 95 %
            medians = [number(spread[2]) for spread in spreads]
            rows.append([
                str(config["config"]["budget"]) if where == "evidence" else "",
                number(config["retained_mass"]) if where == "evidence" else "",
                name,
                percent(1 - share if where == "evidence" else share),
                *(f"{median} ({cell})" for median, cell in zip(medians, cells, strict=True)),
            ])  # fmt: skip
    return "bound-tightness, two-stage", ["budget", "S", "σ", "share", "L/θ", "L/θ̂", "θ/θ̂", "θ̂/θ̂_relax"], rows


def _agreement_table(found: dict[str, Any]) -> Made:
    """Return ρ of θ and 1 − S over the contenders; two-stage against two others, with θ̂ where stage 1 is shared."""
    rows = []
    for agreement in found["rank_agreement"]:
        ranked = {one["bound"]: one for one in agreement["rank_correlations"] if len(one["selections"]) == CONTENDERS}
        rhos = {bound: number(one["mean"], one["interval"]) for bound, one in ranked.items()}
        counted = next(iter(ranked.values()), {"values": 0, "samples": 0})
        budget = str(agreement["setting"]["budget"])
        rows.append(
            [budget, "ρ, four selections", *(rhos.get(bound, "–") for bound in BOUNDS), "–", _counts_text(counted)]
        )
        for other, name in (("attention", "against attention"), ("two-stage-uniform", "against ν ≡ 1")):
            picked = {one["bound"]: one for one in agreement["concordance"]
                      if {one["first"], one["second"]} == {other, "two-stage"}}  # fmt: skip
            if picked:
                rows.append(["", name, *_pick_cells(picked), _counts_text(picked["θ"])])
    return "rank agreement", ["budget", "", *BOUNDS, "θ̂ less 1 − S, points", "n"], rows


def _pick_cells(picked: dict[str, dict[str, Any]]) -> list[str]:
    """Return how often each bound tells which of two perturbs less, and θ̂ less 1 − S; dashes under five samples."""
    told = {bound: one for bound, one in picked.items() if one["samples"] >= pk.stats.intervals.MIN_SAMPLES}
    cells = [percent(told[bound]["share"], told[bound]["interval"]) if bound in told else "–" for bound in BOUNDS]
    return [*cells, points(told["θ̂"]["gain"], told["θ̂"]["gain_interval"]) if "θ̂" in told else "–"]


def _counts_text(one: dict[str, Any]) -> str:
    """Return the heads that count, of how many samples."""
    return f"{one['values']:,} in {one['samples']}"


def assumption(found: dict[str, Any]) -> list[Made]:
    """Return shares above a half, both readings, and the layers of the heads below."""
    rows = []
    for config in found["configurations"]:
        cells = [str(config["config"]["budget"])]
        for name in ("sigma_topk", "sigma_stage1", "retained_mass"):
            reading = config[name]
            below = [head["layer"] for head in reading["heads_at_most_half"]]
            cells += [percent(reading["share_above_half"], reading["share_above_half_interval"]), str(len(below))]
        by_layer = config["sigma_stage1"]["share_above_half_by_layer"]
        cells.append(f"{percent(by_layer[0])}, {percent(sum(by_layer[1:]) / len(by_layer[1:]))}")
        rows.append(cells)
    heads = ["budget", "top ⌊αb⌋: > 0.5", "heads below", "stage 1: > 0.5", "heads below", "S: > 0.5", "heads below",
             "first layer, others (stage 1)"]  # fmt: skip
    return [("assumption", heads, rows)]


def layers(found: dict[str, Any]) -> list[Made]:
    """Return median drift after some layers and the ratio of its means; per sample; against the budget."""
    rows = []
    samples = found.get("per_sample", [None] * len(found["drifts"]))
    for drift, sample in zip(found["drifts"], samples, strict=True):
        last = len(drift["ratio"]) - 1
        cells = [f"{selection_name(drift['treatment'])}, {drift['baseline']['budget']}"]
        for layer in (0, last // 2, last):
            sides = f"{drift['baseline_median_drift'][layer]:,.0f} → {drift['treatment_median_drift'][layer]:,.0f}"
            cells.append(f"{sides}, × {number(drift['ratio'][layer], interval_at(drift['ratio_interval'], layer))}")
        if sample:
            cells.append(percent(sample["improved_share"], sample["improved_share_interval"]))
        rows.append(cells)
    heads = ["treatment, budget", *(f"after the {place} measured layer" for place in ("first", "middle", "last"))]
    made = [("layers", [*heads, "samples better"] if samples[0] else heads, rows)]
    return [*made, budget_table(found["budgets"]["curves"])] if "budgets" in found else made


def budget_table(curves: list[dict[str, Any]]) -> Made:
    """Return the table of every curve's numbers per budget, the smallest first; dashes where a curve lacks it."""
    kept = {size: share for curve in curves for size, share in zip(curve["budgets"], curve["kept"], strict=True)}
    rows = []
    for size in sorted(kept, key=lambda size: kept[size]):
        each = [_budget_cells(curve, curve["budgets"].index(size)) if size in curve["budgets"] else ["–"] * 4
                for curve in curves]  # fmt: skip
        rows.append([str(size), *(cell for cells in each for cell in cells)])
    names = [f"{curve['name']}: {what}" for curve in curves for what in ("held", "drift", "KL, nat", "same token")]
    return "budgets", ["budget", *names], rows


def _budget_cells(curve: dict[str, Any], place: int) -> list[str]:
    """Return a curve's cells at the index of a budget: cache share, drift, KL, share of equal tokens."""
    medians, intervals = curve["medians"], curve["intervals"]
    return [
        number(curve["held"][place]),
        f"{medians['drift'][place]:,.0f}",
        number(medians["kl"][place], interval_at(intervals["kl"], place), 4),
        percent(medians["top1"][place], interval_at(intervals["top1"], place)),
    ]


def ablation(found: dict[str, Any]) -> list[Made]:
    """Return L1 over the baseline's for every row and α, isolated and propagated."""
    made = []
    for setting in found["settings"]:
        shared = setting_name(configuration(setting["baseline"]), "alpha", "product")
        for part in ("rows", "brings"):
            rows = []
            for row in setting[part]:
                cells = [row["name"], "" if row["alpha"] is None else f"{row['alpha']:g}",
                         number(row["held_over_full_treatment"])]  # fmt: skip
                for kind in ("isolated", "propagated"):
                    part_of = row[kind]
                    cells += [number(part_of["sum_ratio"], part_of["sum_ratio_interval"]),
                              number(part_of["median_ratio"], part_of["median_ratio_interval"]),
                              percent(part_of["better_share"], part_of["better_share_interval"])]  # fmt: skip
                rows.append(cells)
            sides = ("isolated", "propagated")
            heads = [
                "",
                "α",
                "cache share",
                *(f"{side} {what}" for side in sides for what in ("Σ", "median head", "better")),
            ]
            made.append((f"ablation, {shared}: {part}", heads, rows))
    return made


def heads(found: dict[str, Any]) -> list[Made]:
    """Return every treatment against its baseline, isolated and propagated."""
    rows, before = [], ""
    for one in found["comparisons"]:
        setting = setting_name(configuration(one["baseline"]))
        cells = [setting if setting != before else "", selection_name(one["treatment"]),
                 number(one["held_over_full_treatment"])]  # fmt: skip
        for kind in (one["isolated"], one["propagated"]):
            counts = " / ".join(str(kind[name]) for name in ("improved", "tied", "worsened"))
            cells += [counts, percent(kind["better_share"], kind["better_share_interval"]),
                      number(kind["sum_ratio"], kind["sum_ratio_interval"]),
                      number(kind["median_ratio"], kind["median_ratio_interval"])]  # fmt: skip
        rows.append(cells)
        before = setting
    sides = [f"{side}: {what}" for side in ("isolated", "propagated") for what in ("+ / = / −", "share", "Σ", "median")]
    return [("heads", ["setting", "treatment", "cache share", *sides], rows)]


def horizon(found: dict[str, Any]) -> list[Made]:
    """Return first and last third of the steps, and how many heads grow or shrink beyond chance."""
    rows = []
    for config in found["configs"]:
        for curve in config["curves"]:
            decided = curve["sign_flips"]
            rows.append([selection_name(config["config"]), curve["kind"], number(curve["first"], digits=3),
                         number(curve["last"], digits=3), number(curve["growth"], curve["growth_interval"]),
                         f"{decided['above']} / {decided['below']}"])  # fmt: skip
    heads = ["selection", "", "first third", "last third", "growth", "+ / −"]
    return [(f"horizon, {found['samples_with_growth']} samples", heads, rows), _advantage_table(found)]


def _advantage_table(found: dict[str, Any]) -> Made:
    """Return the treatment over the baseline, propagated, in the first and in the last third of the steps."""
    thirds = ("first", "last")
    rows = [[selection_name(one["treatment"]), *(number(one[third], one[f"{third}_interval"]) for third in thirds)]
            for one in found["advantages"]]  # fmt: skip
    return "horizon, over attention", ["selection", "first third", "last third"], rows


def methods(found: dict[str, Any]) -> list[Made]:
    """Return every method over SnapKV, over random entries with its own protection, and what comes out."""
    made = []
    for one in found["settings"]:
        rows = [_method_row("snapkv (= 1)", one["controls"], {}, one)]
        rows += [_method_row(row["name"], row["controls"], row, row) for row in one["rows"]]
        heads = ["", "propagated Σ", "over random, same ends", "isolated Σ", "last layer's drift", "KL, nat"]
        made.append((f"methods, {setting_name(configuration(one['baseline']))}", heads, rows))
    return made


def _method_row(name: str, controls: dict[str, Any], row: dict[str, Any], kl: dict[str, Any]) -> list[str]:
    """Return a method's row; `row` is its comparison with SnapKV, empty for SnapKV, and `kl` holds its median KL."""
    over = [row.get("propagated"), controls.get("random", {}).get("propagated"), row.get("isolated")]
    ratios = [number(kind["sum_ratio"], kind["sum_ratio_interval"]) if kind else "" for kind in over]
    drift = number(row["drift_ratio"], row["drift_ratio_interval"]) if row else ""
    return [f"`{name}`", *ratios, drift, number(kl["kl_median"], kl["kl_median_interval"], digits=5)]


TABLES = {
    "heads": heads,
    "bound-tightness": bound_tightness,
    "assumption": assumption,
    "layers": layers,
    "ablation": ablation,
    "ablation-methods": methods,
    "horizon": horizon,
}


def analyses(summary: Path) -> dict[str, dict[str, Any]]:
    """Return what a summary.json holds: analysis -> its numbers."""
    found: dict[str, dict[str, Any]] = json.loads(summary.read_text())["analyses"]
    return found


def tables(summary: Path) -> list[Made]:
    """Return the tables of everything that a summary.json holds."""
    return [made for name, numbers in analyses(summary).items() for made in TABLES[name](numbers)]


def study(asked: argparse.Namespace) -> None:
    """Write the tables of all summaries."""
    common.write_tables(asked, [made for summary in asked.summaries for made in tables(summary)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summaries", type=Path, nargs="+", help="the summary.json of runs")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    common.main(study, parser)

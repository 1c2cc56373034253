"""Whether another distance than L1 changes what is concluded, as the paper's appendix G asks.

What is asked. Perturbation is the L1 distance between a head's output from the full and from the evicted cache. L2 and
1 − cos could stand in its place twice: as what is *measured* (do verdicts, the order of methods, and what goes with
lost answers stay?), and as what *selects* (`two-stage(norm=l2)` ranks by L2 norms of the projected values).

How it is decided. Every treatment is compared with the baseline in each distance, isolated and propagated, by the ratio
of sums over heads and samples. A comparison is decided where the interval of its ratio leaves out 1; another distance
then says the same, the opposite, or one of both alone is decided. Heads tie by each distance's own noise floor, so that
a verdict on a head is the opposite only beyond two floors of each. Methods are ranked where at least three share
budget, granularity, precision, correction and protection. ρ is Spearman's between the configurations of one prompt,
mean over the prompts in which both sides differ. KL is of the very step whose heads are measured: that correlation
nearly is circular. Answers are compared with the first step's perturbation, of prompts that the full cache answers.
Controls: the same selection by L1 norms, and `random`, whose gap every distance has to see.

    python studies/measures.py --budget 128 --budget 0.1
    python studies/measures.py runs/link/trace.h5 --baseline two-stage --treatment value

What is left: trace.h5 (where it measures), measures.json, measures.png. Fewer than five samples decide nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from common import (
    error_bars,
    interval_text,
    main,
    number_text,
    options,
    page_figure,
    plain_log,
    read_or_measure,
    save,
    show,
    side_of,
)
from matplotlib.figure import Figure
from numpy.typing import NDArray

import perturbkv as pk

Floats = NDArray[np.float64]
Pair = tuple[pk.EvictionConfig, pk.EvictionConfig]
Measure = tuple[str, str]
"""A kind of perturbation and a distance: ('isolated', 'l2')."""

DISTANCES = {"l1": "", "l2": "_l2", "cosine": "_cosine"}
"""Distance -> the end of its variables' names."""
OTHERS = ("l2", "cosine")
KINDS = ("isolated", "propagated")
MEASURES: tuple[Measure, ...] = tuple((kind, distance) for kind in KINDS for distance in DISTANCES)
TREATMENTS = ("two-stage", "two-stage(norm=l2)", "attention-unpooled", "hindsight", "hindsight(norm=l2)", "random")
"""What is compared by default, as far as a trace has it."""
SHARED = ("granularity", "precision", "correction", "protect_first", "protect_recent")
"""Choices that change the size of a cache: methods are ranked only where these and the budget are the same.

They restate CACHE_SIZE_CHOICES of perturbkv.analyses.sides, which is no public name."""
LEAST_RANKED = 3
"""Smallest number of methods that are ranked: LEAST_CONFIGS of perturbkv.analyses.sides."""
CONCLUSIONS = ("same", "opposite", "alone")
"""What another distance concludes beside L1: the same, the opposite, or one of both alone is decided."""
LOST = 0.5
"""An answer is lost where its score is below this share of the full cache's."""
ROUNDING = 1e-9

intervals, ranks = pk.stats.intervals, pk.stats.rank_correlation
KIND_OF_RHO, KIND_OF_AREA = intervals.CORRELATION, intervals.share_kind(0)
STATISTICS = {
    "kl": (KIND_OF_RHO, intervals.StatisticKind(3 / 8, limits=(-2, 2))),
    "score": (KIND_OF_RHO, intervals.StatisticKind(3 / 8, limits=(-2, 2))),
    "lost": (KIND_OF_AREA, intervals.StatisticKind(3 / 8, limits=(-1, 1))),
}
"""What is lost -> the kinds of a measure's correlation with it, and of the difference between two measures'."""


def arguments() -> argparse.ArgumentParser:
    """Return the parser of this study's options."""
    parser = options(__doc__ or "")
    parser.add_argument("--baseline", default="attention", help="a selection, or policy:selection [%(default)s]")
    parser.add_argument("--treatment", action="append", help="likewise; may be repeated [those that selections allow]")
    parser.add_argument("--step", type=int, default=0, help="decode step, from 0 [%(default)s]")
    return parser


def study(asked: argparse.Namespace) -> None:
    """Measure or read a trace; print and write what each distance says of it."""
    selections = [asked.baseline, *(asked.treatment or TREATMENTS)]
    trace = read_or_measure(asked, pk.grid(asked.budget or [128], selection=selections), steps=asked.step + 1)
    found = analyse(trace, asked.baseline, asked.treatment, asked.step)
    print_tables(found)
    save(asked, found, draw(found))


def analyse(trace: pk.Trace, baseline: str = "attention", treatments: Any = None, step: int = 0) -> dict[str, Any]:
    """Return the numbers of all settings, and of all together.

    Raises PerturbkvError where the trace lacks the sides, a distance or the step.
    """
    configs = trace.run.configs
    sides = treatments or [name for name in TREATMENTS if any(_has_selection(config, name) for config in configs)]
    if not sides:
        raise pk.PerturbkvError(f"expected one of {', '.join(TREATMENTS)} in {trace.source}; name one: --treatment")
    if missing := [f"perturbation_{kind}{end}" for kind in KINDS for end in DISTANCES.values()
                   if f"perturbation_{kind}{end}" not in trace.arrays]:  # fmt: skip
        raise pk.PerturbkvError(f"expected L2 and cosine distances in {trace.source}, got none of {missing[0]}")
    compared: dict[Pair, dict[str, Any]] = {}
    for name in sides:
        compared.update(comparisons(trace, baseline, name, step))
    sums, settings, each = head_sums(trace, step), [], []
    for name, indices in comparable_groups(configs).items():
        own = [pair for pair in compared if pair[0] in [configs[index] for index in indices]]
        if own:
            ranked = len(indices) >= LEAST_RANKED
            each.append(correlations(trace, sums, indices, step) if ranked else {})
            settings.append({
                "name": name,
                "comparisons": [compared[pair] for pair in own],
                "norms": list(norm_comparisons(trace, indices, step)),
                "orders": [method_ranks(kind, sums, indices, configs) for kind in KINDS] if ranked else [],
                "links": mean_correlations(each[-1]),
            })  # fmt: skip
    about = {"model": trace.run.model, "dataset": trace.run.dataset, "trace_digest": trace.digest}
    samples = int(trace.measured[:, step].sum())
    return {**about, "samples": samples, "failed": len(trace.failures), "step": step, "settings": settings,
            "together": summary_over_settings(settings, sums, each, trace)}  # fmt: skip


def _has_selection(config: pk.EvictionConfig, name: str) -> bool:
    """Return whether a configuration's selection is the one of TREATMENTS that is called `name`."""
    return config.selection.name == name.partition("(")[0] and ("norm=l2" not in name or config.euclidean)


def comparable_groups(configs: Sequence[pk.EvictionConfig]) -> dict[str, list[int]]:
    """Return setting -> indices of the configurations that share budget and the choices of SHARED.

    The groups are those of perturbkv.analyses.sides.comparable_groups, under other names.
    """
    varied = [name for name in SHARED if len({getattr(config, name) for config in configs}) > 1]
    groups: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        words = [f"b={config.budget}", *(f"{name}={getattr(config, name)}" for name in varied)]
        groups.setdefault(" ".join(words), []).append(index)
    return groups


def comparisons(trace: pk.Trace, baseline: str, treatment: str, step: int) -> dict[Pair, dict[str, Any]]:
    """Return pair -> its comparison in every distance, of all pairs of the trace that the two names stand for."""
    heads: dict[Any, Any] = {}
    drift: dict[Any, Any] = {}
    for distance in DISTANCES:
        for one in pk.compare_heads(trace, baseline, treatment, step=step, distance=distance):
            heads[one.baseline, one.treatment, distance] = one
        for drifts in pk.layer_drift(trace, baseline, treatment, step=step, distance=distance).drifts:
            drift[drifts.baseline, drifts.treatment, distance] = drifts
    pairs = dict.fromkeys((first, second) for first, second, _ in heads)
    return {
        pair: comparison({distance: heads[*pair, distance] for distance in DISTANCES},
                         {distance: drift[*pair, distance] for distance in DISTANCES})
        for pair in pairs
    }  # fmt: skip


def comparison(heads: Mapping[str, Any], drift: Mapping[str, Any]) -> dict[str, Any]:
    """Return one treatment against its baseline, from its comparisons of heads and of drift: distance -> result."""
    first = heads["l1"]
    return {
        "baseline": first.baseline,
        "treatment": first.treatment,
        "held_over_full_baseline": first.cache_share_baseline,
        "held_over_full_treatment": first.cache_share,
        "drift": [
            {"distance": name, "ratio": float(one.ratio[-1]),
             "interval": None if one.ratio_interval is None else one.ratio_interval.at(-1)}
            for name, one in drift.items()
        ],
        "measured": [sum_ratios(kind, name, getattr(heads[name], kind)) for kind, name in MEASURES],
        "against_l1": [verdict_changes(kind, name, getattr(first, kind), getattr(heads[name], kind))
                       for kind in KINDS for name in OTHERS],
    }  # fmt: skip


def sum_ratios(kind: str, distance: str, heads: Any) -> dict[str, Any]:
    """Return the ratios and verdicts of one kind of perturbation in one distance, over all heads."""
    names = ("sum_ratio", "sum_ratio_interval", "median_ratio", "median_ratio_interval", "better_share",
             "better_share_interval", "improved", "tied", "worsened")  # fmt: skip
    numbers = {name: getattr(heads, name) for name in names}
    return {"kind": kind, "distance": distance, **numbers, "noise_floor_relative_median": heads.floor_relative_median}


def verdict_changes(kind: str, distance: str, first: Any, second: Any) -> dict[str, Any]:
    """Return the shares of heads whose verdicts in L1 (`first`) and another distance differ, and what both conclude."""
    signs = [np.sign(one.differences).reshape(len(one.differences), -1) for one in (first, second)]
    opposite = (signs[0] * signs[1] < 0).mean(axis=1)
    alone = ((signs[0] == 0) != (signs[1] == 0)).mean(axis=1)
    share = intervals.rare_share_kind(signs[0].shape[1])
    verdicts = [side_of(one.sum_ratio_interval, 1) if one.differences.any() else 0 for one in (first, second)]
    conclusion = "same" if verdicts[0] == verdicts[1] else "opposite" if all(verdicts) else "alone"
    return {
        "kind": kind, "distance": distance,
        "opposite": float(opposite.mean()), "opposite_interval": intervals.of_mean(opposite, share),
        "alone": float(alone.mean()), "alone_interval": intervals.of_mean(alone, share),
        "conclusion": conclusion,
    }  # fmt: skip


def norm_comparisons(trace: pk.Trace, indices: Sequence[int], step: int) -> Iterator[dict[str, Any]]:
    """Yield each selection by L2 norms against the same by L1 norms, where a setting has both."""
    configs = [trace.run.configs[index] for index in indices]
    for config in filter(lambda one: one.euclidean, configs):
        for other in configs:
            if not other.euclidean and {**other.flat(), "selection_norm": "l2"} == config.flat():
                both = trace.sel(where=lambda one, pair=(other, config): one in pair)  # type: ignore[misc]
                name = config.selection.name
                yield from comparisons(both, name, f"{name}(norm=l2)", step).values()


def variable_at_step(trace: pk.Trace, name: str, step: int) -> Floats:
    """Return a variable at a decode step, over the samples whose text has it: (sample, config, …)."""
    array: Floats = np.asarray(trace.get(name, "measures"), dtype=np.float64)
    return np.asarray(array[trace.measured[trace.ok][:, step]].take(step, axis=2))


def head_sums(trace: pk.Trace, step: int) -> dict[Measure, Floats]:
    """Return measure -> (sample, config) sums over heads; configurations whose caches are the same get one number."""
    first = first_equal_cache(trace)[trace.measured[trace.ok][:, step]]
    return {
        (kind, name): np.take_along_axis(
            variable_at_step(trace, f"perturbation_{kind}{DISTANCES[name]}", step).sum(axis=(2, 3)), first, axis=1
        )
        for kind, name in MEASURES
    }


def first_equal_cache(trace: pk.Trace) -> NDArray[np.int64]:
    """Return (sample, config) the index of the first configuration whose cache is the same, entry for entry."""
    configs, whole = trace.run.configs, trace.arrays["evicted"][trace.ok] == 0
    first = np.tile(np.arange(len(configs)), (len(whole), 1))
    for later, one in enumerate(configs):
        for earlier in reversed(range(later)):
            other = configs[earlier]
            alike = (
                one.evicts and other.evicts and one.correction == other.correction and one.in_cache == other.in_cache
            )
            stored = (whole[:, earlier] | alike) & (one.precision == other.precision)
            same = trace.same_kept(earlier, later).all(axis=(1, 2)) & stored
            first[same, later] = first[same, earlier]
    return first


def method_ranks(
    kind: str, sums: Mapping[Measure, Floats], indices: Sequence[int], configs: Sequence[pk.EvictionConfig]
) -> dict[str, Any]:
    """Return the methods' ranks by each distance, 1 perturbs least, and the pairs that change places."""
    values = {name: sums[kind, name][:, indices] for name in DISTANCES}
    own = [configs[index] for index in indices]
    places = {name: ranks.mean_ranks(array.mean(axis=0)) for name, array in values.items()}
    rho = agreement(kind, sums, indices)
    swaps = []
    for first, second in combinations(np.argsort(values["l1"].mean(axis=0), kind="stable").tolist(), 2):
        gaps = {name: array[:, second].sum() - array[:, first].sum() for name, array in values.items()}
        sure = {
            name: side_of(intervals.of_ratio(array[:, second], array[:, first]), 1) for name, array in values.items()
        }
        swaps += [
            {"distance": name, "first": own[first], "second": own[second], "decided": bool(sure["l1"] and sure[name])}
            for name in OTHERS
            if np.sign(gaps["l1"]) * np.sign(gaps[name]) < 0
        ]
    return {
        "kind": kind,
        "rho": {name: intervals.estimate_mean(array, KIND_OF_RHO) for name, array in rho.items()},
        "swaps": swaps,
        "methods": [
            {"config": config, "ranks": {name: float(place[at]) for name, place in places.items()}}
            for at, config in enumerate(own)
        ],
    }


def agreement(kind: str, sums: Mapping[Measure, Floats], indices: Sequence[int]) -> dict[str, Floats]:
    """Return other distance -> (sample,) Spearman's ρ with L1 between a setting's configurations."""
    first = sums[kind, "l1"][:, indices].T
    return {name: ranks.spearman(sums[kind, name][:, indices].T, first) for name in OTHERS}


def correlations(
    trace: pk.Trace, sums: Mapping[Measure, Floats], indices: Sequence[int], step: int
) -> dict[tuple[str, Measure], Floats]:
    """Return (what is lost, measure) -> each prompt's correlation, NaN where the prompt does not decide.

    Of KL and of an answer's score it is ρ; of a lost answer the share of pairs of a lost and a kept one in which the
    lost one is more perturbed, ties at one half.
    """
    alike = first_equal_cache(trace)[trace.measured[trace.ok][:, step]]
    kl = np.take_along_axis(variable_at_step(trace, "logit_kl", step), alike, axis=1)[:, indices]
    each = {("kl", one): ranks.spearman(sums[one][:, indices].T, kl.T) for one in MEASURES}
    if "score_full" not in trace.arrays:
        return each
    full, scores = (np.asarray(trace.get(name, "measures"), dtype=np.float64) for name in ("score_full", "score"))
    answered = full > 0
    if np.isnan(full).any() or np.isnan(scores).any() or not answered.any():
        return each
    first_step, scored = head_sums(trace, 0), scores[answered][:, indices]
    lost = scored < (LOST * full[answered] * (1 - ROUNDING))[:, None]
    perturbed = {one: first_step[one][answered][:, indices] for one in MEASURES}
    each |= {("score", one): ranks.spearman(perturbed[one].T, scored.T) for one in MEASURES}
    return each | {("lost", one): roc_area(perturbed[one], lost) for one in MEASURES}


def roc_area(perturbed: Floats, lost: NDArray[np.bool_]) -> Floats:
    """Return (prompt,) the area under the ROC curve of lost against kept answers; NaN without one of both."""
    count = lost.sum(axis=1)
    above = np.where(lost, ranks.mean_ranks(perturbed.T).T, 0).sum(axis=1) - count * (count + 1) / 2
    return np.asarray(pk.stats.arithmetic.ratio(above, count * (lost.shape[1] - count)))


def mean_correlations(each: Mapping[tuple[str, Measure], Floats]) -> list[dict[str, Any]]:
    """Return each measure's correlation with each loss, mean over prompts, and by how much it exceeds L1's."""
    rows = []
    for (target, (kind, distance)), values in each.items():
        own, difference = STATISTICS[target]
        less = values - each[target, (kind, "l1")]
        rows.append({
            "target": target, "kind": kind, "distance": distance, "value": intervals.estimate_mean(values, own),
            "less_l1": None if distance == "l1" else intervals.estimate_mean(less, difference),
        })  # fmt: skip
    return rows


def summary_over_settings(
    settings: Sequence[Mapping[str, Any]],
    sums: Mapping[Measure, Floats],
    each: Sequence[Mapping[tuple[str, Measure], Floats]],
    trace: pk.Trace,
) -> dict[str, Any]:
    """Return the numbers over all settings; each prompt's correlations, `each`, are averaged over settings first."""
    mean, groups = intervals.mean_where_known, comparable_groups(trace.run.configs)
    ranked = [groups[one["name"]] for one in settings if one["orders"]]
    known = [one for one in each if one]
    changes = [one for setting in settings for row in setting["comparisons"] for one in row["against_l1"]]
    orders = [one for setting in settings for one in setting["orders"]]
    swaps = [swap for one in orders for swap in one["swaps"]]
    pairs = sum(len(list(combinations(one["methods"], 2))) for one in orders)
    rows = {}
    for name in OTHERS:
        own = [one for one in changes if one["distance"] == name]
        rho = [agreement(kind, sums, indices)[name] for indices in ranked for kind in KINDS]
        rows[name] = {
            "comparisons": len(own),
            **{said: sum(one["conclusion"] == said for one in own) for said in CONCLUSIONS},
            "most_opposite": {kind: max(one["opposite"] for one in own if one["kind"] == kind) for kind in KINDS},
            "most_alone": {kind: max(one["alone"] for one in own if one["kind"] == kind) for kind in KINDS},
            "rho": intervals.estimate_mean(mean(rho), KIND_OF_RHO) if rho else None,
            "pairs_of_methods": pairs,
            "swaps": sum(swap["distance"] == name for swap in swaps),
            "decided_swaps": sum(swap["distance"] == name and swap["decided"] for swap in swaps),
        }
    averaged = {key: mean([one[key] for one in known]) for key in known[0]} if known else {}
    return {"distances": rows, "links": mean_correlations(averaged)}


def name_of(config: pk.EvictionConfig) -> str:
    """Return a configuration's name in tables and picture."""
    return f"{config.policy.name}:{config.selection}"


def print_tables(found: Mapping[str, Any]) -> None:
    """Print the numbers by setting, those of all together, and a line of conclusion."""
    for setting in found["settings"]:
        show(f"{setting['name']}: Σ of perturbation over the baseline's, and heads whose verdict is opposite to L1's",
             [table_line(row) for row in setting["comparisons"]])  # fmt: skip
        if setting["norms"]:
            show("by L2 norms over the same selection by L1 norms", [table_line(row) for row in setting["norms"]])
        for one in setting["orders"]:
            methods = sorted(one["methods"], key=lambda method: method["ranks"]["l1"])
            show(f"methods' ranks, {one['kind']}; 1 perturbs least",
                 [{"method": name_of(method["config"]), **method["ranks"]} for method in methods])  # fmt: skip
    lines = [
        {"with": one["target"], "perturbation": one["kind"], "distance": one["distance"], "n": one["value"].prompts,
         "ρ, or share": interval_text(one["value"].value, one["value"].interval),
         "less L1's": interval_text(one["less_l1"].value, one["less_l1"].interval) if one["less_l1"] else ""}
        for one in found["together"]["links"]
    ]  # fmt: skip
    if lines:
        show("correlation with what is lost, mean over settings and prompts", lines)
    summary = []
    for name, one in found["together"]["distances"].items():
        rho = one["rho"] and interval_text(one["rho"].value, one["rho"].interval)
        summary.append({"distance": name, **{key: one[key] for key in CONCLUSIONS},
                        "heads opposite": f"{one['most_opposite']['propagated']:.1%}",
                        "decided in one": f"{one['most_alone']['propagated']:.1%}", "order's ρ": rho or "–",
                        "swaps (decided)": f"{one['swaps']} ({one['decided_swaps']}) of {one['pairs_of_methods']}",
                        })  # fmt: skip
    show("against L1: comparisons, most heads of any treatment (propagated), methods' order", summary)
    told = "; ".join(
        f"{name} agrees with L1 in {one['same']} of {one['comparisons']} comparisons, is opposite in {one['opposite']}"
        for name, one in found["together"]["distances"].items()
    )
    if found["samples"] < intervals.MIN_SAMPLES:
        told = "too few samples to decide whether another distance than L1 concludes otherwise"
    print(f"\n{told} (n = {found['samples']} samples of {found['dataset']}, {found['model']}).")


def table_line(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a comparison as a line of a table: propagated sums by distance, and the last layer's drift in L1."""
    cells = {"treatment": name_of(row["treatment"])}
    for one in row["measured"]:
        if one["kind"] == "propagated":
            cells[one["distance"]] = number_text(one, "sum_ratio")
    for one in row["against_l1"]:
        if one["kind"] == "propagated":
            cells[f"{one['distance']}: opposite"] = f"{one['opposite']:.1%}"
    return {**cells, "last layer's drift": interval_text(row["drift"][0]["ratio"], row["drift"][0]["interval"])}


def draw(found: Mapping[str, Any]) -> Figure:
    """Draw a panel per setting and kind: a row per treatment, a mark per distance; left of 1 it perturbs less."""
    settings = found["settings"]
    rows = [[*one["comparisons"], *one["norms"]] for one in settings]
    figure = page_figure(sum(7 * len(one) + 24 for one in rows))
    axes = figure.subplots(len(settings), 2, squeeze=False, sharex=True, sharey="row")
    for setting, own, panels in zip(settings, rows, axes, strict=True):
        for kind, panel in zip(KINDS, panels, strict=True):
            panel.axvline(1, color="0.55", linewidth=0.8)
            for (name, marker), shift in zip(
                {"l1": "o", "l2": "s", "cosine": "^"}.items(), (-0.2, 0, 0.2), strict=True
            ):
                ones = [one for row in own for one in row["measured"] if (one["kind"], one["distance"]) == (kind, name)]
                values, ends = ([one[key] for one in ones] for key in ("sum_ratio", "sum_ratio_interval"))
                panel.errorbar(values, np.arange(len(own)) + shift, xerr=error_bars(values, ends), label=name,
                               linestyle="", marker=marker, markersize=3.5, linewidth=0.9)  # fmt: skip
            names = [name_of(row["treatment"]) for row in setting["comparisons"]]
            names += [f"{row['baseline'].selection.name}: L2/L1 norms" for row in setting["norms"]]
            panel.set_yticks(range(len(own)), names)
            panel.set(title=f"{setting['name']}, {kind}", xlabel="Σ of all heads over the baseline's")
            panel.grid(visible=True, axis="x")
        panels[0].invert_yaxis()
    plain_log(axes[0, 0], "x")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return figure


if __name__ == "__main__":
    main(study, arguments())

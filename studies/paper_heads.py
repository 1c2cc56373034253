"""Rows of docs/results/paper.md: the theorems, how tight their bounds are, Assumption 1, and heads and layers.

What the criterion's parts bring is of figures 2, 3, 5, 6 and the central claim. Every row of heads has one estimator,
40 prompts and a window of 32: heads by their means, as the paper counts them, then the share of a prompt's heads, whose
interval decides.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
from common import Floats, to_json, variable
from paper_verdicts import (
    ANSWERED,
    CHECKED,
    SUPPORTS,
    UNDECIDED,
    UNLIKE,
    VIOLATED,
    Document,
    Finding,
    Paired,
    Row,
    analysis,
    comparisons,
    document,
    indices,
    join_cells,
    join_verdicts,
    judge_counts,
    judge_falls,
    judge_margin,
    judge_pair,
    means_text,
    p_text,
    paired_ratio,
    ratio_of_sums,
    ratio_text,
    share_text,
    sign_test,
    trace,
    value_text,
    verdict,
)
from tables import interval_at, number, percent, points, selection_name

import perturbkv as pk

intervals = pk.stats.intervals
HALF = 0.5
_KINDS = ("propagated", "isolated")


def _inequality(inequality: str, output: Path) -> Finding:
    """Return in how many heads an inequality such as 'L ≤ θ' was checked, or that some are violated."""
    found = analysis(output, "shares", "bound-tightness")
    count = found["inequalities_checked"][inequality]
    samples = analysis(output, "shares", "assumption")["samples"]
    text = f"{inequality} in all of {count:,} heads; n = {samples}"
    if wrong := found["violations"]:
        return Finding(f"{wrong:,} of all inequalities are violated", VIOLATED)
    return Finding(text, CHECKED if count else UNDECIDED)


def _relaxed_bound(output: Path) -> Finding:
    """Return whether θ̂ ≤ θ̂_relax holds, and their median ratio at the smallest and the largest budget."""
    held = _inequality("θ̂ ≤ θ̂_relax", output)
    medians = [
        f"{number(one['ratios']['θ̂/θ̂_relax']['evidence'][2])} at {_budget_text(one)}"
        for one in _two_stage_configs(output)
    ]
    return Finding(f"{held.text}; median θ̂/θ̂_relax {medians[0]}, {medians[-1]}", held.verdict)


def _budget_text(one: Document) -> str:
    """Return the budget of a document's configuration: 'b = 128'."""
    return f"b = {one['config']['budget']}"


def _two_stage_configs(output: Path) -> list[Document]:
    """Return two-stage's numbers of `bound-tightness`, one document per budget."""
    found = analysis(output, "shares", "bound-tightness")["configurations"]
    return [one for one in found if selection_name(one["config"]) == "two-stage"]


def _bound_tightness(output: Path) -> Finding:
    """Return L over the bounds where σ > ½, at each budget: the medians' range and the widest 5 to 95 %."""
    cells = []
    for name in ("L/θ", "L/θ̂"):
        spreads = [
            spread for one in _two_stage_configs(output) if (spread := one["ratios"][name]["evidence"])[0] is not None
        ]
        if not spreads:
            return Finding("in no head does stage 1 hold more than half", UNDECIDED)
        medians, low, high = [one[2] for one in spreads], min(one[0] for one in spreads), max(one[4] for one in spreads)
        cells.append(
            f"median {name} {number(min(medians))} to {number(max(medians))} over budgets "
            f"(5 to 95 % of heads {number(low)} to {number(high)})"
        )
    return Finding(join_cells(cells), ANSWERED)


def _bound_order(output: Path) -> Finding:
    """Return how often the lower θ̂ has the lower L, of two selections of one stage 1, less how often 1 − S has."""
    cells, verdicts = [], []
    for agreement in analysis(output, "shares", "bound-tightness")["rank_agreement"]:
        bound, mass = (_bound_of_equal_stage1(agreement, name) for name in ("θ̂", "1 − S"))
        verdicts.append(verdict(bound["gain_interval"], 0, 1))
        gain = points(bound["gain"], bound["gain_interval"])
        shares = f"{percent(bound['share'])} against {percent(mass['share'])}"
        cells.append(f"b = {agreement['setting']['budget']}: {gain} points ({shares})")
    which = "of two-stage and ν ≡ 1 at equal stage 1, σ > ½"
    text = f"heads in which the lower θ̂ has the lower isolated L, {which}, less those in which the lower 1 − S has it"
    return Finding(f"{text}: {join_cells(cells)}", join_verdicts(verdicts))


def _bound_of_equal_stage1(agreement: Document, bound: str) -> Document:
    """Return how a bound orders the two selections that have the same stage 1."""
    (only,) = (one for one in agreement["concordance"] if one["same_stage1"] and one["bound"] == bound)
    found: Document = only
    return found


def share_difference(shares: list[Floats]) -> tuple[str, Paired]:
    """Return two shares with their paired difference, as text and as judged by the rule `pair`.

    `shares`: (sample,) each, of the same samples; samples where the first is NaN are left out.
    """
    known = ~np.isnan(shares[0])
    if not known.any():
        return "no such heads", Paired(np.nan, None, 0, 0, UNDECIDED)
    first, second = (one[known] for one in shares)
    difference = judge_pair(first - second)
    texts = [percent(one.mean(), to_json(intervals.of_mean(one, intervals.share_kind(0)))) for one in (first, second)]
    return f"{texts[0]} and {texts[1]}, difference {number(difference.value, difference.interval)}", difference


def _heads_above_half(reading: str, said: str, beside: str, output: Path) -> Finding:
    """Return the share of heads in which a reading of Assumption 1 is above a half, at each budget.

    Args:
        reading: a key of `assumption`'s numbers, which is judged.
        said: its name in the text.
        beside: another reading, told without a verdict; empty for none.
        output: the folder of all steps.
    """
    cells, verdicts = [], []
    found = analysis(output, "shares", "assumption")
    for one in found["configurations"]:
        verdicts.append(verdict(one[reading]["share_above_half_interval"], HALF, 1))
        cells.append(f"{_budget_text(one)}: {_share_above_half_text(one, reading)}")
    text = f"{said} > ½ in {join_cells(cells)} of the heads of a prompt"
    if beside:
        others = join_cells(
            f"{_budget_text(one)}: {_share_above_half_text(one, beside)}" for one in found["configurations"]
        )
        text += f"; by what stage 1 and the always-kept entries hold, which the theorems ask for, in {others}"
    return Finding(f"{text}; n = {found['samples']}", join_verdicts(verdicts))


def _share_above_half_text(one: Document, reading: str) -> str:
    """Return the share of heads in which a reading is above a half, with its interval."""
    return percent(one[reading]["share_above_half"], one[reading]["share_above_half_interval"])


def _heads_below_half(output: Path) -> Finding:
    """Return the heads whose mean S is at most half, outside the first layer."""
    cells, outside = [], 0
    for one in analysis(output, "shares", "assumption")["configurations"]:
        below = one["retained_mass"]["heads_at_most_half"]
        others = [head for head in below if head["layer"]]
        outside += len(others)
        cells.append(f"{_budget_text(one)}: {len(others)} of {len(below)}")
    text = f"of the heads whose mean S is at most ½, those outside the first layer: {join_cells(cells)}"
    return Finding(text, UNLIKE if outside else SUPPORTS)


def _first_layer_share(output: Path) -> Finding:
    """Return the share of all other layers' heads with S > ½, less that of the first one's."""
    measured = trace(output, "shares/trace.h5")
    cells, verdicts = [], []
    for (_, way, budget), index in indices(measured).items():
        if way == "two-stage":
            cell, one = share_difference(_shares_by_layer(measured, index))
            cells.append(f"b = {budget}: {cell}")
            verdicts.append(one.verdict)
    text = f"S > ½ in the heads of all other layers and in those of the first, {join_cells(cells)}"
    return Finding(f"{text}; n = {measured.ok.sum()}", join_verdicts(verdicts))


def _shares_by_layer(measured: pk.Trace, index: int) -> list[Floats]:
    """Return the shares of heads with S > ½, (sample,): of all other layers, then of the first."""
    above = variable(measured, "retained_mass")[:, index] > HALF
    return [above[:, 1:].mean(axis=(1, 2)), above[:, :1].mean(axis=(1, 2))]


BOUNDS = (
    Row("theorem 2", "L ≤ θ for every kept set", "bound", "shares", partial(_inequality, "L ≤ θ"), "heads"),
    Row("theorem 3", "L ≤ θ ≤ θ̂ where stage 1 holds σ > ½", "bound", "shares", partial(_inequality, "θ ≤ θ̂"),
        "heads"),
    Row("theorem 4", "attention alone minimises θ̂_relax, a looser bound than θ̂", "bound", "shares", _relaxed_bound,
        "heads"),
    Row("open question 2", "how tight are the bounds?", "tight", "shares", _bound_tightness, "heads"),
    Row("section 3.5", "what has the lower bound has the lower perturbation: θ̂ tells more than the attention given "
        "up, 1 − S", "pair", "shares", _bound_order, "heads"),
    Row("figure 4", "most heads keep over half of their attention, at every budget", "most", "shares",
        partial(_heads_above_half, "retained_mass", "S of the whole kept set, which the figure shows,", ""), "heads"),
    Row("assumption 1", "a share α of the budget holds over half of most heads' attention", "most", "shares",
        partial(_heads_above_half, "sigma_topk", "σ of the ⌊αb⌋ largest, as it is stated,", "sigma_stage1"), "heads"),
    Row("appendix A", "the only exceptions are some heads of the first layer", "count", "shares", _heads_below_half,
        "heads"),
    Row("appendix A", "heads of the first layer violate it more than others, for their attention is not sparse", "pair",
        "shares", _first_layer_share, "heads"),
)  # fmt: skip


def heads_text(one: Document, kind: str = "propagated") -> str:
    """Return 'propagated lower in 165 of 270 heads by their means, in 52 % [47, 57] of a prompt's heads, Σ × 0.84'."""
    return f"{kind} lower in {means_text(one, kind)}, in {share_text(one, kind)}, {ratio_text(one, kind)}"


def judge_most(one: Document, kind: str = "propagated") -> str:
    """Return what the rule `most` says of a comparison's heads."""
    return verdict(one[kind]["share_interval"], HALF, 1)


def _policy_heads(policy: str, output: Path) -> Finding:
    """Return the finding on two-stage against attention within a policy, with ν ≡ 1 as its control."""
    ways = ("two-stage", "two-stage-uniform")
    (one,), (control,) = (comparisons(output, "heads", "attention", way, policy) for way in ways)
    text = f"{heads_text(one)}; {heads_text(one, 'isolated')}; with ν ≡ 1 (control) {heads_text(control)}"
    return Finding(f"{text}; n = {one['samples']}", judge_most(one))


def _later_version(step: str, output: Path) -> Finding:
    """Return the finding on the later version, whose both stages are pooled, so that only the norms differ."""
    found = comparisons(output, step, "attention")
    cells = [
        f"b = {one['treatment']['budget']}: {heads_text(one)}, isolated {ratio_text(one, 'isolated')}" for one in found
    ]
    return Finding(f"{join_cells(cells)}; n = {found[0]['samples']}", join_verdicts(map(judge_most, found)))


def _against_selection(baseline: str, said: str, output: Path) -> Finding:
    """Return the finding on two-stage against another selection than attention; `said` introduces it in the text."""
    (one,) = comparisons(output, "heads", baseline)
    return Finding(
        f"{said}: {join_cells(heads_text(one, kind) for kind in _KINDS)}; n = {one['samples']}", judge_most(one)
    )


def _against_unpooled(output: Path) -> Finding:
    """Return the finding on two-stage against attention without max-pooling: what the stages bring to it without ν."""
    direct = _against_selection("attention-unpooled", "two-stage against attention without max-pooling", output)
    (stages,) = comparisons(output, "heads", "attention-unpooled", "two-stage-uniform")
    both = " and ".join(f"{kind} {ratio_text(stages, kind)}" for kind in _KINDS)
    return Finding(f"{direct.text}; the stages with ν ≡ 1 against it: {both}", direct.verdict)


def _last_layer(output: Path) -> Finding:
    """Return two-stage's last layer's drift over attention's, at each budget."""
    cells, verdicts = [], []
    for one in analysis(output, "shares", "layers")["drifts"]:
        verdicts.append(verdict(interval_at(one["ratio_interval"], -1), 1, -1))
        shown = number(one["ratio"][-1], interval_at(one["ratio_interval"], -1))
        cells.append(f"b = {one['treatment']['budget']}: × {shown}")
    return Finding(
        f"last layer's drift over attention's, {join_cells(cells)}; n = {one['samples']}", join_verdicts(verdicts)
    )


def _drift_by_budget(output: Path) -> dict[str, tuple[Floats, Floats]]:
    """Return budget -> drift after each layer, (sample, layer), of two-stage and of attention."""
    measured = trace(output, "shares/trace.h5")
    found, drift = indices(measured), variable(measured, "hidden_drift_l1")
    return {
        str(budget): (drift[:, index], drift[:, found[policy, "attention", budget]])
        for (policy, way, budget), index in found.items()
        if way == "two-stage"
    }


def _drift_over_layers(output: Path) -> Finding:
    """Return the ratio after the last layer, and that over the ratio after the first, of the same prompts."""
    cells, verdicts = [], []
    for budget, (two, one) in _drift_by_budget(output).items():
        factor, ends = paired_ratio((two[:, -1], one[:, -1]), (two[:, 0], one[:, 0]))
        last, between = ratio_of_sums(two[:, -1], one[:, -1])
        verdicts.append(judge_falls(between, ends))
        first = number(two[:, 0].sum() / one[:, 0].sum())
        cells.append(f"b = {budget}: × {first} → {number(last, between)}, its factor {number(factor, ends)}")
    text = f"ratio of the drift to attention's after the first and after the last layer, {join_cells(cells)}"
    return Finding(f"{text}; n = {len(two)}", join_verdicts(verdicts))


def _drift_by_prompt(output: Path) -> Finding:
    """Return in how many prompts the last layer drifts less and more than with attention, at each budget."""
    cells, verdicts = [], []
    for one in analysis(output, "shares", "layers")["per_sample"]:
        better, worse = (one["verdict"].count(side) for side in (1, -1))
        verdicts.append(judge_counts(better, worse))
        tells = f"{better} less, {worse} more, p = {p_text(sign_test(better, worse))}"
        cells.append(f"b = {one['treatment']['budget']}: {tells}")
    text = f"prompts that drift less and more in the last layer, {join_cells(cells)}; n = {len(one['verdict'])}"
    return Finding(text, join_verdicts(verdicts))


def _drift_over_budgets(output: Path) -> Finding:
    """Return the last layer's ratio at the smallest budget over that at the largest, of the same prompts."""
    drifts = _drift_by_budget(output)
    ends = min(drifts, key=float), max(drifts, key=float)
    least, largest = ([side[:, -1] for side in drifts[end]] for end in ends)
    factor, interval = paired_ratio((least[0], least[1]), (largest[0], largest[1]))
    cells = [
        f"× {number(two.sum() / one.sum())} at b = {end}"
        for (two, one), end in zip((least, largest), ends, strict=True)
    ]
    text = f"last layer's drift over attention's {', '.join(cells)}; the first over the second"
    return Finding(f"{text} {number(factor, interval)}; n = {len(least[0])}", verdict(interval, 1, -1))


def _first_layer(output: Path) -> Finding:
    """Return what two-stage's kept sets in the first layer do to the last layer's drift."""
    found = document(output, "first-layer", "patching.json")
    everywhere, without = found["named"][:2]
    drifts = [_mixture_drift(output, one["mixture"]) for one in (everywhere, without)]
    harm, ends = paired_ratio((drifts[0], np.ones(len(drifts[0]))), (drifts[1], np.ones(len(drifts[1]))))
    text = (
        f"two-stage everywhere: last layer's drift × {value_text(everywhere, 'drift_ratio')} of attention's, heads' "
        f"{ratio_text(everywhere)}; with attention in layer 0 alone × {value_text(without, 'drift_ratio')}, "
        f"{ratio_text(without)}; the first drift over the second {number(harm, ends)}"
    )
    return Finding(f"{text}; n = {found['samples']}", judge_margin(ends))


def _mixture_drift(output: Path, mixture: str) -> Floats:
    """Return the last layer's drift of a mixture of kept sets, (sample,)."""
    lines = (output / "first-layer" / "swap.jsonl").read_text().splitlines()
    rows = [row for line in lines for row in json.loads(line).get("rows", ())]
    return np.array([row["values"]["drift"][0] for row in rows if row["mixture"] == mixture])


HEADS = (
    Row("figure 2, SnapKV", "lower in 819 and 748 of 1,024 heads (80 and 73 %)", "most", "heads",
        partial(_policy_heads, "snapkv"), "heads"),
    Row("figure 2, AdaKV", "lower in most heads (four cases: 74.3 %)", "most", "heads", partial(_policy_heads, "adakv"),
        "heads"),
    Row("later version", "lower in over 92 % (Llama) and 86 % (Mistral) of the heads, budgets 2.5 to 40 %", "most",
        "heads-v2", partial(_later_version, "heads-v2"), "heads"),
    Row("abstract", "beyond attention, the values and W_O decide what is critical", "most", "heads",
        partial(_against_selection, "two-stage-uniform", "two-stage against the same stages with ν ≡ 1"), "heads"),
    Row("figure 2's control", "the gain is the criterion's, not that its selection does without max-pooling", "most",
        "heads", _against_unpooled, "heads"),
    Row("figures 3a, 5", "in the last layer the perturbation is much lower", "pair", "shares", _last_layer, "heads"),
    Row("section 5.2", "it falls against attention's layer by layer", "falls", "shares", _drift_over_layers, "heads"),
    Row("figures 3b, 6", "in the last layer it is lower for nearly all contexts", "prompts", "shares", _drift_by_prompt,
        "heads"),
    Row("appendix B", "the lower the budget, the larger the gain", "pair", "shares", _drift_over_budgets, "heads"),
    Row("appendix A", "harm in heads of the first layer is not significant", "margin", "first-layer", _first_layer,
        "swap"),
    Row("later version", "also where the context alone is compressed", "most", "context-only",
        partial(_later_version, "context-only"), "heads"),
)  # fmt: skip

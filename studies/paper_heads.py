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
    Paired,
    Row,
    Told,
    analysis,
    by_counts,
    comparisons,
    document,
    falls,
    harmless,
    indices,
    joined,
    listed,
    means,
    paired,
    paired_ratio,
    ratio,
    ratio_of_sums,
    share,
    shown_p,
    sign_test,
    trace,
    value,
    verdict,
)
from tables import at, number, percent, points, selection

import perturbkv as pk

intervals = pk.stats.intervals
HALF = 0.5
_KINDS = ("propagated", "isolated")


def _holds(inequality: str, output: Path) -> Told:
    found = analysis(output, "shares", "bound-tightness")
    count = found["inequalities_checked"][inequality]
    samples = analysis(output, "shares", "assumption")["samples"]
    text = f"{inequality} in all of {count:,} heads; n = {samples}"
    if wrong := found["violations"]:
        return Told(f"{wrong:,} of all inequalities are violated", VIOLATED)
    return Told(text, CHECKED if count else UNDECIDED)


def _looser(output: Path) -> Told:
    held = _holds("θ̂ ≤ θ̂_relax", output)
    medians = [f"{number(one['ratios']['θ̂/θ̂_relax']['evidence'][2])} at {_budget(one)}" for one in _staged(output)]
    return Told(f"{held.text}; median θ̂/θ̂_relax {medians[0]}, {medians[-1]}", held.verdict)


def _budget(one: Document) -> str:
    return f"b = {one['config']['budget']}"


def _staged(output: Path) -> list[Document]:
    found = analysis(output, "shares", "bound-tightness")["configurations"]
    return [one for one in found if selection(one["config"]) == "two-stage"]


def _tight(output: Path) -> Told:
    """Return L over the bounds where σ > ½, at each budget: the medians' range and the widest 5 to 95 %."""
    cells = []
    for name in ("L/θ", "L/θ̂"):
        spreads = [spread for one in _staged(output) if (spread := one["ratios"][name]["evidence"])[0] is not None]
        if not spreads:
            return Told("in no head does stage 1 hold more than half", UNDECIDED)
        medians, low, high = [one[2] for one in spreads], min(one[0] for one in spreads), max(one[4] for one in spreads)
        cells.append(
            f"median {name} {number(min(medians))} to {number(max(medians))} over budgets "
            f"(5 to 95 % of heads {number(low)} to {number(high)})"
        )
    return Told(listed(cells), ANSWERED)


def _orders(output: Path) -> Told:
    """Return how often the lower θ̂ has the lower L, of two selections of one stage 1, less how often 1 − S has."""
    cells, verdicts = [], []
    for agreement in analysis(output, "shares", "bound-tightness")["rank_agreement"]:
        bound, mass = (_of_one_stage1(agreement, name) for name in ("θ̂", "1 − S"))
        verdicts.append(verdict(bound["gain_interval"], 0, 1))
        gain = points(bound["gain"], bound["gain_interval"])
        shares = f"{percent(bound['share'])} against {percent(mass['share'])}"
        cells.append(f"b = {agreement['setting']['budget']}: {gain} points ({shares})")
    which = "of two-stage and ν ≡ 1 at equal stage 1, σ > ½"
    text = f"heads in which the lower θ̂ has the lower isolated L, {which}, less those in which the lower 1 − S has it"
    return Told(f"{text}: {listed(cells)}", joined(verdicts))


def _of_one_stage1(agreement: Document, bound: str) -> Document:
    """Return how a bound orders the two selections that have the same stage 1."""
    (only,) = (one for one in agreement["concordance"] if one["same_stage1"] and one["bound"] == bound)
    found: Document = only
    return found


def compared(shares: list[Floats]) -> tuple[str, Paired]:
    """Return what the paired difference of two shares of the same samples, (sample,) each, says."""
    known = ~np.isnan(shares[0])
    if not known.any():
        return "no such heads", Paired(np.nan, None, 0, 0, UNDECIDED)
    first, second = (one[known] for one in shares)
    difference = paired(first - second)
    texts = [percent(one.mean(), to_json(intervals.of_mean(one, intervals.share_kind(0)))) for one in (first, second)]
    return f"{texts[0]} and {texts[1]}, difference {number(difference.value, difference.interval)}", difference


def _assumed(reading: str, said: str, beside: str, output: Path) -> Told:
    """Return the share of heads whose σ is above a half, at each budget; of another reading without a verdict."""
    cells, verdicts = [], []
    found = analysis(output, "shares", "assumption")
    for one in found["configurations"]:
        verdicts.append(verdict(one[reading]["share_above_half_interval"], HALF, 1))
        cells.append(f"{_budget(one)}: {_above(one, reading)}")
    text = f"{said} > ½ in {listed(cells)} of the heads of a prompt"
    if beside:
        others = listed(f"{_budget(one)}: {_above(one, beside)}" for one in found["configurations"])
        text += f"; by what stage 1 and the always-kept entries hold, which the theorems ask for, in {others}"
    return Told(f"{text}; n = {found['samples']}", joined(verdicts))


def _above(one: Document, reading: str) -> str:
    return percent(one[reading]["share_above_half"], one[reading]["share_above_half_interval"])


def _exceptions(output: Path) -> Told:
    """Return the heads whose mean S is at most half, outside the first layer."""
    cells, outside = [], 0
    for one in analysis(output, "shares", "assumption")["configurations"]:
        below = one["retained_mass"]["heads_at_most_half"]
        others = [head for head in below if head["layer"]]
        outside += len(others)
        cells.append(f"{_budget(one)}: {len(others)} of {len(below)}")
    text = f"of the heads whose mean S is at most ½, those outside the first layer: {listed(cells)}"
    return Told(text, UNLIKE if outside else SUPPORTS)


def _in_first(output: Path) -> Told:
    """Return the share of all other layers' heads with S > ½, less that of the first one's."""
    measured = trace(output, "shares/trace.h5")
    cells, verdicts = [], []
    for (_, way, budget), index in indices(measured).items():
        if way == "two-stage":
            cell, one = compared(_by_layer(measured, index))
            cells.append(f"b = {budget}: {cell}")
            verdicts.append(one.verdict)
    text = f"S > ½ in the heads of all other layers and in those of the first, {listed(cells)}; n = {measured.ok.sum()}"
    return Told(text, joined(verdicts))


def _by_layer(measured: pk.Trace, index: int) -> list[Floats]:
    above = variable(measured, "retained_mass")[:, index] > HALF
    return [above[:, 1:].mean(axis=(1, 2)), above[:, :1].mean(axis=(1, 2))]


BOUNDS = (
    Row("theorem 2", "L ≤ θ for every kept set", "bound", "shares", partial(_holds, "L ≤ θ"), "heads"),
    Row("theorem 3", "L ≤ θ ≤ θ̂ where stage 1 holds σ > ½", "bound", "shares", partial(_holds, "θ ≤ θ̂"), "heads"),
    Row("theorem 4", "attention alone minimises θ̂_relax, a looser bound than θ̂", "bound", "shares", _looser, "heads"),
    Row("open question 2", "how tight are the bounds?", "tight", "shares", _tight, "heads"),
    Row("section 3.5", "what has the lower bound has the lower perturbation: θ̂ tells more than the attention given "
        "up, 1 − S", "pair", "shares", _orders, "heads"),
    Row("figure 4", "most heads keep over half of their attention, at every budget", "most", "shares",
        partial(_assumed, "retained_mass", "S of the whole kept set, which the figure shows,", ""), "heads"),
    Row("assumption 1", "a share α of the budget holds over half of most heads' attention", "most", "shares",
        partial(_assumed, "sigma_topk", "σ of the ⌊αb⌋ largest, as it is stated,", "sigma_stage1"), "heads"),
    Row("appendix A", "the only exceptions are some heads of the first layer", "count", "shares", _exceptions, "heads"),
    Row("appendix A", "heads of the first layer violate it more than others, for their attention is not sparse", "pair",
        "shares", _in_first, "heads"),
)  # fmt: skip


def heads(one: Document, kind: str = "propagated") -> str:
    """Return 'propagated lower in 165 of 270 heads by their means, in 52 % [47, 57] of a prompt's heads, Σ × 0.84'."""
    return f"{kind} lower in {means(one, kind)}, in {share(one, kind)}, {ratio(one, kind)}"


def most(one: Document, kind: str = "propagated") -> str:
    """Return what the rule `most` says of a comparison's heads."""
    return verdict(one[kind]["share_interval"], HALF, 1)


def _of_policy(policy: str, output: Path) -> Told:
    ways = ("two-stage", "two-stage-uniform")
    (one,), (control,) = (comparisons(output, "heads", "attention", way, policy) for way in ways)
    text = f"{heads(one)}; {heads(one, 'isolated')}; with ν ≡ 1 (control) {heads(control)}; n = {one['samples']}"
    return Told(text, most(one))


def _later(step: str, output: Path) -> Told:
    """Return the finding on the later version, whose both stages are pooled, so that only the norms differ."""
    found = comparisons(output, step, "attention")
    cells = [f"b = {one['treatment']['budget']}: {heads(one)}, isolated {ratio(one, 'isolated')}" for one in found]
    return Told(f"{listed(cells)}; n = {found[0]['samples']}", joined(map(most, found)))


def _directly(baseline: str, said: str, output: Path) -> Told:
    """Return the finding on two-stage against another selection than attention."""
    (one,) = comparisons(output, "heads", baseline)
    return Told(f"{said}: {listed(heads(one, kind) for kind in _KINDS)}; n = {one['samples']}", most(one))


def _unpooled(output: Path) -> Told:
    """Return the finding on two-stage against attention without max-pooling: what the stages bring to it without ν."""
    told = _directly("attention-unpooled", "two-stage against attention without max-pooling", output)
    (stages,) = comparisons(output, "heads", "attention-unpooled", "two-stage-uniform")
    both = " and ".join(f"{kind} {ratio(stages, kind)}" for kind in _KINDS)
    return Told(f"{told.text}; the stages with ν ≡ 1 against it: {both}", told.verdict)


def _last_layer(output: Path) -> Told:
    cells, verdicts = [], []
    for one in analysis(output, "shares", "layers")["drifts"]:
        verdicts.append(verdict(at(one["ratio_interval"], -1), 1, -1))
        shown = number(one["ratio"][-1], at(one["ratio_interval"], -1))
        cells.append(f"b = {one['treatment']['budget']}: × {shown}")
    return Told(f"last layer's drift over attention's, {listed(cells)}; n = {one['samples']}", joined(verdicts))


def _drifts(output: Path) -> dict[str, tuple[Floats, Floats]]:
    """Return budget -> drift after each layer, (sample, layer), of two-stage and of attention."""
    measured = trace(output, "shares/trace.h5")
    found, drift = indices(measured), variable(measured, "hidden_drift_l1")
    return {
        str(budget): (drift[:, index], drift[:, found[policy, "attention", budget]])
        for (policy, way, budget), index in found.items()
        if way == "two-stage"
    }


def _gradually(output: Path) -> Told:
    """Return the ratio after the last layer, and that over the ratio after the first, of the same prompts."""
    cells, verdicts = [], []
    for budget, (two, one) in _drifts(output).items():
        factor, ends = paired_ratio((two[:, -1], one[:, -1]), (two[:, 0], one[:, 0]))
        last, between = ratio_of_sums(two[:, -1], one[:, -1])
        verdicts.append(falls(between, ends))
        first = number(two[:, 0].sum() / one[:, 0].sum())
        cells.append(f"b = {budget}: × {first} → {number(last, between)}, its factor {number(factor, ends)}")
    text = f"ratio of the drift to attention's after the first and after the last layer, {listed(cells)}"
    return Told(f"{text}; n = {len(two)}", joined(verdicts))


def _contexts(output: Path) -> Told:
    cells, verdicts = [], []
    for one in analysis(output, "shares", "layers")["per_sample"]:
        better, worse = (one["verdict"].count(side) for side in (1, -1))
        verdicts.append(by_counts(better, worse))
        tells = f"{better} less, {worse} more, p = {shown_p(sign_test(better, worse))}"
        cells.append(f"b = {one['treatment']['budget']}: {tells}")
    text = f"prompts that drift less and more in the last layer, {listed(cells)}; n = {len(one['verdict'])}"
    return Told(text, joined(verdicts))


def _small_budgets(output: Path) -> Told:
    """Return the last layer's ratio at the smallest budget over that at the largest, of the same prompts."""
    drifts = _drifts(output)
    ends = min(drifts, key=float), max(drifts, key=float)
    least, largest = ([side[:, -1] for side in drifts[end]] for end in ends)
    factor, interval = paired_ratio((least[0], least[1]), (largest[0], largest[1]))
    cells = [
        f"× {number(two.sum() / one.sum())} at b = {end}"
        for (two, one), end in zip((least, largest), ends, strict=True)
    ]
    text = f"last layer's drift over attention's {', '.join(cells)}; the first over the second"
    return Told(f"{text} {number(factor, interval)}; n = {len(least[0])}", verdict(interval, 1, -1))


def _first_layer(output: Path) -> Told:
    """Return what two-stage's kept sets in the first layer do to the last layer's drift."""
    found = document(output, "first-layer", "patching.json")
    everywhere, without = found["named"][:2]
    drifts = [_mixture(output, one["mixture"]) for one in (everywhere, without)]
    harm, ends = paired_ratio((drifts[0], np.ones(len(drifts[0]))), (drifts[1], np.ones(len(drifts[1]))))
    text = (
        f"two-stage everywhere: last layer's drift × {value(everywhere, 'drift_ratio')} of attention's, heads' "
        f"{ratio(everywhere)}; with attention in layer 0 alone × {value(without, 'drift_ratio')}, {ratio(without)}; "
        f"the first drift over the second {number(harm, ends)}"
    )
    return Told(f"{text}; n = {found['samples']}", harmless(ends))


def _mixture(output: Path, mixture: str) -> Floats:
    """Return the last layer's drift of a mixture of kept sets, (sample,)."""
    lines = (output / "first-layer" / "swap.jsonl").read_text().splitlines()
    rows = [row for line in lines for row in json.loads(line).get("rows", ())]
    return np.array([row["values"]["drift"][0] for row in rows if row["mixture"] == mixture])


HEADS = (
    Row("figure 2, SnapKV", "lower in 819 and 748 of 1,024 heads (80 and 73 %)", "most", "heads",
        partial(_of_policy, "snapkv"), "heads"),
    Row("figure 2, AdaKV", "lower in most heads (four cases: 74.3 %)", "most", "heads", partial(_of_policy, "adakv"),
        "heads"),
    Row("later version", "lower in over 92 % (Llama) and 86 % (Mistral) of the heads, budgets 2.5 to 40 %", "most",
        "heads-v2", partial(_later, "heads-v2"), "heads"),
    Row("abstract", "beyond attention, the values and W_O decide what is critical", "most", "heads",
        partial(_directly, "two-stage-uniform", "two-stage against the same stages with ν ≡ 1"), "heads"),
    Row("figure 2's control", "the gain is the criterion's, not that its selection does without max-pooling", "most",
        "heads", _unpooled, "heads"),
    Row("figures 3a, 5", "in the last layer the perturbation is much lower", "pair", "shares", _last_layer, "heads"),
    Row("section 5.2", "it falls against attention's layer by layer", "falls", "shares", _gradually, "heads"),
    Row("figures 3b, 6", "in the last layer it is lower for nearly all contexts", "prompts", "shares", _contexts,
        "heads"),
    Row("appendix B", "the lower the budget, the larger the gain", "pair", "shares", _small_budgets, "heads"),
    Row("appendix A", "harm in heads of the first layer is not significant", "margin", "first-layer", _first_layer,
        "swap"),
    Row("later version", "also where the context alone is compressed", "most", "context-only",
        partial(_later, "context-only"), "heads"),
)  # fmt: skip

"""Rows of results/paper.md: heads, layers and what the criterion's parts bring (figures 2, 3, 5, 6; the central claim).

Every row of heads has one estimator, 40 prompts and a window of 32: heads by their means, as the paper counts them,
then the share of a prompt's heads, whose interval decides.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
from paper_read import (
    Document,
    Row,
    Told,
    analysis,
    comparisons,
    document,
    indices,
    listed,
    means,
    ratio,
    share,
    trace,
    value,
)
from paper_verdicts import (
    Floats,
    by_counts,
    falls,
    harmless,
    joined,
    paired_ratio,
    ratio_of_sums,
    shown_p,
    sign_test,
    verdict,
)
from tables import at, number

_MOST = 0.5
_KINDS = ("propagated", "isolated")


def heads(one: Document, kind: str = "propagated") -> str:
    """Return 'propagated lower in 165 of 270 heads by their means, in 52 % [47, 57] of a prompt's heads, Σ × 0.84'."""
    return f"{kind} lower in {means(one, kind)}, in {share(one, kind)}, {ratio(one, kind)}"


def most(one: Document, kind: str = "propagated") -> str:
    """Return what the rule `most` says of a comparison's heads."""
    return verdict(one[kind]["share_interval"], _MOST, 1)


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
    found, drift = indices(measured), measured["hidden_drift_l1"]
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


ROWS = (
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

"""Rows of docs/paper.md: heads, layers and what the criterion's parts bring (figures 2, 3, 5, 6; the central claim)."""

from __future__ import annotations

from pathlib import Path

from paper_read import (
    CONTRADICTS,
    SUPPORTS,
    UNDECIDED,
    Document,
    Row,
    Told,
    analysis,
    document,
    joined,
    listed,
    lower,
    means,
    pair,
    pairs,
    ratio,
    share,
    value,
    verdict,
)
from tables import at, number, percent

_MOST = 0.5


def _of_policy(policy: str, output: Path) -> Told:
    found = analysis(output, "heads", "heads")
    one, control = (pair(found, name, policy) for name in ("two-stage", "two-stage-uniform"))
    text = (
        f"propagated lower in {share(one)} of a prompt ({means(one)} by their means), {ratio(one)}; isolated "
        f"{share(one, 'isolated')}, {ratio(one, 'isolated')}; with ν ≡ 1 (control) propagated {share(control)}, "
        f"{ratio(control)}; n = {one['samples']}"
    )
    return Told(text, verdict(one["propagated"]["better_share_interval"], _MOST, 1))


def _snapkv(output: Path) -> Told:
    return _of_policy("snapkv", output)


def _adakv(output: Path) -> Told:
    return _of_policy("adakv", output)


def _later(output: Path) -> Told:
    """Of the later version, whose both stages are pooled, so that the norms alone differ."""
    cells, verdicts = [], []
    for one in pairs(analysis(output, "heads-v2", "heads"), "two-stage"):
        verdicts.append(verdict(one["propagated"]["better_share_interval"], _MOST, 1))
        shown = share(one).removesuffix(" of the heads")
        sums = f"{ratio(one)}, isolated {ratio(one, 'isolated')}"
        cells.append(f"b = {one['treatment']['budget']}: {shown} ({means(one)} by their means), {sums}")
    return Told(f"heads with lower propagated L, {listed(cells)}; n = {one['samples']}", joined(verdicts))


def _context(output: Path) -> Told:
    one = pair(analysis(output, "context-only", "heads"), "two-stage")
    text = (
        f"propagated lower in {share(one)}, {ratio(one)}; isolated {share(one, 'isolated')}, {ratio(one, 'isolated')}"
    )
    return Told(f"{text}; n = {one['samples']}", verdict(one["propagated"]["sum_ratio_interval"], 1, -1))


def _norms(output: Path) -> Told:
    """What ν brings on top of un-pooling, with a set per query head, at the paper's α."""
    one = _brought(output, "the value norms ν")
    verdicts = [verdict(one[kind]["sum_ratio_interval"], 1, -1) for kind in ("isolated", "propagated")]
    text = f"ν on top of the same stages with ν ≡ 1: isolated {ratio(one, 'isolated')}, propagated {ratio(one)}"
    return Told(f"{text}; n = {one['samples']}", joined(verdicts))


def _unpooled(output: Path) -> Told:
    """The control that has neither stages nor norms: the claim asks the criterion to gain more, isolated."""
    found = analysis(output, "heads", "heads")
    one, criterion = (pair(found, name) for name in ("attention-unpooled", "two-stage"))
    text = (
        f"attention without max-pooling, with neither stages nor ν: isolated {ratio(one, 'isolated')}, "
        f"propagated {ratio(one)} of pooled attention's; n = {one['samples']}"
    )
    ends = [side["isolated"]["sum_ratio_interval"] for side in (criterion, one)]
    gains = verdict(ends[1], 1, -1) == SUPPORTS
    found_lower = lower(*ends)
    return Told(text, CONTRADICTS if gains and found_lower != SUPPORTS else found_lower)


def _brought(output: Path, part: str) -> Document:
    for setting in analysis(output, "ablation", "ablation")["settings"]:
        if setting["granularity"] == "query":
            for one in setting["brings"]:
                if (one["name"], one["alpha"]) == (part, 0.25):
                    found: Document = one
                    return found
    raise LookupError(part)


def _last_layer(output: Path) -> Told:
    cells, verdicts = [], []
    for one in analysis(output, "shares", "layers")["drifts"]:
        verdicts.append(verdict(at(one["ratio_interval"], -1), 1, -1))
        shown = number(one["ratio"][-1], at(one["ratio_interval"], -1))
        cells.append(f"b = {one['treatment']['budget']}: × {shown}")
    return Told(f"last layer's drift over attention's, {listed(cells)}; n = {one['samples']}", joined(verdicts))


def _gradually(output: Path) -> Told:
    """Whether the ratio falls from the first layer's to the last's."""
    cells, verdicts = [], []
    for one in analysis(output, "shares", "layers")["drifts"]:
        first, last = (at(one["ratio_interval"], place) for place in (0, -1))
        verdicts.append(lower(last, first))
        shown = number(one["ratio"][0], first), number(one["ratio"][-1], last)
        cells.append(f"b = {one['treatment']['budget']}: × {shown[0]} → {shown[1]}")
    return Told(f"ratio of the drift after the first and after the last layer: {listed(cells)}", joined(verdicts))


def _contexts(output: Path) -> Told:
    cells, verdicts = [], []
    for one in analysis(output, "shares", "layers")["per_sample"]:
        verdicts.append(verdict(one["improved_share_interval"], _MOST, 1))
        shown = percent(one["improved_share"], one["improved_share_interval"])
        cells.append(f"b = {one['treatment']['budget']}: {shown}")
    return Told(f"prompts with less drift in the last layer: {listed(cells)}", joined(verdicts))


def _small_budgets(output: Path) -> Told:
    drifts = analysis(output, "shares", "layers")["drifts"]
    ends = [at(one["ratio_interval"], -1) for one in (drifts[0], drifts[-1])]
    least, most = (number(one["ratio"][-1], end) for one, end in zip((drifts[0], drifts[-1]), ends, strict=True))
    text = f"last layer's drift over attention's × {least} at b = 0.025, × {most} at 0.4"
    return Told(text, lower(*ends))


def _first_layer(output: Path) -> Told:
    """What giving the first layer back to attention does."""
    found = document(output, "first-layer", "patching.json")
    everywhere, without = found["named"][:2]
    text = (
        f"two-stage everywhere: last layer's drift × {value(everywhere, 'drift_ratio')} of attention's, heads' "
        f"{ratio(everywhere)}; with attention in layer 0 alone × {value(without, 'drift_ratio')}, {ratio(without)}"
    )
    harm = lower(without["drift_ratio_interval"], everywhere["drift_ratio_interval"])
    return Told(f"{text}; n = {found['samples']}", CONTRADICTS if harm == SUPPORTS else UNDECIDED)


ROWS = (
    Row("figure 2, SnapKV", "lower in 819 and 748 of 1,024 heads (80 and 73 %)", "heads", _snapkv, "heads"),
    Row("figure 2, AdaKV", "lower in most heads (four cases: 74.3 %)", "heads", _adakv, "heads"),
    Row("later version", "lower in over 92 % (Llama) and 86 % (Mistral) of the heads, budgets 2.5 to 40 %", "heads-v2",
        _later, "heads"),
    Row("abstract", "beyond attention, the values and W_O decide what is critical", "ablation", _norms, "heads"),
    Row("figure 2's control", "the gain is the criterion's, not that its selection does without max-pooling", "heads",
        _unpooled, "heads"),
    Row("figures 3a, 5", "in the last layer the perturbation is much lower", "shares", _last_layer, "heads"),
    Row("section 5.2", "it falls against attention's layer by layer", "shares", _gradually, "heads"),
    Row("figures 3b, 6", "in the last layer it is lower for nearly all contexts", "shares", _contexts, "heads"),
    Row("appendix B", "the lower the budget, the larger the gain", "shares", _small_budgets, "heads"),
    Row("appendix A", "harm in heads of the first layer is not significant", "first-layer", _first_layer, "swap"),
    Row("later version", "also where the context alone is compressed", "context-only", _context, "heads"),
)  # fmt: skip

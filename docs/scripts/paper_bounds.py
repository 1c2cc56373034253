"""Rows of docs/results/paper.md: the theorems, how tight their bounds are, and Assumption 1."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from paper_read import Document, Measurements, Row, Told, analysis, indices, listed, trace
from paper_verdicts import (
    ANSWERED,
    CHECKED,
    SUPPORTS,
    UNDECIDED,
    UNLIKE,
    VIOLATED,
    Floats,
    Paired,
    joined,
    paired,
    verdict,
)
from tables import number, percent, points, selection

from perturbkv.analyses.json_values import json_value
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import share_kind

_HALF = 0.5


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
    texts = [percent(one.mean(), json_value(intervals.of_mean(one, share_kind(0)))) for one in (first, second)]
    return f"{texts[0]} and {texts[1]}, difference {number(difference.value, difference.interval)}", difference


def _assumed(reading: str, said: str, beside: str, output: Path) -> Told:
    """Return the share of heads whose σ is above a half, at each budget; of another reading without a verdict."""
    cells, verdicts = [], []
    found = analysis(output, "shares", "assumption")
    for one in found["configurations"]:
        verdicts.append(verdict(one[reading]["share_above_half_interval"], _HALF, 1))
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
    text = f"S > ½ in the heads of all other layers and in those of the first, {listed(cells)}; n = {measured.samples}"
    return Told(text, joined(verdicts))


def _by_layer(measured: Measurements, index: int) -> list[Floats]:
    above = measured["retained_mass"][:, index] > _HALF
    return [above[:, 1:].mean(axis=(1, 2)), above[:, :1].mean(axis=(1, 2))]


ROWS = (
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

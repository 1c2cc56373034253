"""Rows of docs/paper.md: the theorems, how tight their bounds are, and Assumption 1."""

from __future__ import annotations

import statistics
from pathlib import Path

from paper_read import CONTRADICTS, SUPPORTS, UNDECIDED, Document, Row, Told, analysis, joined, listed, verdict
from tables import number, percent, points, selection

_HALF = 0.5


def _holds(output: Path, inequality: str) -> Told:
    found = analysis(output, "shares", "bound-tightness")
    count = found["inequalities_checked"][inequality]
    samples = analysis(output, "shares", "assumption")["samples"]
    text = f"{inequality} in all of {count:,} heads; five selections, five budgets, n = {samples}"
    wrong = found["violations"]
    return Told(text, SUPPORTS) if not wrong else Told(f"{wrong:,} of all inequalities are violated", CONTRADICTS)


def _first(output: Path) -> Told:
    return _holds(output, "L ≤ θ")


def _second(output: Path) -> Told:
    return _holds(output, "θ ≤ θ̂")


def _looser(output: Path) -> Told:
    held = _holds(output, "θ̂ ≤ θ̂_relax")
    spreads = [one["ratios"]["θ̂/θ̂_relax"]["evidence"] for one in _staged(output)]
    medians = [number(spread[2]) for spread in spreads]
    return Told(f"{held.text}; median θ̂/θ̂_relax {medians[0]} at b = 0.025, {medians[-1]} at 0.4", held.verdict)


def _staged(output: Path) -> list[Document]:
    found = analysis(output, "shares", "bound-tightness")["configurations"]
    return [one for one in found if selection(one["config"]) == "two-stage"]


def _tight(output: Path) -> Told:
    """L over the bounds where σ > ½, at each budget: the medians' range and the widest 5 to 95 %."""
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
    return Told(listed(cells), "answered")


def _orders(output: Path) -> Told:
    """Return how often the lower θ̂ has the lower L, of two selections of one stage 1, less how often 1 − S has."""
    cells, verdicts = [], []
    for agreement in analysis(output, "shares", "bound-tightness")["rank_agreement"]:
        bound, mass = (_of_one_stage1(agreement, name) for name in ("θ̂", "1 − S"))
        verdicts.append(verdict(bound["gain_interval"], 0, 1))
        gain = points(bound["gain"], bound["gain_interval"])
        shares = f"{percent(bound['share'])} against {percent(mass['share'])}"
        cells.append(f"b = {agreement['setting']['budget']}: {gain} points ({shares})")
    text = "heads in which the lower θ̂ has the lower L, two-stage or ν ≡ 1, σ > ½, less those of 1 − S"
    return Told(f"{text}: {listed(cells)}", joined(verdicts))


def _of_one_stage1(agreement: Document, bound: str) -> Document:
    """Return how a bound orders the two selections that have the same stage 1."""
    (only,) = (one for one in agreement["concordance"] if one["same_stage1"] and one["bound"] == bound)
    found: Document = only
    return found


def _assumed(output: Path) -> Told:
    """The share of heads in which stage 1 holds more than half, at each budget."""
    cells, verdicts = [], []
    for one in analysis(output, "shares", "assumption")["configurations"]:
        reading = one["sigma_stage1"]
        verdicts.append(verdict(reading["share_above_half_interval"], _HALF, 1))
        shown = percent(reading["share_above_half"], reading["share_above_half_interval"])
        cells.append(f"b = {one['config']['budget']}: {shown}")
    return Told(f"σ > ½ in {listed(cells)}", joined(verdicts))


def _exceptions(output: Path) -> Told:
    """Heads whose mean σ is at most half, outside the first layer."""
    cells, outside = [], 0
    for one in analysis(output, "shares", "assumption")["configurations"]:
        below = one["sigma_stage1"]["heads_at_most_half"]
        others = [head for head in below if head["layer"]]
        outside += len(others)
        cells.append(f"b = {one['config']['budget']}: {len(others)} of {len(below)}")
    text = f"of the heads (of 270) below a half, those outside the first layer: {listed(cells)}"
    return Told(text, CONTRADICTS if outside else SUPPORTS)


def _in_first(output: Path) -> Told:
    shares = [
        statistics.mean(one["sigma_stage1"]["share_above_half_by_layer"][:1])
        for one in analysis(output, "shares", "assumption")["configurations"]
    ]
    ends = percent(shares[0]), percent(shares[-1])
    text = f"stage 1 holds more than half in {ends[0]} (b = 0.025) to {ends[1]} (0.4) of layer 0's heads"
    return Told(text, SUPPORTS if max(shares) < _HALF else CONTRADICTS if min(shares) > _HALF else UNDECIDED)


ROWS = (
    Row("theorem 2", "L ≤ θ for every kept set", "shares", _first, "heads"),
    Row("theorem 3", "L ≤ θ ≤ θ̂ where stage 1 holds σ > ½", "shares", _second, "heads"),
    Row("theorem 4", "attention alone minimises θ̂_relax, a looser bound than θ̂", "shares", _looser, "heads"),
    Row("open question 2", "how tight are the bounds?", "shares", _tight, "heads"),
    Row("section 3.5", "what has the lower bound has the lower perturbation: of one stage 1, θ̂ tells more than the "
        "attention given up, 1 − S", "shares", _orders, "heads"),
    Row("assumption 1, figure 4", "most heads keep over half of their attention in stage 1, at every budget", "shares",
        _assumed, "heads"),
    Row("appendix A", "the only exceptions are some heads of the first layer", "shares", _exceptions, "heads"),
    Row("appendix A", "heads of the first layer violate it, for their attention is not sparse", "shares", _in_first,
        "heads"),
)  # fmt: skip

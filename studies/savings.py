"""The share of the budget that one selection saves over another (the paper's figure 1).

A treatment at budget b does as well as its baseline at budget b*; it saves 1 − b / b*. By three measures: the mean
score of whole answers (`--answers`), the mean propagated L1 of all heads over the norms of the full run's outputs, and
the KL of the next token, as a median over samples, since one sample can dominate its mean.

How it is decided:

- b* comes from the sample means. Isotonic regression makes both sides' losses fall with the budget; the baseline's
  budgets are joined by lines on log b (of what is positive also on its own logarithm: it falls by factors). Where the
  baseline's curve is flat at the treatment's level, the budget nearest to the treatment's own counts: equal curves save
  nothing. Of a score that lies on a flat end of the curve (nothing is answered yet, or everything) b* is not known:
  only the smallest budget measured that does as well is told.
- The interval of b* holds the budgets at which the baseline cannot be told apart from the treatment, sample by sample;
  nothing is resampled. Of KL each sample has a b* of its own, whose median has the interval of a median.
- A treatment saves where the whole interval of the saving lies above 0, and needs more where it lies below.
- At least five budgets a curve. Sides that keep other sets (per head, per group of heads) are compared by cache share.

    python studies/savings.py --dataset needle --length 1000 --budget 0.05 --budget 0.1 --budget 0.2 --budget 0.4 …
    python studies/savings.py TRACE --compare adakv:attention,adakv:two-stage --by propagated
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import common
import numpy as np
from common import Floats, estimate, interval_text, side_of, variable
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

import perturbkv as pk

LEAST_BUDGETS = 5
"""Fewer leave too much to the lines between them."""
CANDIDATES = 401
"""Budgets that are tried for an interval, evenly spaced on the logarithm."""
SMALLEST, SAME, DIGITS = 1e-12, 1e-9, 12
"""Least value on a logarithmic scale; difference of levels, and digits of means, below which there is rounding."""
MEASURES = {"score": "score × 100", "propagated": "propagated L1 / ‖o‖₁", "kl": "KL, nat, median"}
WORDS = {1: "saves", -1: "needs more", 0: "undecided"}
Interval = pk.stats.intervals.Interval


@dataclass(frozen=True)
class Curve:
    """Configurations that differ in budget alone, smallest first.

    Attributes:
        indices: in the trace.
        configs: of these indices.
        at: (budget,) coordinates: budgets, or cache shares.
        cache_shares: (budget,) entries of the cache over those of the full one.
    """

    indices: tuple[int, ...]
    configs: tuple[pk.EvictionConfig, ...]
    at: Floats
    cache_shares: Floats


@dataclass(frozen=True)
class Loss:
    """A measure as a loss, (sample, config): 1 − score, relative L1 or nat; `full` is the full cache's mean score."""

    name: str
    each: Floats
    full: float = np.nan

    def level(self, index: int) -> tuple[float, Any]:
        """Return a configuration's value with its interval: mean score, mean L1 or median KL."""
        stats, each = pk.stats.intervals, self.each[:, index]
        if self.name == "kl":
            return float(np.median(each)), stats.of_median(each)
        if self.name == "score":
            return float(1 - each.mean()), stats.of_mean(1 - each, stats.share_kind(0))
        return float(each.mean()), stats.of_mean(each, stats.POSITIVE)


@dataclass(frozen=True)
class EquivalentBudget:
    """The baseline's budget that does as well, 0 or infinite beyond those measured, and its interval, likewise.

    Where `flat`, `value` is the smallest budget measured that does as well, and the true one is not known.
    """

    value: float
    interval: Any
    flat: bool = False

    @property
    def known(self) -> bool:
        """True where `value` lies within the measured budgets, on a part of the curve that is not flat."""
        return bool(0 < self.value < np.inf) and not self.flat

    @property
    def beyond(self) -> str:
        """Side of the budgets measured, above or below; both: no end is known; flat: a flat curve; else empty."""
        if self.flat:
            return "flat"
        if self.interval is not None and self.interval.low == 0 and self.interval.high == np.inf:
            return "both"
        return "" if self.known else "above" if self.value else "below"


def equivalent_budgets(
    budgets: Floats, baseline: Floats, own: Floats, treatment: Floats, log: bool
) -> list[EquivalentBudget]:
    """Return, per budget of the treatment, the baseline's with an equally low mean loss.

    Args:
        budgets: (budget,) the baseline's, rising.
        baseline: (sample, budget) its losses.
        own: (own,) the treatment's budgets, rising.
        treatment: (sample, own) its losses.
        log: whether losses are positive and compared by ratios, instead of by differences of what lies in [0, 1].
    """
    falling, levels = make_falling(baseline), make_falling(treatment)
    return [
        _equivalent_budget(budgets, falling, float(at), level, log) for at, level in zip(own, levels.T, strict=True)
    ]


def _equivalent_budget(budgets: Floats, falling: Floats, own: float, level: Floats, log: bool) -> EquivalentBudget:
    """Return the baseline's budget at which its `falling` losses reach the treatment's `level` at budget `own`."""
    stats, curve, aim = pk.stats.intervals, falling.mean(axis=0), float(level.mean())
    if not log:
        same = np.abs(curve - aim) <= SAME
        if same[:2].all() or same[-2:].all() or aim >= 1 - SAME:
            return EquivalentBudget(float(budgets[np.argmax(same)]), None, flat=True)
    value = budget_at(budgets, curve, aim, own, log)
    tried = np.geomspace(budgets[0], budgets[-1], CANDIDATES)
    weights = np.stack([np.interp(np.log(tried), np.log(budgets), unit) for unit in np.eye(len(budgets))], axis=1)
    kind = stats.RATIO if log else stats.DIFFERENCE
    band = stats.of_statistics(_contrast(weights, falling, level, log), len(falling), kind)
    if band is None:
        return EquivalentBudget(value, None)
    equal = 1.0 if log else 0.0
    low, high = _undecided_ends(tried, band.high < equal - SAME, band.low > equal + SAME)
    return EquivalentBudget(value, Interval(min(low, value), max(high, value), band.kind))


def median_equivalent_budgets(
    budgets: Floats, baseline: Floats, own: Floats, treatment: Floats
) -> list[EquivalentBudget]:
    """Return the median over samples of each sample's own equivalent budget; arguments as of `equivalent_budgets`."""
    sides = [np.stack([make_falling(curve[None])[0] for curve in each]) for each in (baseline, treatment)]
    each = np.array([
        [budget_at(budgets, curve, float(aim), float(at), log=True) for at, aim in zip(own, levels, strict=True)]
        for curve, levels in zip(*sides, strict=True)
    ])  # fmt: skip
    middle = np.sort(each, axis=0)[(len(each) - 1) // 2]  # of an even number the lower one: no more than is saved
    band = pk.stats.intervals.of_medians(each)
    if band is None:
        return [EquivalentBudget(float(value), None) for value in middle]
    ends = map(band.at, range(len(own)))
    return [
        EquivalentBudget(float(value), Interval(min(end.low, budgets[-1]), max(end.high, budgets[0]), end.kind))
        for value, end in zip(middle, ends, strict=True)
    ]


def make_falling(losses: Floats) -> Floats:
    """Return losses (sample, budget) with a falling mean: adjacent budgets over which the mean rises are averaged."""
    means = losses.mean(axis=0)
    starts = isotonic_regression(np.round(means / (means.max() or 1.0), DIGITS), increasing=False).blocks
    sizes = np.diff(starts)
    return np.asarray(np.repeat(np.add.reduceat(losses, starts[:-1], axis=1) / sizes, sizes, axis=1))


def budget_at(budgets: Floats, curve: Floats, level: float, own: float, log: bool) -> float:
    """Return the budget where a falling curve (budget,) reaches `level`; on a flat part the budget nearest to `own`."""
    curve, aim = _log_if(curve, log), _log_if(np.asarray(level), log)
    same = budgets[np.abs(curve - aim) <= SAME]
    if len(same):
        return float(np.clip(own, same[0], same[-1]))
    if curve[-1] > aim:
        return float("inf")
    index = int(np.argmax(curve < aim))
    if index == 0:
        return 0.0
    share = (curve[index - 1] - aim) / (curve[index - 1] - curve[index])
    return float(budgets[index - 1] * (budgets[index] / budgets[index - 1]) ** share)


def _contrast(between_budgets: Floats, baseline: Floats, treatment: Floats, log: bool) -> Callable[[Floats], Floats]:
    """Return weights (row, sample) -> treatment against baseline at each tried budget, (row, tried)."""

    def contrast(weights: Floats) -> Floats:
        level, curve = (weights @ treatment)[:, None], _log_if(weights @ baseline, log) @ between_budgets.T
        return np.asarray(pk.stats.arithmetic.ratio(level, np.exp(curve)) if log else level - curve)

    return contrast


def _undecided_ends(tried: Floats, better: Any, worse: Any) -> tuple[float, float]:
    """Return the range of tried budgets at which neither side is decidedly better, one step wider at both ends.

    An end is open, 0 or infinite, where no budget beyond it is decided.
    """
    first = int(np.argmin(better))  # the first at which the treatment is not decided to be better
    last = len(tried) - 1 - int(np.argmin(worse[::-1]))
    low = 0.0 if first == 0 and not better[0] else float(tried[-1] if better.all() else tried[first - 1])
    high = np.inf if last == len(tried) - 1 and not worse[-1] else float(tried[0] if worse.all() else tried[last + 1])
    return low, high


def _log_if(values: Floats, log: bool) -> Floats:
    """Return the logarithms of the values if `log`, else the values."""
    return np.log(np.maximum(values, SMALLEST)) if log else values


def losses(trace: pk.Trace, by: Sequence[str], step: int) -> list[Loss]:
    """Return the losses of a trace by the measures that were asked for, or by all that it has."""
    found = []
    graded = "score_full" in trace.arrays and not np.isnan(trace.get("score_full", "savings").astype(float)).any()
    for name in by or [one for one in MEASURES if graded or one != "score"]:
        if name == "score":
            full, score = (trace.get(one, "savings").astype(float) for one in ("score_full", "score"))
            found.append(Loss(name, 1 - score, float(full.mean())))
        elif name == "kl":
            found.append(Loss(name, variable(trace, "logit_kl", step)))
        else:
            moved = variable(trace, "perturbation_propagated", step).sum(axis=(2, 3))
            found.append(Loss(name, moved / variable(trace, "output_norm", step).sum(axis=(1, 2))[:, None]))
    return found


def curves(trace: pk.Trace, name: str) -> list[Curve]:
    """Return the curves of a side. Raises PerturbkvError for too few budgets, or for entries beside shares."""
    groups: dict[pk.EvictionConfig, list[int]] = {}
    for index, config in enumerate(trace.run.configs):
        if common.matches(config, name):
            groups.setdefault(dataclasses.replace(config, budget=pk.Budget(1.0)), []).append(index)
    if not groups:
        raise pk.PerturbkvError(f"expected configurations of '{name}', got {', '.join(trace.run.labels())}")
    held = trace.get("held_share", "savings").astype(float).mean(axis=0)
    found = []
    for indices in groups.values():
        ordered = sorted(indices, key=lambda index: trace.run.configs[index].budget.value)
        configs = tuple(trace.run.configs[index] for index in ordered)
        if len({config.budget.unit for config in configs}) > 1 or len(configs) < LEAST_BUDGETS:
            given = ", ".join(str(config.budget) for config in configs)
            raise pk.PerturbkvError(f"savings needs {LEAST_BUDGETS} budgets, all entries or all shares, got {given}")
        at = np.array([config.budget.value for config in configs], dtype=float)
        found.append(Curve(tuple(ordered), configs, at, held[ordered]))
    return found


def pairs(trace: pk.Trace, baseline: str, treatment: str) -> list[tuple[Curve, Curve, str]]:
    """Return (baseline, treatment, coordinate) of the curves that differ in selection alone, of single ones always.

    Raises PerturbkvError where there are none, and as `curves` and `place_on_axis`.
    """
    firsts, seconds = curves(trace, baseline), curves(trace, treatment)
    alike = [
        (first, second)
        for second in seconds
        for first in firsts
        if first.indices != second.indices
        and common.differ_in_selection(
            dataclasses.replace(first.configs[0], budget=pk.Budget(1.0)),
            dataclasses.replace(second.configs[0], budget=pk.Budget(1.0)),
        )
    ]
    if not alike:
        if len(firsts) > 1 or len(seconds) > 1 or firsts[0].indices == seconds[0].indices:
            raise pk.PerturbkvError(f"expected curves of '{baseline}' and '{treatment}' that differ in selection alone")
        alike = [(firsts[0], seconds[0])]
    return [place_on_axis(first, second) for first, second in alike]


def place_on_axis(first: Curve, second: Curve) -> tuple[Curve, Curve, str]:
    """Return two curves over one coordinate, and it: `budget`, or cache shares (`held`) where they keep other sets.

    Raises PerturbkvError where the coordinate does not rise with the budget.
    """
    sizes = {(one.granularity.name, one.block, one.budget.unit) for one in (first.configs[0], second.configs[0])}
    along = "budget" if len(sizes) == 1 else "held"
    if along == "held":
        first, second = (dataclasses.replace(one, at=one.cache_shares) for one in (first, second))
    if any(not (np.diff(one.at) > 0).all() for one in (first, second)):
        raise pk.PerturbkvError("savings needs caches that grow with the budget; compare sides of one granularity")
    return first, second, along


def measured_savings(loss: Loss, baseline: Curve, treatment: Curve) -> dict[str, Any]:
    """Return both curves' levels by one measure, the treatment's savings, and where a loss rises with the budget."""
    first, second = (loss.each[:, list(curve.indices)] for curve in (baseline, treatment))
    if loss.name == "kl":
        reached = median_equivalent_budgets(baseline.at, first, treatment.at, second)
    else:
        reached = equivalent_budgets(baseline.at, first, treatment.at, second, log=loss.name != "score")
    points = []
    for level, equivalent in zip(levels(loss, treatment), reached, strict=True):
        saving = 1 - level["at"] / equivalent.value if equivalent.known else np.nan
        ends = equivalent.interval
        if ends is not None:
            low, high = (1 - level["at"] / end if end > 0 else -np.inf for end in (ends.low, ends.high))
            ends = Interval(low, high, ends.kind)
        points.append({
            **level, "reached": equivalent.value, "reached_interval": equivalent.interval, "beyond": equivalent.beyond,
            **estimate("saving", (saving, ends)),
        })  # fmt: skip
    sign = -1 if loss.name == "score" else 1
    rising = [
        [(one["at"], other["at"]) for one, other in pairwise(each) if sign * (other["level"] - one["level"]) > 0]
        for each in (levels(loss, baseline), points)
    ]
    return {"measure": loss.name, "full": loss.full, "baseline": levels(loss, baseline), "points": points,
            "rising": rising[0], "treatment_rising": rising[1]}  # fmt: skip


def levels(loss: Loss, curve: Curve) -> list[dict[str, Any]]:
    """Return the value of each configuration of a curve."""
    return [
        {"config": config, "at": at, "held": share, **estimate("level", loss.level(index))}
        for config, index, at, share in zip(curve.configs, curve.indices, curve.at, curve.cache_shares, strict=True)
    ]


def table_row(found: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """Return a point as the table shows it: > and < stand for beyond the budgets measured, ≤ for a flat curve."""
    smallest, largest = found["baseline"][0]["at"], found["baseline"][-1]["at"]
    at = {"above": f"> {largest:g}", "below": f"< {smallest:g}", "flat": f"≤ {point['reached']:.3g}"}
    config, shown = point["config"], ""
    if point["beyond"] in ("", "both"):
        shown = interval_text(100 * point["saving"], common.in_percent(point["saving_interval"]), 0)
    return {
        "measure": found["measure"], "method": f"{config.policy}:{config.selection}", "b": str(config.budget),
        "share": point["held"], "its value": point["level"], "b*": at.get(point["beyond"], f"{point['reached']:.3g}"),
        "saved, %": shown, "": "unknown" if point["beyond"] == "flat" else WORDS[side_of(point["saving_interval"], 0)],
    }  # fmt: skip


def draw(members: Sequence[dict[str, Any]]) -> Figure:
    """Draw a row per pair of curves, a column per measure: both sides over budgets, an arrow per known saving."""
    columns = len(members[0]["measures"])
    figure = common.page_figure(60 * len(members), min(174, 66 * columns))
    panels = figure.subplots(len(members), columns, squeeze=False)
    for line, member in zip(panels, members, strict=True):
        for axes, found in zip(line, member["measures"], strict=True):
            factor = 100 if found["measure"] == "score" else 1
            for each, look in ((found["baseline"], "o-"), (found["points"], "s--")):
                config = each[0]["config"]
                axes.plot([one["at"] for one in each], [factor * one["level"] for one in each], look, markersize=3,
                          label=f"{config.policy}:{config.selection}")  # fmt: skip
            for point in found["points"]:
                if 0 < point["reached"] < np.inf and point["beyond"] != "flat":
                    height = factor * point["level"]
                    arrow = {"arrowstyle": "->", "color": "0.4"}
                    axes.annotate("", (point["reached"], height), (point["at"], height), arrowprops=arrow)
            if factor == 100:
                axes.axhline(100 * found["full"], color="0.7", linewidth=0.8)
            common.log_ticks(axes, (point["at"] for point in found["points"]))
            if factor != 100:
                common.plain_log(axes, "y")
            axes.set(xlabel="cache share" if member["along"] == "held" else "budget", ylabel=MEASURES[found["measure"]])
        line[0].legend(fontsize=6)
    return figure


def study(asked: argparse.Namespace) -> None:
    """Measure or read the trace; print the table, write document and picture."""
    baseline, *treatments = asked.compare.split(",")
    budgets = asked.budget or ["0.05", "0.1", "0.2", "0.3", "0.4", "0.6", "0.8"]
    configs = [] if asked.trace else pk.grid(
        budgets, selection=[baseline, *treatments], granularity=asked.granularity, window=asked.window
    )  # fmt: skip
    trace = common.read_or_measure(asked, configs, **({"generate": asked.max_new_tokens} if asked.answers else {}))
    by = losses(trace, asked.by, asked.step)
    members = [
        {"along": along, "step": asked.step, "measures": [measured_savings(loss, first, second) for loss in by]}
        for treatment in treatments
        for first, second, along in pairs(trace, baseline, treatment)
    ]
    rows = [table_row(found, point) for member in members for found in member["measures"] for point in found["points"]]
    common.show(f"budget b* at which {baseline} does as well, and 1 − b / b*", rows)
    counts = [f"{word} in {[row[''] for row in rows].count(word)}" for word in (*WORDS.values(), "unknown")]
    print(f"n = {int(trace.ok.sum())}; in brackets: intervals over samples. Of {len(rows)}: {', '.join(counts)}.")
    common.save(asked, {**common.trace_summary(trace, asked.step), "savings": members}, draw(members))


if __name__ == "__main__":
    parser = common.options(__doc__ or "")
    parser.add_argument("--compare", default="attention,two-stage", metavar="NAMES", help="baseline, then treatments")
    parser.add_argument(
        "--by", choices=tuple(MEASURES), action="append", default=[], help="by default all of the trace's"
    )
    parser.add_argument("--granularity", default="kv", help="[%(default)s]")
    parser.add_argument("--window", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--step", type=int, default=0, help="decode step of L1 and KL [%(default)s]")
    parser.add_argument("--answers", action="store_true", help="also generate answers, and score them")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer, with --answers [%(default)s]")
    common.main(study, parser)

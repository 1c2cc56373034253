"""How often an interval of n samples holds the truth: `python docs/scripts/coverage.py TRACE.h5`.

The trace's samples are the population, its numbers over all of them the truth. n of them are drawn with replacement,
many times, and each way of making an interval is asked whether it holds the truth: a finite population, so n may be as
large as it is, and no draw holds a prompt that the truth has not seen. Forty samples or more, please: METHOD wants at
least 92 % of draws. A row is one statistic over all configurations: for each n the worst and the median coverage, and
the median width over the truth. `--bootstrap` adds the percentile bootstrap, which takes an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv.analyses.bounds import rank_agreement
from perturbkv.analyses.bounds.ratios import read_bounds
from perturbkv.analyses.horizon.growth import LEAST_STEPS
from perturbkv.analyses.measurements import EVIDENCE, Measurements
from perturbkv.analyses.sides import group_by_selection
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import quantiles, ratio
from perturbkv.analyses.stats.intervals import (
    CORRELATION,
    DIFFERENCE,
    POSITIVE,
    RATIO,
    StatisticKind,
    mean_where_known,
    rare_share_kind,
    share_kind,
)
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.analyses.verdicts import verdicts
from perturbkv.configs.selections import STAGED
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace

SAMPLES, DRAWS = (8, 16, 36, 40), 4000
"""The n of the pages' tables."""
RESAMPLES, RESAMPLED, CHUNK = 400, 400, 100
"""The bootstrap is of the first 400 draws, each resampled 400 times: of every draw it would take a night."""
Floats = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Statistic:
    """A number of one configuration, or of two: `of` takes weights (row, sample); None for the samples' median."""

    name: str
    kind: StatisticKind
    of: Callable[[Floats], Floats] | None
    each: Floats


def mean(name: str, kind: StatisticKind, each: Floats) -> Statistic:
    """Return the mean of (sample,) values."""
    return Statistic(name, kind, lambda weights: weights @ each, each)


def over(name: str, top: Floats, bottom: Floats) -> Statistic:
    """Return a ratio of sums."""
    return Statistic(name, RATIO, lambda weights: ratio(weights @ top, weights @ bottom), ratio(top, bottom))


def middle(name: str, top: Floats, bottom: Floats) -> Statistic:
    """Return the median of heads' ratios; (sample, head)."""
    return Statistic(name, RATIO, lambda weights: quantiles(ratio(weights @ top, weights @ bottom), (0.5,), 1)[0], top)


def statistics(trace: Trace) -> Iterator[Statistic]:
    """Return everything to which the analyses give an interval, at the first step."""
    for group in group_by_selection(trace.run):
        if "attention" in group:
            for treatment in group.values():
                if treatment != group["attention"]:
                    yield from compared(trace, group["attention"], treatment)
        yield from ranked(trace, group)
    for config in range(len(trace.run.configs)):
        yield from single(trace, config)


def compared(trace: Trace, first: int, second: int) -> Iterator[Statistic]:
    """Return the statistics of two configurations: heads, and drift after the middle and the last layer."""
    measured = Measurements(trace, "coverage")
    for kind, name in (("isolated", "noise_floor_isolated"), ("propagated", "noise_floor")):
        both, floor = measured[f"perturbation_{kind}"], measured[name]
        better = (verdicts(both[:, first], both[:, second], floor) == 1).reshape(len(both), -1)
        flat = both.reshape(*both.shape[:2], -1)
        yield mean(f"share of heads better, {kind}", share_kind(better.shape[1]), better.mean(axis=1))
        yield over(f"ratio of ΣL, {kind}", flat[:, second].sum(axis=1), flat[:, first].sum(axis=1))
        yield middle(f"median head's ratio, {kind}", flat[:, second], flat[:, first])
    drift = measured["hidden_drift_l1"]
    for layer in (drift.shape[2] // 2, -1):
        yield over("ratio of drift", drift[:, second, layer], drift[:, first, layer])


def single(trace: Trace, config: int) -> Iterator[Statistic]:
    """Return the statistics of one configuration: σ, drift, KL, and growth over the steps."""
    measured, all_steps = Measurements(trace, "coverage"), Measurements(trace, "coverage", None)
    for name, words in (("sigma_stage1", "σ"), ("retained_mass", "S")):
        above = measured[name][:, config] > EVIDENCE
        yield mean(f"share of heads with {words} > 0.5", rare_share_kind(above[0].size), above.mean(axis=(1, 2)))
    levels = {
        "last layer's drift": measured["hidden_drift_l1"][:, config, -1],
        "KL": measured["logit_kl"][:, config],
    }
    for name, each in levels.items():
        yield mean(f"mean of {name}", POSITIVE, each)
        yield Statistic(f"median of {name}", POSITIVE, None, each)
    third = trace.run.steps // LEAST_STEPS
    if third and trace.measured[trace.ok].all():
        moved = all_steps["perturbation_propagated"][:, config].sum(axis=(2, 3))
        relative = moved / all_steps["output_norm"].sum(axis=(2, 3))
        yield over("growth over the steps", relative[:, -third:].mean(axis=1), relative[:, :third].mean(axis=1))


def ranked(trace: Trace, group: dict[str, int]) -> Iterator[Statistic]:
    """Return rank correlations of θ and 1 − S with L, and how much more often a bound is right than 1 − S."""
    held, places = read_bounds(Measurements(trace, "coverage")), list(group.values())
    if len(places) >= rank_agreement.LEAST_SELECTIONS:
        for bound in (held.theta, 1 - held.mass):
            found = spearman(np.moveaxis(bound[:, places], 1, 0), np.moveaxis(held.perturbation[:, places], 1, 0))
            yield mean("rank correlation of a bound", CORRELATION, np.nanmean(found, axis=(1, 2)))
    if set(STAGED) <= set(group):
        bounds = (held.theta, held.theta_hat, 1 - held.mass)
        pair = [group[name] for name in STAGED]
        *arrays, moved = (np.moveaxis(array[:, pair], 1, 0) for array in (*bounds, held.perturbation))
        right = rank_agreement.concordant(arrays, moved, (held.sigma[:, pair] > EVIDENCE).all(axis=1))
        *shares, mass = (mean_where_known(each, (1, 2)) for each in right)
        for share in shares:
            if not np.isnan(share).any():
                yield mean("right picks of a bound less those of 1 − S", DIFFERENCE, share - mass)


def coverage(one: Statistic, drawn: Floats, bootstrap: bool = False) -> dict[str, tuple[float, float]]:
    """Return method -> share of draws that hold the truth, and median width over it; `drawn` is (draw, sample)."""
    if one.of is None:
        found = intervals.of_medians(one.each[drawn].T)
        assert found is not None
        return {"ours": _told(float(np.median(one.each)), found.low, found.high)}
    population, samples = len(one.each), drawn.shape[1]
    counts = np.stack([np.bincount(row, minlength=population) for row in drawn]).astype(float)
    truth = float(one.of(np.full((1, population), 1 / population))[0])
    value = one.of(counts / samples)
    single = np.eye(population)
    left_out = np.stack([one.of((counts - single[drawn[:, place]]) / (samples - 1)) for place in range(samples)])
    student = StatisticKind(samples, limits=one.kind.limits)
    kinds = {
        "Student's t": student,
        "t, log": StatisticKind(samples, log=True, limits=one.kind.limits),
        "ours": one.kind,
    }
    told = {name: _told(truth, *intervals.jackknife(value, left_out, kind)) for name, kind in kinds.items()}
    if bootstrap:
        told["percentile bootstrap"] = _told(truth, *_percentile(one.of, drawn[:RESAMPLED], population))
    return told


def _percentile(of: Callable[[Floats], Floats], drawn: Floats, population: int) -> tuple[Floats, Floats]:
    draw, ends = np.random.default_rng(1), []
    for start in range(0, len(drawn), CHUNK):
        part = drawn[start : start + CHUNK]
        again = part[:, draw.integers(0, part.shape[1], size=(RESAMPLES, part.shape[1]))].reshape(-1, part.shape[1])
        flat = (again + np.arange(len(again))[:, None] * population).reshape(-1)
        counts = np.bincount(flat, minlength=len(again) * population).reshape(-1, population)
        found = of(counts / part.shape[1]).reshape(len(part), RESAMPLES)
        ends.append(np.nanquantile(found, (0.025, 0.975), axis=1))
    low, high = np.concatenate(ends, axis=1)
    return low, high


def _told(truth: float, low: Floats, high: Floats) -> tuple[float, float]:
    slack = 1e-9 * abs(truth)
    held = (low - slack <= truth) & (truth <= high + slack)
    return float(held.mean()), float(np.median(high - low) / (abs(truth) or 1.0))


def table(trace: Trace, draws: int, sizes: Sequence[int] = SAMPLES, bootstrap: bool = False) -> list[str]:
    """Return the lines of the Markdown table: per n 'worst, median; width'."""
    drawn = [np.random.default_rng(0).integers(0, int(trace.ok.sum()), size=(draws, size)) for size in sizes]
    rows: dict[tuple[str, str], list[list[tuple[float, float]]]] = {}
    for one in statistics(trace):
        if one.of is None or np.ptp(one.each) > 0:  # what is the same in every sample cannot be missed
            for place, each in enumerate(drawn):
                for method, told in coverage(one, each, bootstrap).items():
                    rows.setdefault((one.name, method), [[] for _ in sizes])[place].append(told)
    heads = " | ".join(f"n = {size}: worst, median; width" for size in sizes)
    lines = [f"| statistic | method | configurations | {heads} |", "|---" * (3 + len(sizes)) + "|"]
    for (name, method), by_size in rows.items():
        lines.append(f"| {name} | {method} | {len(by_size[0])} | {' | '.join(map(_cell, by_size))} |")
    return lines


def _cell(told: list[tuple[float, float]]) -> str:
    held, width = (np.array(part) for part in zip(*told, strict=True))
    return f"{100 * held.min():.1f} %, {100 * np.median(held):.1f} %; {np.median(width):.2g}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES)
    parser.add_argument("--bootstrap", action="store_true")
    given = parser.parse_args()
    shown = table(read_trace(given.trace), given.draws, given.samples, given.bootstrap)
    print("\n".join(shown))

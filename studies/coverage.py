"""How often an interval of n samples holds the truth, on the samples of a trace.

`python studies/coverage.py TRACE.h5` takes a trace's samples as the population, its numbers over all of them as the
truth. n of them are drawn with replacement, many times, and each way of making an interval is asked whether it holds
the truth: a finite population, so n may be as large as it is, and no draw holds a prompt that the truth has not seen.
Forty samples or more, please: METHOD wants at least 92 % of draws. A row is one statistic over all configurations: for
each n the worst and the median coverage, and the median width over the truth. `--bootstrap` adds the percentile
bootstrap, which takes an hour. Without a trace it measures one, of the configurations of docs/results/one_model.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import common
import numpy as np
from common import EVIDENCE, Floats, Table, signs_beyond_noise, variable
from numpy.typing import NDArray

import perturbkv as pk

Indices = NDArray[np.int64]
intervals, arithmetic = pk.stats.intervals, pk.stats.arithmetic
CONTENDERS = ("attention", "two-stage", "two-stage-uniform", "attention-unpooled")
PRESETS = ("paper", "paper-v2", "released-v2")
STAGED = ("two-stage", "two-stage-uniform")
"""Selections that have the same stage 1."""
LEAST_SELECTIONS, LEAST_STEPS = 3, 3
"""Fewest selections that are ranked, and fewest steps of which there is growth, last third over first."""
SAMPLES, DRAWS = (8, 16, 36, 40), 4000
"""The n of the pages' tables."""
RESAMPLES, RESAMPLED, CHUNK = 400, 400, 100
"""The bootstrap is of the first 400 draws, each resampled 400 times: of every draw it would take a night."""


@dataclass(frozen=True)
class Statistic:
    """A number of one configuration, or of two, over samples.

    Attributes:
        name: of its row.
        kind: of its interval, a `StatisticKind`.
        of: returns it, (row,), from weights of the samples, (row, sample); None for the samples' median.
        each: (sample, …) values that it is made of; where they are all the same, its interval cannot miss it.
    """

    name: str
    kind: Any
    of: Callable[[Floats], Floats] | None
    each: Floats


def mean_statistic(name: str, kind: Any, each: Floats) -> Statistic:
    """Return the mean of (sample,) values as a statistic."""
    return Statistic(name, kind, lambda weights: weights @ each, each)


def ratio_statistic(name: str, top: Floats, bottom: Floats) -> Statistic:
    """Return Σ top / Σ bottom of (sample,) values as a statistic."""
    ratio = arithmetic.ratio
    return Statistic(name, intervals.RATIO, lambda weights: ratio(weights @ top, weights @ bottom), ratio(top, bottom))


def median_head_statistic(name: str, top: Floats, bottom: Floats) -> Statistic:
    """Return the median over heads of Σ top / Σ bottom, of (sample, head) values, as a statistic."""

    def of(weights: Floats) -> Floats:
        ratios = arithmetic.ratio(weights @ top, weights @ bottom)
        return np.asarray(arithmetic.quantiles(ratios, (0.5,), 1)[0])

    return Statistic(name, intervals.RATIO, of, top)


def statistics(trace: pk.Trace) -> Iterator[Statistic]:
    """Yield every number to which the analyses give an interval, at the first step."""
    for group in by_selection(trace):
        if "attention" in group:
            for treatment in group.values():
                if treatment != group["attention"]:
                    yield from pair_statistics(trace, group["attention"], treatment)
        yield from rank_statistics(trace, list(group.values()))
        if set(STAGED) <= set(group):
            yield from pick_statistics(trace, [group[name] for name in STAGED])
    for config in range(len(trace.run.configs)):
        yield from config_statistics(trace, config)


def by_selection(trace: pk.Trace) -> list[dict[str, int]]:
    """Return selection -> index for each group of configurations that differ in selection alone, by α and budget."""
    groups: list[list[pk.EvictionConfig]] = []
    for place, config in enumerate(trace.run.configs):
        fitting = [group for group in groups if _fits_group(config, group)]
        for group in fitting:
            group.append(config)
        if not fitting:
            groups.append([config])
            for earlier in trace.run.configs[:place]:  # without an option that sets the others apart
                if _fits_group(earlier, groups[-1]):
                    groups[-1].insert(-1, earlier)
    groups.sort(key=lambda group: min(map(_setting_order, group)))
    return [{config.selection.name: trace.run.configs.index(config) for config in group} for group in groups]


def _fits_group(config: pk.EvictionConfig, group: Sequence[pk.EvictionConfig]) -> bool:
    """Return whether a configuration shares with each one of a group all choices that both have, but the selection."""
    own = config.flat()
    names = [(own.keys() & other.flat().keys()) - {"selection"} for other in group]
    return all(own[name] == other.flat()[name] for other, shared in zip(group, names, strict=True) for name in shared)


def _setting_order(config: pk.EvictionConfig) -> tuple[float, bool, float]:
    """Return the sort key of a configuration: α, then budget, shares before entries."""
    return config.mean_alpha, isinstance(config.budget.value, int), float(config.budget.value)


def pair_statistics(trace: pk.Trace, first: int, second: int) -> Iterator[Statistic]:
    """Yield the statistics of two configurations: heads, and drift after the middle and the last layer.

    `first` and `second` are the indices of baseline and treatment.
    """
    for kind, name in (("isolated", "noise_floor_isolated"), ("propagated", "noise_floor")):
        both, floor = variable(trace, f"perturbation_{kind}"), variable(trace, name)
        better = (signs_beyond_noise(both[:, first], both[:, second], floor) == 1).reshape(len(both), -1)
        flat = both.reshape(*both.shape[:2], -1)
        share = intervals.share_kind(better.shape[1])
        yield mean_statistic(f"share of heads better, {kind}", share, better.mean(axis=1))
        yield ratio_statistic(f"ratio of ΣL, {kind}", flat[:, second].sum(axis=1), flat[:, first].sum(axis=1))
        yield median_head_statistic(f"median head's ratio, {kind}", flat[:, second], flat[:, first])
    drift = variable(trace, "hidden_drift_l1")
    for layer in (drift.shape[2] // 2, -1):
        yield ratio_statistic("ratio of drift", drift[:, second, layer], drift[:, first, layer])


def config_statistics(trace: pk.Trace, config: int) -> Iterator[Statistic]:
    """Yield the statistics of the configuration at an index: σ, S, drift, KL, and growth over the steps."""
    for name, words in (("sigma_stage1", "σ"), ("retained_mass", "S")):
        above = variable(trace, name)[:, config] > EVIDENCE
        share = intervals.rare_share_kind(above[0].size)
        yield mean_statistic(f"share of heads with {words} > 0.5", share, above.mean(axis=(1, 2)))
    levels = {
        "last layer's drift": variable(trace, "hidden_drift_l1")[:, config, -1],
        "KL": variable(trace, "logit_kl")[:, config],
    }
    for name, each in levels.items():
        yield mean_statistic(f"mean of {name}", intervals.POSITIVE, each)
        yield Statistic(f"median of {name}", intervals.POSITIVE, None, each)
    third = trace.run.steps // LEAST_STEPS
    if third and trace.measured[trace.ok].all():
        moved, norms = (
            np.asarray(trace.get(name, "coverage"), dtype=np.float64)
            for name in ("perturbation_propagated", "output_norm")
        )
        relative = moved[:, config].sum(axis=(2, 3)) / norms.sum(axis=(2, 3))
        yield ratio_statistic(
            "growth over the steps", relative[:, -third:].mean(axis=1), relative[:, :third].mean(axis=1)
        )


def rank_statistics(trace: pk.Trace, places: Sequence[int]) -> Iterator[Statistic]:
    """Yield the rank correlations of θ and 1 − S with L over configurations at `places`; none of fewer than three."""
    if len(places) >= LEAST_SELECTIONS:
        moved = variable(trace, "perturbation_isolated")[:, places]
        for bound in (variable(trace, "theta"), 1 - variable(trace, "retained_mass")):
            sides = (np.moveaxis(side, 1, 0) for side in (bound[:, places], moved))
            found = pk.stats.rank_correlation.spearman(*sides)
            yield mean_statistic("rank correlation of a bound", intervals.CORRELATION, np.nanmean(found, axis=(1, 2)))


def pick_statistics(trace: pk.Trace, pair: Sequence[int]) -> Iterator[Statistic]:
    """Yield how much more often than 1 − S θ and θ̂ tell which of two configurations perturbs less.

    Heads count where σ > ½ on both sides, and neither L nor any bound is equal. None where a sample has no such head.
    `pair`: the indices of both.
    """
    bounds = variable(trace, "theta"), variable(trace, "theta_hat"), 1 - variable(trace, "retained_mass")
    values = [array[:, pair] for array in (variable(trace, "perturbation_isolated"), *bounds)]
    counted = (variable(trace, "sigma_stage1")[:, pair] > EVIDENCE).all(axis=1)
    counted &= np.all([one[:, 0] != one[:, 1] for one in values], axis=0)
    lower, *others = (one[:, 1] < one[:, 0] for one in values)
    right = [np.where(counted, other == lower, np.nan) for other in others]
    *shares, mass = (intervals.mean_where_known(each, (1, 2)) for each in right)
    for share in shares:
        if not np.isnan(share).any():
            yield mean_statistic("right picks of a bound less those of 1 − S", intervals.DIFFERENCE, share - mass)


def coverage(one: Statistic, drawn: Indices, bootstrap: bool = False) -> dict[str, tuple[float, float]]:
    """Return method -> share of draws that hold the truth, and median width over it; `drawn` is (draw, sample)."""
    if one.of is None:
        found = intervals.of_medians(one.each[drawn].T)
        assert found is not None  # a draw has several samples
        return {"ours": _coverage_and_width(float(np.median(one.each)), found.low, found.high)}
    population, samples = len(one.each), drawn.shape[1]
    counts = np.stack([np.bincount(row, minlength=population) for row in drawn]).astype(float)
    truth = float(one.of(np.full((1, population), 1 / population))[0])
    value = one.of(counts / samples)
    single = np.eye(population)
    left_out = np.stack([one.of((counts - single[drawn[:, place]]) / (samples - 1)) for place in range(samples)])
    student = intervals.StatisticKind(samples, limits=one.kind.limits)
    kinds = {
        "Student's t": student,
        "t, log": intervals.StatisticKind(samples, log=True, limits=one.kind.limits),
        "ours": one.kind,
    }
    told = {
        name: _coverage_and_width(truth, *intervals.jackknife(value, left_out, kind)) for name, kind in kinds.items()
    }
    if bootstrap:
        told["percentile bootstrap"] = _coverage_and_width(
            truth, *_bootstrap_ends(one.of, drawn[:RESAMPLED], population)
        )
    return told


def _bootstrap_ends(of: Callable[[Floats], Floats], drawn: Indices, population: int) -> tuple[Floats, Floats]:
    """Return the ends of each draw's percentile bootstrap, (draw,), of `Statistic.of`; `drawn`: (draw, sample)."""
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


def _coverage_and_width(truth: float, low: Floats, high: Floats) -> tuple[float, float]:
    """Return the share of (draw,) intervals that hold the truth, and their median width over it; over 1 if it is 0."""
    slack = 1e-9 * abs(truth)
    held = (low - slack <= truth) & (truth <= high + slack)
    return float(held.mean()), float(np.median(high - low) / (abs(truth) or 1.0))


def table(trace: pk.Trace, draws: int, sizes: Sequence[int] = SAMPLES, bootstrap: bool = False) -> Table:
    """Return the table of coverage, a row per statistic and method, a column per n: 'worst, median; width'."""
    drawn = [np.random.default_rng(0).integers(0, int(trace.ok.sum()), size=(draws, size)) for size in sizes]
    rows: dict[tuple[str, str], list[list[tuple[float, float]]]] = {}
    for one in statistics(trace):
        if one.of is None or np.ptp(one.each) > 0:  # what is the same in every sample cannot be missed
            for place, each in enumerate(drawn):
                for method, told in coverage(one, each, bootstrap).items():
                    rows.setdefault((one.name, method), [[] for _ in sizes])[place].append(told)
    heads = ["statistic", "method", "configurations", *(f"n = {size}: worst, median; width" for size in sizes)]
    cells = [[*key, str(len(by_size[0])), *map(_cell, by_size)] for key, by_size in rows.items()]
    return f"coverage of {draws} draws from {int(trace.ok.sum())} samples", heads, cells


def _cell(told: list[tuple[float, float]]) -> str:
    """Return worst and median coverage and median width of several configurations: '91.0 %, 94.5 %; 0.3'."""
    held, width = (np.array(part) for part in zip(*told, strict=True))
    return f"{100 * held.min():.1f} %, {100 * np.median(held):.1f} %; {np.median(width):.2g}"


def study(asked: argparse.Namespace) -> None:
    """Read or measure the population, draw from it, and write the table."""
    configs = [config for preset in PRESETS for config in pk.grid(128, preset=preset, selection=CONTENDERS)]
    trace = common.read_or_measure(asked, configs)
    draws, sizes = (50, (4,)) if asked.short else (asked.draws, asked.drawn)
    common.write_tables(asked, [table(trace, draws, sizes, asked.bootstrap)])


if __name__ == "__main__":
    parser = common.options(__doc__ or "", samples=40)
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each n [%(default)s]")
    parser.add_argument("--drawn", type=int, nargs="+", default=SAMPLES, help="samples of a draw, n %(default)s")
    parser.add_argument("--bootstrap", action="store_true", help="add the percentile bootstrap, an hour")
    common.main(study, parser)

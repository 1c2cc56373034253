"""How often two one-sided tests find equivalence, and whether the n that is told decides.

`python studies/equivalence.py [DRAWS]` prints the tables of docs/explanation/statistics.md. Drawn from invented
populations of prompts, without any trace: a control's sums, lognormal with deviation 0.7, and a method's, which are
`ratio` times these and times lognormal noise of mean 1. In an uneven population one prompt in ten has three times the
noise of the others. The spread is that of `pk.stats.equivalence`, δ is 5 %. The first table is of verdicts: how often
equivalence is found at a true ratio of 1 + δ; at 1; and there a difference. The second is of the n that would decide,
how many runs of so many prompts do, and what undecided runs of 8 and 20 prompts tell instead: the median with the
middle 80 % of runs, and how many are undecided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from common import Floats, Table, simulate
from numpy.typing import NDArray

import perturbkv as pk

intervals, equivalence = pk.stats.intervals, pk.stats.equivalence
MARGIN = 0.05
"""δ: sums of which one is within 5 % of the other are equivalent."""
DRAWS, FEW = 4000, 200
SAMPLES = (8, 16, 40, 100)
SPREADS = (0.02, 0.05, 0.1, 0.2, 0.4)
SETTINGS = ((1.3, 0.3), (1.1, 0.1), (1.0, 0.1), (1.03, 0.05))
"""True ratio and spread of what the second table asks."""
_DEVIATION = 0.7
_WEIGHT = math.exp(_DEVIATION**2 / 2)
"""Samples of unequal weight spread by so much more: √E[X²] / E[X]."""
_SEED = 4


def draw_sums(ratio: float, spread: float, samples: int, draws: int, uneven: bool = False) -> tuple[Floats, Floats]:
    """Draw (sample, draw) sums of a method and of its control, with this ratio of expectations and this spread."""
    source = np.random.default_rng(_SEED)
    control = source.lognormal(sigma=_DEVIATION, size=(samples, draws))
    even = spread / _WEIGHT
    least = even / math.sqrt(0.9 + 0.1 * 3**2)
    widths = np.where(source.random((samples, draws)) < 0.1, 3 * least, least) if uneven else np.full(1, even)
    return ratio * control * np.exp(widths * source.standard_normal((samples, draws)) - widths**2 / 2), control


def verdicts(method: Floats, control: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return (draw,) whether a difference is decided, and whether equivalence is, from (sample, draw) sums."""
    value = method.sum(axis=0) / control.sum(axis=0)
    left_out = (method.sum(axis=0) - method) / (control.sum(axis=0) - control)
    low, high = intervals.jackknife(value, left_out, intervals.RATIO)
    least, most = intervals.jackknife(value, left_out, equivalence.ONE_SIDED)
    return (low > 1) | (high < 1), (least >= 1 / (1 + MARGIN)) & (most <= 1 + MARGIN)


def verdict_cell(spread: float, samples: int, draws: int, uneven: bool) -> str:
    """Return '1.2 %; 85 %, 3.1 %': equivalent at a true ratio of 1 + δ; at 1, and there a difference."""
    _, wrong = verdicts(*draw_sums(1 + MARGIN, spread, samples, draws, uneven))
    differs, right = verdicts(*draw_sums(1, spread, samples, draws, uneven))
    return f"{100 * wrong.mean():.1f} %; {100 * right.mean():.0f} %, {100 * differs.mean():.1f} %"


def samples_told(ratio: float, spread: float, samples: int, draws: int) -> list[int]:
    """Return the n that would decide, as each undecided one of `draws` runs tells it."""
    methods, controls = draw_sums(ratio, spread, samples, draws)
    needed = [equivalence.decide(*run).samples_to_decide for run in zip(methods.T, controls.T, strict=True)]
    return [count for count in needed if count is not None]


def deciding_share(ratio: float, spread: float, samples: int, draws: int) -> float:
    """Return the share of runs of so many prompts that decide a difference, or equivalence."""
    differs, within = verdicts(*draw_sums(ratio, spread, samples, draws))
    return float((differs | within).mean())


def tables(draws: int) -> Iterator[Table]:
    """Yield the table of verdicts, and that of the n that would decide."""
    rows = [
        [
            f"{spread:g}{', uneven' if uneven else ''}",
            *(verdict_cell(spread, samples, draws, uneven) for samples in SAMPLES),
        ]
        for uneven in (False, True)
        for spread in SPREADS
    ]
    yield "verdicts", ["spread", *(f"n = {samples}" for samples in SAMPLES)], rows
    heads = ["ratio, spread", "n by the true ratio and spread", "of so many, decide", "told by 8", "told by 20"]
    yield "the n that would decide", heads, [decision_row(*setting, draws) for setting in SETTINGS]


def decision_row(ratio: float, spread: float, draws: int) -> list[str]:
    """Return a setting's row: the n that would decide, how many runs of it do, and what small runs tell instead."""
    count = equivalence.samples_to_decide(ratio, spread) or 0
    share = deciding_share(ratio, spread, count, draws)
    told_by = []
    for samples in (8, 20):
        found = samples_told(ratio, spread, samples, draws // 8)
        low, middle, high = np.quantile(found, (0.1, 0.5, 0.9)) if found else [math.nan] * 3
        told_by.append(f"{middle:.0f} [{low:.0f}, {high:.0f}] ({100 * len(found) / (draws // 8):.0f} %)")
    return [f"{ratio:g}, {spread:g}", str(count), f"{100 * share:.0f} %", *told_by]


if __name__ == "__main__":
    simulate(__doc__ or "", tables, DRAWS, FEW)
